#include "checkpoint/save/whole_tensors.h"

#include <span>
#include <utility>

#include "base/digest.h"
#include "base/parallel.h"
#include "checkpoint/save/elements.h"
#include "checkpoint/save/proposals.h"

namespace tessera {
namespace {

bool is_whole(const Tensor& tensor, const std::vector<HeldChunk>& chunks) {
  return chunks.size() == 1 && chunks.front().box == whole(tensor.shape);
}

std::uint64_t key_of_whole(const std::string& name, const Tensor& tensor) {
  Shape kind = tensor.shape;
  kind.push_back(static_cast<std::int64_t>(tensor.dtype));
  return key_of(name, kind);
}

}  // namespace

std::vector<HeldCopy> whole_tensors(const HeldLeaves& held, int threads,
                                    const std::stop_token& stop) {
  std::vector<HeldCopy> copies;
  for (std::size_t i = 0; i < held.leaves.size(); ++i) {
    const Leaf& leaf = held.leaves[i];
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    if (!is_whole(tensor, held.chunks[i])) continue;
    copies.push_back(
        {.name = leaf.name, .key = key_of_whole(leaf.name, tensor), .is_written = true, .leaf = i});
  }
  parallel_for(threads, copies.size(), [&](std::size_t i) {
    HeldCopy& copy = copies[i];
    copy.digest = digest_of_chunk(held.leaves[copy.leaf].value.as_tensor(), copy.name,
                                  held.chunks[copy.leaf].front(), stop);
  });
  return copies;
}

Bytes digest_message(const std::vector<HeldCopy>& copies) {
  RunningDigest digest;
  for (const HeldCopy& copy : copies) {
    const std::uint64_t both[] = {copy.key, copy.digest};
    digest.add(std::as_bytes(std::span(both)));
  }
  return MessageWriter().number(digest.value()).take();
}

Bytes combine_same(const Bytes& left, const Bytes& right) {
  return left == right ? left : Bytes();
}

}  // namespace tessera
