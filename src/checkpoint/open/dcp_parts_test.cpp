// Directories as accelerate, Megatron-Core and Lightning make them of DCP checkpoints. Cases K01 to
// K06 of docs/hostile-cases.md.
#include <gmock/gmock.h>

#include <cstring>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/testing.h"
#include "checkpoint/test_support.h"
#include "tessera/copy.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::string kPair = kGolden + "trainers/accelerate";
const std::string kMegatron = kGolden + "trainers/megatron";
const std::string kLightning = kGolden + "trainers/lightning";
const std::string kModel = "/pytorch_model_fsdp_0";
const std::string kOptimizer = "/optimizer_0";

std::set<std::string> leaf_names(const Checkpoint& checkpoint) {
  std::set<std::string> names;
  for (const Leaf& leaf : checkpoint.leaves) names.insert(leaf.name);
  return names;
}

// The elements of one tensor, wherever it is in the tree.
std::vector<float> elements_of(const Checkpoint& checkpoint, const std::string& name) {
  return floats(leaves_of(checkpoint.only({name}).load()).at(0).value.as_tensor());
}

// The byte at `at` from the end is another one.
void damage(const std::string& path, std::size_t at) {
  std::string text = text_of(path);
  text[text.size() - at] ^= 1;
  write_text(path, text);
}

// What a conversion into one file keeps.
void expect_same_in_one_file(const std::string& directory) {
  const std::string file = temporary_directory() + "/all.pt";
  (void)convert(directory, file, to_torch());
  EXPECT_TRUE(diff(Checkpoint::open(directory), Checkpoint::open(file)).empty()) << directory;
}

// A load by ranks finds what opening finds below these keys.
void expect_loads(const std::string& directory, int ranks, const std::vector<std::string>& keys) {
  const Value known = Checkpoint::open(directory).only(keys).load();
  run_ranks(ranks, [&](Group& group) {
    Value tree = Checkpoint::open(directory).only(keys).load();
    for (const Leaf& leaf : leaves_of(tree)) {
      if (!leaf.value.is(Value::Kind::tensor)) continue;
      const Storage& storage = *leaf.value.as_tensor().pieces.at(0).storage;
      std::memset(storage.data, 0, storage.size);
    }
    load(tree, directory, group);
    const std::vector<Leaf> wanted = leaves_of(known), loaded = leaves_of(tree);
    ASSERT_EQ(loaded.size(), wanted.size());
    for (std::size_t i = 0; i < loaded.size(); ++i) {
      const Value& value = loaded[i].value;
      EXPECT_EQ(loaded[i].name, wanted[i].name);
      if (!value.is(Value::Kind::tensor)) {
        EXPECT_TRUE(value == wanted[i].value) << loaded[i].name;
      } else {
        EXPECT_EQ(floats(value.as_tensor()), floats(wanted[i].value.as_tensor()));
      }
    }
  });
}

TEST(DcpParts, APairIsOneTree) {
  const Checkpoint pair = Checkpoint::open(kPair);
  const Checkpoint model = Checkpoint::open(kPair + kModel);
  const Checkpoint optimizer = Checkpoint::open(kPair + kOptimizer);
  EXPECT_EQ(pair.kind, CheckpointKind::dcp);
  EXPECT_EQ(pair.path, kPair);
  EXPECT_EQ(pair.leaves.size(), model.leaves.size() + optimizer.leaves.size());
  EXPECT_EQ(pair.files.size(), 6U);
  EXPECT_EQ(pair.world_size, 2);
  EXPECT_THAT(pair.warnings, IsEmpty());
  EXPECT_EQ(elements_of(pair, "model.0.weight"), elements_of(model, "model.0.weight"));
  EXPECT_EQ(elements_of(pair, "optimizer.state.2.bias.exp_avg"),
            elements_of(optimizer, "optimizer.state.2.bias.exp_avg"));
  EXPECT_EQ(state_of(pair, "optimizer_0/__1_0.distcp"), "used");
  expect_same_in_one_file(kPair);
  expect_loads(kPair, 3, {"model", "optimizer"});
}

TEST(DcpParts, TheNumberOfAPairMayBeAny) {
  const std::string directory = copy_of(kPair);
  fs::rename(directory + kModel, directory + "/pytorch_model_fsdp_12");
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory); }), ErrorCode::unsupported);
  fs::rename(directory + kOptimizer, directory + "/optimizer_12");
  EXPECT_EQ(leaf_names(Checkpoint::open(directory)), leaf_names(Checkpoint::open(kPair)));
}

