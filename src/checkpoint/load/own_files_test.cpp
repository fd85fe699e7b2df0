// Ranks that restore from their own files alone (O-61, O-73), and what they find wrong with them.
#include "checkpoint/load/own_files.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "checkpoint/read/side_file.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "format/torch/torch_file.h"
#include "tessera/restore.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

struct Case {
  std::string golden;
  std::string kind;
  int ranks;
};
// The name is GoogleTest's. NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const Case& row, std::ostream* out) {
  *out << row.golden << "/" << row.kind;
}

std::string rank_file(const std::string& folder, int rank) {
  return (folder.empty() ? "rank" : folder + "/rank") + std::to_string(rank) + ".pt";
}

std::vector<std::string> files_of(const Case& row, int rank) {
  if (row.kind == "legacy") return {rank_file("", rank)};
  return {rank_file("model", rank), rank_file("optim", rank)};
}

std::string file_for_damage(const Case& row, int rank) {
  return "/" + files_of(row, rank).front();
}

// All files, as the ranks of one node see them.
std::string whole_directory(const Case& row) {
  std::string directory = copy_of(kGolden + row.golden + "/" + row.kind);
  if (row.kind == "local")
    write_text(directory + "/metadata.yaml", "world_size: " + std::to_string(row.ranks) + "\n");
  return directory;
}

// What a node has whose only rank this is.
std::string directory_of_rank(const std::string& all, const Case& row, int rank) {
  std::string directory = temporary_directory();
  std::vector<std::string> files = files_of(row, rank);
  if (row.kind == "local") files.emplace_back("metadata.yaml");
  for (const std::string& file : files) {
    const fs::path to = fs::path(directory) / file;
    fs::create_directories(to.parent_path());
    fs::copy_file(fs::path(all) / file, to);
  }
  return directory;
}

// The training state by names, whose tensors have the pieces of all ranks.
Value state_in(const std::string& all) {
  const Checkpoint named = as_training_state(Checkpoint::open(all));
  std::vector<Leaf> leaves;
  for (const Leaf& leaf : named.leaves) {
    if (!leaf.name.starts_with("train.")) leaves.push_back(leaf);
  }
  return unflatten(leaves);
}

// Memory for the pieces that this rank has saved; `all`: also for what is whole on each rank.
Value live_tree(const Value& state, int rank) {
  std::vector<Leaf> leaves = flatten(state);
  for (Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    Tensor live = leaf.value.as_tensor();
    std::erase_if(live.pieces,
                  [&](const Piece& piece) { return live.sharded && piece.rank != rank; });
    for (Piece& piece : live.pieces) {
      piece.storage = memory(static_cast<std::size_t>(numel(piece.slice)) * size_of(live.dtype));
      piece.storage_offset = 0;
      piece.strides.clear();
    }
    leaf.value = Value(std::move(live));
  }
  return unflatten(leaves);
}

// The steps of parameters of which this rank has no element are in other ranks' files alone.
void drop_steps_of_others(Value& tree) {
  for (const auto& [name, state] : tree.at("optim").at("state").pairs()) {
    if (!state.at("exp_avg").as_tensor().pieces.empty()) continue;
    Value own(state);
    Tensor& step = own["step"].as_tensor();
    step.pieces.clear();
  }
}

void expect_pieces(const Value& tree, const std::string& all) {
  const Checkpoint named = as_training_state(Checkpoint::open(all));
  for (const Leaf& leaf : flatten(tree)) {
    if (!leaf.value.is(Value::Kind::tensor)) {
      EXPECT_EQ(leaf.value, named.find(leaf.name)->value) << leaf.name;
      continue;
    }
    const Tensor& tensor = leaf.value.as_tensor();
    for (const Piece& piece : tensor.pieces) {
      std::vector<std::byte> expected(static_cast<std::size_t>(numel(piece.slice)) *
                                      size_of(tensor.dtype));
      Shape shape{numel(piece.slice)};
      if (const auto* box = std::get_if<Box>(&piece.slice)) shape = box->sizes;
      named.read(leaf.name, piece.slice, TensorView::of(expected, tensor.dtype, shape));
      EXPECT_EQ(std::memcmp(expected.data(), piece.storage->data, expected.size()), 0) << leaf.name;
    }
  }
}

