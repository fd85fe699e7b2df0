// Spec F-01, F-03: what pickles mean as values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/pickle/pickle.h"
#include "format/pickle/scan.h"
#include "format/test_support.h"
#include "value/render.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;
using ::testing::ElementsAre;

Value load(const std::string& name) {
  return read(test::golden("pickle/" + name)).value;
}

// The values of tests/golden/make/pickles.py.
TEST(PickleReader, ScalarsOfEveryProtocol) {
  for (const char* protocol : {"0", "1", "2", "3", "4", "5"}) {
    SCOPED_TRACE(protocol);
    EXPECT_EQ(render(load(std::string("scalars.p") + protocol)),
              "[None, True, False, 0.0, -0.0, 1.5, 1e+300, inf, 1j, (2-0j)]");
    EXPECT_EQ(render(load(std::string("tuples.p") + protocol)),
              "[(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((),), ((1,), (1,))]");
    const Value integers = load(std::string("integers.p") + protocol);
    EXPECT_EQ(integers, load("integers.p2"));
    ASSERT_EQ(integers.size(), 72U);
    EXPECT_EQ(render(integers.items()[18]), "32767");  // 2**15 - 1
    EXPECT_EQ(render(integers.items()[42]), "9223372036854775807");
    EXPECT_EQ(render(integers.items()[47]), "-9223372036854775809");
    EXPECT_EQ(render(integers.items()[56]), "1180591620717411303424");  // 2**70
    EXPECT_EQ(load(std::string("text.p") + protocol), load("text.p4"));
    EXPECT_EQ(load(std::string("blobs.p") + protocol), load("blobs.p4"));
  }
  EXPECT_EQ(load("text.p2").items()[4].as_string(), "\xc3\xa9");
  EXPECT_EQ(render(load("blobs.p2").items()[4]), "b'\\xff\\x00'");
  EXPECT_EQ(render(load("blobs.p2").items()[7]), "bytearray(b'\\x80z')");
}

TEST(PickleReader, IdentitySurvives) {
  const Value tree = load("shared.p2");
  EXPECT_EQ(tree.at("a").identity(), tree.at("b").identity());
  EXPECT_EQ(tree.at("c").items()[0].identity(), tree.at("a").identity());
  const auto& pair = tree.at("e").pairs()[0];
  EXPECT_EQ(pair.first.identity(), pair.second.identity());
  EXPECT_EQ(pair.first.identity(), tree.at("d").items()[0].identity());
}

TEST(PickleReader, ContainersOfEveryKind) {
  for (const std::string protocol : {"2", "4"}) {
    SCOPED_TRACE(protocol);
    const Value dicts = load("dicts.p" + protocol);
    EXPECT_EQ(render(dicts.items()[2]), "{1: 2, (3, 'x'): None, False: b'k'}");
    EXPECT_EQ(dicts.items()[5].size(), 1001U);
    EXPECT_EQ(dicts.items()[6].at("1999").items()[0].as_int(), 1999);
    EXPECT_EQ(load("lists.p" + protocol).items()[5].items()[2499].as_int(), 2499);
    const Value sets = load("sets.p" + protocol);
    EXPECT_EQ(sets.items()[1], Value::set({1}));
    EXPECT_EQ(sets.items()[4], Value::frozenset({Value::tuple({1, 2}), "a"}));
    EXPECT_EQ(sets.items()[6].size(), 1001U);
    const Value ordered = load("ordered.p" + protocol);
    EXPECT_EQ(ordered.items()[1].dict_kind(), DictKind::ordered_dict);
    EXPECT_EQ(render(ordered.items()[1].container_state()->at("_metadata")),
              "{'': {'version': 1}}");
    EXPECT_EQ(ordered.items()[0].container_state(), nullptr);
    const Value defaults = load("defaults.p" + protocol);
    EXPECT_EQ(defaults.items()[0].dict_kind(), DictKind::default_dict);
    EXPECT_EQ(*defaults.items()[0].default_factory(), Value::global("builtins", "dict"));
    EXPECT_EQ(defaults.items()[1].default_factory(), nullptr);
    EXPECT_EQ(*defaults.items()[2].default_factory(), Value::global("builtins", "int"));
  }
}

TEST(PickleReader, CallsAreKeptAsObjects) {
  const Value objects = load("objects.p2");
  EXPECT_EQ(render(objects.items()[0]), "datetime.date(2024, 1, 2)");
  EXPECT_EQ(render(objects.items()[2]), "deque([1, 2, 3], maxlen=5)");
  const Object& point = objects.items()[5].as_object();
  EXPECT_EQ(point.name(), "__main__.Point");
  EXPECT_TRUE(point.by_new || point.name() == "copyreg._reconstructor");
  EXPECT_EQ(*point.state, Value::dict({{"x", 1}}));
}

TEST(PickleReader, GlobalsAreListedInOrder) {
  EXPECT_THAT(
      globals(test::golden("dcp/c1.metadata")),
      ElementsAre("torch.distributed.checkpoint.metadata.Metadata",
                  "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
                  "torch.distributed.checkpoint.metadata.TensorProperties", "torch.float32",
                  "torch.serialization._get_layout",
                  "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "torch.Size",
                  "torch.distributed.checkpoint.metadata.ChunkStorageMetadata", "torch.bfloat16",
                  "torch.int64", "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
                  "torch.distributed.checkpoint.metadata.MetadataIndex",
                  "torch.distributed.checkpoint.filesystem._StorageInfo",
                  "torch.distributed.checkpoint.metadata.StorageMeta", "pathlib.PosixPath"));
  EXPECT_THAT(
      globals(test::golden("pickle/defaults.p2")),
      ElementsAre("collections.defaultdict", "builtins.dict", "builtins.int", "builtins.list"));
}

TEST(PickleReader, OptionsGiveMeaning) {
  ReadOptions options;
  options.reduce = [](const Value& callable, const Value& arguments, Value& result) {
    if (!callable.is(Kind::global) || callable.global_name() != "deque") return false;
    result = Value::list(arguments.items());
    return true;
  };
  const auto bytes = test::golden("pickle/objects.p4");
  EXPECT_EQ(render(read(bytes, options).value.items()[2]), "[(), 5, 1, 2, 3]");
  EXPECT_EQ(test::thrown([] { (void)load("torch_c1.p2"); }),
            std::pair(ErrorCode::unsupported, true));
}

}  // namespace
}  // namespace tessera::pickle
