// The checker of tests/crash/kill_test.py:
//   check_saved CHECKPOINT       prints the number that all elements of a whole checkpoint equal
// Exit 3 with one line when the checkpoint is not whole, 4 when its elements are of several saves.
#include <cstdio>
#include <cstring>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    const tessera::Checkpoint checkpoint = tessera::Checkpoint::open(argv[1]);
    const tessera::Value tree = checkpoint.load();
    const auto step = static_cast<float>(tree.at("step").as_int());
    for (const auto& [name, value] : tree.at("model").pairs()) {
      const tessera::Piece& piece = value.as_tensor().pieces.at(0);
      for (std::size_t at = 0; at < piece.storage->size; at += sizeof(float)) {
        float element = 0;
        std::memcpy(&element, piece.storage->data + at, sizeof element);
        if (element == step) continue;
        std::fprintf(stderr, "%s holds %g in save %g\n", name.as_string().c_str(), element, step);
        return 4;
      }
    }
    std::printf("%g\n", step);
    return 0;
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