struct Restored {
  bool own = false;
  LoadReport report;
};

Restored restore(Value& tree, const Location& where, Group& group) {
  auto checkpoint = GroupCheckpoint::open(where, tree.at("model"), {}, group);
  const LiveNames live = names_of(tree);
  checkpoint.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
  LoadOptions options;
  options.extra = OnDifference::report;
  return {checkpoint.is_own(), checkpoint.load(tree, options)};
}

// Notes what is opened.
class WatchedStore final : public testing_support::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    const std::lock_guard lock(mutex_);
    opened.emplace(name);
    return inner().open(name);
  }
  mutable std::set<std::string> opened;

 private:
  mutable std::mutex mutex_;
};

class OwnFiles : public ::testing::TestWithParam<Case> {};

TEST_P(OwnFiles, ANodeThatHasNoOtherFilesRestores) {
  const Case& row = GetParam();
  const std::string all = whole_directory(row);
  const Value state = state_in(all);
  std::vector<std::string> nodes;
  for (int rank = 0; rank < row.ranks; ++rank) nodes.push_back(directory_of_rank(all, row, rank));
  run_ranks(row.ranks, [&](Group& group) {
    Value tree = live_tree(state, group.rank());
    drop_steps_of_others(tree);
    const Restored restored = restore(tree, nodes[static_cast<std::size_t>(group.rank())], group);
    EXPECT_TRUE(restored.own);
    EXPECT_EQ(restored.report.extra, std::vector<std::string>());
    expect_pieces(tree, all);
  });
}

// Gives a file other content of the same form.
void change_file(const std::string& directory, const std::string& name,
                 const std::function<void(Value& tree)>& change) {
  Checkpoint held;
  held.root = torch_file::read(posix_store(directory)->open(name));
  held.leaves = leaves_of(*held.root);
  Value tree = held.load();
  change(tree);
  const fs::path path = fs::path(directory) / name;
  const std::vector<std::byte> bytes = torch_file::write(tree, path.stem().string());
  write_text(path.string(), std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

// The side file tells of files that lie on other nodes.
// Whoever begins afresh would leave behind what another node has.
TEST_P(OwnFiles, AnEmptyDiskOfRankZeroIsNoEmptyPlace) {
  const std::string all = whole_directory(GetParam());
  std::vector<std::string> disks = {temporary_directory()};
  for (int rank = 1; rank < GetParam().ranks; ++rank)
    disks.push_back(directory_of_rank(all, GetParam(), rank));
  run_ranks(GetParam().ranks, [&](Group& group) {
    const std::string& mine = disks[static_cast<std::size_t>(group.rank())];
    const Error error =
        error_of([&] { (void)GroupCheckpoint::open(mine, Value::dict(), {}, group); });
    EXPECT_FALSE(error.is_no_checkpoint()) << error.what();
  });
}

TEST_P(OwnFiles, ANodeThatHasNoOtherFilesComparesDigests) {
  const Case& row = GetParam();
  const std::string all = whole_directory(row);
  const Value state = state_in(all);
  (void)seal(all);
  const std::string side_file(kDirectorySideFile);
  std::vector<std::string> nodes;
  for (int rank = 0; rank < row.ranks; ++rank) {
    nodes.push_back(directory_of_rank(all, row, rank));
    fs::copy_file(fs::path(all) / side_file, fs::path(nodes.back()) / side_file);
  }
  const auto restore_all = [&] {
    run_ranks(row.ranks, [&](Group& group) {
      Value tree = live_tree(state, group.rank());
      drop_steps_of_others(tree);
      const Restored restored = restore(tree, nodes[static_cast<std::size_t>(group.rank())], group);
      EXPECT_TRUE(restored.own);
      EXPECT_EQ(restored.report.bytes_unchecked, 0U);
    });
  };
  restore_all();
  if (row.kind != "local") return;
  // Checksums of its own that are right, and another element.
  change_file(nodes[1], "optim/rank1.pt", [](Value& optim) {
    for (const auto& [id, entries] : optim.at("state").pairs()) {
      const Tensor& average = entries.at("exp_avg").as_tensor();
      if (numel(average.shape) > 0) average.pieces[0].storage->data[0] ^= std::byte{1};
    }
  });
  EXPECT_EQ(code_of(restore_all), ErrorCode::corrupt);
}

TEST_P(OwnFiles, EachRankOpensItsOwnFilesAlone) {
  const Case& row = GetParam();
  const std::string all = whole_directory(row);
  const Value state = state_in(all);
  run_ranks(row.ranks, [&](Group& group) {
    const auto store = std::make_shared<WatchedStore>(posix_store(all));
    Value tree = live_tree(state, group.rank());
    drop_steps_of_others(tree);
    EXPECT_TRUE(restore(tree, {store}, group).own);
    const std::vector<std::string> files = files_of(row, group.rank());
    std::set<std::string> expected(files.begin(), files.end());
    if (row.kind == "local") expected.insert("metadata.yaml");
    EXPECT_EQ(store->opened, expected);
  });
}

TEST_P(OwnFiles, OtherPiecesOnOneRankTakeTheGeneralWayOnAll) {
  const Case& row = GetParam();
  const std::string all = whole_directory(row);
  const Value state = state_in(all);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, [&](Group& group) {
      // The last rank wants what the first one has.
      const bool last = group.rank() == ranks - 1;
      Value tree = live_tree(state, last ? (row.ranks > 1 && ranks == 1 ? 1 : 0) : group.rank());
      const Restored restored = restore(tree, all, group);
      EXPECT_FALSE(restored.own);
      expect_pieces(tree, all);
    });
  }
}

