// The training that is expected: one process, every rank's batch by itself, gradients averaged.
#include <torch/torch.h>

#include <limits>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>

#include "generated/run.h"
#include "torch/testing.h"

namespace tessera::generated {
namespace {

using torch::Tensor;

class Plain {
 public:
  explicit Plain(const Case& drawn) : drawn_(drawn) {}

  std::vector<PhaseResult> run() {
    std::vector<PhaseResult> results;
    for (int p = 0; p < static_cast<int>(drawn_.phases.size()); ++p) {
      begin_phase(p);
      auto& result = results.emplace_back();
      for (int s = 0; s < static_cast<int>(drawn_.phases[p].steps.size()); ++s)
        result.push_back(step(s));
    }
    return results;
  }

 private:
  void begin_phase(int phase) {
    phase_ = phase;
    root_ = make_root(drawn_, drawn_.width);
    if (is_low(drawn_.precision)) {
      low_ = make_root(drawn_, drawn_.width);
      low_->to(torch::kBFloat16);
    }
    parameters_ = own_parameters(*root_);
    make_units();
    trained_.clear();
    for (const auto& [name, tensor] : parameters_) {
      if (tensor.requires_grad()) trained_.push_back(tensor);
    }
    optimizer_ = make_optimizer(drawn_.optimizer, trained_);
    if (phase > 0) load();
  }

  // Parameters of one flat array get a gradient all together.
  void make_units() {
    unit_of_.clear();
    const auto& layout = this->layout();
    if (layout.style != Style::flat || stays_whole(layout, drawn_.precision)) return;
    const auto units = units_of(*root_, drawn_, layout);
    for (const auto& [name, tensor] : parameters_) {
      std::string innermost;
      for (const auto& unit : units) {
        if (name.starts_with(unit.first + ".")) innermost = unit.first;
      }
      unit_of_[name] = innermost;
    }
  }

  StepResult step(int index) {
    step_ = index;
    const auto& step = drawn_.phases[phase_].steps[index];
    StepResult result;
    switch (step.action) {
      case Action::train:
      case Action::train_twice_forward:
      case Action::train_unsharded:
      case Action::no_step:
        train(step, result);
        break;
      case Action::forward_only:
        zero(step.zero);
        each_loss(result, 0);
        break;
      case Action::evaluate:
        each_loss(result, 0);
        break;
      case Action::freeze:
      case Action::thaw:
        for (auto& named : block_parameters(*root_, step.block))
          named.tensor.requires_grad_(step.action == Action::thaw);
        break;
      case Action::save:
        save();
        break;
      case Action::load:
        load();
        break;
      case Action::change:
        change();
        break;
      case Action::look:
        break;
      case Action::fail_and_abandon:
        zero(Zero::model);
        break;
      case Action::fail_and_go_on:
        train({.action = Action::no_step}, result);
        break;
      case Action::leave_unsynced:
        leave_unsynced(result);
        break;
      case Action::set_data:
        for (auto& named : parameters_) named.tensor.set_data(named.tensor.detach() * 0.9);
        break;
      case Action::failed_load:
      case Action::fork:
      case Action::other_mesh:
        break;
      case Action::save_inside:
        change();
        save();
        break;
      case Action::load_inside:
        change();
        load();
        break;
    }
    for (const auto& entry : root_->named_parameters())
      result.parameters[entry.key()] = entry.value().detach().clone();
    return result;
  }

  void change() {
    const torch::NoGradGuard no_grad;
    for (auto& named : parameters_) named.tensor.mul_(0.9);
  }

  void leave_unsynced(StepResult& result) {
    std::vector<Tensor> before;
    for (const auto& named : parameters_)
      before.push_back(std::exchange(named.tensor.mutable_grad(), {}));
    kept_.resize(parameters_.size());
    for (int rank = 0; rank < layout().world; ++rank) {
      const auto loss = loss_of_rank(rank, 0);
      loss.backward();
      result.losses.push_back(loss.item<double>());
      take_gradients(kept_);
    }
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i].tensor.mutable_grad() = before[i];
  }

