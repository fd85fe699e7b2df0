#include "checkpoint/together/shared_file.h"

#include <algorithm>
#include <utility>

#include "base/crc32.h"
#include "base/parallel.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/read/safetensors_digests.h"
#include "checkpoint/together/share.h"
#include "io/checked_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Slot = torch_file::Writer::Slot;

constexpr std::size_t kSharedWindow = 1 << 20;  // bytes

// A storage of the maker's, as it is, or a tensor of its own.
WrittenSum write_value(const Slot& slot, ByteSink& sink) {
  if (slot.storage) {
    std::vector<std::byte> scratch(
        static_cast<std::size_t>(std::clamp<std::uint64_t>(slot.size, 16, kSharedWindow)));
    const std::uint32_t crc =
        write_storage(sink, slot.offset, *slot.storage, scratch, [](std::size_t) {});
    return {slot.size, crc32_term(crc, slot.size, 0)};
  }
  TensorReader reader(*slot.tensor, "");
  const Box all = whole(slot.tensor->shape);
  return write_runs(*slot.tensor, reader, {all}, all, {&sink, slot.offset, slot.size, 0}, nullptr)
      .row;
}

}  // namespace

WrittenSum SharedFile::require_filled(const FileSums& sums, std::size_t record,
                                      std::uint64_t size) const {
  const auto found = sums.find({role_.number, static_cast<std::uint32_t>(record)});
  const WrittenSum sum = found == sums.end() ? WrittenSum() : found->second;
  if (sum.bytes == size) return sum;
  throw Error(ErrorCode::incomplete, "ranks have written " + std::to_string(sum.bytes) +
                                         " bytes of record " + std::to_string(record) +
                                         ", it has " + std::to_string(size))
      .at_path(name());
}

SharedArchive::SharedArchive(Archive archive, const FileRole& role, int rank, int ranks)
    : SharedFile(role, rank, ranks), archive_(std::move(archive)) {
  const std::string root = root_of_archive(archive_.file);
  if (role_.pickle_size && !is_made_here()) {
    slots_ = torch_file::slots_of(archive_.tree, root, *role_.pickle_size, archive_.expand);
  } else {
    writer_.emplace(archive_.tree, root, archive_.expand);
  }
}

RunSums SharedArchive::write_part(const ArchivePart& part, const Slot& slot, std::uint64_t begin,
                                  const PlacedTensors& tensors, Meter& meter) const {
  const RunTarget target{sink_.get(), slot.offset, slot.size, begin};
  if (part.source == nullptr) {
    if (!is_made_here()) return {};
    const std::uint64_t size = static_cast<std::uint64_t>(part.count) * size_of(slot.tensor->dtype);
    const std::uint32_t crc =
        write_filling(part, slot.tensor->dtype, *sink_, slot.offset + begin, meter.stop());
    return {{size, crc32_term(crc, size, slot.size - begin - size)}, {}};
  }
  const Tensor& tensor = part.source->value.as_tensor();
  const std::vector<Box> boxes =
      boxes_to_write(tensors.of(*part.source), tensor.shape,
                     {rank_, ranks_, role_.is_makers_own ? role_.maker : -1});
  if (boxes.empty()) return {};
  TensorReader reader(tensor, part.source->name);
  return write_runs(tensor, reader, boxes, part.slice, target, &meter);
}

SharedArchive::SlotSums SharedArchive::write_slot(const Slot& slot, const PlacedTensors& tensors,
                                                  Meter& meter) const {
  const auto parts = slot.storage ? archive_.parts.end() : archive_.parts.find(slot.tensor);
  if (parts == archive_.parts.end())
    return {is_made_here() ? write_value(slot, *sink_) : WrittenSum(), {}};
  SlotSums sums;
  std::uint64_t begin = 0;
  for (const ArchivePart& part : parts->second) {
    const RunSums written = write_part(part, slot, begin, tensors, meter);
    sums.record.add(written.row);
    if (written.tensor.bytes > 0) sums.tensors[part.source].add(written.tensor);
    begin += static_cast<std::uint64_t>(part.count) * size_of(slot.tensor->dtype);
  }
  return sums;
}

