// Saving by N ranks into one directory:
//   1. rank 0 makes the directory's sibling, NAME-tmp-<attempt>, and puts a probe into it. Every
//   rank says what it is about to save, as digests;
//   2. every rank writes the elements that it holds into whatever file they belong to, and makes
//   them durable;
//   3. every rank reports what it wrote into each record, and the makers of files finish them;
//   4. rank 0 sees all files in the store, writes the digests of the state and config.yaml, last,
//   and gives the sibling its name in one step: the commit (checkpoint-rows O-30, O-31, OQ-02).
// A failure in any step reaches every rank before the next one begins; the sibling is removed.
// Nodes have a directory each, or bytes travel, where ranks do not share the directory
// (directories.h, travel.h).
#include "checkpoint/together/save_olmo.h"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/save/hooks.h"
#include "checkpoint/save/messages.h"
#include "checkpoint/together/directories.h"
#include "checkpoint/together/olmo_files.h"
#include "checkpoint/together/share.h"
#include "checkpoint/together/state_sums.h"
#include "checkpoint/together/travel.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "format/olmo/yaml.h"
#include "storage/forwarding_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

ByteView bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// What rank 0 saves as config.yaml.
std::string config_text(const OlmoSave& olmo, CheckpointKind kind) {
  if (!olmo.config.empty()) return olmo.config;
  const std::string_view name = sharded_checkpointer_name(kind);
  return name.empty() ? "{}\n" : "sharded_checkpointer: " + std::string(name) + "\n";
}

void require_own_kind(const std::string& config, CheckpointKind kind) {
  const std::string_view own = sharded_checkpointer_name(kind);
  const auto named = olmo::sharded_checkpointer_of(bytes_of(config));
  if (!named || own.empty() || *named == own) return;
  throw Error(ErrorCode::invalid_argument,
              "config.yaml says sharded_checkpointer: " + *named + ", this is " + std::string(own));
}

void require_plain(const SaveOptions& options, bool is_set) {
  require_threads(options.threads);
  if (!is_set && (options.name || options.dtype)) {
    throw Error(ErrorCode::unsupported,
                "names and types are of saves as DCP and as sets of safetensors alone");
  }
  const bool plain = !options.writer && options.compression == Compression::none &&
                     options.copies != IfDiffers::keep && options.values == IfDiffers::refuse;
  if (plain) return;
  throw Error(ErrorCode::unsupported,
              "writers, compression and kept copies are of DCP saves alone");
}

// Who writes into rank 0's directory: all ranks; all, and some see late what is in it; some alone.
enum class Sharing : std::uint8_t { all, late, some };
constexpr Sharing last_of(Sharing) {
  return Sharing::some;
}

bool is_set(CheckpointKind kind) {
  return kind == CheckpointKind::safetensors;
}

// Throws for what is no tensor.
std::vector<Leaf> tensors_in(const Value& tree, const SaveOptions& options) {
  std::vector<Leaf> leaves = leaves_to_save(leaves_of(tree), options);
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) continue;
    throw Error(ErrorCode::unsupported, "ranks save sets of safetensors of tensors alone")
        .at_key(leaf.name);
  }
  return leaves;
}

// What ranks are about to save, and the sizes of their pickles by rank.
using Plans = std::pair<Intents, std::vector<std::uint64_t>>;

void join_plans(Plans& all, const Plans& more) {
  join_intents(all.first, more.first);
  all.second.insert(all.second.end(), more.second.begin(), more.second.end());
}

// What ranks have written, and the sums of their parts of the state.
using Written = std::pair<FileSums, StateSums>;

void join_written(Written& all, const Written& more) {
  join_sums(all.first, more.first);
  join_state_sums(all.second, more.second);
}

// How many files are in a directory, and their bytes.
using Counts = std::pair<std::uint64_t, std::uint64_t>;

void join_counts(Counts& all, const Counts& more) {
  all.first += more.first;
  all.second += more.second;
}

