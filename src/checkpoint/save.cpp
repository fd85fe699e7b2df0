#include "checkpoint/save.h"

#include <memory>
#include <new>

#include "base/log.h"
#include "base/parallel.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/run/to_store.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/save_dcp.h"
#include "checkpoint/save/save_part.h"
#include "checkpoint/together/save_olmo.h"
#include "checkpoint/together/state_sums.h"
#include "checkpoint/write/destination.h"
#include "comm/confer.h"
#include "comm/whereabouts.h"
#include "storage/forwarding_store.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/inner_tensors.h"

namespace tessera {

// A tree becomes a directory that all ranks write, DCP or of an OLMo kind, or one file of one
// process. What a store takes only whole is saved on a disk first.

namespace {

void require_held_here(const Tensor& tensor, const std::string& name) {
  for (const Piece& piece : tensor.pieces) {
    if (piece.storage || numel(piece.slice) == 0) continue;
    throw Error(ErrorCode::incomplete, "a part of the tensor is held by another rank").at_key(name);
  }
}

// The tree as a checkpoint that is in memory already. Throws for a tensor that is not here whole.
Checkpoint checkpoint_of(const Value& tree) {
  require_walkable(tree);
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = "memory";
  checkpoint.root = tree;
  checkpoint.leaves = leaves_of(tree);
  checkpoint.has_types = true;
  for (const NamedTensor& named : all_tensors(checkpoint.leaves)) {
    const Tensor& tensor = named.tensor.as_tensor();
    require_readable(tensor, named.name);
    require_held_here(tensor, named.name);
  }
  require_coverage(checkpoint);
  return checkpoint;
}

// What the options or the location's name say. Throws `unsupported` for a kind that is not saved.
CheckpointKind kind_to_save(const Location& where, const SaveOptions& options) {
  if (options.kind) {
    const KindRow& row = row_of(*options.kind);
    if (row.is_saved) return row.kind;
    throw Error(ErrorCode::unsupported,
                "checkpoints of this kind are read, not written: " + std::string(row.name));
  }
  return kind_of_target(where).value_or(CheckpointKind::dcp);
}

// A set of safetensors is a directory, and nothing else is such a set.
void require_fitting(const Location& where, CheckpointKind kind, const SaveOptions& options) {
  if (options.keep_duplicates && (kind != CheckpointKind::safetensors || options.safetensors)) {
    throw Error(ErrorCode::invalid_argument,
                "SaveOptions::keep_duplicates is for one file of kind safetensors")
        .at_path(to_string(where));
  }
  if (!options.safetensors) return;
  const bool names_file = kind_of_target(where).has_value();
  if (kind == CheckpointKind::safetensors && !names_file) return;
  throw Error(ErrorCode::invalid_argument,
              "SaveOptions::safetensors makes a directory of kind safetensors, and this is " +
                  (names_file ? "a file" : "of kind " + std::string(to_string(kind))))
      .at_path(to_string(where));
}

// The store whose root the location is. Throws `invalid_argument` for one that names an object.
std::shared_ptr<Store> root_of(const Location& where) {
  if (where.name.empty()) return directory_store(where);
  throw Error(ErrorCode::invalid_argument,
              "a distributed checkpoint is at the root of a store, not an object in it")
      .at_path(to_string(where));
}

void require_plain(const Location& where, const SaveOptions& options) {
  if (options.compression != Compression::none) {
    throw Error(ErrorCode::unsupported, "a single file is not compressed: save a DCP checkpoint")
        .at_path(to_string(where));
  }
  if (options.name || options.dtype) {
    throw Error(ErrorCode::unsupported,
                "a single file is saved as the tree is: rename and convert it with `convert`")
        .at_path(to_string(where));
  }
}

void require_one_rank(const Location& where, const Group& group) {
  if (group.size() == 1) return;
  throw Error(ErrorCode::unsupported, "a file of one process, the group has " +
                                          std::to_string(group.size()) +
                                          " ranks: save a DCP checkpoint and convert it")
      .at_path(to_string(where));
}

// `kind` is torch_file or safetensors.
SaveResult save_file(const Checkpoint& tree, const Location& where, CheckpointKind kind,
                     const SaveOptions& options) {
  ConvertOptions how;
  how.to = kind;
  how.overwrite = options.overwrite;
  how.keep_duplicates = options.keep_duplicates;
  how.threads = options.threads;
  how.progress = options.progress;
  how.stop = options.stop;
  SaveResult result;
  const ConvertReport report = convert(tree, where, how);
  static_cast<IoReport&>(result) = report.io;
  result.values_in_metadata = report.values_in_metadata;
  result.files = 1;
  result.total_bytes = result.bytes_written;
  return result;
}

// What ranks say of what they save: the kind, and whether it is staged.
Bytes same_kind(const Bytes& left, const Bytes& right) {
  if (left == right) return left;
  if (left.at(0) == right.at(0))
    throw Error(ErrorCode::mismatch, "some ranks save to a store, others to a directory");
  const auto name = [](const Bytes& bytes) {
    return std::string(to_string(static_cast<CheckpointKind>(bytes.at(0))));
  };
  throw Error(ErrorCode::mismatch,
              "ranks save different kinds of checkpoint: " + name(left) + " and " + name(right));
}

// Whether ranks fill the files of a directory together.
bool is_filled_together(CheckpointKind kind, const SaveOptions& options) {
  return is_olmo_kind(kind) || (kind == CheckpointKind::safetensors && options.safetensors);
}

SaveResult save_staged(const Value& tree, const Location& where, const SaveOptions& options,
                       Group& group, const JobLog& log);

// Tells of each phase. `failure`: as save_or_fail() has it; null: none.
SaveResult save_in_phases(const Value& tree, const Location& given, const SaveOptions& options,
                          Group& group, const JobLog& log, const Error* failure = nullptr) {
  Location where = given;
  CheckpointKind kind{};
  bool is_staged = false;
  std::unique_ptr<GroupSave> job;  // none: it is staged, or one file
  Checkpoint file;
  log.phase("plan", [&] {
    const auto begin = [&]() -> Bytes {
      if (failure != nullptr) throw Error(*failure);
      kind = kind_to_save(given, options);
      require_fitting(given, kind, options);
      where = located_target(given, options.safetensors ? "" : row_of(kind).file);
      if (kind == CheckpointKind::dcp) {
        job = dcp_save(tree, root_of(where), group, options);
      } else if (is_filled_together(kind, options) && needs_staging(where)) {
        is_staged = true;
        if (group.rank() == 0) require_target(where, options_to_upload(options));
      } else if (is_filled_together(kind, options)) {
        job = olmo_kind_save(tree, where, kind, options, group);
      } else {
        require_one_rank(where, group);
        require_plain(where, options);
        file = checkpoint_of(tree);
      }
      return {static_cast<std::byte>(kind), static_cast<std::byte>(is_staged)};
    };
    const Bytes prepared =
        confer(group, "planning a checkpoint",
               {begin, same_kind, [&](const Bytes&) { return job ? job->prepare() : Bytes(); }});
    if (job) job->plan(prepared);
    return 0;
  });
  if (is_staged) {
    SaveOptions how = options;
    how.kind = kind;
    return save_staged(tree, given, how, group, log);
  }
  SaveResult result;
  if (!job) {
    log.phase("write", [&] {
      result = save_file(file, where, kind, options);
      return result.bytes_written;
    });
    return result;
  }
  log.phase("write", [&] { return job->write(); });
  log.phase("commit", [&] {
    result = job->commit();
    return 0;
  });
  return result;
}

// `options` have the kind.
SaveResult save_staged(const Value& tree, const Location& where, const SaveOptions& options,
                       Group& group, const JobLog& log) {
  const Staging staging(group);
  const std::string place = staging.place_for(to_string(where));
  SaveOptions on_disk = options;
  on_disk.overwrite = false;
  on_disk.progress = first_half(options.progress);
  SaveResult result = save_in_phases(tree, place, on_disk, group, log);
  log.phase("upload", [&] {
    upload_staged(place, where, *options.kind, options_to_upload(options), group);
    return result.bytes_written;
  });
  return result;
}

}  // namespace

SaveResult save_or_fail(const std::optional<Error>& failure, const Value& tree,
                        const Location& where, const SaveOptions& options, Group& group) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("saving a checkpoint");
  const JobLog log(options.events, "save", group.rank(), to_string(where));
  SaveResult result;
  try {
    log.phase("all", [&] {
      result = save_in_phases(tree, where, options, group, log, failure ? &*failure : nullptr);
      return result.bytes_written;
    });
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::io, "no memory is left").while_doing("saving a checkpoint");
  }
  return result;
}

SaveResult save(const Value& tree, const Location& where, const SaveOptions& options,
                Group& group) {
  return save_or_fail(std::nullopt, tree, where, options, group);
}

SaveResult save(const Value& tree, const Location& where, const SaveOptions& options) {
  return save(tree, where, options, *solo_group());
}

SaveResult save(const Value& tree, const Location& where, Group& group) {
  return save(tree, where, {}, group);
}

SaveResult save_part(const Value& tree, const Location& where, int rank,
                     const SaveOptions& options) {
  const HeedStop heeding(options.stop);
  const Purpose purpose("saving a part of a checkpoint");
  const JobLog log(options.events, "save", rank, to_string(where));
  SaveResult result;
  log.phase("all", [&] {
    if (options.kind.value_or(CheckpointKind::dcp) != CheckpointKind::dcp)
      throw Error(ErrorCode::unsupported, "parts of a checkpoint are DCP's alone");
    result = dcp_save_part(tree, *root_of(located_target(where)), rank, options, log);
    return result.bytes_written;
  });
  return result;
}

bool committed(const Location& where, const std::string& save_id) {
  const auto store = directory_store(where);
  return is_visible(*store, save_id) || is_saved_as(*store, save_id);
}

}  // namespace tessera
