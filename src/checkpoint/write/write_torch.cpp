#include "checkpoint/write/targets.h"
#include "checkpoint/write/write_archive.h"

namespace tessera {
namespace {

// Tensors without pieces: the writer gives each a fresh, dense storage.
Archive fresh_archive(const ConvertJob& job) {
  Archive archive{job.name, {}, {}};
  std::vector<Leaf> leaves = job.leaves;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].value.is(Value::Kind::tensor)) continue;
    const Tensor& source = leaves[i].value.as_tensor();
    if (source.bare_storage) continue;  // its bytes are copied as they are
    require_bounded(source, leaves[i].name);
    Tensor tensor = source;
    tensor.pieces = {};
    leaves[i].value = Value(std::move(tensor));
    archive.wholes.add(leaves[i].value.as_tensor(), job.leaves[i]);
  }
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
