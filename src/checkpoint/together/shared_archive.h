// An archive of torch.save that ranks fill together.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/together/own_runs.h"
#include "checkpoint/together/shared_file.h"
#include "checkpoint/write/write_archive.h"
#include "format/torch/torch_file.h"

namespace tessera {

class SharedArchive final : public SharedFile {
 public:
  SharedArchive(Archive archive, const FileRole& role, int rank, int ranks);

  void write(std::unique_ptr<ByteSink> sink, const PlacedTensors& tensors, int threads,
             Meter& meter) override;
  void finish(const FileSums& sums, Store& where) override;
  [[nodiscard]] const std::string& name() const override { return archive_.file; }
  [[nodiscard]] std::uint64_t size() const override { return writer_->size(); }
  // Known to the maker.
  [[nodiscard]] std::uint64_t pickle_size() const { return writer_->pickle_size(); }

 private:
  [[nodiscard]] const std::vector<torch_file::Writer::Slot>& slots() const {
    return writer_ ? writer_->slots() : slots_;
  }
  // What was written into one record, and of which tensors.
  struct SlotSums {
    WrittenSum record;
    TensorSums tensors;
  };
  SlotSums write_slot(const torch_file::Writer::Slot& slot, const PlacedTensors& tensors,
                      Meter& meter) const;
  RunSums write_part(const ArchivePart& part, const torch_file::Writer::Slot& slot,
                     std::uint64_t begin, const PlacedTensors& tensors, Meter& meter) const;

  Archive archive_;
  std::optional<torch_file::Writer> writer_;     // where the pickle is known
  std::vector<torch_file::Writer::Slot> slots_;  // elsewhere
  std::unique_ptr<ByteSink> sink_;
};

}  // namespace tessera
