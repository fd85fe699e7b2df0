#include "checkpoint/write/convert.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <string_view>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/foreign.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/dequantize.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/missing.h"
#include "checkpoint/read/safetensors_digests.h"
#include "checkpoint/read/select.h"
#include "checkpoint/read/slices.h"
#include "checkpoint/save/place.h"
#include "checkpoint/write/destination.h"
#include "checkpoint/write/flat_leaves.h"
#include "checkpoint/write/resume.h"
#include "checkpoint/write/targets.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/lock.h"
#include "storage/posix/replaced_directory.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/stores.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr int kMostRanks = 1 << 20;

void require_convertible(DType dtype, bool allow_wrap) {
  const std::string wanted(to_string(dtype));
  if (!can_cast(DType::float32, dtype))
    throw Error(ErrorCode::unsupported, "no conversion of floating tensors to " + wanted);
  if (can_wrap(DType::float32, dtype) && !allow_wrap) {
    throw Error(ErrorCode::invalid_argument,
                "allow_wrap is needed: " + wanted + " holds few of the values of floating tensors");
  }
}

// Options that only some kinds of targets use, as the command calls them. What is given and would
// have no effect is refused: whoever gives it expects one.
struct OptionRow {
  std::string_view name;
  bool (*is_given)(const ConvertOptions& options);
  bool (*is_used)(const KindRow& target);
};
using O = const ConvertOptions&;
using K = const KindRow&;
constexpr std::array<OptionRow, 9> kOptions{{
    {"--ranks", [](O o) { return o.ranks != 1; }, [](K k) { return k.is_split; }},
    {"--unit", [](O o) { return !o.olmo.unit.empty(); },
     [](K k) { return k.kind == CheckpointKind::olmo_local; }},
    {"--orig-params", [](O o) { return o.olmo.orig_params.has_value(); },
     [](K k) { return k.kind == CheckpointKind::olmo_local; }},
    {"--config", [](O o) { return !o.olmo.config.empty(); }, [](K k) { return k.is_olmo; }},
    {"--safetensors", [](O o) { return o.olmo.safetensors; },
     [](K k) { return k.kind == CheckpointKind::olmo_full; }},
    {"--model-only", [](O o) { return o.olmo.model_only; },
     [](K k) { return k.kind == CheckpointKind::olmo_full; }},
    {"--max-shard-size", [](O o) { return o.max_shard_size > 0; },
     [](K k) { return k.kind == CheckpointKind::safetensors; }},
    {"--keep-duplicates", [](O o) { return o.keep_duplicates; },
     [](K k) { return k.kind == CheckpointKind::safetensors; }},
    {"file_of", [](O o) { return !o.file_of.empty(); },
     [](K k) { return k.kind == CheckpointKind::safetensors; }},
}};

void require_used(const ConvertOptions& options) {
  const KindRow& target = row_of(options.to);
  for (const OptionRow& option : kOptions) {
    if (!option.is_given(options) || option.is_used(target)) continue;
    throw Error(ErrorCode::invalid_argument, "the option " + std::string(option.name) +
                                                 " has no effect on a target of kind " +
                                                 std::string(target.name));
  }
}

// Whether the source has lost which keys were numbers. OLMo's kinds have names for parameters.
bool may_number(const Checkpoint& checkpoint, const ConvertOptions& options) {
  return !checkpoint.has_types && !row_of(options.to).is_olmo;
}

// Whether the target gets the source's leaves as they are: there may be a million, and no copy.
bool takes_all(const Checkpoint& checkpoint, const ConvertOptions& options) {
  return options.to == CheckpointKind::torch_file && options.only.empty() &&
         keeps_leaves(options) &&
         !(may_number(checkpoint, options) && has_numbered_state(checkpoint.leaves));
}

// What ranks had of their own stays as it is, whatever the number of ranks that come.
void note_keys_of_ranks(const std::vector<Leaf>& leaves, const ConvertOptions& options,
                        std::vector<std::string>& notes) {
  if (!row_of(options.to).is_split) return;
  std::vector<std::string> names;
  for (const Leaf& leaf : leaves) names.push_back(leaf.name);
  for (const auto& [family, numbers] : keys_of_ranks(names)) {
    if (numbers.size() == static_cast<std::size_t>(options.ranks)) continue;
    notes.push_back(printable(family, 200) + "* is what " + std::to_string(numbers.size()) +
                    (numbers.size() == 1 ? " rank" : " ranks") +
                    " had of their own, and is kept as it is: " + std::to_string(options.ranks) +
                    (options.ranks == 1 ? " rank" : " ranks") + " will not find each its part");
  }
}

