// Saving by N ranks, with a fixed number of messages up and down their tree:
//   1. rank 0 removes what the save before last left: files that the present `.metadata` does not
//   name. Every rank says whether it writes to where rank 0 does, and what it is about to save, as
//   a digest; rank 0 draws the save's id and says how it is done. If there are parts that ranks
//   cannot compute of one another, they tell them, and rank 0 proves that they fit (checkpoint-rows
//   P-12 to P-14);
//   2. every rank computes its part of the plan and writes its data files
//   `__{rank}_{n}_{attempt}.distcp`, durable and complete;
//   3. every rank reports sizes and digests of its files. Rank 0 compares them with the plan and
//   with what the store shows, and the ranks compare what several of them hold;
//   4. rank 0 writes the side file with everybody's digests, durable, and then publishes
//   `.metadata` in one rename: the commit.
// What this save replaces stays until the next one, for readers that still follow it. A
// failure in any step reaches every rank (checkpoint-rows P-03) before the next one begins. Until 4
// an older checkpoint in the directory is untouched, and a crash leaves at most files that nobody
// names.
#include "checkpoint/save/save_dcp.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/digest.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/copies.h"
#include "checkpoint/save/data_files.h"
#include "checkpoint/save/hooks.h"
#include "checkpoint/save/messages.h"
#include "checkpoint/save/place.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "tessera/error.h"
#include "tessera/stores.h"
#include "value/equality.h"

namespace tessera {
namespace {

// A digest of a tensor inside of a value.
std::uint64_t digest_of_elements(const Tensor& tensor) {
  return digest_of_slice(tensor, "", whole(tensor.shape));
}

// Empty dicts of a tree, with their index among all its leaves. They have no entry in `.metadata`.
using EmptyDicts = std::vector<std::pair<std::size_t, Leaf>>;

EmptyDicts empty_dicts_of(const Value& tree) {
  EmptyDicts found;
  const std::vector<Leaf> all = leaves_of(tree);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (is_empty_dict(all[i])) found.emplace_back(i, all[i]);
  }
  return found;
}

class Saver final : public GroupSave {
 public:
  Saver(const Value& tree, std::shared_ptr<Store> store, Group& group, const SaveOptions& options)
      : leaves_(leaves_to_save(flatten(tree), options)),
        empty_dicts_(group.rank() == 0 ? empty_dicts_of(tree) : EmptyDicts()),
        store_(std::move(store)),
        group_(group),
        options_(options) {}
  ~Saver() override { give_up(); }

  Bytes prepare() override {
    hold_ = store_->hold();
    attempt_ = random_attempt();
    store_->require_writable(probe_name(attempt_), options_.single_writer);
    make_room();
    if (group_.size() == 1) return {};
    const std::string name = probe_name(attempt_);
    probe_.emplace(store_, name);
    return MessageWriter().text(name).take();
  }

  void plan(const Bytes& prepared) override {
    open(prepared);
    if (opening_.is_seen_late)
      await_probe(group_, *store_, MessageReader(prepared).text(), options_.stop);
    look_.drop_own();
    probe_.reset();
    if (opening_.compare_values) compare_values();
    if (opening_.copies == IfDiffers::keep && group_.size() > 1) keep_unlike_tensors();
    Choices choices;
    if (opening_.tells) choices = choices_of(tell());
    plan_own(choices);
  }

  std::uint64_t write() override {
    try {
      compare_copies(report());
    } catch (...) {
      remove_written();
      throw;
    }
    is_uncommitted_ = leads();
    return counters_.report().bytes_written;
  }

  SaveResult commit() override;

 private:
  [[nodiscard]] bool leads() const { return group_.rank() == 0; }
  [[nodiscard]] bool are_compressed() const { return opening_.rules.files.are_compressed(); }

  void open(const Bytes& prepared) {
    const auto contribute = [&] {
      require_savable();
      plan_leaves();
      Intents mine;
      // Ranks that choose differently tell, and rank 0 chooses.
      mine.first.leaves =
          digest_of(planned_) ^ digest_of_choices(planned_, group_.size(), options_.writer);
      mine.first.values = digest_values();
      mine.first.tells = std::ranges::any_of(
          planned_, [](const PlannedLeaf& leaf) { return leaf.is_tensor && !leaf.placement; });
      if (!leads()) look_.look(store_, MessageReader(prepared).text());
      look_.tell(mine.unseeing, group_.rank());
      return mine;
    };
    const auto conclude = [this](const Intents& all) { return opening_for(all); };
    opening_ = from_message<Opening>(
        confer(group_, "planning a checkpoint", conference_of(contribute, join_intents, conclude)));
    opening_.rules.writer = options_.writer;
  }

