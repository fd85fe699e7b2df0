// Saving by N ranks:
//   1. every rank proposes what it holds; rank 0 plans and tells each rank what to write
//   (checkpoint-rows P-12 to P-14);
//   2. every rank writes its data files `__{rank}_{n}_{attempt}.distcp`, durable and complete;
//   3. every rank reports where its items are, with a sample of each chunk that others hold too;
//   rank 0 compares the samples;
//   4. rank 0 writes the side file with everybody's digests, durable, and then publishes
//   `.metadata` in one rename: the commit.
// Before 1, rank 0 removes what the save before last left: files that the present `.metadata` does
// not name. What this save replaces stays until the next one, for readers that still follow it. A
// failure in any step reaches every rank (checkpoint-rows P-03) before the next one begins. Until 4
// an older checkpoint in the directory is untouched, and a crash leaves at most files that nobody
// names.
#include <algorithm>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "base/parallel.h"
#include "base/random_id.h"
#include "base/stop.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/copies.h"
#include "checkpoint/save/leftovers.h"
#include "checkpoint/save/save_dcp.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/tree/tree_json.h"
#include "comm/long_work.h"
#include "comm/text.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr std::size_t kWindow = 1 << 20;  // bytes: stays in the cache between checksum and write

// Whether the piece's elements lie in the memory of the host or of a device one after the other, as
// they are meant.
bool is_plain(const Piece& piece, const Shape& sizes) {
  if (!piece.storage) return false;  // no elements, then
  const bool dense = piece.strides.empty() || piece.strides == contiguous_strides(sizes);
  return dense && !piece.conj && !piece.neg && is_in_memory(*piece.storage);
}

// The elements of one piece. Where they lie densely they are copied from a device alone, and ahead.
ElementSource elements_of(const Tensor& tensor, const WriteItem& item, TensorReader& reader) {
  const Piece& piece = tensor.pieces[item.piece];
  const std::size_t element = size_of(tensor.dtype);
  if (is_plain(piece, item.box.sizes)) {
    const std::uint64_t first = static_cast<std::uint64_t>(piece.storage_offset) * element;
    const std::uint64_t size = byte_size(tensor.dtype, item.box.sizes);
    auto bytes = std::make_shared<StorageReader>(*piece.storage, first, first + size);
    return [bytes = std::move(bytes), first, element](std::int64_t begin, std::int64_t count,
                                                      MutableByteView scratch) {
      return bytes->view(first + static_cast<std::uint64_t>(begin) * element,
                         scratch.first(static_cast<std::size_t>(count) * element));
    };
  }
  return
      [&reader, &item, element](std::int64_t begin, std::int64_t count, MutableByteView scratch) {
        reader.read(item.box, begin, count, scratch.data());
        return ByteView(scratch).first(static_cast<std::size_t>(count) * element);
      };
}

// A sample of one piece. Of a device all windows are on their way at once.
std::uint64_t sample_of_piece(const Tensor& tensor, const WriteItem& item) {
  const Piece& piece = tensor.pieces[item.piece];
  const std::size_t element = size_of(tensor.dtype);
  const std::int64_t count = numel(item.box);
  TensorReader reader(tensor, item.name);
  if (!is_plain(piece, item.box.sizes) || !piece.storage->device)
    return sample_of(elements_of(tensor, item, reader), count, element);
  std::vector<std::byte> bytes;
  std::vector<ReadRange> ranges;
  const std::vector<FlatRange> windows = sampled(count, element);
  for (const FlatRange& window : windows)
    bytes.resize(bytes.size() + static_cast<std::size_t>(window.end - window.begin) * element);
  MutableByteView rest = bytes;
  for (const FlatRange& window : windows) {
    const auto size = static_cast<std::size_t>(window.end - window.begin) * element;
    ranges.push_back({static_cast<std::uint64_t>(piece.storage_offset + window.begin) * element,
                      rest.first(size)});
    rest = rest.subspan(size);
  }
  DeviceReader(piece.storage->device, 0, 0).read_ranges(ranges);
  return sample_of([next = ranges.begin()](std::int64_t, std::int64_t,
                                           MutableByteView) mutable { return (next++)->out; },
                   count, element);
}

// What `elements` gives, and `meter` hears of the bytes.
ElementSource counted(ElementSource elements, Meter& meter) {
  return [elements = std::move(elements), &meter](std::int64_t begin, std::int64_t count,
                                                  MutableByteView scratch) {
    const ByteView bytes = elements(begin, count, scratch);
    meter.add(bytes.size());
    return bytes;
  };
}

class Saver {
 public:
  Saver(const Value& tree, std::shared_ptr<Store> store, Group& group, const SaveOptions& options)
      : leaves_(flatten(tree)), store_(std::move(store)), group_(group), options_(options) {}

