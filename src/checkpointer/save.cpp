#include "checkpointer/save.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpointer/absent_state.h"
#include "checkpointer/flat_units.h"
#include "fsdp/state/model_state.h"
#include "optim_state/optim_leaves.h"
#include "tessera/checkpointer.h"
#include "tessera/copy.h"
#include "tessera/error.h"

namespace tessera::detail {

Location inside(const Location& where, const std::string& name) {
  if (!where.store) return where.path + "/" + name;
  return {where.store, where.name.empty() ? name : where.name + "/" + name};
}

Location seen_through(const Location& where, const std::optional<Location>& cache) {
  return cache ? Location(cached_store(where, *cache)) : where;
}

namespace {

constexpr const char* kParams = "params";

bool is_before(const Value& a, const Value& b) {
  return a.as_string() < b.as_string();
}

// The names in the order that was restored, if one is of the same parameters, else as OLMo sorts
// them.
Value::List ordered(const Value::List& names, const Value::List& orders,
                    const WrappedNames& wrapped) {
  auto sorted = names;
  std::ranges::sort(sorted, is_before);
  for (const auto& order : orders) {
    auto known = order.items();
    std::ranges::sort(known, is_before);
    if (known == sorted) return order.items();
  }
  std::ranges::sort(sorted, {}, [&](const Value& name) { return wrapped.of(name.as_string()); });
  return sorted;
}

class GroupWriter {
 public:
  GroupWriter(ModuleRef model, const OlmoGroups& groups)
      : wrapped_(model), is_sharded_(has_flat_units(model)), groups_(groups) {}

  [[nodiscard]] Value group(std::size_t index, const Value& own) const {
    const Value* restored = index < groups_.restored.size() ? &groups_.restored[index] : nullptr;
    const auto params = ordered(own.at(kParams).items(), groups_.orders, wrapped_);
    Value::List names;
    std::ranges::transform(params, std::back_inserter(names),
                           [&](const Value& name) { return wrapped_.of(name.as_string()); });
    auto made = Value::dict({{"param_names", Value::list(std::move(names))},
                             {"sharded", is_sharded_},
                             {"max_grad_norm", Value()},
                             {"max_grad_norm_ratio", Value()}});
    if (restored != nullptr) add(*restored, made);
    add(groups_.options, made);
    made.set_item("sharded", is_sharded_);
    add(own, made);
    made.set_item(kParams, Value::list(params));
    return made;
  }

 private:
  static void add(const Value& entries, Value& into) {
    for (const auto& [key, value] : entries.pairs()) {
      if (!(key == Value(kParams))) into.set_item(key, value);
    }
  }

  WrappedNames wrapped_;
  bool is_sharded_;
  const OlmoGroups& groups_;
};

}  // namespace

Value olmo_optimizer(ModuleRef model, const OptimizerRef& optim, const OlmoGroups& groups) {
  const auto own = OptimLeaves(model, optim).tree();
  const GroupWriter writer(model, groups);
  Value::List made;
  for (const auto& group : own.at("param_groups").items())
    made.push_back(writer.group(made.size(), group));
  return Value::dict({{"state", own.at("state")}, {"param_groups", Value::list(std::move(made))}});
}

Value olmo_model(ModuleRef model, const std::vector<std::string>& names) {
  auto state = model_state_to_save(model);
  if (names.empty()) return state;
  const std::set<std::string> wanted(names.begin(), names.end());
  auto pairs = state.pairs();
  std::erase_if(pairs, [&](const auto& pair) { return !wanted.contains(pair.first.as_string()); });
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

}  // namespace tessera::detail

namespace tessera {

// A live model and its optimizer become a checkpoint of a checkpointer.

namespace {

std::vector<std::string> names_in(const OlmoSave& layout) {
  std::vector<std::string> names;
  for (const auto& unit : layout.units)
    names.insert(names.end(), unit.names.begin(), unit.names.end());
  return names;
}

void require_dict(const Value& trainer_state) {
  if (trainer_state.is(Value::Kind::dict)) return;
  throw Error(ErrorCode::invalid_argument, "a trainer state is a dict").at_key("train");
}

}  // namespace

SaveResult Checkpointer::save_checkpoint(const Location& dir, ModuleRef model, OptimizerRef optim,
                                         const Value& trainer_state,
                                         const SaveCheckpointOptions& more) {
  SaveOptions options;
  options.kind = detail::names_of(kind_).files;
  options.overwrite = options_.save_overwrite;
  options.threads = threads_;
  Value tree;
  agree(group_, "taking the state of a training", [&] {
    require_dict(trainer_state);
    if (kind_ == CheckpointerKind::local) options.olmo = detail::flat_model_of(model).layout;
    if (kind_ == CheckpointerKind::torch_legacy) options.olmo.mesh = detail::hybrid_mesh_of(model);
    tree = Value::dict(
        {{"model", detail::olmo_model(model, names_in(options.olmo))},
         {"optim", detail::olmo_optimizer(
                       model, optim, {restored_groups_, restored_orders_, options_.group_options})},
         {"train", trainer_state}});
  });
  auto& state = tree.at("model");
  state = detail::with_rank0_buffers(state, model, options.copies, group_);
  auto& optimizer = tree.at("optim");
  optimizer.set_item("state", detail::with_absent_states(optimizer.at("state"), model, group_));
  options.olmo.config = options_.config;
  const auto result = save(tree, dir, options, group_);
  if (more.upload_to) {
    upload(dir, *more.upload_to, {.overwrite = options_.save_overwrite, .threads = threads_},
           group_);
  }
  return result;
}

}  // namespace tessera
