#include "optim/optimizer_formats.h"

#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

#include "base/log.h"
#include "optim/fields.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// What an object writes about itself, under which names.
template <typename Object>
std::vector<std::string> serialized_names(const Object& object) {
  torch::serialize::OutputArchive out;
  object.serialize(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  return in.keys();
}

template <typename Object>
void require_listed(const std::string& optimizer, const detail::FieldNames& listed,
                    const Object& object, const char* what) {
  for (const auto& name : serialized_names(object)) {
    if (listed.has(name)) continue;
    throw Error(ErrorCode::invalid_argument,
                "the description of optimizer " + optimizer + " lacks a field of its " + what)
        .at_key(name);
  }
}

void betas(StateFields& fields, const std::function<std::tuple<double, double>&()>& of) {
  fields.value(
      "betas",
      [&] {
        return Value::tuple({std::get<0>(of()), std::get<1>(of())});
      },
      [&](const Value& given) {
        const auto& pair = given.items();
        if (pair.size() != 2)
          throw Error(ErrorCode::corrupt, "betas are not a pair").at_key("param_groups");
        of() = {detail::number_of(pair[0]), detail::number_of(pair[1])};
      });
}

const Value kNone;

// Adam and AdamW of libtorch differ in their types only.
template <typename State>
void adam_state(StateFields& fields, State& state) {
  fields.count("step", state.step());
  fields.tensor("exp_avg", state.exp_avg());
  fields.tensor("exp_avg_sq", state.exp_avg_sq());
  fields.tensor("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <typename Options>
void adam_options(StateFields& fields, Options& options, bool is_decoupled) {
  fields.number("lr", options.lr());
  betas(fields, [&]() -> std::tuple<double, double>& { return options.betas(); });
  fields.number("eps", options.eps());
  fields.number("weight_decay", options.weight_decay());
  fields.flag("amsgrad", options.amsgrad());
  fields.fixed("maximize", false, true);
  fields.fixed("foreach", kNone, false);
  fields.fixed("capturable", false, false);
  fields.fixed("differentiable", false, false);
  fields.fixed("fused", kNone, false);
  fields.fixed("decoupled_weight_decay", is_decoupled, true);
}

void sgd_options(StateFields& fields, torch::optim::SGDOptions& options) {
  fields.number("lr", options.lr());
  fields.number("momentum", options.momentum());
  fields.number("dampening", options.dampening());
  fields.number("weight_decay", options.weight_decay());
  fields.flag("nesterov", options.nesterov());
  fields.fixed("maximize", false, true);
  fields.fixed("foreach", kNone, false);
  fields.fixed("differentiable", false, false);
  fields.fixed("fused", kNone, false);
}

void adagrad_options(StateFields& fields, torch::optim::AdagradOptions& options) {
  fields.number("lr", options.lr());
  fields.number("lr_decay", options.lr_decay());
  fields.number("eps", options.eps());
  fields.number("weight_decay", options.weight_decay());
  fields.number("initial_accumulator_value", options.initial_accumulator_value());
  fields.fixed("foreach", kNone, false);
  fields.fixed("maximize", false, true);
  fields.fixed("differentiable", false, false);
  fields.fixed("fused", kNone, false);
}

void rmsprop_options(StateFields& fields, torch::optim::RMSpropOptions& options) {
  fields.number("lr", options.lr());
  fields.number("momentum", options.momentum());
  fields.number("alpha", options.alpha());
  fields.number("eps", options.eps());
  fields.flag("centered", options.centered());
  fields.number("weight_decay", options.weight_decay());
  fields.fixed("capturable", false, false);
  fields.fixed("foreach", kNone, false);
  fields.fixed("maximize", false, true);
  fields.fixed("differentiable", false, false);
}

void lbfgs_options(StateFields& fields, torch::optim::LBFGSOptions& options) {
  fields.number("lr", options.lr());
  fields.integer("max_iter", options.max_iter());
  fields.value(
      "max_eval", [&] { return options.max_eval() ? Value(*options.max_eval()) : Value(); },
      [&](const Value& given) {
        options.max_eval() =
            given.is(Value::Kind::none) ? std::nullopt : std::optional(given.as_int());
      });
  fields.number("tolerance_grad", options.tolerance_grad());
  fields.number("tolerance_change", options.tolerance_change());
  fields.integer("history_size", options.history_size());
  fields.value(
      "line_search_fn",
      [&] { return options.line_search_fn() ? Value(*options.line_search_fn()) : Value(); },
      [&](const Value& given) {
        options.line_search_fn() =
            given.is(Value::Kind::none) ? std::nullopt : std::optional(given.as_string());
      });
}

// LBFGS keeps the state of all parameters with the first one, so its tensors have any shape.
Value any_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? Value(leaf_of(tensor.cpu())) : Value();
}
at::Tensor any_tensor(const Value& given) {
  return given.is(Value::Kind::none) ? at::Tensor() : tensor_of(given.as_tensor()).clone();
}
void free_tensor(StateFields& fields, const char* name, at::Tensor& field) {
  fields.value(
      name, [&] { return any_tensor(field); },
      [&](const Value& given) { field = any_tensor(given); });
}
template <typename Tensors>
Value list_of(const Tensors& tensors) {
  Value::List items;
  for (const auto& tensor : tensors) items.push_back(any_tensor(tensor));
  return Value::list(std::move(items));
}
template <typename Tensors>
Tensors tensors_of(const Value& given) {
  Tensors tensors;
  for (const auto& item : given.items()) tensors.push_back(any_tensor(item));
  return tensors;
}
void tensor_list(StateFields& fields, const char* name, std::deque<at::Tensor>& field) {
  fields.value(
      name, [&] { return list_of(field); },
      [&](const Value& given) { field = tensors_of<std::deque<at::Tensor>>(given); });
}

void lbfgs_state(StateFields& fields, torch::optim::LBFGSParamState& state) {
  fields.integer("func_evals", state.func_evals());
  fields.integer("n_iter", state.n_iter());
  fields.value(
      "al", [&] { return state.al() ? list_of(*state.al()) : Value(); },
      [&](const Value& given) {
        state.al() = given.is(Value::Kind::none)
                         ? std::nullopt
                         : std::optional(tensors_of<std::vector<at::Tensor>>(given));
      });
  free_tensor(fields, "d", state.d());
  fields.number("t", state.t());
  tensor_list(fields, "old_dirs", state.old_dirs());
  tensor_list(fields, "old_stps", state.old_stps());
  tensor_list(fields, "ro", state.ro());
  free_tensor(fields, "H_diag", state.H_diag());
  free_tensor(fields, "prev_flat_grad", state.prev_flat_grad());
  fields.number("prev_loss", state.prev_loss());
}

template <typename State, typename Options>
OptimizerFormat format(const char* name, void (*state)(StateFields&, State&),
                       void (*options)(StateFields&, Options&)) {
  return {
      .name = name,
      .make_state = [] { return std::make_unique<State>(); },
      .make_options = {},
      .state = [state](StateFields& fields,
                       OptimizerParamState& of) { state(fields, static_cast<State&>(of)); },
      .options = [options](StateFields& fields,
                           OptimizerOptions& of) { options(fields, static_cast<Options&>(of)); }};
}

std::map<std::type_index, OptimizerFormat> own_formats() {
  using namespace torch::optim;  // NOLINT(*-using-namespace*): the table's types are all there
  std::map<std::type_index, OptimizerFormat> formats;
  formats.emplace(typeid(Adam), format<AdamParamState, AdamOptions>(
                                    "Adam", adam_state<AdamParamState>,
                                    +[](StateFields& fields, AdamOptions& of) {
                                      adam_options(fields, of, false);
                                    }));
  formats.emplace(typeid(torch::optim::AdamW),
                  format<AdamWParamState, torch::optim::AdamWOptions>(
                      "AdamW", adam_state<AdamWParamState>, detail::visit_adamw));
  formats.emplace(typeid(SGD), format<SGDParamState, SGDOptions>(
                                   "SGD",
                                   +[](StateFields& fields, SGDParamState& state) {
                                     fields.tensor("momentum_buffer", state.momentum_buffer());
                                   },
                                   sgd_options));
  formats.emplace(typeid(Adagrad), format<AdagradParamState, AdagradOptions>(
                                       "Adagrad",
                                       +[](StateFields& fields, AdagradParamState& state) {
                                         fields.count("step", state.step());
                                         fields.tensor("sum", state.sum());
                                       },
                                       adagrad_options));
  formats.emplace(typeid(RMSprop), format<RMSpropParamState, RMSpropOptions>(
                                       "RMSprop",
                                       +[](StateFields& fields, RMSpropParamState& state) {
                                         fields.count("step", state.step());
                                         fields.tensor("square_avg", state.square_avg());
                                         fields.tensor("momentum_buffer", state.momentum_buffer());
                                         fields.tensor("grad_avg", state.grad_avg());
                                       },
                                       rmsprop_options));
  formats.emplace(typeid(LBFGS),
                  format<LBFGSParamState, LBFGSOptions>("LBFGS", lbfgs_state, lbfgs_options));
  return formats;
}

struct Registry {
  std::mutex mutex;
  std::map<std::type_index, OptimizerFormat> formats = own_formats();
  // Those that were registered again live on: references to them may be in use.
  std::vector<std::map<std::type_index, OptimizerFormat>::node_type> replaced;
};
Registry& registry() {
  static Registry instance;
  return instance;
}

}  // namespace

const OptimizerFormat* detail::find_format(std::type_index type) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  const auto found = all.formats.find(type);
  return found == all.formats.end() ? nullptr : &found->second;
}

