#include "fsdp/state/model_state.h"

#include <cstring>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "base/digest.h"
#include "base/log.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "fsdp/state/state_dict.h"
#include "fsdp/unit/registry.h"
#include "fsdp/wrap/past_holders.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

Tensor leaf_at(const std::string& name, const at::Tensor& tensor,
               const detail::TypesOfBuffers& types) {
  const auto type = types.find(tensor.unsafeGetTensorImpl());
  try {
    if (type != types.end()) return leaf_of(tensor.detach().to(type->second));
    return detail::own_leaf(tensor);
  } catch (Error& error) {
    throw error.at_key(name);
  }
}

// Buffers of `types` are copies in those.
Value state_with(ModuleRef module, const detail::TypesOfBuffers& types) {
  detail::refresh_units(module.get());
  detail::warn_of_forgotten(module.get());
  std::unordered_map<const c10::TensorImpl*, Value> leaves;
  std::vector<Value::Pair> pairs;
  for (const auto& [name, tensor] : detail::state_entries(module.get())) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    auto known = leaves.find(impl);
    if (known == leaves.end()) known = leaves.emplace(impl, leaf_at(name, tensor, types)).first;
    pairs.emplace_back(name, known->second);
  }
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

}  // namespace

Tensor detail::own_leaf(const at::Tensor& tensor) {
  const auto owner = find_owner(tensor);
  if (!owner.unit || !owner.unit->is_sharded()) return leaf_of(tensor);
  auto& unit = *owner.unit;
  unit.changes().hand_out();
  const auto held = unit.held(owner.index);
  const auto from = unit.held_from(owner.index);
  const auto shape = tensor.sizes().vec();
  auto leaf = unit.geometry() == Geometry::rows
                  ? sharded_leaf_of(held, shape, from, unit.layout().params[owner.index].dim)
                  : flat_leaf_of(held, shape, from);
  leaf.placement = unit.placement_of(owner.index);
  return leaf;
}

detail::TypesOfBuffers detail::types_of_buffers(const torch::nn::Module& module) {
  TypesOfBuffers types;
  for (const auto& [name, unit] : units_below(module)) {
    for (const auto& [buffer, type] : unit->buffers().cast())
      types.emplace(buffer.unsafeGetTensorImpl(), type);
  }
  return types;
}

Value model_state(ModuleRef module) {
  return state_with(module, {});
}

Value model_state_to_save(ModuleRef module) {
  return state_with(module, detail::types_of_buffers(module.get()));
}

}  // namespace tessera

namespace tessera::detail {
namespace {

constexpr const char* kComparing = "comparing the buffers of a model";

// A digest of the buffer's form and its elements.
std::uint64_t digest_of_buffer(const at::Tensor& buffer) {
  const auto host = to_host(buffer);
  const std::string form = c10::str(host.scalar_type(), host.sizes());
  RunningDigest digest;
  digest.add(std::as_bytes(std::span(form.data(), form.size())));
  digest.add(host_bytes(host));
  return digest.value();
}

// A buffer as ranks describe it.
struct KnownBuffer {
  std::uint64_t digest = 0;  // of the lowest of them
  bool differs = false;
  bool is_rank0s = false;
};
auto fields(FieldsOf<KnownBuffer> auto& known) {
  return std::tie(known.digest, known.differs, known.is_rank0s);
}
using KnownBuffers = std::map<std::string, KnownBuffer>;

void join_known(KnownBuffers& all, const KnownBuffers& more) {
  for (const auto& [name, other] : more) {
    const auto [at, is_new] = all.emplace(name, other);
    if (is_new) continue;
    at->second.differs |= other.differs || at->second.digest != other.digest;
    at->second.is_rank0s |= other.is_rank0s;
  }
}

// A digest, or nothing: ranks have others.
Bytes combine_digests(const Bytes& left, const Bytes& right) {
  return left == right ? left : Bytes();
}

void warn_of(const std::vector<std::string>& names) {
  log(LogLevel::warning,
      "ranks have other values than rank 0 in the buffer '" + names.front() + "'" +
          (names.size() == 1 ? "" : " and " + std::to_string(names.size() - 1) + " more") +
          ", of which rank 0's are saved: sync_buffers() gives all ranks rank 0's, and a "
          "SyncBatchNorm in the place of a BatchNorm keeps them alike");
}

class BufferComparison {
 public:
  BufferComparison(const Value& state, ModuleRef module, Group& group)
      : state_(state), types_(types_of_buffers(module.get())), group_(group) {
    for (const auto& entry : module.get().named_buffers()) {
      if (entry.value().defined() && state.find(entry.key()) != nullptr)
        buffers_.emplace(entry.key(), entry.value());
    }
  }

