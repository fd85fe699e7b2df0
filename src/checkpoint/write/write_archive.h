// Writes one torch.save archive whose tensors are put together from slices of the source's tensors.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/write/targets.h"
#include "format/torch/torch_file.h"

namespace tessera {

// Elements of a tensor that is being written: a slice of a tensor of the source, or one value
// again and again.
struct ArchivePart {
  const Leaf* source = nullptr;  // a tensor; null: `fill`
  Slice slice = FlatRange{};     // of `source`
  double fill = 0;
  std::int64_t count = 0;  // elements
};

// Tensors that have the elements of one tensor of the source each: there may be a million.
class Wholes {
 public:
  void add(const Tensor& tensor, const Leaf& source) { list_.push_back({&tensor, &source}); }
  void sort();  // after the last `add`; of two sources of a tensor the first one counts
  [[nodiscard]] const Leaf* find(const Tensor& tensor) const;  // null: it is not one of them

 private:
  struct Entry {
    const Tensor* tensor;
    const Leaf* source;
  };
  std::vector<Entry> list_;
};

struct Archive {
  std::string file;  // object of the store
  Value tree;
  // What the tensor leaves of `tree` that have no pieces hold, in row-major order.
  std::unordered_map<const Tensor*, std::vector<ArchivePart>> parts;
  Wholes wholes = {};              // the same for leaves that are one part
  torch_file::Expand expand = {};  // of what stands in `tree` for a larger value
};

// The part that is all of `source`.
[[nodiscard]] ArchivePart whole_part(const Leaf& source);
// A leaf for an archive's tree: a tensor of this dtype and shape without pieces.
[[nodiscard]] Value planned_tensor(DType dtype, Shape shape);

// The folder inside the archive: the file's stem, as torch.save names it (checkpoint-rows F-01).
[[nodiscard]] std::string root_of_archive(const std::string& file);
// Writes a part without a source at `at`; returns the CRC-32 of its bytes. Throws `cancelled` once
// `stop` is requested.
std::uint32_t write_filling(const ArchivePart& part, DType dtype, ByteSink& sink, std::uint64_t at,
                            const std::stop_token& stop);

// Leaves with a piece that is the whole tensor as plain elements keep their storage and share it as
// in the tree; those with other pieces become dense; those without are filled by `parts`.
void write_archive(const ConvertJob& job, const Archive& archive, int threads);

}  // namespace tessera
