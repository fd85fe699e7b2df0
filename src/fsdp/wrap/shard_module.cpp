// fully_shard: which parameters a unit takes, and the slots of Sequentials on the way.
#include <torch/nn/modules/container/sequential.h>
#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/process.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "fsdp/deferred/recording.h"
#include "fsdp/step/root.h"
#include "fsdp/unit/registry.h"
#include "fsdp/unit/whole_parameters.h"
#include "fsdp/wrap/past_holders.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "torch/device.h"

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
struct SequentialSlot {
  torch::nn::AnyModule* place;
  std::unique_ptr<torch::nn::AnyModulePlaceholder> holder;
};

// For a module of a unit that is there, or of the one that is about to be made of `modules`; null
// where none can hold it.
std::unique_ptr<torch::nn::AnyModulePlaceholder> holder_for(
    const torch::nn::Module* module, const std::vector<UnitModule>& modules) {
  for (const auto& [known, slot_maker] : modules) {
    if (known.get() == module) return slot_maker ? slot_maker() : nullptr;
  }
  const auto unit = find_unit(module);
  return unit ? unit->make_slot(module) : nullptr;
}

void find_slots(torch::nn::SequentialImpl& sequential, const std::vector<UnitModule>& modules,
                std::vector<SequentialSlot>& found) {
  for (auto slot = sequential.begin(); slot != sequential.end(); ++slot) {
    auto holder = holder_for(slot->ptr().get(), modules);
    if (!holder) continue;
    if (holder->type_info != slot->type_info()) {
      throw Error(ErrorCode::invalid_argument, "a Sequential holds a unit's module (" +
                                                   slot->ptr()->name() +
                                                   ") as another type than it was sharded as");
    }
    found.push_back({&*slot, std::move(holder)});
  }
}

// The slots of all modules of a unit to be and below.
std::vector<SequentialSlot> slots_below(const std::vector<UnitModule>& modules) {
  std::vector<SequentialSlot> found;
  for (const auto& [module, slot_maker] : modules) {
    for (const auto& below : module->modules(true)) {
      if (auto* sequential = below->as<torch::nn::SequentialImpl>())
        find_slots(*sequential, modules, found);
    }
  }
  return found;
}

// `unit` is of a module around `module`.
bool is_around(const Unit& unit, const torch::nn::Module& module) {
  return std::ranges::any_of(unit.modules(), [&](const auto& outer) {
    return std::ranges::any_of(outer->modules(false),
                               [&](const auto& below) { return below.get() == &module; });
  });
}

[[noreturn]] void throw_shared(const std::string& parameter) {
  throw Error(ErrorCode::invalid_argument,
              "Parameter '" + parameter +
                  "' is shared with a parameter already managed by another FSDP group; shard the "
                  "modules that share it as one unit");
}

// Why a parameter of `module` that `unit` has can be in no other unit.
[[noreturn]] void throw_taken(const std::string& parameter, const Unit& unit,
                              const torch::nn::Module& module) {
  if (is_around(unit, module)) {
    throw Error(ErrorCode::invalid_argument,
                "fully_shard was applied to a module around this one before (" +
                    unit.module()->name() + "), whose unit has parameter '" + parameter +
                    "' already: the order is inside out, first the blocks, then the model");
  }
  throw_shared(parameter);
}

// The modules and parameters of the units that are made before one.
struct Planned {
  std::unordered_set<const torch::nn::Module*> modules;  // nobody descends into them
  std::unordered_set<const void*> tensors;
};

struct Found {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> buffers;
};

// Modules and parameters that `spec` and the units below `modules` leave as they are (fsdp-rows L2,
// L3, IG4).
struct Ignored {
  std::unordered_set<const void*> modules;
  std::unordered_set<const void*> tensors;

  void take(const std::vector<UnitModule>& given, const UnitSpec& spec) {
    take(spec.ignored_modules, spec.options);
    for (const auto& [module, slot_maker] : given) {
      for (const auto& [name, unit] : units_below(*module))
        take(unit->ignored_modules(), unit->options());
    }
  }

 private:
  void take(const std::unordered_set<const torch::nn::Module*>& more, const ShardOptions& options) {
    modules.insert(more.begin(), more.end());
    for (const auto& parameter : options.ignored_parameters)
      tensors.insert(parameter.unsafeGetTensorImpl());
  }
};

// Finds the parameters of modules and below that are in no unit yet. Modules that are units are not
// descended into: a parameter found outside them that one of them holds is shared between units.
class Collector {
 public:
  Collector(const Ignored& ignored, bool is_sharded, const Planned& planned)
      : seen_(ignored.modules), is_sharded_(is_sharded), planned_(planned) {
    seen_.insert(ignored.tensors.begin(), ignored.tensors.end());
  }

  void collect(const torch::nn::Module& module, const std::string& prefix) {
    if (!seen_.insert(&module).second) return;
    take_parameters(module, prefix);
    for (const auto& buffer : module.buffers(false)) {
      if (is_new(buffer)) found_.buffers.push_back(buffer);
    }
    for (const auto& child : module.named_children()) {
      const auto* below = child.value().get();
      if (!find_unit(below) && !planned_.modules.contains(below))
        collect(*below, prefix + child.key() + ".");
    }
  }

