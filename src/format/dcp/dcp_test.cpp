// Spec F-03: `.metadata` of PyTorch, decoded, encoded and damaged.
#include "format/dcp/dcp.h"

#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>

#include "format/dcp/quick_decode.h"
#include "format/dcp/testing.h"
#include "format/pickle/pickle.h"
#include "format/test_support.h"

namespace tessera::dcp {
namespace {

const char* const kGoldens[] = {
    "c1",     "c2",   "c2_lowest",      "c2_thr",         "c2_nocoll_0",   "c2_nocoll_1",
    "g4_ws2", "hand", "fsdp1_uop0_ws2", "fsdp1_uop1_ws2", "fsdp1_uop1_ws4"};

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(DcpMetadata, F03DecodesWhatPyTorchWrote) {
  for (const std::string name : kGoldens) {
    SCOPED_TRACE(name);
    EXPECT_EQ(listing(decode(test::golden("dcp/" + name + ".metadata"))),
              text_of(test::golden("dcp/" + name + ".txt")));
  }
}

// The same metadata as Python 3.9 to 3.14 pickle it, by protocols 2 to 5.
TEST(DcpMetadata, F03EveryPythonWritesTheSame) {
  const std::string expected = text_of(test::golden("dcp_forms/forms.txt"));
  int forms = 0;
  for (const auto& file :
       std::filesystem::directory_iterator(std::string(TESSERA_TEST_DATA) + "/golden/dcp_forms")) {
    if (file.path().extension() != ".metadata") continue;
    SCOPED_TRACE(file.path().filename().string());
    const auto bytes = test::golden("dcp_forms/" + file.path().filename().string());
    EXPECT_EQ(listing(decode_values(bytes)), expected);
    const auto quick = quick_decode(bytes);
    ASSERT_TRUE(quick.has_value());
    EXPECT_EQ(listing(*quick), expected);
    ++forms;
  }
  EXPECT_GE(forms, 33);
}

// getattr is read of a memory format's class with the name of a format, and of nothing else.
TEST(DcpMetadata, F03GetattrOfAnythingElseIsRefused) {
  const std::string good = text_of(test::golden("dcp_forms/py3.11.2-p4.metadata"));
  const auto with = [&good](const std::string& from, const std::string& to) {
    std::string text = good;
    EXPECT_EQ(from.size(), to.size());
    text.replace(text.find(from), from.size(), to);
    return text;
  };
  const std::pair<std::string, ErrorCode> cases[] = {
      {with("TORCH_CHANNELS_LAST", "TORCH_CHANNELS_NONE"), ErrorCode::corrupt},
      {with("TORCH_CHANNELS_LAST", "__class_getitem__xx"), ErrorCode::unsafe},
      {with("_MEM_FORMAT_ENCODING", "TensorStorageMetadat"), ErrorCode::corrupt},
      {with("_MEM_FORMAT_ENCODING", "_MEM_FORMAT.ENCODING"), ErrorCode::corrupt},
      {with("getattr", "setattr"), ErrorCode::unsafe},
  };
  for (const auto& [text, code] : cases) {
    const auto bytes = std::as_bytes(std::span(text));
    EXPECT_FALSE(quick_decode(bytes).has_value());
    EXPECT_EQ(test::thrown([&] { (void)decode(bytes); }), std::pair(code, true));
  }
}

TEST(DcpMetadata, F03EncodedIsDecodedAsTheSame) {
  for (const std::string name : kGoldens) {
    SCOPED_TRACE(name);
    const Metadata metadata = decode(test::golden("dcp/" + name + ".metadata"));
    EXPECT_EQ(listing(decode(encode(metadata))), listing(metadata));
  }
}

// A checkpoint of two entries, whose pickle the tests below change.
Metadata small() {
  Entry tensor;
  tensor.name = "model.w";
  tensor.path = Path{"model", "w"};
  tensor.is_tensor = true;
  tensor.dtype = DType::bfloat16;
  tensor.shape = {3, 2};
  tensor.chunks.push_back({{{0, 0}, {2, 2}}, {"__0_0.distcp", 0, 100, {"stream.zstd/1"}}});
  tensor.chunks.push_back({{{2, 0}, {1, 2}}, {"__1_0.distcp", 0, 100, {}}});
  Entry object;
  object.name = "steps.0";
  object.path = Path{"steps", std::int64_t{0}};
  object.item = {"__0_0.distcp", 100, 50, {}};
  Metadata metadata;
  metadata.entries = {tensor, object};
  metadata.version = "1.0.0";
  metadata.save_id = "an id";
  return metadata;
}

Value tree_of(const Metadata& metadata) {
  return pickle::read(encode(metadata)).value;
}

Value& state(const Value& object) {
  return *const_cast<Object&>(object.as_object()).state;  // the tests own the tree
}

ErrorCode refused(const Value& tree) {
  const auto [code, any] = test::thrown([&tree] {
    (void)decode(pickle::write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}}));
  });
  EXPECT_TRUE(any) << "was decoded";
  return code;
}

