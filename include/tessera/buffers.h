// Buffers that are no part of a module's state: register_buffer with PyTorch's `persistent`, which
// libtorch's own register_buffer does not have.
//
//   struct AttentionImpl : torch::nn::Module {
//     torch::Tensor mask;
//     AttentionImpl() {
//       mask = tessera::register_buffer(*this, "mask", torch::ones({8, 8}).tril(), false);
//     }
//   };
//
// A buffer that is not persistent can be made again and does not belong in a checkpoint: saves,
// loads and state dicts of this library do not know it, so that a module has the names of a Python
// one with persistent=False. In all else (to(), mixed precision, sync_buffers, named_buffers) it is
// a buffer like others. libtorch's own torch::save(module, ...) writes it.
//
// That belongs to the tensor, not to the module: it holds where two modules have one buffer under
// one name, it ends with the tensor, and a tensor that takes its place says it anew.
// Module::clone() makes other tensors by the module's reset(), which says it there, or
// set_persistent has to be called for the clone. Any thread may call these functions.
#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <string>

namespace [[gnu::visibility("default")]] tessera {

// Registers `tensor` as Module::register_buffer does, and returns what that returns. An undefined
// tensor is in no state, whatever `persistent` says.
torch::Tensor& register_buffer(torch::nn::Module& module, const std::string& name,
                               const torch::Tensor& tensor, bool persistent = true);

// The same for a buffer that is there. Throws `not_found` if `module` itself has no such buffer.
void set_persistent(torch::nn::Module& module, const std::string& name, bool persistent);
[[nodiscard]] bool is_persistent(const torch::nn::Module& module, const std::string& name);

}  // namespace tessera