  IoReport run() {
    plan();
    try {
      agree_on_long_work(group_, "writing a checkpoint", options_.stop,
                         [this](const std::stop_token& stop) { write(stop); });
    } catch (...) {
      remove_written();
      throw;
    }
    commit();
    meter_->finish();
    return counters_.report();
  }

 private:
  [[nodiscard]] bool leads() const { return group_.rank() == 0; }

  void plan() {
    agree(group_, "planning a checkpoint", [this] {
      require_savable();
      if (leads()) make_room();
    });
    agree(group_, "planning a checkpoint", [this] { proposal_ = propose(leaves_); });
    attempt_ = to_text(group_.broadcast(to_bytes(attempt_)));
    const std::vector<Bytes> messages = group_.gather(encode_proposal(proposal_));
    std::vector<Bytes> answers;
    agree(group_, "planning a checkpoint", [&] {
      if (leads()) answers = answers_to(messages);
    });
    orders_ = decode_orders(group_.scatter(answers));
  }

  void require_savable() const {
    require_going_on(options_.stop);
    require_threads(options_.threads);
    for (const Leaf& leaf : leaves_) {
      if (leaf.value.is(Value::Kind::tensor)) require_readable(leaf.value.as_tensor(), leaf.name);
    }
  }

  // Rank 0, before anything is written.
  void make_room() {
    if (!options_.overwrite) require_no_checkpoint(*store_, store_->name());
    remove_leftovers(*store_);
    attempt_ = random_attempt();
  }

  // Rank 0: plans what all ranks propose; what each is to do.
  std::vector<Bytes> answers_to(const std::vector<Bytes>& messages) {
    for (const Bytes& message : messages) proposals_.push_back(decode_proposal(message));
    plan_ = plan_save(proposals_);
    std::vector<Bytes> answers;
    for (std::size_t rank = 0; rank < proposals_.size(); ++rank) {
      answers.push_back(encode_orders(
          {plan_.assignment[rank], plan_.copied[rank], options_.require_equal_copies}));
    }
    return answers;
  }

  // The rank's items dealt to files: each to the file with the fewest bytes so far, values first.
  [[nodiscard]] std::vector<std::vector<std::size_t>> deal() const {
    const auto files = static_cast<std::size_t>(options_.threads);
    std::vector<std::vector<std::size_t>> dealt(
        std::min(files, std::max<std::size_t>(orders_.assigned.size(), 1)));
    std::vector<std::uint64_t> load(dealt.size(), 0);
    std::vector<std::size_t> order = orders_.assigned;
    std::stable_partition(order.begin(), order.end(),
                          [this](std::size_t i) { return !proposal_[i].is_tensor; });
    for (const std::size_t i : order) {
      const auto least =
          static_cast<std::size_t>(std::min_element(load.begin(), load.end()) - load.begin());
      dealt[least].push_back(i);
      if (proposal_[i].is_tensor) {
        load[least] += byte_size(proposal_[i].dtype, proposal_[i].box.sizes);
      }
    }
    return dealt;
  }

  [[nodiscard]] std::uint64_t assigned_bytes() const {
    std::uint64_t bytes = 0;
    for (const std::size_t i : orders_.assigned) {
      const WriteItem& item = proposal_[i];
      if (item.is_tensor) bytes += byte_size(item.dtype, item.box.sizes);
    }
    return bytes;
  }

  void write(const std::stop_token& stop) {
    meter_.emplace(options_.progress, assigned_bytes(), stop);
    take_samples();
    if (orders_.assigned.empty()) return;
    const auto dealt = deal();
    std::vector<std::vector<WrittenItem>> written(dealt.size());
    parallel_for(options_.threads, dealt.size(),
                 [&](std::size_t file) { written[file] = write_file(file, dealt[file]); });
    auto& all = written_.items;
    for (const auto& items : written) all.insert(all.end(), items.begin(), items.end());
    std::sort(all.begin(), all.end(),
              [](const WrittenItem& a, const WrittenItem& b) { return a.item < b.item; });
  }

  void take_samples() {
    written_.samples.resize(orders_.copied.size());
    parallel_for(options_.threads, orders_.copied.size(), [&](std::size_t i) {
      require_going_on(meter_->stop());
      const WriteItem& item = proposal_[orders_.copied[i]];
      written_.samples[i] = sample_of_piece(leaves_[item.leaf].value.as_tensor(), item);
    });
  }

