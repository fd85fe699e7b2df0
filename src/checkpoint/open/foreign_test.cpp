// What is no checkpoint that is read, and what lies beside one. Case K07 of docs/hostile-cases.md.
#include "checkpoint/open/foreign.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/open/testing.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// A zip's first local header, as numpy writes it.
std::string zip_of(const std::string& name) {
  std::string text("PK\x03\x04\x2d\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 26);
  text += static_cast<char>(name.size());
  text.append(3, '\0');
  return text + name + std::string(100, 'x');
}

void expect_unsupported(const std::string& path, const std::string& what) {
  const Error error = error_of([&] { (void)Checkpoint::open(path); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
  EXPECT_THAT(error.message(), HasSubstr(what));
  EXPECT_FALSE(error.is_no_checkpoint());
}

TEST(Foreign, K07FilesOfOthersAreNamed) {
  const std::string directory = temporary_directory();
  write_text(directory + "/arrays.npz", zip_of("weight.npy"));
  expect_unsupported(directory + "/arrays.npz", "an .npz file of numpy");
  write_text(directory + "/model.nemo", std::string(600, 'x'));
  expect_unsupported(directory + "/model.nemo", "a NeMo archive");
  // A name that is cut, or says nothing, leads nowhere.
  for (const std::string& text :
       {zip_of("weight.npy").substr(0, 33), zip_of("a/data.pkl"), std::string("PK\x03\x04", 4)}) {
    write_text(directory + "/x.npz", text);
    const Error error = error_of([&] { (void)Checkpoint::open(directory + "/x.npz"); });
    EXPECT_THAT(error.message(), testing::Not(HasSubstr("numpy"))) << error.what();
  }
}

TEST(Foreign, K07DirectoriesOfOthersAreNamed) {
  for (const auto& [file, what] : std::vector<std::pair<std::string, std::string>>{
           {"/_CHECKPOINT_METADATA", "Orbax"},
           {"/manifest.ocdbt", "OCDBT"},
           {"/mp_rank_00/model_optim_rng.pt", "Megatron-LM in its older form"},
           {"/mp_rank_01_003/model_optim_rng.pt", "Megatron-LM in its older form"}}) {
    const std::string directory = temporary_directory();
    fs::create_directories(fs::path(directory + file).parent_path());
    write_text(directory + file, "x");
    expect_unsupported(directory, what);
  }
  for (const char* folder : {"/mp_rank_", "/mp_rank_x", "/rank_00"}) {
    const std::string directory = temporary_directory();
    fs::create_directory(directory + folder);
    write_text(directory + folder + "/model_optim_rng.pt", "x");
    EXPECT_EQ(open_code(directory), ErrorCode::not_found) << folder;
  }
}

TEST(Foreign, TheMetadataOfADcpCheckpointIsItsDirectory) {
  const std::string golden = kGolden + "checkpoints/c2";
  const Checkpoint checkpoint = Checkpoint::open(golden + "/.metadata");
  EXPECT_EQ(checkpoint.path, golden);
  EXPECT_EQ(checkpoint.leaves.size(), Checkpoint::open(golden).leaves.size());
  EXPECT_EQ(Checkpoint::open("file://" + golden + "/.metadata").path, golden);
  const auto store = memory_store();
  save(Value::dict({{"step", 3}}), store);
  EXPECT_EQ(Checkpoint::open(Location(store, ".metadata")).leaves.size(), 1U);
  EXPECT_EQ(Checkpoint::open(Location(posix_store(kGolden + "checkpoints"), "c2/.metadata"))
                .leaves.size(),
            checkpoint.leaves.size());
  Value tree = Value::dict({{"step", 0}});
  (void)load(tree, Location(store, ".metadata"));
  EXPECT_EQ(tree.at("step").as_int(), 3);
  const Error error = error_of([&] { (void)Checkpoint::open(golden + "/__0_0.distcp"); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.message(), HasSubstr("open the directory that it is in"));
}

TEST(LeftBehind, NamesThatAreOfATraining) {
  for (const char* name :
       {"optimizer.pt", "optimizer.bin", "optimizer_1.bin", "scheduler.pt", "rng_state.pth",
        "rng_state_3.pth", "random_states_0.pkl", "trainer_state.json", "training_args.bin",
        "scaler.pt", "common.pt", "custom_checkpoint_12.pkl"})
    EXPECT_TRUE(is_training_state(name)) << name;
  for (const char* name : {"optimizer", "optimizer.txt", "my_optimizer.pt", "optimizer_x.bin",
                           "config.json", "rng_state_3_4.pth", "model.pt", "optimizer_.pt", ""})
    EXPECT_FALSE(is_training_state(name)) << name;
}

TEST(LeftBehind, IsToldWhereTheModelIsOpened) {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/model.safetensors", {{"a", {1, 2}}});
  for (const char* name : {"/optimizer.pt", "/rng_state.pth", "/trainer_state.json"})
    write_text(directory + name, "not read");
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_THAT(checkpoint.warnings,
              ElementsAre("optimizer.pt, rng_state.pth, trainer_state.json: not part of it, named "
                          "like the state of a training, which is not in what was opened"));
  EXPECT_EQ(state_of(checkpoint, "optimizer.pt"), "not part of it");
  const std::string target = temporary_directory() + "/model.pt";
  EXPECT_THAT(convert(directory, target, to_torch()).notes,
              ElementsAre(HasSubstr("optimizer.pt, rng_state.pth, trainer_state.json: named")));
  // The file alone is what was meant.
  EXPECT_THAT(Checkpoint::open(directory + "/model.safetensors").warnings, IsEmpty());
  EXPECT_TRUE(verify(directory).findings.empty());
}

}  // namespace
}  // namespace tessera
