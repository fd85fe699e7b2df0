// Spec F-01, F-03: what Python wrote, read and written again, is the same bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "format/pickle/pickle.h"
#include "format/test_support.h"

namespace tessera::pickle {
namespace {

constexpr const char* kPersistent = "persistent id";

// Keeps persistent ids as they are: objects of a name that no file has.
ReadOptions reading() {
  ReadOptions options;
  options.persistent_load = [](const Value& id) {
    return Value::object(
        {.callable = Value::global("tessera", kPersistent), .arguments = Value::tuple({id})});
  };
  return options;
}

WriteOptions writing(int protocol) {
  WriteOptions options;
  options.protocol = protocol;
  options.persistent_id = [](const Value& value, Value& id) {
    if (!value.is(Value::Kind::object)) return false;
    const Object& object = value.as_object();
    if (object.name() != std::string("tessera.") + kPersistent) return false;
    id = object.arguments.items()[0];
    return true;
  };
  return options;
}

std::vector<std::string> golden_names(const std::string& folder, const std::string& ending) {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string(TESSERA_TEST_DATA) + "/golden/" + folder)) {
    if (entry.path().string().ends_with(ending)) {
      names.push_back(folder + "/" + entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

void expect_same_bytes(const std::string& name, int protocol) {
  SCOPED_TRACE(name);
  const auto bytes = test::golden(name);
  const Parsed parsed = read(bytes, reading());
  EXPECT_EQ(parsed.consumed, bytes.size());
  const auto written = write(parsed.value, writing(protocol));
  const auto differ = std::mismatch(bytes.begin(), bytes.end(), written.begin(), written.end());
  EXPECT_TRUE(written == bytes) << "differs from byte " << differ.first - bytes.begin();
  EXPECT_TRUE(read(written, reading()).value == parsed.value);
}

TEST(PickleWriter, F01Protocol2IsWhatPythonWrites) {
  const auto names = golden_names("pickle", ".p2");
  EXPECT_GT(names.size(), 40U);
  for (const auto& name : names) expect_same_bytes(name, 2);
}

TEST(PickleWriter, F03Protocol4IsWhatPythonWrites) {
  const auto names = golden_names("pickle", ".p4");
  EXPECT_GT(names.size(), 10U);
  for (const auto& name : names) expect_same_bytes(name, 4);
}

TEST(PickleWriter, F03MetadataIsWhatPyTorchWrites) {
  for (const auto& name : golden_names("dcp", ".metadata")) {
    // One is cut, the other was written by hand.
    if (name.find("c1t") == std::string::npos && name.find("hand") == std::string::npos) {
      expect_same_bytes(name, 4);
    }
  }
}

TEST(PickleWriter, ReplacedValuesKeepTheirIdentity) {
  const Value tensor{Tensor()};
  WriteOptions options;
  options.reduce = [](const Value& value, Value& replacement) {
    if (!value.is(Value::Kind::tensor)) return false;
    replacement = Value::object({.callable = Value::global("torch._utils", "_rebuild"),
                                 .arguments = Value::tuple({"storage"})});
    return true;
  };
  const Value back = read(write(Value::list({tensor, tensor, Value(Tensor())}), options)).value;
  ASSERT_EQ(back.size(), 3U);
  EXPECT_EQ(back.items()[0].identity(), back.items()[1].identity());
  EXPECT_NE(back.items()[0].identity(), back.items()[2].identity());
  EXPECT_EQ(back.items()[0].as_object().name(), "torch._utils._rebuild");
}

TEST(PickleWriter, NestedClassesAreNamedThroughTheirOuterClass) {
  const Value tree = Value::global("torch.x", "Outer.Inner");
  const Value back = read(write(tree)).value;
  EXPECT_EQ(back.as_object().name(), "builtins.getattr");
  EXPECT_EQ(read(write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}})).value, tree);
}

TEST(PickleWriter, LimitsAndRefusals) {
  EXPECT_EQ(test::thrown([] { (void)write(Value(Tensor())); }),
            std::pair(ErrorCode::unsupported, true));
  EXPECT_EQ(test::thrown(
                [] { (void)write(Value(), {.protocol = 3, .persistent_id = {}, .reduce = {}}); }),
            std::pair(ErrorCode::invalid_argument, true));
  EXPECT_EQ(test::thrown([] { (void)write(Value::global("a\nb", "c")); }),
            std::pair(ErrorCode::unsupported, true));
  Value cycle = Value::list();
  cycle.items().push_back(Value::tuple({cycle}));
  EXPECT_NO_THROW((void)write(cycle));  // Python's lists may hold themselves
  cycle.items().clear();
  Value deepest = Value::list();
  for (int i = 0; i < 999; ++i) deepest = Value::list({deepest});
  EXPECT_EQ(read(write(deepest)).value, deepest);
  EXPECT_EQ(test::thrown([&] { (void)read(write(Value::list({deepest}))); }),
            std::pair(ErrorCode::limit, true));
  Value deep;
  for (int i = 0; i < 5000; ++i) deep = Value::list({deep});
  EXPECT_EQ(test::thrown([&] { (void)write(deep); }), std::pair(ErrorCode::limit, true));
}

}  // namespace
}  // namespace tessera::pickle
