// Checkpoints that PyTorch wrote, read here and compared with PyTorch's own reading
// (tests/golden/make/checkpoint_expect.py): F-03, F-03b, P-17, P-21.
#include <fstream>
#include <set>

#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "checkpoint/test_support.h"
#include "value/render.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

const std::string kRoot = std::string(TESSERA_TEST_DATA) + "/golden/checkpoints/";

nlohmann::json expected() {
  std::ifstream file(kRoot + "expected.json");
  return nlohmann::json::parse(file);
}

class Golden : public testing::TestWithParam<std::string> {};

// DTensors of one of two ranks: a part.
Checkpoint opened(const std::string& name) {
  return Checkpoint::open(kRoot + name, {.part = name == "g4_dt.pt"});
}

TEST_P(Golden, ReadsAsPyTorchReadsIt) {
  const nlohmann::json names = expected().at(GetParam());
  const Checkpoint checkpoint = opened(GetParam());
  if (checkpoint.kind != CheckpointKind::torch_file) {
    EXPECT_EQ(checkpoint.leaves.size(), names.size());
  }
  const auto loaded = flatten(checkpoint.load());
  std::set<std::string> seen;
  for (const Leaf& leaf : loaded) {
    if (!names.contains(leaf.name)) continue;  // inside a value that DCP keeps whole
    seen.insert(leaf.name);
    const nlohmann::json& row = names.at(leaf.name);
    if (row.contains("object")) continue;  // a DTensor, as its local tensor
    if (!leaf.value.is(Value::Kind::tensor)) {
      if (row.contains("value")) {
        EXPECT_EQ(render(leaf.value, 100000), row.at("value").get<std::string>()) << leaf.name;
      }
      continue;
    }
    const Tensor& tensor = leaf.value.as_tensor();
    EXPECT_EQ(to_string(tensor.dtype), row.at("dtype").get<std::string>()) << leaf.name;
    EXPECT_EQ(tensor.shape, row.at("shape").get<Shape>()) << leaf.name;
    const Storage& storage = *tensor.pieces.at(0).storage;
    EXPECT_EQ(crc32({storage.data, storage.size}), row.at("crc32").get<std::uint32_t>())
        << leaf.name;
  }
  for (const auto& [name, row] : names.items()) {
    EXPECT_TRUE(!row.contains("dtype") || seen.contains(name)) << name;
  }
}

// A torch.save file holds a tree, not names: keys that are numbers, containers that are empty.
TEST(LoadAll, KeepsTheTreeOfATorchFile) {
  const auto tree =
      Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/optimizers.pt").load();
  const auto& states = tree.at("Adam").at("state").at("state").pairs();
  ASSERT_EQ(states.size(), 2U);
  EXPECT_TRUE(states[1].first == Value(1));
  EXPECT_NE(states[1].second.at("exp_avg").as_tensor().pieces.at(0).storage->data, nullptr);
  EXPECT_EQ(tree.at("SGD without momentum").at("state").at("state").size(), 0U);
}

TEST_P(Golden, HasNoFindings) {
  const bool part = GetParam() == "g4_dt.pt";
  const VerifyReport report =
      part ? verify(opened(GetParam()), {}) : verify(kRoot + GetParam(), {});
  EXPECT_TRUE(report.findings.empty()) << report.findings.at(0).text;
  const bool has_checksums =
      !GetParam().starts_with("stream") && opened(GetParam()).kind != CheckpointKind::safetensors;
  EXPECT_EQ(has_checksums, report.bytes_unchecked == 0);
}

std::vector<std::string> all_names() {
  std::vector<std::string> names;
  const nlohmann::json all = expected();
  for (const auto& [name, rows] : all.items()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(PyTorch, Golden, testing::ValuesIn(all_names()));

}  // namespace
}  // namespace tessera
