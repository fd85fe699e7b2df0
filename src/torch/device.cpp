#include "torch/device.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include <torch/torch.h>

#include "base/log.h"
#include "base/process.h"
#include "comm/message.h"
#include "comm/segment.h"
#include "tessera/error.h"
#include "torch/backends.h"

namespace tessera {
namespace {

bool is_elsewhere(torch::Device device) {
  return !device.is_cpu();
}

std::vector<torch::Device> each_once(const std::vector<torch::Device>& devices) {
  std::vector<torch::Device> found;
  for (const auto& device : devices) {
    if (std::ranges::find(found, device) == found.end()) found.push_back(device);
  }
  return found;
}

// `first`: of those that are not the CPU.
void require_one_type(const std::vector<torch::Device>& found, torch::Device first) {
  for (const auto& device : found) {
    if (device.is_cpu() || device.type() == first.type()) continue;
    throw Error(ErrorCode::invalid_argument,
                "FSDP does not support modules with different device types but got params on " +
                    c10::DeviceTypeName(first.type(), true) + " and " +
                    c10::DeviceTypeName(device.type(), true));
  }
}

void require_one_device(const std::vector<torch::Device>& found) {
  if (std::ranges::count_if(found, is_elsewhere) < 2) return;
  std::string all;
  for (const auto& device : found) all += (all.empty() ? "" : ", ") + device.str();
  throw Error(ErrorCode::invalid_argument,
              "FSDP only supports single device modules but got params on " + all);
}

}  // namespace

torch::Device resolve_device(torch::Device asked, int rank, const std::function<int()>& current) {
  if (asked.has_index() || asked.is_cpu() || asked.is_meta()) return asked;
  const torch::Device found(asked.type(), static_cast<c10::DeviceIndex>(current()));
  log(LogLevel::warning,
      "FSDP got the argument `device_id` " + asked.str() + " on rank " + std::to_string(rank) +
          ", which does not have an explicit index. FSDP will use the current device " +
          found.str() + ". If this is incorrect, give MeshOptions::device its index.");
  return found;
}

void require_movable(const std::vector<torch::Device>& parameters, torch::Device mesh, int rank) {
  const auto found = each_once(parameters);
  const auto first = std::ranges::find_if(found, is_elsewhere);
  if (first == found.end()) return;
  require_one_type(found, *first);
  require_one_device(found);
  if (*first == mesh) return;
  if (found.size() > 1) {
    throw Error(ErrorCode::invalid_argument,
                "To support a module with both CPU and GPU params, please pass in device_id "
                "argument: make the mesh with MeshOptions::device = " +
                    first->str());
  }
  throw Error(ErrorCode::invalid_argument, "Inconsistent compute device and `device_id` on rank " +
                                               std::to_string(rank) + ": " + first->str() + " vs " +
                                               mesh.str());
}

void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (tensor.is_meta() == data.is_meta() &&
      tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(data.key_set())) {
    tensor.set_data(data);
  } else {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
  }
}

void settle_vector_math() {
  using Function = at::Tensor (*)(const at::Tensor&);
  // Those that ATen/cpu/vml.h gives to MKL.
  constexpr Function functions[] = {at::acos, at::asin, at::atan,   at::cos,   at::erf, at::erfc,
                                    at::exp,  at::log,  at::erfinv, at::log10, at::sin, at::sqrt,
                                    at::tan,  at::tanh, at::trunc,  at::log2};
  static const bool settled = [&] {
    const torch::NoGradGuard no_grad;
    for (const auto type : {at::kFloat, at::kDouble}) {
      const auto half = at::full({1}, 0.5, at::device(at::kCPU).dtype(type));
      for (const auto function : functions) function(half);
    }
    return true;
  }();
  static_cast<void>(settled);
}

namespace {

// "0 and 2", "0, 1 and 2".
std::string listed(const std::vector<std::size_t>& ranks) {
  std::string text;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

auto fields(FieldsOf<RankDevice> auto& device) {
  return std::tie(device.name, device.host, device.machine, device.physical);
}

std::vector<RankDevice> everyones_device(Group& group, torch::Device mine) {
  // Without a boot id the host's name has to do.
  const auto host = host_name(), boot = same_host::boot_id();
  const RankDevice own{mine.str(), host, boot.empty() ? host : boot, physical_name(mine)};
  const auto all = group.all_gather(to_message(own));
  std::vector<RankDevice> by_rank;
  by_rank.reserve(all.size());
  for (const auto& one : all) by_rank.push_back(from_message<RankDevice>(one));
  return by_rank;
}

void require_own_devices(const std::vector<RankDevice>& by_rank) {
  std::map<std::pair<std::string, std::string>, std::vector<std::size_t>> ranks;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
    ranks[{by_rank[rank].machine, by_rank[rank].physical}].push_back(rank);
  for (const auto& one : by_rank) {
    const auto& sharing = ranks.at({one.machine, one.physical});
    if (sharing.size() == 1) continue;
    throw Error(ErrorCode::invalid_argument,
                "ranks " + listed(sharing) + " share a device, " + one.name + " of host " +
                    one.host +
                    ": each rank needs one of its own (LOCAL_RANK or MeshOptions::device choose "
                    "it; start no more ranks on a host than it has devices), unless "
                    "TESSERA_CUDA_BACKEND=gloo is set on all ranks, which is slow");
  }
}

}  // namespace tessera
