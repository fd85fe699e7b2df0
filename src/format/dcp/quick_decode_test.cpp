// The two ways to read a `.metadata` agree: the one without values, and the one that knows all.
#include "format/dcp/quick_decode.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <span>

#include "base/numbers.h"
#include "format/dcp/testing.h"
#include "format/pickle/pickle.h"
#include "format/test_support.h"

namespace tessera::dcp {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> goldens() {
  std::vector<std::string> names;
  for (const auto& file : fs::directory_iterator(std::string(TESSERA_TEST_DATA) + "/golden/dcp")) {
    // One of them is cut short.
    if (file.path().extension() == ".metadata" && file.path().stem() != "c1t")
      names.push_back("dcp/" + file.path().filename().string());
  }
  return names;
}

// What quick_decode reads, decode_values reads and finds the same.
bool agrees(ByteView bytes) {
  const auto quick = quick_decode(bytes);
  return !quick || encode(*quick) == encode(decode_values(bytes));
}

TEST(QuickDecode, ReadsWhatPyTorchWrote) {
  const std::vector<std::string> names = goldens();
  EXPECT_GT(names.size(), 8U);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const auto bytes = test::golden(name);
    EXPECT_TRUE(quick_decode(bytes).has_value());
    EXPECT_TRUE(agrees(bytes));
  }
}

TEST(QuickDecode, ReadsWhatWeWrite) {
  for (const std::string& name : goldens()) {
    const auto bytes = encode(decode_values(test::golden(name)));
    EXPECT_TRUE(quick_decode(bytes).has_value()) << name;
    EXPECT_TRUE(agrees(bytes)) << name;
  }
}

// Tensors with rows as chunks: more of them than pickle has in a batch, and as many.
Metadata rows(const std::vector<std::int64_t>& counts) {
  Metadata metadata;
  for (const std::int64_t count : counts) {
    Entry entry;
    entry.name = "w" + std::to_string(metadata.entries.size());
    entry.path = Path{entry.name};
    entry.is_tensor = true;
    entry.shape = {count, 300};
    for (std::int64_t row = 0; row < count; ++row) {
      const std::string path = "__" + std::to_string(row / 3) + "_0.distcp";
      const auto at = static_cast<std::uint64_t>(row) << 25U;
      entry.chunks.push_back({{{row, 0}, {1, 300}}, {path, at, 99, {"stream.zstd/1"}}});
    }
    metadata.entries.push_back(std::move(entry));
  }
  return metadata;
}

const Value& attribute(const Value& object, const char* name) {
  return object.as_object().state->at(name);
}

// The same metadata as PyTorch lays it out: with a memo entry for everything. `share`: as its
// planner leaves it, an index has the very offset of its chunk.
std::vector<std::byte> as_pytorch(const Metadata& metadata, bool share) {
  const Value tree = pickle::read(encode(metadata)).value;
  const auto& items = attribute(tree, "storage_data").pairs();
  auto item = items.begin();
  for (const auto& [name, tensor] : attribute(tree, "state_dict_metadata").pairs()) {
    for (const Value& chunk : attribute(tensor, "chunks").items()) {
      Value index_state = *(item++)->first.as_object().state;
      if (share) index_state.set_item("offset", attribute(chunk, "offsets"));
    }
  }
  return pickle::write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}});
}

TEST(QuickDecode, ReadsManyChunksInEitherLayout) {
  const Metadata metadata = rows({1000, 1, 2500, 0, 999, 2000, 1001});
  const std::string expected = listing(metadata);
  const auto shared = as_pytorch(metadata, true);
  const auto single = as_pytorch(metadata, false);
  EXPECT_LT(shared.size(), single.size());
  for (const auto& bytes : {encode(metadata), shared, single}) {
    const auto quick = quick_decode(bytes);
    ASSERT_TRUE(quick.has_value());
    EXPECT_EQ(listing(*quick), expected);
    EXPECT_EQ(listing(decode_values(bytes)), expected);
  }
}

// The same content with its parts in another order.
TEST(QuickDecode, ItemsBeforeTheirEntriesAreLeftToTheOtherReader) {
  const Metadata metadata = rows({3, 2});
  const Value tree = pickle::read(encode(metadata)).value;
  Value other = Value::dict();
  for (const char* part : {"storage_data", "state_dict_metadata", "planner_data"})
    other.set_item(part, attribute(tree, part));
  *const_cast<Object&>(tree.as_object()).state = other;  // the test owns the tree
  const auto bytes = pickle::write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}});
  EXPECT_FALSE(quick_decode(bytes).has_value());
  EXPECT_EQ(listing(decode(bytes)), listing(metadata));
}

// Items that are no part of the checkpoint do not stand in for those that are missing.
TEST(QuickDecode, ItemsElsewhereAreLeftToTheOtherReader) {
  const Value tree = pickle::read(encode(rows({3, 2}))).value;
  Value& state = *const_cast<Object&>(tree.as_object()).state;  // the test owns the tree
  const Value items = state.at("storage_data");
  state.set_item("storage_data", Value::dict({items.pairs()[0]}));
  state.set_item("more", items);
  const auto bytes = pickle::write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}});
  EXPECT_EQ(test::thrown([&] { (void)decode_values(bytes); }).first, ErrorCode::incomplete);
  EXPECT_FALSE(quick_decode(bytes).has_value());
}

