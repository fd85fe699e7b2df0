// Trees with known elements, split over ranks, for the tests of this folder.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "format/dcp/dcp.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/restore.h"
#include "tessera/verify.h"

namespace tessera::testing_support {

// A new directory; removed with the process.
inline std::string temporary_directory() {
  static std::deque<TemporaryDirectory> made;
  return made.emplace_back().path();
}

inline std::shared_ptr<Storage> memory(std::size_t bytes) {
  auto storage = std::make_shared<Storage>();
  const auto owner = std::make_shared<std::vector<std::byte>>(std::max<std::size_t>(bytes, 1));
  storage->data = owner->data();
  storage->owner = owner;
  storage->size = bytes;
  return storage;
}

// Piece `slice` of a float tensor whose element at global position i is `first + i`.
inline Tensor counting(const Shape& shape, const Slice& slice, float first, bool fill = true) {
  Tensor tensor;
  tensor.shape = shape;
  tensor.sharded = true;
  Piece piece{slice, memory(static_cast<std::size_t>(numel(slice)) * 4), 0, {}, -1};
  auto* data = reinterpret_cast<float*>(piece.storage->data);
  const RunSequence runs(slice, shape);
  for (std::int64_t r = 0; fill && r < runs.size(); ++r) {
    const Run run = runs[r];
    for (std::int64_t i = 0; i < run.count; ++i)
      data[run.local + i] = first + static_cast<float>(run.global + i);
  }
  tensor.pieces.push_back(std::move(piece));
  return tensor;
}

// Rank `rank`'s rows of a tensor split along `dim` as torch.chunk does (P-18).
inline Box chunk(const Shape& shape, int rank, int ranks, std::size_t dim = 0) {
  return chunk_of(whole(shape), dim, ranks, rank);
}

inline std::vector<float> floats(const Tensor& tensor) {
  const Piece& piece = tensor.pieces.at(0);
  std::vector<float> values(static_cast<std::size_t>(numel(piece.slice)));
  if (!values.empty()) std::memcpy(values.data(), piece.storage->data, values.size() * 4);
  return values;
}

using tessera::code_of;

// The checkpoints that PyTorch and others wrote.
inline const std::string kGolden = std::string(TESSERA_TEST_DATA) + "/golden/";

inline ErrorCode open_code(const std::string& path) {
  return code_of([&] { (void)Checkpoint::open(path); });
}

// The names of a state of a model and its optimizer.
inline LiveNames names_of(const Value& state) {
  LiveNames live;
  for (const auto& [key, value] : state.at("model").pairs()) live.names.push_back(key.as_string());
  live.groups = state.at("optim").at("param_groups");
  return live;
}

inline dcp::Entry& entry_of(dcp::Metadata& metadata, const std::string& name) {
  for (dcp::Entry& entry : metadata.entries) {
    if (entry.name == name) return entry;
  }
  throw std::runtime_error(name);
}

// What stands in a directory, sorted.
inline std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    names.push_back(entry.path().filename());
  std::ranges::sort(names);
  return names;
}

// A copy of a golden directory, `golden` with its path, that a test may damage.
inline std::string copy_of(const std::string& golden) {
  namespace fs = std::filesystem;
  const std::string directory = temporary_directory() + "/c";
  fs::copy(golden, directory, fs::copy_options::recursive);
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    fs::permissions(entry.path(), fs::perms::owner_write, fs::perm_options::add);
  }
  return directory;
}

inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_text(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Replaces the only occurrence of `from` by as many bytes.
inline void patch(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = text_of(path);
  ASSERT_EQ(from.size(), to.size());
  ASSERT_NE(text.find(from), std::string::npos);
  ASSERT_EQ(text.find(from), text.rfind(from));
  write_text(path, text.replace(text.find(from), from.size(), to));
}

}  // namespace tessera::testing_support