  void train(const Step& step, StepResult& result) {
    zero(step.zero);
    // FSDP2 keeps unreduced gradients where no zero_grad finds them; with the others these are the
    // parameters' own.
    const bool drops = step.zero == Zero::model || step.zero == Zero::optimizer;
    if (drops && layout().style != Style::rows) kept_.clear();
    std::vector<Tensor> before, sums = std::exchange(kept_, {});
    sums.resize(parameters_.size());
    for (const auto& named : parameters_)
      before.push_back(std::exchange(named.tensor.mutable_grad(), {}));
    const int world = layout().world;
    for (int rank = 0; rank < world; ++rank) {
      double total = 0;
      for (int micro = 0; micro < step.micros; ++micro) {
        auto loss = loss_of_rank(rank, micro, step);
        if (step.action == Action::train_twice_forward)
          loss = loss + loss_of_rank(rank, micro + 5, step);
        loss.backward();
        total += loss.item<double>();
      }
      result.losses.push_back(total);
      take_gradients(sums);
    }
    const double divisor = layout().divide_factor > 0 ? layout().divide_factor : world;
    fill_flat(sums);
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      auto& gradient = parameters_[i].tensor.mutable_grad();
      if (sums[i].defined()) sums[i] = sums[i] / divisor;
      gradient = !before[i].defined() ? sums[i]
                 : sums[i].defined()  ? before[i] + sums[i]
                                      : before[i];
    }
    if (step.action == Action::no_step) return;
    if (step.clip > 0) {
      std::vector<Tensor> all;
      for (const auto& named : parameters_) all.push_back(named.tensor);
      result.norm = torch::nn::utils::clip_grad_norm_(all, step.clip, norm_type(step));
    }
    optimizer_->step();
  }

  // Adds what the last backwards left, and takes it away.
  void take_gradients(std::vector<Tensor>& sums) {
    const auto from = low_ ? own_parameters(*low_) : parameters_;
    for (std::size_t i = 0; i < from.size(); ++i) {
      auto gradient = std::exchange(from[i].tensor.mutable_grad(), {});
      if (!gradient.defined()) continue;
      gradient = gradient.to(parameters_[i].tensor.scalar_type());
      sums[i] = sums[i].defined() ? sums[i] + gradient : gradient;
    }
  }

  void fill_flat(std::vector<Tensor>& sums) {
    if (unit_of_.empty()) return;
    std::unordered_map<std::string, bool> has_any;
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (sums[i].defined()) has_any[unit_of_.at(parameters_[i].name)] = true;
    }
    for (std::size_t i = 0; i < sums.size(); ++i) {
      if (!sums[i].defined() && has_any.contains(unit_of_.at(parameters_[i].name)))
        sums[i] = torch::zeros_like(parameters_[i].tensor);
    }
  }

  Tensor loss_of_rank(int rank, int micro, const Step& step = {}) {
    const auto batch = batch_of(drawn_, batch_number(phase_, step_), micro, rank,
                                rows_of(drawn_, phase_, step_, rank));
    auto route = route_of(drawn_, phase_, step_, rank, micro);
    route.plain = true;
    if (low_) copy_to_low();
    const auto call = [&](const Tensor& input) {
      return low_ ? low_->forward(input.to(torch::kBFloat16), route) : root_->forward(input, route);
    };
    const testing::Autocast autocast(drawn_.autocast);
    return loss_of(call, batch, step.extra);
  }

  void copy_to_low() {
    const torch::NoGradGuard no_grad;
    auto low = own_parameters(*low_);
    for (std::size_t i = 0; i < low.size(); ++i) {
      low[i].tensor.set_requires_grad(parameters_[i].tensor.requires_grad());
      low[i].tensor.data().copy_(parameters_[i].tensor);
    }
  }

  void each_loss(StepResult& result, int micro) {
    const torch::NoGradGuard no_grad;
    for (int rank = 0; rank < layout().world; ++rank)
      result.losses.push_back(loss_of_rank(rank, micro).item<double>());
  }

  void zero(Zero kind) {
    for (const auto& named : parameters_) {
      auto& gradient = named.tensor.mutable_grad();
      if (kind == Zero::to_zero && gradient.defined()) gradient = torch::zeros_like(gradient);
      if (kind == Zero::model || kind == Zero::optimizer) gradient = Tensor();
    }
  }

  void save() {
    saved_.emplace();
    for (const auto& [name, tensor] : parameters_)
      saved_->parameters[name] = tensor.detach().clone();
    std::ostringstream stream;
    torch::save(*optimizer_, stream);
    saved_->optimizer = stream.str();
  }

  void load() {
    if (!saved_) return;
    const torch::NoGradGuard no_grad;
    for (auto& [name, tensor] : parameters_) tensor.copy_(saved_->parameters.at(name));
    // A new one: torch::load leaves the state of parameters that had none when it was saved.
    optimizer_ = make_optimizer(drawn_.optimizer, trained_);
    std::istringstream stream(saved_->optimizer);
    torch::load(*optimizer_, stream);
  }

  const Layout& layout() const { return drawn_.phases[phase_].layout; }

  struct Saved {
    Values parameters;
    std::string optimizer;
  };

  const Case& drawn_;
  int phase_ = 0, step_ = 0;
  Root root_{nullptr}, low_{nullptr};
  std::vector<Named> parameters_;
  std::vector<Tensor> trained_;                           // what the optimizer has
  std::vector<Tensor> kept_;                              // sums that no step has reduced yet
  std::unordered_map<std::string, std::string> unit_of_;  // empty: gradients are each one's own
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<Saved> saved_;
};

}  // namespace

