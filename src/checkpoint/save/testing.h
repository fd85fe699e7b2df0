// What tests of saves share.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/test_support.h"

namespace tessera::testing_support {

// Which ranks wrote the chunks of each tensor, in the order of their places.
inline std::map<std::string, std::vector<char>> writers_in(const std::string& directory) {
  std::map<std::string, std::vector<char>> writers;
  for (const dcp::Entry& entry : read_dcp_metadata(*posix_store(directory)).entries) {
    std::map<Shape, char> by_place;  // "__R_...": the third character, of fewer than ten ranks
    for (const dcp::Chunk& chunk : entry.chunks)
      by_place[chunk.box.offsets] = chunk.item.path.at(2);
    for (const auto& [place, writer] : by_place) writers[entry.name].push_back(writer);
  }
  return writers;
}

// Whole on every rank.
inline Tensor copy_of_all(const Shape& shape, float first) {
  Tensor tensor = counting(shape, whole(shape), first);
  tensor.sharded = false;
  return tensor;
}

}  // namespace tessera::testing_support
