#include "tessera/stateful.h"

#include <functional>

#include "comm/whereabouts.h"
#include "tessera/comm.h"

namespace tessera {
namespace {

// A part of a state and the tree in which it is saved or loaded.
Value tree_of(const StatePart& part) {
  if (const auto* tree = std::get_if<std::reference_wrapper<Value>>(&part)) return tree->get();
  return std::get<std::reference_wrapper<Stateful>>(part).get().state_dict();
}

Value tree_of(const StateMap& state, Group& group) {
  Value tree = Value::dict();
  agree(group, "asking for the state", [&] {
    for (const auto& [name, part] : state) {
      try {
        tree.set_item(name, tree_of(part));
      } catch (Error& error) {
        throw error.at_key(name);
      }
    }
  });
  return tree;
}

void hand_back(const StateMap& state, const Value& tree, Group& group) {
  // Nothing can fail here. So trees are whole even when an object refuses its state.
  for (const auto& [name, part] : state) {
    if (const auto* own = std::get_if<std::reference_wrapper<Value>>(&part))
      own->get() = tree.at(name);
  }
  agree(group, "handing over the state", [&] {
    for (const auto& [name, part] : state) {
      const auto* object = std::get_if<std::reference_wrapper<Stateful>>(&part);
      if (object == nullptr) continue;
      try {
        object->get().load_state_dict(tree.at(name));
      } catch (Error& error) {
        throw error.at_key(name);
      }
    }
  });
}

// `loading` is a load() of checkpoint.h into the tree that it is given.
LoadReport load_with(const StateMap& state, Group& group,
                     const std::function<LoadReport(Value& tree)>& loading) {
  const Purpose purpose("loading a state");
  Value tree = tree_of(state, group);
  LoadReport report = loading(tree);
  hand_back(state, tree, group);
  return report;
}

}  // namespace

SaveResult save(const StateMap& state, const Location& where, const SaveOptions& options,
                Group& group) {
  const Purpose purpose("saving a state");
  return save(tree_of(state, group), where, options, group);
}

SaveResult save(const StateMap& state, const Location& where, const SaveOptions& options) {
  return save(state, where, options, *solo_group());
}

SaveResult save(const StateMap& state, const Location& where, Group& group) {
  return save(state, where, {}, group);
}

LoadReport load(const StateMap& state, const Location& where, const LoadOptions& options,
                Group& group) {
  return load_with(state, group, [&](Value& tree) { return load(tree, where, options, group); });
}

LoadReport load(const StateMap& state, const Location& where, const LoadOptions& options) {
  return load(state, where, options, *solo_group());
}

LoadReport load(const StateMap& state, const Location& where, Group& group) {
  return load(state, where, {}, group);
}

LoadReport load(const StateMap& state, const Checkpoint& checkpoint, const LoadOptions& options,
                Group& group) {
  return load_with(state, group,
                   [&](Value& tree) { return load(tree, checkpoint, options, group); });
}

}  // namespace tessera