// The leaves that the options choose, under their new names and with their new types.
std::vector<Leaf> chosen_leaves(const Checkpoint& checkpoint, const ConvertOptions& options,
                                std::vector<std::string>& notes) {
  std::vector<Leaf> leaves =
      options.dequantize ? dequantized(checkpoint.leaves, *options.dequantize) : checkpoint.leaves;
  if (may_number(checkpoint, options)) {
    for (const std::string& state : number_state(leaves))
      notes.push_back("the keys of " + state + " are numbers again, as its param_groups have them");
  }
  Selection chosen = select(leaves, options.only, checkpoint.path);
  leaves = std::move(chosen.leaves);
  notes.insert(notes.end(), chosen.notes.begin(), chosen.notes.end());
  slice(leaves, options.slice, checkpoint.path);
  const std::vector<std::string> renamed = rename(leaves, options.rename);
  notes.insert(notes.end(), renamed.begin(), renamed.end());
  if (options.dtype) convert_floating(leaves, *options.dtype);
  note_keys_of_ranks(leaves, options, notes);
  return leaves;
}

void require_bounded_tensors(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) require_bounded(leaf.value.as_tensor(), leaf.name);
  }
}

// What the target gets of the source, if not all.
std::vector<Leaf> leaves_for(const Checkpoint& checkpoint, const ConvertOptions& options,
                             std::vector<std::string>& notes) {
  try {
    std::vector<Leaf> leaves = chosen_leaves(checkpoint, options, notes);
    if (options.to == CheckpointKind::torch_file) return leaves;
    // A torch.save file keeps views as they are; whatever it writes anew goes through a reader.
    require_flat_names(leaves);
    if (options.to == CheckpointKind::safetensors) add_inner_tensors(leaves);
    require_bounded_tensors(leaves);
    return leaves;
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
}

std::uint64_t count_tensors(const std::vector<Leaf>& leaves) {
  return static_cast<std::uint64_t>(
      std::count_if(leaves.begin(), leaves.end(),
                    [](const Leaf& leaf) { return leaf.value.is(Value::Kind::tensor); }));
}

// Writes everything that is not yet visible afterwards, and ends all checks.
void write_target(ConvertJob& job) {
  switch (job.options.to) {
    case CheckpointKind::dcp:
      write_dcp(job);
      break;
    case CheckpointKind::torch_file:
      write_torch(job);
      break;
    case CheckpointKind::safetensors:
      write_safetensors(job);
      break;
    case CheckpointKind::olmo_full:
    case CheckpointKind::olmo_torch_new:
    case CheckpointKind::olmo_legacy:
    case CheckpointKind::olmo_local:
      write_olmo(job);
      break;
    default:
      break;  // is not written (KindRow::is_written), and has no destination
  }
  if (job.appears_whole) job.counters.add(job.checks->read_rest(job.threads, job.meter.stop()));
}

// The report of a conversion that has read and written nothing yet.
ConvertReport report_of(const std::vector<Leaf>& leaves, const Destination& target) {
  ConvertReport report;
  report.target = written_path(target);
  report.tensors = count_tensors(leaves);
  return report;
}

// Whatever a run that went on found done has been checked by the one that was interrupted.
ConvertReport finished_report(const std::vector<Leaf>& leaves, const Destination& target) {
  ConvertReport report = report_of(leaves, target);
  report.bytes_resumed = tensor_bytes(leaves);
  report.notes.emplace_back("an interrupted run had finished the target");
  return report;
}

// The place where the target comes into being.
struct TargetPlace {
  LockedFd lock;  // one conversion at a time into a directory that is not replaced whole
  NewDirectories made;

  explicit TargetPlace(const Destination& where) : made(where.store ? "." : where.directory) {
    if (where.store) return;
    if (where.publishing == Publishing::marker) {
      make_directories(where.directory);
      lock_directory(where.directory);
    } else if (where.publishing == Publishing::file) {
      remove_abandoned_temporaries(where.directory + "/" + where.file);
    }
  }

  // Another conversion may have made the directory after we looked: then it is not ours to remove.
  void lock_directory(const std::string& directory) try {
    lock = locked_directory(directory);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::conflict) made.keep();
    throw;
  }
};