  void require_savable() const {
    require_going_on(options_.stop);
    (void)file_rules(options_);
    for (const Leaf& leaf : leaves_) {
      if (leaf.value.is(Value::Kind::tensor)) require_readable(leaf.value.as_tensor(), leaf.name);
    }
  }

  void plan_leaves() {
    chunks_.resize(leaves_.size());
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      planned_.push_back(planned(leaves_[i], group_.rank(), group_.size()));
      if (!planned_[i].is_tensor) continue;
      try {
        chunks_[i] = held_chunks(leaves_[i].value.as_tensor());
      } catch (Error& error) {
        throw error.at_key(leaves_[i].name);
      }
    }
  }

  // A digest of all.
  std::uint64_t digest_values() {
    value_digests_.resize(leaves_.size());
    RunningDigest all;
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (planned_[i].is_tensor) continue;
      value_digests_[i] = digest_of(leaves_[i].value, digest_of_elements);
      all.add(std::as_bytes(std::span(&value_digests_[i], 1)));
    }
    return all.value();
  }

  // Rank 0, before anything is written.
  void make_room() {
    const Present present = present_in(*store_);
    if (!options_.overwrite) require_no_checkpoint(present, store_->name());
    replaced_ = present.metadata;
    leftovers_.find(*store_, present, hold_ != nullptr || options_.single_writer);
    // Types that are converted to and compression make other sizes.
    if (!options_.dtype && options_.compression == Compression::none)
      require_free(*store_, tensor_bytes(leaves_));
  }

  // Rank 0. Of ranks with other leaves nobody knows whether their values are others, too.
  [[nodiscard]] Opening opening_for(const Intents& intents) const {
    Opening opening;
    opening.is_seen_late = see_late(intents.unseeing, *store_, probe_name(attempt_));
    if (!opening.is_seen_late) require_seen_by_all(intents.unseeing, group_.size(), *store_);
    opening.save_id = random_uuid();
    opening.attempt = attempt_;
    const bool others = !intents.same_leaves;
    opening.compare_values = !intents.same_values || others;
    opening.keep_values = opening.compare_values && options_.values == IfDiffers::keep;
    opening.rules = {
        group_.size(), file_rules(options_), options_.replicas, others || opening.keep_values, {}};
    opening.tells = intents.first.tells || opening.rules.everything_told;
    opening.copies = options_.copies;
    return opening;
  }

  [[nodiscard]] std::vector<HeldCopy> held_values() const {
    std::vector<HeldCopy> copies;
    for (std::size_t i = 0; i < leaves_.size(); ++i) {
      if (planned_[i].is_tensor) continue;
      copies.push_back({.name = leaves_[i].name,
                        .key = key_of(leaves_[i].name, {}),
                        .digest = value_digests_[i],
                        .is_written = true,
                        .leaf = i});
    }
    return copies;
  }

  // A value is written by the lowest rank that has it (checkpoint-rows OQ-09).
  void compare_values() {
    if (opening_.keep_values) {
      (void)keep_unlike("comparing values", held_values());
      return;
    }
    compare("comparing values", held_values(), options_.values);
  }

  // As with values, of tensors that ranks hold whole.
  void keep_unlike_tensors() {
    std::vector<HeldCopy> mine;
    const auto digest = [&](const std::stop_token& stop) {
      mine = whole_tensors({leaves_, chunks_}, options_.threads, stop);
    };
    const Bytes unlike = confer_after_long_work(
        group_, options_.stop, digest, "comparing tensors",
        {[&] { return digest_message(mine); }, combine_same,
         [](const Bytes& same) { return same.empty() ? Bytes(1) : Bytes(); }});
    if (!unlike.empty() && keep_unlike("comparing tensors", mine))
      opening_.tells = opening_.rules.everything_told = true;
  }

  // What this rank holds of a thing gets a name of its own if it is not what is written of it.
  // Returns whether that is so on any rank.
  bool keep_unlike(const std::string& operation, const std::vector<HeldCopy>& mine) {
    const auto contribute = [&] { return known_copies(mine, group_.rank()); };
    const auto written_by_key = from_message<std::map<std::uint64_t, std::uint64_t>>(
        confer(group_, operation, conference_of(contribute, join_copies, written_of_unlike)));
    for (const HeldCopy& copy : mine) {
      const auto written = written_by_key.find(copy.key);
      if (written != written_by_key.end() && written->second != copy.digest) keep(copy.leaf);
    }
    return !written_by_key.empty();
  }

  void keep(std::size_t index) {
    Leaf& leaf = leaves_[index];
    leaf.name = kept_name(leaf.name, group_.rank());
    if (!leaf.path.empty() && std::holds_alternative<std::string>(leaf.path.back())) {
      leaf.path.back() = kept_name(std::get<std::string>(leaf.path.back()), group_.rank());
    } else {
      leaf.path = {leaf.name};  // an element of a list or a key that is no text
    }
    planned_[index].name = leaf.name;
    planned_[index].path = leaf.path;
    planned_[index].is_kept = true;
  }

  // Rank 0. Throws for those of an optimizer's state that differ.
  static void require_same_optimizer(KnownCopies copies) {
    std::erase_if(copies, [](const auto& copy) { return !is_optimizer_name(copy.second.name); });
    const UnlikeCopies unlike = unlike_copies(copies);
    if (unlike.keys.empty()) return;
    throw Error(ErrorCode::mismatch,
                to_string(unlike) +
                    " It is an optimizer's state, of which a load would give all "
                    "ranks one rank's: copies 'keep' saves each, 'warn' this one.")
        .at_key(unlike.keys.front());
  }

  // Rank 0.
  static void judge(const UnlikeCopies& unlike, IfDiffers policy) {
    if (unlike.keys.empty()) return;
    if (policy == IfDiffers::warn) return log(LogLevel::warning, to_string(unlike));
    const char* why = policy == IfDiffers::keep ? " Only whole tensors can be kept." : "";
    throw Error(ErrorCode::mismatch, to_string(unlike) + why).at_key(unlike.keys.front());
  }

  [[nodiscard]] Bytes proposal() const {
    std::vector<ToldValue> values(leaves_.size());
    for (std::size_t i = 0; opening_.rules.everything_told && i < leaves_.size(); ++i) {
      if (!planned_[i].is_tensor) values[i] = {value_digests_[i], length_of_value(i)};
    }
    return encode_proposal(
        {group_.rank(), opening_.rules.everything_told, planned_, chunks_, values});
  }

  [[nodiscard]] std::uint64_t length_of_value(std::size_t leaf) const {
    return item_length(leaves_[leaf].value);
  }

  // Returns what rank 0 chose.
  Bytes tell() {
    const auto choose = [this](const Bytes& proposals) {
      ToldLeaves told(opening_.rules.everything_told ? std::vector<PlannedLeaf>() : planned_,
                      opening_.rules.everything_told);
      told.add(proposals);
      if (options_.same_keys) told.require_same_keys();
      told.finish();
      plan_all(std::move(told));
      return to_message(plan_->choices());
    };
    return confer(group_, "planning a checkpoint",
                  {[this] { return proposal(); }, side_by_side, choose});
  }

  // Rank 0.
  void plan_all(ToldLeaves told) {
    plan_.emplace(opening_.rules, std::move(told),
                  [this](std::size_t leaf) { return length_of_value(leaf); });
  }

  void plan_own(const Choices& choices) {
    own_ = own_plan(opening_.rules,
                    {group_.rank(), planned_, chunks_,
                     [this](std::size_t leaf) { return length_of_value(leaf); }},
                    choices);
  }

  // Returns whether all copies are equal.
  bool report() {
    const auto conclude = [this](const Bytes& all) {
      if (!plan_) plan_all(ToldLeaves(planned_, false));
      reports_ = decode_reports(all, are_compressed());
      require_planned(reports_, *plan_, opening_.attempt);
      look_and_write_metadata();
      return reports_.copies == 0 ? Bytes() : Bytes(1);
    };
    return confer_after_long_work(
               group_, options_.stop, [this](const std::stop_token& stop) { write_files(stop); },
               "writing a checkpoint",
               {[this] { return encode_report(report_, copies_term(copies_), are_compressed()); },
                combine_reports, conclude})
        .empty();
  }

  // Rank 0. Neither needs the other: of a store far away each costs as long as it takes to answer.
  void look_and_write_metadata() {
    std::vector<ObjectInfo> objects;
    parallel_for(2, 2, [&](std::size_t i) {
      if (i == 0) {
        objects = store_->list_level();
      } else {
        write_metadata();
      }
    });
    require_in_store(reports_, {*store_, objects}, opening_.attempt,
                     {options_.stop, [this] { require_all_there(); }});
  }

  void require_all_there() const {
    group_.require_peers();
    if (hold_) hold_->require_there();
  }

  void compare_copies(bool all_equal) {
    if (!all_equal) compare("comparing what several ranks hold", copies_, opening_.copies);
  }

  void compare(const char* operation, const std::vector<HeldCopy>& copies, IfDiffers policy) {
    const auto contribute = [&] { return known_copies(copies, group_.rank()); };
    const auto conclude = [&](const KnownCopies& all) {
      if (options_.same_optimizer && policy == IfDiffers::warn) require_same_optimizer(all);
      judge(unlike_copies(all), policy);
    };
    (void)confer(group_, operation, conference_of(contribute, join_copies, conclude));
  }

  void write_files(const std::stop_token& stop) {
    const auto tell_progress = [this](const Progress& progress) {
      group_.make_progress(progress.done);
      if (options_.progress) options_.progress(progress);
    };
    meter_.emplace(tell_progress, bytes_to_write(leaves_, own_), stop);
    take_samples();
    report_.rank = group_.rank();
    report_.host = host_name();
    parallel_for(options_.threads, own_.files.size(), [&](std::size_t file) {
      if (!own_.files[file].empty()) write_file(static_cast<int>(file));
    });
    meter_->finish();  // what the hook throws has to reach all ranks
  }

  // Samples of the chunks of which others hold a copy.
  void take_samples() {
    for (const OwnItem& item : own_.items) {
      if (item.holders < 2 || !planned_[item.leaf].is_tensor) continue;
      copies_.push_back({planned_[item.leaf].name, item.key, 0, item.holders, item.is_written});
      sampled_.push_back(&item);
    }
    parallel_for(options_.threads, sampled_.size(), [&](std::size_t i) {
      require_going_on(meter_->stop());
      const Leaf& leaf = leaves_[sampled_[i]->leaf];
      copies_[i].digest = sample_of_chunk(leaf.value.as_tensor(), leaf.name, sampled_[i]->chunk);
    });
  }

  void write_file(int file) {
    const std::string name = data_file_name(group_.rank(), file, opening_.attempt);
    DataDigest digest;
    try {
      digest = write_data_file(
          *store_, {leaves_, own_, file, name, zstd_level(opening_.rules.files)}, *meter_);
    } catch (...) {
      remove_quietly(*store_, name);  // it may have its name, and fail behind that
      throw;
    }
    IoReport written;
    written.bytes_written = digest.size;
    counters_.add(written);
    const std::lock_guard lock(mutex_);
    const std::vector<std::size_t>& items = own_.files[static_cast<std::size_t>(file)];
    report_.files.push_back({file, digest, items.size()});
    if (!are_compressed()) return;
    for (const std::size_t item : items) report_.lengths.push_back(own_.items[item].place.length);
  }

  // The files of a save that ended before its commit go. Rank 0 removes those of all ranks, because
  // it may have made the directory, which can only go when it is empty.
  void remove_written() {
    const Settling settling;  // also of a save that was stopped
    for (const FileReport& file : report_.files)
      remove_quietly(*store_, data_file_name(group_.rank(), file.file, opening_.attempt));
    if (!leads()) return;
    remove_metadata();
    try {
      for (const ObjectInfo& object : store_->list_level("")) {
        if (is_data_file_of(object.name, opening_.attempt)) remove_quietly(*store_, object.name);
      }
    } catch (...) {
      return;  // the next save removes them
    }
  }

  // The types of all leaves, with the empty dicts where they stand in the tree, and behind them
  // what rank 0 lacks, by its path.
  [[nodiscard]] std::string types() const {
    const bool knows_more = plan_->leaves().size() > leaves_.size();
    if (empty_dicts_.empty() && !knows_more) return encode_types(leaves_);
    std::vector<Leaf> all = leaves_;
    for (const auto& [at, leaf] : empty_dicts_)
      all.insert(all.begin() + std::min(std::ssize(all), static_cast<std::ptrdiff_t>(at)), leaf);
    std::unordered_set<std::string_view> own;
    for (const Leaf& leaf : leaves_) own.insert(leaf.name);
    for (const PlannedLeaf& leaf : plan_->leaves())
      if (!own.contains(leaf.name)) all.push_back({leaf.name, leaf.path, Value()});
    drop_filled_dicts(all);
    return encode_types(all);
  }

  // Rank 0: what becomes `.metadata`, and the side file.
  void write_metadata() {
    DigestsByName digests = digests_of(reports_, opening_.attempt);
    const PlanSource source(*plan_, {"1.0.0", store_->name(), opening_.save_id, true},
                            opening_.attempt, are_compressed() ? ItemEnds(reports_) : ItemEnds());
    commit_.emplace(*store_, source, Commit{{}, std::move(digests), types(), replaced_, [this] {
                                              require_all_there();
                                            }});
  }

  // What has no name goes first: a directory is removed when it is empty.
  void remove_metadata() {
    commit_.reset();
    remove_quietly(*store_, side_file_name(opening_.save_id));
  }

  void publish(SaveResult& result) {
    try {
      commit_->publish();
    } catch (...) {
      withdraw();
      throw;
    }
    result.files = commit_->files().files;
    result.total_bytes = commit_->files().bytes;
    for (const RankReport& report : reports_.ranks) {
      result.files += report.files.size();
      for (const FileReport& file : report.files) result.total_bytes += file.digest.size;
    }
  }

  // Everybody's files, unless the commit has been made.
  void withdraw() {
    if (is_visible(*store_, opening_.save_id)) return;
    remove_metadata();
    for (const RankReport& report : reports_.ranks) {
      for (const FileReport& file : report.files)
        remove_quietly(*store_, data_file_name(report.rank, file.file, opening_.attempt));
    }
    is_uncommitted_ = false;
    is_withdrawn_ = true;
  }

  // A save that has written and then ends where `publish` is not, or not yet, is withdrawn: a rank
  // is lost, or has no memory. Does nothing on ranks but 0.
  void give_up() noexcept {
    if (!is_uncommitted_) return;
    try {
      withdraw();
    } catch (const std::exception&) {
      return;  // the next save removes them
    }
  }

  // For whom the other ranks are lost at the end.
  [[nodiscard]] std::string outcome(bool is_committed) const {
    const std::string save = "save " + opening_.save_id;
    if (is_committed) return save + " is complete, but the other ranks are lost";
    if (is_withdrawn_) return save + " is not complete, and the other ranks are lost";
    return "the other ranks are lost, and whether " + save +
           " is complete is not known here: ask committed() for it";
  }

  std::vector<Leaf> leaves_;
  const EmptyDicts empty_dicts_;  // rank 0
  std::shared_ptr<Store> store_;
  Group& group_;
  const SaveOptions& options_;
  std::vector<PlannedLeaf> planned_;            // by leaf
  std::vector<std::vector<HeldChunk>> chunks_;  // by leaf
  std::vector<std::uint64_t> value_digests_;    // by leaf
  std::unique_ptr<StoreHold> hold_;             // rank 0; null: the store has none
  std::string attempt_;                         // rank 0
  Replaced replaced_;                           // rank 0
  Leftovers leftovers_;                         // rank 0
  std::optional<Probe> probe_;                  // rank 0, while ranks look for it
  ProbeLook look_;                              // of another rank
  Opening opening_;
  OwnPlan own_;
  std::vector<HeldCopy> copies_;         // of what others hold too
  std::vector<const OwnItem*> sampled_;  // of `own_`, in the order of `copies_`
  RankReport report_;                    // guarded by mutex_ while files are written
  std::optional<SavePlan> plan_;         // rank 0
  Reports reports_;                      // rank 0: everybody's
  std::optional<DcpCommit> commit_;      // rank 0: written, and not published
  bool is_uncommitted_ = false;          // rank 0: all ranks have written
  bool is_withdrawn_ = false;            // rank 0: it could not commit
  IoCounters counters_;
  std::optional<Meter> meter_;  // of what this rank writes
  std::mutex mutex_;
};

