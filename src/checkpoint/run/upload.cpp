#include "checkpoint/run/upload.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "base/digest.h"
#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/run/steps.h"
#include "checkpoint/run/upload_files.h"
#include "checkpoint/save/place.h"
#include "comm/long_work.h"
#include "tessera/copy.h"
#include "tessera/error.h"
#include "tessera/stores.h"

namespace tessera {
namespace {

// A file, and who sees it.
struct SeenFile {
  std::uint64_t size = 0;
  std::uint64_t holders = 0;
  // The holder that copies it unless all hold it: the one with the highest draw.
  std::uint64_t draw = 0;
  int rank = 0;
};
auto fields(FieldsOf<SeenFile> auto& file) {
  return std::tie(file.size, file.holders, file.draw, file.rank);
}
using SeenFiles = std::map<std::string, SeenFile>;

// Another one for each file and rank, so that a node's ranks share what they alone see.
std::uint64_t draw_of(const std::string& name, int rank) {
  const std::string text = name + '\0' + std::to_string(rank);
  return digest64(std::as_bytes(std::span(text)));
}

void join(const std::string& name, SeenFile& mine, const SeenFile& other) {
  if (mine.size != other.size) {
    throw Error(ErrorCode::conflict, "ranks see " + std::to_string(mine.size) + " and " +
                                         std::to_string(other.size) + " bytes of one file")
        .at_path(name);
  }
  mine.holders += other.holders;
  if (other.draw <= mine.draw) return;
  mine.draw = other.draw;
  mine.rank = other.rank;
}

// The largest first, each to the rank that has the least to do.
void balance(UploadPlan& plan, const SeenFiles& files, int ranks) {
  std::vector<std::uint64_t> load(static_cast<std::size_t>(ranks), 0);
  std::vector<UploadFile*> shared;
  for (UploadFile& file : plan) {
    const bool is_shared = files.at(file.object.name).holders == static_cast<std::uint64_t>(ranks);
    if (is_shared && !is_marker(file.object.name)) {
      shared.push_back(&file);
    } else {
      load[static_cast<std::size_t>(file.rank)] += file.object.size;
    }
  }
  std::ranges::stable_sort(shared, std::ranges::greater(),
                           [](const UploadFile* file) { return file->object.size; });
  for (UploadFile* file : shared) {
    const auto least = std::ranges::min_element(load);
    *least += file->object.size;
    file->rank = static_cast<int>(least - load.begin());
  }
}

// What a rank sees.
SeenFiles seen_files(const std::vector<ObjectInfo>& files, int rank) {
  SeenFiles seen;
  for (const ObjectInfo& file : files)
    seen[file.name] = {file.size, 1, draw_of(file.name, rank), rank};
  return seen;
}

// Entries of one name are joined. Throws `conflict` if sizes differ.
void join_seen(SeenFiles& all, const SeenFiles& more) {
  for (const auto& [name, seen] : more) {
    const auto [at, is_new] = all.emplace(name, seen);
    if (!is_new) join(name, at->second, seen);
  }
}

// Shares out what all ranks together see. Files that all of them see go to the ranks so that each
// gets about as many bytes; of others each goes to one of those that see it. Markers are rank 0's.
UploadPlan share_out(const SeenFiles& files, const KnownFiles& known, int ranks) {
  std::vector<ObjectInfo> objects;
  for (const auto& [name, file] : files) {
    if (!known.leftovers.contains(name)) objects.push_back({name, file.size});
  }
  sort_markers_last(objects);
  UploadPlan plan;
  for (const ObjectInfo& object : objects) {
    plan.push_back({object, is_marker(object.name) ? 0 : files.at(object.name).rank});
    const auto digests = known.digests.find(object.name);
    if (digests != known.digests.end()) plan.back().digests = digests->second;
  }
  balance(plan, files, ranks);
  return plan;
}

}  // namespace

std::uint64_t bytes_of(const UploadPlan& plan) {
  std::uint64_t bytes = 0;
  for (const UploadFile& file : plan) bytes += file.object.size;
  return bytes;
}

namespace {

// Whether the source has a marker. Else it is of a kind that has none.
enum class Marked : std::uint8_t { yes, no };

// Whether both are one place, as far as that can be seen.
bool is_same_place(const Location& a, const Location& b) {
  if (a.store && b.store) return a.store == b.store && a.name == b.name;
  const std::string first = directory_store(a)->name(), second = directory_store(b)->name();
  if (!is_on_disk(a) || !is_on_disk(b)) return first == second;
  std::error_code unknown;
  return std::filesystem::equivalent(first, second, unknown);
}

// One rank's part of an upload, step by step.
class Upload {
 public:
  Upload(const Location& from, const Location& to, const UploadOptions& options, Group& group,
         Marked marked = Marked::yes)
      : from_(from), to_(to), options_(options), group_(group), marked_(marked) {}

