// The operators of the test device: one fallback that runs the CPU's, and the few that know of
// memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch/test_device/test_device.h"

namespace tessera::testing {
namespace {

using c10::IValue;

constexpr c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

// Operators whose result the host computes with, or whose shape depends on values.
constexpr std::array<std::string_view, 9> kReadBack = {"aten::_local_scalar_dense",
                                                       "aten::equal",
                                                       "aten::nonzero",
                                                       "aten::masked_select",
                                                       "aten::_unique2",
                                                       "aten::unique_dim",
                                                       "aten::unique_consecutive",
                                                       "aten::repeat_interleave",
                                                       "aten::nonzero_numpy"};

// One call of an operator, seen from the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), stack_(stack) {
    is_view_ = std::ranges::any_of(schema_.returns(), [](const auto& one) {
      return one.alias_info() != nullptr && !one.alias_info()->isWrite();
    });
    const auto count = schema_.arguments().size();
    arguments_.assign(stack.end() - static_cast<std::ptrdiff_t>(count), stack.end());
    for (std::size_t i = 0; i < count; ++i) enter(i);
  }

  void run() {
    const c10::DeviceGuard guard(test_device(device_));
    require_one_type();
    torch::jit::Stack host(converted_.begin(), converted_.end());
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      run_on_host(host);
    }
    if (!is_view_) note();
    std::vector<IValue> results;
    for (std::size_t i = 0; i < host.size(); ++i) results.push_back(result(i, host[i]));
    stack_.erase(stack_.end() - static_cast<std::ptrdiff_t>(arguments_.size()), stack_.end());
    for (auto& one : results) stack_.push_back(std::move(one));
  }

 private:
  struct Seen {
    at::Tensor original, host;
    bool writes = false;
    bool is_fresh = false;  // had no memory: the CPU's operator gives it some
  };

  [[nodiscard]] bool writes(std::size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias != nullptr && alias->isWrite();
  }

  at::Tensor enter(const at::Tensor& tensor, bool writes, bool is_out = false) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      has_host_ = has_host_ || tensor.dim() > 0 || in_list_;
      return tensor;
    }
    if (device_ >= 0 && device_ != tensor.device().index())
      TORCH_CHECK(false, schema_.name(), ": tensors of two devices");
    device_ = tensor.device().index();
    Seen seen{tensor, {}, writes, is_out && tensor.storage().nbytes() == 0};
    seen.host = seen.is_fresh ? at::empty({0}, tensor.options().device(at::kCPU))
                              : on_host(tensor, is_view_ ? Access::shape : Access::bytes);
    seen_.push_back(seen);
    return seen.host;
  }

  void enter(std::size_t i) {
    const auto& value = arguments_[i];
    if (value.isTensor()) {
      converted_.emplace_back(enter(value.toTensor(), writes(i), schema_.arguments()[i].is_out()));
    } else if (value.isTensorList()) {
      in_list_ = true;
      c10::List<at::Tensor> list;
      for (const at::Tensor& one : value.toTensorList()) list.push_back(enter(one, writes(i)));
      converted_.emplace_back(std::move(list));
      in_list_ = false;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorList())
        list.push_back(one ? std::optional(enter(*one, false)) : std::nullopt);
      converted_.emplace_back(std::move(list));
    } else if (value.isDevice()) {
      if (value.toDevice().is_privateuseone()) device_ = value.toDevice().index();
      converted_.emplace_back(c10::Device(at::kCPU));
    } else {
      converted_.push_back(value);
    }
    if (i + 1 == arguments_.size()) require_one_place();
  }

  void require_one_place() {
    if (device_ < 0) device_ = c10::impl::getDeviceGuardImpl(at::kPrivateUse1)->getDevice().index();
    TORCH_CHECK(!has_host_ || seen_.empty(), schema_.name(),
                ": a tensor of the CPU among those of the device");
  }

  [[nodiscard]] bool has_one_type(std::size_t argument, at::ScalarType type) const {
    if (!arguments_[argument].isTensorList()) return true;
    return std::ranges::all_of(arguments_[argument].toTensorVector(),
                               [&](const auto& one) { return one.scalar_type() == type; });
  }
  // The CPU's kernels of optimizers take one parameter after the other, CUDA's all at once.
  void require_one_type() const {
    if (!schema_.name().starts_with("aten::_fused_adam") || seen_.empty()) return;
    constexpr std::size_t kLists = 4;  // parameters, gradients and moments
    for (std::size_t i = 0; i < kLists; ++i)
      TORCH_CHECK(has_one_type(i, seen_.front().original.scalar_type()), schema_.name(),
                  ": tensors of two dtypes");
  }
  // CUDA's kernels for lists fall back to one for each tensor unless the list, and a number that is
  // a tensor, have one dtype.
  [[nodiscard]] std::size_t launches() const {
    if (!schema_.name().starts_with("aten::_foreach_") || seen_.empty()) return 1;
    const auto type = seen_.front().original.scalar_type();
    const bool has_other_number = arguments_.size() > 1 && arguments_[1].isTensor() &&
                                  arguments_[1].toTensor().scalar_type() != type;
    return has_one_type(0, type) && !has_other_number ? 1 : arguments_[0].toTensorVector().size();
  }

  // Convolutions reach a device by names that the CPU does not know. The backward is not told the
  // bias' size, which is that of the channels.
  void run_on_host(torch::jit::Stack& stack) const {
    const auto call = [&](const char* name) {
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
    };
    if (schema_.name() == "aten::convolution_overrideable") return call("aten::convolution");
    if (schema_.name() != "aten::convolution_backward_overrideable") return op_.callBoxed(stack);
    constexpr std::size_t kGradient = 0, kBiasSizes = 3;
    stack.insert(stack.begin() + kBiasSizes,
                 c10::List<std::int64_t>({stack[kGradient].toTensor().size(1)}));
    call("aten::convolution_backward");
  }

  // What a GPU would have to do for it.
  void note() {
    const bool is_empty = std::ranges::all_of(
        seen_, [](const auto& one) { return one.original.numel() == 0 && !one.is_fresh; });
    if (is_empty) return;
    std::string name = schema_.name().substr(std::string_view("aten::").size());
    for (std::size_t i = 0; i < launches(); ++i) moment_ = launch(device_, name);
    for (const auto& one : seen_) {
      if (!one.is_fresh) touch(*moment_, one.original, one.writes);
    }
    if (std::ranges::find(kReadBack, schema_.name()) != kReadBack.end()) {
      Clock clock;
      clock.join(race_log().clock(moment_->line));
      note_wait(device_, clock, name);
    }
  }

  IValue result(std::size_t i, const IValue& value) {
    if (value.isTensor()) return tensor_of(i, value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorList()) list.push_back(tensor_of(i, one));
    return list;
  }

  at::Tensor tensor_of(std::size_t i, const at::Tensor& host) {
    if (!host.defined()) return host;
    for (auto& one : seen_) {
      if (host.is_same(one.host)) {
        if (one.is_fresh) fill_fresh(one);
        return one.original;
      }
    }
    const auto* alias = schema_.returns()[std::min(i, schema_.returns().size() - 1)].alias_info();
    if (alias != nullptr) {
      for (const auto& one : seen_) {
        if (host.storage().unsafeGetStorageImpl() == one.host.storage().unsafeGetStorageImpl())
          return view_of(one.original, host);
      }
    }
    auto made = at::Tensor(at::detail::empty_strided_generic(host.sizes(), host.strides(),
                                                             c10::GetAllocator(at::kPrivateUse1),
                                                             kDeviceKeys, host.scalar_type()));
    fill(made, host);
    return made;
  }

  void fill(const at::Tensor& made, const at::Tensor& host) {
    if (host.numel() == 0) return;
    std::memcpy(made.storage().mutable_data(), static_cast<const char*>(host.const_data_ptr()),
                made.storage().nbytes());
    if (moment_) touch(*moment_, made, true);
  }

  void fill_fresh(Seen& one) {
    one.is_fresh = false;
    one.original.resize_(one.host.sizes());
    if (one.host.numel() == 0) return;
    if (!moment_) moment_ = launch(device_, schema_.name());
    std::memcpy(one.original.mutable_data_ptr(), one.host.contiguous().const_data_ptr(),
                one.host.nbytes());
    touch(*moment_, one.original, true);
  }

  static at::Tensor view_of(const at::Tensor& original, const at::Tensor& host) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(original.storage()), original.key_set(), host.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                      host.storage_offset());
    view._set_conj(host.is_conj());
    view._set_neg(host.is_neg());
    return view;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  std::vector<IValue> arguments_, converted_;
  std::vector<Seen> seen_;
  int device_ = -1;
  bool is_view_ = false, has_host_ = false, in_list_ = false;
  std::optional<Moment> moment_;
};

