#include "storage/s3/parts.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr std::uint64_t kStep = 1'000;        // parts until their size doubles
constexpr std::uint64_t kExpectedIn = 5'000;  // parts; as many are left if there comes more

[[noreturn]] void refuse(std::uint64_t size) {
  throw Error(ErrorCode::limit, "an object of " + std::to_string(size) +
                                    " bytes, the store takes " + std::to_string(kLargestObject) +
                                    ", and " + std::to_string(kMostParts) +
                                    " parts by the size that was announced");
}

}  // namespace

PartPlan::PartPlan(std::uint64_t size_hint)
    : size_(kSmallestPart), even_(size_hint == 0 ? kStep : kExpectedIn) {
  if (size_hint > kLargestObject) refuse(size_hint);
  const std::uint64_t needed = (size_hint + kExpectedIn - 1) / kExpectedIn;
  size_ = std::max(size_, (needed + kMiB - 1) / kMiB * kMiB);
}

Part PartPlan::part_at(std::uint64_t offset) const {
  if (offset >= kLargestObject) refuse(offset);
  std::uint64_t first = 0;  // part of the parts of one size, counted from 0
  std::uint64_t begin = 0;  // of it
  std::uint64_t size = size_;
  std::uint64_t count = even_;
  while (offset - begin >= count * size) {
    begin += count * size;
    first += count;
    if (first >= kMostParts) refuse(offset);
    size *= 2;
    count = std::min(kStep, kMostParts - first);
  }
  const std::uint64_t behind = (offset - begin) / size;
  begin += behind * size;
  return {static_cast<int>(first + behind + 1), begin, begin + size};
}

void PartBuffer::copy(std::size_t offset, ByteView bytes) {
  std::memcpy(bytes_.get() + offset, bytes.data(), bytes.size());
}

void PartBuffer::note(std::size_t offset, std::size_t size) {
  std::size_t begin = offset;
  std::size_t end = offset + size;
  auto run = written_.upper_bound(begin);
  if (run != written_.begin() && std::prev(run)->second >= begin) --run;
  while (run != written_.end() && run->first <= end) {
    begin = std::min(begin, run->first);
    end = std::max(end, run->second);
    run = written_.erase(run);
  }
  written_.emplace(begin, end);
}

bool PartBuffer::is_full() const {
  return !written_.empty() && written_.begin()->first == 0 && written_.begin()->second == size_;
}

ByteView PartBuffer::filled(std::size_t size) {
  std::size_t done = 0;
  const auto zero_until = [&](std::size_t end) {
    if (end > done) std::memset(bytes_.get() + done, 0, end - done);
  };
  for (const auto& [begin, end] : written_) {
    zero_until(begin);
    done = end;
  }
  zero_until(size);
  return {bytes_.get(), size};
}

}  // namespace tessera::s3
