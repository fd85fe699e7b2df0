// An optimizer's state by its key alone, cut over the ranks that load (checkpoint-rows P-29).
#include "tessera/optimizer_state.h"

#include <gmock/gmock.h>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::HasSubstr;

Tensor whole_tensor(const Shape& shape, float first) {
  auto tensor = counting(shape, whole(shape), first);
  tensor.sharded = false;
  return tensor;
}

// A state of which `group` saves: rows of some tensors on every rank, the rest whole.
Value saved_tree(const Group& group) {
  const auto rows = [&](const Shape& shape, float first) {
    return counting(shape, chunk(shape, group.rank(), group.size()), first);
  };
  const auto entries = Value::dict({{"step", whole_tensor({}, 7)},
                                    {"exp_avg", rows({7, 3}, 100)},
                                    {"one", whole_tensor({1, 1}, 9)},
                                    {"rows", rows({2}, 300)}});
  const auto groups = Value::list({Value::dict({{"lr", 0.5},
                                                {"betas", Value::tuple({0.9, 0.95})},
                                                {"params", Value::list({"layer.weight"})}})});
  return Value::dict({{"optim", Value::dict({{"state", Value::dict({{"layer.weight", entries}})},
                                             {"param_groups", groups}})},
                      {"model", Value::dict({{"layer.weight", rows({7, 3}, 0)}})},
                      {"optim2", Value::dict({{"state", 1}})},
                      {"epoch", 3}});
}

class OptimizerStateRanks : public testing::Test {
 protected:
  void save_by(int ranks) const {
    run_ranks(ranks, [&](Group& group) { save(saved_tree(group), directory_, group); });
  }

  std::string directory_ = temporary_directory() + "/c";
};

void expect_rows(const Value& value, const Shape& shape, float first, const Group& group) {
  const auto& tensor = value.as_tensor();
  EXPECT_EQ(tensor.shape, shape);
  EXPECT_TRUE(tensor.sharded);
  const auto box = chunk(shape, group.rank(), group.size());
  if (numel(box) == 0) {
    EXPECT_TRUE(tensor.pieces.empty());
    return;
  }
  ASSERT_EQ(tensor.pieces.size(), 1u);
  EXPECT_EQ(tensor.pieces[0].slice, Slice(box));
  EXPECT_EQ(floats(tensor), floats(counting(shape, box, first)));
}

void expect_whole(const Value& value, const Shape& shape, float element) {
  const auto& tensor = value.as_tensor();
  EXPECT_EQ(tensor.shape, shape);
  EXPECT_FALSE(tensor.sharded);
  EXPECT_EQ(floats(tensor), std::vector<float>{element});
}

TEST_F(OptimizerStateRanks, IsCutOverTheRanksThatLoad_P29) {
  save_by(2);
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](Group& group) {
      const auto loaded = load_sharded_optimizer_state_dict("optim", directory_, group);
      ASSERT_EQ(loaded.size(), 1u);  // neither "model" nor a key that begins alike
      const auto& entries = loaded.at("optim").at("state").at("layer.weight");
      expect_rows(entries.at("exp_avg"), {7, 3}, 100, group);
      expect_rows(entries.at("rows"), {2}, 300, group);
      expect_whole(entries.at("step"), {}, 7);
      expect_whole(entries.at("one"), {1, 1}, 9);
      const auto& options = loaded.at("optim").at("param_groups").at(0);
      EXPECT_EQ(options.at("lr").as_real(), 0.5);
      EXPECT_EQ(options.at("betas"), Value::tuple({0.9, 0.95}));
      EXPECT_EQ(options.at("params"), Value::list({"layer.weight"}));
    });
  }
}

TEST_F(OptimizerStateRanks, TensorsAreInMemoryOfTheirOwn_P29) {
  save_by(1);
  run_ranks(2, [&](Group& group) {
    const auto first = load_sharded_optimizer_state_dict("optim", directory_, group);
    const auto& tensor = first.at("optim").at("state").at("layer.weight").at("exp_avg");
    auto& piece = tensor.as_tensor().pieces[0];
    std::memset(piece.storage->data, 0, piece.storage->size);
    const auto second = load_sharded_optimizer_state_dict("optim", directory_, group);
    expect_rows(second.at("optim").at("state").at("layer.weight").at("exp_avg"), {7, 3}, 100,
                group);
  });
}

TEST_F(OptimizerStateRanks, OfAnOpenedAndMappedCheckpoint_P29) {
  save_by(2);
  run_ranks(2, [&](Group& group) {
    const auto opened = Checkpoint::open(directory_).map([](Leaf leaf) -> std::optional<Leaf> {
      if (leaf.name == "optim.state.layer.weight.one") return std::nullopt;
      return leaf;
    });
    const auto loaded = load_sharded_optimizer_state_dict("optim", opened, {}, group);
    const auto& entries = loaded.at("optim").at("state").at("layer.weight");
    EXPECT_EQ(entries.find("one"), nullptr);
    expect_rows(entries.at("exp_avg"), {7, 3}, 100, group);
  });
}

TEST_F(OptimizerStateRanks, OtherKeysAreOneErrorOnAllRanks_P29) {
  save_by(2);
  run_ranks(2, [&](Group& group) {
    const auto load = [&](const std::string& key, const std::string& path,
                          const LoadOptions& options = {}) {
      return [&, key, path, options] {
        (void)load_sharded_optimizer_state_dict(key, path, options, group);
      };
    };
    for (const std::string key : {"optimizer", "opt", "optim.state", ""}) {
      try {
        load(key, directory_)();
        ADD_FAILURE() << key;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::not_found);
        EXPECT_EQ(error.key(), key);
        EXPECT_THAT(error.what(), HasSubstr("'epoch', 'model', 'optim', 'optim2'"));
      }
    }
    EXPECT_EQ(code_of(load("optim", directory_ + "/none")), ErrorCode::not_found);
    EXPECT_EQ(
        code_of(load("optim", directory_, {.rename = [](const std::string& key) { return key; }})),
        ErrorCode::invalid_argument);
    // A part that only one rank cannot read is every rank's failure.
    EXPECT_EQ(code_of(load(group.rank() == 0 ? "optim" : "else", directory_)),
              ErrorCode::not_found);
  });
}

}  // namespace
}  // namespace tessera
