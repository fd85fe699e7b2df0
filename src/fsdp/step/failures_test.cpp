// What a failure leaves: a model that can be used again after abandon_step, an outer module that
// goes on where it catches, and a module that was not touched where it was refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/testing/shardings.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/trace.h"
#include "tessera/unit_controls.h"
#include "torch/compat.h"
#include "torch/testing.h"
#include "torch/transport.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::Sharding;
using testing::with_values;

// What is under way -------------------------------------------------------------------------------

// One rank leaves out its backward (`continue` where the loss is NaN), so that the other's
// reduction cannot even begin.
TEST(Abandon, AReductionThatNeverBegan) {
  for (const bool same_host : {true, false}) {
    std::promise<void> gathers;
    const auto is_gathering = gathers.get_future().share();
    run_mesh(
        2,
        [&](Mesh& mesh) {
          auto linear = with_values(nn::Linear(4, 4), 3);
          fully_shard(linear, mesh);
          auto loss = call_module(linear, torch::ones({2, 4})).sum();
          const auto text = error_of([&] {
            if (mesh.rank() == 1) {
              abandon_step(linear);
              auto next = start_unshard(linear);
              gathers.set_value();
              next.wait();
            } else {
              is_gathering.wait();
              loss.backward();
            }
          });
          EXPECT_THAT(text, HasSubstr("mismatch"));
          EXPECT_NO_THROW(abandon_step(linear));
          EXPECT_NO_THROW(abandon_step(linear));
        },
        std::chrono::seconds(10), same_host);
  }
}

// Memory runs out where what was gathered is taken, for one.
TEST(Abandon, AGatherThatFailedHasNothingLeft) {
  const auto options = torch::dtype(torch::kFloat);
  const auto channel = make_solo_transport()->open(4, options, options);
  channel->start_gather([](int, std::int64_t, const auto&) { throw std::bad_alloc(); }, false);
  EXPECT_THROW(channel->finish_gather(), std::bad_alloc);
  EXPECT_NO_THROW(channel->finish_gather());
}

class FailingWork final : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { throw std::runtime_error("no network"); }
};

TEST(Abandon, AGatherOfTheUsersOwnThatFailed_F29) {
  run_mesh(2, [](Mesh& mesh) {
    auto linear = with_values(nn::Linear(4, 4), 3);
    fully_shard(linear, mesh);
    bool fails_at_once = false, fails_late = false;
    set_custom_all_gather(linear, [&](torch::Tensor& output, torch::Tensor& input) {
      if (fails_at_once) throw std::runtime_error("no network");
      if (fails_late) return c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<FailingWork>());
      return compat::all_gather(*mesh.process_group(), output, input);
    });
    for (auto* fails : {&fails_at_once, &fails_late}) {
      const auto loss = [&] { return call_module(linear, torch::ones({2, 4})).sum(); };
      *fails = true;
      EXPECT_THAT(error_of([&] { static_cast<void>(loss()); }), HasSubstr("no network"));
      EXPECT_NO_THROW(abandon_step(linear));
      *fails = false;
      EXPECT_NO_THROW(loss().backward());
      EXPECT_TRUE(sharded_parameters(linear)[0].local.grad().defined());
    }
  });
}

// Hands on what it gets; its backward fails.
struct FailsBackward : torch::autograd::Function<FailsBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("no gradient");
  }
};

// The graphs were made before: a forward has been refused all along.
TEST(Abandon, AnotherBackwardAfterOneThatThrew) {
  for (const bool is_whole : {false, true}) {
    for (const bool is_nested : {false, true}) {
      run_mesh(2, [&](Mesh& mesh) {
        auto linear = with_values(nn::Linear(4, 4), 3);
        if (is_whole) {
          replicate(linear, mesh);
        } else {
          fully_shard(linear, mesh);
        }
        const auto x = [] { return torch::ones({2, 4}).requires_grad_(); };
        const auto fails = [&](const torch::Tensor& at) {
          return call_module(linear, FailsBackward::apply(at));
        };
        auto failing = is_nested ? activation_checkpoint(fails, x()) : fails(x());
        auto other = call_module(linear, x());
        auto again = activation_checkpoint(
            [&](const torch::Tensor& at) { return call_module(linear, at); }, x());
        EXPECT_ANY_THROW(failing.sum().backward());
        for (auto* next : {&other, &again}) {
          EXPECT_THAT(error_of([&] { next->sum().backward(); }), HasSubstr("abandon_step"));
        }
        abandon_step(linear);
        call_module(linear, x()).sum().backward();
        EXPECT_TRUE(sharded_parameters(linear)[1].local.grad().defined());
      });
    }
  }
}

