// Items that are compressed as they are written (checkpoint-rows P-23).
#include <gmock/gmock.h>

#include <filesystem>
#include <map>
#include <random>

#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/read/zstd.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/testing.h"
#include "checkpoint/test_support.h"
#include "tessera/data_files.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

constexpr int kZstdRanks = 3;
const Shape kZstdRows{7, 50}, kZstdWhole{5}, kZstdTold{4, 300}, kZstdNone{0, 3},
    kZstdLarge{600, 1000};

// "rows" and "whole" can be computed by every rank, "told" cannot: ranks 0 and 1 have half of it.
// "large" is of more than one window. With `stages` ranks have leaves of their own, and all is
// told.
Value zstd_tree(int rank, bool stages) {
  Tensor rows = counting(kZstdRows, chunk(kZstdRows, rank, kZstdRanks), 1);
  rows.placement = Placement{.parts = kZstdRanks};
  Tensor told =
      counting(kZstdTold, rank < 2 ? chunk(kZstdTold, rank, 2) : Box{{4, 0}, {0, 300}}, 2);
  Value tree = Value::dict(
      {{"rows", rows},
       {"large", copy_of_all(kZstdLarge, 4)},
       {"whole", copy_of_all(kZstdWhole, 3)},
       {"told", told},
       {"none", copy_of_all(kZstdNone, 0)},
       {"step", 7},
       {"pair", Value::tuple({copy_of_all(kZstdWhole, 5), copy_of_all({2, 2}, 6), 8})}});
  if (stages) tree.set_item("stage" + std::to_string(rank), rank);
  return tree;
}

void expect_zstd_whole(const Value& loaded, bool stages) {
  for (const auto& [name, shape, first] : {std::tuple("rows", kZstdRows, 1),
                                           {"large", kZstdLarge, 4},
                                           {"whole", kZstdWhole, 3},
                                           {"told", kZstdTold, 2}})
    EXPECT_EQ(floats(loaded.at(name).as_tensor()),
              floats(counting(shape, whole(shape), static_cast<float>(first))))
        << name;
  EXPECT_EQ(loaded.at("none").as_tensor().shape, kZstdNone);
  EXPECT_EQ(loaded.at("step").as_int(), 7);
  EXPECT_EQ(floats(loaded.at("pair").at(1).as_tensor()), floats(copy_of_all({2, 2}, 6)));
  for (int rank = 0; stages && rank < kZstdRanks; ++rank)
    EXPECT_EQ(loaded.at("stage" + std::to_string(rank)).as_int(), rank);
}

// The items that a `.metadata` has, by name and place.
std::map<std::pair<std::string, Shape>, dcp::Item> frames_in(
    const std::string& directory, const std::string& metadata = ".metadata") {
  std::map<std::pair<std::string, Shape>, dcp::Item> items;
  for (const dcp::Entry& entry : read_dcp_metadata(*posix_store(directory), metadata).entries) {
    if (!entry.is_tensor) items[{entry.name, {}}] = entry.item;
    for (const dcp::Chunk& chunk : entry.chunks)
      items[{entry.name, chunk.box.offsets}] = chunk.item;
  }
  return items;
}

std::vector<std::byte> content_of(const std::string& directory, const dcp::Item& item) {
  std::shared_ptr<const ByteSource> bytes =
      slice_source(posix_store(directory)->open(item.path), item.offset, item.length);
  if (!item.transforms.empty()) bytes = zstd_source(std::move(bytes), 1 << 30);
  return read_all(*bytes, 1 << 30);
}

// Items of a file lie one behind the other, and its tail behind the last one.
void expect_without_gaps(const std::string& directory) {
  std::map<std::string, std::map<std::uint64_t, std::uint64_t>> files;  // lengths by offset
  for (const auto& [place, item] : frames_in(directory))
    files[item.path][item.offset] = item.length;
  const std::filesystem::path root = directory;
  for (const auto& [name, items] : files) {
    std::uint64_t end = 0;
    for (const auto& [offset, length] : items) {
      EXPECT_EQ(offset, end) << name;
      end = offset + length;
    }
    EXPECT_EQ(std::filesystem::file_size(root / name), end + tail_size(end, items.size())) << name;
  }
}

