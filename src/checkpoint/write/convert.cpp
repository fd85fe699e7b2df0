#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/digests/digesting_store.h"
#include "checkpoint/read/dequantize.h"
#include "checkpoint/read/select.h"
#include "checkpoint/write/item_writer.h"
#include "checkpoint/write/targets.h"
#include "storage/posix/replaced_directory.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// What the target gets of the source.
std::vector<Leaf> leaves_for(const Checkpoint& checkpoint, const ConvertOptions& options) {
  try {
    std::vector<Leaf> leaves = options.dequantize
                                   ? dequantized(checkpoint.leaves, *options.dequantize)
                                   : checkpoint.leaves;
    leaves = select(leaves, options.only);
    rename(leaves, options.rename);
    if (options.dtype) convert_floating(leaves, *options.dtype);
    // A torch.save file keeps views as they are; whatever it writes anew goes through a reader.
    for (const Leaf& leaf : leaves) {
      const bool dense = options.to != CheckpointKind::torch_file;
      if (dense && leaf.value.is(Value::Kind::tensor))
        require_bounded(leaf.value.as_tensor(), leaf.name);
    }
    return leaves;
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
}

bool is_olmo(CheckpointKind kind) {
  return kind == CheckpointKind::olmo_full || kind == CheckpointKind::olmo_torch_new ||
         kind == CheckpointKind::olmo_legacy || kind == CheckpointKind::olmo_local;
}

// Only a checkpoint is replaced by a directory: whatever else has the name stays.
void require_checkpoint(const std::string& path) {
  const std::vector<ObjectInfo> files = posix_store(path)->list();
  const bool known = std::any_of(files.begin(), files.end(), [](const ObjectInfo& file) {
    return file.name == "config.yaml" || file.name == "rank0.pt" || file.name == "model.pt" ||
           file.name.ends_with(".safetensors") || file.name == "model/rank0.pt" ||
           file.name.ends_with(".metadata");
  });
  if (known || files.empty()) return;
  throw Error(ErrorCode::already_exists, "a directory that holds no checkpoint is there already")
      .at_path(path);
}

// The directory that becomes the store, and the file in it (empty for kinds that are directories).
struct Target {
  std::string directory;
  std::string file;
};

Target target_of(const std::string& path, CheckpointKind kind) {
  const std::filesystem::path as_path(path);
  const std::string extension = as_path.extension().string();
  const bool names_file = extension == ".safetensors" || extension == ".pt" || extension == ".pth";
  if (kind == CheckpointKind::dcp || is_olmo(kind)) {
    if (names_file) {
      throw Error(ErrorCode::invalid_argument, "a checkpoint of kind " +
                                                   std::string(to_string(kind)) +
                                                   " is a directory, the target names a file")
          .at_path(path);
    }
    return {path, ""};
  }
  const std::string wanted = kind == CheckpointKind::safetensors ? ".safetensors" : ".pt";
  if (!names_file) return {path, "model" + wanted};
  const bool fits =
      kind == CheckpointKind::safetensors ? extension == wanted : extension != ".safetensors";
  if (!fits) {
    throw Error(ErrorCode::invalid_argument, "the target's extension is " + extension +
                                                 ", the kind is " + std::string(to_string(kind)))
        .at_path(path);
  }
  const std::string directory = as_path.parent_path().string();
  return {directory.empty() ? "." : directory, as_path.filename().string()};
}

}  // namespace

std::uint32_t stream_tensor(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                            ByteSink& sink, std::uint64_t at) {
  TensorReader reader(tensor, name);
  const Slice all = whole(tensor.shape);
  const std::size_t element = size_of(tensor.dtype);
  std::vector<std::byte> scratch = job.buffer_for(byte_size(tensor.dtype, tensor.shape));
  const std::uint32_t crc = write_elements(
      sink, at, numel(tensor.shape), element,
      [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
        reader.read(all, begin, count, buffer.data());
        const std::size_t bytes = static_cast<std::size_t>(count) * element;
        job.meter.add(bytes);
        return ByteView(buffer).first(bytes);
      },
      scratch);
  reader.hand_over(job.checks);
  job.counters.add(reader.report());
  return crc;
}

ConvertReport convert(const std::string& source, const std::string& target,
                      const ConvertOptions& options) {
  const Checkpoint checkpoint = open_checkpoint(source, options.open);
  const std::vector<Leaf> leaves = leaves_for(checkpoint, options);
  const Target where = target_of(target, options.to);
  const bool names_file = std::filesystem::path(target).extension() == ".safetensors";
  if (options.max_shard_size > 0 && (options.to != CheckpointKind::safetensors || names_file)) {
    throw Error(ErrorCode::invalid_argument,
                "a size for each file makes a set of safetensors, whose target is a directory")
        .at_path(target);
  }
  const IfExists if_exists = options.overwrite ? IfExists::replace : IfExists::fail;
  // Directories of several files that have no marker of their own appear whole.
  std::optional<ReplacedDirectory> whole;
  if (is_olmo(options.to) || options.max_shard_size > 0) {
    if (options.overwrite) require_checkpoint(where.directory);
    whole.emplace(where.directory, if_exists);
  }
  const auto store = posix_store(whole ? whole->working() : where.directory);
  DigestingStore digested(*store);
  ConvertReport report;
  report.tensors =
      static_cast<std::uint64_t>(std::count_if(leaves.begin(), leaves.end(), [](const Leaf& leaf) {
        return leaf.value.is(Value::Kind::tensor);
      }));
  Meter meter(options.progress, tensor_bytes(leaves));
  IoCounters counters;
  StorageChecks checks;
  const int threads = std::max(options.threads, 1);
  const std::uint64_t share = options.memory / (2 * static_cast<std::uint64_t>(threads));
  ConvertJob job{checkpoint,
                 leaves,
                 options,
                 whole ? static_cast<Store&>(digested) : *store,
                 where.file,
                 where.directory,
                 if_exists,
                 threads,
                 static_cast<std::size_t>(std::clamp<std::uint64_t>(share, 64 << 10, 1 << 20)),
                 meter,
                 counters,
                 report,
                 checks,
                 whole.has_value()};
  switch (options.to) {
    case CheckpointKind::dcp:
      write_dcp(job);
      break;
    case CheckpointKind::torch_file:
      write_torch(job);
      break;
    case CheckpointKind::safetensors:
      write_safetensors(job);
      break;
    case CheckpointKind::rank_files:
      throw Error(ErrorCode::unsupported, "checkpoints of this kind are read, not written: " +
                                              std::string(to_string(options.to)));
    default:
      write_olmo(job);
      break;
  }
  if (whole) {
    counters.add(checks.read_rest(threads));
    digested.write_side_file("config.yaml");
    whole->commit();
  }
  meter.finish();
  report.io = counters.report();
  return report;
}

}  // namespace tessera
