#include "checkpoint/check/sources.h"

#include <utility>

#include "storage/lazy_source.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

void add_sources(const Tensor& tensor, SourceByName& sources) {
  for (const Piece& piece : tensor.pieces) {
    if (piece.storage && piece.storage->source)
      sources.emplace(piece.storage->source->name(), piece.storage->source);
  }
}

}  // namespace

// Those that the tensors have come first: of safetensors files and data files only they know the
// digests.
SourceByName sources_of(const Checkpoint& checkpoint) {
  SourceByName sources;
  for (const auto& [name, tensor] : all_tensors(checkpoint.leaves))
    add_sources(tensor.as_tensor(), sources);
  for (const ObjectInfo& file : checkpoint.files) {
    auto source = std::make_shared<LazySource>(checkpoint.store, file);
    const std::string& name = source->name();
    sources.emplace(name, std::move(source));
  }
  return sources;
}

}  // namespace tessera
