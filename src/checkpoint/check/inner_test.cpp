// Tensors that are not leaves, inside tuples and objects, are checked and compared like the others.
#include <algorithm>
#include <filesystem>

#include "checkpoint/test_support.h"
#include "format/torch/torch_file.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

std::string file_with_tuple(float first) {
  const Value tree = Value::dict(
      {{Value("pair"), Value::tuple({Value(1), Value(counting({3}, whole({3}), first))})}});
  const std::vector<std::byte> bytes = torch_file::write(tree, "a");
  const std::string path = temporary_directory() + "/a.pt";
  write_text(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  return path;
}

TEST(Diff, ComparesTensorsInsideTuples) {
  const Checkpoint a = Checkpoint::open(file_with_tuple(0));
  EXPECT_TRUE(diff(a, Checkpoint::open(file_with_tuple(0))).empty());
  const std::vector<Difference> differences = diff(a, Checkpoint::open(file_with_tuple(5)));
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].kind, Difference::Kind::value);
  EXPECT_EQ(differences[0].name, "pair");
  EXPECT_NE(differences[0].text.find("3 of 3 elements differ"), std::string::npos)
      << differences[0].text;
}

// PyTorch wrote it: sparse and quantized tensors, a named tuple with a tensor.
TEST(Verify, ChecksTensorsInsideObjects) {
  const std::string golden = std::string(TESSERA_TEST_DATA) + "/golden/torch_variants/special.pt";
  const std::string path = temporary_directory() + "/special.pt";
  std::string text = text_of(golden);
  int inner_storages = 0;
  for (const Leaf& leaf : Checkpoint::open(golden).leaves) {
    for (const InnerTensor& inner : inner_tensors(leaf.value)) {
      const auto& pieces = inner.tensor->as_tensor().pieces;
      if (pieces.empty() || !pieces[0].storage || pieces[0].storage->size == 0) continue;
      ++inner_storages;
      char& byte = text.at(pieces[0].storage->offset);
      byte = static_cast<char>(byte ^ 1);
      write_text(path, text);
      const VerifyReport report = verify(path);
      ASSERT_FALSE(report.findings.empty()) << leaf.name << inner.path;
      EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
      byte = static_cast<char>(byte ^ 1);
    }
  }
  EXPECT_GT(inner_storages, 3);
  write_text(path, text);
  EXPECT_TRUE(verify(path).findings.empty());
}

}  // namespace
}  // namespace tessera
