#include "checkpoint/write/destination.h"

#include <algorithm>
#include <vector>

#include "base/one_of.h"
#include "checkpoint/open/belonging.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_target(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what).at_path(path);
}

// The target of a kind that is a file, named by its path. A link stays, and leads to the new file.
Destination file_destination(const std::filesystem::path& path, CheckpointKind kind) {
  if (kind_of_file_name(path) != kind) {
    refuse_target(path, "the target's extension is " + path.extension().string() +
                            ", the kind is " + std::string(to_string(kind)));
  }
  const std::filesystem::path file = end_of_links(path.string());
  return {directory_of(file), file.filename().string(), Publishing::file};
}

// The target of a kind that is a directory.
Destination directory_destination(const std::string& path, CheckpointKind kind) {
  if (kind_of_file_name(path)) {
    refuse_target(path, "a checkpoint of kind " + std::string(to_string(kind)) +
                            " is a directory, the target names a file");
  }
  return {path, "", kind == CheckpointKind::dcp ? Publishing::marker : Publishing::directory};
}

bool can_be_in_store(const ConvertOptions& options) {
  return !options.resume && !is_set(options) &&
         (is_one_file(options.to) || options.to == CheckpointKind::dcp);
}

Destination destination_in(const Location& where, const ConvertOptions& options) {
  const bool single = is_one_file(options.to);
  if (!can_be_in_store(options)) {
    throw Error(ErrorCode::unsupported,
                "in a store a DCP checkpoint or one file can be made, and not resumed")
        .at_path(to_string(where));
  }
  if (where.name.empty() == single) {
    throw Error(ErrorCode::invalid_argument,
                single ? "a file needs the name of an object in the store"
                       : "a DCP checkpoint is at the root of a store, not an object in it")
        .at_path(to_string(where));
  }
  const Publishing publishing = single ? Publishing::file : Publishing::marker;
  return {where.store->name(), where.name, publishing, where.store};
}

// `in_parts`: safetensors of several files.
Destination named_destination(const std::string& path, CheckpointKind kind, bool in_parts) {
  if (!row_of(kind).is_written) {
    throw Error(ErrorCode::unsupported,
                "checkpoints of this kind are read, not written: " + std::string(to_string(kind)));
  }
  if (!is_one_file(kind)) return directory_destination(path, kind);
  if (kind_of_file_name(path)) return file_destination(path, kind);
  return {path, std::string(row_of(kind).file),
          in_parts ? Publishing::directory : Publishing::file};
}

void require_set_of_files(const std::string& path, CheckpointKind kind) {
  if (kind != CheckpointKind::safetensors ||
      kind_of_file_name(path) == CheckpointKind::safetensors) {
    refuse_target(path,
                  "a size for each file, or a map of files, makes a set of safetensors, whose "
                  "target is a directory");
  }
}

}  // namespace

bool is_set(const ConvertOptions& options) {
  return options.max_shard_size > 0 || !options.file_of.empty();
}

Destination destination_of(const Location& given, const ConvertOptions& options) {
  const Location target = located_target(given);
  if (target.store) return destination_in(target, options);
  const bool in_parts = is_set(options);
  if (in_parts) require_set_of_files(target.path, options.to);
  return named_destination(target.path, options.to, in_parts);
}

// Only a checkpoint is replaced by a directory: whatever else has the name stays.
void require_checkpoint(const std::string& path) {
  const std::vector<ObjectInfo> files = posix_store(path)->list();
  if (files.empty() || holds_checkpoint(files)) return;
  throw Error(ErrorCode::already_exists, "a directory that holds no checkpoint is there already")
      .at_path(path);
}

std::string written_path(const Destination& destination) {
  if (destination.store && !destination.file.empty())
    return destination.directory + "/" + destination.file;
  if (destination.publishing != Publishing::file) return destination.directory;
  return (std::filesystem::path(destination.directory) / destination.file)
      .lexically_normal()
      .string();
}

}  // namespace tessera
