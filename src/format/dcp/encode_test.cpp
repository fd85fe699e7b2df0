// What encode() writes: in pieces, from sources that keep no chunk, and for every kind of content.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <random>
#include <span>

#include "format/dcp/dcp.h"
#include "format/dcp/quick_decode.h"
#include "format/dcp/testing.h"
#include "format/test_support.h"

namespace tessera::dcp {
namespace {

// One tensor, a row of it per rank; everything is computed.
class Rows final : public MetadataSource {
 public:
  explicit Rows(std::int64_t ranks) : ranks_(ranks) {
    head_.name = "model.w";
    head_.path = Path{"model", "w"};
    head_.is_tensor = true;
    head_.shape = {ranks, 8};
    origin_.version = "1.0.0";
  }

  [[nodiscard]] const Origin& origin() const override { return origin_; }
  [[nodiscard]] std::size_t entry_count() const override { return 1; }
  [[nodiscard]] const EntryHead& head(std::size_t /*entry*/) const override { return head_; }
  void for_each_chunk(std::size_t /*entry*/, const ChunkVisitor& visit) const override {
    for (std::int64_t rank = 0; rank < ranks_; ++rank)
      visit(std::array{rank, std::int64_t{0}}, std::array{std::int64_t{1}, std::int64_t{8}});
  }
  void for_each_item(std::size_t /*entry*/, const ItemVisitor& visit) const override {
    for (std::int64_t rank = 0; rank < ranks_ - missing_items; ++rank) {
      const std::string path = "__" + std::to_string(rank) + "_0.distcp";
      visit(std::array{rank, std::int64_t{0}},
            {.path = path, .offset = static_cast<std::uint64_t>(rank) << 20U, .length = 1577});
    }
  }

  std::int64_t missing_items = 0;