void expect_failure(const Case& row, const std::string& all, const Value& state,
                    std::optional<ErrorCode> code) {
  run_ranks(row.ranks, [&](Group& group) {
    Value tree = live_tree(state, group.rank());
    drop_steps_of_others(tree);
    try {
      (void)restore(tree, all, group);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), code.value_or(error.code())) << error.what();
    }
  });
}

TEST_P(OwnFiles, DamageIsTheSameErrorOnAllRanks) {
  const Case& row = GetParam();
  const std::string all = whole_directory(row);
  const Value state = state_in(all);
  const std::string path = all + file_for_damage(row, 1);
  const std::string file = text_of(path);
  write_text(path, file.substr(0, file.size() / 2));
  expect_failure(row, all, state, std::nullopt);
  fs::remove(path);
  expect_failure(row, all, state, ErrorCode::incomplete);
  // A file of another rank.
  fs::copy_file(all + file_for_damage(row, 0), path);
  expect_failure(row, all, state, std::nullopt);
  // One bit of the elements: the archive's checksum tells.
  std::string flipped = file;
  const Value held = torch_file::read(
      memory_source({reinterpret_cast<const std::byte*>(file.data()),
                     reinterpret_cast<const std::byte*>(file.data()) + file.size()},
                    "f"));
  const Checkpoint whole_state = Checkpoint::open(kGolden + row.golden + "/" + row.kind);
  std::optional<std::uint64_t> at;
  for (const Leaf& leaf : whole_state.leaves) {
    if (!leaf.name.starts_with("model.") || !leaf.value.is(Value::Kind::tensor)) continue;
    for (const Piece& piece : leaf.value.as_tensor().pieces) {
      if (piece.rank == 1 && numel(piece.slice) > 0)
        at = piece.storage->offset + static_cast<std::uint64_t>(piece.storage_offset) * 4;
    }
  }
  ASSERT_TRUE(at.has_value());
  flipped[static_cast<std::size_t>(*at)] ^= 1;
  write_text(path, flipped);
  expect_failure(row, all, state, ErrorCode::corrupt);
}

