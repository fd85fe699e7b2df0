// Which of the files that lie in a directory are the checkpoint, and what is read without an index.
#include "checkpoint/open/set_choice.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/open/directory.h"
#include "checkpoint/open/testing.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)

// A file of torch.save with one vector.
void write_torch(const std::string& path, const std::string& name, float first) {
  save(Value::dict({{name, counting({2}, whole({2}), first)}}), path);
}

TEST(SetChoice, TheTableOfOneFileOfTorchHasWhatLiesBeside) {
  const std::string directory = temporary_directory();
  write_torch(directory + "/pytorch_model.bin", "a", 1);
  write_torch(directory + "/optimizer.pt", "b", 9);
  write_text(directory + "/config.json", "{}");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.path, directory);
  EXPECT_EQ(state_of(checkpoint, "pytorch_model.bin"), "used");
  EXPECT_EQ(state_of(checkpoint, "optimizer.pt"), "not part of it");
  EXPECT_EQ(state_of(checkpoint, "config.json"), "not part of it");
  // Whoever names the file asks for nothing else.
  const auto file = Checkpoint::open(directory + "/pytorch_model.bin");
  EXPECT_EQ(file.directory().size(), 1U);
}

}  // namespace
}  // namespace tessera
