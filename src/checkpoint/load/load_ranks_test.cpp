// What ranks of one load ask the store for, and that all of them load one save.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/test_support.h"
#include "comm/host_copy.h"
#include "conformance/forwarding_store.h"

namespace tessera {
namespace {

using namespace testing_support;

// Counts what is asked of a store.
class CountedStore final : public testing_support::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    ++lists;
    return inner().list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    ++lists;
    return inner().list_level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    ++looks;
    return inner().exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const std::lock_guard lock(mutex_);
    ++opened[std::string(name)];
    return inner().open(name);
  }

  mutable std::atomic<int> lists = 0, looks = 0;
  mutable std::map<std::string, int> opened;  // how often, by name

 private:
  mutable std::mutex mutex_;
};

// A rank's rows of "w" and a value.
Value part(int rank, int ranks, bool fill, std::int64_t rows = 16) {
  const Shape shape{rows, 4};
  return Value::dict(
      {{"w", Value(counting(shape, chunk(shape, rank, ranks), 0, fill))}, {"n", fill ? 7 : 0}});
}

std::shared_ptr<Store> saved(int ranks) {
  auto store = memory_store("saved");
  SaveOptions options;
  options.threads = 1;
  run_ranks(ranks,
            [&](Group& group) { save(part(group.rank(), ranks, true), store, options, group); });
  return store;
}

void expect_filled(const Value& tree, int rank, int ranks) {
  EXPECT_EQ(floats(tree.at("w").as_tensor()), floats(part(rank, ranks, true).at("w").as_tensor()));
  EXPECT_EQ(tree.at("n").as_int(), 7);
}

// The files that a rank may open if each of `writers` ranks has saved its rows.
std::set<int> writers_of(int rank, int ranks, int writers) {
  const Box mine = chunk({16, 4}, rank, ranks);
  std::set<int> found;
  for (int writer = 0; writer < writers; ++writer) {
    if (common_box(mine, chunk({16, 4}, writer, writers))) found.insert(writer);
  }
  return found;
}

int writer_of(const std::string& file) {
  return std::stoi(file.substr(2));
}

// The store answers as often as there are files, not for each rank and file.
TEST(LoadRanks, RankZeroOpensAndTheOthersReadTheFilesThatTheyNeed) {
  for (const int writers : {2, 8}) {
    const std::shared_ptr<Store> store = saved(writers);
    for (const int ranks : {2, 8}) {
      std::atomic<int> checked = 0;
      run_ranks(ranks, [&](Group& group) {
        const auto counted = std::make_shared<CountedStore>(store);
        Value tree = part(group.rank(), ranks, false);
        load(tree, counted, group);
        expect_filled(tree, group.rank(), ranks);
        EXPECT_LE(counted->lists, group.rank() == 0 ? 2 : 0);
        EXPECT_LE(counted->looks, group.rank() == 0 ? 3 : 0);
        std::set<int> read;
        for (const auto& [name, times] : counted->opened) {
          if (!name.ends_with(".distcp")) {
            EXPECT_EQ(group.rank(), 0) << name;
            continue;
          }
          read.insert(writer_of(name));
          EXPECT_LE(times, group.rank() == 0 ? 2 : 1) << name;
        }
        if (group.rank() > 0) {
          EXPECT_EQ(read, writers_of(group.rank(), ranks, writers));
        }
        ++checked;
      });
      EXPECT_EQ(checked, ranks);
    }
  }
}