SaveResult Saver::commit() {
  SaveResult result;
  bool is_committed = false;
  const auto conclude = [&](const Bytes&) {
    publish(result);
    is_committed = true;
    is_uncommitted_ = false;
    leftovers_.after_commit(*store_);
    return to_message(std::pair(result.files, result.total_bytes));
  };
  Bytes told;
  try {
    told = confer(group_, "committing a checkpoint",
                  {[] { return Bytes(); }, combine_nothing, conclude});
  } catch (const Error& error) {
    give_up();
    // An error of all ranks has them: then rank 0 has told how it ended.
    if (group_.size() == 1 || !error.peers().empty()) throw;
    throw Error(error.code(), outcome(is_committed) + ": " + error.message())
        .at_path(store_->name())
        .while_doing("committing a checkpoint");
  }
  static_cast<IoReport&>(result) = counters_.report();
  result.save_id = opening_.save_id;
  std::tie(result.files, result.total_bytes) =
      from_message<std::pair<std::uint64_t, std::uint64_t>>(told);
  return result;
}

}  // namespace

std::unique_ptr<GroupSave> dcp_save(const Value& tree, std::shared_ptr<Store> store, Group& group,
                                    const SaveOptions& options) {
  return std::make_unique<Saver>(tree, std::move(store), group, options);
}

}  // namespace tessera
