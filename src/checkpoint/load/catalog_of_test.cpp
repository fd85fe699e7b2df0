// What other ranks learn of a checkpoint of any kind, and how they wait for its files.
#include "checkpoint/load/catalog_of.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "base/text.h"
#include "checkpoint/load/opened.h"
#include "checkpoint/open/located.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/test_support.h"
#include "conformance/short_patience.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

const std::string kCheckpoints = std::string(TESSERA_TEST_DATA) + "/golden/checkpoints";

void expect_same(const Tensor& found, const Tensor& expected, const std::string& name) {
  EXPECT_EQ(found.requires_grad, expected.requires_grad);
  EXPECT_EQ(found.parameter, expected.parameter);
  EXPECT_EQ(found.sharded, expected.sharded);
  EXPECT_EQ(found.attributes == nullptr, expected.attributes == nullptr);
  EXPECT_EQ(digest_of_slice(found, name, whole(found.shape)),
            digest_of_slice(expected, name, whole(expected.shape)));
  ASSERT_EQ(found.pieces.size(), expected.pieces.size());
  for (std::size_t i = 0; i < found.pieces.size(); ++i) {
    const Piece& piece = found.pieces[i];
    EXPECT_EQ(piece.slice, expected.pieces[i].slice);
    EXPECT_EQ(piece.rank, expected.pieces[i].rank);
    EXPECT_EQ(piece.storage->crc32, expected.pieces[i].storage->crc32);
    const ByteSource& source = *expected.pieces[i].storage->source;
    EXPECT_EQ(piece.storage->source->name(), source.name());
    EXPECT_EQ(piece.storage->source->checked(), source.checked());
  }
}

// Around the leaves.
bool same_dicts(const Leaf& left, const Leaf& right) {
  const Containers none;
  const auto same = [](const auto& a, const auto& b) { return a == b || (a && b && *a == *b); };
  return std::ranges::equal(left.containers ? *left.containers : none,
                            right.containers ? *right.containers : none, same);
}

void expect_same_by_catalog(const std::string& path) {
  SCOPED_TRACE(path);
  const Checkpoint expected = Checkpoint::open(path);
  const Checkpoint found = opened_by(catalog_of(expected, true), place_of(path));
  EXPECT_EQ(found.kind, expected.kind);
  EXPECT_EQ(found.path, expected.path);
  EXPECT_EQ(found.world_size, expected.world_size);
  EXPECT_EQ(found.has_types, expected.has_types);
  EXPECT_EQ(found.warnings, expected.warnings);
  ASSERT_EQ(found.leaves.size(), expected.leaves.size());
  for (std::size_t i = 0; i < found.leaves.size(); ++i) {
    const Leaf& leaf = found.leaves[i];
    EXPECT_EQ(leaf.name, expected.leaves[i].name);
    EXPECT_EQ(leaf.path, expected.leaves[i].path);
    EXPECT_EQ(leaf.value, expected.leaves[i].value);
    EXPECT_EQ(found.find(leaf.name), &leaf);
    EXPECT_TRUE(same_dicts(leaf, expected.leaves[i])) << leaf.name;
  }
  const std::vector<NamedTensor> tensors = all_tensors(found.leaves);
  const std::vector<NamedTensor> others = all_tensors(expected.leaves);
  ASSERT_EQ(tensors.size(), others.size());  // of which each is there once
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    SCOPED_TRACE(tensors[i].name);
    EXPECT_EQ(tensors[i].name, others[i].name);
    expect_same(tensors[i].tensor.as_tensor(), others[i].tensor.as_tensor(), others[i].name);
  }
}

TEST(CatalogOf, CheckpointsOfPyTorchAreTheSame) {
  int seen = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kCheckpoints)) {
    const std::string path = entry.path().string();
    // No checkpoint, or the part of one rank.
    if (path.ends_with(".json") || path.ends_with("olmo_hybrid") || path.ends_with("g4_dt.pt"))
      continue;
    EXPECT_NO_THROW(expect_same_by_catalog(path)) << path;
    ++seen;
  }
  EXPECT_GT(seen, 30);
}

// Tied weights are one node.
Value state(bool is_tied = true) {
  const Value first(counting({6, 4}, whole({6, 4}), 1));
  const Value second(counting({6, 4}, whole({6, 4}), 50));
  Value model = Value::dict({{"l0.w", first}, {"l1.w", is_tied ? first : second}});
  return Value::dict(
      {{"model", model},
       {"train", Value::dict({{7, Value::tuple({Value(counting({3}, whole({3}), 9)), "text"})},
                              {"nothing", Value::dict()}})}});
}

