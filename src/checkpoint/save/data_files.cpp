#include "checkpoint/save/data_files.h"

#include <exception>
#include <optional>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/open/located.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/copies.h"
#include "checkpoint/save/place.h"
#include "checkpoint/save/planned_leaf.h"
#include "format/dcp/dcp.h"
#include "tessera/data_files.h"
#include "tessera/error.h"
#include "tessera/stores.h"

namespace tessera {
namespace {

constexpr std::size_t kFilesWindow = 1
                                     << 20;  // bytes: stays in the cache between checksum and write

// What `elements` gives, and `meter` hears of the bytes.
ElementSource counted(ElementSource elements, Meter& meter) {
  return [elements = std::move(elements), &meter](std::int64_t begin, std::int64_t count,
                                                  MutableByteView scratch) {
    const ByteView bytes = elements(begin, count, scratch);
    meter.add(bytes.size());
    return bytes;
  };
}

void write_item(ItemWriter& writer, const Leaf& leaf, OwnItem& item, Meter& meter) {
  dcp::Item written;
  if (leaf.value.is(Value::Kind::tensor)) {
    const Tensor& tensor = leaf.value.as_tensor();
    TensorReader reader(tensor, leaf.name);
    written = writer.tensor(tensor.dtype, item.chunk.box.sizes,
                            counted(elements_of(tensor, item.chunk, reader), meter));
  } else {
    written = writer.value(leaf.value);
  }
  if (writer.archive_size() != item.place.length) {
    throw Error(ErrorCode::mismatch, "the item has " + std::to_string(writer.archive_size()) +
                                         " bytes, " + std::to_string(item.place.length) +
                                         " were planned: did the value change?")
        .at_key(leaf.name);
  }
  item.place.offset = written.offset;
  item.place.length = written.length;
}

}  // namespace

std::optional<int> zstd_level(const FileRules& rules) {
  return rules.are_compressed() ? std::optional(rules.level) : std::nullopt;
}

std::string data_file_name(int rank, int file, const std::string& attempt) {
  return "__" + std::to_string(rank) + "_" + std::to_string(file) + "_" + attempt + ".distcp";
}

bool is_data_file_of(std::string_view name, const std::string& attempt) {
  return name.starts_with("__") && name.ends_with("_" + attempt + ".distcp");
}

DataDigest write_data_file(Store& store, const DataFile& file, Meter& meter) {
  TailedSink sink(store.create(file.name, IfExists::fail));
  ItemWriter writer(sink, file.name, kFilesWindow, file.zstd_level);
  for (const std::size_t index : file.plan.files[static_cast<std::size_t>(file.file)]) {
    OwnItem& item = file.plan.items[index];
    write_item(writer, file.leaves[item.leaf], item, meter);
    sink.end_item(writer.written());
  }
  require_going_on(meter.stop());
  const DataDigest digest = sink.finish();
  sink.commit();
  return digest;
}

std::uint64_t bytes_to_write(const std::vector<Leaf>& leaves, const OwnPlan& plan) {
  std::uint64_t bytes = 0;
  for (const OwnItem& item : plan.items) {
    const Value& value = leaves[item.leaf].value;
    if (item.is_written && value.is(Value::Kind::tensor))
      bytes += byte_size(value.as_tensor().dtype, item.chunk.box.sizes);
  }
  return bytes;
}

void remove_quietly(Store& store, const std::string& name) noexcept {
  try {
    store.remove(name);
  } catch (const std::exception&) {
    return;  // memory may be short, too
  }
}

namespace {

// All elements of the tensor, which one piece has.
HeldChunk whole_chunk(const Tensor& tensor) {
  std::vector<HeldChunk> chunks = held_chunks(tensor);
  if (chunks.size() == 1 && chunks.front().box == whole(tensor.shape)) return chunks.front();
  throw Error(ErrorCode::unsupported, "an item is made of a tensor that is held whole");
}

DcpItem item_of(dcp::Item item) {
  return {std::move(item.path), {item.offset, item.length}, std::move(item.transforms)};
}

DcpEntry entry_of(dcp::Entry entry) {
  DcpEntry made{
      std::move(entry.name), std::move(entry.path), {}, std::move(entry.shape), {}, {}, {}};
  if (!entry.is_tensor) {
    made.items.push_back(item_of(std::move(entry.item)));
    return made;
  }
  made.dtype = entry.dtype;
  made.requires_grad = entry.requires_grad;
  made.chunks.reserve(entry.chunks.size());
  made.items.reserve(entry.chunks.size());
  for (dcp::Chunk chunk : entry.chunks) {
    made.chunks.push_back(std::move(chunk.box));
    made.items.push_back(item_of(std::move(chunk.item)));
  }
  return made;
}

}  // namespace

std::string new_attempt() {
  return random_attempt();
}

struct DataFileWriter::State {
  State(std::shared_ptr<Store> in, const std::string& file)
      : store(std::move(in)),
        name(file),
        sink(store->create(file, IfExists::fail)),
        writer(sink, file, kFilesWindow) {}