  std::vector<WrittenItem> write_file(std::size_t file, const std::vector<std::size_t>& items) {
    const std::string name = "__" + std::to_string(group_.rank()) + "_" + std::to_string(file) +
                             "_" + attempt_ + ".distcp";
    DigestSink sink(store_->create(name, IfExists::fail));
    ItemWriter writer(sink, name, kWindow);
    std::vector<WrittenItem> written;
    for (const std::size_t index : items) {
      const WriteItem& item = proposal_[index];
      const Leaf& leaf = leaves_[item.leaf];
      if (!item.is_tensor) {
        written.push_back({index, writer.value(leaf.value)});
        continue;
      }
      const Tensor& tensor = leaf.value.as_tensor();
      TensorReader reader(tensor, leaf.name);
      written.push_back(
          {index, writer.tensor(item.dtype, item.box.sizes,
                                counted(elements_of(tensor, item, reader), *meter_))});
    }
    require_going_on(meter_->stop());
    sink.commit();
    IoReport report;
    report.bytes_written = writer.written();
    counters_.add(report);
    const std::lock_guard lock(mutex_);
    digests_[name] = {writer.written(), sink.digests(), 0};
    return written;
  }

  // Of a save that ended early; what cannot be removed is left to the next save.
  void remove_written() noexcept {
    for (const auto& [name, digests] : digests_) {
      try {
        store_->remove(name);
      } catch (const Error&) {
        continue;
      }
    }
  }

  // What ranks hold alike by their trees' word, and not in fact.
  [[nodiscard]] std::optional<UnlikeCopies> unlike_copies(
      const std::vector<Written>& reports) const {
    std::vector<std::vector<std::uint64_t>> samples;
    for (const Written& report : reports) samples.push_back(report.samples);
    return compare_copies(proposals_, plan_, samples);
  }

  // Before the last gather: a rank that removes its files here can take part in no commit.
  void require_equal_copies(const std::vector<Bytes>& messages) try {
    agree(group_, "comparing what several ranks hold", [&] {
      if (!leads()) return;
      if (const auto unlike = unlike_copies(decode_all(messages)))
        throw Error(ErrorCode::mismatch, to_string(*unlike)).at_key(unlike->key);
    });
  } catch (...) {
    remove_written();
    throw;
  }

  [[nodiscard]] static std::vector<Written> decode_all(const std::vector<Bytes>& messages) {
    std::vector<Written> reports;
    for (const Bytes& message : messages) reports.push_back(decode_written(message));
    return reports;
  }

  void warn_of_unlike_copies(const std::vector<Written>& reports) const {
    if (const auto unlike = unlike_copies(reports)) log(LogLevel::warning, to_string(*unlike));
  }

  [[nodiscard]] dcp::Metadata metadata_of_all(const std::vector<Written>& reports) const {
    std::vector<std::vector<WrittenItem>> written;
    for (const Written& report : reports) written.push_back(report.items);
    dcp::Metadata metadata = metadata_of(proposals_, written);
    metadata.version = "1.0.0";
    metadata.checkpoint_id = store_->name();
    return metadata;
  }

  void commit() {
    const std::vector<Bytes> messages = group_.gather(encode_written(written_));
    if (orders_.equal_copies) require_equal_copies(messages);
    const std::vector<Bytes> digests_messages = group_.gather(encode_digests(digests_));
    agree(group_, "committing a checkpoint", [&] {
      if (!leads()) return;
      const std::vector<Written> reports = decode_all(messages);
      if (!orders_.equal_copies) warn_of_unlike_copies(reports);
      dcp::Metadata metadata = metadata_of_all(reports);
      for (const Bytes& message : digests_messages) digests_.merge(decode_digests(message));
      commit_dcp(*store_, metadata, std::move(digests_), encode_types(leaves_),
                 options_.overwrite ? IfExists::replace : IfExists::fail);
    });
  }

  std::vector<Leaf> leaves_;
  std::shared_ptr<Store> store_;
  Group& group_;
  const SaveOptions& options_;
  std::string attempt_;              // part of every data file's name
  std::vector<WriteItem> proposal_;  // this rank's
  Orders orders_;                    // to this rank
  Written written_;
  std::vector<std::vector<WriteItem>> proposals_;  // rank 0: everybody's
  SavePlan plan_;                                  // rank 0
  IoCounters counters_;
  std::optional<Meter> meter_;  // of what this rank writes
  std::mutex mutex_;
  DigestsByName digests_;  // of this rank's files; guarded by mutex_ while they are written
};

}  // namespace

std::function<IoReport()> dcp_save(const Value& tree, std::shared_ptr<Store> store, Group& group,
                                   const SaveOptions& options) {
  const auto saver = std::make_shared<Saver>(tree, std::move(store), group, options);
  return [saver] { return saver->run(); };
}

}  // namespace tessera
