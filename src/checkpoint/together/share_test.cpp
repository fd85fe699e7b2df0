#include "checkpoint/together/share.h"

#include <numeric>

#include <gtest/gtest.h>

#include "base/crc32.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

// Remembers what is written, and in how many calls.
class NotedSink final : public ByteSink {
 public:
  explicit NotedSink(std::size_t size) : bytes(size, std::byte{0xEE}) {}
  void write_at(std::uint64_t offset, ByteView part) override {
    ++calls;
    std::ranges::copy(part, bytes.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  void commit() override {}
  [[nodiscard]] const std::string& name() const override { return name_; }

  std::vector<std::byte> bytes;
  std::size_t calls = 0;

 private:
  std::string name_ = "noted";
};

// Ranks have columns of a tensor. Of each row a rank writes its own bytes, in one call and no
// others; the CRC-32 of all is put together from theirs.
TEST(OwnRuns, AWriteForEachRowOfColumns) {
  const Shape shape{300, 70};
  const Tensor all = testing_support::counting(shape, whole(shape), 1);
  const ByteView wanted(all.pieces[0].storage->data, 300 * 70 * 4);
  constexpr std::uint64_t kBefore = 24;  // of the tensor, in its row
  constexpr std::uint64_t kRow = kBefore + 300 * 70 * 4;
  NotedSink sink(kRow + 8);
  WrittenSum sum;
  for (const Box& box :
       {Box{{0, 0}, {300, 33}}, Box{{0, 33}, {299, 37}}, Box{{299, 33}, {1, 37}}}) {
    const Tensor held = testing_support::counting(shape, box, 1);
    TensorReader reader(held, "w");
    sink.calls = 0;
    sum.add(write_runs(held, reader, {box}, whole(shape), {&sink, 8, kRow, kBefore}, nullptr).row);
    EXPECT_EQ(sink.calls, static_cast<std::size_t>(box.sizes[0]));
  }
  EXPECT_TRUE(std::ranges::equal(ByteView(sink.bytes).subspan(8 + kBefore), wanted));
  const std::vector<std::byte> zeros(kBefore);
  sum.add({kBefore, crc32_term(crc32(zeros), kBefore, kRow - kBefore)});
  EXPECT_EQ(sum.bytes, kRow);
  EXPECT_EQ(crc32_of_terms(sum.terms, kRow), crc32(wanted, crc32(zeros)));
}

// A rank that has whole rows writes them by windows.
TEST(OwnRuns, AWriteForEachWindowOfRows) {
  const Shape shape{2048, 300};
  const Box box{{1000, 0}, {1048, 300}};
  const Tensor held = testing_support::counting(shape, box, 1);
  TensorReader reader(held, "w");
  NotedSink sink(2048 * 300 * 4);
  const RunSums sums =
      write_runs(held, reader, {box}, whole(shape), {&sink, 0, 2048 * 300 * 4, 0}, nullptr);
  EXPECT_EQ(sink.calls, 2U);  // 1.2 MB
  EXPECT_EQ(sums.row.bytes, 1048U * 300 * 4);
}

}  // namespace
}  // namespace tessera
