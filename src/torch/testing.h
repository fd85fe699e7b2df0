// For tests: threads as ranks of one mesh, and what they throw.
#pragma once

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tessera/error.h"
#include "tessera/mesh.h"

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

}  // namespace tessera::testing
