#include "optim_state/steady.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "optim_state/training_tree.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/leaf.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// Addresses of bytes, of whatever device: no two have the same.
struct Range {
  std::uint64_t begin = 0, end = 0;
};

std::uint64_t address_of(const void* bytes) {
  return reinterpret_cast<std::uintptr_t>(bytes);
}

Range range_of(const at::Tensor& tensor) {
  const auto begin = address_of(tensor.storage().data());
  return {begin, begin + tensor.storage().nbytes()};
}

Range range_of(const Storage& storage) {
  const auto begin =
      storage.device ? std::uint64_t{storage.device->address()} : address_of(storage.data);
  return {begin, begin + storage.size};
}

// Ranges that may overlap one another.
class Ranges {
 public:
  void add(Range range) { ranges_.push_back(range); }
  void sort() {
    std::ranges::sort(ranges_, {}, &Range::begin);
    std::vector<Range> joined;
    for (const auto& range : ranges_) {
      if (!joined.empty() && range.begin <= joined.back().end) {
        joined.back().end = std::max(joined.back().end, range.end);
      } else {
        joined.push_back(range);
      }
    }
    ranges_ = std::move(joined);
  }
  // Once they are sorted.
  [[nodiscard]] bool cover(const Range& range) const {
    const auto* last = last_from(range.begin);
    return last != nullptr && range.end <= last->end;
  }
  [[nodiscard]] bool meet(const Range& range) const {
    const auto* last = range.end == 0 ? nullptr : last_from(range.end - 1);
    return last != nullptr && range.begin < last->end;
  }

 private:
  // The last one that begins at `address` or before.
  [[nodiscard]] const Range* last_from(std::uint64_t address) const {
    const auto after = std::ranges::upper_bound(ranges_, address, {}, &Range::begin);
    return after == ranges_.begin() ? nullptr : &*std::prev(after);
  }

  std::vector<Range> ranges_;
};

class SteadyTensors {
 public:
  void add_parameters(const Path& place, ModuleRef model) {
    for (const auto& parameter : sharded_parameters(model)) {
      // Of others nobody counts changes.
      if (!parameter.local.defined() || parameter.local.is_inference()) continue;
      steady_.add(range_of(parameter.local));
      auto path = below(place, kModel);
      path.emplace_back(parameter.name());
      watched_.push_back({dotted(path), counter_of(parameter.local), parameter.local._version()});
      if (parameter.local.requires_grad()) trained_.insert(parameter.local.unsafeGetTensorImpl());
    }
    for (const auto& buffer : model.get().buffers()) {
      if (buffer.defined() && buffer.has_storage()) moving_.add(range_of(buffer));
    }
  }
  void add_moments(const Path& place, const std::vector<at::Tensor>& moments) {
    for (const auto& moment : moments) {
      if (moment.is_inference()) continue;
      steady_.add(range_of(moment));
      watched_.push_back({dotted(below(place, kOptim)), counter_of(moment), moment._version()});
    }
  }
  void add_awaited(const std::vector<std::vector<at::Tensor>>& groups) {
    for (const auto& group : groups) {
      for (const auto& parameter : group) awaited_.insert(parameter.unsafeGetTensorImpl());
    }
  }
  void add_values(const Value& values) {
    for (const auto& leaf : leaves_of(values)) {
      if (!leaf.value.is(Value::Kind::tensor)) continue;
      for (const auto& piece : leaf.value.as_tensor().pieces) {
        if (piece.storage) moving_.add(range_of(*piece.storage));
      }
    }
  }
  void sort() {
    steady_.sort();
    moving_.sort();
  }

  [[nodiscard]] bool has(const Storage& storage) const {
    const auto range = range_of(storage);
    return storage.size > 0 && steady_.cover(range) && !moving_.meet(range);
  }
  // What no optimizer of the state trains, another one may.
  [[nodiscard]] bool is_all_awaited() const {
    return std::ranges::all_of(trained_,
                               [&](const auto* tensor) { return awaited_.contains(tensor); });
  }
  void require_unchanged() const {
    for (const auto& [name, counter, version] : watched_) {
      if (counter.current_version() == version) continue;
      throw Error(ErrorCode::conflict,
                  "was changed while a save in the background copied it: what is not a step of "
                  "tessera::AdamW has to call PendingSave::await_staged() before "
                  "(WriterOptions::overlap)")
          .at_key(name);
    }
  }

 private:
  // A tensor's count of changes, which is that of all views of it: nothing holds the tensor.
  struct Watched {
    std::string name;
    c10::VariableVersion counter;
    std::uint32_t version;
  };
  using Tensors = std::unordered_set<const c10::TensorImpl*>;
  static c10::VariableVersion counter_of(const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->version_counter();
  }

  Ranges steady_, moving_;
  Tensors trained_, awaited_;  // to be compared before tensors end
  std::vector<Watched> watched_;
};

}  // namespace

SteadyMemory steady_memory(const TrainingState& state) {
  const auto tensors = std::make_shared<SteadyTensors>();
  bool is_awaited = true;
  for (const auto& [one, place] : placed(state)) {
    tensors->add_parameters(place, one.model());
    tensors->add_values(one.values);
    tensors->add_values(one.rank_values);
    const auto moments = one.optimizer() ? one.optimizer()->access().awaited_state() : std::nullopt;
    is_awaited = is_awaited && moments.has_value();
    if (!moments) continue;
    tensors->add_moments(place, *moments);
    tensors->add_awaited(one.optimizer()->access().parameters());
  }
  is_awaited = is_awaited && tensors->is_all_awaited();
  tensors->sort();
  return {.has = [tensors](const Storage& storage) { return tensors->has(storage); },
          .require_unchanged = [tensors] { tensors->require_unchanged(); },
          .is_awaited = is_awaited};
}

}  // namespace tessera::detail