// The store that a conversion writes to, and how what is there becomes the target. Directories
// without a marker of their own appear whole, as does what may be interrupted.
class Output {
 public:
  Output(const Checkpoint& source, const std::vector<Leaf>& leaves, const Destination& where,
         const ConvertOptions& options)
      : directory_(where.directory) {
    if (options.resume) {
      resumption_.emplace(source, leaves, where, options);
      return;
    }
    if (where.publishing == Publishing::directory)
      whole_.emplace(where.directory, if_exists(options));
    store_ = where.store ? where.store : posix_store(whole_ ? whole_->working() : where.directory);
    store_->require_writable(probe_name(random_attempt()), options.single_writer);
    if (whole_) digested_.emplace(*store_);
  }

  static IfExists if_exists(const ConvertOptions& options) {
    return options.overwrite ? IfExists::replace : IfExists::fail;
  }

  [[nodiscard]] bool is_finished() const { return resumption_ && resumption_->is_finished(); }
  [[nodiscard]] bool appears_whole() const { return whole_ || resumption_; }
  // With the digests of what was written there; null: nobody follows them.
  [[nodiscard]] DigestingStore* digested() {
    return resumption_ ? &resumption_->store() : digested_ ? &*digested_ : nullptr;
  }
  [[nodiscard]] Store& files() { return digested() != nullptr ? *digested() : *store_; }
  [[nodiscard]] Resumption* resumption() { return resumption_ ? &*resumption_ : nullptr; }

  void publish() {
    if (whole_) whole_->commit(Belonging(*posix_store(directory_)));
    if (resumption_) resumption_->publish();
  }

  void failed(bool source_is_damaged) {
    if (resumption_) resumption_->failed(source_is_damaged);
  }

  // What an earlier run contributed.
  void add_to(ConvertReport& report) const {
    if (!resumption_) return;
    report.bytes_resumed = resumption_->bytes_kept();
    if (resumption_->was_foreign()) {
      report.notes.emplace_back(
          "what was left behind was of another conversion or damaged, and is made anew");
    }
  }

 private:
  const std::string directory_;
  std::optional<ReplacedDirectory> whole_;
  std::optional<Resumption> resumption_;
  std::shared_ptr<Store> store_;
  std::optional<DigestingStore> digested_;
};

// `as_directory`: a side file keeps the digests of its files; else the target has them elsewhere.
void make_target(ConvertJob& job, Output& output, bool as_directory) {
  try {
    write_target(job);
    if (as_directory) output.digested()->write_side_file("config.yaml");
    if (job.appears_whole) require_going_on(job.options.stop);
    output.publish();
  } catch (const Error& error) {
    output.failed(error.code() == ErrorCode::corrupt);
    throw;
  } catch (...) {
    output.failed(false);
    throw;
  }
}

}  // namespace

void require_convertible(const ConvertOptions& options) {
  require_going_on(options.stop);
  require_threads(options.threads);
  if (options.ranks < 1 || options.ranks > kMostRanks) {
    throw Error(
        ErrorCode::invalid_argument,
        std::to_string(options.ranks) + " ranks, expected 1 to " + std::to_string(kMostRanks));
  }
  if (options.memory == 0)
    throw Error(ErrorCode::invalid_argument, "a memory of 0 bytes, expected at least 1");
  require_used(options);
  if (options.dtype) require_convertible(*options.dtype, options.allow_wrap);
}

