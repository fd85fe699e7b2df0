#include "checkpoint/together/shared_safetensors.h"

#include <algorithm>

#include "base/parallel.h"
#include "checkpoint/digests/safetensors_digests.h"
#include "checkpoint/together/share.h"
#include "io/block_digests.h"

namespace tessera {

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
