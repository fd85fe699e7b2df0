#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "format/test_support.h"
#include "format/torch/rebuild.h"
#include "format/torch/torch_file.h"
#include "layout/strided.h"

namespace tessera::torch_file {
namespace {

using nlohmann::json;
using Kind = Value::Kind;

Value golden_tree(const std::string& name) {
  return read(test::source(test::golden(name)));
}

// The names that expect.py gives to tensors.
void walk(const std::string& name, const Value& value, std::map<std::string, const Tensor*>& out) {
  if (value.is(Kind::tensor)) {
    if (!value.as_tensor().bare_storage) out[name] = &value.as_tensor();
  } else if (value.is(Kind::dict)) {
    for (const auto& [key, item] : value.pairs()) {
      std::string text = "None";
      if (key.is(Kind::string)) text = key.as_string();
      if (key.is(Kind::integer)) text = std::to_string(key.as_int());
      walk(std::string(name).append(".").append(text), item, out);
    }
  } else if (value.is(Kind::list) || value.is(Kind::tuple)) {
    std::size_t index = 0;
    for (const Value& item : value.items()) walk(name + "." + std::to_string(index++), item, out);
  }
}

Shape strides_of(const Tensor& tensor) {
  const Shape& strides = tensor.pieces[0].strides;
  return strides.empty() ? torch_strides(tensor.shape) : strides;
}

std::vector<std::byte> elements(const Tensor& tensor) {
  const Piece& piece = tensor.pieces.at(0);
  const std::size_t size = size_of(tensor.dtype);
  std::vector<std::byte> out;
  const auto take = [&](std::int64_t position, std::int64_t count) {
    std::vector<std::byte> run(static_cast<std::size_t>(count) * size);
    const auto from = static_cast<std::uint64_t>(piece.storage_offset + position) * size;
    piece.storage->source->read_at(piece.storage->offset + from, run);
    out.insert(out.end(), run.begin(), run.end());
  };
  for_each_strided_run(tensor.shape, strides_of(tensor), 0, numel(tensor.shape), take);
  return out;
}

json described(const Tensor& tensor) {
  return {{"dtype", to_string(tensor.dtype)},      {"shape", tensor.shape},
          {"strides", strides_of(tensor)},         {"offset", tensor.pieces.at(0).storage_offset},
          {"requires_grad", tensor.requires_grad}, {"parameter", tensor.parameter},
          {"conj", tensor.pieces.at(0).conj},      {"neg", tensor.pieces.at(0).neg},
          {"crc32", crc32(elements(tensor))}};
}

// F-01, F-02: what PyTorch itself reads from the same files.
TEST(TorchRead, AgreesWithPyTorch) {
  const std::vector<std::byte> text = test::golden("torch_expected.json");
  const auto* begin = reinterpret_cast<const char*>(text.data());
  const json golden = json::parse(begin, begin + text.size());
  for (const auto& [file, tensors] : golden.items()) {
    const Value tree = golden_tree(file);
    std::map<std::string, const Tensor*> found;
    walk("", tree, found);
    EXPECT_EQ(found.size(), tensors.size()) << file;
    for (const auto& [name, expected] : tensors.items()) {
      ASSERT_TRUE(found.contains(name)) << file << " " << name;
      EXPECT_EQ(described(*found[name]), expected) << file << " " << name;
    }
  }
}

TEST(TorchRead, SharesStoragesAndIdentity) {
  const Value tree = golden_tree("kinds.pt");
  const Value& views = tree.at("views");
  const auto storage = [&](const char* name) {
    return views.at(name).as_tensor().pieces[0].storage;
  };
  EXPECT_EQ(storage("base"), storage("columns"));
  EXPECT_NE(storage("base"), storage("scalar"));
  EXPECT_EQ(views.at("base").identity(), views.at("again").identity());
  EXPECT_EQ(tree.at("parameter").identity(), tree.at("parameter again").identity());
  EXPECT_EQ(storage("base")->size, 96U);
  EXPECT_NE(storage("base")->crc32, 0U);
  EXPECT_EQ(storage("base")->location, "cpu");
}

TEST(TorchRead, KeepsAttributes) {
  const Value tree = golden_tree("kinds.pt");
  const Tensor& parameter = tree.at("parameter with state").as_tensor();
  ASSERT_NE(parameter.attributes, nullptr);
  EXPECT_EQ(parameter.attributes->at("note").items()[1].identity(),
            tree.at("views").at("base").identity());
  EXPECT_EQ(tree.at("tensor with state").as_tensor().attributes->at("tag").as_string(), "x");
  EXPECT_EQ(tree.at("parameter").as_tensor().attributes, nullptr);
}

// What is not a dense tensor keeps its storages as leaves.
TEST(TorchRead, KeepsWhatItDoesNotRebuild) {
  const Value tree = golden_tree("kinds.pt");
  const Object& quantized = tree.at("quantized").as_object();
  EXPECT_EQ(quantized.name(), "torch._utils._rebuild_qtensor");
  const Tensor& storage = quantized.arguments.items()[0].as_tensor();
  EXPECT_TRUE(storage.bare_storage);
  EXPECT_EQ(storage.pieces[0].storage->torch_class, "QInt8Storage");
  EXPECT_EQ(tree.at("sparse").as_object().name(), "torch._utils._rebuild_sparse_tensor");
  EXPECT_EQ(tree.at("meta").as_object().name(), "torch._utils._rebuild_meta_tensor_no_storage");
  const Value& storages = tree.at("storages");
  EXPECT_EQ(storages.items()[0].as_tensor().pieces[0].storage->torch_class, "UntypedStorage");
  EXPECT_EQ(storages.items()[0].as_tensor().shape, Shape{12});
  EXPECT_EQ(storages.items()[1].as_tensor().shape, Shape{3});
}

TEST(TorchRead, StateDictMetadata) {
  const Value tree = golden_tree("fsdp1_uop0_ws2/model.pt");
  const Value* metadata = tree.container_state();
  ASSERT_NE(metadata, nullptr);
  EXPECT_NE(metadata->find("_metadata"), nullptr);
}

TEST(TorchRead, CrcNotComputed) {
  EXPECT_EQ(golden_tree("nocrc.pt").at("a").as_tensor().pieces[0].storage->crc32, 0U);
}

// F-03b: two reads however large the item is, one when it is small.
TEST(TorchRead, TensorItem) {
  const auto small = std::make_shared<test::CountingSource>(test::source(test::golden("item.pt")));
  const Tensor tensor = read_tensor_item(small);
  EXPECT_EQ(small->reads, 1U);
  EXPECT_EQ(tensor.shape, (Shape{3, 2}));

  auto data = std::make_shared<std::vector<std::byte>>(1 << 20);
  auto storage = std::make_shared<Storage>();
  storage->data = data->data();
  storage->size = data->size();
  Tensor big;
  big.shape = {512, 512};
  big.pieces = {{.slice = whole(big.shape), .storage = storage, .strides = {1, 512}}};
  const auto large =
      std::make_shared<test::CountingSource>(test::source(write(Value(big), "archive")));
  const Tensor back = read_tensor_item(large);
  EXPECT_EQ(large->reads, 2U);
  EXPECT_LT(large->bytes, 6000U);
  EXPECT_EQ(back.pieces[0].strides, (Shape{1, 512}));
  EXPECT_EQ(back.pieces[0].storage->encoding, Encoding::raw);
}

TEST(TorchRead, TensorItemRefusesOthers) {
  const auto code = [](const char* name) {
    return test::thrown([&] { (void)read_tensor_item(test::source(test::golden(name))); }).first;
  };
  EXPECT_EQ(code("kinds.pt"), ErrorCode::mismatch);
}

}  // namespace
}  // namespace tessera::torch_file
