// A save without collectives (checkpoint-rows P-04): each rank plans, writes and commits for itself
// all that it holds. `__{rank}.metadata` appears in one rename, behind its data files.
#include "checkpoint/save/save_part.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/data_files.h"
#include "checkpoint/save/hooks.h"
#include "tessera/error.h"

namespace tessera {
namespace {

class PartSaver {
 public:
  PartSaver(const Value& tree, Store& store, int rank, const SaveOptions& options)
      : leaves_(leaves_to_save(flatten(tree), options)),
        store_(store),
        rank_(rank),
        options_(options),
        metadata_name_(rank_metadata(rank)) {}

  void plan() {
    require_going_on(options_.stop);
    require_room();
    remove_leftovers();
    plan_values();
    plan_tensors();
  }

  std::uint64_t write() {
    std::uint64_t bytes = 0;
    std::mutex mutex;
    const std::optional<int> level = zstd_level(rules_);
    Meter meter(options_.progress, bytes_to_write(leaves_, plan_), options_.stop);
    try {
      parallel_for(options_.threads, plan_.files.size(), [&](std::size_t at) {
        const int file = static_cast<int>(at);
        if (plan_.files[at].empty()) return;
        const DataDigest digest =
            write_data_file(store_, {leaves_, plan_, file, name_of(file), level}, meter);
        const std::lock_guard lock(mutex);
        bytes += digest.size;
        ++result_.files;
      });
      meter.finish();
    } catch (...) {
      remove_written();
      throw;
    }
    result_.bytes_written = bytes;
    return bytes;
  }

  SaveResult commit() {
    try {
      store_.sync();
      const std::vector<std::byte> bytes = dcp::encode(metadata());
      put(store_, metadata_name_, bytes, options_.overwrite ? IfExists::replace : IfExists::fail);
      ++result_.files;
      result_.total_bytes = result_.bytes_written + bytes.size();
    } catch (...) {
      if (!is_committed()) remove_written();
      throw;
    }
    result_.save_id = save_id_;
    return std::move(result_);
  }

 private:
  [[nodiscard]] std::string name_of(int file) const {
    return data_file_name(rank_, file, attempt_);
  }

  void require_room() const {
    require_no_metadata(store_, store_.name());
    if (!options_.overwrite && store_.exists(metadata_name_)) {
      throw Error(ErrorCode::already_exists, "this rank's part of a checkpoint is there already")
          .at_path(store_.name() + "/" + metadata_name_);
    }
  }

  // Files of earlier parts of this rank go, but for those that its present part names.
  void remove_leftovers() {
    std::set<std::string> named;
    if (store_.exists(metadata_name_))
      named = named_files(read_dcp_metadata(store_, metadata_name_));
    for (const ObjectInfo& object : store_.list_level()) {
      const bool is_mine = rank_of_data_file(object.name) == rank_ && is_attempt_name(object.name);
      if (is_mine && !named.contains(object.name)) store_.remove(object.name);
    }
  }

  // Values are planned by name, as in any save.
  void plan_values() {
    std::vector<std::size_t> values;
    for (std::size_t i = 0; i < leaves_.size(); ++i)
      if (!leaves_[i].value.is(Value::Kind::tensor)) values.push_back(i);
    std::ranges::sort(
        values, [this](std::size_t a, std::size_t b) { return leaves_[a].name < leaves_[b].name; });
    for (const std::size_t i : values) {
      OwnItem item{.leaf = i, .is_written = true};
      item.place = files_.place(rank_, item_length(leaves_[i].value), 0);
      plan_.items.push_back(std::move(item));
    }
  }

  void plan_tensors() {
    ItemLengths lengths;
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (!leaves_[i].value.is(Value::Kind::tensor)) continue;
      const Tensor& tensor = leaves_[i].value.as_tensor();
      require_readable(tensor, leaves_[i].name);
      for (HeldChunk& chunk : chunks_of(leaves_[i])) {
        OwnItem item{.leaf = i, .chunk = std::move(chunk), .is_written = true};
        const Shape& sizes = item.chunk.box.sizes;
        item.place =
            files_.place(rank_, lengths.of(tensor.dtype, sizes), byte_size(tensor.dtype, sizes));
        plan_.items.push_back(std::move(item));
      }
    }
    list_files(plan_, files_.files_of(rank_));
  }

  static std::vector<HeldChunk> chunks_of(const Leaf& leaf) {
    try {
      return held_chunks(leaf.value.as_tensor());
    } catch (Error& error) {
      throw error.at_key(leaf.name);
    }
  }

  // Leaves in their order, as the tree has them.
  [[nodiscard]] dcp::Metadata metadata() const {
    dcp::Metadata metadata;
    static_cast<dcp::Origin&>(metadata) = {"1.0.0", store_.name(), save_id_, true};
    for (const Leaf& leaf : leaves_) {
      const PlannedLeaf head = planned(leaf, 0, 1);
      dcp::Entry entry;
      static_cast<dcp::EntryHead&>(entry) = {head.name,  head.path,  head.is_tensor,
                                             head.dtype, head.shape, head.requires_grad};
      metadata.entries.push_back(std::move(entry));
    }
    for (const OwnItem& item : plan_.items) {
      dcp::Entry& entry = metadata.entries[item.leaf];
      dcp::Item place{name_of(item.place.file), item.place.offset, item.place.length, {}};
      if (rules_.are_compressed()) place.transforms = {kZstdTransform};
      if (!entry.is_tensor) {
        entry.item = place;
      } else {
        entry.chunks.push_back(dcp::Chunk{item.chunk.box, place});
      }
    }
    return metadata;
  }

  [[nodiscard]] bool is_committed() const {
    return store_.exists(metadata_name_) &&
           read_dcp_metadata(store_, metadata_name_).save_id == save_id_;
  }
  void remove_written() noexcept {
    for (int file = 0; file < files_.files_of(rank_); ++file) remove_quietly(store_, name_of(file));
  }

  std::vector<Leaf> leaves_;
  Store& store_;
  int rank_;
  const SaveOptions& options_;
  std::string metadata_name_;
  std::string save_id_ = random_uuid();
  std::string attempt_ = random_attempt();
  FileRules rules_ = file_rules(options_);
  FilePlan files_{rank_, 1, rules_};
  OwnPlan plan_;
  SaveResult result_;
};

}  // namespace

SaveResult dcp_save_part(const Value& tree, Store& store, int rank, const SaveOptions& options,
                         const JobLog& log) {
  std::optional<PartSaver> saver;
  log.phase("plan", [&] {
    if (rank < 0 || rank >= kNumberBound)
      throw Error(ErrorCode::invalid_argument, "there is no rank " + std::to_string(rank));
    saver.emplace(tree, store, rank, options);
    saver->plan();
    return 0;
  });
  log.phase("write", [&] { return saver->write(); });
  SaveResult result;
  log.phase("commit", [&] {
    result = saver->commit();
    return 0;
  });
  return result;
}

}  // namespace tessera
