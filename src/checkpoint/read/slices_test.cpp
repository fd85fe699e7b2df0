// Parts of tensors that a conversion takes, and rows that a comparison finds alike.
#include "checkpoint/read/slices.h"

#include <filesystem>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using Rules = std::vector<std::string>;

// An embedding [16, 2], of which rows from `rows` on are `rest`; by two ranks.
std::string embedding(std::int64_t rows, float rest = 0) {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    Tensor tensor = counting({16, 2}, chunk({16, 2}, group.rank(), 2), 1);
    auto* data = reinterpret_cast<float*>(tensor.pieces[0].storage->data);
    for (std::int64_t i = 0; i < 16; ++i)
      if (i + 16 * group.rank() >= 2 * rows) data[i] = rest;
    save(Value::dict({{"model", Value::dict({{"embed", tensor}, {"step", 3}})}}), directory, group);
  });
  return directory;
}

std::string sliced(const std::string& source, const Rules& rules,
                   const std::string& name = "a.safetensors") {
  const std::string target = temporary_directory() + "/" + name;
  ConvertOptions options;
  options.slice = rules;
  options.to = *kind_of_target(target);
  convert(source, target, options);
  return target;
}

TEST(Slices, AConversionTakesAPart) {
  const std::string source = embedding(16);
  for (const char* name : {"a.safetensors", "a.pt"}) {
    const std::string target = sliced(source, {"model.embed[3:10]"}, name);
    const Value tree = Checkpoint::open(target).load();
    const Tensor& tensor = tree.at("model").at("embed").as_tensor();
    EXPECT_EQ(tensor.shape, (Shape{7, 2}));
    EXPECT_EQ(floats(tensor), floats(counting({7, 2}, whole({7, 2}), 7)));
    EXPECT_EQ(tree.at("model").at("step").as_int(), 3);
    EXPECT_TRUE(verify(target).findings.empty());
  }
  const Value tree = Checkpoint::open(sliced(source, {"model.embed[-1,1:]"})).load();
  EXPECT_EQ(floats(tree.at("model").at("embed").as_tensor()), std::vector<float>{32});
}

TEST(Slices, WhatCannotBeTakenIsRefused) {
  const std::string source = embedding(16);
  const auto refusal = [&](const Rules& rules) {
    try {
      sliced(source, rules);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(refusal({"model.embed[0:17]"}).find("[0:17] has a range outside of [16, 2]"),
            std::string::npos);
  EXPECT_NE(refusal({"model.embd[0:2]"}).find("did you mean 'model.embed'"), std::string::npos);
  EXPECT_NE(refusal({"model.step[0:2]"}).find("mismatch: only a tensor has slices"),
            std::string::npos);
  EXPECT_NE(refusal({"model.embed[0:2]", "model.embed[0:3]"}).find("a second slice"),
            std::string::npos);
  for (const char* bad :
       {"model.embed", "[0:2]", "model.embed[0:2", "model.embed[4:4]", "model.embed[0:2,0:1,0:1]",
        "model.embed[::2]", "model.embed[]", "model.embed[16]", "model.embed[a]"})
    EXPECT_NE(refusal({bad}).find("invalid_argument"), std::string::npos) << bad;
}

TEST(Slices, DamageOfThePartIsFound) {
  const std::string source = sliced(embedding(16), {}, "a.pt");
  patch(source, std::string("\0\0\x80\x3f\0\0\0\x40", 8), std::string("\0\0\x80\x3f\0\0\0\x41", 8));
  EXPECT_EQ(code_of([&] { sliced(source, {"model.embed[0:10]"}); }), ErrorCode::corrupt);
  EXPECT_EQ(code_of([&] { sliced(source, {"model.embed[8:10]"}); }), ErrorCode::corrupt);
}

std::string difference(const std::string& a, const std::string& b) {
  const std::vector<Difference> found = diff(Checkpoint::open(a), Checkpoint::open(b));
  EXPECT_LE(found.size(), 1U);
  return found.empty() ? "" : found[0].text;
}

TEST(DiffOfRows, SaysWhatIsEqualAndWhatIsZero) {
  const std::string padded = embedding(10);
  const std::string part = sliced(padded, {"model.embed[0:10]"});
  EXPECT_EQ(difference(part, padded),
            "[10, 2] / [16, 2]: the first 10 rows are equal, the rest is zero");
  EXPECT_EQ(difference(padded, part),
            "[16, 2] / [10, 2]: the first 10 rows are equal, the rest is zero");
  EXPECT_EQ(difference(part, embedding(10, 5)),
            "[10, 2] / [16, 2]: the first 10 rows are equal, the rest is not zero");
  EXPECT_EQ(difference(part, embedding(9)),
            "[10, 2] / [16, 2]: of the first 10 rows 2 of 20 elements differ, first at [9, 0], "
            "largest difference 20, the rest is zero");
  EXPECT_EQ(difference(sliced(padded, {"model.embed[:,0:1]"}), padded), "[16, 1] / [16, 2]");
  const auto found = diff(Checkpoint::open(part), Checkpoint::open(padded));
  ASSERT_TRUE(found.at(0).rows);
  EXPECT_EQ(found[0].kind, Difference::Kind::shape);
  EXPECT_EQ(found[0].rows->common, 10);
  EXPECT_EQ(found[0].rows->different, 0);
  EXPECT_TRUE(found[0].rows->is_zero_behind);
}

}  // namespace
}  // namespace tessera