  UploadReport run() {
    plan();
    copy_data();
    commit();
    return report();
  }

 private:
  [[nodiscard]] bool is_rank_zero() const { return group_.rank() == 0; }

  // All ranks learn which of them copies what. At the end there is no marker at the target.
  void plan() {
    const auto seen = [this] {
      require_threads(options_.threads);
      require_going_on(options_.stop);
      if (is_same_place(from_, to_)) {
        throw Error(ErrorCode::invalid_argument, "a checkpoint cannot be copied onto itself")
            .at_path(to_string(to_));
      }
      source_.emplace(directory_store(from_));
      store_ = directory_store(to_);
      if (is_rank_zero()) {
        require_marker();
        store_->require_writable(probe_name(random_attempt()), options_.single_writer);
      }
      return seen_files(source_->files(), group_.rank());
    };
    const auto conclude = [this](const SeenFiles& all) {
      plan_ = share_out(all, source_->look(), group_.size());
      target_.emplace(*store_, plan_);
      has_same_markers_ = options_.resume && has_same_markers();
      if (has_same_markers_) {
        target_->open_same(options_.overwrite);
      } else {
        target_->open(options_.overwrite);
      }
      // A store stays as it is: somebody else may write to another part of it.
      if (is_on_disk(to_)) store_->remove_unfinished();
      return plan_;
    };
    const Bytes plan =
        confer(group_, "planning an upload", conference_of(seen, join_seen, conclude));
    if (!is_rank_zero()) plan_ = from_message<UploadPlan>(plan);
    for (const UploadFile& file : plan_) {
      if (file.rank == group_.rank()) mine_.push_back(file);
    }
  }

  // Whether the target has this checkpoint's markers.
  bool has_same_markers() {
    const Meter silent({}, 0, options_.stop);
    bool has_any = false;
    for (const UploadFile& file : plan_) {
      if (!is_marker(file.object.name)) continue;
      has_any = true;
      if (!has_copy(*store_, file.object.name, *source_->open(file), file.digests, silent))
        return false;
    }
    return has_any;
  }

  void require_marker() const {
    if (marked_ == Marked::no) return;
    const auto store = directory_store(from_);
    if (!marker_in(*store).empty()) return;
    throw Error(ErrorCode::incomplete,
                "no whole checkpoint is here: neither .metadata nor config.yaml")
        .at_path(store->name());
  }

  // Everything but the markers is visible at the target afterwards.
  void copy_data() {
    const auto work = [this](const std::stop_token& stop) { copy_mine(stop); };
    const auto nothing = [] { return Bytes(); };
    const auto look = [this](const Bytes&) {
      target_->require_data();
      return Bytes();
    };
    try {
      (void)confer_after_long_work(group_, options_.stop, work, "copying a checkpoint",
                                   {nothing, combine_nothing, look});
    } catch (...) {
      // Rank 0 commits only after a word of everybody, which this rank does not give any more.
      markers_.clear();
      if (!options_.resume) withdraw(*store_, plan_, group_.rank());
      throw;
    }
  }

  void copy_mine(const std::stop_token& stop) {
    if (is_rank_zero()) target_->remove_stale();
    Meter meter(options_.progress, bytes_of(mine_), stop);
    const auto is_late = [](const UploadFile& file) {
      return is_read_first(file.object.name) || is_marker(file.object.name);
    };
    const auto first_late = std::ranges::find_if(mine_, is_late);
    const auto first_marker = std::find_if(first_late, mine_.end(), [](const UploadFile& file) {
      return is_marker(file.object.name);
    });
    copy_files({mine_.begin(), first_late}, meter);
    copy_files({first_late, first_marker}, meter);
    for (auto at = first_marker; at != mine_.end(); ++at) prepare_marker(*at, meter);
    store_->sync();
    meter.finish();
    require_going_on(stop);  // threads that were at their last bytes have not looked
  }

  void copy_files(std::span<const UploadFile> files, Meter& meter) {
    parallel_for(options_.threads, files.size(),
                 [&](std::size_t i) { copy_file(files[i], meter); });
  }

  void copy_file(const UploadFile& file, Meter& meter) {
    const auto source = source_->open(file);
    const bool has_to_stay = if_data_exists() == IfExists::fail && store_->exists(file.object.name);
    if (!has_to_stay && is_copied_by_store(file, *source, meter)) return;
    if (options_.resume && has_copy(*store_, file.object.name, *source, file.digests, meter)) {
      count_whole(file);
      meter.add(file.object.size);
      return;
    }
    WrittenObject written = write_copy(*UploadSource::guarded(source, file), *store_,
                                       file.object.name, if_data_exists(), meter);
    commit_copy(written, *store_, options_.read_back);
  }

