#include "checkpointer/absent_state.h"

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "comm/confer.h"
#include "comm/message.h"
#include "tessera/fsdp.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// One entry of a parameter's state, as a rank describes it.
struct ParamStateEntry {
  std::string key;
  DType dtype = DType::float32;
  bool is_part = false;  // of the parameter's shape, cut like it
  Bytes bytes;           // of what has no elements
};
auto fields(FieldsOf<ParamStateEntry> auto& entry) {
  return std::tie(entry.key, entry.dtype, entry.is_part, entry.bytes);
}
using States = std::map<std::string, std::vector<ParamStateEntry>>;  // by parameter

bool is_original_part(const ShardedParameter& parameter) {
  const auto home = parameter.home.lock();
  return home && home->leaves_out_empty();
}

bool is_absent(const ShardedParameter& parameter) {
  return parameter.local.numel() == 0 && numel(parameter.shape) > 0;
}

Bytes bytes_of(const Tensor& scalar) {
  const auto tensor = plain(tensor_of(scalar)).contiguous();
  const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {data, data + tensor.nbytes()};
}

std::vector<ParamStateEntry> entries_of(const Value& state) {
  std::vector<ParamStateEntry> entries;
  for (const auto& [key, value] : state.pairs()) {
    if (!key.is(Value::Kind::string) || !value.is(Value::Kind::tensor)) continue;
    const auto& tensor = value.as_tensor();
    const bool is_part = !tensor.shape.empty();
    entries.push_back(
        {key.as_string(), tensor.dtype, is_part, is_part ? Bytes() : bytes_of(tensor)});
  }
  return entries;
}

Tensor leaf_for(const ParamStateEntry& entry, const ShardedParameter& parameter) {
  if (!entry.is_part) {
    auto tensor = at::empty({}, scalar_type_of(entry.dtype));
    std::memcpy(tensor.mutable_data_ptr(), entry.bytes.data(), entry.bytes.size());
    return leaf_of(tensor);
  }
  Tensor leaf;
  leaf.dtype = entry.dtype;
  leaf.shape = parameter.shape;
  leaf.sharded = true;
  leaf.placement = parameter.placement;
  return leaf;
}

}  // namespace

Value with_absent_states(const Value& states, ModuleRef model, Group& group) {
  const auto parameters = sharded_parameters(model);
  const auto tell = [&] {
    States own;
    for (const auto& parameter : parameters) {
      const Value* state = states.find(parameter.name());
      if (state != nullptr && is_original_part(parameter) && !is_absent(parameter))
        own.emplace(parameter.name(), entries_of(*state));
    }
    return own;
  };
  const auto join = [](States& all, States more) { all.merge(more); };  // the lower rank's counts
  const auto known = from_message<States>(
      confer(group, "taking an optimizer's state", conference_of(tell, join, std::identity())));
  auto filled = Value::dict(states.pairs());
  for (const auto& parameter : parameters) {
    const auto found = known.find(parameter.name());
    if (found == known.end() || !is_original_part(parameter) || !is_absent(parameter)) continue;
    auto state = Value::dict();
    for (const auto& entry : found->second) state.set_item(entry.key, leaf_for(entry, parameter));
    filled.set_item(parameter.name(), std::move(state));
  }
  // In one order on all ranks, the one of PyTorch's whole states.
  auto pairs = filled.pairs();
  std::ranges::sort(pairs, {}, [](const Value::Pair& pair) { return pair.first.as_string(); });
  return Value::dict(std::move(pairs));
}

}  // namespace tessera::detail