// A file that is finished.
struct MadeFile {
  int publisher = 0;
  std::string name;
  std::uint64_t size = 0;
};
auto fields(FieldsOf<MadeFile> auto& file) {
  return std::tie(file.publisher, file.name, file.size);
}

class Saver final : public GroupSave {
 public:
  Saver(const Value& tree, const Location& where, CheckpointKind kind, const SaveOptions& options,
        Group& group)
      : kind_(kind),
        options_(options),
        group_(group),
        directories_(where, options.overwrite, group),
        config_(config_text(options.olmo, kind)),
        state_(is_set(kind) ? OlmoState{tree, {}, {}} : olmo_state_of(tree)),
        sources_(is_set(kind) ? SourceTensors(tensors_in(tree, options)) : SourceTensors(state_)),
        tensors_(sources_.all(), group.rank(), group.size()),
        files_({state_, sources_, tensors_, kind, options, group.rank(), group.size()}) {
    require_plain(options, is_set(kind));
    require_own_kind(config_, kind);
  }

  void plan(const Bytes& prepared) override {
    directories_.begin();
    agree_on_state();
    if (kind_ == CheckpointKind::olmo_torch_new) plan_dcp();
  }

  std::uint64_t write() override {
    if (dcp_) dcp_bytes_ = dcp_->write();
    const auto work = [this](const std::stop_token& stop) { write_files(stop); };
    const Conference written =
        conference_of([this] { return Written(sums_, state_sums_); }, join_written,
                      [this](Written all) { return conclude_written(std::move(all)); });
    constexpr const char* kWriting = "writing a checkpoint";
    Bytes told;
    if (travels_) {
      agree_on_long_work(group_, kWriting, options_.stop, work);
      send_runs();
      told = confer(group_, kWriting, written);
    } else {
      told = confer_after_long_work(group_, options_.stop, work, kWriting, written);
    }
    StateDigests digests;
    std::tie(sums_, digests) = from_message<std::pair<FileSums, StateDigests>>(told);
    if (directories_.are_several()) digests_ = std::move(digests);
    return bytes_written_ + dcp_bytes_;
  }

  SaveResult commit() override;

 private:
  [[nodiscard]] bool leads() const { return group_.rank() == 0; }
  // Also where ranks do not see rank 0's: then it gets what they write.
  [[nodiscard]] bool is_in_one_directory() const {
    return kind_ == CheckpointKind::olmo_full || is_set(kind_);
  }
  // That comes last into a directory.
  [[nodiscard]] std::string last_file() const {
    if (!is_set(kind_)) return std::string(olmo::kConfigFile);
    return files_.index().empty() ? kSetFile : index_name(kSetFile);
  }

  // What the layout of files follows from beside names, types and shapes.
  [[nodiscard]] NamedDigests layout() const {
    NamedDigests digests = {{"SaveOptions::safetensors", files_.set_digest()}};
    if (options_.olmo.mesh) {
      digests.emplace_back("OlmoSave::mesh",
                           static_cast<std::uint64_t>(options_.olmo.mesh->copies));
    }
    return digests;
  }

  void agree_on_state() {
    const auto contribute = [this] {
      directories_.require_same_name();
      Intents mine;
      mine.first.leaves = tensors_.digest();
      mine.first.values = digest_of_values(state_, layout());
      directories_.look_for_first(mine.unseeing);
      return Plans(mine, {files_.pickle_size()});
    };
    const auto conclude = [this](const Plans& all) {
      const auto& [intents, sizes] = all;
      const bool same = intents.same_leaves && intents.same_values;
      return std::pair(std::pair(same, sharing_of(intents.unseeing)), sizes);
    };
    using Told = std::pair<std::pair<bool, Sharing>, std::vector<std::uint64_t>>;
    const auto [decided, pickles] = from_message<Told>(
        confer(group_, "planning a checkpoint", conference_of(contribute, join_plans, conclude)));
    if (!decided.first) refuse_difference(state_, layout(), tensors_, group_);
    settle(decided.second);
    agree(group_, "planning a checkpoint", [&, &pickles = pickles] {
      if (leads() && !directories_.are_several())
        directories_.require_room(tensor_bytes(leaves_of(OlmoState(state_).tree())));
      files_.open(pickles, travels_);
    });
  }

