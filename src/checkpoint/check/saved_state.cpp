#include "checkpoint/check/saved_state.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "base/crc32.h"
#include "base/parallel.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/side_file.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/inner_tensors.h"
#include "value/render.h"

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

namespace {

constexpr std::int64_t kHashedWindow = 1 << 20;  // bytes

bool is_of_state(const std::string& name) {
  return name.starts_with("model.") || name.starts_with("optim.");
}

// Each rank has its own tensor of a `local` optimizer, so there is not one (checkpoint-rows O-73).
bool is_of_each_rank(const std::string& name, CheckpointKind kind) {
  return kind == CheckpointKind::olmo_local && name.ends_with(".grad_norm_exp_avg");
}

Finding missing(const std::string& name, const Checkpoint& checkpoint, const std::string& what) {
  return Finding(Error(ErrorCode::incomplete, what)
                     .at_path(checkpoint.store->name() + "/" + kStateFile)
                     .at_key(printable(name, 200)));
}

// Digests of tensors that a checkpoint should have, under the names that it gives them.
std::map<std::string, std::uint32_t> expected(const StateDigests& saved, CheckpointKind kind) {
  std::map<std::string, std::uint32_t> digests;
  for (const auto& [name, digest] : saved) {
    if (!is_of_each_rank(name, kind))
      digests.emplace(without_wrappers(name, olmo_name_rules()), digest);
  }
  return digests;
}

}  // namespace

SavedState saved_state_of(const Checkpoint& checkpoint) {
  SavedState state;
  if (!checkpoint.store) return state;
  std::map<std::string, std::uint32_t> digests =
      expected(saved_digests(*checkpoint.store), checkpoint.kind);
  if (digests.empty()) return state;
  for (const Leaf& leaf : as_training_state(checkpoint).leaves) {
    if (!is_of_state(leaf.name) || !leaf.value.is(Value::Kind::tensor)) continue;
    const auto known = digests.extract(leaf.name);
    if (known) {
      state.tensors.push_back({leaf, known.mapped()});
    } else {
      state.findings.push_back(
          missing(leaf.name, checkpoint, "the checkpoint has a tensor without a digest"));
    }
  }
  for (const auto& [name, digest] : digests)
    state.findings.push_back(
        missing(name, checkpoint, "a digest is of a tensor that the checkpoint lacks"));
  return state;
}

std::uint64_t require_digest(const DigestedTensor& tensor, const std::stop_token& stop) {
  const Tensor& stored = tensor.leaf.value.as_tensor();
  const auto element = static_cast<std::int64_t>(size_of(stored.dtype));
  const std::int64_t all = numel(stored.shape);
  const std::int64_t step = std::max<std::int64_t>(kHashedWindow / element, 1);
  std::vector<std::byte> window(static_cast<std::size_t>(std::min(step, all) * element));
  TensorReader reader(stored, tensor.leaf.name);
  std::uint32_t digest = 0;
  for (std::int64_t begin = 0; begin < all; begin += step) {
    require_going_on(stop);
    const std::int64_t count = std::min(step, all - begin);
    reader.read(whole(stored.shape), begin, count, window.data());
    digest = crc32(std::span(window).first(static_cast<std::size_t>(count * element)), digest);
  }
  if (digest != tensor.digest) {
    throw Error(ErrorCode::mismatch,
                std::string("the tensor's bytes are not those that were saved, by the digest in ") +
                    kStateFile)
        .at_key(tensor.leaf.name);
  }
  return byte_size(stored.dtype, stored.shape);
}

}  // namespace tessera
