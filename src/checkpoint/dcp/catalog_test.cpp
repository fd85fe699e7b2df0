#include "checkpoint/dcp/catalog.h"

#include <algorithm>

#include <gtest/gtest.h>

#include "checkpoint/dcp/read_catalog.h"
#include "tessera/checkpoint.h"

namespace tessera {
namespace {

dcp::EntryHead tensor_head(const std::string& name, const Shape& shape) {
  dcp::EntryHead head;
  head.name = name;
  head.path = Path{"model", std::int64_t{3}, name};
  head.is_tensor = true;
  head.dtype = DType::bfloat16;
  head.shape = shape;
  head.requires_grad = true;
  return head;
}

struct Row {
  Box box;
  ItemRange place;
};

void expect_same(const ItemRange& a, const ItemRange& b) {
  EXPECT_EQ(a.file, b.file);
  EXPECT_EQ(a.offset, b.offset);
  EXPECT_EQ(a.size, b.size);
  EXPECT_EQ(a.encoding, b.encoding);
}

// Rows whose numbers need columns of no byte, and of 1, 2, 4 and 8 bytes.
std::vector<Row> rows_of(std::uint64_t spread) {
  std::vector<Row> rows;
  for (const std::uint64_t number : {std::uint64_t{7}, 7 + spread / 2, 7 + spread}) {
    const auto at = static_cast<std::int64_t>(number);
    rows.push_back({{{at, 0}, {1, 5}},
                    {static_cast<std::uint32_t>(rows.size()), number, 1200,
                     rows.size() == 1 ? Encoding::raw : Encoding::torch_item}});
  }
  return rows;
}

TEST(Catalog, ColumnsKeepNumbersOfEverySize) {
  for (const std::uint64_t spread :
       {std::uint64_t{0}, std::uint64_t{200}, std::uint64_t{256}, std::uint64_t{70'000},
        std::uint64_t{1} << 33, std::uint64_t{1} << 62}) {
    CatalogWriter writer;
    writer.add_tensor(tensor_head("w", {std::int64_t{1} << 62, 5}));
    const std::vector<Row> rows = rows_of(spread);
    for (const Row& row : rows) writer.add_chunk(row.box.offsets, row.box.sizes, row.place);
    const Bytes bytes = writer.finish({}, {});
    const Catalog catalog(bytes);
    int entries = 0;
    catalog.for_each([&](const Catalog::Entry& entry) {
      ++entries;
      const CatalogChunks chunks = catalog.chunks_at(entry.chunks);
      ASSERT_EQ(chunks.size(), rows.size());
      for (std::size_t i = 0; i < rows.size(); ++i) {
        EXPECT_EQ(chunks.box(i), rows[i].box) << spread;
        expect_same(chunks.place(i), rows[i].place);
      }
    });
    EXPECT_EQ(entries, 1);
  }
}

TEST(Catalog, EntriesComeInTheirOrder) {
  CatalogWriter writer;
  writer.add_tensor(tensor_head("empty", {0, 4}));
  dcp::EntryHead value;
  value.name = "n";
  const Bytes pickle{std::byte{1}, std::byte{2}};
  writer.add_value(value, pickle);
  writer.add_item(value, ItemRange{1, 2, 3, Encoding::torch_item_zstd});
  writer.add_tensor(tensor_head("scalar", {}));
  writer.add_chunk({}, {}, {4, 5, 6, Encoding::torch_item});
  const Bytes bytes = writer.finish({}, {});
  const Catalog catalog(bytes);
  std::vector<Catalog::Entry> entries;
  catalog.for_each([&](const Catalog::Entry& entry) { entries.push_back(entry); });
  ASSERT_EQ(entries.size(), 4U);
  EXPECT_EQ(catalog.chunks_at(entries[0].chunks).size(), 0U);
  EXPECT_EQ(entries[0].head.shape, (Shape{0, 4}));
  EXPECT_EQ(entries[0].head.path, tensor_head("empty", {}).path);
  EXPECT_EQ(entries[0].head.dtype, DType::bfloat16);
  EXPECT_TRUE(entries[0].head.requires_grad);
  ASSERT_TRUE(entries[1].value);
  EXPECT_TRUE(std::ranges::equal(*entries[1].value, pickle));
  EXPECT_FALSE(entries[1].head.path);
  EXPECT_FALSE(entries[2].value);
  expect_same(entries[2].item.value(), {1, 2, 3, Encoding::torch_item_zstd});
  expect_same(catalog.chunks_at(entries[3].chunks).place(0), {4, 5, 6, Encoding::torch_item});
  EXPECT_TRUE(catalog.chunks_at(entries[3].chunks).meets(0, whole({})));
}

TEST(Catalog, ChunksMeetBoxesThatShareAnElement) {
  CatalogWriter writer;
  writer.add_tensor(tensor_head("w", {8, 8}));
  const Box chunk{{2, 4}, {3, 2}};
  writer.add_chunk(chunk.offsets, chunk.sizes, {});
  const Bytes bytes = writer.finish({}, {});
  const Catalog catalog(bytes);
  catalog.for_each([&](const Catalog::Entry& entry) {
    const CatalogChunks chunks = catalog.chunks_at(entry.chunks);
    EXPECT_TRUE(chunks.meets(0, {{4, 5}, {1, 1}}));
    EXPECT_TRUE(chunks.meets(0, {{0, 0}, {8, 8}}));
    EXPECT_FALSE(chunks.meets(0, {{5, 4}, {1, 2}}));
    EXPECT_FALSE(chunks.meets(0, {{0, 0}, {2, 8}}));
    EXPECT_FALSE(chunks.meets(0, {{2, 6}, {3, 2}}));
    EXPECT_FALSE(chunks.meets(0, {{2, 0}, {3, 4}}));
  });
}

TEST(Catalog, TheHeadSaysWhatIsTrueOfAll) {
  CatalogHead head;
  head.version = "1.0.0";
  head.save_id = "a-b";
  head.warnings = {"one", "two"};
  head.types = "{}";
  head.world_size = 12;
  head.metadata = {{".metadata", 77}};
  head.metadata_end = 99;
  head.digests[".metadata"] = {2, {8, 9}, 3, std::nullopt};
  const FileDigests tailed{1, {}, 0, 5};
  const std::vector<CatalogFile> files = {{{"__0_0.distcp", 1}, tailed}, {{"__1_0.distcp", 2}}};
  const Bytes bytes = CatalogWriter().finish(head, files);
  const Catalog catalog(bytes);
  const CatalogHead& read = catalog.head();
  EXPECT_EQ(read.version, head.version);
  EXPECT_EQ(read.save_id, head.save_id);
  EXPECT_EQ(read.warnings, head.warnings);
  EXPECT_EQ(read.types, head.types);
  EXPECT_EQ(read.world_size, 12);
  EXPECT_EQ(read.metadata.at(0).size, 77U);
  EXPECT_EQ(read.metadata_end, 99U);
  EXPECT_FALSE(read.digests.at(".metadata").tail);
  EXPECT_EQ(read.digests.at(".metadata").blocks, (Digests{8, 9}));
  EXPECT_EQ(read.digests.at(".metadata").origin, 3U);
  ASSERT_EQ(catalog.files(), 2U);
  EXPECT_EQ(catalog.file(0).digests.value().tail, 5U);
  EXPECT_EQ(catalog.file(0).info.size, 1U);
  EXPECT_EQ(catalog.file(1).info.name, "__1_0.distcp");
  EXPECT_FALSE(catalog.file(1).digests);
}

TEST(DataFileNames, SayWhoseTheyAre) {
  EXPECT_EQ(rank_of_data_file("__0_0.distcp"), 0);
  EXPECT_EQ(rank_of_data_file("__17_3_0a1b2c3d4e5f.distcp"), 17);
  for (const char* name :
       {"__2147483647_x.distcp", "__-1_0.distcp", "__+1_0.distcp", "__ 1_0.distcp", "__01_0.distcp",
        "__1.distcp", "__x_0.distcp", "___0.distcp", "__", "", "_", "a__0_0.distcp",
        "__99999999999999999999_0.distcp"})
    EXPECT_EQ(rank_of_data_file(name), std::nullopt) << name;
  EXPECT_TRUE(is_rank_metadata("__3.metadata"));
  for (const char* name : {"__.metadata", "__x.metadata", "__03.metadata", "__3.metadata.tmp",
                           "__a/.metadata", "__2147483648.metadata", ".metadata"})
    EXPECT_FALSE(is_rank_metadata(name)) << name;
}

// A name that says nothing of a rank says nothing of their number either.
TEST(DataFileNames, WorldSizesAreOfRanksThatMayBe) {
  const auto store = memory_store();
  save(Value::dict({{"n", 1}}), store);
  std::string name;
  for (const ObjectInfo& object : store->list()) {
    if (is_attempt_name(object.name)) name = object.name;
  }
  for (const auto& [renamed, world] :
       {std::pair("__2147483647_x.distcp", 0), {"__-7_0.distcp", 0}, {"__41_0.distcp", 42}}) {
    const auto changed = memory_store();
    put(*changed, renamed, read_all(*store->open(name), 1 << 20), IfExists::fail);
    dcp::Metadata metadata = read_dcp_metadata(*store);
    metadata.entries.at(0).item.path = renamed;
    put(*changed, kDcpMetadata, dcp::encode(metadata), IfExists::fail);
    EXPECT_EQ(Checkpoint::open(changed).world_size, world) << renamed;
  }
}

}  // namespace
}  // namespace tessera
