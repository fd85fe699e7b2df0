// The arguments of a call of a sharded module, as forward gets them. Internal; see tessera/fsdp.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/detail/tensors_of.h"

namespace [[gnu::visibility("default")]] tessera {
namespace detail {

class Unit;

// Throws an Error: a function whose parameters are not known has changed its copy of an argument,
// which its caller would not get.
[[noreturn]] void throw_changed_argument(const Unit& unit);

// Arguments with tensors inside are passed as copies, in which tensors may be replaced. What
// forward may change is its caller's own, and so is everything else.
template <typename Argument, bool kIsChanged>
using Carried = std::conditional_t<TensorsOf<std::decay_t<Argument>>::any && !kIsChanged,
                                   std::decay_t<Argument>, Argument&&>;

template <typename Argument, bool kIsChanged>
decltype(auto) hand_over(Carried<Argument, kIsChanged>& value) {
  if constexpr (TensorsOf<std::decay_t<Argument>>::any && std::is_lvalue_reference_v<Argument>) {
    return static_cast<std::conditional_t<kIsChanged, Argument, std::decay_t<Argument>&>>(value);
  } else {
    return static_cast<std::remove_reference_t<Argument>&&>(value);
  }
}

template <typename Value>
void collect_tensors(Value& value, std::vector<at::Tensor*>& into) {
  using Trait = TensorsOf<std::decay_t<Value>>;
  if constexpr (Trait::any) {
    Trait::visit(value, [&](at::Tensor& tensor) { into.push_back(&tensor); });
  }
}

template <bool kIsWanted, typename Value>
void collect_tensors_if(Value& value, std::vector<at::Tensor*>& into) {
  if constexpr (kIsWanted) collect_tensors(value, into);
}

// Tensors in the caller's own arguments, which forward may change: what it gets in their place is
// there while it runs alone. `Collect` finds them, as they are now.
template <typename Collect>
class HandedIn {
 public:
  explicit HandedIn(Collect collect) : collect_(std::move(collect)) {
    for (const auto* tensor : collect_()) given_.push_back(*tensor);
  }
  // Changes that forward made before it threw stay.
  ~HandedIn() {
    if (!given_.empty()) give_back();
  }
  HandedIn(const HandedIn&) = delete;
  HandedIn& operator=(const HandedIn&) = delete;

  // After tensors were replaced. If that fails halfway each is still in its place.
  void note() {
    for (const auto* tensor : collect_()) handed_.push_back(*tensor);
  }
  // What forward left as it got it is again what its caller gave. All else are results.
  std::vector<at::Tensor*> give_back() {
    const auto given = std::exchange(given_, {});
    const auto found = collect_();
    std::vector<at::Tensor*> results;
    for (std::size_t at = 0; at < found.size(); ++at) {
      std::size_t i = handed_.empty() ? at : 0;
      while (i < handed_.size() && !handed_[i].is_same(*found[at])) ++i;
      if (i < given.size()) {
        *found[at] = given[i];
      } else {
        results.push_back(found[at]);
      }
    }
    return results;
  }

 private:
  Collect collect_;
  std::vector<at::Tensor> given_, handed_;
};

// Tensors in copies of arguments that `Collect` finds and nobody may change.
template <typename Collect>
class Unchanged {
 public:
  explicit Unchanged(Collect collect) : collect_(std::move(collect)) {
    for (const auto* tensor : collect_()) handed_.push_back(*tensor);
  }
  void require(const Unit& unit) const {
    const auto found = collect_();
    bool same = found.size() == handed_.size();
    for (std::size_t i = 0; same && i < found.size(); ++i) same = found[i]->is_same(handed_[i]);
    if (!same) throw_changed_argument(unit);
  }

 private:
  Collect collect_;
  std::vector<at::Tensor> handed_;
};

}  // namespace detail
}  // namespace tessera
