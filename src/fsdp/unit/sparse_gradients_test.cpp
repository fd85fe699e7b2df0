// Sparse gradients of embeddings, which replicate and DistributedDataParallel average as PyTorch's
// does, and all others refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/testing/test_model.h"
#include "tessera/ddp.h"
#include "tessera/fsdp.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::with_values;

// Tables between layers, so that buckets of both kinds follow each other.
struct TablesImpl : nn::Module {
  nn::Embedding words{nullptr};
  nn::EmbeddingBag bag{nullptr};
  nn::Linear last{nullptr};
  explicit TablesImpl(bool sparse) {
    words = register_module("words", nn::Embedding(nn::EmbeddingOptions(9, 3).sparse(sparse)));
    bag = register_module(
        "bag", nn::EmbeddingBag(nn::EmbeddingBagOptions(7, 3).sparse(sparse).mode(torch::kSum)));
    last = register_module("last", nn::Linear(3, 2));
  }
  // Without `words` where there are none.
  torch::Tensor forward(const torch::Tensor& ids) {
    auto x = bag(ids.remainder(7).view({1, -1})).squeeze(0);
    if (ids.max().item<std::int64_t>() < 9) x = x + words(ids).sum(0);
    return last(x).square().sum();
  }
};
TESSERA_MODULE(Tables);

Tables tables(bool sparse) {
  auto net = Tables(sparse);
  net->to(torch::kDouble);
  return with_values(net, 31);
}

// Some twice; ranks share one.
torch::Tensor ids_of(int rank, int micro) {
  return torch::tensor({rank, rank + 2, rank, micro % 9, 4});
}
torch::Tensor no_words() {
  return torch::tensor({20, 21, 20});
}

// The mean gradients of dense tables in one process.
std::vector<torch::Tensor> mean_of_dense(const std::vector<int>& micros, int ranks) {
  auto net = tables(false);
  for (const int micro : micros) {
    for (int rank = 0; rank < ranks; ++rank) (net(ids_of(rank, micro)) / ranks).backward();
  }
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

void expect_sparse(Tables& net, const std::vector<torch::Tensor>& expected) {
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto& gradient = parameters[i].grad();
    const bool is_table = i < 2;
    ASSERT_EQ(gradient.is_sparse(), is_table) << i;
    if (is_table) {
      EXPECT_TRUE(gradient.is_coalesced()) << i;
    }
    const auto dense = is_table ? gradient.to_dense() : gradient;
    EXPECT_TRUE(testing::allclose(dense, expected[i], 1e-10, 1e-12)) << i << dense << expected[i];
  }
}

void tables_backward(Tables& net, const torch::Tensor& ids, bool sync = true) {
  std::optional<NoSync> quiet;
  if (!sync) quiet.emplace(net);
  net(ids).backward();
}

TEST(SparseGradients, AreAveragedAndStaySparse) {
  for (const bool same_host : {true, false}) {
    for (const std::int64_t bucket_bytes : {1, 1 << 20}) {
      run_mesh(
          3,
          [&](Mesh& mesh) {
            auto net = tables(true);
            replicate(net, mesh,
                      {.bucket_bytes = bucket_bytes, .first_bucket_bytes = bucket_bytes});
            const auto run = [&](int micro, bool sync) {
              tables_backward(net, ids_of(mesh.rank(), micro), sync);
            };
            run(0, true);
            expect_sparse(net, mean_of_dense({0}, 3));
            EXPECT_EQ(net->words->weight.grad()._nnz(), 5);  // the rows that somebody used
            run(1, true);
            expect_sparse(net, mean_of_dense({0, 1}, 3));
            run(2, false);
            run(3, false);
            run(4, true);
            expect_sparse(net, mean_of_dense({0, 1, 2, 3, 4}, 3));
            for (const bool to_none : {true, false}) {
              net->zero_grad(to_none);
              run(5, true);
              expect_sparse(net, mean_of_dense({5}, 3));
            }
            abandon_step(net);
            run(6, true);
            expect_sparse(net, mean_of_dense({6}, 3));
          },
          std::chrono::seconds(30), same_host);
    }
  }
}

