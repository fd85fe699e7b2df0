// Which data files a save makes, and what lies where in them (checkpoint-rows P-21).
#include <gmock/gmock.h>
#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <stdexcept>
#include <tuple>

#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/save/save_plan.h"
#include "checkpoint/save/testing.h"
#include "checkpoint/test_support.h"
#include "conformance/unprivileged.h"
#include "tessera/data_files.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;

constexpr int kFileRanks = 3;
const Shape kRows{7, 2}, kWhole{5}, kTold{4, 3}, kNone{0, 3};

// "rows" and "whole" can be computed by every rank, "told" cannot: ranks 0 and 1 have half of it.
Value tree_of(int rank, bool stages) {
  Tensor rows = counting(kRows, chunk(kRows, rank, kFileRanks), 1);
  rows.placement = Placement{.parts = kFileRanks};
  Tensor told = counting(kTold, rank < 2 ? chunk(kTold, rank, 2) : Box{{4, 0}, {0, 3}}, 2);
  Value tree = Value::dict({{"rows", rows},
                            {"whole", copy_of_all(kWhole, 3)},
                            {"told", told},
                            {"none", copy_of_all(kNone, 0)},
                            {"step", 7},
                            {"name", "run"}});
  if (stages) tree.set_item("stage" + std::to_string(rank), rank);
  return tree;
}

void expect_whole(const Value& loaded, bool stages) {
  EXPECT_EQ(floats(loaded.at("rows").as_tensor()), floats(counting(kRows, whole(kRows), 1)));
  EXPECT_EQ(floats(loaded.at("whole").as_tensor()), floats(counting(kWhole, whole(kWhole), 3)));
  EXPECT_EQ(floats(loaded.at("told").as_tensor()), floats(counting(kTold, whole(kTold), 2)));
  EXPECT_EQ(loaded.at("none").as_tensor().shape, kNone);
  EXPECT_EQ(loaded.at("step").as_int(), 7);
  EXPECT_EQ(loaded.at("name").as_string(), "run");
  for (int rank = 0; stages && rank < kFileRanks; ++rank)
    EXPECT_EQ(loaded.at("stage" + std::to_string(rank)).as_int(), rank);
}

std::vector<dcp::Item> items_in(const std::string& directory, const std::string& metadata) {
  std::vector<dcp::Item> items;
  for (const dcp::Entry& entry : read_dcp_metadata(*posix_store(directory), metadata).entries) {
    if (!entry.is_tensor) items.push_back(entry.item);
    for (const dcp::Chunk& chunk : entry.chunks) items.push_back(chunk.item);
  }
  return items;
}

// Each of the items has a file of its own, and the files of a rank are numbered from 0 up.
void expect_a_file_each(const std::string& directory, const std::vector<dcp::Item>& items) {
  std::map<int, std::set<int>> numbers;  // by rank
  for (const dcp::Item& item : items) {
    int rank = 0, number = 0;
    ASSERT_EQ(std::sscanf(item.path.c_str(), "__%d_%d_", &rank, &number), 2) << item.path;
    EXPECT_TRUE(numbers[rank].insert(number).second) << item.path;
    EXPECT_EQ(item.offset, 0U) << item.path;
    EXPECT_EQ(std::filesystem::file_size(directory + "/" + item.path),
              item.length + tail_size(item.length, 1))
        << item.path;
  }
  for (const auto& [rank, found] : numbers) {
    EXPECT_EQ(*found.begin(), 0) << rank;
    EXPECT_EQ(static_cast<std::size_t>(*found.rbegin()), found.size() - 1) << rank;
  }
}

std::size_t data_files_in(const std::string& directory) {
  if (!std::filesystem::exists(directory)) return 0;
  return static_cast<std::size_t>(std::ranges::count_if(
      std::filesystem::directory_iterator(directory),
      [](const auto& entry) { return entry.path().extension() == ".distcp"; }));
}

