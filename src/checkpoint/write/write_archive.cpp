#include "checkpoint/write/write_archive.h"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <unordered_set>

#include "base/crc32.h"
#include "base/parallel.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/write/targets.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr std::size_t kFillingWindow = 64 << 10;  // bytes

bool is_unchecked(const Storage& storage) {
  // A storage without bytes may be nowhere at all.
  return !is_in_memory(storage) && storage.source && !has_crc(storage) &&
         !storage.source->checked();
}

std::uint32_t stream_storage(const ConvertJob& job, const Storage& storage, ByteSink& sink,
                             std::uint64_t at) {
  std::vector<std::byte> scratch = job.buffer_for(storage.size);
  const std::uint32_t crc = write_storage(sink, at, storage, scratch,
                                          [&job](std::size_t bytes) { job.meter.add(bytes); });
  IoReport report;
  report.bytes_needed = report.bytes_read = storage.size;
  if (is_unchecked(storage)) report.bytes_unchecked = storage.size;
  job.counters.add(report);
  return crc;
}

// The slot of a tensor that is put together from `parts`.
std::uint32_t stream_parts(const ConvertJob& job, const Tensor& tensor,
                           const std::vector<ArchivePart>& parts, ByteSink& sink,
                           const torch_file::Writer::Slot& slot) {
  std::uint32_t crc = 0;
  std::uint64_t at = slot.offset;
  for (const ArchivePart& part : parts) {
    const std::uint32_t of_part =
        part.source != nullptr ? stream_slice(job, part.source->name,
                                              part.source->value.as_tensor(), part.slice, sink, at)
                               : write_filling(part, tensor.dtype, sink, at, job.meter.stop());
    const std::uint64_t size = static_cast<std::uint64_t>(part.count) * size_of(tensor.dtype);
    crc = at == slot.offset ? of_part : crc32_combine(crc, of_part, size);
    at += size;
  }
  return crc;
}

std::uint32_t stream_slot(const ConvertJob& job, const Archive& archive,
                          const torch_file::Writer::Slot& slot, ByteSink& sink) {
  if (slot.storage) return stream_storage(job, *slot.storage, sink, slot.offset);
  const Tensor& tensor = *slot.tensor;
  if (const auto parts = archive.parts.find(&tensor); parts != archive.parts.end())
    return stream_parts(job, tensor, parts->second, sink, slot);
  if (const Leaf* whole = archive.wholes.find(tensor))
    return stream_parts(job, tensor, {whole_part(*whole)}, sink, slot);
  return stream_tensor(job, "", tensor, sink, slot.offset);
}

}  // namespace

std::string root_of_archive(const std::string& file) {
  const std::string stem = std::filesystem::path(file).stem().string();
  const bool ascii =
      std::ranges::all_of(stem, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
  return ascii ? stem : "archive";
}

std::uint32_t write_filling(const ArchivePart& part, DType dtype, ByteSink& sink, std::uint64_t at,
                            const std::stop_token& stop) {
  const std::size_t element = size_of(dtype);
  const auto most = static_cast<std::int64_t>(kFillingWindow / element);
  const std::vector<double> values(static_cast<std::size_t>(std::min(part.count, most)), part.fill);
  std::vector<std::byte> bytes(values.size() * element);
  cast(DType::float64, reinterpret_cast<const std::byte*>(values.data()), dtype, bytes.data(),
       static_cast<std::int64_t>(values.size()));
  return write_elements(
      sink, at, part.count, element,
      [&](std::int64_t, std::int64_t count, MutableByteView all) {
        require_going_on(stop);
        return ByteView(all).first(static_cast<std::size_t>(count) * element);
      },
      bytes);
}

void Wholes::sort() {
  std::stable_sort(list_.begin(), list_.end(), [](const Entry& a, const Entry& b) {
    return std::less<>()(a.tensor, b.tensor);
  });
}

const Leaf* Wholes::find(const Tensor& tensor) const {
  const auto found =
      std::lower_bound(list_.begin(), list_.end(), &tensor,
                       [](const Entry& a, const Tensor* b) { return std::less<>()(a.tensor, b); });
  return found == list_.end() || found->tensor != &tensor ? nullptr : found->source;
}

ArchivePart whole_part(const Leaf& source) {
  const Shape& shape = source.value.as_tensor().shape;
  return {&source, whole(shape), 0, numel(shape)};
}

Value planned_tensor(DType dtype, Shape shape) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = std::move(shape);
  return Value(std::move(tensor));
}