  // Rank 0. Throws where ranks may not have directories of their own.
  [[nodiscard]] Sharing sharing_of(const Unseeing& unseeing) const {
    if (unseeing.ranks.empty()) return Sharing::all;
    if (directories_.is_first_seen_late(unseeing)) return Sharing::late;
    if (kind_ == CheckpointKind::olmo_torch_new)
      require_seen_by_all(unseeing, group_.size(), *directories_.working());
    log(LogLevel::info, std::to_string(unseeing.ranks.size() + unseeing.more) +
                            " ranks do not see the directory of rank 0: " +
                            (is_in_one_directory() ? "what they write travels to it"
                                                   : "each node has a directory of its own"));
    return Sharing::some;
  }

  void settle(Sharing sharing) {
    if (sharing == Sharing::late) directories_.await_first(options_.stop);
    if (sharing != Sharing::some) return directories_.share();
    if (is_in_one_directory()) {
      directories_.keep_first();
      travels_ = true;
    } else {
      directories_.find_others();
      travels_ = kind_ == CheckpointKind::olmo_legacy;
    }
  }

  // The model and the optimizer as a DCP checkpoint inside of the directory.
  void plan_dcp() {
    dcp_tree_ = OlmoState{state_.model, state_.optim, {}}.tree();
    dcp_options_ = options_;
    dcp_options_.kind = CheckpointKind::dcp;
    agree(group_, "planning a checkpoint", [this] {
      dcp_ = dcp_save(
          dcp_tree_,
          std::make_shared<SubStore>(directories_.working(), std::string(olmo::kDcpFolder)), group_,
          dcp_options_);
    });
    dcp_->plan(confer(group_, "planning a checkpoint",
                      {[] { return Bytes(); }, combine_nothing,
                       [this](const Bytes&) { return dcp_->prepare(); }}));
  }

  void write_files(const std::stop_token& stop) {
    Meter meter(progress_after(0), bytes_to_write(), stop);
    TensorSums written;
    for (const auto& file : files_.files()) {
      if (!directories_.reaches(file->maker())) continue;
      file->write(directories_.working()->share(file->name()), tensors_, options_.threads, meter);
      add_sums(*file);
      for (const auto& [leaf, sum] : file->tensor_sums()) written[leaf].add(sum);
    }
    state_sums_ =
        sum_state(tensors_, written, {group_.rank(), group_.size(), options_.threads, stop});
    if (!travels_) meter.finish();
  }

  // Tells of bytes that come after so many others.
  [[nodiscard]] ProgressHook progress_after(std::uint64_t before) const {
    return [this, before](const Progress& progress) {
      group_.make_progress(before + progress.done);
      if (options_.progress && !dcp_) options_.progress({before + progress.done, progress.total});
    };
  }

  void add_sums(const SharedFile& file) {
    for (const auto& [at, sum] : file.sums()) {
      sums_[at].add(sum);
      bytes_written_ += sum.bytes;
    }
  }

  // What belongs into files that this rank does not reach.
  void send_runs() {
    std::map<std::uint32_t, std::unique_ptr<ByteSink>> received;
    Travel how;
    how.send = [this](Outbox& outbox) {
      Meter meter(progress_after(bytes_written_), bytes_to_write());
      for (const auto& file : files_.files()) {
        if (directories_.reaches(file->maker())) continue;
        file->write(outbox.sink({file->maker(), file->number()}, file->name()), tensors_,
                    options_.threads, meter);
        add_sums(*file);
      }
    };
    how.receive = [&](std::uint32_t number, std::uint64_t offset, ByteView bytes) {
      std::unique_ptr<ByteSink>& sink = received[number];
      if (!sink) sink = directories_.working()->share(file_of(number).name());
      sink->write_at(offset, bytes);
    };
    how.to_rank_zero = is_in_one_directory();
    how.stop = options_.stop;
    travel(group_, how);
    agree(group_, "writing a checkpoint", [&] {
      for (const auto& [number, sink] : received) sink->commit();
      progress_after(0)({bytes_to_write(), bytes_to_write()});
    });
  }

