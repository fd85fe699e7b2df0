// PyTorch's tests of FSDP's optimizer state (test_fsdp_optim_state.py, spec T-01 to T-03 and T-13
// to T-17) by its names: what is saved, what is refused, keys. Each runs on 2, 3 and 4 ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "base/log.h"
#include "optim_state/test_models.h"
#include "optim_state/test_states.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

std::string type_flag(bool sharded) {
  return sharded ? "_state_dict_type_SHARDED_STATE_DICT" : "_state_dict_type_FULL_STATE_DICT";
}

// Whether `optim_input` is given: sharded states have none.
std::vector<bool> input_choices(bool sharded) {
  return sharded ? std::vector<bool>{false} : std::vector<bool>{false, true};
}

std::optional<OptimInput> input_if(bool given, const Trained& trained) {
  return given ? trained.input : std::nullopt;
}

OptimTarget target_of(bool by_input, const Trained& trained) {
  if (by_input) return {.optim_input = trained.input};
  return {.optim = OptimizerRef(*trained.optim)};
}

// T-01 ----------------------------------------------------------------------------------------

struct NestedCase {
  bool sharded = false, multiple_groups = false, rank0_only = false, diff_inputs = false;
};

void saves_what_the_unwrapped_model_has(Rank& rank, const NestedCase& of, bool use_optim_input) {
  const auto& mesh = rank.mesh;
  TrainedOptions options{.mesh = &mesh,
                         .multiple_groups = of.multiple_groups,
                         .reversed = of.diff_inputs && mesh.rank() % 2 == 1};
  auto wrapped = init_nested(options);
  const auto losses = step_model(wrapped, 3);
  const auto saved = of.sharded
                         ? sharded_optim_state_dict(wrapped.module, *wrapped.optim)
                         : full_optim_state_dict(wrapped.module, *wrapped.optim,
                                                 {.optim_input = input_if(use_optim_input, wrapped),
                                                  .rank0_only = of.rank0_only});
  if (of.rank0_only && mesh.rank() != 0) {
    EXPECT_EQ(saved.size(), 0u);
    return;
  }
  options.mesh = nullptr;
  auto plain = init_nested(options);
  EXPECT_EQ(losses, step_model(plain, 3));  // to the last bit
  check_same(of.sharded ? gather_state_dict(saved, mesh) : saved,
             optimizer_state_dict(*plain.optim), Keys::differ);
}

std::vector<Case> nested_cases() {
  std::vector<Case> cases;
  for (const bool sharded : kBoth) {
    for (const bool multiple_groups : kBoth) {
      for (const bool rank0_only : kBoth) {
        for (const bool diff_inputs : kBoth) {
          const NestedCase of{sharded, multiple_groups, rank0_only, diff_inputs};
          cases.push_back({"test_optim_state_dict_nested" + type_flag(sharded) +
                               flag("use_multiple_param_groups", multiple_groups) +
                               flag("rank0_only", rank0_only) +
                               flag("use_diff_optim_inputs", diff_inputs),
                           [of](Rank& rank) {
                             if (of.sharded && of.rank0_only) {
                               // Not supported, and here also refused.
                               EXPECT_THAT(error_of([&] {
                                             auto wrapped = init_nested({.mesh = &rank.mesh});
                                             set_state_dict_type(wrapped.module,
                                                                 {.type = StateDictType::sharded,
                                                                  .optim = {.rank0_only = true}});
                                           }),
                                           HasSubstr("rank0_only"));
                               return;
                             }
                             for (const bool by_input : input_choices(of.sharded))
                               saves_what_the_unwrapped_model_has(rank, of, by_input);
                           }});
        }
      }
    }
  }
  return cases;
}

// T-02, T-03 ----------------------------------------------------------------------------------

