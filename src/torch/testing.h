// For tests: threads as ranks of one mesh, what they throw, and tensors and first values of models
// wherever the ranks compute.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/error.h"
#include "tessera/mesh.h"
#include "torch/device.h"

namespace tessera::testing {

// What an Error that `work` throws says.
template <typename Work>
std::string error_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "no Error";
}

// The device on which ranks compute whose test does not say; the CPU unless a program's own file
// sets another one.
inline std::function<torch::Device(int rank)>& device_of_ranks() {
  static std::function<torch::Device(int)> device = [](int) { return torch::Device(torch::kCPU); };
  return device;
}

// Runs `body` on `ranks` threads, each with its own Mesh, and joins them. Rethrows the first
// failure by rank, preferring one that is not merely the loss of a peer. Without `same_host` they
// meet through Gloo. A rank whose body returns keeps its mesh until all bodies have ended, for a
// second at most: else one that is slower might lose its connections before it comes to what its
// test expects. A rank that throws is lost to the others at once.
inline void run_mesh(int ranks, const std::function<void(Mesh&)>& body,
                     std::chrono::milliseconds deadline = std::chrono::seconds(30),
                     bool same_host = true,
                     const std::function<torch::Device(int rank)>& device_of = device_of_ranks()) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> failures(ranks);
  std::mutex mutex;
  std::condition_variable changed;
  int running = ranks;  // guarded by mutex
  const auto end = [&] {
    const std::lock_guard lock(mutex);
    --running;
    changed.notify_all();
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);  // of this thread's own team: ranks share few cores
        MeshOptions options;
        options.deadline = deadline;
        options.same_host = same_host;
        options.device = device_of(rank);
        Mesh mesh = ranks == 1 ? Mesh(options) : Mesh(store, rank, ranks, options);
        body(mesh);
        end();
        std::unique_lock lock(mutex);
        changed.wait_for(lock, std::chrono::seconds(1), [&] { return running == 0; });
      } catch (...) {
        failures[rank] = std::current_exception();
        end();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::exception_ptr lost_peer;
  for (const auto& failure : failures) {
    if (!failure) continue;
    try {
      std::rethrow_exception(failure);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::peer_failed && e.code() != ErrorCode::timeout) throw;
      if (!lost_peer) lost_peer = failure;
    }
  }
  if (lost_peer) std::rethrow_exception(lost_peer);
}

// Values, wherever they are.
inline bool equal(const torch::Tensor& found, const torch::Tensor& expected) {
  return torch::equal(found.cpu(), expected.cpu());
}
inline bool allclose(const torch::Tensor& found, const torch::Tensor& expected,
                     double relative = 1e-5, double absolute = 1e-8) {
  return torch::allclose(found.cpu(), expected.cpu(), relative, absolute);
}

// As module->to() does: what no unit holds is the user's to move.
inline void move_to(const torch::Device& device, const std::vector<torch::Tensor>& tensors) {
  for (const auto& tensor : tensors) replace_data(tensor, tensor.detach().to(device));
}
inline void move_to(const torch::Device& device, const torch::nn::Module& module) {
  move_to(device, module.parameters());
  move_to(device, module.buffers());
}

// First values distributed as libtorch's constructors do it, the same for the same `seed`, whatever
// other ranks draw: these are threads, and libtorch's default generator is one for all of them.
// Parameters of one dimension that are no Linear's stay what they are: those of norms.
template <typename Holder>
Holder with_values(Holder holder, std::uint64_t seed) {
  const torch::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  for (const auto& module : holder->modules()) {
    const bool is_linear = module->template as<torch::nn::Linear>() != nullptr;
    const bool is_table = module->template as<torch::nn::Embedding>() != nullptr;
    double bound = 0;
    for (auto& parameter : module->parameters(/*recurse=*/false)) {
      if (parameter.dim() > 1) bound = 1 / std::sqrt(static_cast<double>(parameter.size(-1)));
      if (is_table) {
        parameter.normal_(0, 1, generator);
      } else if (is_linear || parameter.dim() > 1) {
        parameter.uniform_(-bound, bound, generator);
      }
    }
  }
  return holder;
}

// Autocast of this thread to bfloat16, if `on`, as by Python's `with torch.autocast("cpu")`.
class Autocast {
 public:
  explicit Autocast(bool on = true, bool keeps_casts = true) : on_(on) {
    if (!on_) return;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_cache_enabled(keeps_casts);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_cache_enabled(true);
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  bool on_;
};

}  // namespace tessera::testing
