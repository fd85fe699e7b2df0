#include "checkpoint/load/opened.h"

#include <span>
#include <utility>

#include "base/digest.h"
#include "base/parallel.h"
#include "base/stop.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/open.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kOperation = "opening a checkpoint";

// Rank 0 says it in front of its catalog, if there is one.
enum class Opening : std::uint8_t { by_all, by_one, told };

// Equal on ranks that have opened the same save.
Bytes identity_of(const Checkpoint& checkpoint) {
  RunningDigest files;
  for (const ObjectInfo& file : checkpoint.files) {
    files.add(std::as_bytes(std::span(file.name.data(), file.name.size() + 1)));
    files.add(std::as_bytes(std::span(&file.size, 1)));
  }
  return MessageWriter().text(checkpoint.save_id).number(files.value()).take();
}

// Where it is replaced meanwhile, ranks may open the old save
// and the new one: then all open it once more.
std::unique_ptr<Checkpoint> opened_by_all(const Location& where, const LoadOptions& options,
                                          Group& group) {
  constexpr int kAttempts = 3;
  auto checkpoint = std::make_unique<Checkpoint>();
  const auto contribute = [&] {
    require_going_on(options.stop);
    *checkpoint = Checkpoint::open(where);
    return identity_of(*checkpoint);
  };
  // No identity is empty.
  const auto same = [](const Bytes& left, const Bytes& right) {
    return left == right ? left : Bytes();
  };
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const Bytes all =
        confer(group, kOperation, {contribute, same, [](Bytes common) { return common; }});
    if (!all.empty()) return checkpoint;
  }
  throw Error(ErrorCode::conflict,
              "the ranks have opened different saves: is the checkpoint being replaced all the "
              "time, or is there another one at this place for some of them?")
      .at_path(to_string(where));
}

}  // namespace

LoadSource::LoadSource(HostCopy catalog, std::shared_ptr<Store> store)
    : catalog_(std::move(catalog)),
      parts_(
          std::make_unique<OpenedDcp>(catalog_.bytes().subspan(sizeof(Opening)), std::move(store))),
      wanted_(parts_->checkpoint().leaves.size(), Wanted::nothing) {}

LoadSource::LoadSource(HostCopy catalog, const std::string& path, std::unique_ptr<Checkpoint> own)
    : LoadSource(std::move(catalog), memory_store(path)) {
  own_ = std::move(own);
  is_told_ = true;
}

void LoadSource::want(std::size_t leaf, const Tensor& pieces) {
  if (is_told_) return;
  if (!parts_ || wanted_[leaf] == Wanted::all) return;
  if (wanted_[leaf] == Wanted::pieces) return want(leaf);
  wanted_[leaf] = Wanted::pieces;
  std::vector<Slice> slices;
  slices.reserve(pieces.pieces.size());
  for (const Piece& piece : pieces.pieces) slices.push_back(piece.slice);
  parts_->give_pieces(leaf, slices);
}

void LoadSource::want(std::size_t leaf) {
  if (is_told_) return want_told(leaf);
  if (!parts_ || wanted_[leaf] == Wanted::all) return;
  wanted_[leaf] = Wanted::all;
  parts_->give_pieces(leaf);
}

void LoadSource::want_told(std::size_t leaf) {
  if (parts_->is_untold(leaf))
    throw Error(ErrorCode::unsupported, "a value that holds tensors, which one rank cannot tell");
  Value& value = parts_->checkpoint().leaves[leaf].value;
  if (!value.is(Value::Kind::tensor)) return;
  // Nobody reads it: it says that the tensor's elements are known.
  Tensor& tensor = value.as_tensor();
  auto storage = std::make_shared<Storage>();
  storage->size = byte_size(tensor.dtype, tensor.shape);
  tensor.pieces = {Piece{whole(tensor.shape), std::move(storage), 0, {}, -1}};
}

void LoadSource::require_files() const {
  if (parts_ && !is_told_) parts_->require_files();
}

LoadSource open_for_load(const Location& where, const LoadOptions& options, Group& group) {
  std::unique_ptr<Checkpoint> told;  // what rank 0 reads for all
  const auto begin = [&] {
    require_going_on(options.stop);
    require_threads(options.threads);
  };
  const auto open = [&] {
    MessageWriter message;
    if (options.reader == LoadReader::rank_zero) {
      told = std::make_unique<Checkpoint>(Checkpoint::open(where));
      return message.number(Opening::told).rest(catalog_of(*told)).take();
    }
    std::shared_ptr<Store> store = dcp_directory(where);
    if (!store) return message.number(Opening::by_all).take();
    return message.number(Opening::by_one).rest(read_catalog(std::move(store))).take();
  };
  HostCopy catalog = copy_to_hosts(group, kOperation, begin, open);
  const auto opening = MessageReader(catalog.bytes()).number<Opening>();
  if (opening == Opening::by_all) return LoadSource(opened_by_all(where, options, group));
  std::optional<LoadSource> source;
  agree(group, kOperation, [&] {
    if (opening == Opening::told) {
      source.emplace(std::move(catalog), to_string(where), std::move(told));
    } else {
      source.emplace(std::move(catalog), store_of_directory(where));
    }
  });
  return std::move(*source);
}

}  // namespace tessera
