// What do small reads from an open checkpoint of many tensors cost? Beside bench/peers/reads.py.
//   bench_reads make OUT TENSORS   a checkpoint of 8 x 8 float32 tensors; OUT's extension says its
//   kind bench_reads measure IN         prints one line: open, the first thousand reads, the second
// The first thousand also compares blocks of the files with their digests; the second reads other
// tensors of the same blocks.
#include <cstdio>
#include <exception>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "measure.h"
#include "tessera/checkpoint.h"

namespace {

using tessera::bench::now;

constexpr std::int64_t kSide = 8;
constexpr int kReads = 1000;

void make(const std::string& out, int tensors) {
  const std::vector<float> numbers(kSide * kSide, 1.0F);
  const auto view = tessera::ConstTensorView::of(numbers.data(), tessera::DType::float32,
                                                 tessera::Shape{kSide, kSide});
  tessera::Value tree = tessera::Value::dict();
  for (int i = 0; i < tensors; ++i)
    tree["blocks." + std::to_string(i / 100) + "." + std::to_string(i % 100)] =
        tessera::Value(view.tensor());
  tessera::save(tree, out);
}

double read_some(const tessera::Checkpoint& checkpoint, const std::vector<std::string>& names,
                 std::mt19937& random) {
  std::vector<float> numbers(kSide * kSide);
  const auto view = tessera::TensorView::of(numbers.data(), tessera::DType::float32,
                                            tessera::Shape{kSide, kSide});
  const double begin = now();
  for (int i = 0; i < kReads; ++i) checkpoint.read(names[random() % names.size()], view);
  return now() - begin;
}

void measure(const std::string& in) {
  const double begin = now();
  const auto checkpoint = tessera::Checkpoint::open(in);
  const double opened = now() - begin;
  const auto names = checkpoint.names();
  std::mt19937 random(1);  // NOLINT(cert-msc51-cpp): the same tensors in every run
  const double first = read_some(checkpoint, names, random);
  const double second = read_some(checkpoint, names, random);
  std::printf("open %.5f first %.5f second %.5f\n", opened, first, second);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  try {
    if (argc == 4 && arguments[0] == "make") {
      make(arguments[1], std::stoi(arguments[2]));
      return 0;
    }
    if (argc == 3 && arguments[0] == "measure") {
      measure(arguments[1]);
      return 0;
    }
    std::fprintf(stderr, "usage: bench_reads make OUT TENSORS | measure IN\n");
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_reads: %s\n", error.what());
    return 3;
  }
}