  [[nodiscard]] const SharedFile& file_of(std::uint32_t number) const {
    const auto& files = files_.files();
    return **std::ranges::find_if(
        files, [&](const auto& file) { return file->is_made_here() && file->number() == number; });
  }

  [[nodiscard]] std::uint64_t bytes_to_write() const {
    std::uint64_t bytes = 0;
    for (const PlacedTensor& placed : tensors_.all()) {
      const Tensor& tensor = placed.leaf->value.as_tensor();
      for (const Box& box :
           boxes_to_write(placed.placement, tensor.shape, {group_.rank(), group_.size(), -1}))
        bytes += byte_size(tensor.dtype, box.sizes);
    }
    return bytes;
  }

  // Rank 0. Returns what was written into each record, and to several publishers the digests.
  std::pair<FileSums, StateDigests> conclude_written(Written all) {
    const SummedState state = summed(tensors_, all.second);
    digests_ = state.digests;
    if (!state.unlike.empty()) judge(state.unlike);
    return {std::move(all.first), directories_.are_several() ? digests_ : StateDigests()};
  }

  void judge(const std::vector<std::string>& unlike) const {
    const std::string text = std::to_string(unlike.size()) +
                             " tensors differ between ranks that hold the same part of them, "
                             "the first is " +
                             unlike.front();
    if (options_.copies == IfDiffers::warn) return log(LogLevel::warning, text);
    throw Error(ErrorCode::mismatch, text).at_key(unlike.front());
  }

  // Makers finish their files. Returns this rank's, side by side.
  Bytes finish_files() {
    MessageWriter message;
    for (const auto& file : files_.files()) {
      if (!file->is_made_here()) continue;
      file->finish(sums_, *directories_.working());
      message.value(MadeFile{directories_.publisher(), file->name(), file->size()});
    }
    return message.take();
  }

  // A publisher sees the files that it publishes.
  void require_in_store(const Bytes& all) {
    for (const auto& [publisher, name, size] : all_from_message<MadeFile>(all)) {
      if (publisher != directories_.publisher()) continue;
      const std::uint64_t found = directories_.working()->open(name)->size();
      if (found != size) {
        throw Error(ErrorCode::incomplete, "a file has " + std::to_string(found) + " bytes here, " +
                                               std::to_string(size) + " were written")
            .at_path(directories_.working()->name() + "/" + name);
      }
      count_file(size);
    }
  }

  void count_file(std::uint64_t size) {
    ++result_.files;
    result_.total_bytes += size;
  }

  void put_file(std::string_view name, const std::string& text) {
    put(*directories_.working(), name, bytes_of(text), IfExists::fail);
    count_file(text.size());
  }

  // A publisher writes what a directory has beside the ranks' files.
  void complete(const Bytes& all, const std::string& config) {
    directories_.drop_probe();
    require_in_store(all);
    if (kind_ == CheckpointKind::olmo_local)
      put_file(olmo::kWorldFile, world_file_text(group_.size()));
    if (is_set(kind_)) {
      if (!files_.index().empty()) put_file(index_name(kSetFile), files_.index());
      return;
    }
    put_file(kStateFile, state_file_text(digests_, directories_.save_id()));
    put_file(olmo::kConfigFile, config);
  }

  [[nodiscard]] Counts counts() const { return {result_.files, result_.total_bytes}; }

