// What the tests of the formats share: golden files, sources that count, damage.
#pragma once

#include <atomic>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera::test {

inline std::vector<std::byte> golden(const std::string& name) {
  std::ifstream file(std::string(TESSERA_TEST_DATA) + "/golden/" + name, std::ios::binary);
  if (!file) throw Error(ErrorCode::not_found, "no golden file").at_path(name);
  const std::vector<char> chars(std::istreambuf_iterator<char>(file), {});
  std::vector<std::byte> bytes(chars.size());
  for (std::size_t i = 0; i < chars.size(); ++i) bytes[i] = static_cast<std::byte>(chars[i]);
  return bytes;
}

inline std::shared_ptr<ByteSource> source(std::vector<std::byte> bytes) {
  return memory_source(std::move(bytes), "bytes under test");
}

// The code of the Error that `work` throws; a failure of the test when it throws none is left to
// the caller: `nothing thrown` is the second member.
inline std::pair<ErrorCode, bool> thrown(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return {error.code(), true};
  }
  return {ErrorCode::invalid_argument, false};
}

// Counts the reads that reach `inner`.
class CountingSource final : public ByteSource {
 public:
  explicit CountingSource(std::shared_ptr<const ByteSource> inner) : inner_(std::move(inner)) {}
  [[nodiscard]] std::uint64_t size() const override { return inner_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    ++reads;
    bytes += out.size();
    inner_->read_at(offset, out);
  }
  [[nodiscard]] const std::string& name() const override { return inner_->name(); }

  mutable std::atomic<std::uint64_t> reads{0};
  mutable std::atomic<std::uint64_t> bytes{0};

 private:
  std::shared_ptr<const ByteSource> inner_;
};

// Runs `parse` on prefixes (every one of a small file, else some 4000) and on `flips` seeded
// single-byte changes of `bytes`. A prefix must throw Error; a changed byte may be accepted.
// Returns the lengths of prefixes that were accepted.
inline std::vector<std::size_t> damage(const std::vector<std::byte>& bytes, int flips,
                                       const std::function<void(std::vector<std::byte>)>& parse) {
  std::vector<std::size_t> accepted;
  const std::size_t step = 1 + bytes.size() / 4000;
  for (std::size_t size = 0; size < bytes.size(); size += step) {
    const bool refused =
        thrown([&] {
          parse({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)});
        }).second;
    if (!refused) accepted.push_back(size);
  }
  std::uint64_t state = 20240607;
  for (int i = 0; i < flips; ++i) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    std::vector<std::byte> changed = bytes;
    changed[(state >> 33) % changed.size()] ^= static_cast<std::byte>(1U << ((state >> 24) & 7U));
    if (i % 3 == 0) changed[(state >> 13) % changed.size()] = static_cast<std::byte>(state >> 55);
    thrown([&] { parse(std::move(changed)); });
  }
  return accepted;
}

}  // namespace tessera::test