 private:
  std::int64_t ranks_;
  EntryHead head_;
  Origin origin_;
};

// The same, every chunk kept.
Metadata stored(const MetadataSource& source) {
  Metadata metadata;
  static_cast<Origin&>(metadata) = source.origin();
  for (std::size_t i = 0; i < source.entry_count(); ++i) {
    Entry entry;
    static_cast<EntryHead&>(entry) = source.head(i);
    std::vector<Box> boxes;
    source.for_each_chunk(i, [&](auto offsets, auto sizes) {
      boxes.push_back({{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}});
    });
    source.for_each_item(i, [&](auto /*offsets*/, const ItemView& item) {
      entry.chunks.push_back(
          {boxes[entry.chunks.size()], {std::string(item.path), item.offset, item.length, {}}});
    });
    metadata.entries.push_back(std::move(entry));
  }
  return metadata;
}

TEST(DcpEncode, ASourceIsWrittenInPieces) {
  const Rows rows(30'000);
  std::vector<std::byte> whole;
  std::vector<std::size_t> pieces;
  encode(rows, [&](ByteView piece) {
    pieces.push_back(piece.size());
    whole.insert(whole.end(), piece.begin(), piece.end());
  });
  EXPECT_GT(pieces.size(), 3U);
  EXPECT_LT(std::ranges::max(pieces), (1U << 20U) + 1000);
  EXPECT_EQ(whole, encode(stored(rows)));
  const auto decoded = quick_decode(whole);
  ASSERT_TRUE(decoded.has_value());
  EXPECT_EQ(listing(*decoded), listing(stored(rows)));
}

// A fragment refers to nothing but the preamble and its entry's name.
TEST(DcpEncode, AChunkIsWrittenWithoutItsNeighbours) {
  const auto bytes_of = [](std::int64_t ranks) { return encode(stored(Rows(ranks))); };
  const auto text_of = [](const std::vector<std::byte>& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  const std::string one = text_of(bytes_of(1));
  const std::string many = text_of(bytes_of(100));
  const std::size_t path = one.find("__0_0.distcp");
  const std::size_t begin = one.rfind('(', path - 30);
  ASSERT_NE(begin, std::string::npos);
  EXPECT_NE(many.find(one.substr(begin, path + 12 - begin)), std::string::npos);
  EXPECT_EQ(std::ranges::count(one, '\x94'), std::ranges::count(many, '\x94'));
}

TEST(DcpEncode, WhatWriteThrowsLeaves) {
  EXPECT_EQ(test::thrown([] {
              encode(Rows(10), [](ByteView) { throw Error(ErrorCode::out_of_space, "full"); });
            }).first,
            ErrorCode::out_of_space);
}

TEST(DcpEncode, RefusesWhatCannotBeSaid) {
  const auto code = [](const std::function<void(Metadata&)>& change) {
    Metadata metadata = stored(Rows(2));
    metadata.entries.push_back(metadata.entries[0]);
    metadata.entries[1].name = "b";
    change(metadata);
    return test::thrown([&] { (void)encode(metadata); }).first;
  };
  EXPECT_EQ(code([](Metadata& m) { m.entries[1].name = "model.w"; }), ErrorCode::conflict);
  EXPECT_EQ(code([](Metadata& m) { m.entries[1].name = "\xff"; }), ErrorCode::corrupt);
  EXPECT_EQ(code([](Metadata& m) { m.save_id = "\xff"; }), ErrorCode::corrupt);
  EXPECT_EQ(code([](Metadata& m) {
              m.entries[1].is_tensor = false;
              m.entries[1].item.offset = std::uint64_t{1} << 63U;
            }),
            ErrorCode::limit);
  Rows rows(3);
  rows.missing_items = 1;
  EXPECT_EQ(test::thrown([&] { encode(rows, [](ByteView) {}); }).first,
            ErrorCode::invalid_argument);
}

// Draws a metadata of any content that encode() takes and decode() accepts.
class Drawn {
 public:
  explicit Drawn(unsigned seed) : random_(seed) {}

  Metadata metadata() {
    Metadata metadata;
    metadata.has_planner_data = below(4) != 0;
    if (below(2) == 0) metadata.version = "1.0.0";
    if (below(2) == 0) metadata.checkpoint_id = text();
    if (below(2) == 0) metadata.save_id = text();
    const std::size_t entries = below(12) == 0 ? below(1200) : below(4);
    for (std::size_t i = 0; i < entries; ++i) {
      metadata.entries.push_back(entry(metadata.has_planner_data));
      metadata.entries.back().name = text() + "." + std::to_string(i);
    }
    return metadata;
  }

 private:
  std::size_t below(std::size_t limit) { return random_() % limit; }

  // A number of at most `bits` bits; one in two is at the limits of pickle's forms.
  std::uint64_t number(unsigned bits) {
    const std::uint64_t limit = std::uint64_t{1} << below(bits);
    return below(2) == 0 ? random_() % limit : limit - below(2);
  }

  std::string text() {
    static const std::array<std::string, 6> parts{"w", "layers", "ü", "\xe2\x82\xac", "a.b", " "};
    std::string text;
    for (std::size_t i = below(below(50) == 0 ? 400 : 4) + 1; i > 0; --i)
      text += parts.at(below(parts.size()));
    return text;
  }

  Item item() {
    Item item{"__" + std::to_string(number(20)) + "_0.distcp", number(62), number(62), {}};
    for (std::size_t i = below(5) == 0 ? below(3) : 0; i > 0; --i)
      item.transforms.push_back("stream.zstd/" + std::to_string(i));
    return item;
  }

  Path path() {
    Path path;
    for (std::size_t i = below(6); i > 0; --i) {
      if (below(2) == 0) {
        path.emplace_back(text());
      } else {
        path.emplace_back(static_cast<std::int64_t>(number(63)));
      }
    }
    return path;
  }

  Entry entry(bool has_path) {
    Entry entry;
    if (has_path) entry.path = path();
    if (below(3) == 0) {
      entry.item = item();
      return entry;
    }
    entry.is_tensor = true;
    entry.dtype =
        std::array{DType::float32, DType::bfloat16, DType::int64, DType::bool8}.at(below(4));
    entry.requires_grad = below(2) == 0;
    const std::size_t chunks = below(20) == 0 ? below(2500) : below(4);
    // The first dimension has a slice a chunk; a scalar is one chunk.
    for (std::size_t i = below(5); i > 0; --i)
      entry.shape.push_back(static_cast<std::int64_t>(number(12)));
    if (!entry.shape.empty()) entry.shape[0] = static_cast<std::int64_t>(chunks);
    for (std::size_t i = 0; i < (entry.shape.empty() ? 1 : chunks); ++i) {
      Box box{Shape(entry.shape.size(), 0), entry.shape};
      if (!entry.shape.empty()) {
        box.offsets[0] = static_cast<std::int64_t>(i);
        box.sizes[0] = 1;
      }
      entry.chunks.push_back({box, item()});
    }
    return entry;
  }

  std::mt19937 random_;
};

// As PyTorch writes a path that os.fsdecode gave it.
TEST(DcpEncode, APathThatIsNotUtf8HasLoneSurrogates) {
  Metadata metadata;
  metadata.checkpoint_id = "/d\x80/\xc3\xbc/\xff\xc3";
  const auto bytes = encode(metadata);
  const std::string expected = "/d\xed\xb2\x80/\xc3\xbc/\xed\xb3\xbf\xed\xb3\x83";
  EXPECT_EQ(decode_values(bytes).checkpoint_id, expected);
  // It stays so in a checkpoint that is written again.
  metadata.checkpoint_id = expected;
  EXPECT_EQ(encode(metadata), bytes);
}

TEST(DcpEncode, GeneratedMetadataComesBack) {
  std::size_t chunks = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    const Metadata metadata = Drawn(seed).metadata();
    const auto bytes = encode(metadata);
    const std::string expected = listing(metadata);
    const auto quick = quick_decode(bytes);
    ASSERT_TRUE(quick.has_value());
    EXPECT_EQ(listing(*quick), expected);
    EXPECT_EQ(quick->has_planner_data, metadata.has_planner_data);
    EXPECT_EQ(listing(decode_values(bytes)), expected);
    for (const Entry& entry : metadata.entries) chunks += entry.chunks.size();
  }
  EXPECT_GT(chunks, 5'000U);
}

}  // namespace
}  // namespace tessera::dcp