void detail::visit_adamw(StateFields& fields, torch::optim::AdamWOptions& options) {
  adam_options(fields, options, true);
}

void detail::require_options_of(const std::string& name, const Value& group) {
  struct Own {
    std::string_view optimizer, option;  // which no other one has
  };
  constexpr std::array<Own, 5> kAll{{{"SGD", "nesterov"},
                                     {"RMSprop", "alpha"},
                                     {"Adagrad", "lr_decay"},
                                     {"LBFGS", "history_size"},
                                     {"Adam", "amsgrad"}}};
  const std::string_view own = name == "AdamW" ? "Adam" : std::string_view(name);
  const auto saved =
      std::ranges::find_if(kAll, [&](const Own& one) { return group.find(one.option) != nullptr; });
  const bool is_known = std::ranges::find(kAll, own, &Own::optimizer) != kAll.end();
  if (!is_known || saved == kAll.end() || saved->optimizer == own) return;
  throw Error(ErrorCode::mismatch, "the checkpoint has the state of " +
                                       std::string(saved->optimizer) + ", and the optimizer is " +
                                       name +
                                       ": make the one that was saved, or load the model alone")
      .at_key("param_groups");
}

void detail::warn_of_option(const std::string& optimizer, const std::string& option) {
  log_of_all(LogLevel::warning, "optimizer " + optimizer + " has no option '" + option +
                                    "': what was loaded for it is not kept");
}

void detail::require_complete(const OptimizerFormat& format, OptimizerParamState& state) {
  FieldNames names;
  format.state(names, state);
  require_listed(format.name, names, state, "state");
}

void register_optimizer(std::type_index type, OptimizerFormat format) {
  detail::require_complete(format, *format.make_state());
  detail::FieldNames names;
  const auto options = format.make_options();
  format.options(names, *options);
  require_listed(format.name, names, *options, "options");
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  if (const auto known = all.formats.find(type); known != all.formats.end())
    all.replaced.push_back(all.formats.extract(known));
  all.formats.emplace(type, std::move(format));
}

}  // namespace tessera