  Found take() { return std::move(found_); }

 private:
  bool is_new(const at::Tensor& tensor) {
    return tensor.defined() && seen_.insert(tensor.unsafeGetTensorImpl()).second;
  }

  void take_parameters(const torch::nn::Module& module, const std::string& prefix) {
    for (const auto& entry : module.named_parameters(false)) {
      const auto& tensor = entry.value();
      if (!is_new(tensor)) continue;
      const auto name = prefix + entry.key();
      if (const auto owner = find_owner(tensor).unit) throw_taken(name, *owner, module);
      if (planned_.tensors.contains(tensor.unsafeGetTensorImpl())) throw_shared(name);
      require_dimensions(name, tensor);
      found_.names.push_back(name);
      found_.tensors.push_back(tensor);
    }
  }

  void require_dimensions(const std::string& name, const at::Tensor& tensor) const {
    if (!is_sharded_ || tensor.dim() > 0) return;
    throw Error(ErrorCode::invalid_argument,
                "fully_shard doesn't support scalar parameters. Change " + name +
                    " to a 1D tensor with numel equal to 1.");
  }

  std::unordered_set<const void*> seen_;  // what was met before, and what is to be passed over
  bool is_sharded_;
  const Planned& planned_;
  Found found_;
};

Found parameters_of(const std::vector<UnitModule>& modules, const Ignored& ignored, bool is_sharded,
                    const Planned& planned = {}) {
  Collector collector(ignored, is_sharded, planned);
  int place = 0;
  for (const auto& [module, slot_maker] : modules)
    collector.collect(*module, modules.size() == 1 ? "" : std::to_string(place++) + ".");
  return collector.take();
}

// The exception that work() throws, if any.
template <typename Work>
std::exception_ptr failure_of(Work&& work) try {
  work();
  return nullptr;
} catch (...) {
  return std::current_exception();
}

// Data for what the unit takes over where it has none.
void fill_unit(const std::vector<UnitModule>& given, const UnitSpec& spec, const Ignored& ignored) {
  for (const auto& [module, slot_maker] : given) {
    const auto modules = modules_below(*module, [&](const torch::nn::Module& child) {
      return !find_unit(&child) && !ignored.modules.contains(&child);
    });
    fill(modules, {spec.mesh.device(), spec.options.param_init_fn, ignored.tensors});
  }
}

void move_whole(const std::vector<at::Tensor>& tensors, torch::Device device) {
  for (const auto& tensor : tensors) {
    if (tensor.device() != device) replace_data(tensor, tensor.detach().to(device));
  }
}

// To the mesh's device, which those that stay whole do not get to by being cut.
void place_unit(const Found& found, const UnitSpec& spec) {
  std::vector<torch::Device> devices;
  for (const auto& tensor : found.tensors) devices.push_back(tensor.device());
  require_movable(devices, spec.mesh.device(), spec.mesh.rank());
  if (!spec.shard) move_whole(found.tensors, spec.mesh.device());
}

// All ranks' values go one way, by the mesh's device: rank 0's may still be on the CPU, where it
// was built, when those of ranks that got them just now are there.
void sync_unit(const Found& found, const Mesh& mesh) {
  const torch::NoGradGuard no_grad;
  auto states = found.buffers;
  states.insert(states.end(), found.tensors.begin(), found.tensors.end());
  std::erase_if(states, [](const auto& state) { return !state.defined(); });
  std::vector<at::Tensor> there;
  for (const auto& state : states) there.push_back(state.detach().to(mesh.device()));
  broadcast_from_first(there, mesh);
  for (std::size_t i = 0; i < states.size(); ++i) {
    if (states[i].device() != mesh.device()) states[i].copy_(there[i]);
  }
}

constexpr std::string_view kFailed = "failed";

constexpr std::string_view kUnitOf = "the unit of ";

// A text of what has to be the same on all ranks, a line each.
std::string described(const Found& found, const std::vector<UnitModule>& modules) {
  std::string text(kUnitOf);
  for (const auto& [module, slot_maker] : modules) text += module->name() + " ";
  text.back() = '\n';
  for (std::size_t i = 0; i < found.tensors.size(); ++i) {
    text += found.names[i] + " " + c10::toString(found.tensors[i].scalar_type()) +
            to_string(found.tensors[i].sizes().vec());
    text += found.tensors[i].requires_grad() ? "\n" : " frozen\n";
  }
  return text;
}

// The first lines in which the descriptions of rank 0 and another one differ.
std::string difference(const std::string& of_first, const std::string& of_other) {
  std::istringstream first(of_first), other(of_other);
  const auto next = [](std::istringstream& lines) {
    std::string line;
    return std::getline(lines, line) ? line : "nothing more";
  };
  std::string unit = "units", ours, theirs;
  while ((ours = next(first)) == (theirs = next(other))) {
    if (ours.starts_with(kUnitOf)) unit = ours;
  }
  return "in " + unit + " it has '" + theirs + "', rank 0 '" + ours + "'";
}

