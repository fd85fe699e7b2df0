#include "optim_state/load_plan.h"

#include <algorithm>
#include <set>

#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

Error refused(const ModelParam& param, std::string message) {
  return Error(ErrorCode::mismatch, std::move(message)).at_key(param.own_name);
}

bool is_there(const Value* value) {
  return value != nullptr;
}

enum class Kind { absent, shaped, scalar, other };
Kind kind_of(const Value* value) {
  if (value == nullptr || value->is(Value::Kind::none)) return Kind::absent;
  if (!value->is(Value::Kind::tensor)) return Kind::other;
  return is_shaped(*value) ? Kind::shaped : Kind::scalar;
}

bool has_same_names(const Value& state, const Value& other) {
  return state.size() == other.size() &&
         std::ranges::all_of(other.pairs(), [&](const Value::Pair& pair) {
           return is_there(state.find(pair.first.as_string()));
         });
}

// E-08. The names of the states that those have that have any, one at least, in their order.
std::vector<std::string> state_names(const ModelParam& param,
                                     const std::vector<const Value*>& given) {
  const Value& first = **std::ranges::find_if(given, is_there);
  const bool is_same = std::ranges::all_of(
      given, [&](const Value* state) { return !is_there(state) || has_same_names(*state, first); });
  if (!is_same) {
    throw refused(param, "Differing optimizer state names for the unflattened parameters: " +
                             joined(param.names));
  }
  std::vector<std::string> names;
  for (const auto& [key, value] : first.pairs()) names.push_back(key.as_string());
  return names;
}

void require_shape(const ModelParam& param, std::size_t index, const LoadEntry& entry,
                   const Tensor& tensor) {
  if (!param.is_sharded() || tensor.shape == param.shapes[index]) return;
  throw Error(ErrorCode::mismatch,
              "Tensor optimizer state does not have same shape as its parameter: " +
                  to_string(tensor.shape) + " " + to_string(param.shapes[index]) + " (state " +
                  entry.name + ")")
      .at_key(param.names[index]);
}

void require_tensor(const ModelParam& param, std::size_t index, const LoadEntry& entry,
                    const Tensor& tensor, bool in_chunks) {
  require_shape(param, index, entry, tensor);
  if (tensor.dtype != entry.dtype) {
    throw refused(param,
                  "All unflattened parameters comprising a single flat parameter must have "
                  "positive-dimension tensor state with the same dtype but got dtypes " +
                      std::string(to_string(tensor.dtype)) + " and " +
                      std::string(to_string(entry.dtype)) + " for state " + entry.name);
  }
  if (!in_chunks && tensor.sharded) {
    throw Error(ErrorCode::mismatch,
                "a part of a tensor where the whole is expected: the state is a sharded one")
        .at_key(param.names[index]);
  }
}

// E-10e and E-10f: one step counts for all that lies in one tensor.
Value common_value(const ModelParam& param, const std::string& name,
                   const std::vector<const Value*>& values) {
  const bool is_common = std::ranges::all_of(values, [&](const Value* value) {
    return is_there(value) && same_value(*value, *values.front());
  });
  if (is_common) return deep_copy(*values.front());
  std::vector<std::string> shown;
  for (const auto* value : values) shown.push_back(is_there(value) ? render(*value) : "None");
  throw refused(param,
                "All unflattened parameters comprising a single flat parameter must have scalar "
                "state with the same value and dtype but got values [" +
                    joined(shown) + "] for state " + name + " and unflattened parameter names " +
                    joined(param.names));
}

// The state `name` of each parameter, which None stands for too; null where it has none.
std::vector<const Value*> values_of(const std::vector<const Value*>& given,
                                    const std::string& name) {
  std::vector<const Value*> values;
  for (const auto* state : given) {
    const auto* value = is_there(state) ? state->find(name) : nullptr;
    values.push_back(kind_of(value) == Kind::absent ? nullptr : value);
  }
  return values;
}

// The kind of all values that are there.
Kind common_kind(const ModelParam& param, const std::string& name,
                 const std::vector<const Value*>& values) {
  std::set<Kind> kinds;
  for (const auto* value : values) kinds.insert(kind_of(value));
  kinds.erase(Kind::absent);
  if (kinds.size() > 1) {
    throw refused(param, "Differing optimizer state types for state " + name +
                             " and unflattened parameter names " + joined(param.names));
  }
  return kinds.empty() ? Kind::absent : *kinds.begin();
}

// `values`: tensors, one at least.
LoadEntry tensor_entry(const ModelParam& param, const std::string& name,
                       std::vector<const Value*> values, bool in_chunks) {
  const auto& first = (*std::ranges::find_if(values, is_there))->as_tensor();
  LoadEntry entry{.name = name, .is_tensor = true, .dtype = first.dtype};
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (is_there(values[i])) require_tensor(param, i, entry, values[i]->as_tensor(), in_chunks);
  }
  entry.tensors = std::move(values);
  return entry;
}

LoadEntry entry_of(const ModelParam& param, const std::string& name,
                   const std::vector<const Value*>& given, bool in_chunks) {
  auto values = values_of(given, name);
  const auto kind = common_kind(param, name, values);
  if (kind == Kind::absent) return {.name = name};  // None for all of them
  if (kind == Kind::shaped) return tensor_entry(param, name, std::move(values), in_chunks);
  return {.name = name, .value = common_value(param, name, values)};
}

// The states of the parameter's names; null: there is nothing.
std::vector<const Value*> states_given(const ModelParam& param, const NamedStates& states) {
  std::vector<const Value*> given;
  for (const auto& name : param.names) {
    const auto* state = states.find(name);
    given.push_back(is_there(state) && !state->pairs().empty() ? state : nullptr);
  }
  return given;
}

}  // namespace

NamedStates::NamedStates(const OptimModel& model, const Value& state) {
  for (const auto& [key, value] : state.pairs()) {
    const auto first = model.first_name(key);
    if (first.empty()) {
      others_.emplace_back(key, value);
    } else {
      states_.emplace(first, &value);
    }
  }
}

const Value* NamedStates::find(const std::string& name) const {
  const auto found = states_.find(name);
  return found == states_.end() ? nullptr : found->second;
}

std::vector<LoadItem> plan_load(const OptimModel& model, const NamedStates& states,
                                bool in_chunks) {
  std::vector<LoadItem> items;
  for (const auto& param : model.params()) {
    const auto given = states_given(param, states);
    if (std::ranges::none_of(given, is_there)) continue;
    LoadItem item{&param, {}};
    for (const auto& name : state_names(param, given))
      item.entries.push_back(entry_of(param, name, given, in_chunks));
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace tessera::detail
