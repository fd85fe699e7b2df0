// One rank that adds up with the others for ever, or until one of them is gone.
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 same_host_loop
// Prints the backend's name, then "going" when the first sum is right; exits with 3 and the error
// on stderr.
#include <torch/torch.h>

#include <chrono>
#include <cstdio>

#include "tessera/error.h"
#include "tessera/mesh.h"

namespace {

void add_up() {
  tessera::MeshOptions options;
  options.deadline = std::chrono::seconds(60);
  options.device = torch::kCPU;
  const auto mesh = tessera::Mesh::from_environment(options);
  std::printf("%s\n", mesh.process_group()->getDefaultBackend()->getBackendName().c_str());
  auto values = torch::empty({100000});
  for (int i = 0;; ++i) {
    values.fill_(mesh.rank() + i);
    mesh.all_reduce_sum(values);
    const double right = mesh.size() * (i + (mesh.size() - 1) / 2.0);
    if (values[0].item<double>() != right || values[99999].item<double>() != right) {
      throw tessera::Error(tessera::ErrorCode::corrupt, "the sum is wrong");
    }
    if (i == 0) {
      std::printf("going\n");
      std::fflush(stdout);
    }
    if (i == 1000) i = 0;
  }
}

}  // namespace

int main() {
  try {
    torch::set_num_threads(1);
    add_up();
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