TEST(DcpMetadata, F03FilesOfOlderTorch) {
  const Value tree = tree_of(small());
  Value old = Value::dict();
  old.set_item("state_dict_metadata", state(tree).at("state_dict_metadata"));
  old.set_item("planner_data", Value());
  old.set_item("storage_data", state(tree).at("storage_data"));
  state(tree) = old;
  const Value& entry = state(tree).at("state_dict_metadata").at("model.w");
  Object properties = state(entry).at("properties").as_object();
  const char* module = "torch.distributed._shard.sharded_tensor.metadata";
  properties.callable = Value::global(module, "TensorProperties");
  properties.state->items()[3] = Value::object(
      {.callable = Value::global(module, "MEM_FORMAT_ENCODING"), .arguments = Value::tuple({2})});
  state(entry).set_item("properties", Value::object(properties));

  const Metadata metadata =
      decode(pickle::write(tree, {.protocol = 2, .persistent_id = {}, .reduce = {}}));
  EXPECT_EQ(metadata.version, "");
  EXPECT_EQ(metadata.save_id, "");
  EXPECT_FALSE(metadata.has_planner_data);
  ASSERT_EQ(metadata.entries.size(), 2U);
  EXPECT_FALSE(metadata.entries[0].path.has_value());
  EXPECT_EQ(metadata.entries[0].dtype, DType::bfloat16);
  EXPECT_EQ(metadata.entries[0].chunks[0].item.transforms,
            std::vector<std::string>{"stream.zstd/1"});
}

// The classes of torch 1.13, which lie in another package; a pickle names them in lines of text.
TEST(DcpMetadata, F03FilesOfTorch113) {
  const std::vector<std::byte> bytes =
      pickle::write(tree_of(small()), {.protocol = 2, .persistent_id = {}, .reduce = {}});
  std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const char* name :
       {"metadata\nMetadata", "metadata\nTensorStorageMetadata", "metadata\nBytesStorageMetadata",
        "metadata\nChunkStorageMetadata", "metadata\nMetadataIndex", "filesystem\n_StorageInfo"}) {
    const std::string old = std::string("ctorch.distributed.checkpoint.") + name + "\n";
    ASSERT_NE(text.find(old), std::string::npos) << name;
    text.replace(text.find(old), old.size(),
                 std::string("ctorch.distributed._shard.checkpoint.") + name + "\n");
  }
  const ByteView view(reinterpret_cast<const std::byte*>(text.data()), text.size());
  EXPECT_EQ(listing(decode(view)), listing(small()));
  EXPECT_EQ(listing(decode_values(view)), listing(small()));
  EXPECT_TRUE(quick_decode(view).has_value());
}

TEST(DcpMetadata, F03IndexIsAHintOnly) {
  for (const Value& hint : {Value(), Value(0), Value(17), Value(-1)}) {
    const Value tree = tree_of(small());
    for (const auto& pair : state(tree).at("storage_data").pairs()) {
      state(pair.first).set_item("index", hint);
    }
    const Metadata metadata =
        decode(pickle::write(tree, {.protocol = 2, .persistent_id = {}, .reduce = {}}));
    EXPECT_EQ(listing(metadata), listing(small()));
  }
}

TEST(DcpMetadata, M03PathsThatLeaveTheDirectory) {
  for (const std::string path :
       {"../x", "/etc/passwd", "a/../../b", "", "s3://other/x", "..", "a/..", "..\\x"}) {
    Metadata metadata = small();
    metadata.entries[1].item.path = path;
    EXPECT_EQ(refused(tree_of(metadata)), ErrorCode::unsafe) << path;
  }
  Metadata metadata = small();
  metadata.entries[1].item.path = std::string("a\0b", 3);
  EXPECT_EQ(refused(tree_of(metadata)), ErrorCode::unsafe);
  metadata.entries[1].item.path = "sub/..x/__0_0.distcp";
  EXPECT_EQ(decode(encode(metadata)).entries[1].item.path, "sub/..x/__0_0.distcp");
}

