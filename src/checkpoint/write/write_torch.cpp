#include "checkpoint/tree/ties.h"
#include "checkpoint/write/targets.h"
#include "checkpoint/write/write_archive.h"

namespace tessera {
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
  return options.rename.empty() && !options.dtype && !options.dequantize;
}

bool keeps_tree(const ConvertJob& job) {
  return keeps_leaves(job.options) && job.source.root &&
         job.leaves.size() == job.source.leaves.size();
}

void write_torch(const ConvertJob& job) {
  write_archive(job, keeps_tree(job) ? own_archive(job) : fresh_archive(job), job.threads);
}

}  // namespace tessera