TEST(SaveFiles, EachItemCanHaveAFileOfItsOwn) {
  for (const bool stages : {false, true}) {
    const std::string directory = temporary_directory() + "/c";
    std::uint64_t files = 0;
    run_ranks(kFileRanks, [&](Group& group) {
      SaveOptions options;
      options.one_file_an_item = group.rank() == 0;  // rank 0's word counts
      options.threads = 1 + group.rank();
      const SaveResult result = save(tree_of(group.rank(), stages), directory, options, group);
      if (group.rank() == 1) files = result.files;
    });
    const auto items = items_in(directory, ".metadata");
    // Rows of three ranks, two halves, "whole", "none", two values, and one of each stage.
    EXPECT_EQ(items.size(), stages ? 12U : 9U);
    expect_a_file_each(directory, items);
    EXPECT_EQ(data_files_in(directory), items.size());
    EXPECT_EQ(files, items.size() + 2);  // `.metadata` and its side file
    EXPECT_TRUE(verify(directory).findings.empty());
    expect_whole(Checkpoint::open(directory).load(), stages);
  }
}

TEST(SaveFiles, TheOthersWordDoesNotCount) {
  const std::string directory = temporary_directory() + "/c";
  run_ranks(kFileRanks, [&](Group& group) {
    SaveOptions options;
    options.one_file_an_item = group.rank() != 0;
    options.threads = 1;
    save(tree_of(group.rank(), false), directory, options, group);
  });
  EXPECT_EQ(data_files_in(directory), std::size_t{kFileRanks});
}

TEST(SaveFiles, EachItemOfAPartCanHaveAFileOfItsOwn) {
  const std::string directory = temporary_directory() + "/c";
  std::size_t all = 0;
  for (int rank = 0; rank < kFileRanks; ++rank) {
    const SaveResult result =
        save_part(tree_of(rank, false), directory, rank, {.one_file_an_item = true});
    const auto items = items_in(directory, "__" + std::to_string(rank) + ".metadata");
    expect_a_file_each(directory, items);
    EXPECT_EQ(result.files, items.size() + 1);
    all += items.size();
  }
  EXPECT_EQ(data_files_in(directory), all);
  expect_whole(Checkpoint::open(directory).load(), false);
}