// With digests, and with types of dicts and keys.
TEST(CatalogOf, CheckpointsOfOursAreTheSame) {
  const std::string all = temporary_directory() + "/all.pt";
  save(state(), all);
  expect_same_by_catalog(all);
  const std::string dcp = temporary_directory() + "/dcp";
  save(state(), dcp);
  expect_same_by_catalog(dcp);
  const std::string untied = temporary_directory() + "/untied.pt";
  save(state(false), untied);
  for (const CheckpointKind kind :
       {CheckpointKind::safetensors, CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
        CheckpointKind::olmo_legacy, CheckpointKind::olmo_local}) {
    ConvertOptions options;
    options.to = kind;
    options.olmo.unit = kind == CheckpointKind::olmo_local ? "l[0-9]+" : "";
    const bool is_one = is_one_of(kind, CheckpointKind::safetensors, CheckpointKind::olmo_full);
    options.ranks = is_one ? 1 : 2;
    const std::string path = temporary_directory() + "/made";
    convert(untied, path, options);
    expect_same_by_catalog(path);
  }
}

// Nothing but what is read of a tensor is asked of the store.
TEST(CatalogOf, AnotherRankSeesItsOwnPlace) {
  const auto first = memory_store("first");
  save(state(), {first, "a.pt"});
  const Bytes catalog = catalog_of(Checkpoint::open({first, "a.pt"}), true);
  const auto second = memory_store("second");
  const Checkpoint found = opened_by(catalog, {second});
  EXPECT_EQ(found.path, "second/a.pt");
  const Storage& storage = *found.tensor("model.l0.w").pieces.at(0).storage;
  EXPECT_EQ(storage.source->name(), "second/a.pt");
  Bytes bytes(8);
  EXPECT_EQ(code_of([&] { storage.source->read_at(0, bytes); }), ErrorCode::not_found);
  put(*second, "a.pt", bytes, IfExists::fail);
  EXPECT_EQ(code_of([&] { storage.source->read_at(0, bytes); }), ErrorCode::conflict);
}

TEST(CatalogOf, WithoutPlacesTensorsHaveNoPieces) {
  const auto store = memory_store("first");
  save(state(), {store, "a.pt"});
  const Checkpoint found = opened_by(catalog_of(Checkpoint::open({store, "a.pt"}), false),
                                     {.store = nullptr, .path = "elsewhere"});
  EXPECT_EQ(found.path, "elsewhere");
  const Value& weight = found.find("model.l0.w")->value;
  EXPECT_EQ(weight.as_tensor().shape, (Shape{6, 4}));
  EXPECT_TRUE(weight.as_tensor().pieces.empty());
  EXPECT_NE(weight.identity(), found.find("model.l1.w")->value.identity());
}

// What a rank alone reads of a value in an item that is compressed, several get from the catalog.
TEST(CatalogOf, TensorsOfALargeCompressedValueAreInTheCatalog) {
  const Shape shape = {(std::int64_t{257} << 20) / 4};
  Tensor zeros;
  zeros.shape = shape;
  zeros.pieces = {Piece{whole(shape), memory(std::size_t{257} << 20), 0, {}, -1}};
  const std::string directory = temporary_directory();
  SaveOptions options;
  options.kind = CheckpointKind::dcp;
  options.compression = Compression::zstd;
  save(Value::dict({{"model", Value::dict({{"w", Value::tuple({Value(zeros)})}})}}),
       directory + "/model_and_optim", options);
  zeros = Tensor();
  const Checkpoint opened = Checkpoint::open(directory);
  ASSERT_EQ(opened.kind, CheckpointKind::olmo_torch_new);
  EXPECT_GT(catalog_of(opened, true).size(), std::size_t{257} << 20);
}

TEST(PatientStore, WhatIsKnownToBeThereIsWaitedFor) {
  const auto store = memory_store("late");
  const auto not_replaced = [] { return false; };
  const auto patient = patient_store(store, {}, not_replaced);
  const testing_support::ShortPatience patience;
  EXPECT_EQ(code_of([&] { (void)patient->open("b"); }), ErrorCode::incomplete);
  put(*store, "b", Bytes(3), IfExists::fail);
  EXPECT_EQ(patient->open("b")->size(), 3U);
}

TEST(PatientStore, WhatIsGoneFromAnotherSaveIsNotWaitedFor) {
  const auto patient = patient_store(memory_store("other"), {}, [] { return true; });
  EXPECT_EQ(code_of([&] { (void)patient->open("b"); }), ErrorCode::not_found);
}

}  // namespace
}  // namespace tessera
