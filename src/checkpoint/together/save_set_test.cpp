// Sets of safetensors saved by N ranks: the files are those that a conversion writes, byte for byte
// (checkpoint-rows P-26).
#include <gtest/gtest.h>

#include <map>
#include <span>

#include "checkpoint/test_support.h"
#include "layout/boxes.h"
#include "tessera/save_options.h"

namespace tessera {
namespace {

using namespace testing_support;

struct SetTensor {
  const char* name;
  Shape shape;
  Placement placement;  // with three ranks
};

// Rows, a flat parameter's members, tensors that some ranks have nothing of, a scalar, one without
// elements, one that all ranks hold.
std::vector<SetTensor> set_tensors() {
  return {{"a.weight", {7, 3}, {.parts = 3}},
          {"a.bias", {2}, {.parts = 3}},
          {"b.weight", {5, 4}, {3, 1, 0, 9, 3}},
          {"b.bias", {4}, {3, 1, 0, 9, 23}},
          {"step", {}, {}},
          {"none", {0, 3}, {}},
          {"whole", {3, 2}, {}},
          {"large", {700, 1024}, {.parts = 3}}};
}

// Element i is `first + i`. Ranks: 1 holds all.
Tensor set_tensor(const SetTensor& of, float first, int rank, int ranks) {
  const Placement placement = ranks == 1 ? Placement() : of.placement;
  Tensor tensor;
  tensor.shape = of.shape;
  tensor.sharded = placement.parts > 1;
  tensor.placement = placement;
  for (const Box& box : boxes_of_part(placement, of.shape, part_of_rank(placement, rank))) {
    Piece piece{box, memory(static_cast<std::size_t>(numel(box)) * 4), 0, {}, rank};
    const RunSequence runs(box, of.shape);
    for (std::int64_t r = 0; r < runs.size(); ++r) {
      for (std::int64_t i = 0; i < runs[r].count; ++i) {
        const float value = first + static_cast<float>(runs[r].global + i);
        std::memcpy(piece.storage->data + (runs[r].local + i) * 4, &value, 4);
      }
    }
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

Value set_of(int rank, int ranks) {
  Value tree = Value::dict({}, DictKind::ordered_dict);
  float first = 0;
  for (const SetTensor& of : set_tensors())
    tree.set_item(of.name, set_tensor(of, first += 1000, rank, ranks));
  return tree;
}

SaveOptions set_options(const SafetensorsSet& set) {
  SaveOptions options;
  options.kind = CheckpointKind::safetensors;
  options.safetensors = set;
  return options;
}

void save_set(int ranks, const Location& where, const SaveOptions& options) {
  run_ranks(ranks, [&](Group& group) { save(set_of(group.rank(), ranks), where, options, group); });
}

std::map<std::string, std::vector<std::byte>> set_files(const Store& store,
                                                        const std::string& directory = "") {
  std::map<std::string, std::vector<std::byte>> files;
  for (const ObjectInfo& object : store.list(directory))
    files.emplace(object.name, read_all(*store.open(object.name), 1 << 24));
  return files;
}

// Each tensor in the file of this number.
std::map<std::string, int> numbers(std::vector<int> files) {
  std::map<std::string, int> map;
  for (std::size_t i = 0; i < files.size(); ++i) map.emplace(set_tensors()[i].name, files[i]);
  return map;
}

TEST(SaveSet, FilesAreThoseOfAConversion_P26) {
  const std::string whole = temporary_directory() + "/whole.pt";
  save(set_of(0, 1), whole);
  const std::vector<SafetensorsSet> sets = {
      {},
      {.file_of = {}, .max_size = 100},
      {.file_of = {}, .max_size = 1000},
      {.file_of = numbers({1, 1, 1, 1, 1, 1, 1, 1}), .max_size = 0},
      {.file_of = numbers({2, 5, 2, 1, 2, 1, 5, 2}), .max_size = 0}};  // 3 and 4 have none
  for (const SafetensorsSet& set : sets) {
    SCOPED_TRACE(std::to_string(set.max_size) + ", " + std::to_string(set.file_of.size()));
    ConvertOptions how;
    how.to = CheckpointKind::safetensors;
    how.max_shard_size = set.max_size;
    how.file_of = set.file_of;
    const std::string converted = temporary_directory() + "/converted/";  // also of one file
    convert(whole, converted, how);
    for (const int ranks : {1, 3}) {
      const std::string saved = temporary_directory() + "/saved";
      save_set(ranks, saved, set_options(set));
      auto expected = set_files(*posix_store(converted));
      expected.erase("tessera-digests.json");  // beside the files of a set, which have their own
      EXPECT_TRUE(set_files(*posix_store(saved)) == expected);
      EXPECT_TRUE(verify(saved).findings.empty());
      EXPECT_TRUE(diff(Checkpoint::open(saved), Checkpoint::open(whole)).empty());
    }
  }
}

// 47, 3.2: what a hub wants comes out of one save.
TEST(SaveSet, HasTheNamesAndTypesThatItsFunctionsGive_P26) {
  const std::string whole = temporary_directory() + "/whole.pt";
  save(set_of(0, 1), whole);
  ConvertOptions how;
  how.to = CheckpointKind::safetensors;
  how.max_shard_size = 600;
  how.rename = {"^=>model."};
  how.dtype = DType::bfloat16;
  const std::string converted = temporary_directory() + "/converted/";
  convert(whole, converted, how);
  SaveOptions options = set_options({.file_of = {}, .max_size = 600});
  options.name = [](const std::string& key) { return "model." + key; };
  options.dtype = [](const std::string&, const Tensor&) { return DType::bfloat16; };
  for (const int ranks : {1, 3}) {
    const std::string saved = temporary_directory() + "/saved";
    save_set(ranks, saved, options);
    auto expected = set_files(*posix_store(converted));
    expected.erase("tessera-digests.json");
    EXPECT_TRUE(set_files(*posix_store(saved)) == expected) << ranks;
    EXPECT_TRUE(verify(saved).findings.empty());
  }
  options.name = [](const std::string&) { return std::string("one"); };
  EXPECT_EQ(code_of([&] { save_set(3, temporary_directory() + "/none", options); }),
            ErrorCode::conflict);
  options.name = {};
  options.writer = [](const std::string&, std::span<const int> holders) { return holders[0]; };
  EXPECT_EQ(code_of([&] { save_set(3, temporary_directory() + "/none", options); }),
            ErrorCode::unsupported);
}

TEST(SaveSet, NamesFollowTheLargestNumber_P26) {
  const std::string saved = temporary_directory() + "/saved";
  save_set(3, saved, set_options({.file_of = numbers({2, 4, 2, 2, 2, 2, 4, 2}), .max_size = 0}));
  std::vector<std::string> names;
  for (const ObjectInfo& file : posix_store(saved)->list()) names.push_back(file.name);
  std::ranges::sort(names);
  EXPECT_EQ(names, (std::vector<std::string>{"model-00002-of-00004.safetensors",
                                             "model-00004-of-00004.safetensors",
                                             "model.safetensors.index.json"}));
}

TEST(SaveSet, InAStore_P26) {
  const auto store = memory_store();
  const SaveOptions options = set_options({.file_of = {}, .max_size = 100});
  save_set(3, Location(store, "set"), options);
  const auto saved = set_files(*store, "set");
  EXPECT_TRUE(saved.contains("set/model.safetensors.index.json"));
  EXPECT_EQ(code_of([&] { save_set(3, Location(store, "set"), options); }),
            ErrorCode::already_exists);
  EXPECT_EQ(set_files(*store), saved);  // and nothing else
}

TEST(SaveSet, IsLoadedByOtherRanks_P26) {
  const std::string saved = temporary_directory() + "/saved";
  save_set(3, saved, set_options({.file_of = {}, .max_size = 100}));
  Value tree = set_of(0, 1);
  for (const auto& [name, value] : tree.pairs()) {
    const auto& storage =
        value.as_tensor().pieces.empty() ? nullptr : value.as_tensor().pieces[0].storage;
    if (storage) std::memset(storage->data, 0, storage->size);
  }
  load(tree, saved);
  EXPECT_EQ(floats(tree.at("b.weight").as_tensor()),
            floats(set_of(0, 1).at("b.weight").as_tensor()));
}

TEST(SaveSet, MapsHaveANumberForEachTensor_P26) {
  const std::string saved = temporary_directory() + "/saved";
  const auto code_with = [&](const SafetensorsSet& set) {
    return code_of([&] { save_set(3, saved, set_options(set)); });
  };
  EXPECT_EQ(code_with({.file_of = numbers({1, 1, 1}), .max_size = 0}), ErrorCode::invalid_argument);
  EXPECT_EQ(code_with({.file_of = numbers({1, 1, 1, 1, 1, 1, 1, 0}), .max_size = 0}),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_with({.file_of = numbers({1, 1, 1, 1, 1, 1, 1, 100000}), .max_size = 0}),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_with({.file_of = numbers({1, 1, 1, 1, 1, 1, 1, 1}), .max_size = 5}),
            ErrorCode::invalid_argument);
  EXPECT_TRUE(std::filesystem::is_empty(std::filesystem::path(saved).parent_path()));
}

TEST(SaveSet, RanksHaveOneMap_P26) {
  const std::string saved = temporary_directory() + "/saved";
  const auto differing = [&](Group& group) {
    SafetensorsSet set;
    set.max_size = group.rank() == 1 ? 100 : 1000;
    save(set_of(group.rank(), 3), saved, set_options(set), group);
  };
  EXPECT_EQ(code_of([&] { run_ranks(3, differing); }), ErrorCode::mismatch);
  EXPECT_TRUE(std::filesystem::is_empty(std::filesystem::path(saved).parent_path()));
}

TEST(SaveSet, IsADirectoryOfTensorsAlone_P26) {
  const std::string directory = temporary_directory();
  const SaveOptions options = set_options({});
  EXPECT_EQ(code_of([&] { save_set(1, directory + "/a.safetensors", options); }),
            ErrorCode::invalid_argument);
  SaveOptions dcp = options;
  dcp.kind.reset();
  EXPECT_EQ(code_of([&] { save_set(1, directory + "/a", dcp); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] {
              save(Value::dict({{"epoch", 3}}), directory + "/a", options);
            }),
            ErrorCode::unsupported);
  EXPECT_TRUE(std::filesystem::is_empty(directory));
}

}  // namespace
}  // namespace tessera