// Rank 1 wants a value, the others a tensor.
TEST(LoadRanks, OfOtherKindsRankZeroAloneLooksIntoTheStore) {
  const auto store = memory_store("saved");
  const Shape shape{1 << 20};  // files of more than what is read to open them
  const Value all = Value::dict({{"a", Value(counting(shape, whole(shape), 1))},
                                 {"b", Value(counting(shape, whole(shape), 2))},
                                 {"n", 5}});
  save(all, {store, "c.pt"});
  save(all, {store, "c.safetensors"});
  const std::string set = temporary_directory() + "/set";
  ConvertOptions options;
  options.to = CheckpointKind::safetensors;
  options.max_shard_size = 5 << 20;
  convert({store, "c.safetensors"}, set, options);
  struct Case {
    Location where;
    std::set<std::string> read;  // by rank 2
  };
  const std::vector<Case> cases = {{{store, "c.pt"}, {"c.pt"}},
                                   {{store, "c.safetensors"}, {"c.safetensors"}},
                                   {posix_store(set), {"model-00002-of-00002.safetensors"}}};
  for (const Case& each : cases) {
    std::atomic<int> good = 0;
    run_ranks(3, [&](Group& group) {
      const auto counted = std::make_shared<CountedStore>(each.where.store);
      Value tree = Value::dict();
      if (group.rank() != 1) tree.set_item("b", Value(counting(shape, whole(shape), 0, false)));
      if (group.rank() == 1) tree.set_item("n", 0);
      load(tree, {counted, each.where.name}, group);
      if (group.rank() == 1) {
        EXPECT_EQ(tree.at("n").as_int(), 5);
      } else {
        EXPECT_TRUE(floats(tree.at("b").as_tensor()) == floats(all.at("b").as_tensor()));
      }
      if (group.rank() > 0) {
        EXPECT_EQ(counted->lists + counted->looks, 0);
        std::set<std::string> read;
        for (const auto& [name, times] : counted->opened) read.insert(name);
        EXPECT_EQ(read, group.rank() == 1 ? std::set<std::string>() : each.read);
      }
      ++good;
    });
    EXPECT_EQ(good, 3);
  }
}

// C04: some ranks would load the old save, and some the new one.
TEST(LoadRanks, OfACheckpointThatIsReplacedAllLoadOneSave) {
  const std::string directory = temporary_directory() + "/c";
  const auto filled = [](float first) {
    return Value::dict({{"w", Value(counting({6}, whole({6}), first))}});
  };
  save(filled(100), directory);
  std::atomic<int> loaded = 0;
  run_ranks(3, [&](Group& group) {
    LoadOptions options;
    options.events = [&](const Event& event) {
      if (event.rank != 0 || event.phase != "open") return;
      SaveOptions over;
      over.overwrite = true;
      save(filled(200), directory, over);
    };
    Value tree = filled(0);
    load(tree, directory, options, group);
    EXPECT_EQ(floats(tree.at("w").as_tensor()), floats(filled(100).at("w").as_tensor()));
    ++loaded;
  });
  EXPECT_EQ(loaded, 3);
  Value tree = filled(0);
  load(tree, directory);
  EXPECT_EQ(floats(tree.at("w").as_tensor()), floats(filled(200).at("w").as_tensor()));
}

// Rank r looks into `directories[r]`, for what the first of them has.
void expect_conflict(const std::vector<std::string>& directories) {
  std::atomic<int> refused = 0;
  run_ranks(static_cast<int>(directories.size()), [&](Group& group) {
    Value tree = Checkpoint::open(directories[0]).load();
    const std::string& directory = directories[static_cast<std::size_t>(group.rank())];
    if (code_of([&] { load(tree, directory, group); }) == ErrorCode::conflict) ++refused;
  });
  EXPECT_EQ(refused, static_cast<int>(directories.size()));
}

TEST(LoadRanks, DifferentSavesAreAConflict) {
  const std::string directory = temporary_directory();
  for (const char* name : {"/0", "/1"}) save(part(0, 1, true), directory + name);
  expect_conflict({directory + "/0", directory + "/1"});
  std::atomic<int> unchanged = 0;
  run_ranks(2, [&](Group& group) {
    Value tree = part(0, 1, false);
    EXPECT_EQ(code_of([&] { load(tree, directory + "/" + std::to_string(group.rank()), group); }),
              ErrorCode::conflict);
    if (floats(tree.at("w").as_tensor()) == floats(part(0, 1, false).at("w").as_tensor()))
      ++unchanged;
  });
  EXPECT_EQ(unchanged, 2);
}

// PyTorch gives the data files of every save the same names, and has no digests.
TEST(LoadRanks, DifferentSavesOfPyTorchAreAConflict) {
  const std::string first = copy_of(kGolden + "checkpoints/c2");
  const std::string second = copy_of(kGolden + "checkpoints/c2");
  std::atomic<int> loaded = 0;
  run_ranks(2, [&](Group& group) {
    Value tree = Checkpoint::open(first).load();
    load(tree, group.rank() == 0 ? first : second, group);  // copies on disks of their own are one
    ++loaded;
  });
  EXPECT_EQ(loaded, 2);
  std::string id = Checkpoint::open(second).save_id;
  const std::string before = id;
  id[0] = id[0] == 'a' ? 'b' : 'a';
  patch(second + "/.metadata", before, id);
  expect_conflict({first, second});
}

