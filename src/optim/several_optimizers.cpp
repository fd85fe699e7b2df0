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
    owners_ = owners();
  }

  std::vector<std::vector<at::Tensor>> parameters() const override {
    std::vector<std::vector<at::Tensor>> all;
    for (const auto& optimizer : optimizers_) {
      for (auto& group : optimizer.access().parameters()) all.push_back(std::move(group));
    }
    return all;
  }
  Value group(std::size_t index) const override {
    const auto [access, group] = at(index);
    return access->group(group);
  }
  void check_group(std::size_t index, const Value& options) const override {
    const auto [access, group] = at(index);
    access->check_group(group, options);
  }
  void set_group(std::size_t index, const Value& options) override {
    const auto [access, group] = at(index);
    access->set_group(group, options);
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
  using Owners = std::unordered_map<const c10::TensorImpl*, OptimizerAccess*>;
  [[nodiscard]] Owners owners() const {
    Owners all;
    for (const auto& optimizer : optimizers_) {
      for (const auto& group : optimizer.access().parameters()) {
        for (const auto& parameter : group) add(parameter, optimizer.access(), all);
      }
    }
    return all;
  }
  static void add(const at::Tensor& parameter, OptimizerAccess& owner, Owners& all) {
    const auto [known, is_new] = all.emplace(parameter.unsafeGetTensorImpl(), &owner);
    if (is_new || known->second == &owner) return;
    throw Error(ErrorCode::invalid_argument,
                "two optimizers have a parameter in common, of shape " +
                    to_string(parameter.sizes().vec()));
  }
  // Groups and parameters may be added to an optimizer at any time.
  [[nodiscard]] OptimizerAccess& of(const at::Tensor& parameter) const {
    const auto* key = parameter.unsafeGetTensorImpl();
    if (!owners_.contains(key)) owners_ = owners();
    return *owners_.at(key);
  }
  // The optimizer that has a group, and which of its own that is.
  [[nodiscard]] std::pair<OptimizerAccess*, std::size_t> at(std::size_t index) const {
    auto left = index;
    for (const auto& optimizer : optimizers_) {
      const auto groups = optimizer.access().parameters().size();
      if (left < groups) return {&optimizer.access(), left};
      left -= groups;
    }
    throw Error(ErrorCode::invalid_argument, "no group " + std::to_string(index));
  }

  std::vector<OptimizerRef> optimizers_;
  mutable Owners owners_;
};

}  // namespace

OptimizerRef OptimizerRef::several(const std::vector<OptimizerRef>& optimizers) {
  OptimizerRef all(std::make_shared<SeveralAccess>(optimizers));
  Names names;
  for (const auto& optimizer : optimizers) {
    if (optimizer.is_named()) names.insert(optimizer.names_->begin(), optimizer.names_->end());
  }
  return names.empty() ? all : all.with_names(std::make_shared<const Names>(std::move(names)));
}

}  // namespace tessera
