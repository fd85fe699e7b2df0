#include "checkpoint/together/same_state.h"

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "checkpoint/save/key_errors.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "value/digest.h"

namespace tessera {
namespace {

using DigestsOfRank = std::map<std::string, std::uint64_t>;

ByteView bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

NamedDigests values_of(const OlmoState& state, const NamedDigests& more) {
  NamedDigests values;
  const auto no_elements = [](const Tensor&) { return std::uint64_t{0}; };
  OlmoState shared{state.model, state.optim, {}};
  for (const Leaf& leaf : leaves_of(shared.tree())) {
    if (leaf.value.is(Value::Kind::tensor)) continue;
    values.emplace_back(leaf.name, digest_of(leaf.value, no_elements));
  }
  values.insert(values.end(), more.begin(), more.end());
  return values;
}

Bytes encode(const OlmoState& state, const NamedDigests& more, const PlacedTensors& tensors) {
  MessageWriter message;
  for (const auto& [name, digest] : values_of(state, more)) message.text(name).number(digest);
  for (const PlacedTensor& placed : tensors.all()) {
    const Tensor& tensor = placed.leaf->value.as_tensor();
    const std::string is = std::string(to_string(tensor.dtype)) + to_string(tensor.shape);
    message.text(placed.leaf->name).number(digest64(bytes_of(is)));
  }
  return MessageWriter().block(message.take()).take();
}

std::vector<DigestsOfRank> decode(const Bytes& all) {
  std::vector<DigestsOfRank> ranks;
  for (MessageReader message(all); !message.at_end();) {
    ranks.emplace_back();
    for (MessageReader one(message.block()); !one.at_end();) {
      std::string name = one.text();
      ranks.back().emplace(std::move(name), one.number<std::uint64_t>());
    }
  }
  return ranks;
}

[[noreturn]] void refuse_differences(const std::vector<DigestsOfRank>& ranks) {
  std::map<std::string, std::size_t> unlike;  // keys, and the first rank that has it otherwise
  for (std::size_t r = 1; r < ranks.size(); ++r) {
    const auto note_unlike = [&unlike, r](const DigestsOfRank& mine, const DigestsOfRank& others) {
      for (const auto& [key, digest] : mine) {
        const auto other = others.find(key);
        if (other == others.end() || other->second != digest) unlike.emplace(key, r);
      }
    };
    note_unlike(ranks[0], ranks[r]);
    note_unlike(ranks[r], ranks[0]);
  }
  KeyErrors errors;
  for (const auto& [key, rank] : unlike) {
    errors.add(
        Error(ErrorCode::mismatch, "ranks 0 and " + std::to_string(rank) +
                                       " do not have the same here, outside of the trainer's state")
            .at_key(key));
  }
  errors.require_none();
  throw Error(ErrorCode::mismatch, "ranks hold other parts of tensors than they say");
}

}  // namespace

std::uint64_t digest_of_values(const OlmoState& state, const NamedDigests& more) {
  RunningDigest all;
  for (const auto& [name, digest] : values_of(state, more)) {
    all.add(bytes_of(name));
    all.add(std::as_bytes(std::span(&digest, 1)));
  }
  return all.value();
}

void refuse_difference(const OlmoState& state, const NamedDigests& more,
                       const PlacedTensors& tensors, Group& group) {
  const auto contribute = [&] { return encode(state, more, tensors); };
  const auto conclude = [](const Bytes& all) -> Bytes { refuse_differences(decode(all)); };
  (void)confer(group, "comparing states", {contribute, side_by_side, conclude});
}

}  // namespace tessera