void has_the_keys_of_the_state_dict(Rank& rank) {
  NestedModel model;
  wrap_nested(model, rank.mesh, {.ignore_modules = true});
  model->checkpoints_block2 = true;
  const auto optim = make_adam(model, 1e-3);
  auto generator = generator_of(0);
  model(torch::randn({8, 5}, generator)).sum().backward();
  optim->step();
  const auto saved = full_optim_state_dict(model, *optim, {.rank0_only = false});
  const StateDictTypeScope full(model, {.type = StateDictType::full});
  const auto keys = keys_of(state_dict(model));
  EXPECT_EQ(keys.size(), 16u);
  EXPECT_THAT(keys_of(saved.at("state")), UnorderedElementsAreArray(keys));
  for (const auto& key : keys) EXPECT_EQ(key.find("_checkpoint_wrapped_module"), std::string::npos);
}

void refuses_states_that_ranks_lack(Rank& rank) {
  NestedModel model;
  wrap_nested(model, rank.mesh);
  auto params = local_tensors(sharded_parameters(model));
  if (rank.mesh.rank() != 0) params.pop_back();
  torch::optim::Adam optim(params, torch::optim::AdamOptions(1e-3));
  auto generator = generator_of(0);
  for (int step = 0; step < 3; ++step) {
    optim.zero_grad();
    model(torch::randn({8, 5}, generator)).sum().backward();
    optim.step();
  }
  const auto error = error_of([&] { static_cast<void>(full_optim_state_dict(model, optim)); });
  EXPECT_THAT(error, HasSubstr("FSDP currently requires each rank to have at least the optimizer "
                               "states needed by rank 0's optimizer but some ranks are missing "
                               "some of those states"));
  EXPECT_THAT(error, HasSubstr("block2.2.weight"));
}

// T-13 ----------------------------------------------------------------------------------------

// An entry for the parameter that the state says nothing of, under the number that its list of
// parameters leaves out (H-08).
void add_unmanaged_param_entry(Value& state_dict, const torch::Tensor& param, double step) {
  auto group = state_dict.at("param_groups").items().at(0);
  auto params = group.at("params").items();
  std::size_t place = 1;
  while (place < params.size() && params[place].as_int() == params[place - 1].as_int() + 1) ++place;
  const Value id(params[place - 1].as_int() + 1);
  auto generator = generator_of(3);
  Value entry = Value::dict();
  entry.set_item("step", leaf_of(torch::tensor(static_cast<float>(step))));
  entry.set_item("exp_avg", leaf_of(torch::randn(param.sizes(), generator)));
  entry.set_item("exp_avg_sq", leaf_of(torch::randn(param.sizes(), generator)));
  auto state = state_dict.at("state");
  state.set_item(id, entry);
  params.insert(params.begin() + static_cast<std::ptrdiff_t>(place), id);
  group.set_item("params", Value::list(params));
}

void takes_params_that_the_state_lacks(Rank& rank, bool sharded, bool to_fsdp_module,
                                       bool use_optim_input) {
  auto trained = init_nested({.mesh = &rank.mesh});
  step_model(trained, 1);
  const auto saved =
      sharded ? sharded_optim_state_dict(trained.module, *trained.optim)
              : full_optim_state_dict(
                    trained.module, *trained.optim,
                    {.optim_input = input_if(use_optim_input, trained), .rank0_only = false});
  NestedModel model;
  const auto param = add_unmanaged_param(model, to_fsdp_module);
  wrap_nested(model, rank.mesh);
  const auto optim = make_adam(model, 1e-3);
  const auto flatten = [&] {
    if (sharded) return flatten_sharded_optim_state_dict(saved, model, *optim);
    OptimTarget target{.optim = OptimizerRef(*optim)};
    if (use_optim_input)
      target = {.optim_input = OptimInput{local_tensors(sharded_parameters(model))}};
    return shard_full_optim_state_dict(saved, model, target);
  };
  if (to_fsdp_module) {
    EXPECT_THAT(error_of([&] { static_cast<void>(flatten()); }),
                HasSubstr("All unflattened parameters comprising a single flat parameter must have "
                          "scalar state with the same value and dtype"));
    return;
  }
  auto flattened = flatten();
  const auto ids = texts_of(flattened.at("param_groups").items().at(0).at("params"));
  EXPECT_EQ(ids.front(), "0");
  EXPECT_EQ(std::ranges::count(ids, "1"), 0);  // the unmanaged parameter comes after `bias`
  EXPECT_EQ(ids.size() + 1, sharded_parameters(model).size());
  add_unmanaged_param_entry(flattened, param, 1);
  load_optimizer_state_dict(*optim, flattened);
  const auto state = optimizer_state_dict(*optim).at("state");
  const auto* entry = find_key(state, Value(1));
  ASSERT_NE(entry, nullptr);
  EXPECT_TRUE(same(*entry, *find_key(flattened.at("state"), Value(1))));
}