SaveResult save_by_ranks(const std::string& directory, const SaveOptions& options, bool stages) {
  SaveResult result;
  run_ranks(kZstdRanks, [&](Group& group) {
    SaveOptions mine = options;
    if (group.rank() != 0) {  // rank 0's count
      mine.compression =
          options.compression == Compression::none ? Compression::zstd : Compression::none;
      mine.threads = 1;
    }
    const SaveResult saved = save(zstd_tree(group.rank(), stages), directory, mine, group);
    if (group.rank() == 0) result = saved;
  });
  return result;
}

TEST(SaveZstd, EachItemIsAFrameAroundWhatItWouldBeWithoutCompression) {
  for (const bool stages : {false, true}) {
    for (const bool apart : {false, true}) {
      SaveOptions options{.threads = 2, .one_file_an_item = apart};
      const std::string root = temporary_directory();
      const SaveResult plain = save_by_ranks(root + "/plain", options, stages);
      options.compression = Compression::zstd;
      const SaveResult small = save_by_ranks(root + "/zstd", options, stages);
      const auto items = frames_in(root + "/plain"), frames = frames_in(root + "/zstd");
      ASSERT_EQ(items.size(), frames.size());
      for (const auto& [place, item] : items) {
        const dcp::Item& frame = frames.at(place);
        EXPECT_TRUE(item.transforms.empty());
        EXPECT_THAT(frame.transforms, ElementsAre("stream.zstd/1"));
        // The same rank and number of its file.
        EXPECT_EQ(frame.path.substr(0, 5), item.path.substr(0, 5));
        EXPECT_TRUE(content_of(root + "/zstd", frame) == content_of(root + "/plain", item))
            << place.first;
      }
      expect_without_gaps(root + "/zstd");
      expect_without_gaps(root + "/plain");
      EXPECT_EQ(small.files, plain.files);
      EXPECT_LT(small.total_bytes, plain.total_bytes * 3 / 4);
      EXPECT_TRUE(verify(root + "/zstd").findings.empty());
      expect_zstd_whole(Checkpoint::open(root + "/zstd").load(), stages);
    }
  }
}

TEST(SaveZstd, APartWithoutCollectives) {
  const std::string root = temporary_directory();
  for (int rank = 0; rank < kZstdRanks; ++rank) {
    save_part(zstd_tree(rank, false), root + "/plain", rank);
    save_part(zstd_tree(rank, false), root + "/zstd", rank, {.compression = Compression::zstd});
    const std::string metadata = "__" + std::to_string(rank) + ".metadata";
    const auto frames = frames_in(root + "/zstd", metadata);
    for (const auto& [place, item] : frames_in(root + "/plain", metadata)) {
      EXPECT_THAT(frames.at(place).transforms, ElementsAre("stream.zstd/1"));
      EXPECT_TRUE(content_of(root + "/zstd", frames.at(place)) ==
                  content_of(root + "/plain", item));
    }
  }
  expect_zstd_whole(Checkpoint::open(root + "/zstd").load(), false);
}

std::uint64_t data_bytes(const std::string& directory) {
  std::uint64_t bytes = 0;
  for (const auto& [place, item] : frames_in(directory)) bytes += item.length;
  return bytes;
}

TEST(SaveZstd, LevelsAndWhatIsRefused) {
  const std::string root = temporary_directory();
  const Value tree = zstd_tree(0, false).at("large");
  const Value named = Value::dict({{"large", tree}});
  SaveOptions options{.compression = Compression::zstd, .compression_level = 1};
  save(named, root + "/1", options);
  options.compression_level = 19;
  save(named, root + "/19", options);
  EXPECT_LT(data_bytes(root + "/19"), data_bytes(root + "/1"));
  EXPECT_EQ(floats(Checkpoint::open(root + "/19").load().at("large").as_tensor()),
            floats(copy_of_all(kZstdLarge, 4)));
  for (const int level : {-1, 0, 20}) {
    options.compression_level = level;
    EXPECT_EQ(code_of([&] { save(named, root + "/n", options); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { save_part(named, root + "/n", 0, options); }),
              ErrorCode::invalid_argument);
  }
  options.compression_level = 3;
  EXPECT_EQ(code_of([&] { save(named, root + "/n.pt", options); }), ErrorCode::unsupported);
  EXPECT_EQ(code_of([&] { save(named, root + "/n.safetensors", options); }),
            ErrorCode::unsupported);
  EXPECT_FALSE(std::filesystem::exists(root + "/n.pt"));
}

// What does not become smaller is written all the same, in frames of many windows.
TEST(SaveZstd, NoiseAndDamage) {
  Tensor noise = copy_of_all(kZstdLarge, 0);
  std::mt19937 random(5);
  auto* words = reinterpret_cast<std::uint32_t*>(noise.pieces.at(0).storage->data);
  for (std::int64_t i = 0; i < numel(kZstdLarge); ++i)
    words[i] = static_cast<std::uint32_t>(random());
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"w", noise}}), directory, {.compression = Compression::zstd});
  const Tensor back = Checkpoint::open(directory).load().at("w").as_tensor();
  EXPECT_EQ(
      std::memcmp(back.pieces.at(0).storage->data, words, byte_size(DType::float32, kZstdLarge)),
      0);
  const std::string file = directory + "/" + frames_in(directory).at({"w", {0, 0}}).path;
  std::string text = text_of(file);
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
  std::filesystem::permissions(file, std::filesystem::perms::owner_write,
                               std::filesystem::perm_options::add);
  write_text(file, text);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory).load(); }), ErrorCode::corrupt);
  EXPECT_FALSE(verify(directory).findings.empty());
}