Odd odd_of(const Case& drawn, int phase, int step, int rank) {
  return phase == 0 && step == drawn.odd_step && rank == drawn.odd_rank ? drawn.odd : Odd::nothing;
}

Route route_of(const Case& drawn, int phase, int step, int rank, int micro) {
  Route route{.step = step, .rank = rank};
  const auto& how = drawn.phases[phase].steps[step];
  if (how.by_micro) route.skip = (step + micro) % static_cast<int>(drawn.blocks.size());
  route.throw_inside = route.catches = how.caught;
  const auto odd = odd_of(drawn, phase, step, rank);
  if (odd == Odd::skips_call) route.skip = drawn.odd_block;
  if (odd == Odd::swaps_calls) route.swap = drawn.odd_block;
  if (odd == Odd::calls_again) route.again = drawn.odd_block;
  return route;
}

int rows_of(const Case& drawn, int phase, int step, int rank) {
  return odd_of(drawn, phase, step, rank) == Odd::more_rows ? kRows + 1 : kRows;
}

double norm_type(const Step& step) {
  return step.norm > 1e100 ? std::numeric_limits<double>::infinity() : step.norm;
}

AdamWOptions own_adamw_options() {
  return {.lr = 1e-2, .eps = 1e-2, .weight_decay = 0.02};
}

// Steps of a fixed size would make much of the last digit of gradients near zero: the denominators
// are kept away from zero.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(OptimizerKind kind,
                                                        const std::vector<Tensor>& parameters) {
  namespace optim = torch::optim;
  const auto own = own_adamw_options();
  switch (kind) {
    case OptimizerKind::sgd:
      return std::make_unique<optim::SGD>(
          parameters, optim::SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01));
    case OptimizerKind::adam:
      return std::make_unique<optim::Adam>(parameters,
                                           optim::AdamOptions(0.01).eps(1e-2).amsgrad(true));
    case OptimizerKind::adamw:
    case OptimizerKind::own_adamw:
      return std::make_unique<optim::AdamW>(
          parameters, optim::AdamWOptions(own.lr).eps(own.eps).weight_decay(own.weight_decay));
    case OptimizerKind::adagrad:
      return std::make_unique<optim::Adagrad>(parameters,
                                              optim::AdagradOptions(0.02).eps(0.1).lr_decay(0.1));
    case OptimizerKind::rmsprop:
      return std::make_unique<optim::RMSprop>(parameters,
                                              optim::RMSpropOptions(0.01).eps(0.1).momentum(0.5));
  }
  return nullptr;
}

std::vector<PhaseResult> run_plain(const Case& drawn) {
  return Plain(drawn).run();
}

}  // namespace tessera::generated