// Python cannot hash them, in dicts that nobody looks at either.
TEST(QuickDecode, KeysThatAreNoTextsAreLeftToTheOtherReader) {
  const Value tree = pickle::read(encode(rows({3, 2}))).value;
  Value& state = *const_cast<Object&>(tree.as_object()).state;  // the test owns the tree
  for (const Value& key : {Value::list(), Value::dict(), Value::list({1, "text"})}) {
    state.set_item("more", Value::dict({{"text", 1}, {key, 2}}));
    const auto bytes = pickle::write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}});
    EXPECT_EQ(test::thrown([&] { (void)decode_values(bytes); }).first, ErrorCode::corrupt);
    EXPECT_FALSE(quick_decode(bytes).has_value());
  }
}

// In a dict that nobody looks at, too.
TEST(QuickDecode, AKeyThatIsThereTwiceIsLeftToTheOtherReader) {
  const Value tree = pickle::read(encode(rows({3, 2}))).value;
  Value& state = *const_cast<Object&>(tree.as_object()).state;  // the test owns the tree
  state.set_item("more", Value::dict({{"key 1", 1}, {"another", 2}, {"key 2", 3}}));
  auto bytes = pickle::write(tree, {.protocol = 4, .persistent_id = {}, .reduce = {}});
  EXPECT_TRUE(quick_decode(bytes).has_value());
  const std::string second = "key 2";
  const auto at = std::ranges::search(bytes, std::as_bytes(std::span(second)));
  ASSERT_FALSE(at.empty());
  *(at.end() - 1) = std::byte{'1'};
  EXPECT_EQ(test::thrown([&] { (void)decode_values(bytes); }).first, ErrorCode::corrupt);
  EXPECT_FALSE(quick_decode(bytes).has_value());
}

TEST(QuickDecode, AMemoOfMoreThanAllValuesIsLeftToTheOtherReader) {
  auto bytes = encode(rows({3, 2}));
  const auto memoize = std::ranges::find(bytes, std::byte{0x94});
  ASSERT_NE(memoize, bytes.end());
  bytes.insert(memoize, 1000, std::byte{0x94});
  const std::size_t frame = 3;  // where the length of the only frame stands
  store_le(bytes.data() + frame, load_le<std::uint64_t>(bytes.data() + frame) + 1000);
  EXPECT_EQ(test::thrown([&] { (void)decode_values(bytes); }).first, ErrorCode::limit);
  EXPECT_FALSE(quick_decode(bytes).has_value());
}

TEST(QuickDecode, DamageIsLeftToTheOtherReader) {
  std::mt19937 random(7);
  for (const std::string& name : goldens()) {
    auto bytes = test::golden(name);
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_FALSE(quick_decode(ByteView(bytes).first(size)).has_value()) << name << " " << size;
    for (int i = 0; i < 300; ++i) {
      const std::size_t at = random() % bytes.size();
      const std::byte before = bytes[at];
      bytes[at] ^= std::byte(1U << random() % 8);
      EXPECT_TRUE(agrees(bytes)) << name << " " << at;
      bytes[at] = before;
    }
  }
}

TEST(QuickDecode, AProtocolNumberInTheMiddleIsLeftToTheOtherReader) {
  auto bytes = test::golden("dcp/c1.metadata");
  const std::size_t behind_frame = 11;  // PROTO and FRAME with their arguments
  bytes.insert(bytes.begin() + behind_frame, {std::byte{0x80}, std::byte{4}});
  bytes[3] = std::byte(std::to_integer<unsigned>(bytes[3]) + 2);  // the frame's length
  EXPECT_EQ(test::thrown([&] { (void)decode_values(bytes); }).first, ErrorCode::corrupt);
  EXPECT_FALSE(quick_decode(bytes).has_value());
}

// A list that nobody looks at gets a member: every entry of the memo in turn, itself among them.
TEST(QuickDecode, ACycleIsLeftToTheOtherReader) {
  const auto golden = test::golden("dcp/c1.metadata");
  std::string text(reinterpret_cast<const char*>(golden.data()), golden.size());
  const std::size_t list = text.find("modules\x94]\x94");
  ASSERT_NE(list, std::string::npos);
  constexpr std::size_t kInserted = 6;  // LONG_BINGET with its number, and APPEND
  const std::size_t frame = 3;          // where the length of the only frame stands
  const std::uint64_t length = load_le<std::uint64_t>(golden.data() + frame) + kInserted;
  for (std::size_t i = 0; i < 8; ++i) text[frame + i] = static_cast<char>(length >> 8 * i);
  int cycles = 0;
  for (std::uint16_t entry = 0; entry < 320; ++entry) {
    std::string changed = text;
    const char get[] = {'j', static_cast<char>(entry), static_cast<char>(entry >> 8U), 0, 0, 'a'};
    changed.insert(list + 10, std::string(get, kInserted));
    const auto bytes = std::as_bytes(std::span(changed));
    const bool is_cycle = test::thrown([&] { (void)decode_values(bytes); }) ==
                          std::pair(ErrorCode::unsupported, true);
    cycles += is_cycle ? 1 : 0;
    EXPECT_TRUE(is_cycle ? !quick_decode(bytes) : agrees(bytes)) << entry;
  }
  EXPECT_GT(cycles, 0);
}

}  // namespace
}  // namespace tessera::dcp
