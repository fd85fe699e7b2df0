#include "format/exported/exported.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/exported/testing.h"
#include "format/test_support.h"
#include "format/torch/torch_file.h"
#include "value/render.h"

namespace tessera::exported {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Models made_of(const std::vector<std::byte>& bytes) {
  auto models = read(tessera::test::source(bytes));
  if (!models) throw Error(ErrorCode::not_found, "no archive of torch.export");
  return *std::move(models);
}

Models golden(const std::string& name) {
  return made_of(tessera::test::golden("exported/" + name + ".pt2"));
}

std::vector<std::string> names_in(const Value& dict) {
  std::vector<std::string> names;
  for (const auto& [key, value] : dict.pairs()) names.push_back(key.as_string());
  return names;
}

const Storage* storage_of(const Value& tensor) {
  return tensor.as_tensor().pieces[0].storage.get();
}

TEST(Exported, AModelIsItsWeightsAndConstantsByName) {
  const Models net = golden("net");
  EXPECT_THAT(names_in(net.tree), ElementsAre("l.weight", "l.bias", "buf", "tmp"));
  EXPECT_THAT(net.notes, IsEmpty());
  EXPECT_EQ(net.tree.at("l.weight").as_tensor().shape, (Shape{3, 4}));
  EXPECT_EQ(net.tree.at("buf").as_tensor().dtype, DType::int64);
  EXPECT_FALSE(net.tree.at("l.weight").as_tensor().requires_grad);
  EXPECT_TRUE(storage_of(net.tree.at("buf"))->crc32.has_value());
}

TEST(Exported, SeveralModelsHaveADictEach) {
  const Value tree = golden("two").tree;
  EXPECT_THAT(names_in(tree), ElementsAre("a", "b"));
  EXPECT_THAT(names_in(tree.at("b")), ElementsAre("l.weight", "l.bias", "buf", "tmp"));
}

TEST(Exported, ViewsShareTheirStorage) {
  const Value tree = golden("forms").tree;
  EXPECT_EQ(storage_of(tree.at("a.weight")), storage_of(tree.at("b.weight")));
  EXPECT_EQ(storage_of(tree.at("base")), storage_of(tree.at("turned")));
  EXPECT_EQ(tree.at("part").as_tensor().pieces[0].storage_offset, 3);
  EXPECT_EQ(tree.at("turned").as_tensor().pieces[0].strides, (Shape{1, 4}));
  EXPECT_THAT(tree.at("base").as_tensor().pieces[0].strides, IsEmpty());
  EXPECT_EQ(tree.at("of_float8_e8m0fnu").as_tensor().dtype, DType::float8_e8m0fnu);
  EXPECT_EQ(tree.at("none").as_tensor().shape, (Shape{0, 3}));
}

// As torch wrote before there were tables, and as torch 2.7 did.
TEST(Exported, StateDictsOfOlderArchivesAreThoseOfTorchSave) {
  const std::string now = render(golden("net").tree, 1 << 20);
  for (const char* name : {"old", "older"})
    EXPECT_EQ(render(golden(name).tree, 1 << 20), now) << name;
}

TEST(Exported, OthersAreNoneAndTorchSaveDoesNotTakeThese) {
  EXPECT_FALSE(read(tessera::test::source(tessera::test::golden("hand.pt"))));
  EXPECT_FALSE(read(tessera::test::source(tessera::test::golden("libtorch/net.pt"))));
  EXPECT_FALSE(read(tessera::test::source({})));
  for (const char* name : {"net", "old", "older"}) {
    const auto source =
        tessera::test::source(tessera::test::golden(std::string("exported/") + name + ".pt2"));
    EXPECT_EQ(tessera::test::thrown([&] { (void)torch_file::read(source); }),
              std::pair(ErrorCode::unsupported, true))
        << name;
    EXPECT_FALSE(torch_file::read_script(source)) << name;
  }
}

TEST(Exported, ConstantsThatAreNoTensorsAreNamed) {
  const std::string object = R"({"path_name": "custom_obj_0", "is_param": false, )"
                             R"("use_pickle": true, "tensor_meta": null})";
  test::Text records = test::records(R"("w": )" + test::entry(), R"("o": )" + object);
  records.emplace_back("data/constants/custom_obj_0", "anything");
  records.emplace_back("data/aotinductor/model/wrapper.so",
                       "\x7f"
                       "ELF");
  const Models made = made_of(test::archive_of(records));
  EXPECT_THAT(names_in(made.tree), ElementsAre("w"));
  EXPECT_THAT(made.notes, ElementsAre(HasSubstr("left out: o"), HasSubstr("AOTInductor")));
}

// As of the meta device. The others are read.
TEST(Exported, TensorsWithoutValuesAreNamed) {
  test::Text records = test::records(R"("v": )" + test::entry() + R"(, "w": )" +
                                     test::entry("\"weight_0\"", "\"weight_1\""));
  records.emplace_back("data/weights/weight_1", "");
  const Models made = made_of(test::archive_of(records));
  EXPECT_THAT(names_in(made.tree), ElementsAre("v"));
  EXPECT_THAT(made.notes, ElementsAre("what was exported without its values is left out: w"));
}

// A tensor of a class of its own is pickled; two names of one record are one value.
TEST(Exported, APickledWeightIsWhatTorchSaveMade) {
  const auto saved = tessera::test::golden("item.pt");
  const std::string text(reinterpret_cast<const char*>(saved.data()), saved.size());
  const std::string entry = test::entry("false, \"tensor_meta", "true, \"tensor_meta");
  test::Text records = test::records(R"("v": )" + entry + R"(, "w": )" + entry);
  for (auto& [name, content] : records)
    if (name == "data/weights/weight_0") content = text;
  const Value tree = made_of(test::archive_of(records)).tree;
  EXPECT_EQ(tree.at("v").identity(), tree.at("w").identity());
  EXPECT_EQ(tree.at("w"), torch_file::read(tessera::test::source(saved)));
}

TEST(Exported, WhatAnUnpicklerGetsIsNamed) {
  const std::string entry = test::entry("false, \"tensor_meta", "true, \"tensor_meta");
  test::Text records = test::records(R"("v": )" + entry);
  records.emplace_back("data/constants/opaque_obj_0", "");
  records.emplace_back("data/constants/opaque_obj_not_in_a_table", "");
  const zip::Archive archive(tessera::test::source(test::archive_of(records)));
  EXPECT_THAT(pickled_entries(archive),
              ElementsAre("m/data/constants/opaque_obj_0",
                          "m/data/constants/opaque_obj_not_in_a_table", "m/data/weights/weight_0"));
}

}  // namespace
}  // namespace tessera::exported