// Exceptions inside of a forward ------------------------------------------------------------------

struct FragileImpl : nn::Module {
  nn::Linear linear{nullptr};
  bool fails = false;
  FragileImpl() { linear = register_module("linear", nn::Linear(4, 4)); }
  torch::Tensor forward(const torch::Tensor& x) {
    auto y = torch::tanh(linear(x));
    if (fails) throw std::domain_error("not a number");
    return y;
  }
};
TESSERA_MODULE(Fragile);

// Does without the part that fails, or leaves that to the one around it.
struct ForgivingImpl : nn::Module {
  nn::Linear before{nullptr};
  Fragile part{nullptr};
  bool forgives = true;
  ForgivingImpl() {
    before = register_module("before", nn::Linear(4, 4));
    part = register_module("part", Fragile());
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = before(x);
    if (!forgives) return part(y) + y;
    try {
      return part(y) + y;
    } catch (const std::domain_error&) {
      return y;
    }
  }
};
TESSERA_MODULE(Forgiving);

struct OutermostImpl : nn::Module {
  Forgiving inner{nullptr};
  nn::Linear last{nullptr};
  OutermostImpl() {
    inner = register_module("inner", Forgiving());
    last = register_module("last", nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    try {
      return last(inner(x));
    } catch (const std::domain_error&) {
      return last(x * 0.5);
    }
  }
};
TESSERA_MODULE(Outermost);

torch::Tensor fragile_input(int step, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + 10 * step + rank);
  return torch::randn({3, 4}, generator);
}

void train_with_failures(Outermost& net, torch::optim::Optimizer& optimizer, bool forgives,
                         const std::vector<int>& ranks) {
  net->inner->forgives = forgives;
  for (int step = 0; step < 5; ++step) {
    net->inner->part->fails = step % 2 == 1;
    optimizer.zero_grad();
    for (const int rank : ranks) {
      (net(fragile_input(step, rank)).square().sum() / static_cast<double>(ranks.size()))
          .backward();
    }
    optimizer.step();
    net->inner->part->fails = true;
    const torch::NoGradGuard evaluates;
    EXPECT_NO_THROW(net(fragile_input(step, 0)));
  }
}

// A way to shard, and whether parameters are freed after forward.
using FragileKind = std::pair<Sharding, bool>;
class Caught : public ::testing::TestWithParam<std::tuple<FragileKind, bool>> {};

TEST_P(Caught, GoesOnAsOneProcessDoes) {
  const auto [kind, forgives] = GetParam();
  auto plain = with_values(Outermost(), 5);
  torch::optim::SGD expected(plain->parameters(), 0.05);
  train_with_failures(plain, expected, forgives, {0, 1});
  run_mesh(2, [&, kind = kind, forgives = forgives](Mesh& mesh) {
    auto net = with_values(Outermost(), 5);
    testing::shard_as(kind.first, {.reshard_after_forward = kind.second}, mesh, net,
                      net->inner->part, net->inner);
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), 0.05);
    train_with_failures(net, optimizer, forgives, {mesh.rank()});
    const auto full = full_state_dict(net);
    for (const auto& parameter : plain->named_parameters()) {
      EXPECT_TRUE(testing::allclose(full[parameter.key()], parameter.value().detach(), 1e-5, 1e-6))
          << parameter.key();
    }
    for (const auto& unit : unit_reports(net)) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
    // What nobody catches still needs a reset.
    EXPECT_ANY_THROW(net(torch::ones({1, 5})));
    EXPECT_THAT(error_of([&] { static_cast<void>(net(fragile_input(0, 0))); }),
                HasSubstr("abandon_step"));
    abandon_step(net);
    EXPECT_NO_THROW(net(fragile_input(0, 0)).sum().backward());
  });
}

// The same where an activation checkpoint is around what catches: the second time, too, it goes on
// without what threw.
struct RecomputingImpl : nn::Module {
  nn::Linear first{nullptr}, last{nullptr};
  Forgiving inner{nullptr};
  RecomputingImpl() {
    first = register_module("first", nn::Linear(4, 4));
    inner = register_module("inner", Forgiving());
    last = register_module("last", nn::Linear(4, 2));
    inner->part->fails = true;
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto part = [inner = inner](const torch::Tensor& y) mutable { return inner(y); };
    return last(activation_checkpoint(part, first(x)));
  }
};
TESSERA_MODULE(Recomputing);