  ItemExtent end(const dcp::Item& item) {
    sink.end_item(item.offset + item.length);
    return {item.offset, item.length};
  }

  std::shared_ptr<Store> store;
  std::string name;
  TailedSink sink;
  ItemWriter writer;
};

DataFileWriter::DataFileWriter(const Location& where, const std::string& name)
    : state_(std::make_unique<State>(directory_store(where), name)) {}
DataFileWriter::DataFileWriter(DataFileWriter&&) noexcept = default;
DataFileWriter& DataFileWriter::operator=(DataFileWriter&&) noexcept = default;
DataFileWriter::~DataFileWriter() = default;

ItemExtent DataFileWriter::tensor(const Tensor& tensor, const std::stop_token& stop) {
  const HeedStop heeding(stop);
  const HeldChunk chunk = whole_chunk(tensor);
  TensorReader reader(tensor, "");
  const ElementSource elements = elements_of(tensor, chunk, reader);
  return state_->end(
      state_->writer.tensor(tensor.dtype, tensor.shape,
                            [&](std::int64_t begin, std::int64_t count, MutableByteView scratch) {
                              require_going_on(stop);
                              return elements(begin, count, scratch);
                            }));
}

ItemExtent DataFileWriter::value(const Value& value) {
  return state_->end(state_->writer.value(value));
}

ItemExtent DataFileWriter::archive(ByteView bytes) {
  return state_->end(state_->writer.archive(bytes));
}

DataFileReceipt DataFileWriter::finish() {
  const DataDigest digest = state_->sink.finish();
  state_->sink.commit();
  return {state_->name, digest.size, digest.tail, "a writer on " + host_name()};
}

struct DcpDirectory::State {
  State(std::shared_ptr<Store> in, const DcpDirectoryOptions& options)
      : store(std::move(in)), hold(store->hold()) {
    store->require_writable(probe_name(random_attempt()), options.single_writer);
    const Present present = present_in(*store);
    if (!options.overwrite) require_no_checkpoint(present, store->name());
    replaced = present.metadata;
    leftovers.find(*store, present, hold != nullptr || options.single_writer);
  }

  void require_there() const {
    if (hold) hold->require_there();
  }

  void publish(ByteView metadata, const std::string& save_id,
               const std::vector<DataFileReceipt>& receipts, const std::stop_token& stop) {
    Commit commit;
    commit.save_id = save_id;
    commit.replaced = replaced;
    std::vector<Sought> sought;
    for (const DataFileReceipt& file : receipts) {
      sought.push_back({file.name, file.writer, file.size});
      commit.digests.emplace(file.name, FileDigests{file.size, {}, 0, file.tail});
    }
    const auto there = [this] { require_there(); };
    require_in_store(sought, *store, store->list_level(), {stop, there});
    require_going_on(stop);
    commit.last_look = there;
    commit_dcp(
        *store, [&](const auto& write) { write(metadata); }, std::move(commit));
  }

  void withdraw(const std::string& save_id, const std::vector<DataFileReceipt>& receipts) noexcept {
    for (const DataFileReceipt& file : receipts) remove_quietly(*store, file.name);
    remove_quietly(*store, side_file_name(save_id));
  }

  std::shared_ptr<Store> store;
  std::unique_ptr<StoreHold> hold;  // null: the store has none
  Replaced replaced;
  Leftovers leftovers;
};

DcpDirectory::DcpDirectory(const Location& where, const DcpDirectoryOptions& options)
    : state_(std::make_unique<State>(directory_store(where), options)) {}
DcpDirectory::DcpDirectory(DcpDirectory&&) noexcept = default;
DcpDirectory& DcpDirectory::operator=(DcpDirectory&&) noexcept = default;
DcpDirectory::~DcpDirectory() = default;

void DcpDirectory::commit(ByteView metadata, const std::string& save_id,
                          const std::vector<DataFileReceipt>& receipts,
                          const std::stop_token& stop) {
  if (!fits_file_name(save_id))
    throw Error(ErrorCode::invalid_argument, "a save's id is a text that fits a file name");
  try {
    const HeedStop heeding(stop);
    state_->publish(metadata, save_id, receipts, stop);
  } catch (...) {
    if (!is_visible(*state_->store, save_id)) state_->withdraw(save_id, receipts);
    throw;
  }
  state_->leftovers.after_commit(*state_->store);
}

DcpMetadata decode_dcp_metadata(ByteView metadata) {
  dcp::Metadata decoded = dcp::decode(metadata);
  DcpMetadata made{std::move(decoded.version),
                   std::move(decoded.checkpoint_id),
                   std::move(decoded.save_id),
                   decoded.has_planner_data,
                   {}};
  made.entries.reserve(decoded.entries.size());
  for (dcp::Entry& entry : decoded.entries) made.entries.push_back(entry_of(std::move(entry)));
  return made;
}

}  // namespace tessera
