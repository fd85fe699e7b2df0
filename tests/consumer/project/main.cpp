#include <iostream>

#include <tessera/checkpoint.h>
#include <tessera/comm.h>
#include <tessera/version.h>  // an old name, of library.h

// Prints how many tensors the checkpoint of the first argument holds; saves a state in the folder
// of the second one, loads it again and prints what it got.
int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const tessera::Checkpoint checkpoint = tessera::Checkpoint::open(argv[1]);
  std::cout << checkpoint.leaves.size() << " tensors, " << to_string(checkpoint.kind) << '\n';
  const auto group = tessera::solo_group();
  tessera::save(tessera::Value::dict({{"step", 7}}), argv[2], *group);
  tessera::Value state = tessera::Value::dict({{"step", 0}});
  tessera::load(state, argv[2], *group);
  std::cout << tessera::version() << " step " << state.at("step").as_int() << '\n';
}
