// What reading from an open checkpoint takes of the heap: the bound that was given, whatever has to
// be converted or brought into another order.
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "conformance/temporary_directory.h"
#include "heap.h"
#include "tessera/checkpoint.h"
#include "tessera/tensor_view.h"

namespace tessera {
namespace {

constexpr std::int64_t kRows = 4096;
constexpr std::int64_t kColumns = 2048;
constexpr std::int64_t kMemory = 6 << 20;  // bytes; each tensor has 32 MiB
// The plans, and one request's bytes for each thread.
constexpr std::int64_t kBesides = 2 << 20;

TEST(Reads, StayWithinTheirMemory) {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/a.pt";
  std::vector<float> numbers(kRows * kColumns);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 256);
  const auto dense = ConstTensorView::of(numbers.data(), DType::float32, {kRows, kColumns});
  // In a file of torch.save a transposed tensor stays as it lies.
  const auto turned =
      ConstTensorView::of(numbers.data(), DType::float32, {kColumns, kRows}, {1, kColumns});
  save(Value::dict({{"dense", dense.tensor()}, {"turned", turned.tensor()}}), path);
  const Checkpoint checkpoint = Checkpoint::open(path);
  std::vector<std::uint16_t> found(2 * numbers.size());
  const auto into = [&found](std::size_t at, Shape shape) {
    return TensorView::of(&found[at], DType::bfloat16, std::move(shape));
  };
  const std::int64_t height = heap_height_of([&] {
    checkpoint.read_many({{"dense", into(0, {kRows, kColumns})},
                          {"turned", into(numbers.size(), {kColumns, kRows})}},
                         {.threads = 2, .memory = kMemory});
  });
  EXPECT_LE(height, kMemory + kBesides);
  for (std::size_t row = 0; row < kRows; row += 97) {
    const std::size_t column = row % kColumns;
    const std::uint16_t here = found[row * kColumns + column];
    EXPECT_EQ(here, found[numbers.size() + column * kRows + row]);
    EXPECT_EQ(std::bit_cast<float>(std::uint32_t{here} << 16), numbers[row * kColumns + column]);
  }
}

}  // namespace
}  // namespace tessera
