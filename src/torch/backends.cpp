#include "torch/backends.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef USE_C10D_NCCL
#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <cstdlib>
#include <string>
#include <string_view>

#include "tessera/error.h"
#include "torch/gloo_wire.h"
#include "torch/same_host_backend.h"

namespace tessera {
namespace {

using c10d::ProcessGroup;

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, const MeshOptions& options) {
  using Gloo = c10d::ProcessGroupGloo;
  auto gloo = Gloo::Options::create(options.deadline);
  gloo->threads = options.gloo_threads;
  gloo->devices.push_back(make_gloo_device());
  return c10::make_intrusive<Gloo>(store, rank, size, gloo);
}

bool wants_same_host(const MeshOptions& options) {
  const char* text = std::getenv("TESSERA_SAME_HOST");
  const std::string_view choice = text != nullptr ? text : "1";
  if (choice != "0" && choice != "1") {
    throw Error(ErrorCode::invalid_argument,
                "TESSERA_SAME_HOST=" + std::string(choice) + ", expected 0 or 1");
  }
  return options.same_host && choice == "1";
}

#ifdef USE_C10D_NCCL
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, const MeshOptions& options) {
  using Nccl = c10d::ProcessGroupNCCL;
  auto nccl = Nccl::Options::create();
  nccl->timeout = options.deadline;
  return c10::make_intrusive<Nccl>(store, rank, size, nccl);
}
#endif

}  // namespace

torch::Device default_device(int local_rank) {
#ifdef USE_C10D_NCCL
  if (torch::cuda::is_available()) {
    return {torch::kCUDA, static_cast<c10::DeviceIndex>(local_rank % torch::cuda::device_count())};
  }
#endif
  static_cast<void>(local_rank);
  return torch::kCPU;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, torch::Device device,
    const MeshOptions& options) {
  auto group = c10::make_intrusive<ProcessGroup>(store, rank, size);
  const auto cpu_store = c10::make_intrusive<c10d::PrefixStore>("tessera/gloo", store);
  const auto gloo = make_gloo(cpu_store, rank, size, options);
  if (device.is_cpu()) {
    const auto same_host = make_same_host_backend(
        c10::make_intrusive<c10d::PrefixStore>("tessera/same_host", store), rank, size,
        {.wanted = wants_same_host(options), .deadline = options.deadline, .others = gloo});
    if (same_host) {
      group->setBackend(torch::kCPU, ProcessGroup::BackendType::CUSTOM, same_host);
      group->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
      return group;
    }
  }
  group->setBackend(torch::kCPU, ProcessGroup::BackendType::GLOO, gloo);
  group->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  if (device.is_cuda()) {
#ifdef USE_C10D_NCCL
    const auto cuda_store = c10::make_intrusive<c10d::PrefixStore>("tessera/nccl", store);
    group->setBackend(torch::kCUDA, ProcessGroup::BackendType::NCCL,
                      make_nccl(cuda_store, rank, size, options));
    group->setDefaultBackend(ProcessGroup::BackendType::NCCL);
#else
    throw Error(ErrorCode::unsupported, "this libtorch has no NCCL for a mesh on " + device.str());
#endif
  } else if (!device.is_cpu()) {
    throw Error(ErrorCode::unsupported, "no backend serves a mesh on " + device.str());
  }
  return group;
}

}  // namespace tessera