void SharedArchive::write(std::unique_ptr<ByteSink> sink, const PlacedTensors& tensors, int threads,
                          Meter& meter) {
  sink_ = std::move(sink);
  if (is_made_here()) {
    for (const auto& segment : writer_->fixed()) sink_->write_at(segment.offset, segment.bytes);
  }
  std::vector<SlotSums> written(slots().size());
  parallel_for(threads, written.size(),
               [&](std::size_t i) { written[i] = write_slot(slots()[i], tensors, meter); });
  for (std::size_t i = 0; i < written.size(); ++i) {
    note(i, written[i].record);
    note(written[i].tensors);
  }
  if (is_made_here()) return;
  sink_->commit();
  sink_.reset();
}

void SharedArchive::finish(const FileSums& sums, Store& /*where*/) {
  std::vector<std::uint32_t> crcs;
  for (std::size_t i = 0; i < slots().size(); ++i) {
    const std::uint64_t size = slots()[i].size;
    crcs.push_back(crc32_of_terms(require_filled(sums, i, size).terms, size));
  }
  writer_->finish(crcs, [this](std::uint64_t at, ByteView bytes) { sink_->write_at(at, bytes); });
  sink_->commit();
  sink_.reset();
}

RunSums SharedSafetensors::write_entry(const safetensors::Entry& entry,
                                       const PlacedTensors& tensors, Meter& meter) const {
  const std::uint64_t at = part_.header.data_offset + entry.begin;
  if (const auto value = part_.values.find(entry.name); value != part_.values.end()) {
    if (!is_made_here()) return {};
    sink_->write_at(at, value->second);
    return {{value->second.size(), 0}, {}};
  }
  const Leaf& leaf = *part_.tensors.at(entry.name);
  const Tensor& tensor = leaf.value.as_tensor();
  const std::vector<Box> boxes =
      boxes_to_write(tensors.of(leaf), tensor.shape, {rank_, ranks_, -1});
  TensorReader reader(tensor, leaf.name);
  return write_runs(tensor, reader, boxes, whole(tensor.shape),
                    {sink_.get(), at, entry.end - entry.begin, 0}, &meter);
}

void SharedSafetensors::write(std::unique_ptr<ByteSink> sink, const PlacedTensors& tensors,
                              int threads, Meter& meter) {
  sink_ = std::move(sink);
  if (is_made_here()) sink_->write_at(0, part_.head);
  const std::vector<safetensors::Entry>& entries = part_.header.entries;
  std::vector<RunSums> written(entries.size());
  parallel_for(threads, written.size(),
               [&](std::size_t i) { written[i] = write_entry(entries[i], tensors, meter); });
  for (std::size_t i = 0; i < written.size(); ++i) {
    note(i, written[i].row);
    const auto tensor = part_.tensors.find(entries[i].name);
    if (tensor != part_.tensors.end()) note({{tensor->second, written[i].tensor}});
  }
  if (is_made_here()) return;
  sink_->commit();
  sink_.reset();
}

void SharedSafetensors::finish(const FileSums& sums, Store& where) {
  for (std::size_t i = 0; i < part_.header.entries.size(); ++i) {
    const safetensors::Entry& entry = part_.header.entries[i];
    (void)require_filled(sums, i, entry.end - entry.begin);
  }
  sink_->commit();
  sink_.reset();
  if (part_.has_digests) write_digests(where);
}

// A block may have elements of several ranks, so the maker digests what is in the store.
void SharedSafetensors::write_digests(Store& where) {
  const std::uint64_t begin = part_.header.data_offset;
  const auto data = slice_source(where.open(file_), begin, part_.size() - begin);
  BlockDigests digests;
  std::vector<std::byte> window(kDigestBlock);
  for (std::uint64_t at = 0; at < data->size();) {
    const auto size = static_cast<std::size_t>(std::min(kDigestBlock, data->size() - at));
    const auto bytes = MutableByteView(window).first(size);
    data->read_at(at, bytes);
    digests.add(at, bytes);
    at += size;
  }
  std::vector<std::byte> head = part_.head;
  fill_digests(head, digests.finish(data->size()));
  sink_ = where.share(file_);
  sink_->write_at(0, head);
  sink_->commit();
  sink_.reset();
}

}  // namespace tessera