TEST(DcpParts, K01APartWithoutMetadataNeverFinished) {
  for (const std::string& part : {kModel, kOptimizer}) {
    const std::string directory = copy_of(kPair);
    fs::remove(directory + part + "/.metadata");
    const Error error = error_of([&] { (void)Checkpoint::open(directory); });
    EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
    EXPECT_THAT(error.message(), HasSubstr(part.substr(1) + " has no .metadata"));
    EXPECT_THAT(error.path(), HasSubstr(part));
    for (const auto& file : fs::directory_iterator(directory + part)) fs::remove(file.path());
    EXPECT_EQ(open_code(directory), ErrorCode::incomplete) << "an empty directory";
    EXPECT_FALSE(verify(directory).findings.empty());
  }
}

TEST(DcpParts, K02AModelAloneIsToldAndAnOptimizerAloneIsRefused) {
  const std::string weights = copy_of(kPair);
  fs::remove_all(weights + kOptimizer);
  const Checkpoint model = Checkpoint::open(weights);
  EXPECT_EQ(model.leaves.size(), 4U);
  EXPECT_THAT(model.warnings, ElementsAre(HasSubstr("is no optimizer: these are the weights")));

  const std::string optimizer = copy_of(kPair);
  fs::remove_all(optimizer + kModel);
  const Error error = error_of([&] { (void)Checkpoint::open(optimizer); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.message(), HasSubstr("not the model's directory pytorch_model_fsdp_0"));

  const std::string two = copy_of(kPair);
  fs::copy(two + kModel, two + "/pytorch_model_fsdp_1", fs::copy_options::recursive);
  EXPECT_EQ(open_code(two), ErrorCode::unsupported);
  EXPECT_EQ(Checkpoint::open(two + "/pytorch_model_fsdp_1").leaves.size(), 4U);
}

TEST(DcpParts, K03ANameInTwoPartsIsAConflict) {
  const std::string directory = copy_of(kPair);
  fs::remove_all(directory + kOptimizer);
  fs::copy(directory + kModel, directory + kOptimizer, fs::copy_options::recursive);
  EXPECT_EQ(open_code(directory), ErrorCode::conflict);

  const std::string lightning = copy_of(kLightning);
  save(Value::dict({{"model", Value::dict({{"weight", 1}})}}), lightning + "/meta.pt",
       {.overwrite = true});
  const Error error = error_of([&] { (void)Checkpoint::open(lightning); });
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_EQ(error.key(), "model.weight");
}

TEST(DcpParts, APairIsSealedCopiedAndReplacedAsAWhole) {
  const std::string directory = copy_of(kPair);
  EXPECT_EQ(seal(directory).files, 6U);
  EXPECT_TRUE(verify(directory).findings.empty());
  expect_loads(directory, 2, {"model", "optimizer"});
  const std::string target = temporary_directory() + "/to";
  EXPECT_EQ(copy(directory, target).files, 7U);
  EXPECT_EQ(leaf_names(Checkpoint::open(target)), leaf_names(Checkpoint::open(kPair)));
  damage(directory + kOptimizer + "/__1_0.distcp", 100);
  EXPECT_FALSE(verify(directory).findings.empty());

  write_text(target + "/notes.txt", "mine");
  ConvertOptions replace;
  replace.to = CheckpointKind::safetensors;
  replace.max_shard_size = 1 << 20;
  replace.overwrite = true;
  (void)convert(kGolden + "checkpoints/c1", target, replace);
  EXPECT_FALSE(fs::exists(target + kModel));
  EXPECT_FALSE(fs::exists(target + kOptimizer));
  EXPECT_TRUE(fs::exists(target + "/notes.txt"));
}

TEST(Beside, MegatronsCommonStateIsOfTheTree) {
  const Checkpoint checkpoint = Checkpoint::open(kMegatron);
  EXPECT_EQ(leaf_names(checkpoint),
            (std::set<std::string>{"common.args.hidden", "common.iteration", "decoder.final.b",
                                   "decoder.layers.w", "rng/shard_0_1"}));
  EXPECT_EQ(checkpoint.find("common.iteration")->value.as_int(), 7);
  EXPECT_EQ(elements_of(checkpoint, "decoder.layers.w").at(47), 47);
  EXPECT_THAT(checkpoint.warnings, IsEmpty());
  for (const char* name : {"common.pt", "metadata.json"})
    EXPECT_EQ(state_of(checkpoint, name), "used") << name;
  EXPECT_THAT(checkpoint.remarks,
              Contains(testing::Field(&FileRow::reason, HasSubstr("sharded_backend: torch_dist, "
                                                                  "sharded_backend_version: 1"))));
  expect_loads(kMegatron, 2, {"decoder", "common"});
  const std::string file = temporary_directory() + "/all.pt";
  (void)convert(kMegatron, file, to_torch());
  EXPECT_EQ(Checkpoint::open(file).find("common.args.hidden")->value.as_int(), 6);
}

TEST(Beside, LightningsStateIsNamedAsInItsOwnFile) {
  const Checkpoint checkpoint = Checkpoint::open(kLightning);
  EXPECT_EQ(leaf_names(checkpoint),
            (std::set<std::string>{"epoch", "hp.a", "model.bias", "model.weight"}));
  EXPECT_EQ(checkpoint.find("epoch")->value.as_int(), 3);
  expect_same_in_one_file(kLightning);
  expect_loads(kLightning, 3, {"model", "epoch", "hp"});
}

TEST(Beside, K04MetadataJsonThatIsNone) {
  const std::string directory = copy_of(kMegatron);
  const auto code = [&](const std::string& text) {
    write_text(directory + "/metadata.json", text);
    return open_code(directory);
  };
  const std::string backend = R"("sharded_backend": "torch_dist")";
  EXPECT_EQ(code("{" + backend + ", " + backend + "}"), ErrorCode::corrupt);
  EXPECT_EQ(code("{" + backend), ErrorCode::corrupt);
  EXPECT_EQ(code(std::string((1 << 20) + 1, ' ')), ErrorCode::limit);
  EXPECT_EQ(
      code("{" + backend + R"(, "x": )" + std::string(200, '[') + std::string(200, ']') + "}"),
      ErrorCode::limit);
  // Somebody else's, so that common.pt is, too.
  write_text(directory + "/metadata.json", R"({"epochs": 3})");
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.find("common.iteration"), nullptr);
  EXPECT_EQ(checkpoint.leaves.size(), 3U);
}

