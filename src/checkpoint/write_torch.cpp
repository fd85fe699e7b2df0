#include <filesystem>
#include <unordered_map>

#include "base/crc32.h"
#include "base/parallel.h"
#include "checkpoint/item_writer.h"
#include "checkpoint/targets.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The tree to pickle, and for each of its tensors the one that holds the data.
struct Tree {
  Value value;
  std::unordered_map<const Tensor*, const Leaf*> sources;
};

bool keeps_storages(const ConvertJob& job) {
  return job.as_they_are && job.source.root && job.leaves.size() == job.source.leaves.size();
}

// Tensors without pieces: the writer gives each a fresh, dense storage.
Tree fresh_tree(const ConvertJob& job) {
  Tree tree;
  std::vector<Leaf> leaves = job.leaves;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].value.is(Value::Kind::tensor)) continue;
    Tensor tensor = leaves[i].value.as_tensor();
    tensor.pieces.clear();
    leaves[i].value = Value(std::move(tensor));
    tree.sources.emplace(&leaves[i].value.as_tensor(), &job.leaves[i]);
  }
  tree.value = unflatten(leaves);
  return tree;
}

std::uint32_t stream_storage(const ConvertJob& job, const Storage& storage, ByteSink& sink,
                             std::uint64_t at) {
  std::vector<std::byte> scratch(job.window);
  const std::uint32_t crc = write_elements(
      sink, at, static_cast<std::int64_t>(storage.size), 1,
      [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
        const MutableByteView bytes = buffer.first(static_cast<std::size_t>(count));
        storage.source->read_at(storage.offset + static_cast<std::uint64_t>(begin), bytes);
        job.meter.add(bytes.size());
        return ByteView(bytes);
      },
      scratch);
  if (storage.crc32 && *storage.crc32 != 0 && *storage.crc32 != crc) {
    throw Error(ErrorCode::corrupt, "the storage's bytes have CRC-32 " + std::to_string(crc) +
                                        ", the file records " + std::to_string(*storage.crc32))
        .at_path(storage.source->name())
        .at_offset(storage.offset);
  }
  IoReport report;
  report.bytes_needed = report.bytes_read = storage.size;
  const bool has_crc = storage.crc32 && *storage.crc32 != 0;
  if (!has_crc && !storage.source->checked()) report.bytes_unchecked = storage.size;
  job.counters.add(report);
  return crc;
}

// The folder inside the archive: the file's stem, as torch.save names it (F-01).
std::string root_of(const std::string& file) {
  const std::string stem = std::filesystem::path(file).stem().string();
  for (const char c : stem) {
    if (static_cast<unsigned char>(c) >= 0x80) return "archive";
  }
  return stem;
}

}  // namespace

void write_torch(const ConvertJob& job) {
  const Tree tree = keeps_storages(job) ? Tree{*job.source.root, {}} : fresh_tree(job);
  torch_file::Writer archive(tree.value, root_of(job.name));
  const auto sink = job.store.create(job.name, job.if_exists, archive.size());
  for (const auto& segment : archive.fixed()) sink->write_at(segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs(archive.slots().size());
  parallel_for(job.threads, archive.slots().size(), [&](std::size_t i) {
    const torch_file::Writer::Slot& slot = archive.slots()[i];
    if (slot.storage) {
      crcs[i] = stream_storage(job, *slot.storage, *sink, slot.offset);
    } else {
      const Leaf& leaf = *tree.sources.at(slot.tensors.at(0));
      crcs[i] = stream_tensor(job, leaf.name, leaf.value.as_tensor(), *sink, slot.offset);
    }
  });
  for (const auto& segment : archive.finish(crcs)) sink->write_at(segment.offset, segment.bytes);
  sink->commit();
  IoReport report;
  report.bytes_written = archive.size();
  job.counters.add(report);
}

}  // namespace tessera
