// Saving by N ranks into one directory:
//   1. rank 0 makes the directory's sibling, NAME-tmp-<attempt>, and puts a probe into it. Every
//   rank says what it is about to save, as digests;
//   2. every rank writes the elements that it holds into whatever file they belong to, and makes
//   them durable;
//   3. every rank reports what it wrote into each record, and the makers of files finish them;
//   4. rank 0 sees all files in the store, writes the digests of the state and config.yaml, last,
//   and gives the sibling its name in one step: the commit (checkpoint-rows O-30, O-31, OQ-02).
// A failure in any step reaches every rank before the next one begins; the sibling is removed.
#include "checkpoint/together/save_olmo.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <thread>
#include <utility>

#include "base/digest.h"
#include "base/host.h"
#include "base/log.h"
#include "base/parallel.h"
#include "base/random_id.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/save/opening.h"
#include "checkpoint/save/probe.h"
#include "checkpoint/save/save_dcp.h"
#include "checkpoint/together/olmo_files.h"
#include "checkpoint/together/share.h"
#include "checkpoint/together/state_sums.h"
#include "checkpoint/write/destination.h"
#include "comm/confer.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "format/olmo/config.h"
#include "storage/posix/system.h"
#include "storage/sub_store.h"
#include "tessera/error.h"
#include "tessera/new_directory.h"
#include "value/digest.h"

