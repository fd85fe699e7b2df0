// The names that differ between libtorch versions (2.11 to 2.13), and nothing else.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace tessera::compat {

// How libtorch holds a Node: an intrusive_ptr since 2.13, a shared_ptr before.
using NodePtr =
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

template <typename NodeType, typename... Arguments>
NodePtr make_node(Arguments&&... arguments) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return NodePtr(new NodeType(std::forward<Arguments>(arguments)...),
                   [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<NodeType>(std::forward<Arguments>(arguments)...);
  }
}

template <typename Group = c10d::ProcessGroup>
c10::intrusive_ptr<c10d::Work> all_gather(Group& group, at::Tensor& out, at::Tensor& in) {
  if constexpr (requires { group.all_gather_single(out, in); }) {
    return group.all_gather_single(out, in);
  } else {
    return group._allgather_base(out, in);
  }
}

template <typename Group = c10d::ProcessGroup>
c10::intrusive_ptr<c10d::Work> reduce_scatter(Group& group, at::Tensor& out, at::Tensor& in,
                                              const c10d::ReduceScatterOptions& options = {}) {
  if constexpr (requires { group.reduce_scatter_single(out, in, options); }) {
    return group.reduce_scatter_single(out, in, options);
  } else {
    return group._reduce_scatter_base(out, in, options);
  }
}

// Whether libtorch lets a storage refuse access with a text of ours and take that back
// (since 2.12). Before, a storage without memory is refused by libtorch's own check, in its own
// words.
template <typename Storage = c10::StorageImpl>
inline constexpr bool kForbidsAccess = requires(Storage& storage) {
  storage.clear_data_ptr_access_error_msg_();
};

// A storage whose bytes must not be touched: every access throws a c10::Error with `text`.
template <typename Storage = c10::StorageImpl>
void forbid_access(Storage& storage, const std::string& text) {
  if constexpr (kForbidsAccess<Storage>)
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}
template <typename Storage = c10::StorageImpl>
void allow_access(Storage& storage) {
  if constexpr (kForbidsAccess<Storage>) storage.clear_data_ptr_access_error_msg_();
}

// Whether the current stream of `device` records a graph. Before 2.13 libtorch does not tell: there
// CUDA itself refuses to wait for what is outside of the graph.
template <typename Guard = c10::impl::VirtualGuardImpl>
bool is_capturing(at::Device device) {
  if constexpr (requires(const Guard& guard, c10::Stream stream) {
                  guard.isStreamCapturing(stream);
                }) {
    const Guard guard(device.type());
    return guard.isStreamCapturing(guard.getStream(device));
  } else {
    return false;
  }
}

}  // namespace tessera::compat
