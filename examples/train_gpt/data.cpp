#include "data.h"

#include <filesystem>
#include <fstream>
#include <system_error>

#include "tessera/error.h"

namespace {

// splitmix64's mixing step: consecutive inputs give independent-looking outputs.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::vector<std::uint8_t> read_file(const std::string& path) {
  using tessera::Error;
  using tessera::ErrorCode;
  std::error_code failure;
  const auto size = std::filesystem::file_size(path, failure);
  if (failure) {
    const bool absent = failure == std::errc::no_such_file_or_directory;
    throw Error(absent ? ErrorCode::not_found : ErrorCode::io,
                "the text cannot be read: " + failure.message())
        .at_path(path);
  }
  std::vector<std::uint8_t> bytes(size);
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
  if (!file) throw Error(ErrorCode::io, "the text cannot be read").at_path(path);
  return bytes;
}

}  // namespace

Text::Text(const std::string& path, std::int64_t seq, std::uint64_t seed)
    : bytes_(read_file(path)), window_(seq + 1), train_size_(size() - size() / 20), seed_(seed) {
  if (size() - train_size_ < window_) {
    throw tessera::Error(tessera::ErrorCode::invalid_argument,
                         "the text has " + std::to_string(size()) + " bytes; --seq " +
                             std::to_string(seq) + " needs " + std::to_string(20 * window_))
        .at_path(path);
  }
}

Text::Window Text::training(std::int64_t step, std::int64_t index) const {
  const std::uint64_t key =
      mix(mix(mix(seed_) + static_cast<std::uint64_t>(step)) + static_cast<std::uint64_t>(index));
  const auto starts = static_cast<std::uint64_t>(train_size_ - window_ + 1);
  return at(static_cast<std::int64_t>(key % starts));
}

Text::Window Text::validation(std::int64_t index, std::int64_t count) const {
  const std::int64_t starts = size() - train_size_ - window_ + 1;
  return at(train_size_ + starts * index / count);
}

Text::Window Text::at(std::int64_t begin) const {
  return Window(bytes_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(window_));
}

Share share_of(std::int64_t count, std::int64_t index, std::int64_t parts) {
  return {count * index / parts, count * (index + 1) / parts};
}