namespace tessera {
namespace {

constexpr std::chrono::seconds kVisibleWithin{90};  // of other ranks (fault-rows F24)
constexpr std::chrono::milliseconds kLookEvery{100};

ByteView bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// The store that the directory is in, and its name there.
struct Place {
  std::shared_ptr<Store> parent;
  std::string name;
};

Place place_of(const Location& where) {
  if (where.store) {
    if (!where.name.empty()) return {where.store, where.name};
    throw Error(ErrorCode::invalid_argument,
                "an OLMo checkpoint is a directory in a store: name it")
        .at_path(to_string(where));
  }
  const std::string path = without_slashes(where.path);
  return {posix_store(directory_of(path)), std::filesystem::path(path).filename().string()};
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

void require_plain(const SaveOptions& options) {
  require_threads(options.threads);
  const bool plain = !options.name && !options.dtype && !options.writer &&
                     options.compression == Compression::none &&
                     options.copies != IfDiffers::keep && options.values == IfDiffers::refuse;
  if (plain) return;
  throw Error(ErrorCode::unsupported,
              "names, types, writers, compression and kept copies are of DCP saves alone");
}

// Two messages in one.
struct Pair {
  Bytes first, second;
};

Bytes encode(const Pair& pair) {
  return MessageWriter().block(pair.first).rest(pair.second).take();
}

Pair decode_pair(const Bytes& bytes) {
  MessageReader message(bytes);
  const auto first = message.block();
  return {Bytes(first.begin(), first.end()), Bytes(message.rest().begin(), message.rest().end())};
}

// Of what ranks are about to save, and of the sizes of their pickles: numbers of 64 bits, by rank.
Bytes combine_plans(const Bytes& left, const Bytes& right) {
  Pair a = decode_pair(left);
  const Pair b = decode_pair(right);
  return encode({combine_intents(a.first, b.first), side_by_side(std::move(a.second), b.second)});
}

// Of what ranks have written, and of the digests of their parts of the state.
Bytes combine_written(const Bytes& left, const Bytes& right) {
  const Pair a = decode_pair(left);
  const Pair b = decode_pair(right);
  return encode({combine_sums(a.first, b.first), combine_state_sums(a.second, b.second)});
}

class Saver final : public OlmoKindSave {
 public:
  Saver(const Value& tree, const Location& where, CheckpointKind kind, const SaveOptions& options,
        Group& group)
      : kind_(kind),
        options_(options),
        group_(group),
        place_(place_of(where)),
        config_(config_text(options.olmo, kind)),
        state_(olmo_state_of(tree)),
        sources_(state_),
        tensors_(sources_.all(), group.rank(), group.size()),
        files_({state_, sources_, tensors_, kind, options, group.rank(), group.size()}) {
    require_plain(options);
    require_own_kind(config_, kind);
  }

  void plan() override {
    begin();
    agree_on_state();
    if (kind_ == CheckpointKind::olmo_torch_new) plan_dcp();
  }

  std::uint64_t write() override {
    if (dcp_) dcp_bytes_ = dcp_->write();
    const Bytes told = confer_after_long_work(
        group_, options_.stop, [this](const std::stop_token& stop) { write_files(stop); },
        "writing a checkpoint",
        {[this] {
           return encode({encode_sums(sums_), encode_state_sums(state_sums_)});
         },
         combine_written, [this](const Bytes& all) { return conclude_written(all); }});
    sums_ = decode_sums(told);
    return bytes_written_ + dcp_bytes_;
  }

  SaveResult commit() override;

 private:
  [[nodiscard]] bool leads() const { return group_.rank() == 0; }
  [[nodiscard]] std::string path() const { return place_.parent->name() + "/" + place_.name; }

  // Rank 0 makes the sibling with a probe in it; the others learn its name.
  void begin() {
    const auto make = [this](const Bytes&) {
      if (options_.overwrite) require_replaceable();
      directory_ = place_.parent->new_directory(
          place_.name, options_.overwrite ? IfExists::replace : IfExists::fail);
      const std::string attempt = random_attempt();
      probe_.emplace(std::make_shared<SubStore>(place_.parent, directory_->working()),
                     probe_name(attempt));
      return MessageWriter()
          .text(directory_->working())
          .text(probe_name(attempt))
          .text(random_uuid())
          .take();
    };
    const Bytes told =
        confer(group_, "planning a checkpoint", {[] { return Bytes(); }, combine_nothing, make});
    MessageReader message(told);
    working_ = std::make_shared<SubStore>(place_.parent, message.text());
    probe_name_ = message.text();
    save_id_ = message.text();
  }

  // Only a checkpoint is replaced: whatever else has the name stays.
  void require_replaceable() const {
    const std::vector<ObjectInfo> files = SubStore(*place_.parent, place_.name).list("");
    if (files.empty() || holds_checkpoint(files)) return;
    throw Error(ErrorCode::already_exists, "a directory that holds no checkpoint is there already")
        .at_path(path());
  }

  void agree_on_state() {
    const auto contribute = [this] {
      Intents mine;
      mine.first.leaves = tensors_.digest();
      mine.first.values = digest_of_values();
      if (!leads() && !sees_probe(*working_, probe_name_))
        mine.unseeing.ranks.push_back({group_.rank(), host_name()});
      return encode({encode_intents(mine), MessageWriter().number(files_.pickle_size()).take()});
    };
    const auto conclude = [this](const Bytes& all) {
      const Pair plans = decode_pair(all);
      const Intents intents = decode_intents(plans.first);
      require_seen_by_all(intents.unseeing, group_.size(), *working_);
      const bool same = intents.same_leaves && intents.same_values;
      return MessageWriter().count(same ? 1 : 0).rest(plans.second).take();
    };
    const Bytes told =
        confer(group_, "planning a checkpoint", {contribute, combine_plans, conclude});
    probe_.reset();
    MessageReader message(told);
    if (message.count() == 0) find_difference();
    std::vector<std::uint64_t> sizes;
    while (!message.at_end()) sizes.push_back(message.number<std::uint64_t>());
    agree(group_, "planning a checkpoint", [&] { files_.open(sizes); });
  }

  // Of all that is no tensor outside of the trainer's state (checkpoint-rows OQ-09).
  [[nodiscard]] std::vector<std::pair<std::string, std::uint64_t>> values_of_state() const {
    std::vector<std::pair<std::string, std::uint64_t>> values;
    const auto no_elements = [](const Tensor&) { return std::uint64_t{0}; };
    OlmoState shared{state_.model, state_.optim, {}};
    for (const Leaf& leaf : leaves_of(shared.tree())) {
      if (leaf.value.is(Value::Kind::tensor)) continue;
      values.emplace_back(leaf.name, digest_of(leaf.value, no_elements));
    }
    return values;
  }

  [[nodiscard]] std::uint64_t digest_of_values() const {
    RunningDigest all;
    for (const auto& [name, digest] : values_of_state()) {
      all.add(bytes_of(name));
      all.add(std::as_bytes(std::span(&digest, 1)));
    }
    return all.value();
  }

  // Throws on all ranks, naming the first thing that ranks do not have alike.
  void find_difference() {
    const auto contribute = [this] {
      MessageWriter message;
      for (const auto& [name, digest] : values_of_state()) message.text(name).number(digest);
      for (const PlacedTensor& placed : tensors_.all()) {
        const Tensor& tensor = placed.leaf->value.as_tensor();
        const std::string is = std::string(to_string(tensor.dtype)) + to_string(tensor.shape);
        message.text(placed.leaf->name).number(digest64(bytes_of(is)));
      }
      return MessageWriter().block(message.take()).take();
    };
    const auto conclude = [](const Bytes& all) -> Bytes {
      std::vector<std::map<std::string, std::uint64_t>> ranks;
      for (MessageReader message(all); !message.at_end();) {
        ranks.emplace_back();
        for (MessageReader one(message.block()); !one.at_end();) {
          std::string name = one.text();
          ranks.back().emplace(std::move(name), one.number<std::uint64_t>());
        }
      }
      refuse_first_difference(ranks);
    };
    (void)confer(
        group_, "comparing states",
        {contribute,
         [](Bytes left, const Bytes& right) { return side_by_side(std::move(left), right); },
         conclude});
  }

  [[noreturn]] static void refuse_first_difference(
      const std::vector<std::map<std::string, std::uint64_t>>& ranks) {
    for (std::size_t r = 1; r < ranks.size(); ++r) {
      const auto [a, b] = std::ranges::mismatch(ranks[0], ranks[r]);
      if (a == ranks[0].end() && b == ranks[r].end()) continue;
      const bool of_first = a != ranks[0].end();
      throw Error(ErrorCode::mismatch, "ranks 0 and " + std::to_string(r) +
                                           " do not have the same here, outside of the trainer's "
                                           "state")
          .at_key(of_first ? a->first : b->first);
    }
    throw Error(ErrorCode::mismatch, "ranks hold other parts of tensors than they say");
  }

  // The model and the optimizer as a DCP checkpoint inside of the directory.
  void plan_dcp() {
    dcp_tree_ = OlmoState{state_.model, state_.optim, {}}.tree();
    dcp_options_ = options_;
    dcp_options_.kind = CheckpointKind::dcp;
    agree(group_, "planning a checkpoint", [this] {
      dcp_ =
          dcp_save(dcp_tree_, std::make_shared<SubStore>(working_, std::string(olmo::kDcpFolder)),
                   group_, dcp_options_);
    });
    dcp_->plan(confer(group_, "planning a checkpoint",
                      {[] { return Bytes(); }, combine_nothing,
                       [this](const Bytes&) { return dcp_->prepare(); }}));
  }

  void write_files(const std::stop_token& stop) {
    const auto tell_progress = [this](const Progress& progress) {
      group_.make_progress(progress.done);
      if (options_.progress && !dcp_) options_.progress(progress);
    };
    Meter meter(tell_progress, bytes_to_write(), stop);
    for (const auto& file : files_.files()) {
      file->write(*working_, tensors_, options_.threads, meter);
      for (const auto& [at, sum] : file->sums()) {
        sums_[at].add(sum);
        bytes_written_ += sum.bytes;
      }
    }
    state_sums_ = sum_state(tensors_, group_.rank(), group_.size(), options_.threads, stop);
    meter.finish();
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

  // Rank 0. Returns what was written into each record.
  Bytes conclude_written(const Bytes& all) {
    Pair written = decode_pair(all);
    const SummedState state = summed(tensors_, written.second);
    digests_ = state.digests;
    if (!state.unlike.empty()) judge(state.unlike);
    return std::move(written.first);
  }

  void judge(const std::vector<std::string>& unlike) const {
    const std::string text = std::to_string(unlike.size()) +
                             " tensors differ between ranks that hold the same part of them, "
                             "the first is " +
                             unlike.front();
    if (options_.copies == IfDiffers::warn) return log(LogLevel::warning, text);
    throw Error(ErrorCode::mismatch, text).at_key(unlike.front());
  }

  // By the makers. Returns names and sizes of this rank's files.
  Bytes finish_files() {
    MessageWriter message;
    for (const auto& file : files_.files()) {
      if (!file->is_made_here()) continue;
      file->finish(sums_);
      message.text(file->name()).number(file->size());
    }
    return message.take();
  }

  // Rank 0.
  void require_in_store(const Bytes& all) {
    for (MessageReader message(all); !message.at_end();) {
      const std::string name = message.text();
      const auto size = message.number<std::uint64_t>();
      const std::uint64_t found = working_->open(name)->size();
      if (found != size) {
        throw Error(ErrorCode::incomplete, "a file has " + std::to_string(found) + " bytes here, " +
                                               std::to_string(size) + " were written")
            .at_path(working_->name() + "/" + name);
      }
      ++result_.files;
      result_.total_bytes += size;
    }
  }

  void put_file(std::string_view name, const std::string& text) {
    put(*working_, name, bytes_of(text), IfExists::fail);
    ++result_.files;
    result_.total_bytes += text.size();
  }

  // Rank 0.
  Bytes publish(const Bytes& all) {
    require_in_store(all);
    if (kind_ == CheckpointKind::olmo_local)
      put_file(olmo::kWorldFile, world_file_text(group_.size()));
    put_file(kStateFile, state_file_text(digests_, save_id_));
    put_file(olmo::kConfigFile, config_);
    group_.require_peers();
    directory_->commit();
    is_committed_ = true;
    return MessageWriter().number(result_.files).number(result_.total_bytes).take();
  }

  // A network file system may show the new directory late; opening asks the server.
  void wait_until_visible() const {
    const auto end = std::chrono::steady_clock::now() + kVisibleWithin;
    const std::string config = place_.name + "/" + std::string(olmo::kConfigFile);
    while (!place_.parent->exists(config)) {
      if (std::chrono::steady_clock::now() >= end) {
        throw Error(ErrorCode::timeout, "the checkpoint is committed, and not visible here")
            .at_path(path());
      }
      std::this_thread::sleep_for(kLookEvery);
    }
  }

  const CheckpointKind kind_;
  const SaveOptions& options_;
  Group& group_;
  const Place place_;
  const std::string config_;
  const OlmoState state_;
  const SourceTensors sources_;
  const PlacedTensors tensors_;
  OlmoFiles files_;
  std::unique_ptr<NewDirectory> directory_;  // rank 0
  std::optional<Probe> probe_;               // rank 0, while ranks look for it
  std::string probe_name_;
  std::string save_id_;
  std::shared_ptr<Store> working_;
  Value dcp_tree_;
  SaveOptions dcp_options_;
  std::unique_ptr<DcpSave> dcp_;  // olmo_torch_new
  FileSums sums_;                 // of this rank, then of all
  StateSums state_sums_;
  StateDigests digests_;  // rank 0
  SaveResult result_;
  std::uint64_t bytes_written_ = 0;
  std::uint64_t dcp_bytes_ = 0;
  bool is_committed_ = false;  // rank 0
};

SaveResult Saver::commit() {
  if (dcp_) {
    const SaveResult inner = dcp_->commit();
    result_.files = inner.files;
    result_.total_bytes = inner.total_bytes;
  }
  Bytes told;
  try {
    told =
        confer(group_, "committing a checkpoint",
               {[this] { return finish_files(); },
                [](Bytes left, const Bytes& right) { return side_by_side(std::move(left), right); },
                [this](const Bytes& all) { return publish(all); }});
  } catch (const Error& error) {
    if (group_.size() == 1 || !error.peers().empty()) throw;
    const char* outcome = !leads()        ? "whether it is complete is not known here"
                          : is_committed_ ? "it is complete"
                                          : "it is not complete";
    throw Error(error.code(), "the other ranks were lost while the save ended, and " +
                                  std::string(outcome) + ": " + error.message())
        .at_path(path())
        .while_doing("committing a checkpoint");
  }
  agree(group_, "waiting for the checkpoint", [this] { wait_until_visible(); });
  MessageReader message(told);
  result_.files = message.number<std::uint64_t>();
  result_.total_bytes = message.number<std::uint64_t>();
  result_.bytes_written = bytes_written_ + dcp_bytes_;
  result_.save_id = save_id_;
  return result_;
}

}  // namespace

std::unique_ptr<OlmoKindSave> olmo_kind_save(const Value& tree, const Location& where,
                                             CheckpointKind kind, const SaveOptions& options,
                                             Group& group) {
  return std::make_unique<Saver>(tree, where, kind, options, group);
}

}  // namespace tessera