// T-14, T-15 ----------------------------------------------------------------------------------

void rekeys_to_numbers(Rank& rank, bool sharded, bool multiple_groups, bool use_optim_input) {
  auto wrapped = init_nested({.mesh = &rank.mesh, .multiple_groups = multiple_groups});
  step_model(wrapped, 3);
  const auto saved =
      sharded ? sharded_optim_state_dict(wrapped.module, *wrapped.optim)
              : rank.broadcast(
                    full_optim_state_dict(wrapped.module, *wrapped.optim,
                                          {.optim_input = input_if(use_optim_input, wrapped)}),
                    rank.mesh);
  auto plain = init_nested({.multiple_groups = multiple_groups});
  step_model(plain, 3);
  const auto rekeyed = rekey_optim_state_dict(saved, OptimStateKeyType::PARAM_ID, plain.module,
                                              target_of(use_optim_input, plain));
  check_same(sharded ? gather_state_dict(rekeyed, rank.mesh) : rekeyed,
             optimizer_state_dict(*plain.optim), Keys::same);
  if (sharded) return;
  load_optimizer_state_dict(*plain.optim, rekeyed);
  step_model(plain, 3);
  // Each parameter counts its own steps.
  const auto states = optimizer_state_dict(*plain.optim).at("state");
  for (const auto& [key, state] : states.pairs())
    EXPECT_EQ(tensor_in(state.at("step")).item<float>(), 6) << key.as_int();
}

void rekeys_to_names(Rank& rank, bool use_optim_input) {
  auto wrapped = init_nested({.mesh = &rank.mesh});
  step_model(wrapped, 3);
  auto plain = init_nested({});
  step_model(plain, 3);
  const auto rekeyed =
      rekey_optim_state_dict(optimizer_state_dict(*plain.optim), OptimStateKeyType::PARAM_NAME,
                             plain.module, target_of(use_optim_input, plain));
  const auto sharded =
      shard_full_optim_state_dict(rekeyed, wrapped.module, target_of(use_optim_input, wrapped));
  check_same(sharded, optimizer_state_dict(*wrapped.optim), Keys::same);
  load_optimizer_state_dict(*wrapped.optim, sharded);
  step_model(wrapped, 3);
}

// T-16 ----------------------------------------------------------------------------------------

thread_local int warnings_of_this_rank = 0;

