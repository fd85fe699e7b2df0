// Functions of a save: names, dtypes, and who writes (checkpoint-rows P-20).
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>

#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/save/testing.h"
#include "checkpoint/test_support.h"
#include "layout/boxes.h"
#include "tessera/data_files.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int kRanks = 4;
const Shape kHooked{8, 3};

// Rank `rank`'s part; element i is `first + i`.
Tensor placed(const Placement& placement, int rank, float first) {
  Tensor tensor = counting(kHooked, whole(kHooked), first, false);
  tensor.pieces.clear();
  for (const Box& box : boxes_of_part(placement, kHooked, part_of_rank(placement, rank)))
    tensor.pieces.push_back(counting(kHooked, box, first).pieces.at(0));
  tensor.sharded = placement.parts > 1;
  tensor.placement = placement;
  return tensor;
}

// "whole" on all ranks, "halves" on two each; "told" is like it, but without a placement.
Value hooked_tree(int rank) {
  Tensor told = placed({.parts = 2}, rank, 0.5F);
  told.placement.reset();
  return Value::dict({{"model", Value::dict({{"whole", placed({}, rank, 0.1F)},
                                             {"halves", placed({.parts = 2}, rank, 0.3F)}})},
                      {"told", told},
                      {"step", 7}});
}

Value all_of_tree() {
  Value tree = hooked_tree(0);
  tree["model"].set_item("halves", counting(kHooked, whole(kHooked), 0.3F));
  tree.set_item("told", counting(kHooked, whole(kHooked), 0.5F));
  return tree;
}

std::vector<std::string> files_in(const std::string& directory) {
  std::vector<std::string> names;
  if (!std::filesystem::exists(directory)) return names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().filename());
  return names;
}

using OptionsOf = std::function<SaveOptions(int rank)>;
void save_by_ranks(const std::string& directory, const OptionsOf& options) {
  run_ranks(kRanks, [&](Group& group) {
    save(hooked_tree(group.rank()), directory, options(group.rank()), group);
  });
}

// The code and text that all ranks got of a save that wrote nothing.
Error refusal(const OptionsOf& options) {
  const std::string directory = temporary_directory() + "/c";
  std::vector<std::optional<Error>> errors(kRanks);
  run_ranks(kRanks, [&](Group& group) {
    try {
      save(hooked_tree(group.rank()), directory, options(group.rank()), group);
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(group.rank())] = error;
    }
  });
  EXPECT_TRUE(files_in(directory).empty());
  for (const auto& error : errors) {
    if (!error) throw std::runtime_error("a rank saved");
    EXPECT_EQ(error->code(), errors[0]->code());
  }
  return *errors[0];
}

std::string prefixed(const std::string& key) {
  return key == "step" ? "trainer.steps" : "net." + key;
}

TEST(SaveHooks, LeavesGetTheNamesThatTheFunctionGives) {
  const std::string directory = temporary_directory() + "/c";
  save_by_ranks(directory, [](int) { return SaveOptions{.name = prefixed}; });
  const Value loaded = Checkpoint::open(directory).load();
  EXPECT_EQ(loaded.at("trainer.steps").as_int(), 7);  // new between the steps that stay: one key
  EXPECT_EQ(floats(loaded.at("net").at("model").at("halves").as_tensor()),
            floats(all_of_tree().at("model").at("halves").as_tensor()));
  EXPECT_THAT(Checkpoint::open(directory).names(),
              ElementsAre("net.model.halves", "net.model.whole", "net.told"));
  // A tree with the names of before finds them by the same function.
  Value tree = hooked_tree(0);
  LoadOptions options;
  options.rename = prefixed;
  load(tree, directory, options);
  EXPECT_TRUE(verify(directory).findings.empty());
}

TEST(SaveHooks, NamesThatCollideAreAConflict) {
  const Error error = refusal([](int) {
    return SaveOptions{.name = [](const std::string& key) {
      return key.starts_with("model.") ? "model.same" : key;
    }};
  });
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("'model.whole'"), HasSubstr("'model.halves'"),
                                  HasSubstr("model.same")));
  EXPECT_EQ(refusal([](int rank) {
              SaveOptions options;  // one rank is enough
              if (rank == 2) options.name = [](const std::string&) { return std::string(); };
              return options;
            }).code(),
            ErrorCode::conflict);
}

