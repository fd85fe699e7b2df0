// A safetensors file that ranks fill together, with names of OLMo's or one of a set
// (checkpoint-rows F-06, P-26).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "checkpoint/together/own_runs.h"
#include "checkpoint/together/shared_file.h"
#include "checkpoint/write/write_olmo.h"

namespace tessera {

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
