#include <sys/stat.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/item_writer.h"
#include "checkpoint/select.h"
#include "checkpoint/targets.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// What the target gets of the source.
std::vector<Leaf> leaves_for(const Checkpoint& checkpoint, const ConvertOptions& options) {
  try {
    std::vector<Leaf> leaves = select(checkpoint.leaves, options.only);
    rename(leaves, options.rename);
    if (options.dtype) convert_floating(leaves, *options.dtype);
    return leaves;
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
}

// The directory that becomes the store, and the file in it (empty for DCP).
struct Target {
  std::string directory;
  std::string file;
};

Target target_of(const std::string& path, CheckpointKind kind) {
  const std::filesystem::path as_path(path);
  const std::string extension = as_path.extension().string();
  const bool names_file = extension == ".safetensors" || extension == ".pt" || extension == ".pth";
  if (kind == CheckpointKind::dcp) {
    if (names_file) {
      throw Error(ErrorCode::invalid_argument,
                  "a DCP checkpoint is a directory, the target names a file")
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
  std::vector<std::byte> scratch(job.window);
  const std::size_t element = size_of(tensor.dtype);
  const std::uint32_t crc = write_elements(
      sink, at, numel(tensor.shape), element,
      [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
        reader.read(all, begin, count, buffer.data());
        const std::size_t bytes = static_cast<std::size_t>(count) * element;
        job.meter.add(bytes);
        return ByteView(buffer).first(bytes);
      },
      scratch);
  reader.check_rest();
  job.counters.add(reader.report());
  return crc;
}

ConvertReport convert(const std::string& source, const std::string& target,
                      const ConvertOptions& options) {
  const Checkpoint checkpoint = open_checkpoint(source);
  const std::vector<Leaf> leaves = leaves_for(checkpoint, options);
  const Target where = target_of(target, options.to);
  const auto store = posix_store(where.directory);
  ConvertReport report;
  report.tensors =
      static_cast<std::uint64_t>(std::count_if(leaves.begin(), leaves.end(), [](const Leaf& leaf) {
        return leaf.value.is(Value::Kind::tensor);
      }));
  Meter meter(options.progress, tensor_bytes(leaves));
  IoCounters counters;
  const int threads = std::max(options.threads, 1);
  const std::uint64_t share = options.memory / (2 * static_cast<std::uint64_t>(threads));
  ConvertJob job{checkpoint,
                 leaves,
                 options.rename.empty() && !options.dtype,
                 *store,
                 where.file,
                 options.overwrite ? IfExists::replace : IfExists::fail,
                 threads,
                 static_cast<std::size_t>(std::clamp<std::uint64_t>(share, 64 << 10, 1 << 20)),
                 meter,
                 counters,
                 report};
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
  }
  meter.finish();
  report.io = counters.report();
  return report;
}

}  // namespace tessera
