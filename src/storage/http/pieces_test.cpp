#include "storage/http/pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>

namespace tessera {
namespace {

// A request is answered by the source's bytes in parts of any size, as they come over a connection.
void answer(const RemotePiece& piece, const std::vector<std::byte>& object, std::mt19937& random) {
  for (std::size_t done = 0; done < piece.out.size();) {
    const std::size_t size = std::min<std::size_t>(1 + random() % 900'000, piece.out.size() - done);
    piece.out.write(done, ByteView(object).subspan(piece.offset + done, size));
    done += size;
  }
}

TEST(RemotePieces, FillAnyRangesByFewRequests) {
  std::vector<std::byte> object(80U << 20U);
  std::mt19937 random(19);
  for (std::byte& byte : object) byte = static_cast<std::byte>(random());
  const auto source = memory_source(object, "object");
  for (int round = 0; round < 40; ++round) {
    // Ranges that follow one another, with gaps before some, into memory in another order.
    std::vector<std::vector<std::byte>> memory;
    std::vector<std::size_t> offsets;
    std::size_t gaps = 1;
    for (std::size_t at = random() % 1000; memory.size() < 1 + random() % 30;) {
      const std::size_t size = random() % 4 == 0 ? random() % (40U << 20U) : random() % (2U << 20U);
      if (at + size > object.size()) break;
      if (random() % 3 == 0 && at + size + 10 <= object.size()) at += 10, ++gaps;
      offsets.push_back(at);
      memory.emplace_back(size);
      at += size;
    }
    std::vector<ReadRange> ranges;
    for (std::size_t i = 0; i < memory.size(); ++i) ranges.push_back({offsets[i], memory[i]});
    const std::vector<RemotePiece> pieces = pieces_of(*source, ranges);
    EXPECT_LE(pieces.size(), gaps + object.size() / (32U << 20U));
    for (const RemotePiece& piece : pieces) {
      EXPECT_GT(piece.out.size(), 0U);
      answer(piece, object, random);
    }
    for (std::size_t i = 0; i < memory.size(); ++i) {
      EXPECT_TRUE(std::equal(memory[i].begin(), memory[i].end(),
                             object.begin() + static_cast<std::ptrdiff_t>(offsets[i])));
    }
  }
}

}  // namespace
}  // namespace tessera