namespace {

FileNotes write_new_archive(const ConvertJob& job, const Archive& archive, int threads) {
  torch_file::Writer writer(archive.tree, root_of_archive(archive.file), archive.expand);
  const auto sink = job.store.create(archive.file, job.if_exists, writer.size());
  for (const auto& segment : writer.fixed()) sink->write_at(segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs(writer.slots().size());
  parallel_for(threads, writer.slots().size(), [&](std::size_t i) {
    crcs[i] = stream_slot(job, archive, writer.slots()[i], *sink);
  });
  writer.finish(crcs, [&](std::uint64_t offset, ByteView bytes) { sink->write_at(offset, bytes); });
  job.before_visible();
  sink->commit();
  IoReport report;
  report.bytes_written = writer.size();
  job.counters.add(report);
  return {};
}

}  // namespace

void write_archive(const ConvertJob& job, const Archive& archive, int threads) {
  make_file(job, archive.file,
            [&](const ConvertJob& own) { return write_new_archive(own, archive, threads); });
}

namespace {

// Whether two tensors with the same elements are one object in Python: nothing else tells them
// apart.
bool can_be_one(const Tensor& a, const Tensor& b) {
  return a.parameter == b.parameter && a.requires_grad == b.requires_grad && !a.attributes &&
         !b.attributes;
}

// Tied tensors become one object, which has its elements once. The others count as done.
void tie(const ConvertJob& job, const std::vector<std::size_t>& kept, std::vector<Leaf>& leaves) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (kept[i] == i) continue;
    const Tensor& tensor = job.leaves[i].value.as_tensor();
    leaves[i].value = leaves[kept[i]].value;
    job.meter.add(byte_size(tensor.dtype, tensor.shape));
  }
}

// For each leaf the one that it is tied to, or itself.
std::vector<std::size_t> tied_objects(const std::vector<Leaf>& leaves) {
  std::vector<std::size_t> kept = ties_of(leaves);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (kept[i] != i && !can_be_one(leaves[i].value.as_tensor(), leaves[kept[i]].value.as_tensor()))
      kept[i] = i;
  }
  return kept;
}

// Tensors without pieces: the writer gives each a fresh, dense storage.
Archive fresh_archive(const ConvertJob& job) {
  Archive archive{job.name, {}, {}};
  std::vector<Leaf> leaves = job.leaves;
  const std::vector<std::size_t> kept = tied_objects(leaves);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].value.is(Value::Kind::tensor) || kept[i] != i) continue;
    const Tensor& source = leaves[i].value.as_tensor();
    if (source.bare_storage) continue;  // its bytes are copied as they are
    require_bounded(source, leaves[i].name);
    Tensor tensor = source;
    tensor.pieces = {};
    leaves[i].value = Value(std::move(tensor));
    archive.wholes.add(leaves[i].value.as_tensor(), job.leaves[i]);
  }
  tie(job, kept, leaves);
  archive.wholes.sort();
  archive.tree = unflatten(leaves);
  return archive;
}

// The source's own tree. Tensors that have no storage to keep are streamed from their pieces.
Archive own_archive(const ConvertJob& job) {
  Archive archive{job.name, *job.source.root, {}};
  for (const Leaf& leaf : job.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    archive.wholes.add(leaf.value.as_tensor(), leaf);
  }
  archive.wholes.sort();
  return archive;
}

}  // namespace

bool keeps_leaves(const ConvertOptions& options) {
  return options.rename.empty() && options.slice.empty() && !options.dtype && !options.dequantize;
}

bool keeps_tree(const ConvertJob& job) {
  return keeps_leaves(job.options) && job.source.root &&
         job.leaves.size() == job.source.leaves.size();
}

void write_torch(const ConvertJob& job) {
  write_archive(job, keeps_tree(job) ? own_archive(job) : fresh_archive(job), job.threads);
}

}  // namespace tessera