TEST(CaughtInACheckpoint, GoesOnAsOneProcessDoes) {
  const auto train = [](Recomputing& net, const std::vector<int>& ranks) {
    for (int step = 0; step < 2; ++step) {
      for (const int rank : ranks) net(fragile_input(step, rank)).square().sum().backward();
    }
  };
  auto plain = with_values(Recomputing(), 5);
  train(plain, {0, 1});
  run_mesh(2, [&](Mesh& mesh) {
    auto net = with_values(Recomputing(), 5);
    fully_shard(net->inner->part, mesh);
    fully_shard(net, mesh);
    EXPECT_NO_THROW(train(net, {mesh.rank()}));
    const auto parameters = sharded_parameters(net);
    const auto expected = plain->first->weight.grad().chunk(2)[mesh.rank()] / 2;
    EXPECT_TRUE(testing::allclose(parameters.front().local.grad(), expected));
    EXPECT_EQ(parameters.front().name(), "first.weight");
  });
}

std::string caught_name(const ::testing::TestParamInfo<Caught::ParamType>& given) {
  const auto [kind, forgives] = given.param;
  return testing::name_of(kind.first) + (kind.second ? "" : "Kept") +
         (forgives ? "Inside" : "Outside");
}

INSTANTIATE_TEST_SUITE_P(
    All, Caught,
    ::testing::Combine(::testing::Values(FragileKind(Sharding::rows, true),
                                         FragileKind(Sharding::rows, false),
                                         FragileKind(Sharding::replicate, true),
                                         FragileKind(Sharding::original, true)),
                       ::testing::Bool()),
    caught_name);

// Modules that are refused ------------------------------------------------------------------------

struct OddImpl : nn::Module {
  nn::Sequential layers{nullptr};
  torch::Tensor odd;
  explicit OddImpl(torch::Tensor parameter) {
    layers = register_module("layers", nn::Sequential(nn::Linear(4, 6), nn::Linear(6, 4)));
    odd = register_parameter("odd", std::move(parameter), /*requires_grad=*/false);
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x); }
};
TESSERA_MODULE(Odd);

struct NamedLinearImpl : nn::LinearImpl {
  using nn::LinearImpl::LinearImpl;
};
TESSERA_MODULE(NamedLinear);

// What a module was before somebody tried.
struct Snapshot {
  explicit Snapshot(const nn::Module& module) {
    for (const auto& entry : module.named_parameters()) {
      const auto& tensor = entry.value();
      tensors[entry.key()] = tensor;
      memory[entry.key()] = tensor.const_data_ptr();
      values[entry.key()] = tensor.detach().clone();
    }
  }
  void expect_unchanged(const nn::Module& module) const {
    const auto now = module.named_parameters();
    ASSERT_EQ(now.size(), tensors.size());
    for (const auto& entry : now) {
      const auto& name = entry.key();
      EXPECT_TRUE(entry.value().is_same(tensors.at(name))) << name;
      EXPECT_EQ(entry.value().const_data_ptr(), memory.at(name)) << name;
      EXPECT_TRUE(testing::equal(entry.value(), values.at(name))) << name;
      EXPECT_EQ(entry.value().scalar_type(), values.at(name).scalar_type()) << name;
    }
    for (const auto& below : module.modules())
      EXPECT_EQ(detail::find_unit(below.get()), nullptr) << below->name();
  }
  std::map<std::string, torch::Tensor> tensors, values;
  std::map<std::string, const void*> memory;
};

struct Refused {
  const char* name;
  torch::Tensor odd;
  std::function<void(Odd& module, const Mesh& mesh)> wrap;
  const char* text;
};

void wrap_by_a_policy_that_throws_on_rank_1(Odd& module, const Mesh& mesh) {
  const auto choose = [rank = mesh.rank()](const nn::Module& below) {
    if (rank == 1 && below.parameters(false).size() > 1)
      throw Error(ErrorCode::invalid_argument, "a policy of rank 1");
    return true;
  };
  FullyShardedDataParallel<Odd>(module, mesh,
                                {.auto_wrap_policy = lambda_auto_wrap_policy(choose)});
}