  // Returns counts of all files.
  Bytes publish_one() {
    return confer(group_, kCommit,
                  {[this] { return finish_files(); }, side_by_side,
                   [this](const Bytes& all) {
                     complete(all, config_);
                     directories_.publish();
                     return to_message(counts());
                   }});
  }

  // The same where each node has a directory: no rank publishes before all are complete.
  Bytes publish_each() {
    const Bytes told = confer(
        group_, kCommit,
        {[this] {
           directories_.require_apart();
           return finish_files();
         },
         side_by_side, [this](const Bytes& all) { return to_message(std::pair(all, config_)); }});
    const auto [files, config] = from_message<std::pair<Bytes, std::string>>(told);
    const auto complete_own = [&, &files = files, &config = config] {
      if (directories_.publishes()) complete(files, config);
      return counts();
    };
    Bytes counted =
        confer(group_, kCommit, conference_of(complete_own, join_counts, std::identity()));
    agree(group_, kCommit, [this] { publish_own(); });
    return counted;
  }

  void publish_own() {
    if (!directories_.publishes()) return;
    try {
      directories_.publish();
    } catch (const Error& error) {
      throw Error(error.code(),
                  "the directory of this node is not published, those of others may "
                  "be: " +
                      error.message())
          .at_path(directories_.path());
    }
  }

  // For whom the other ranks are lost at the end.
  [[nodiscard]] std::string outcome() const {
    const std::string save = "save " + directories_.save_id();
    const std::string part = directories_.are_several() ? "the part of this node of " + save : save;
    if (is_committed_) return save + " is complete, but the other ranks are lost";
    if (directories_.is_published()) return part + " is complete, but the other ranks are lost";
    if (directories_.publishes()) return part + " is not complete, and the other ranks are lost";
    return "the other ranks are lost, and whether " + save + " is complete is not known here" +
           (is_set(kind_) ? "" : ": ask committed() for it");
  }

  static constexpr const char* kCommit = "committing a checkpoint";
  const CheckpointKind kind_;
  const SaveOptions& options_;
  Group& group_;
  Directories directories_;
  const std::string config_;
  const OlmoState state_;
  const SourceTensors sources_;
  const PlacedTensors tensors_;
  OlmoFiles files_;
  bool travels_ = false;  // some ranks do not reach a file that they write into
  Value dcp_tree_;
  SaveOptions dcp_options_;
  std::unique_ptr<GroupSave> dcp_;  // olmo_torch_new
  FileSums sums_;                   // of this rank, then of all
  StateSums state_sums_;
  StateDigests digests_;  // of publishers
  SaveResult result_;
  std::uint64_t bytes_written_ = 0;
  std::uint64_t dcp_bytes_ = 0;
  bool is_committed_ = false;  // as far as this rank knows, by all
};

SaveResult Saver::commit() {
  if (dcp_) {
    const SaveResult inner = dcp_->commit();
    result_.files = inner.files;
    result_.total_bytes = inner.total_bytes;
  }
  Bytes told;
  try {
    told = directories_.are_several() ? publish_each() : publish_one();
    is_committed_ = true;
    agree_on_long_work(group_, "waiting for the checkpoint", {},
                       [this](const std::stop_token& stop) {
                         directories_.wait_until_visible(last_file(), stop);
                       });
  } catch (const Error& error) {
    if (group_.size() == 1 || !error.peers().empty()) throw;
    throw Error(error.code(), outcome() + ": " + error.message())
        .at_path(directories_.path())
        .while_doing(kCommit);
  }
  std::tie(result_.files, result_.total_bytes) = from_message<Counts>(told);
  result_.bytes_written = bytes_written_ + dcp_bytes_;
  result_.save_id = directories_.save_id();
  return result_;
}

}  // namespace

std::unique_ptr<GroupSave> olmo_kind_save(const Value& tree, const Location& where,
                                          CheckpointKind kind, const SaveOptions& options,
                                          Group& group) {
  return std::make_unique<Saver>(tree, where, kind, options, group);
}

}  // namespace tessera
