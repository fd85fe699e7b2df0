// One archive of torch.save that ranks fill together, as one of them sees it.
//
// The layout follows from the tree and from shapes, so each rank knows where its elements go. One
// rank, the maker, writes what is not of a sharded tensor: the head, padding, values; and, when all
// others are done, what depends on the CRC-32s.
#pragma once

#include <memory>
#include <optional>
#include <stop_token>

#include "checkpoint/read/meter.h"
#include "checkpoint/together/file_sums.h"
#include "checkpoint/together/placed.h"
#include "checkpoint/together/share.h"
#include "checkpoint/write/write_archive.h"
#include "format/torch/torch_file.h"

namespace tessera {

struct FileRole {
  std::uint32_t number = 0;  // of the file, on all ranks
  int maker = 0;
  bool is_makers_own = false;  // what the maker holds of a tensor nobody else writes into it
  // Of a file whose pickle this rank cannot compute: the maker told it.
  std::optional<std::uint64_t> pickle_size = {};
};

class SharedArchive {
 public:
  SharedArchive(Archive archive, const FileRole& role, int rank, int ranks);

  // Writes this rank's bytes. What others than the maker have written is durable afterwards.
  void write(Store& store, const PlacedTensors& tensors, int threads, Meter& meter);
  // What this rank has written into the records.
  [[nodiscard]] const FileSums& sums() const { return sums_; }
  // By the maker: writes the rest and makes the file durable. `sums`: of all ranks, of this file at
  // least. Throws `incomplete` for a record that nobody has filled.
  void finish(const FileSums& sums);

  [[nodiscard]] const std::string& name() const { return archive_.file; }
  // These are known to the maker.
  [[nodiscard]] bool is_made_here() const { return makes(); }
  [[nodiscard]] std::uint64_t size() const { return writer_->size(); }
  [[nodiscard]] std::uint64_t pickle_size() const { return writer_->pickle_size(); }

 private:
  [[nodiscard]] bool makes() const { return rank_ == role_.maker; }
  [[nodiscard]] const std::vector<torch_file::Writer::Slot>& slots() const {
    return writer_ ? writer_->slots() : slots_;
  }
  WrittenSum write_slot(const torch_file::Writer::Slot& slot, const PlacedTensors& tensors,
                        Meter& meter) const;
  WrittenSum write_part(const ArchivePart& part, const torch_file::Writer::Slot& slot,
                        std::uint64_t begin, const PlacedTensors& tensors, Meter& meter) const;

  Archive archive_;
  FileRole role_;
  int rank_;
  int ranks_;
  std::optional<torch_file::Writer> writer_;     // where the pickle is known
  std::vector<torch_file::Writer::Slot> slots_;  // elsewhere
  std::unique_ptr<ByteSink> sink_;
  FileSums sums_;
};

}  // namespace tessera