// Ranks whose functions differ have different trees: a part of "halves" is then missing under each
// name, and what is whole gets both names.
TEST(SaveHooks, NamesThatDifferAreLeavesThatDiffer) {
  const auto other_on_rank_1 = [](const char* key) {
    return [key](int rank) {
      SaveOptions options;
      if (rank == 1)
        options.name = [key](const std::string& name) { return name == key ? "other" : name; };
      return options;
    };
  };
  const std::string directory = temporary_directory() + "/c";
  save_by_ranks(directory, other_on_rank_1("model.whole"));
  const Value loaded = Checkpoint::open(directory).load();
  EXPECT_EQ(floats(loaded.at("other").as_tensor()),
            floats(loaded.at("model").at("whole").as_tensor()));
  EXPECT_EQ(refusal(other_on_rank_1("told")).code(), ErrorCode::incomplete);
  EXPECT_EQ(refusal([&](int rank) {
              SaveOptions options = other_on_rank_1("model.whole")(rank);
              options.same_keys = true;
              return options;
            }).code(),
            ErrorCode::mismatch);
}

DType bfloat16_weights(const std::string& key, const Tensor& tensor) {
  return key.starts_with("model.") ? DType::bfloat16 : tensor.dtype;
}

// Rounded as torch does: by the functions of loads.
TEST(SaveHooks, TensorsAreSavedAsTheTypeThatTheFunctionGives) {
  for (const Compression compression : {Compression::none, Compression::zstd}) {
    const std::string directory = temporary_directory() + "/c";
    save_by_ranks(directory, [&](int) {
      return SaveOptions{.compression = compression, .dtype = bfloat16_weights};
    });
    const Checkpoint checkpoint = Checkpoint::open(directory);
    EXPECT_TRUE(verify(directory).findings.empty());
    EXPECT_EQ(checkpoint.tensor("told").dtype, DType::float32);
    for (const auto& [name, first] : {std::pair("model.whole", 0.1F), {"model.halves", 0.3F}}) {
      EXPECT_EQ(checkpoint.tensor(name).dtype, DType::bfloat16);
      std::vector<std::uint16_t> found(24), expected(24);
      checkpoint.read(name, TensorView::of(found.data(), DType::bfloat16, kHooked));
      // The reference: the same tensor saved as it is, and converted as it is read.
      const std::string plain = temporary_directory() + "/c";
      save(Value::dict({{"w", counting(kHooked, whole(kHooked), first)}}), plain);
      Checkpoint::open(plain).read("w", TensorView::of(expected.data(), DType::bfloat16, kHooked));
      EXPECT_EQ(found, expected) << name;
    }
  }
  // The tree that was saved is as it was.
  const Value tree = all_of_tree();
  save(tree, temporary_directory() + "/c",
       {.dtype = [](const auto&, const auto&) { return DType::float64; }}, *solo_group());
  EXPECT_EQ(tree.at("told").as_tensor().dtype, DType::float32);
}

TEST(SaveHooks, TypesThatDoNotFitAreRefused) {
  const auto refused = [](DType from, DType to, bool on_all) {
    const std::string directory = temporary_directory() + "/c";
    std::vector<ErrorCode> codes(2);
    run_ranks(2, [&](Group& group) {
      Tensor tensor = counting({4}, whole({4}), 1);
      tensor.sharded = false;
      tensor.dtype = from;
      SaveOptions options;
      if (on_all || group.rank() == 1)
        options.dtype = [to](const std::string&, const Tensor&) { return to; };
      codes[static_cast<std::size_t>(group.rank())] = code_of([&] {
        save(Value::dict({{"w", tensor}}), directory, options, group);
      });
    });
    EXPECT_TRUE(files_in(directory).empty());
    EXPECT_EQ(codes[0], codes[1]);
    return codes[0];
  };
  EXPECT_EQ(refused(DType::float32, DType::int32, true), ErrorCode::invalid_argument);
  EXPECT_EQ(refused(DType::float32, DType::float8_e4m3fn, true), ErrorCode::unsupported);
  EXPECT_EQ(refused(DType::int32, DType::int16, true), ErrorCode::invalid_argument);
  // One rank alone converts: then ranks do not agree on what the tensor is.
  EXPECT_EQ(refused(DType::float32, DType::bfloat16, false), ErrorCode::mismatch);
}

TEST(SaveHooks, AnIntegerTensorMayBecomeAFloatingOne) {
  Tensor tensor = counting({4}, whole({4}), 1);
  tensor.dtype = DType::int32;
  auto* numbers = reinterpret_cast<std::int32_t*>(tensor.pieces.at(0).storage->data);
  for (int i = 0; i < 4; ++i) numbers[i] = i - 2;
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"w", tensor}}), directory,
       {.dtype = [](const std::string&, const Tensor&) { return DType::float32; }});
  EXPECT_THAT(floats(Checkpoint::open(directory).load().at("w").as_tensor()),
              ElementsAre(-2, -1, 0, 1));
}