void warns_of_optim_input(Rank& rank) {
  set_log([](LogLevel level, std::string_view message) {
    if (level == LogLevel::warning &&
        message.find("`optim_input` argument is deprecated") != std::string_view::npos)
      ++warnings_of_this_rank;
  });
  rank.mesh.group().barrier();
  const auto expect_warning = [](const char* what, const std::function<void()>& act) {
    warnings_of_this_rank = 0;
    act();
    EXPECT_GE(warnings_of_this_rank, 1) << what;
  };
  auto wrapped = init_nested({.mesh = &rank.mesh});
  step_model(wrapped, 2);
  const OptimTarget by_input{.optim_input = wrapped.input};
  Value saved;
  expect_warning("full_optim_state_dict", [&] {
    saved = full_optim_state_dict(wrapped.module, *wrapped.optim,
                                  {.optim_input = wrapped.input, .rank0_only = false});
  });
  expect_warning("shard_full_optim_state_dict", [&] {
    static_cast<void>(shard_full_optim_state_dict(saved, wrapped.module, by_input));
  });
  expect_warning("scatter_full_optim_state_dict", [&] {
    static_cast<void>(scatter_full_optim_state_dict(saved, wrapped.module, by_input));
  });
  auto plain = init_nested({});
  const OptimTarget by_plain_input{.optim_input = plain.input};
  expect_warning("rekey_optim_state_dict to numbers", [&] {
    static_cast<void>(
        rekey_optim_state_dict(saved, OptimStateKeyType::PARAM_ID, plain.module, by_plain_input));
  });
  step_model(plain, 2);
  expect_warning("rekey_optim_state_dict to names", [&] {
    static_cast<void>(rekey_optim_state_dict(optimizer_state_dict(*plain.optim),
                                             OptimStateKeyType::PARAM_NAME, plain.module,
                                             by_plain_input));
  });
  warnings_of_this_rank = 0;
  static_cast<void>(full_optim_state_dict(wrapped.module, *wrapped.optim));
  EXPECT_EQ(warnings_of_this_rank, 0);
  rank.mesh.group().barrier();
  set_log({});
}

// T-17 ----------------------------------------------------------------------------------------

void loads_without_state_of_the_0th_param(Rank& rank, bool sharded) {
  TwoLinears model;
  fsdp(model->lin1, rank.mesh);
  fsdp(model->lin2, rank.mesh);
  fsdp(model, rank.mesh);
  const auto optim = make_adam(model, 1e-2);
  auto generator = generator_of(rank.mesh.rank());
  const auto train = [&] {
    model(torch::randn({2, 5}, generator)).sum().backward();
    optim->step();
  };
  train();
  const auto local = copy_of(optimizer_state_dict(*optim));
  const auto flattened =
      sharded
          ? flatten_sharded_optim_state_dict(sharded_optim_state_dict(model, *optim), model, *optim)
          : shard_full_optim_state_dict(full_optim_state_dict(model, *optim, {.rank0_only = false}),
                                        model);
  EXPECT_THAT(keys_of(flattened.at("state")), ::testing::ElementsAre("1"));  // nothing of lin1
  EXPECT_TRUE(same(flattened.at("state"), local.at("state")));
  load_optimizer_state_dict(*optim, flattened);
  train();
  const auto state = optimizer_state_dict(*optim).at("state");
  EXPECT_EQ(tensor_in(find_key(state, Value(1))->at("step")).item<float>(), 2);
}

std::vector<Case> other_cases() {
  std::vector<Case> cases = {
      {"test_full_optim_state_dict_keys", has_the_keys_of_the_state_dict},
      {"test_full_optim_state_dict_nested_invalid", refuses_states_that_ranks_lack},
      {"test_rekey_optim_state_dict_to_names",
       [](Rank& rank) {
         for (const bool by_input : kBoth) rekeys_to_names(rank, by_input);
       }},
      {"test_optim_input_warning", warns_of_optim_input},
  };
  for (const bool sharded : kBoth) {
    for (const bool second : kBoth) {
      cases.push_back({"test_shard_full_optim_state_dict_unmanaged_params" + type_flag(sharded) +
                           flag("add_to_fsdp_module", second),
                       [=](Rank& rank) {
                         for (const bool by_input : input_choices(sharded))
                           takes_params_that_the_state_lacks(rank, sharded, second, by_input);
                       }});
      cases.push_back({"test_rekey_optim_state_dict_to_ids" + type_flag(sharded) +
                           flag("use_multiple_param_groups", second),
                       [=](Rank& rank) {
                         for (const bool by_input : input_choices(sharded))
                           rekeys_to_numbers(rank, sharded, second, by_input);
                       }});
    }
    cases.push_back({"test_save_load_without_0th_param_state" + type_flag(sharded),
                     [=](Rank& rank) { loads_without_state_of_the_0th_param(rank, sharded); }});
  }
  return cases;
}

const bool save_cases_registered = register_cases(nested_cases()) && register_cases(other_cases());

}  // namespace
}  // namespace tessera::testing
