#include "fsdp/wrap/slots_of_libtorch.h"

#include <torch/torch.h>

#include <typeinfo>

namespace tessera::detail {
namespace {

// A class that derives from Impl may be what the slot holds: its own type has to be known.
template <typename Impl>
SlotMaker maker_if_is(const std::shared_ptr<torch::nn::Module>& module) {
  if (typeid(*module) != typeid(Impl)) return nullptr;
  return make_slot_maker(std::dynamic_pointer_cast<Impl>(module));
}

template <typename... Impls>
SlotMaker first_maker(const std::shared_ptr<torch::nn::Module>& module) {
  SlotMaker maker;
  static_cast<void>(((maker = maker_if_is<Impls>(module)) || ...));
  return maker;
}

}  // namespace

SlotMaker slot_maker_of_libtorch(const std::shared_ptr<torch::nn::Module>& module) {
  using namespace torch::nn;  // NOLINT(google-build-using-namespace)
  return first_maker<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl,
                     Conv2dImpl, Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl,
                     ConvTranspose3dImpl, LayerNormImpl, GroupNormImpl, BatchNorm1dImpl,
                     BatchNorm2dImpl, BatchNorm3dImpl, InstanceNorm1dImpl, InstanceNorm2dImpl,
                     InstanceNorm3dImpl, PReLUImpl, RNNImpl, LSTMImpl, GRUImpl>(module);
}

}  // namespace tessera::detail
