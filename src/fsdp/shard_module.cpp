// fully_shard: which parameters a unit takes, and the slots of Sequentials on the way.
#include <torch/nn/modules/container/sequential.h>
#include <torch/torch.h>

#include <exception>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/text.h"
#include "fsdp/registry.h"
#include "fsdp/root.h"
#include "fsdp/unit_values.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"

namespace tessera::detail {
namespace {

// AnyModule has no way to be given a holder; an explicit instantiation may name its private member.
struct ContentTag {
  using Member = std::unique_ptr<torch::nn::AnyModulePlaceholder> torch::nn::AnyModule::*;
  friend constexpr Member content_of(ContentTag);
};
template <ContentTag::Member kMember>
struct ContentAccess {
  friend constexpr ContentTag::Member content_of(ContentTag) { return kMember; }
};
template struct ContentAccess<&torch::nn::AnyModule::content_>;

// A Sequential calls what its slots hold: slots whose module is a unit get a holder that is seen.
void replace_slots(torch::nn::SequentialImpl& sequential) {
  for (auto slot = sequential.begin(); slot != sequential.end(); ++slot) {
    const auto unit = find_unit(slot->ptr().get());
    if (!unit || !unit->slot_maker) continue;
    auto holder = unit->slot_maker();
    if (holder->type_info != slot->type_info()) {
      throw Error(ErrorCode::invalid_argument,
                  "a Sequential holds a unit's module as another type than it was sharded as")
          .at_key(unit->name());
    }
    (*slot).*content_of(ContentTag()) = std::move(holder);
  }
}

struct Found {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> buffers;
};

// The parameters of `module` and below that are in no unit yet. Modules that are units are not
// descended into: a parameter found outside them that one of them holds is shared between units.
// `seen` holds what was met before, and what is to be passed over.
void collect(const torch::nn::Module& module, const std::string& prefix,
             std::unordered_set<const void*>& seen, Found& found, bool is_sharded) {
  if (!seen.insert(&module).second) return;
  for (const auto& entry : module.named_parameters(false)) {
    const auto& tensor = entry.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    const auto name = prefix + entry.key();
    if (find_owner(tensor).unit) {
      throw Error(
          ErrorCode::invalid_argument,
          "Parameter '" + name +
              "' is shared with a parameter already managed by another FSDP group; shard the "
              "modules that share it as one unit");
    }
    if (is_sharded && tensor.dim() == 0) {
      throw Error(ErrorCode::invalid_argument,
                  "fully_shard doesn't support scalar parameters. Change " + name +
                      " to a 1D tensor with numel equal to 1.");
    }
    found.names.push_back(name);
    found.tensors.push_back(tensor);
  }
  for (const auto& buffer : module.buffers(false)) {
    if (buffer.defined() && seen.insert(buffer.unsafeGetTensorImpl()).second)
      found.buffers.push_back(buffer);
  }
  for (const auto& child : module.named_children()) {
    if (!find_unit(child.value().get()))
      collect(*child.value(), prefix + child.key() + ".", seen, found, is_sharded);
  }
}

// Data for what the unit takes over where it has none; what went wrong, if anything.
std::exception_ptr fill_unit(torch::nn::Module& module, const UnitSpec& spec) try {
  const auto modules = modules_below(module, [&](const torch::nn::Module& child) {
    return !find_unit(&child) && !spec.ignored_modules.contains(&child);
  });
  FillOptions options{spec.mesh.device(), spec.options.param_init_fn, {}};
  for (const auto& ignored : spec.options.ignored_parameters)
    options.ignored.insert(ignored.unsafeGetTensorImpl());
  fill(modules, options);
  return nullptr;
} catch (...) {
  return std::current_exception();
}

void sync_unit(const Found& found, const Mesh& mesh) {
  auto states = found.buffers;
  states.insert(states.end(), found.tensors.begin(), found.tensors.end());
  broadcast_from_first(std::move(states), mesh);
}

// Ranks that built different modules would exchange rows of different things. Throws `failure` of
// this rank on after the others have heard of it: they would wait.
void require_same_on_all_ranks(const Found& found, const std::exception_ptr& failure,
                               const Mesh& mesh) {
  constexpr std::string_view kFailed = "failed";
  std::string text;
  for (std::size_t i = 0; i < found.tensors.size(); ++i) {
    text += found.names[i] + " " + c10::toString(found.tensors[i].scalar_type()) +
            to_string(found.tensors[i].sizes().vec());
    text += "\n";
  }
  if (failure) text = kFailed;
  const auto all = mesh.group().all_gather(to_bytes(text));
  if (failure) std::rethrow_exception(failure);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (to_text(all[r]) == kFailed) {
      throw Error(ErrorCode::peer_failed,
                  "rank " + std::to_string(r) + " could not give a unit's parameters their data");
    }
    if (all[r] == all[0]) continue;
    throw Error(ErrorCode::mismatch,
                "rank " + std::to_string(r) +
                    " shards other parameters than rank 0: the modules differ in "
                    "names, shapes or dtypes");
  }
}

}  // namespace

void shard_module(const std::shared_ptr<torch::nn::Module>& module, const UnitSpec& spec,
                  SlotMaker slot_maker) {
  if (find_unit(module.get())) {
    throw Error(ErrorCode::invalid_argument,
                "fully_shard was applied to this module already (" + module->name() + ")");
  }
  const auto failure = fill_unit(*module, spec);
  Found found;
  std::unordered_set<const void*> seen(spec.ignored_modules.begin(), spec.ignored_modules.end());
  for (const auto& ignored : spec.options.ignored_parameters)
    seen.insert(ignored.unsafeGetTensorImpl());
  collect(*module, "", seen, found, spec.shard.has_value());
  require_same_on_all_ranks(found, failure, spec.mesh);
  if (spec.sync_states) sync_unit(found, spec.mesh);
  auto unit = std::make_shared<Unit>(module, spec, found.tensors);
  unit->slot_maker = std::move(slot_maker);
  unit->take_buffers(std::move(found.buffers));
  unit->watch();
  register_unit(unit, spec.mesh);
  for (const auto& below : module->modules(true)) {
    if (auto* sequential = below->as<torch::nn::SequentialImpl>()) replace_slots(*sequential);
  }
}

}  // namespace tessera::detail