  bool is_copied_by_store(const UploadFile& file, const ByteSource& source, Meter& meter) {
    const StoreCopied copied =
        store_->copy({.from = source,
                      .name = file.object.name,
                      .if_exists = if_data_exists(),
                      .copied = [&meter](std::uint64_t bytes) { meter.add(bytes); }});
    if (copied == StoreCopied::cannot) return false;
    if (copied == StoreCopied::was_there) {
      count_whole(file);
    } else {
      server_bytes_ += file.object.size;
    }
    if (options_.read_back && !has_copy(*store_, file.object.name, source, file.digests, meter)) {
      throw Error(ErrorCode::corrupt, "the target gives other bytes than the source")
          .at_path(store_->name() + "/" + file.object.name);
    }
    return true;
  }

  void count_whole(const UploadFile& file) {
    ++whole_files_;
    whole_bytes_ += file.object.size;
  }

  // Data that is there without a marker is what an upload left, unless the kind has no marker.
  [[nodiscard]] IfExists if_data_exists() const {
    return marked_ == Marked::no && !options_.overwrite ? IfExists::fail : IfExists::replace;
  }

  // So that nothing is left to do at the end but to make it visible.
  void prepare_marker(const UploadFile& file, Meter& meter) {
    marker_ends_.push_back(source_->end_of(file.object));
    if (has_same_markers_) {
      count_whole(file);
      meter.add(file.object.size);
      return;
    }
    const auto if_exists = options_.overwrite ? IfExists::replace : IfExists::fail;
    const auto source = UploadSource::guarded(source_->open(file), file);
    markers_.push_back(write_copy(*source, *store_, file.object.name, if_exists, meter));
  }

  void commit() {
    const auto nothing = [] { return Bytes(); };
    const auto publish = [this](const Bytes&) {
      require_same_source();
      group_.require_peers();
      make_visible();
      return Bytes();
    };
    try {
      (void)confer(group_, "completing an upload", {nothing, combine_nothing, publish});
    } catch (...) {
      markers_.clear();
      if (is_rank_zero() && !options_.resume) target_->withdraw();
      throw;
    }
  }

  // A stop has no effect once a checkpoint is there. Where the store is silent beside one, nobody
  // knows whether it is: that is not `cancelled`, which leaves none.
  void make_visible() {
    const Settling settling;
    try {
      for (WrittenObject& marker : markers_) {
        commit_copy(marker, *store_, options_.read_back);
        store_->sync();
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::cancelled) throw;
      throw Error(ErrorCode::timeout,
                  "the target has not answered soon enough after the stop: the checkpoint is"
                  " there if its marker is")
          .at_path(store_->name());
    }
  }

  void require_same_source() const {
    auto end = marker_ends_.begin();
    for (const UploadFile& file : mine_) {
      if (!is_marker(file.object.name)) continue;
      if (source_->end_of(file.object) != *end++) {
        throw Error(ErrorCode::conflict, "the checkpoint was replaced while it was copied")
            .at_path(source_->name() + "/" + file.object.name);
      }
    }
  }

  [[nodiscard]] UploadReport report() const {
    return {.files = mine_.size(),
            .bytes = bytes_of(mine_),
            .total_files = plan_.size(),
            .total_bytes = bytes_of(plan_),
            .whole_files = whole_files_,
            .whole_bytes = whole_bytes_,
            .server_bytes = server_bytes_};
  }

  const Location& from_;
  const Location& to_;
  const UploadOptions& options_;
  Group& group_;
  const Marked marked_;
  std::optional<UploadSource> source_;
  std::shared_ptr<Store> store_;  // the target
  UploadPlan plan_;
  UploadPlan mine_;                     // what this rank copies, markers last
  std::optional<UploadTarget> target_;  // rank 0
  bool has_same_markers_ = false;       // rank 0: they are at the target already
  std::atomic<std::uint64_t> whole_files_{0}, whole_bytes_{0}, server_bytes_{0};
  std::vector<WrittenObject> markers_;               // rank 0: written, and invisible until the end
  std::vector<std::vector<std::byte>> marker_ends_;  // rank 0: the sources' last bytes
};

}  // namespace

UploadReport upload(const Location& from, const Location& to, const UploadOptions& options,
                    Group& group) {
  await_saves(from, Looks::at_place, options.stop);
  return Upload(from, to, options, group).run();
}

UploadReport upload_unmarked(const Location& from, const Location& to,
                             const UploadOptions& options) {
  return Upload(from, to, options, *solo_group(), Marked::no).run();
}

UploadReport upload(const Location& from, const Location& to, const UploadOptions& options) {
  return upload(from, to, options, *solo_group());
}

}  // namespace tessera
