#include "optim_state/load_plan.h"

#include <algorithm>
#include <set>

#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

Error refused(const ModelParam& param, std::string message) {
  return Error(ErrorCode::mismatch, std::move(message)).at_key(param.own_name);
}

enum class Kind { absent, shaped, scalar, other };
Kind kind_of(const Value* value) {
  if (value == nullptr || value->is(Value::Kind::none)) return Kind::absent;
  if (!value->is(Value::Kind::tensor)) return Kind::other;
  return is_shaped(*value) ? Kind::shaped : Kind::scalar;
}

// E-08. The names of the states that those have that have any, in their order.
std::vector<std::string> state_names(const ModelParam& param,
                                     const std::vector<const Value*>& given) {
  const Value* first = nullptr;
  for (const auto* state : given) {
    if (state == nullptr) continue;
    if (first == nullptr) first = state;
    const auto has = [&](const Value::Pair& pair) {
      return state->find(pair.first.as_string()) != nullptr;
    };
    if (state->size() != first->size() || !std::ranges::all_of(first->pairs(), has)) {
      throw refused(param, "Differing optimizer state names for the unflattened parameters: " +
                               joined(param.names));
    }
  }
  std::vector<std::string> names;
  if (first == nullptr) return names;
  for (const auto& [key, value] : first->pairs()) names.push_back(key.as_string());
  return names;
}

void require_tensor(const ModelParam& param, std::size_t index, const LoadEntry& entry,
                    const Tensor& tensor, bool in_chunks) {
  if (param.is_sharded() && tensor.shape != param.shapes[index]) {
    throw Error(ErrorCode::mismatch,
                "Tensor optimizer state does not have same shape as its parameter: " +
                    to_string(tensor.shape) + " " + to_string(param.shapes[index]) + " (state " +
                    entry.name + ")")
        .at_key(param.names[index]);
  }
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
    return value != nullptr && same_value(*value, *values.front());
  });
  if (is_common) return deep_copy(*values.front());
  std::string shown;
  for (const auto* value : values)
    shown += (shown.empty() ? "" : ", ") + (value == nullptr ? "None" : render(*value));
  throw refused(param,
                "All unflattened parameters comprising a single flat parameter must have scalar "
                "state with the same value and dtype but got values [" +
                    shown + "] for state " + name + " and unflattened parameter names " +
                    joined(param.names));
}

LoadEntry entry_of(const ModelParam& param, const std::string& name,
                   const std::vector<const Value*>& given, bool in_chunks) {
  LoadEntry entry{.name = name};
  std::vector<const Value*> values;
  std::set<Kind> kinds;
  for (const auto* state : given) {
    values.push_back(state == nullptr ? nullptr : state->find(name));
    if (kind_of(values.back()) != Kind::absent) kinds.insert(kind_of(values.back()));
  }
  if (kinds.empty()) return entry;  // None for all of them
  if (kinds.size() > 1) {
    throw refused(param, "Differing optimizer state types for state " + name +
                             " and unflattened parameter names " + joined(param.names));
  }
  if (*kinds.begin() != Kind::shaped) {
    entry.value = common_value(param, name, values);
    return entry;
  }
  entry.is_tensor = true;
  bool is_first = true;
  for (std::size_t i = 0; i < values.size(); ++i) {
    entry.tensors.push_back(kind_of(values[i]) == Kind::absent ? nullptr : values[i]);
    if (entry.tensors.back() == nullptr) continue;
    const auto& tensor = values[i]->as_tensor();
    if (std::exchange(is_first, false)) entry.dtype = tensor.dtype;
    require_tensor(param, i, entry, tensor, in_chunks);
  }
  return entry;
}

}  // namespace

NamedStates::NamedStates(const OptimModel& model, const Value& state) {
  for (const auto& [key, value] : state.pairs()) {
    const auto first = key.is(Value::Kind::string) ? model.first_name(key.as_string()) : "";
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
    std::vector<const Value*> given;
    for (const auto& name : param.names) {
      const auto* state = states.find(name);
      const bool is_empty = state == nullptr || state->pairs().empty();
      given.push_back(is_empty ? nullptr : state);
    }
    if (std::ranges::all_of(given, [](const Value* state) { return state == nullptr; })) continue;
    LoadItem item{&param, {}};
    for (const auto& name : state_names(param, given))
      item.entries.push_back(entry_of(param, name, given, in_chunks));
    items.push_back(std::move(item));
  }
  return items;
}

}  // namespace tessera::detail
