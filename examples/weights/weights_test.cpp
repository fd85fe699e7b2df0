// The program on checkpoints of every kind that Tessera saves, as one rank and as three.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "conformance/temporary_directory.h"
#include "tessera/checkpoint.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/tensor_view.h"

namespace {

using tessera::ConstTensorView;
using tessera::DType;
using tessera::Value;

// What `weights` prints with these arguments, and how it ends.
struct Printed {
  std::string text;
  int status = 0;
};

Printed weights(const std::string& arguments) {
  const std::string command = std::string(WEIGHTS_PROGRAM) + " " + arguments + " 2>/dev/null";
  FILE* const pipe = ::popen(command.c_str(), "r");
  Printed printed;
  std::array<char, 4096> buffer;
  while (const std::size_t got = std::fread(buffer.data(), 1, buffer.size(), pipe))
    printed.text.append(buffer.data(), got);
  printed.status = ::pclose(pipe);
  return printed;
}

// Small whole numbers: bfloat16 holds them all.
Value tree(const std::vector<float>& numbers) {
  const auto matrix = ConstTensorView::of(numbers.data(), DType::float32, {7, 4});
  const auto vector = ConstTensorView::of(numbers.data(), DType::float32, {5});
  return Value::dict({{"model", Value::dict({{"w", matrix.tensor()}, {"b", vector.tensor()}})},
                      {"optim", Value::dict({{"w", matrix.tensor()}})},
                      {"step", 7}});
}

TEST(Weights, EachRankHasItsRowsOfEveryKind) {
  const tessera::TemporaryDirectory directory;
  std::vector<float> numbers(28);
  std::iota(numbers.begin(), numbers.end(), 0.0F);
  for (const std::string name : {"/dcp", "/a.pt", "/a.safetensors"}) {
    const std::string path = directory.path() + name;
    tessera::save(tree(numbers), path);
    EXPECT_EQ(weights(path + " model. 0 1").text, "model.b [5] 10\nmodel.w [7, 4] 378\n") << name;
    EXPECT_EQ(weights(path + " model. 0 3").text, "model.b [5] 10\nmodel.w [2, 4] 28\n") << name;
    EXPECT_EQ(weights(path + " model.w 2 3").text, "model.w [3, 4] 258\n") << name;
    EXPECT_EQ(weights(path + " none. 0 1").text, "");
  }
}

// Beside a training that goes on and saves into memory: each time the weights of one save.
TEST(Weights, FollowsATrainingInMemory) {
  const tessera::TemporaryDirectory directory;
  ::setenv("TESSERA_ARENA_DIR", (directory.path() + "/arenas").c_str(), 1);
  tessera::WriterOptions options;
  options.process = true;
  options.program = TESSERA_COMMAND;
  options.keep = std::chrono::seconds(30);
  options.idle = false;
  const std::string run = directory.path() + "/run";
  std::atomic<bool> is_over = false;
  std::atomic<int> step = 0;
  std::thread training([&] {
    tessera::CheckpointWriter writer(options);
    while (!is_over) {
      std::vector<float> numbers(28, static_cast<float>(++step % 8));
      writer.save(tree(numbers), run + "/step" + std::to_string(step)).result();
    }
  });
  while (step < 2) std::this_thread::yield();
  std::istringstream lines(weights("arena://" + run + " model. 1 2 3").text);
  is_over = true;
  training.join();
  int seen = 0;
  for (std::string name, shape, columns; lines >> name >> shape; ++seen) {
    int sum = 0;
    lines >> sum;
    EXPECT_EQ(name + shape, "model.b[5]");
    const int number = sum / 5;
    EXPECT_EQ(sum, number * 5);
    lines >> name >> shape >> columns >> sum;
    name.append(shape).append(columns);
    EXPECT_EQ(name, "model.w[4,4]");
    EXPECT_EQ(sum, number * 16);
  }
  EXPECT_EQ(seen, 3);
  ::unsetenv("TESSERA_ARENA_DIR");
}

TEST(Weights, SaysHowItIsUsedAndWhatFailed) {
  EXPECT_EQ(WEXITSTATUS(weights("a b 3 3").status), 2);
  EXPECT_EQ(WEXITSTATUS(weights("/absent model. 0 1").status), 3);
}

}  // namespace
