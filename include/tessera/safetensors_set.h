// Safetensors in several files with an index, as huggingface has large models: which tensor goes
// into which file.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace [[gnu::visibility("default")]] tessera {

struct SafetensorsSet {
  // By name, the number of a tensor's file, from 1 on. The largest number N is that of the files:
  // number i is model-0000i-of-0000N.safetensors. One that no tensor has is not written. Every
  // tensor must have a number, else that is `invalid_argument`. Empty: `max_size` decides.
  std::map<std::string, int> file_of = {};
  // Tensors go into files in their order, a new one where one would have more bytes than this. One
  // that is larger has a file to itself. If one file holds all, it is model.safetensors, without an
  // index. 0: one file.
  std::uint64_t max_size = 0;
};

}  // namespace tessera
