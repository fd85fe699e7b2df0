#include "checkpoint/together/shared_safetensors.h"

#include "base/parallel.h"
#include "checkpoint/together/own_runs.h"
#include "checkpoint/together/share.h"

namespace tessera {

WrittenSum SharedSafetensors::write_entry(const safetensors::Entry& entry,
                                          const PlacedTensors& tensors, Meter& meter) const {
  const std::uint64_t at = part_.header.data_offset + entry.begin;
  if (const auto value = part_.values.find(entry.name); value != part_.values.end()) {
    if (!is_made_here()) return {};
    sink_->write_at(at, value->second);
    return {value->second.size(), 0};
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
  std::vector<WrittenSum> written(entries.size());
  parallel_for(threads, written.size(),
               [&](std::size_t i) { written[i] = write_entry(entries[i], tensors, meter); });
  for (std::size_t i = 0; i < written.size(); ++i) note(i, written[i]);
  if (is_made_here()) return;
  sink_->commit();
  sink_.reset();
}

void SharedSafetensors::finish(const FileSums& sums) {
  for (std::size_t i = 0; i < part_.header.entries.size(); ++i) {
    const safetensors::Entry& entry = part_.header.entries[i];
    (void)require_filled(sums, i, entry.end - entry.begin);
  }
  sink_->commit();
  sink_.reset();
}

}  // namespace tessera