void require_same(const std::vector<Bytes>& descriptions) {
  for (std::size_t r = 0; r < descriptions.size(); ++r) {
    if (to_text(descriptions[r]) == kFailed) {
      throw Error(ErrorCode::peer_failed,
                  "rank " + std::to_string(r) + " could not make a unit of its module");
    }
    if (descriptions[r] == descriptions[0]) continue;
    throw Error(ErrorCode::mismatch,
                "rank " + std::to_string(r) +
                    " shards other parameters than rank 0: the modules differ in "
                    "names, shapes, dtypes or in what is frozen; " +
                    difference(to_text(descriptions[0]), to_text(descriptions[r])));
  }
}

// Ranks that built different modules would exchange rows of different things. Throws `failure` of
// this rank on after the others have heard of it: they would wait.
void require_same_on_all_ranks(const std::string& description, const std::exception_ptr& failure,
                               const Mesh& mesh) {
  const Purpose purpose("sharding a module");
  const auto all = mesh.group().all_gather(to_bytes(failure ? std::string(kFailed) : description));
  if (failure) std::rethrow_exception(failure);
  require_same(all);
}

// Those that another one contains, and repetitions: their parameters are the other one's.
void drop_contained(std::vector<UnitModule>& modules) {
  std::unordered_set<const torch::nn::Module*> contained, kept;
  for (const auto& [module, slot_maker] : modules) {
    for (const auto& below : module->modules(false)) contained.insert(below.get());
  }
  std::erase_if(modules, [&](const UnitModule& one) {
    return contained.contains(one.module.get()) || !kept.insert(one.module.get()).second;
  });
}

void require_shardable(const std::vector<UnitModule>& modules) {
  for (const auto& [module, slot_maker] : modules) {
    if (!find_unit(module.get())) continue;
    throw Error(ErrorCode::invalid_argument,
                "fully_shard was applied to this module already (" + module->name() + ")");
  }
  for (const auto& [module, slot_maker] : modules) require_callable_units(*module);
}

std::uint64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  std::uint64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

// Throws for what cannot be made when the units before are; what becomes units, in words.
std::string require_shardable_in_turn(const std::vector<UnitPlan>& plans) {
  Planned planned;
  Ignored ignored;
  std::vector<UnitModule> all;
  std::string descriptions;
  for (const auto& [modules, spec] : plans) {
    require_shardable(modules);
    ignored.take(modules, spec);
    const auto found = parameters_of(modules, ignored, spec.shard.has_value(), planned);
    require_takeable(found.tensors, spec);
    descriptions += described(found, modules);
    for (const auto& [module, slot_maker] : modules) planned.modules.insert(module.get());
    for (const auto& tensor : found.tensors) planned.tensors.insert(tensor.unsafeGetTensorImpl());
    all.insert(all.end(), modules.begin(), modules.end());
  }
  static_cast<void>(slots_below(all));
  return descriptions;
}

}  // namespace

void shard_in_turn(const Mesh& mesh, const std::function<std::vector<UnitPlan>()>& plan) {
  std::vector<UnitPlan> plans;
  std::string descriptions;
  const auto failure = failure_of([&] {
    plans = plan();
    if (plans.size() > 1) descriptions = require_shardable_in_turn(plans);
  });
  if (failure || plans.size() > 1) require_same_on_all_ranks(descriptions, failure, mesh);
  for (auto& [modules, spec] : plans) shard_modules(std::move(modules), spec);
}

void shard_modules(std::vector<UnitModule> modules, const UnitSpec& spec) {
  if (modules.empty()) throw Error(ErrorCode::invalid_argument, "fully_shard of no modules");
  for (const auto& module : modules) require_module(module.module.get());
  drop_contained(modules);
  Ignored ignored;
  ignored.take(modules, spec);
  const auto find = [&] { return parameters_of(modules, ignored, spec.shard.has_value()); };
  std::vector<SequentialSlot> slots;
  Found found;
  // All that can be wrong is found out before anything is touched, and by all ranks together.
  const auto failure = failure_of([&] {
    require_shardable(modules);
    slots = slots_below(modules);
    require_takeable(find().tensors, spec);
    fill_unit(modules, spec, ignored);
    found = find();
    require_data(found.tensors, spec.mesh.device());
    require_takeable(found.tensors, spec);
    place_unit(found, spec);
  });
  require_same_on_all_ranks(failure ? "" : described(found, modules), failure, spec.mesh);
  if (spec.sync_states) sync_unit(found, spec.mesh);
  const auto whole_bytes = bytes_of(found.tensors);
  auto unit = std::make_shared<Unit>(std::move(modules), spec, found.tensors);
  unit->set_schedule(std::make_unique<ScheduleEntry>());
  entry_of(*unit).uneven_micro_batches = spec.buckets.uneven_micro_batches;
  unit->buffers().take(std::move(found.buffers));
  unit->watch();
  register_unit(unit, spec.mesh);
  if (spec.shard) note_freed(whole_bytes);
  for (auto& [place, holder] : slots) place->*content_of(ContentTag()) = std::move(holder);
}

}  // namespace tessera::detail