// The soft limit of open files, until the end of a test.
class OpenFileLimit {
 public:
  explicit OpenFileLimit(rlim_t most) {
    if (::getrlimit(RLIMIT_NOFILE, &before_) != 0) throw std::runtime_error("no limit");
    rlimit now = before_;
    now.rlim_cur = most;
    if (::setrlimit(RLIMIT_NOFILE, &now) != 0) throw std::runtime_error("no limit");
  }
  OpenFileLimit(const OpenFileLimit&) = delete;
  OpenFileLimit& operator=(const OpenFileLimit&) = delete;
  ~OpenFileLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

TEST(SaveFiles, AsManyAreOpenAsThereAreThreads) {
  constexpr int kItems = 150;
  Value tree = Value::dict({});
  for (int i = 0; i < kItems; ++i)
    tree.set_item(std::to_string(i), counting({3}, whole({3}), static_cast<float>(i)));
  const std::string directory = temporary_directory() + "/c";
  {
    const OpenFileLimit limit(64);
    save(tree, directory, {.threads = 4, .one_file_an_item = true});
  }
  EXPECT_EQ(data_files_in(directory), std::size_t{kItems});
  const Value loaded = Checkpoint::open(directory).load();
  for (int i = 0; i < kItems; ++i) {
    EXPECT_EQ(floats(loaded.at(std::to_string(i)).as_tensor()),
              floats(counting({3}, whole({3}), static_cast<float>(i))));
  }
}

TEST(SaveFiles, ASaveThatFailsRemovesTheFilesOfItsItems) {
  const std::string directory = temporary_directory() + "/c";
  SaveOptions options{.threads = 1, .one_file_an_item = true};
  std::size_t there = 0;
  options.progress = [&](const Progress& progress) {
    if (progress.done < progress.total) return;
    there = data_files_in(directory);
    throw std::runtime_error("enough");
  };
  const Value tree = Value::dict({{"a", 1}, {"w", counting(kWhole, whole(kWhole), 3)}});
  EXPECT_THROW(save(tree, directory, options), std::exception);
  EXPECT_GT(there, 0U);
  EXPECT_EQ(data_files_in(directory), 0U);
}

// One file has values by name, then placed tensors in the tree's order, then told ones by name and
// place. PyTorch has its byte items first, too.
TEST(SaveFiles, ValuesComeFirstInAFileThenTensors) {
  const Shape shape{4, 3};
  Tensor halves = counting(shape, chunk(shape, 1, 2), 2);
  halves.pieces.push_back(counting(shape, chunk(shape, 0, 2), 2).pieces.at(0));
  const Value tree = Value::dict({{"z", copy_of_all({2}, 1)},
                                  {"told2", halves},
                                  {"step", 7},
                                  {"m", copy_of_all({9}, 1)},
                                  {"told1", halves},
                                  {"lr", 0.5},
                                  {"opt", Value::dict({{"beta", 1}})},
                                  {"n", copy_of_all({1}, 1)}});
  const std::string directory = temporary_directory() + "/c";
  save(tree, directory, {.threads = 1});
  std::map<std::pair<std::string, std::uint64_t>, std::string> places;
  for (const dcp::Entry& entry : read_dcp_metadata(*posix_store(directory)).entries) {
    if (!entry.is_tensor) places[{entry.item.path, entry.item.offset}] = entry.name;
    for (const dcp::Chunk& chunk : entry.chunks) {
      places[{chunk.item.path, chunk.item.offset}] =
          entry.name + "@" + std::to_string(chunk.box.offsets.at(0));
    }
  }
  EXPECT_EQ(data_files_in(directory), 1U);
  std::vector<std::string> order;
  for (const auto& [place, name] : places) order.push_back(name);
  EXPECT_THAT(order, ElementsAre("lr", "opt.beta", "step", "z@0", "m@0", "n@0", "told1@0",
                                 "told1@2", "told2@0", "told2@2"));
  // Those who wrote the file agree with `.metadata`.
  EXPECT_TRUE(verify(directory).findings.empty());
  const Value loaded = Checkpoint::open(directory).load();
  EXPECT_EQ(loaded.at("lr").as_real(), 0.5);
  EXPECT_EQ(floats(loaded.at("m").as_tensor()), floats(copy_of_all({9}, 1)));
  EXPECT_EQ(floats(loaded.at("told1").as_tensor()), floats(counting(shape, whole(shape), 2)));
}

// The root of a volume has a directory that only root reads; and whoever likes names it by a link.
TEST(SaveFiles, WhatIsNotTheCheckpointsIsNotLookedInto) {
  const TemporaryDirectory temporary;
  const std::string directory = temporary.path() + "/volume", link = temporary.path() + "/link";
  std::filesystem::create_directory(directory);
  std::filesystem::create_directory_symlink("volume", link);
  std::filesystem::permissions(temporary.path(), std::filesystem::perms(0755));
  Unprivileged::give(directory);
  const ClosedDirectory closed(directory + "/lost+found");
  const Unprivileged unprivileged;
  SaveOptions options;
  options.overwrite = true;
  for (const std::string& path : {directory, link, directory}) {
    run_ranks(kFileRanks, [&](Group& group) {
      save(tree_of(group.rank(), false), path, options, group);
      Value tree = tree_of(group.rank(), false);
      load(tree, path, group);
    });
    expect_whole(Checkpoint::open(path).load(), false);
    EXPECT_TRUE(verify(path).findings.empty());
    EXPECT_TRUE(std::filesystem::is_symlink(link));
  }
}

TEST(FilePlan, FilesThatNobodyPlannedHaveNoSize) {
  FilePlan each(4, 2, {.most = 3, .one_an_item = true});
  EXPECT_EQ(each.place(5, 100, 7).file, 0);
  const ItemPlace second = each.place(5, 200, 0);
  EXPECT_EQ(std::tuple(second.file, second.offset, second.length), std::tuple(1, 0U, 200U));
  EXPECT_EQ(each.files_of(4), 0);
  EXPECT_EQ(each.files_of(5), 2);
  EXPECT_EQ(each.size_of(5, 1), 200 + tail_size(200, 1));
  EXPECT_EQ(each.size_of(5, 2), 0U);
  EXPECT_EQ(each.size_of(4, 0), 0U);
  FilePlan shared(0, 2, {.most = 2});
  for (int i = 0; i < 3; ++i) shared.place(0, 100, 8);
  shared.place(1, 50, 8);
  EXPECT_EQ(shared.size_of(0, 0), 200 + tail_size(200, 2));
  EXPECT_EQ(shared.size_of(0, 2), 0U);  // and not the size of rank 1's first
  EXPECT_EQ(shared.size_of(1, -1), 0U);
}

}  // namespace
}  // namespace tessera