INSTANTIATE_TEST_SUITE_P(Golden, OwnFiles,
                         ::testing::Values(Case{"fsdp1_uop0_ws2", "local", 2},
                                           Case{"fsdp1_uop1_ws2", "local", 2},
                                           Case{"fsdp1_uop1_ws4", "local", 4},
                                           Case{"fsdp1_uop0_ws2", "legacy", 2},
                                           Case{"fsdp1_uop1_ws4", "legacy", 4}));

// A rank's file from another step: its optimizer counts other steps.
TEST(OwnFilesOfSteps, FilesOfDifferentSavesAreRefused) {
  const Case row{"fsdp1_uop1_ws2", "local", 2};
  const std::string all = whole_directory(row);
  const Value state = state_in(all);
  change_file(all, "optim/rank1.pt", [](Value& optim) {
    Value(optim.at("param_groups").items()[0]).set_item("lr", 0.25);
  });
  expect_failure(row, all, state, ErrorCode::mismatch);
}

// Elements with all kinds of bits, NaNs among them (OQ-03).
Value odd_bits(DType dtype, const Shape& shape, unsigned seed) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  const std::size_t bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
  tensor.pieces.push_back({whole(shape), memory(bytes), 0, {}, -1});
  auto* data = reinterpret_cast<unsigned char*>(tensor.pieces[0].storage->data);
  for (std::size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<unsigned char>(i % 5 == 1 ? 0xff : seed * 31 + i * 7);
  return Value(std::move(tensor));
}

// Odd shapes, of which some ranks hold nothing.
Value odd_state(DType second) {
  Value model = Value::dict();
  Value states = Value::dict();
  Value::List names;
  unsigned seed = 0;
  for (const auto& [name, shape] : std::vector<std::pair<std::string, Shape>>{
           {"blocks.0.w", {5, 3}}, {"blocks.0.b", {1}}, {"blocks.1.w", {3, 1, 7}}, {"head", {2}}}) {
    model.set_item(name, odd_bits(DType::bfloat16, shape, ++seed));
    states.set_item(name, Value::dict({{"step", odd_bits(DType::float32, {}, 99)},
                                       {"exp_avg", odd_bits(second, shape, ++seed)}}));
    names.emplace_back(name);
  }
  const Value group = Value::dict(
      {{"lr", 0.5}, {"params", Value::list(names)}, {"param_names", Value::list(names)}});
  return Value::dict(
      {{"model", model},
       {"optim", Value::dict({{"state", states}, {"param_groups", Value::list({group})}})}});
}

void expect_restored(const std::string& where, int saved) {
  const Value state = state_in(where);
  for (int ranks = 1; ranks <= 4; ++ranks) {
    run_ranks(ranks, [&](Group& group) {
      Value tree = live_tree(state, std::min(group.rank(), saved - 1));
      if (ranks == saved) drop_steps_of_others(tree);
      EXPECT_EQ(restore(tree, where, group).own, ranks == saved);
      expect_pieces(tree, where);
    });
  }
}

TEST(OwnFilesOfAnyWorld, OddShapesTypesAndNaNsComeBack) {
  const std::string work = temporary_directory();
  save(odd_state(DType::float32), work + "/floats", *solo_group());
  save(odd_state(DType::int64), work + "/integers", *solo_group());
  ConvertOptions options;
  options.olmo.unit = "blocks.0";
  for (int saved = 1; saved <= 4; ++saved) {
    options.ranks = saved;
    const std::string name = work + "/" + std::to_string(saved);
    options.to = CheckpointKind::olmo_local;
    for (const bool aligned : {true, false}) {
      options.olmo.orig_params = aligned;
      const std::string where = name + (aligned ? "aligned" : "dense");
      (void)convert(work + "/floats", where, options);
      expect_restored(where, saved);
    }
    ConvertOptions legacy;
    legacy.to = CheckpointKind::olmo_legacy;
    legacy.ranks = saved;
    (void)convert(work + "/integers", name + "legacy", legacy);
    expect_restored(name + "legacy", saved);
  }
}

}  // namespace
}  // namespace tessera
