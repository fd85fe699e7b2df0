// Archives as other versions of torch and other programs leave them
// (tests/golden/make/torch_variants.py): F-01, Z13.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "format/test_support.h"
#include "format/torch/torch_file.h"

namespace tessera::torch_file {
namespace {

using nlohmann::json;

json expected() {
  const std::vector<std::byte> text = test::golden("torch_variants/expected.json");
  const auto* begin = reinterpret_cast<const char*>(text.data());
  return json::parse(begin, begin + text.size());
}

std::shared_ptr<ByteSource> variant(const std::string& name) {
  return test::source(test::golden("torch_variants/" + name + ".pt"));
}

// Without .format_version, byteorder, alignment or id, storages in any order, headers of another
// program: torch reads them all alike.
TEST(TorchVariants, AreReadAsTorchReadsThem) {
  const json all = expected();
  for (const auto& [name, tensors] : all.items()) {
    if (name == "deflated") continue;
    const Value tree = read(variant(name));
    EXPECT_EQ(tree.size(), tensors.size());
    for (const auto& [key, row] : tensors.items()) {
      const Tensor& tensor = tree.at(key).as_tensor();
      const Storage& storage = *tensor.pieces.at(0).storage;
      std::vector<std::byte> bytes(storage.size);
      storage.source->read_at(storage.offset, bytes);
      EXPECT_EQ(to_string(tensor.dtype), row.at("dtype").get<std::string>()) << name << " " << key;
      EXPECT_EQ(tensor.shape, row.at("shape").get<Shape>()) << name << " " << key;
      EXPECT_EQ(crc32(bytes), row.at("crc32").get<std::uint32_t>()) << name << " " << key;
    }
  }
}

// Z13: torch decompresses them, and with mmap returns garbage. We say that we do not read them.
TEST(TorchVariants, CompressedRecordsAreUnsupported) {
  EXPECT_EQ(test::thrown([] { (void)read(variant("deflated")); }).first, ErrorCode::unsupported);
}

// Sparse, quantized, numpy, dates, paths, sets, namedtuples: nothing is lost, to the byte.
TEST(TorchVariants, SpecialValuesAreWrittenAsTheyWere) {
  const std::vector<std::byte> original = test::golden("torch_variants/special.pt");
  const Value tree = read(test::source(original));
  EXPECT_TRUE(write(tree, "special") == original);
  EXPECT_EQ(tree.at("half complex").as_tensor().dtype, DType::complex32);
  EXPECT_TRUE(tree.at("imaginary").as_tensor().pieces.at(0).neg);
  EXPECT_EQ(tree.at("csr").as_object().name(), "torch._utils._rebuild_sparse_tensor");
}

}  // namespace
}  // namespace tessera::torch_file
