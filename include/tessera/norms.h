// Norms of parameters and gradients of which each rank has a part, for logs and checks.
//
//   const auto parameters = sharded_parameters(model);
//   const double total = get_total_norm(parameters, NormOf::gradients);
//   std::cout << "gradients " << total << "\n";
//   for (const auto& [name, norm] : norms_by_name(parameters, NormOf::parameters))
//     std::cout << name << " " << norm << "\n";
//
// No parameter is gathered: ranks exchange a number for each norm. All ranks get the same numbers,
// those of the whole tensors, and a number that is none reaches all of them.
// What clips gradients takes the same norm of them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tessera/parameter.h"

namespace [[gnu::visibility("default")]] tessera {

enum class NormOf : std::uint8_t { parameters, gradients };

// The norm of all of them as one vector: PyTorch's torch.nn.utils.get_total_norm. `norm_type` is
// the p of the p-norm, above 0; infinity means the largest magnitude. Missing gradients count as
// zero. Sums are made in float32 at least. Throws `invalid_argument` for another `norm_type`,
// `unsupported` for parameters of two meshes. Collective over the parameters' mesh: every rank
// gives the same parameters.
[[nodiscard]] double get_total_norm(const std::vector<ShardedParameter>& parameters, NormOf of,
                                    double norm_type = 2.0);

// The norm of each one, with its name, in the order that is given; 0 where there is no gradient.
// FSDP1's flat parameter is one. Throws the same. Collective in the same way: one exchange for all.
[[nodiscard]] std::vector<std::pair<std::string, double>> norms_by_name(
    const std::vector<ShardedParameter>& parameters, NormOf of, double norm_type = 2.0);

// clip_grad_norm (tessera/optim.h) for a device: the norm stays there, as a float64 number that
// item() waits for, and so does the factor. The host goes on at once, unless gradients are on the
// CPU of a mesh on a device (offload). Without a mesh the norm is where the gradients are.
torch::Tensor clip_grad_norm_(const std::vector<ShardedParameter>& parameters, double max_norm,
                              double norm_type = 2.0);

}  // namespace tessera
