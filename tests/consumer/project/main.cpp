#include <iostream>

#include <tessera/checkpoint.h>

// Prints how many tensors the checkpoint of the first argument holds.
int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const tessera::Checkpoint checkpoint = tessera::open_checkpoint(argv[1]);
  std::cout << checkpoint.leaves.size() << " tensors, " << to_string(checkpoint.kind) << '\n';
}