  // Whether ranks differ and rank 0 wants its own to be saved.
  [[nodiscard]] bool is_needed(IfDiffers copies) {
    const auto contribute = [&] {
      for (const auto& [name, buffer] : buffers_)
        mine_[name] = {digest_of_buffer(buffer), false, group_.rank() == 0};
      const auto known = encode_digests();
      return MessageWriter().number(digest64(known)).take();
    };
    const auto conclude = [&](const Bytes& same) {
      return Bytes(same.empty() && copies == IfDiffers::warn ? 1 : 0);
    };
    return !confer(group_, kComparing, {contribute, combine_digests, conclude}).empty();
  }

  [[nodiscard]] Value taken_over() {
    const auto conclude = [&](const Bytes& all) {
      MessageWriter values;
      std::vector<std::string> names;
      for (const auto& [name, known] : from_message<KnownBuffers>(all)) {
        if (!known.differs || !known.is_rank0s) continue;
        names.push_back(name);
        values.text(name).block(host_bytes(to_host(buffers_.at(name))));
      }
      if (!names.empty()) warn_of(names);
      return values.take();
    };
    const Bytes values =
        confer(group_, kComparing,
               {[&] { return to_message(mine_); }, combine_by<KnownBuffers>(join_known), conclude});
    for (MessageReader message(values); !message.at_end();) {
      const auto name = message.text();
      const auto elements = message.block();
      if (group_.rank() > 0) take(name, elements);
    }
    auto pairs = state_.pairs();
    for (auto& [name, leaf] : pairs) {
      if (const auto found = leaves_.find(name.as_string()); found != leaves_.end())
        leaf = found->second;
    }
    return Value::dict(std::move(pairs), state_.dict_kind());
  }

 private:
  // Alike on all ranks that have the same: who has it is no part of it.
  [[nodiscard]] Bytes encode_digests() const {
    MessageWriter message;
    for (const auto& [name, known] : mine_) message.text(name).number(known.digest);
    return message.take();
  }

  // What has another form here is the save's to refuse.
  void take(const std::string& name, std::span<const std::byte> elements) {
    const auto own = buffers_.find(name);
    if (own == buffers_.end()) return;
    auto copy = to_host(own->second).clone();
    if (copy.nbytes() != elements.size()) return;
    if (!elements.empty()) std::memcpy(copy.mutable_data_ptr(), elements.data(), elements.size());
    const auto type = types_.find(own->second.unsafeGetTensorImpl());
    auto& leaf = by_buffer_[own->second.unsafeGetTensorImpl()];
    if (!leaf.is(Value::Kind::tensor))
      leaf = leaf_of(type == types_.end() ? copy : copy.to(type->second));
    leaves_.emplace(name, leaf);
  }

  const Value& state_;
  TypesOfBuffers types_;
  Group& group_;
  std::map<std::string, at::Tensor> buffers_;
  KnownBuffers mine_;
  std::unordered_map<const c10::TensorImpl*, Value> by_buffer_;  // one with two names is one leaf
  std::unordered_map<std::string, Value> leaves_;
};

}  // namespace

Value with_rank0_buffers(const Value& state, ModuleRef module, IfDiffers copies, Group& group) {
  if (group.size() == 1) return state;
  const torch::NoGradGuard no_grad;
  BufferComparison comparison(state, module, group);
  return comparison.is_needed(copies) ? comparison.taken_over() : state;
}

}  // namespace tessera::detail