TEST(Beside, K05DamageBesideIsFoundAndSealed) {
  for (const auto& [golden, file] :
       {std::pair(kMegatron, "/common.pt"), std::pair(kLightning, "/meta.pt")}) {
    const std::string directory = copy_of(golden);
    const std::string sound = text_of(directory + file);
    const SealReport sealed = seal(directory);
    EXPECT_EQ(sealed.files, Checkpoint::open(golden).files.size());
    expect_loads(directory, 2, {golden == kMegatron ? "common" : "epoch"});
    for (std::size_t at = 1; at <= sound.size(); at += 7) {
      write_text(directory + file, sound);
      damage(directory + file, at);
      EXPECT_FALSE(verify(directory).findings.empty()) << file << " " << at;
    }
    write_text(directory + file, sound);
    EXPECT_TRUE(verify(directory).findings.empty());
    fs::resize_file(directory + file, 100);
    EXPECT_NE(open_code(directory), ErrorCode::io);
    EXPECT_FALSE(verify(directory).findings.empty());
  }
}

TEST(Beside, K06AFileOfNoDictHasNoNames) {
  const std::string directory = copy_of(kLightning);
  save(Value::list({1, 2}), directory + "/meta.pt", {.overwrite = true});
  EXPECT_EQ(open_code(directory), ErrorCode::unsupported);
}

// A save commits by `.metadata` alone: what lay beside the older one is not of the new one.
TEST(Beside, ASaveOverItIsNotMixedWithIt) {
  const std::string directory = copy_of(kMegatron);
  save(Value::dict({{"step", 1}}), directory, {.overwrite = true});
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(leaf_names(checkpoint), std::set<std::string>{"step"});
  Value tree = Value::dict({{"step", 0}});
  (void)load(tree, directory);
  EXPECT_EQ(tree.at("step").as_int(), 1);
}

TEST(Beside, WhatReplacesTheDirectoryTakesItAway) {
  for (const std::string& golden : {kMegatron, kLightning}) {
    const std::string directory = copy_of(golden);
    write_text(directory + "/notes.txt", "mine");
    const Belonging belongs(*posix_store(directory));
    for (const std::string& name : names_in(directory))
      EXPECT_EQ(belongs(name), name != "notes.txt") << name;
    (void)copy(kGolden + "checkpoints/c2", directory, {.overwrite = true});
    EXPECT_EQ(leaf_names(Checkpoint::open(directory)),
              leaf_names(Checkpoint::open(kGolden + "checkpoints/c2")));
    EXPECT_FALSE(fs::exists(directory + "/common.pt"));
    EXPECT_FALSE(fs::exists(directory + "/meta.pt"));
  }
}

}  // namespace
}  // namespace tessera