TEST(DcpMetadata, M02PropertiesThatAreNotKnown) {
  const auto with_properties = [](const std::function<void(Value::List&)>& change) {
    const Value tree = tree_of(small());
    const Value& entry = state(tree).at("state_dict_metadata").at("model.w");
    change(state(state(entry).at("properties")).items());
    return tree;
  };
  EXPECT_EQ(refused(with_properties([](auto& fields) { fields.pop_back(); })), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_properties([](auto& fields) { fields.insert(fields.end(), 2, Value()); })),
            ErrorCode::corrupt);
  EXPECT_EQ(refused(with_properties([](auto& fields) { fields[0] = Value("float32"); })),
            ErrorCode::corrupt);
  EXPECT_EQ(
      refused(with_properties([](auto& fields) { fields[0] = Value::global("torch", "int3"); })),
      ErrorCode::unsupported);
  EXPECT_EQ(refused(with_properties(
                [](auto& fields) { fields[3].as_object().arguments = Value::tuple({3}); })),
            ErrorCode::corrupt);
  const Value six = with_properties([](auto& fields) { fields.push_back(Value()); });
  EXPECT_NO_THROW((void)decode(pickle::write(six)));
}

TEST(DcpMetadata, M04NumbersThatAreNotCounts) {
  const auto with_offset = [](const Value& number) {
    const Value tree = tree_of(small());
    const auto& infos = state(tree).at("storage_data").pairs();
    state(infos.back().second).set_item("offset", number);
    return tree;
  };
  EXPECT_EQ(refused(with_offset(-1)), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_offset(true)), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_offset(1.0)), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_offset(Value::integer({0, std::vector<std::byte>(12, std::byte{1})}))),
            ErrorCode::corrupt);
  const auto with_length = [](const Value& number) {
    const Value tree = tree_of(small());
    const auto& infos = state(tree).at("storage_data").pairs();
    state(infos.back().second).set_item("length", number);
    return tree;
  };
  EXPECT_EQ(refused(with_length(-1)), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_length(false)), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_length("100")), ErrorCode::corrupt);
  EXPECT_EQ(refused(with_length(Value())), ErrorCode::corrupt);
}

TEST(DcpMetadata, M06ChunksThatDoNotFit) {
  Metadata outside = small();
  change_chunk(outside.entries[0], 1, [](Chunk& chunk) { chunk.box.offsets = {3, 0}; });
  EXPECT_EQ(refused(tree_of(outside)), ErrorCode::corrupt);
  Metadata negative = small();
  negative.entries[0].shape = {-1, 2};
  EXPECT_EQ(refused(tree_of(negative)), ErrorCode::corrupt);
  Metadata huge = small();
  huge.entries[0].shape = {std::int64_t{1} << 40, std::int64_t{1} << 40};
  EXPECT_EQ(refused(tree_of(huge)), ErrorCode::limit);
  Metadata many = small();
  many.entries[0].shape = Shape(65, 1);
  EXPECT_EQ(refused(tree_of(many)), ErrorCode::limit);
  Metadata empty = small();
  change_chunk(empty.entries[0], 1, [](Chunk& chunk) { chunk.box = {{3, 0}, {0, 2}}; });
  EXPECT_NO_THROW((void)decode(encode(empty)));  // P-18: a rank without data
}

TEST(DcpMetadata, M07M08ItemsAndEntriesThatDoNotMatch) {
  const auto without = [](const char* part, std::size_t at) {
    const Value tree = tree_of(small());
    auto pairs = state(tree).at(part).pairs();
    pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(at));
    state(tree).set_item(part, Value::dict(pairs));
    return tree;
  };
  for (const std::size_t at : {0U, 1U, 2U}) {
    EXPECT_EQ(refused(without("storage_data", at)), ErrorCode::incomplete);
  }
  for (const std::size_t at : {0U, 1U}) {
    const Metadata metadata = decode(pickle::write(
        without("state_dict_metadata", at), {.protocol = 4, .persistent_id = {}, .reduce = {}}));
    EXPECT_EQ(metadata.entries.size(), 1U);
    EXPECT_EQ(metadata.warnings.size(), at == 0 ? 2U : 1U);  // the tensor has two items
  }
}

// P-04: what the ranks of a save without collectives left.
TEST(DcpMetadata, P04MergesRanks) {
  const Metadata merged = merge({decode(test::golden("dcp/c2_nocoll_0.metadata")),
                                 decode(test::golden("dcp/c2_nocoll_1.metadata"))});
  ASSERT_EQ(merged.entries.size(), 9U);
  EXPECT_EQ(merged.entries[0].name, "s0");
  ASSERT_EQ(merged.entries[0].chunks.size(), 2U);
  EXPECT_EQ(merged.entries[0].chunks[1].box, (Box{{3, 0}, {2, 3}}));
  EXPECT_EQ(merged.entries[0].chunks[1].item.path, "__1_0.distcp");
  EXPECT_EQ(merged.entries[2].chunks.size(), 1U);  // a replica
  EXPECT_EQ(merged.entries[2].chunks[0].item.path, "__0_0.distcp");
  EXPECT_EQ(merged.entries[6].item.path, "__0_0.distcp");  // a value
}