// The last of the holders, but of the second half of "halves" the first.
int choose(const std::string& key, std::span<const int> holders) {
  return key == "model.halves" && holders.front() == 1 ? holders.front() : holders.back();
}

TEST(SaveHooks, TheFunctionSaysWhoWrites) {
  using Writers = std::map<std::string, std::vector<char>>;
  const Writers expected{
      {"model.whole", {'3'}}, {"model.halves", {'2', '1'}}, {"told", {'2', '3'}}};
  const auto check = [&](const OptionsOf& options) {
    const std::string directory = temporary_directory() + "/c";
    save_by_ranks(directory, options);
    EXPECT_EQ(writers_in(directory), expected);
    EXPECT_TRUE(verify(directory).findings.empty());
    const Value loaded = Checkpoint::open(directory).load();
    EXPECT_EQ(floats(loaded.at("model").at("halves").as_tensor()),
              floats(all_of_tree().at("model").at("halves").as_tensor()));
  };
  check([](int) { return SaveOptions{.writer = choose}; });
  check([](int) { return SaveOptions{.one_file_an_item = true, .writer = choose}; });
  // Rank 0's function counts where ranks choose differently, also for placed tensors.
  check([](int rank) { return rank == 0 ? SaveOptions{.writer = choose} : SaveOptions{}; });
  check([](int rank) {
    SaveOptions options{.writer = choose};
    if (rank == 3)
      options.writer = [](const std::string&, std::span<const int> ranks) { return ranks[0]; };
    return options;
  });
  // And if it has none, the rule of `replicas`.
  const std::string directory = temporary_directory() + "/c";
  save_by_ranks(directory, [](int rank) {
    SaveOptions options{.replicas = ReplicaWriter::lowest_rank};
    if (rank > 0) options.writer = choose;
    return options;
  });
  EXPECT_EQ(writers_in(directory),
            (Writers{{"model.whole", {'0'}}, {"model.halves", {'0', '1'}}, {"told", {'0', '1'}}}));
}

// The function is asked for parts that several ranks hold, with all of these.
TEST(SaveHooks, WritersAreChosenAmongTheHolders) {
  std::mutex mutex;
  std::map<std::string, std::set<std::vector<int>>> asked;
  const std::string directory = temporary_directory() + "/c";
  run_ranks(kRanks, [&](Group& group) {
    Value tree = hooked_tree(group.rank());
    tree.set_item("mine", placed({.parts = kRanks}, group.rank(), 1));
    SaveOptions options;
    options.writer = [&](const std::string& key, std::span<const int> holders) {
      const std::lock_guard lock(mutex);
      asked[key].insert({holders.begin(), holders.end()});
      return holders.front();
    };
    save(tree, directory, options, group);
  });
  using Holders = std::set<std::vector<int>>;
  EXPECT_EQ(asked, (std::map<std::string, Holders>{{"model.whole", {{0, 1, 2, 3}}},
                                                   {"model.halves", {{0, 2}, {1, 3}}},
                                                   {"told", {{0, 2}, {1, 3}}}}));
}

TEST(SaveHooks, AWriterThatDoesNotHoldThePartIsRefused) {
  for (const char* key : {"model.halves", "told"}) {  // placed, told
    const Error error = refusal([key](int) {
      return SaveOptions{.writer = [key](const std::string& name, std::span<const int> holders) {
        return name == key ? 3 - holders.front() : holders.front();
      }};
    });
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(key), HasSubstr("rank 3"), HasSubstr("rank 0")));
  }
}

TEST(SaveHooks, OfAPartWithoutCollectives) {
  const std::string directory = temporary_directory() + "/c";
  for (int rank = 0; rank < kRanks; ++rank)
    save_part(hooked_tree(rank), directory, rank,
              {.name = prefixed,
               .dtype = [](const std::string&, const Tensor&) { return DType::float64; }});
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.tensor("net.model.halves").dtype, DType::float64);
  std::vector<float> found(24);
  checkpoint.read("net.model.halves", TensorView::of(found.data(), DType::float32, kHooked));
  EXPECT_EQ(found, floats(all_of_tree().at("model").at("halves").as_tensor()));
}

TEST(SaveHooks, ASingleFileHasNeither) {
  const std::string path = temporary_directory() + "/a.pt";
  EXPECT_EQ(code_of([&] { save(all_of_tree(), path, {.name = prefixed}); }),
            ErrorCode::unsupported);
  EXPECT_EQ(code_of([&] { save(all_of_tree(), path, {.dtype = bfloat16_weights}); }),
            ErrorCode::unsupported);
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace tessera
