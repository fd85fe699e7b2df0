#include "checkpoint/write/destination.h"

#include <algorithm>
#include <vector>

#include "base/text.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse_target(const std::string& path, const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what).at_path(path);
}

// The target of a kind that is a file: the one that was named, or one in the directory that was.
Destination file_destination(const std::filesystem::path& path, CheckpointKind kind) {
  const bool is_inside = names_directory(path);
  if (!is_inside && kind_of_file_name(path).value_or(kind) != kind) {
    refuse_target(path, "the target's extension is " + path.extension().string() +
                            ", the kind is " + std::string(to_string(kind)));
  }
  const std::filesystem::path file =
      end_of_links((is_inside ? path / row_of(kind).file : path).string());
  return {directory_of(file), file.filename().string(), Publishing::file};
}

// The target of a kind that is a directory. `file`: what it has, where that is one.
Destination directory_destination(const std::string& path, CheckpointKind kind,
                                  std::string_view file) {
  if (kind_of_target(path)) {
    refuse_target(path, "a checkpoint of kind " + std::string(to_string(kind)) +
                            (file.empty() ? "" : " in several files") +
                            " is a directory, the target names a file");
  }
  const bool is_marked = kind == CheckpointKind::dcp;
  return {end_of_links(without_slashes(path)), std::string(file),
          is_marked ? Publishing::marker : Publishing::directory};
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

// Whatever has the name: a link stays, and leads to what is made. `in_parts`: safetensors of
// several files.
Destination named_destination(const std::string& path, CheckpointKind kind, bool in_parts) {
  if (!row_of(kind).is_written) {
    throw Error(ErrorCode::unsupported,
                "checkpoints of this kind are read, not written: " + std::string(to_string(kind)));
  }
  if (is_one_file(kind) && !in_parts) return file_destination(path, kind);
  return directory_destination(path, kind, row_of(kind).file);
}

}  // namespace

bool is_set(const ConvertOptions& options) {
  return options.max_shard_size > 0 || !options.file_of.empty();
}

std::string_view single_file(const ConvertOptions& options) {
  return is_set(options) ? std::string_view() : row_of(options.to).file;
}

Destination destination_of(const Location& given, const ConvertOptions& options) {
  const Location target = located_target(given, single_file(options));
  if (target.store) return destination_in(target, options);
  return named_destination(target.path, options.to, is_set(options));
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