void run_on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call(op, *stack).run();
}

c10::DeviceGuard guard_of(std::optional<at::Device> device) {
  return c10::DeviceGuard(device && device->has_index()
                              ? *device
                              : c10::impl::getDeviceGuardImpl(at::kPrivateUse1)->getDevice());
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const auto guard = guard_of(device);
  return at::detail::empty_generic(sizes, c10::GetAllocator(at::kPrivateUse1), kDeviceKeys,
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const auto guard = guard_of(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(at::kPrivateUse1),
                                           kDeviceKeys, c10::dtype_or_default(type));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat>) {
  const auto elements = c10::multiply_integers(sizes);
  const auto bytes =
      static_cast<std::size_t>(elements + self.storage_offset()) * self.dtype().itemsize();
  auto& storage = *self.storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) {
    const auto guard = guard_of(self.device());
    auto memory = storage.allocator()->allocate(bytes);
    if (storage.nbytes() > 0) std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, std::int64_t offset,
                        at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  return self;
}

// Two tensors of the device: a kernel. Else a copy, which the host waits for unless nobody asked it
// to and the host's memory is page-locked.
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool up = to.is_privateuseone(), down = from.is_privateuseone();
  const int device = (up ? to : from).device().index();
  if (to.numel() == 0) return to;
  const auto& host = up ? from : to;
  const bool is_direct = from.scalar_type() == to.scalar_type() && from.is_contiguous() &&
                         to.is_contiguous() && !from.is_conj() && !from.is_neg();
  const auto moment = launch(device, up && down ? "copy_" : up ? "copy_ to it" : "copy_ from it");
  if (down) touch(moment, from, false);
  if (up) touch(moment, to, true);
  if (up && down) {
    on_host(to).copy_(on_host(from));
    return to;
  }
  const bool is_pinned = is_pinned_memory(host.const_data_ptr());
  if (non_blocking && is_pinned && is_direct) {
    if (up) {
      upload(device, moment, from.const_data_ptr(), from.nbytes());
      on_host(to).copy_(from);
    } else {
      download(device, moment, to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
    }
    return to;
  }
  on_host(to).copy_(on_host(from));
  if (non_blocking) count_pageable(device, up ? "copy to the device" : "copy from the device");
  note_wait(device, race_log().clock(moment.line), up ? "a copy to the device" : "a copy from it");
  return to;
}

// libtorch would resolve the bits by a copy.
TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("_copy_from", TORCH_FN(copy_from));
  // libtorch takes these apart, or gets their results one after the other, unless a device has
  // kernels of its own for them, as CUDA does.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto is_one = [&](std::string_view start) { return op.name.starts_with(start); };
    if (!is_one("aten::_foreach_") && !is_one("aten::convolution_overrideable") &&
        !is_one("aten::convolution_backward_overrideable") &&
        !is_one("aten::split_with_sizes_copy") && !is_one("aten::_chunk_cat") &&
        !is_one("aten::linalg_vector_norm"))
      continue;
    const auto name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

}  // namespace
}  // namespace tessera::testing