RankReport report_of_two_files() {
  RankReport report{1, "host", {}};
  report.files.push_back({1, {70 + tail_size(70, 2), 5}, 2});
  report.files.push_back({0, {300 + tail_size(300, 1), 6}, 1});
  report.lengths = {30, 40, 300};
  return report;
}

TEST(ItemEnds, PlacesFollowFromTheLengthsThatAreTold) {
  const RankReport report = report_of_two_files();
  const std::size_t plain = encode_report(report, 0).size();
  // One byte a file, and one for each of these lengths, but for 300.
  EXPECT_EQ(encode_report(report, 0, true).size(), plain + 6);
  Reports back = decode_reports(encode_report(report, 0, true), true);
  const ItemEnds ends(back);
  const auto place = [&](int file, std::uint64_t number) {
    const ItemPlace found = ends.of(1, {file, 0, 0, number});
    return std::pair(found.offset, found.length);
  };
  EXPECT_EQ(place(0, 0), std::pair(0UL, 300UL));
  EXPECT_EQ(place(1, 0), std::pair(0UL, 30UL));
  EXPECT_EQ(place(1, 1), std::pair(30UL, 40UL));
}

// Two ranks with two files each; rank 1 has two items in its second file.
TEST(ItemEnds, ReportsMustFitThePlan) {
  const auto code_for = [](const auto& change) -> std::optional<ErrorCode> {
    PlannedLeaf leaf;
    leaf.is_tensor = true;
    leaf.shape = {8};
    leaf.placement = Placement{.parts = 2};
    std::vector<PlannedLeaf> leaves;
    for (const char* name : {"a", "b", "c", "d"}) {
      leaf.name = name;
      leaf.shape[0] = leaves.empty() ? 64 : 8;
      leaves.push_back(leaf);
    }
    PlanRules rules{.ranks = 2, .files = {2, false, Compression::zstd, 3}};
    const SavePlan plan(rules, ToldLeaves(leaves, false), [](std::size_t) { return 0; });
    Reports reports;
    for (const int rank : {0, 1}) {
      RankReport report{rank, "", {}};
      report.files.push_back({0, {300 + tail_size(300, 1), 6}, 1});
      report.files.push_back({1, {120 + tail_size(120, 3), 5}, 3});
      report.lengths = {300, 30, 40, 50};
      reports.ranks.push_back(report);
    }
    change(reports.ranks[1]);
    try {
      require_planned(reports, plan, "attempt");
    } catch (const Error& error) {
      return error.code();
    }
    return std::nullopt;
  };
  EXPECT_FALSE(code_for([](RankReport&) {}).has_value());
  EXPECT_EQ(code_for([](RankReport& report) { report.lengths[2] = 41; }), ErrorCode::mismatch);
  EXPECT_EQ(code_for([](RankReport& report) {  // fewer items, which fill the file
              report.files[1].items = 2;
              report.lengths = {300, 60, 60};
            }),
            ErrorCode::mismatch);
  EXPECT_EQ(code_for([](RankReport& report) { report.files[1].file = 2; }), ErrorCode::mismatch);
  EXPECT_EQ(code_for([](RankReport& report) { report.files.pop_back(); }), ErrorCode::mismatch);
}

}  // namespace
}  // namespace tessera
