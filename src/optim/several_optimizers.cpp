// Several optimizers as one, whose groups follow one another.
#include <unordered_map>
#include <utility>

#include "tessera/error.h"
#include "tessera/optimizer_ref.h"

namespace tessera {
namespace {

class SeveralAccess final : public OptimizerAccess {
 public:
  explicit SeveralAccess(const std::vector<OptimizerRef>& optimizers) : optimizers_(optimizers) {
    for (std::size_t o = 0; o < optimizers_.size(); ++o) {
      const auto groups = optimizers_[o].access().parameters();
      for (std::size_t g = 0; g < groups.size(); ++g) {
        groups_.emplace_back(o, g);
        for (const auto& parameter : groups[g]) add(parameter, o);
      }
    }
  }

  std::vector<std::vector<at::Tensor>> parameters() const override {
    std::vector<std::vector<at::Tensor>> all;
    for (const auto& optimizer : optimizers_) {
      for (auto& group : optimizer.access().parameters()) all.push_back(std::move(group));
    }
    return all;
  }
  Value group(std::size_t index) const override {
    const auto [optimizer, group] = groups_.at(index);
    return optimizers_[optimizer].access().group(group);
  }
  void check_group(std::size_t index, const Value& options) const override {
    const auto [optimizer, group] = groups_.at(index);
    optimizers_[optimizer].access().check_group(group, options);
  }
  void set_group(std::size_t index, const Value& options) override {
    const auto [optimizer, group] = groups_.at(index);
    optimizers_[optimizer].access().set_group(group, options);
  }
  Value state(const at::Tensor& parameter) const override { return of(parameter).state(parameter); }
  void check_state(const at::Tensor& parameter, const Value& state) const override {
    of(parameter).check_state(parameter, state);
  }
  void set_state(const at::Tensor& parameter, const Value& state, bool keep) override {
    of(parameter).set_state(parameter, state, keep);
  }
  Value first_state(const at::Tensor& parameter) const override {
    return of(parameter).first_state(parameter);
  }

 private:
  void add(const at::Tensor& parameter, std::size_t optimizer) {
    const auto [known, is_new] = owners_.emplace(parameter.unsafeGetTensorImpl(), optimizer);
    if (is_new || known->second == optimizer) return;
    throw Error(ErrorCode::invalid_argument, "optimizers " + std::to_string(known->second) +
                                                 " and " + std::to_string(optimizer) +
                                                 " have a parameter in common, of shape " +
                                                 to_string(parameter.sizes().vec()));
  }
  [[nodiscard]] OptimizerAccess& of(const at::Tensor& parameter) const {
    return optimizers_[owners_.at(parameter.unsafeGetTensorImpl())].access();
  }

  std::vector<OptimizerRef> optimizers_;
  std::vector<std::pair<std::size_t, std::size_t>> groups_;  // an optimizer, and its group
  std::unordered_map<const c10::TensorImpl*, std::size_t> owners_;
};

}  // namespace

OptimizerRef OptimizerRef::several(const std::vector<OptimizerRef>& optimizers) {
  return OptimizerRef(std::make_shared<SeveralAccess>(optimizers));
}

}  // namespace tessera