TEST(DcpMetadata, P04RanksThatContradictEachOther) {
  const auto code = [](const std::function<void(Entry&)>& change) {
    std::vector<Metadata> ranks = {small(), small()};
    change(ranks[1].entries[0]);
    return test::thrown([&] { (void)merge(std::move(ranks)); }).first;
  };
  EXPECT_EQ(code([](Entry& entry) { entry.dtype = DType::float16; }), ErrorCode::corrupt);
  EXPECT_EQ(code([](Entry& entry) { entry.shape = {4, 2}; }), ErrorCode::corrupt);
  EXPECT_EQ(code([](Entry& entry) { entry.is_tensor = false; }), ErrorCode::corrupt);
  EXPECT_EQ(code([](Entry& entry) {
              change_chunk(entry, 0, [](Chunk& chunk) { chunk.box.sizes = {1, 2}; });
            }),
            ErrorCode::corrupt);
}

TEST(DcpMetadata, M01M11ClassesThatAreNotKnown) {
  const auto with_class = [](const Value& callable) {
    const Value tree = tree_of(small());
    const Value& entries = state(tree).at("state_dict_metadata");
    const_cast<Object&>(entries.at("steps.0").as_object()).callable = callable;
    return tree;
  };
  EXPECT_EQ(refused(with_class(Value::global("my.module", "Metadata"))), ErrorCode::unsupported);
  EXPECT_EQ(refused(with_class(Value::global("os", "system"))), ErrorCode::unsafe);
  EXPECT_EQ(refused(Value::dict()), ErrorCode::corrupt);
  // P09: an instance that is made and never filled.
  const Value bare = tree_of(small());
  const_cast<Object&>(bare.as_object()).state.reset();
  EXPECT_EQ(refused(bare), ErrorCode::corrupt);
}

TEST(DcpMetadata, ErrorsNameTheEntry) {
  Metadata metadata = small();
  metadata.entries[1].item.path = "../x";
  try {
    (void)decode(encode(metadata));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.key(), "steps.0");
  }
  metadata = small();
  metadata.entries[1].name = "model.w";
  EXPECT_EQ(test::thrown([&] { (void)encode(metadata); }), std::pair(ErrorCode::conflict, true));
}

TEST(DcpMetadata, M15EveryPrefixAndManyFlipsAreSurvived) {
  EXPECT_TRUE(test::thrown([] { (void)decode(test::golden("dcp/c1t.metadata")); }).second);
  for (const char* name : {"dcp/c1.metadata", "dcp/hand.metadata", "dcp/c2.metadata"}) {
    const auto accepted = test::damage(test::golden(name), 4000,
                                       [](std::vector<std::byte> bytes) { (void)decode(bytes); });
    EXPECT_TRUE(accepted.empty()) << name;
  }
  auto longer = test::golden("dcp/c1.metadata");
  longer.push_back(std::byte{0});
  EXPECT_EQ(test::thrown([&] { (void)decode(longer); }), std::pair(ErrorCode::corrupt, true));
}

// Seconds of processor time to decode a tensor of so many chunks.
double decoding_time(std::int64_t chunks) {
  Metadata metadata = small();
  Entry& tensor = metadata.entries[0];
  tensor.shape = {chunks, 4};
  tensor.chunks = {};
  for (std::int64_t row = 0; row < chunks; ++row) {
    tensor.chunks.push_back({{{row, 0}, {1, 4}},
                             {"__" + std::to_string(row / 100) + "_0.distcp",
                              static_cast<std::uint64_t>(row) * 1577,
                              1577,
                              {}}});
  }
  const auto bytes = encode(metadata);
  const std::clock_t begin = std::clock();
  const Metadata back = decode(bytes);
  const std::clock_t end = std::clock();
  EXPECT_EQ(listing(back), listing(metadata));
  return static_cast<double>(end - begin) / CLOCKS_PER_SEC;
}

TEST(DcpMetadata, M13ManyChunksAreDecodedInLinearTime) {
  const double few = decoding_time(5'000);
  const double many = decoding_time(50'000);
  EXPECT_LT(many, 40 * few + 0.5);  // linear would be 10
}

}  // namespace
}  // namespace tessera::dcp
