// One rank that adds up with the others for ever, or until one of them is gone.
//   RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 same_host_loop
// Prints the backend's name, then "going" when the first sum is right; exits with 3 and the error
// on stderr. With a number it makes so many meshes, one after the other, forks while it has one,
// and adds up once over each; then it ends.
#include <torch/torch.h>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/mesh.h"

namespace {

tessera::Mesh make_mesh() {
  tessera::MeshOptions options;
  options.deadline = std::chrono::seconds(60);
  options.device = torch::kCPU;
  return tessera::Mesh::from_environment(options);
}

void add_up() {
  const auto mesh = make_mesh();
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

void require(bool holds, const std::string& what) {
  if (!holds) throw tessera::Error(tessera::ErrorCode::corrupt, what);
}

// What a child of fork() may do with its parent's mesh: nothing, not even end it. Nor with groups
// that were taken from it before.
int use_in_child(std::optional<tessera::Mesh>& mesh, tessera::Group& group, tessera::Group& saves) {
  ::alarm(30);
  const std::vector<std::function<void()>> uses{
      [&] { static_cast<void>(mesh->all_reduce_sum(1.0)); },
      [&] { static_cast<void>(mesh->group().rank()); }, [&] { group.barrier(); },
      [&] { saves.barrier(); }, [&] { saves.require_peers(); }};
  std::size_t refused = 0;
  for (const auto& use : uses) {
    try {
      use();
    } catch (const tessera::Error& error) {
      if (error.code() == tessera::ErrorCode::invalid_argument) ++refused;
    }
  }
  mesh.reset();
  return refused == uses.size() ? 0 : 1;
}

void fork_with(std::optional<tessera::Mesh>& mesh) {
  auto& group = mesh->group();
  auto& saves = mesh->checkpoint_group();
  const auto child = ::fork();
  if (child == 0) ::_exit(use_in_child(mesh, group, saves));
  int status = -1;
  require(::waitpid(child, &status, 0) == child && status == 0, "the child took part");
}

void make_several(int count) {
  std::optional<tessera::Mesh> before;  // at times, while the next one is made
  for (int i = 0; i < count; ++i) {
    std::optional<tessera::Mesh> mesh(make_mesh());
    const int size = mesh->size();
    require(mesh->all_reduce_sum(mesh->rank() + i) == size * (i + (size - 1) / 2.0), "the sum");
    if (i % 3 == 1) fork_with(mesh);
    require(mesh->all_reduce_sum(1.0) == size, "the sum after a fork");
    if (before) require(before->all_reduce_sum(2.0) == 2 * size, "the sum of another mesh");
    before = i % 2 == 0 ? mesh : std::nullopt;
  }
  std::printf("made %d\n", count);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    if (argc > 1) {
      make_several(std::atoi(argv[1]));
      return 0;
    }
    add_up();
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