// Each rank has a copy of one file, of which nothing has digests.
TEST(LoadRanks, CopiesOfOneFileThatDifferAreAConflict) {
  const std::string directory = temporary_directory();
  const auto file = [&](int rank, const char* name = "a.safetensors") {
    return directory + "/" + std::to_string(rank) + "/" + name;
  };
  for (const int rank : {0, 1}) {
    std::filesystem::create_directories(directory + "/" + std::to_string(rank));
    for (const char* name : {"a.safetensors", "b.safetensors"})
      std::filesystem::copy_file(kGolden + "dtypes.safetensors", file(rank, name));
  }
  const auto codes = [&](const std::string& of_first, const std::string& of_second) {
    std::vector<std::optional<ErrorCode>> found(2);
    run_ranks(2, [&](Group& group) {
      Value tree = Checkpoint::open(file(0)).load();
      try {
        load(tree, group.rank() == 0 ? of_first : of_second, group);
      } catch (const Error& error) {
        found[static_cast<std::size_t>(group.rank())] = error.code();
      }
    });
    return found;
  };
  using testing::Each;
  EXPECT_THAT(codes(file(0), file(1)), Each(std::nullopt));
  EXPECT_THAT(codes(file(0), file(1, "b.safetensors")), Each(ErrorCode::mismatch));
  EXPECT_THAT(codes(file(0), directory + "/1"), Each(ErrorCode::mismatch));
  std::filesystem::resize_file(file(1), std::filesystem::file_size(file(1)) - 1);
  std::ofstream(file(1), std::ios::binary | std::ios::app).put('!');
  EXPECT_THAT(codes(file(0), file(1)), Each(ErrorCode::conflict));
}

// So many names are more than what every rank gets a copy of.
TEST(LoadRanks, ALargeCatalogIsSharedOnAHost) {
  constexpr int kTensors = 20'000;
  const auto tensors = [](float first) {
    Value tree = Value::dict();
    for (int i = 0; i < kTensors; ++i) {
      const std::string name = "some.name.that.takes.a.few.bytes." + std::to_string(i);
      tree.set_item(
          name, Value(counting({2}, whole({2}), first == 0 ? 0 : first + float(i), first != 0)));
    }
    return tree;
  };
  const auto store = memory_store("saved");
  const Value all = tensors(5);
  save(all, store);
  EXPECT_GT(read_catalog(store).size(), HostCopyOptions().small);
  std::atomic<int> good = 0;
  run_ranks(3, [&](Group& group) {
    Value tree = tensors(0);
    load(tree, store, group);
    for (int i = group.rank(); i < kTensors; i += 997) {
      const auto& [name, value] = tree.pairs()[static_cast<std::size_t>(i)];
      EXPECT_EQ(floats(value.as_tensor())[1], 6 + static_cast<float>(i));
    }
    ++good;
  });
  EXPECT_EQ(good, 3);
}

// Two keys of the tree for one tensor: each needs other chunks of it.
TEST(LoadRanks, SeveralKeysMayTakePartsOfOneTensor) {
  const std::shared_ptr<Store> store = saved(4);
  run_ranks(2, [&](Group& group) {
    const Shape shape{16, 4};
    Value tree = Value::dict();
    for (const int from : {0, 3}) {
      const int rank = (from + group.rank()) % 4;
      tree.set_item("w" + std::to_string(from),
                    Value(counting(shape, chunk(shape, rank, 4), 0, false)));
    }
    tree.set_item("flat", Value(counting(shape, FlatRange{3, 39}, 0, false)));
    LoadOptions options;
    options.rename = [](const std::string&) { return std::string("w"); };
    load(tree, store, options, group);
    for (const auto& [name, value] : tree.pairs()) {
      const Tensor& tensor = value.as_tensor();
      EXPECT_EQ(floats(tensor), floats(counting(shape, tensor.pieces.at(0).slice, 0)));
    }
  });
}

}  // namespace
}  // namespace tessera
