// Wraps modules where they are made, and counts the ranks of a host.
//
//   struct GptImpl : torch::nn::Module {
//     Block block = register_module("block", wrap(Block()));
//   };
//   {
//     const EnableWrap scope(mesh, {.use_orig_params = true});
//     gpt = Gpt();               // its blocks are units
//   }
//   Gpt plain;                   // outside of the scope `wrap` does nothing
#pragma once

#include <functional>

#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace [[gnu::visibility("default")]] tessera {

// EnableWrap lets wrap() on this thread make units with these options while it lives. Throws
// `unsupported` while another one lives.
class [[nodiscard]] EnableWrap {
 public:
  explicit EnableWrap(const Mesh& mesh, const FullyShardedOptions& options = {});
  explicit EnableWrap(const HybridMesh& mesh, const FullyShardedOptions& options = {});
  ~EnableWrap();
  EnableWrap(const EnableWrap&) = delete;
  EnableWrap& operator=(const EnableWrap&) = delete;

 private:
  EnableWrap(const HybridMesh& mesh, bool is_hybrid, const FullyShardedOptions& options);
};

namespace detail {

void wrap_in_scope(const std::shared_ptr<torch::nn::Module>& module, SlotMaker slot_maker,
                   const std::function<void(FullyShardedOptions&)>& override_options);

}  // namespace detail

// wrap() does to `module`, a holder, what FullyShardedDataParallel does, with the scope's options
// as `override_options` changes them, while an EnableWrap lives. Otherwise it does nothing. Returns
// the holder. Collective while an EnableWrap lives.
template <typename Holder>
Holder wrap(Holder module, const std::function<void(FullyShardedOptions&)>& override_options = {}) {
  detail::wrap_in_scope(module.ptr(), detail::make_slot_maker(module.ptr()), override_options);
  return module;
}

// How many ranks of `mesh` each host has: LOCAL_WORLD_SIZE, as torchrun sets it, else by counting.
// Throws `invalid_argument` if hosts have different numbers of ranks, also as the variable says, or
// if the ranks of a host are not neighbours. Collective.
[[nodiscard]] int ranks_of_host(const Mesh& mesh);

}  // namespace tessera
