#include "checkpointer/save.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpointer/testing.h"

namespace tessera {

// What a live optimizer looks like in OLMo's files.

namespace {

using detail::olmo_optimizer;
using ::testing::ElementsAre;
using testing::keys;
using testing::make_layers;
using testing::run_mesh;
using testing::shard_layers;
using testing::Way;

std::vector<std::string> texts(const Value& list) {
  std::vector<std::string> found;
  for (const auto& item : list.items()) found.push_back(item.as_string());
  return found;
}

Value only_group(Way way, const detail::OlmoGroups& groups = {{}, {}, Value::dict()}) {
  Value group;
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, way, mesh);
    AdamW adam(sharded_parameters(layers));
    const auto found = olmo_optimizer(layers, adam, groups);
    if (mesh.rank() == 0) group = found.at("param_groups").at(0U);
  });
  return group;
}

// `local` numbers parameters by their order, and OLMo sorts the wrapped names.
TEST(OlmoGroups, HaveWhatOlmosOptimizerTakesBack) {
  for (const auto way : {Way::original, Way::flat}) {
    const auto group = only_group(way);
    EXPECT_THAT(
        keys(group),
        ElementsAre("param_names", "sharded", "max_grad_norm", "max_grad_norm_ratio", "lr", "betas",
                    "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable",
                    "differentiable", "fused", "decoupled_weight_decay", "params"));
    EXPECT_TRUE(group.at("sharded").as_bool());
    EXPECT_THAT(texts(group.at("params")), ElementsAre("l1.bias", "l1.weight", "l2.bias",
                                                       "l2.weight", "ln.bias", "ln.weight"));
    EXPECT_EQ(texts(group.at("param_names"))[1],
              "_fsdp_wrapped_module.l1._fsdp_wrapped_module.weight");
    EXPECT_EQ(texts(group.at("param_names"))[5], "_fsdp_wrapped_module.ln.weight");
  }
  const auto rows = only_group(Way::rows);
  EXPECT_FALSE(rows.at("sharded").as_bool());
  EXPECT_EQ(texts(rows.at("param_names")), texts(rows.at("params")));
}

TEST(OlmoGroups, KeepWhatWasRestored) {
  const auto order =
      Value::list({"l2.weight", "l1.weight", "l1.bias", "ln.bias", "l2.bias", "ln.weight"});
  const auto found =
      only_group(Way::original,
                 {{Value::dict({{"initial_lr", 0.25}, {"max_grad_norm", 2.0}, {"sharded", false}})},
                  {Value::list({"l1.bias"}), order},
                  Value::dict()});
  EXPECT_EQ(found.at("initial_lr").as_real(), 0.25);
  EXPECT_EQ(found.at("max_grad_norm").as_real(), 2.0);
  EXPECT_TRUE(found.at("sharded").as_bool());
  EXPECT_TRUE(found.at("params") == order);
}

TEST(OlmoGroups, GetWhatTheOptionsSay) {
  const auto found = only_group(
      Way::original, {{Value::dict({{"max_grad_norm", 2.0}})},
                      {Value::list({"l1.bias"})},
                      Value::dict({{"max_grad_norm", 3.0}, {"max_grad_norm_ratio", 0.5}})});
  EXPECT_EQ(found.at("max_grad_norm").as_real(), 3.0);
  EXPECT_EQ(found.at("max_grad_norm_ratio").as_real(), 0.5);
  EXPECT_EQ(found.at("params").size(), 6U);
}

TEST(OlmoModel, HasTheNamesThatAreAskedFor) {
  auto net = testing::make_net({.tied = true, .blocks = 1});
  const auto all = detail::olmo_model(net);
  EXPECT_NE(all.find("head.weight"), nullptr);
  EXPECT_THAT(keys(detail::olmo_model(net, {"embed.weight"})), ElementsAre("embed.weight"));
}

}  // namespace
}  // namespace tessera
