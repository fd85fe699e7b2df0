#include "torch/backends.h"

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#ifdef USE_C10D_NCCL
#include <ATen/cuda/CUDAContextLight.h>
#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <charconv>
#include <cstdlib>
#include <string>
#include <string_view>
#include <system_error>

#include "tessera/error.h"
#include "torch/delegating_backend.h"
#include "torch/same_host_backend.h"
#include "torch/torch_group.h"

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

// TESSERA_SAME_HOST_SLOT=BYTES: a rank's ring is 32 slots of so many.
same_host::RingSize wanted_ring() {
  same_host::RingSize ring;
  const char* text = std::getenv("TESSERA_SAME_HOST_SLOT");
  if (text == nullptr) return ring;
  const std::string_view choice = text;
  const auto [end, error] =
      std::from_chars(choice.data(), choice.data() + choice.size(), ring.slot_bytes);
  constexpr std::size_t kLeast = 4096, kMost = 64U << 20U, kLine = 64;
  const bool is_size = error == std::errc() && end == choice.data() + choice.size() &&
                       ring.slot_bytes >= kLeast && ring.slot_bytes <= kMost &&
                       ring.slot_bytes % kLine == 0;
  if (is_size) return ring;
  throw Error(ErrorCode::invalid_argument,
              "TESSERA_SAME_HOST_SLOT=" + std::string(choice) +
                  ", expected bytes, a multiple of 64 from 4096 to 67108864");
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, const MeshOptions& options) {
#ifdef USE_C10D_NCCL
  using Nccl = c10d::ProcessGroupNCCL;
  auto nccl = Nccl::Options::create();
  nccl->timeout = options.deadline;
  return c10::make_intrusive<Nccl>(store, rank, size, nccl);
#else
  static_cast<void>(store), static_cast<void>(rank), static_cast<void>(size);
  static_cast<void>(options);
  throw Error(ErrorCode::unsupported, "this build has no NCCL for a mesh on a CUDA device");
#endif
}

// TESSERA_CUDA_BACKEND=gloo: through the host's memory, for ranks that share a device.
bool is_cuda_over_host() {
  const char* text = std::getenv("TESSERA_CUDA_BACKEND");
  const std::string_view choice = text != nullptr ? text : "nccl";
  if (choice == "gloo" || choice == "nccl") return choice == "gloo";
  throw Error(ErrorCode::invalid_argument,
              "TESSERA_CUDA_BACKEND=" + std::string(choice) + ", expected nccl or gloo");
}

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

bool goes_over_host(torch::Device device) {
  return !device.is_cuda() || is_cuda_over_host();
}

std::string physical_name(torch::Device device) {
#ifdef USE_C10D_NCCL
  if (device.is_cuda()) {
    const auto* found = at::cuda::getDeviceProperties(device.index());
    return std::to_string(found->pciDomainID) + ":" + std::to_string(found->pciBusID) + ":" +
           std::to_string(found->pciDeviceID);
  }
#endif
  return device.str();
}

c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, torch::Device device,
    const MeshOptions& options) {
  auto group = c10::make_intrusive<ProcessGroup>(store, rank, size);
  const auto set = [&](at::DeviceType type, ProcessGroup::BackendType kind,
                       const c10::intrusive_ptr<c10d::Backend>& backend) {
    group->setBackend(type, kind, backend);
    group->setDefaultBackend(kind);
  };
  const auto gloo =
      make_gloo(c10::make_intrusive<c10d::PrefixStore>("tessera/gloo", store), rank, size, options);
  if (!goes_over_host(device)) {
    set(torch::kCPU, ProcessGroup::BackendType::GLOO, gloo);
    set(device.type(), ProcessGroup::BackendType::NCCL,
        make_nccl(c10::make_intrusive<c10d::PrefixStore>("tessera/nccl", store), rank, size,
                  options));
    return group;
  }
  const auto same_host = make_same_host_backend(
      c10::make_intrusive<c10d::PrefixStore>("tessera/same_host", store), rank, size,
      {.wanted = wants_same_host(options),
       .deadline = options.deadline,
       .ring = wanted_ring(),
       .others = gloo});
  if (device.is_cpu()) {
    if (same_host) {
      set(torch::kCPU, ProcessGroup::BackendType::CUSTOM, same_host);
    } else {
      set(torch::kCPU, ProcessGroup::BackendType::GLOO, gloo);
    }
    return group;
  }
  set(torch::kCPU, ProcessGroup::BackendType::GLOO, gloo);
  set(device.type(), ProcessGroup::BackendType::CUSTOM,
      make_staged_backend(same_host ? same_host : gloo, device));
  return group;
}

c10::intrusive_ptr<c10d::ProcessGroup> with_messages(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const c10::intrusive_ptr<c10d::Store>& store, torch::Device device,
    const MeshOptions& options) {
  const auto served = group->getDeviceTypes();
  const auto serves = [&](at::DeviceType type) {
    return std::ranges::find(served, type, &at::Device::type) != served.end();
  };
  if (!serves(device.type())) {
    throw Error(ErrorCode::invalid_argument,
                "the process group has no backend for devices of type " +
                    c10::DeviceTypeName(device.type(), true));
  }
  const bool has_default = group->getBackendType() != ProcessGroup::BackendType::UNDEFINED;
  if (has_default && serves(torch::kCPU)) return group;
  auto made = c10::make_intrusive<ProcessGroup>(store, group->getRank(), group->getSize());
  const auto gloo = serves(torch::kCPU)
                        ? group->getBackend(torch::kCPU)
                        : make_gloo(c10::make_intrusive<c10d::PrefixStore>("tessera/gloo", store),
                                    group->getRank(), group->getSize(), options);
  made->setBackend(torch::kCPU, ProcessGroup::BackendType::GLOO, gloo);
  made->setDefaultBackend(ProcessGroup::BackendType::GLOO);
  if (device.is_cpu()) return made;
  made->setBackend(device.type(), ProcessGroup::BackendType::CUSTOM,
                   group->getBackend(device.type()));
  made->setDefaultBackend(ProcessGroup::BackendType::CUSTOM);
  return made;
}

c10::intrusive_ptr<c10d::ProcessGroup> make_reduction_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, torch::Device device,
    const MeshOptions& options) {
  if (!device.is_cuda() || is_cuda_over_host()) return {};
  auto group = c10::make_intrusive<ProcessGroup>(store, rank, size);
  group->setBackend(device.type(), ProcessGroup::BackendType::NCCL,
                    make_nccl(c10::make_intrusive<c10d::PrefixStore>("tessera/reductions", store),
                              rank, size, options));
  group->setDefaultBackend(ProcessGroup::BackendType::NCCL);
  return group;
}

}  // namespace tessera