TEST(SparseGradients, OfUnitsOfTheirOwn) {
  run_mesh(2, [](Mesh& mesh) {
    struct Seen : TablesImpl {
      Seen() : TablesImpl(true) {}
      torch::Tensor forward(const torch::Tensor& ids) {
        return last(call_module(words, ids).sum(0)).square().sum();
      }
    };
    const auto make = [] {
      const auto net = std::make_shared<Seen>();
      net->to(torch::kDouble);
      return with_values(nn::ModuleHolder<Seen>(net), 31).ptr();
    };
    const auto net = make(), alone = make();
    replicate(net->words, mesh);
    replicate(net, mesh);
    call_module(net, ids_of(mesh.rank(), 0)).backward();
    for (const int rank : {0, 1}) (alone->forward(ids_of(rank, 0)) / 2).backward();
    const auto gradient = net->words->weight.grad();
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(testing::allclose(gradient.to_dense(), alone->words->weight.grad().to_dense()));
  });
}

TEST(SparseGradients, OfARankThatUsesNoRow) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = tables(true), alone = tables(true);
    replicate(net, mesh);
    tables_backward(net, no_words());
    EXPECT_FALSE(net->words->weight.grad().defined());
    tables_backward(net, mesh.rank() == 0 ? no_words() : ids_of(1, 0));
    (alone(ids_of(1, 0)) / 2).backward();
    const auto gradient = net->words->weight.grad();
    ASSERT_TRUE(gradient.is_sparse());
    EXPECT_TRUE(testing::allclose(gradient.to_dense(), alone->words->weight.grad().to_dense()));
  });
}

TEST(SparseGradients, TrainLikeOneProcess) {
  for (const int ranks : {1, 2}) {
    run_mesh(ranks, [&](Mesh& mesh) {
      DistributedDataParallel<Tables> model(tables(true), mesh);
      auto alone = tables(false);
      torch::optim::SGD optimizer(model->parameters(), 0.1), other(alone->parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        other.zero_grad();
        model(ids_of(mesh.rank(), step)).backward();
        for (int rank = 0; rank < ranks; ++rank) (alone(ids_of(rank, step)) / ranks).backward();
        const double norm = nn::utils::clip_grad_norm_(alone->parameters(), 0.5);
        const auto parameters = sharded_parameters(model.module());
        EXPECT_NEAR(get_total_norm(parameters, NormOf::gradients), norm, 1e-10);
        EXPECT_NEAR(clip_grad_norm(parameters, 0.5), norm, 1e-10);
        optimizer.step();
        other.step();
      }
      for (std::size_t i = 0; i < alone->parameters().size(); ++i)
        EXPECT_TRUE(testing::allclose(model->parameters()[i], alone->parameters()[i], 1e-6, 1e-8));
    });
  }
}

TEST(SparseGradients, AreDividedAsIsAsked) {
  for (const int ranks : {1, 2}) {
    run_mesh(ranks, [&](Mesh& mesh) {
      auto net = tables(true);
      replicate(net, mesh);
      set_gradient_divide_factor(net, 5);
      for (const int micro : {0, 1}) tables_backward(net, ids_of(mesh.rank(), micro));
      auto expected = mean_of_dense({0, 1}, ranks);
      for (auto& gradient : expected) gradient.mul_(ranks / 5.0);
      const auto dense = net->words->weight.grad().to_dense();
      EXPECT_TRUE(testing::allclose(dense, expected[0], 1e-10, 1e-12));
    });
  }
}

// Its weight is a layer's too, whose gradient is dense.
struct TiedTableImpl : nn::Module {
  nn::Embedding words{nullptr};
  testing::Head last{nullptr};
  TiedTableImpl() {
    words = register_module("words", nn::Embedding(nn::EmbeddingOptions(9, 3).sparse(true)));
    last = register_module("last", testing::Head(words->weight));
  }
  torch::Tensor forward(const torch::Tensor& ids) { return last(words(ids)).square().sum(); }
};
TESSERA_MODULE(TiedTable);

