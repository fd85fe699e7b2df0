// One file that ranks fill together, as one of them sees it.
//
// Its layout follows from the tree and from shapes, so each rank knows where its elements go. One
// rank, the maker, writes what is not of a sharded tensor: the head, padding, values; and, when all
// others are done, the rest.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/together/share.h"
#include "checkpoint/write/write_archive.h"
#include "checkpoint/write/write_olmo.h"
#include "format/torch/torch_file.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera {

struct FileRole {
  std::uint32_t number = 0;  // of the file, on all ranks
  int maker = 0;
  bool is_makers_own = false;  // what the maker holds of a tensor nobody else writes into it
  // The size of a pickle that this rank cannot compute: the maker told it.
  std::optional<std::uint64_t> pickle_size = {};
};

class SharedFile {
 public:
  SharedFile(const FileRole& role, int rank, int ranks) : role_(role), rank_(rank), ranks_(ranks) {}
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;
  virtual ~SharedFile() = default;

  // Writes this rank's bytes into `sink`, which is the file. Others than the maker commit it.
  virtual void write(std::unique_ptr<ByteSink> sink, const PlacedTensors& tensors, int threads,
                     Meter& meter) = 0;
  // What this rank has written into the records.
  [[nodiscard]] const FileSums& sums() const { return sums_; }
  [[nodiscard]] const TensorSums& tensor_sums() const { return tensor_sums_; }
  [[nodiscard]] bool is_made_here() const { return rank_ == role_.maker; }
  [[nodiscard]] int maker() const { return role_.maker; }
  [[nodiscard]] std::uint32_t number() const { return role_.number; }
  // The maker writes the rest and makes the file, which is in `where`, durable. `sums`: of all
  // ranks, of this file at least. Throws `incomplete` for a record that nobody has filled.
  virtual void finish(const FileSums& sums, Store& where) = 0;

  [[nodiscard]] virtual const std::string& name() const = 0;
  [[nodiscard]] virtual std::uint64_t size() const = 0;  // known to the maker

 protected:
  // What was written into record `record`, which has `size` bytes.
  [[nodiscard]] WrittenSum require_filled(const FileSums& sums, std::size_t record,
                                          std::uint64_t size) const;
  void note(std::size_t record, const WrittenSum& sum) {
    if (sum.bytes > 0) sums_[{role_.number, static_cast<std::uint32_t>(record)}] = sum;
  }

  void note(const TensorSums& written) {
    for (const auto& [leaf, sum] : written) tensor_sums_[leaf].add(sum);
  }

  FileRole role_;
  int rank_;
  int ranks_;

 private:
  FileSums sums_;
  TensorSums tensor_sums_;
};

// An archive of torch.save that ranks fill together.

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

// A safetensors file that ranks fill together, with names of OLMo's or one of a set
// (checkpoint-rows F-06, P-26).

class SharedSafetensors final : public SharedFile {
 public:
  SharedSafetensors(std::string file, EncodedPart part, const FileRole& role, int rank, int ranks)
      : SharedFile(role, rank, ranks), file_(std::move(file)), part_(std::move(part)) {}

  void write(std::unique_ptr<ByteSink> sink, const PlacedTensors& tensors, int threads,
             Meter& meter) override;
  void finish(const FileSums& sums, Store& where) override;
  [[nodiscard]] const std::string& name() const override { return file_; }
  [[nodiscard]] std::uint64_t size() const override { return part_.size(); }

 private:
  void write_digests(Store& where);
  RunSums write_entry(const safetensors::Entry& entry, const PlacedTensors& tensors,
                      Meter& meter) const;

  const std::string file_;
  const EncodedPart part_;
  std::unique_ptr<ByteSink> sink_;
};

}  // namespace tessera