std::vector<Refused> refused() {
  const auto floats = torch::ones({6, 3});
  const auto placed_at = [](int dim) {
    return [dim](Odd& module, const Mesh& mesh) {
      fully_shard(module, mesh, {.shard_placement = [dim](const torch::Tensor& parameter) {
                    return parameter.size(-1) == 3 ? std::optional(dim) : std::nullopt;
                  }});
    };
  };
  const auto plain = [](Odd& module, const Mesh& mesh) { fully_shard(module, mesh); };
  const auto flat = [](bool original, bool sync) {
    return [original, sync](Odd& module, const Mesh& mesh) {
      if (mesh.rank() == 1) {
        const torch::NoGradGuard no_grad;
        module->layers[0]->as<nn::Linear>()->weight.add_(1);
      }
      const Snapshot before(*module);
      try {
        FullyShardedDataParallel<Odd>(module, mesh,
                                      {.sync_module_states = sync, .use_orig_params = original});
      } catch (const Error&) {
        before.expect_unchanged(*module);
        throw;
      }
    };
  };
  return {
      {"Ranks", floats,
       [](Odd& module, const Mesh& mesh) {
         fully_shard(module, mesh, {.reshard_after_forward_ranks = 3});
       },
       "should be a factor of 2"},
      {"Dimension", floats, placed_at(2), "shard_placement gave dimension 2"},
      {"Uneven", floats, placed_at(1), "uneven sharding on dim 1"},
      {"Scalar", torch::ones({}), plain, "scalar parameters"},
      {"Dtypes", floats.to(torch::kDouble), plain, "uniform dtype"},
      {"Frozen", floats, flat(false, true), "uniform `requires_grad`"},
      {"DtypesFlat", floats.to(torch::kDouble), flat(true, true), "uniform dtype"},
      {"DividedByNothing", floats,
       [](Odd& module, const Mesh& mesh) {
         fully_shard(module, mesh, {.gradient_divide_factor = 0.0});
       },
       "a gradient divide factor is a positive number, got 0"},
      {"DividedByNoNumber", floats,
       [](Odd& module, const Mesh& mesh) {
         fully_shard(module, mesh, {.gradient_divide_factor = std::nan("")});
       },
       "a gradient divide factor is a positive number, got nan"},
      {"ComplexPrecision", floats,
       [](Odd& module, const Mesh& mesh) {
         fully_shard(module, mesh, {.mixed_precision = {.reduce_dtype = torch::kComplexFloat}});
       },
       "mixed precision in ComplexFloat"},
      {"IntegerPrecision", floats,
       [](Odd& module, const Mesh& mesh) {
         fully_shard(module, mesh, {.mixed_precision = {.param_dtype = torch::kInt}});
       },
       "mixed precision in Int"},
      // After its layers were found to be units.
      {"UnderAPolicy", torch::ones({}),
       [](Odd& module, const Mesh& mesh) {
         FullyShardedDataParallel<Odd>(module, mesh, {.auto_wrap_policy = always_wrap_policy()});
       },
       "scalar parameters"},
      {"UnderAPolicyOfOneRank", floats, wrap_by_a_policy_that_throws_on_rank_1, "rank 1"},
      {"OneRankAlone", floats,
       [](Odd& module, const Mesh& mesh) {
         fully_shard(module, mesh,
                     {.shard_placement = [&](const torch::Tensor&) { return 7 * mesh.rank(); }});
       },
       ""},
  };
}

TEST(Refused, ModulesStayWhatTheyWere) {
  for (const auto& one : refused()) {
    SCOPED_TRACE(one.name);
    run_mesh(2, [&](Mesh& mesh) {
      auto module = with_values(Odd(one.odd.clone()), 4);
      const Snapshot before(*module);
      const auto text = error_of([&] { one.wrap(module, mesh); });
      EXPECT_THAT(text, HasSubstr(one.text)) << one.name;
      EXPECT_NE(text, "no Error") << one.name;
      const bool is_compared = std::string(one.name).find("Flat") == std::string::npos &&
                               std::string(one.name) != "Frozen";
      if (is_compared) before.expect_unchanged(*module);
      // Without what was wrong it is a module as any other.
      module = with_values(Odd(torch::ones({6, 3})), 4);
      EXPECT_NO_THROW(fully_shard(module, mesh)) << one.name;
    });
  }
}

TEST(Refused, ASlotOfAnotherType) {
  run_mesh(2, [](Mesh& mesh) {
    const auto inner = std::make_shared<NamedLinearImpl>(4, 4);
    // A Sequential holds it as what it derives from.
    nn::Sequential all(std::static_pointer_cast<nn::LinearImpl>(inner));
    NamedLinear named(inner);
    fully_shard(named, mesh);
    EXPECT_THAT(error_of([&] { fully_shard(all, mesh); }), HasSubstr("as another type"));
    EXPECT_EQ(detail::find_unit(all.get()), nullptr);
  });
}

}  // namespace
}  // namespace tessera