TEST(SparseGradients, OfTiedTablesAreDense) {
  run_mesh(2, [](Mesh& mesh) {
    const auto make = [] {
      TiedTable net;
      const torch::NoGradGuard no_grad;
      net->words->weight.copy_(torch::linspace(-1, 1, 27).view({9, 3}));
      return net;
    };
    auto net = make(), alone = make();
    replicate(net, mesh);
    net(ids_of(mesh.rank(), 0)).backward();
    for (const int rank : {0, 1}) (alone(ids_of(rank, 0)) / 2).backward();
    const auto gradient = net->words->weight.grad();
    ASSERT_FALSE(gradient.is_sparse());
    EXPECT_TRUE(testing::allclose(gradient, alone->words->weight.grad(), 1e-4, 1e-5));
  });
}

TEST(SparseGradients, OfStandInsCountNothing) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = tables(true), alone = tables(true);
    replicate(net, mesh);
    Join join({net}, mesh);
    ASSERT_TRUE(join.next(mesh.rank() == 1));
    tables_backward(net, ids_of(mesh.rank(), 0));
    (alone(ids_of(1, 0)) / 2).backward();
    expect_sparse(net, [&] {
      std::vector<torch::Tensor> gradients;
      for (const auto& parameter : alone->parameters())
        gradients.push_back(parameter.grad().to_dense());
      return gradients;
    }());
  });
}

// What is refused --------------------------------------------------------------------------------

struct LooseTableImpl : nn::Module {
  torch::Tensor table;
  LooseTableImpl() { table = register_parameter("table", torch::ones({9, 3})); }
  torch::Tensor forward(const torch::Tensor& ids) {
    return torch::embedding(table, ids, -1, false, /*sparse=*/true).square().sum();
  }
};
TESSERA_MODULE(LooseTable);

// They are refused where nobody could know that they would come, and where parts of them would be
// needed.
TEST(SparseGradients, AreRefusedElsewhere) {
  run_mesh(2, [](Mesh& mesh) {
    const std::vector<std::function<std::string()>> all{
        [&] {
          auto net = tables(true);
          fully_shard(net, mesh);
          return error_of([&] { tables_backward(net, ids_of(0, 0)); });
        },
        [&] {
          auto net = tables(true);
          fully_shard(net, mesh.split(1));
          return error_of([&] { tables_backward(net, ids_of(0, 0), false); });
        },
        [&] {
          auto net = tables(true);
          FullyShardedDataParallel<Tables>(net, mesh);
          return error_of([&] { tables_backward(net, ids_of(0, 0)); });
        },
        [&] {
          auto net = tables(true);
          FullyShardedDataParallel<Tables>(
              net, mesh,
              {.sharding_strategy = ShardingStrategy::no_shard, .use_orig_params = true});
          return error_of([&] { tables_backward(net, ids_of(0, 0)); });
        },
        [&] {
          LooseTable net;
          replicate(net, mesh);
          return error_of([&] { net(ids_of(0, 0)).backward(); });
        }};
    for (const auto& refused : all)
      EXPECT_THAT(refused(), HasSubstr("unsupported: a sparse gradient is not reduced"));
  });
}

TEST(SparseGradients, AreNotMixedWithDenseOnes) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = tables(true);
    replicate(net, mesh);
    net->words->options.sparse(mesh.rank() == 0);
    EXPECT_THAT(error_of([&] { tables_backward(net, ids_of(0, 0)); }),
                HasSubstr("got a dense gradient on 1 ranks"));
  });
}

TEST(SparseGradients, AreNotGivenToHooks) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = tables(true);
    replicate(net, mesh);
    set_all_reduce_hook(net, [](torch::Tensor&) {});
    EXPECT_THAT(error_of([&] { tables_backward(net, ids_of(0, 0)); }),
                HasSubstr("an all-reduce hook takes sums in one dimension"));
  });
}

}  // namespace
}  // namespace tessera