ConvertReport convert_in_place(const Checkpoint& checkpoint, const Location& target,
                               const ConvertOptions& options) {
  if (checkpoint.mapped && options.resume)
    throw Error(ErrorCode::unsupported, "what map() gave cannot be resumed");
  std::vector<std::string> notes;
  if (std::string left = text_of_left_behind(checkpoint); !left.empty())
    notes.push_back(std::move(left));
  const bool is_all = takes_all(checkpoint, options);
  const std::vector<Leaf> chosen =
      is_all ? std::vector<Leaf>() : leaves_for(checkpoint, options, notes);
  const std::vector<Leaf>& leaves = is_all ? checkpoint.leaves : chosen;
  if (lacks_files(checkpoint)) {
    for (const Leaf& leaf : leaves) require_here(leaf);
  }
  const Destination where = destination_of(target, options);
  const bool as_directory = where.publishing == Publishing::directory;
  if (as_directory && options.overwrite) require_checkpoint(where.directory);
  TargetPlace place(where);
  const auto hold = where.store ? where.store->hold() : nullptr;
  Output output(checkpoint, leaves, where, options);
  if (output.is_finished()) {
    place.made.keep();
    return finished_report(leaves, where);
  }
  ConvertReport report = report_of(leaves, where);
  report.notes = std::move(notes);
  Meter meter(options.progress, tensor_bytes(leaves), options.stop);
  IoCounters counters;
  StorageChecks checks;
  CastLosses losses;
  const Buffers buffers = buffers_for(
      options.memory, std::min(static_cast<std::uint64_t>(options.threads), report.tensors),
      request_cost_of(leaves));
  ConvertJob job{.source = checkpoint,
                 .leaves = leaves,
                 .options = options,
                 .store = output.files(),
                 .name = where.file,
                 .final_name = where.directory,
                 .if_exists = Output::if_exists(options),
                 .threads = options.threads,
                 .window = buffers.window,
                 .tile = buffers.tile,
                 .meter = meter,
                 .counters = counters,
                 .report = report,
                 .checks = &checks,
                 .losses = losses,
                 .appears_whole = output.appears_whole(),
                 .is_alone = !where.store || hold || options.single_writer,
                 .resumption = output.resumption()};
  make_target(job, output, as_directory);
  place.made.keep();
  meter.finish();
  report.io = counters.report();
  for (std::string& note : losses.notes(options.dtype.value_or(DType::float32)))
    report.notes.push_back(std::move(note));
  output.add_to(report);
  return report;
}

void CastLosses::add(const std::string& name, const CastLoss& loss) {
  if (!loss.infinities && !loss.integers) return;
  const std::lock_guard lock(mutex_);
  if (loss.infinities) infinities_.insert(name);
  if (loss.integers) integers_.insert(name);
}

std::vector<std::string> CastLosses::notes(DType dtype) const {
  std::vector<std::string> notes;
  const auto add = [&](const std::set<std::string>& names, const std::string& what) {
    if (names.empty()) return;
    std::string text = "as " + std::string(to_string(dtype)) + " " + what + ": '" +
                       printable_name(*names.begin(), 200) + "'";
    if (names.size() > 1) text += " and " + std::to_string(names.size() - 1) + " more";
    notes.push_back(std::move(text));
  };
  add(infinities_, "some finite numbers are infinite");
  add(integers_, "some whole numbers are others");
  return notes;
}

// Elements of the source's tensors on their way into a file.

FileNotes make_file(const ConvertJob& job, const std::string& name, const FileMaker& make) {
  return job.resumption != nullptr ? job.resumption->make_file(job, name, make) : make(job);
}

std::uint32_t stream_slice(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                           const Slice& slice, ByteSink& sink, std::uint64_t at) {
  const std::int64_t elements = numel(slice);
  const std::size_t element = size_of(tensor.dtype);
  TensorReader reader(tensor, name, job.tile);
  std::vector<std::byte> scratch = job.buffer_for(static_cast<std::uint64_t>(elements) * element);
  const std::uint32_t crc = write_elements(
      sink, at, elements, element,
      [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
        reader.read(slice, begin, count, buffer.data());
        const std::size_t bytes = static_cast<std::size_t>(count) * element;
        job.meter.add(bytes);
        return ByteView(buffer).first(bytes);
      },
      scratch);
  reader.hand_over(*job.checks);
  job.counters.add(reader.report());
  job.losses.add(name, reader.loss());
  return crc;
}

std::uint32_t stream_tensor(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                            ByteSink& sink, std::uint64_t at) {
  return stream_slice(job, name, tensor, whole(tensor.shape), sink, at);
}

}  // namespace tessera
