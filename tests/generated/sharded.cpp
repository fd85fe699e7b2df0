// The same training on ranks that are threads, compared after every step.
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "generated/run.h"
#include "generated/second_model.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/training_state.h"
#include "torch/testing.h"

namespace tessera::generated {
namespace {

using torch::Tensor;

// Other numbers than one process has.
struct Differs : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// A rank leaves in the middle, as it was drawn to.
struct Leaves {};

// A state as all ranks have it in memory.
struct Whole {
  FullState model;
  Value optimizer;
};
struct Saved {
  Form form = Form::whole;
  std::optional<Whole> whole;
  std::string path;            // of a checkpoint
  bool has_optimizer = false;  // whether the optimizer had any state
  int place = 0, world = 0;    // of the values of ranks
};

class Trainer {
 public:
  Trainer(OptimizerKind kind, const std::vector<ShardedParameter>& parameters) {
    std::vector<ShardedParameter> trained;
    for (const auto& parameter : parameters) {
      if (parameter.local.requires_grad()) trained.push_back(parameter);
    }
    if (kind == OptimizerKind::own_adamw) {
      own_.emplace(trained, own_adamw_options());
    } else {
      torchs_ = make_optimizer(kind, local_tensors(trained));
    }
  }
  void step() {
    if (own_) return own_->step();
    torchs_->step();
  }
  void zero_grad() {
    if (own_) return own_->zero_grad();
    torchs_->zero_grad();
  }
  OptimizerRef ref() { return own_ ? OptimizerRef(*own_) : OptimizerRef(*torchs_); }
  std::optional<AdamW>& own() { return own_; }

 private:
  std::optional<AdamW> own_;
  std::unique_ptr<torch::optim::Optimizer> torchs_;
};

// One rank in one phase.
class Rank {
 public:
  // `store`: one for all ranks, which other meshes meet through.
  Rank(const Case& drawn, int phase, Mesh& mesh, const PhaseResult& expected,
       const std::string& directory, c10::intrusive_ptr<c10d::Store> store)
      : drawn_(drawn),
        phase_(phase),
        mesh_(mesh),
        expected_(expected),
        directory_(directory),
        store_(std::move(store)),
        root_(make_root(drawn, is_odd(Odd::other_width) ? drawn.width + 2 : drawn.width)) {
    shard(root_, drawn, layout(), mesh, is_odd(Odd::other_units) ? drawn.odd_block : -1);
    parameters_ = sharded_parameters(root_);
    trainer_.emplace(drawn.optimizer, parameters_);
    if (has(drawn, Feature::second_model)) second_.emplace(layout(), mesh);
  }

  void load_from(const std::optional<Saved>& saved) {
    saved_ = saved;
    load();
  }
  const std::optional<Saved>& saved() const { return saved_; }

  void run() {
    const auto& steps = drawn_.phases[phase_].steps;
    for (int s = 0; s < static_cast<int>(steps.size()); ++s) {
      step_ = s;
      before_step();
      run_step(steps[s]);
      if (!is_known(s)) continue;
      compare_parameters();
    }
    mesh_.group().barrier();
  }

 private:
  bool is_odd(Odd odd) const {
    return phase_ == 0 && mesh_.rank() == drawn_.odd_rank && drawn_.odd == odd;
  }
  Odd odd_now() const { return odd_of(drawn_, phase_, step_, mesh_.rank()); }

  // Step `s` has to give what one process has.
  bool is_known(int s) const {
    if (phase_ > 0 || s < drawn_.odd_step) return true;
    // A rank that left out a part of a step has other parameters by itself; what counts is what the
    // others have.
    const bool left_out =
        is_odd(Odd::skips_forward) || is_odd(Odd::skips_backward) || is_odd(Odd::accumulates_alone);
    if (left_out) return false;
    // A rank that left out a whole step is one whose data begins later: the others learn of it when
    // it does something else, or ends, earlier.
    return drawn_.odd != Odd::skips_forward;
  }

  void before_step() {
    switch (odd_now()) {
      case Odd::leaves:
        throw Leaves();
      case Odd::freezes:
        for (auto& named : block_parameters(*root_, drawn_.odd_block))
          named.tensor.requires_grad_(false);
        break;
      case Odd::evaluates_alone:
        evaluate();
        break;
      case Odd::saves_alone:
        save({.form = Form::checkpoint});
        break;
      case Odd::clips_alone:
        static_cast<void>(clip_grad_norm(parameters_, 1.0));
        break;
      default:
        break;
    }
  }

  void run_step(const Step& step) {
    switch (step.action) {
      case Action::train:
      case Action::train_twice_forward:
      case Action::no_step:
        return train(step);
      case Action::train_unsharded:
        unshard(root_);
        train(step);
        return reshard(root_);
      case Action::forward_only:
        zero(step.zero);
        return compare_loss(loss(0).item<double>());
      case Action::evaluate: {
        const double mine = evaluate();
        return compare_loss(mine);
      }
      case Action::freeze:
      case Action::thaw:
        for (auto& named : block_parameters(*root_, step.block))
          named.tensor.requires_grad_(step.action == Action::thaw);
        return;
      case Action::save:
        return save(step);
      case Action::load:
        return load();
      case Action::change:
        return change([] {});
      case Action::save_inside:
        return change([&] { save(step); });
      case Action::load_inside:
        return change([&] { load(); });
      case Action::look:
        return look();
      case Action::fail_and_abandon:
        fail(step);
        return abandon_step(root_);
      case Action::fail_and_go_on:
        return fail_and_go_on(step);
      case Action::leave_unsynced:
        return leave_unsynced();
      case Action::set_data:
        for (auto& parameter : parameters_)
          parameter.local.set_data(parameter.local.detach() * 0.9);
        return;
      case Action::failed_load:
        return fail_to_load();
      case Action::fork:
        return fork_a_child();
      case Action::other_mesh:
        return use_another_mesh();
    }
  }

  void train(const Step& step) {
    const auto odd = odd_now();
    if (odd == Odd::skips_forward) return;
    zero(step.zero);
    double total = 0;
    for (int micro = 0; micro < step.micros; ++micro) {
      const bool is_last = micro + 1 == step.micros;
      const bool quiet =
          odd == Odd::accumulates_alone || (!is_last && step.accumulate != Accumulate::synced);
      std::optional<NoSync> no_sync;
      if (quiet && step.accumulate != Accumulate::flag) no_sync.emplace(root_);
      if (step.accumulate == Accumulate::flag) set_requires_gradient_sync(root_, !quiet);
      auto sum = loss(micro, step.extra);
      if (step.action == Action::train_twice_forward) sum = sum + loss(micro + 5, step.extra);
      total += sum.item<double>();
      if (odd == Odd::skips_backward) return;
      if (second_ && !second_->train(10 * step_ + micro))
        throw Differs(where() + "the second model differs");
      sum.backward();
    }
    compare_loss(total);
    if (step.action == Action::no_step) return;
    if (step.clip > 0) compare_norm(clip_grad_norm(parameters_, step.clip, norm_type(step)));
    trainer_->step();
  }

  Tensor loss(int micro, Extra extra = Extra::nothing) {
    auto route = route_of(drawn_, phase_, step_, mesh_.rank(), micro);
    if (odd_now() == Odd::throws_in_forward) route.throw_forward = drawn_.odd_block;
    if (odd_now() == Odd::throws_in_backward) route.throw_backward = drawn_.odd_block;
    return loss(micro, route, extra);
  }
  Tensor loss(int micro, const Route& route, Extra extra) {
    const auto batch = batch_of(drawn_, batch_number(phase_, step_), micro, mesh_.rank(),
                                rows_of(drawn_, phase_, step_, mesh_.rank()));
    const testing::Autocast autocast(drawn_.autocast);
    return loss_of([&](const Tensor& input) { return root_(input, route); }, batch, extra);
  }

  void leave_unsynced() {
    const NoSync no_sync(root_);
    const auto sum = loss(0);
    sum.backward();
    compare_loss(sum.item<double>());
  }

  double evaluate() {
    const torch::NoGradGuard no_grad;
    root_->eval();
    const double value = loss(0).item<double>();
    root_->train();
    return value;
  }

  void zero(Zero kind) {
    if (kind == Zero::model) root_->zero_grad();
    if (kind == Zero::optimizer) trainer_->zero_grad();
    if (kind != Zero::to_zero) return;
    for (const auto& parameter : parameters_) {
      if (parameter.local.grad().defined()) parameter.local.grad().zero_();
    }
  }

  // All parameters, and does `then` while they are whole.
  template <typename Then>
  void change(Then&& then) {
    const FullParams whole(root_);
    const torch::NoGradGuard no_grad;
    for (auto& named : own_parameters(*root_)) named.tensor.mul_(0.9);
    then();
  }

  void look() {
    for (const auto& entry : full_state_dict(root_)) {
      if (!is_known(step_)) continue;
      const auto& all = expected_[step_].parameters;
      const auto found = all.find(entry.key());
      if (found != all.end()) compare(entry.value(), found->second, "whole " + entry.key());
    }
  }

  // Every rank alike.
  void fail(const Step& step) {
    Route route{.step = step_, .rank = mesh_.rank()};
    if (step.fault == Fault::in_backward) {
      route.throw_backward = step.block;
    } else if (step.fault == Fault::other_recomputing) {
      route.changes = step.block;
    } else {
      route.throw_forward = step.block;
    }
    try {
      loss(0, route, Extra::nothing).backward();
    } catch (const std::exception&) {
    }
  }

  // The backward that failed is made again, or refused until the step is abandoned.
  void fail_and_go_on(const Step& step) {
    root_->zero_grad();
    const auto once = std::make_shared<bool>(true);
    const Route route{
        .step = step_, .rank = mesh_.rank(), .throw_backward = step.block, .throw_once = once};
    auto sum = loss(0, route, Extra::nothing);
    try {
      sum.backward({}, true);
    } catch (const std::exception&) {
    }
    root_->zero_grad();
    try {
      sum.backward();
    } catch (const Error&) {
      abandon_step(root_);
      root_->zero_grad();
      sum = loss(0);
      sum.backward();
    }
    compare_loss(sum.item<double>());
  }

  void fail_to_load() {
    auto whole = full_state_dict(root_);
    FullState less;
    for (const auto& entry : whole) {
      if (entry.key() != whole.back().key()) less.insert(entry.key(), entry.value());
    }
    require_failure([&] { load_full_state_dict(root_, less); });
    auto& group = mesh_.checkpoint_group();
    const auto load_training = [&](const std::string& path) {
      TrainingState state(root_, trainer_->ref());
      tessera::load(state, path, group);
    };
    require_failure([&] { load_training(directory_ + "/nothing"); });
    const auto path = directory_ + "/less" + std::to_string(phase_) + "." + std::to_string(step_);
    {
      const StateDictTypeScope scope(root_, {.type = StateDictType::sharded});
      tessera::save(Value::dict({{"model", state_dict(root_)}}), path, group);
    }
    require_failure([&] { load_training(path); });
  }

  template <typename Load>
  void require_failure(Load&& load) {
    try {
      load();
    } catch (const Error&) {
      return;
    }
    throw Differs(where() + "a load of less than all succeeded");
  }

  // Saving ---------------------------------------------------------------------------------------

  Value state_of_optimizer() {
    return full_optim_state_dict(root_, trainer_->ref(), {.rank0_only = false, .group = mesh_});
  }

  void save(const Step& step) {
    Saved saved;
    saved.form = step.form;
    if (step.form == Form::whole) {
      saved.whole = Whole{full_state_dict(root_), state_of_optimizer()};
    } else {
      saved.path = directory_ + "/" + std::to_string(phase_) + "." + std::to_string(step_);
      if (step.form == Form::sharded_checkpoint) {
        tessera::save(sharded_tree(saved), saved.path, mesh_.checkpoint_group());
      } else {
        saved.place = 10 * step_;
        saved.world = mesh_.size();
        TrainingState state(root_, trainer_->ref());
        if (has_own_values()) state.rank_values = own_values(saved.place);
        tessera::save(state, saved.path, mesh_.checkpoint_group());
      }
    }
    saved_ = saved;
  }

  bool has_own_values() const { return has(drawn_, Feature::values_of_ranks); }
  Value own_values(int place) const {
    return Value::dict({{"place", place}, {"of", place < 0 ? -1 : mesh_.rank()}});
  }

  // A dict without entries is no part of a checkpoint.
  Value sharded_tree(Saved& saved) {
    const StateDictTypeScope scope(root_, {.type = StateDictType::sharded});
    const auto state = sharded_optim_state_dict(root_, trainer_->ref(), {.group = mesh_});
    saved.has_optimizer = !state.at("state").pairs().empty();
    return Value::dict({{"model", state_dict(root_)}, {"optim", state}});
  }

  void load() {
    if (!saved_) return;
    if (saved_->form == Form::whole) {
      load_full_state_dict(root_, saved_->whole->model);
      return load_optimizer(saved_->whole->optimizer);
    }
    if (saved_->form != Form::sharded_checkpoint) {
      TrainingState state(root_, trainer_->ref());
      if (has_own_values()) state.rank_values = own_values(-1);
      tessera::load(state, saved_->path, mesh_.checkpoint_group());
      const int place = mesh_.rank() < saved_->world ? saved_->place : -1;
      if (has_own_values() && state.rank_values != own_values(place))
        throw Differs(where() + "a rank has other values of its own");
      return;
    }
    const StateDictTypeScope scope(root_, {.type = StateDictType::sharded});
    auto tree = Value::dict({{"model", state_dict(root_)}});
    tessera::load(tree, saved_->path, mesh_.checkpoint_group());
    load_state_dict(root_, tree.at("model"));
    auto optimizer = Checkpoint::open(saved_->path).load().at("optim");
    if (!saved_->has_optimizer) optimizer.set_item("state", Value::dict({}));
    load_optimizer(optimizer);
  }

  void load_optimizer(const Value& state) {
    const auto ref = trainer_->ref();
    load_optimizer_state_dict(
        ref, shard_full_optim_state_dict(state, root_, {.optim = ref, .group = mesh_}));
  }

  // The mesh refuses a child of this process, whose end leaves ours alone. Alone there is nothing
  // to share.
  void fork_a_child() {
    if (mesh_.size() == 1) return;
    const pid_t child = ::fork();
    if (child == 0) {
      const auto text = testing::error_of([&] { mesh_.group().barrier(); });
      ::_exit(text.starts_with("invalid_argument") ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) throw Differs(where() + "a child of fork() used the mesh, or crashed");
  }

  void use_another_mesh() {
    MeshOptions options;
    options.device = torch::kCPU;
    options.same_host = !drawn_.gloo;
    const int size = mesh_.size();
    const Mesh other = size == 1 ? Mesh(options) : Mesh(store_, mesh_.rank(), size, options);
    const auto sum = other.all_reduce_sum(mesh_.rank() + 1.0);
    if (sum != size * (size + 1) / 2.0) throw Differs(where() + "another mesh adds up otherwise");
  }

  // Comparing ------------------------------------------------------------------------------------

  double tolerance() const {
    if (drawn_.precision == Precision::fp64) return 1e-10;
    if (is_low(drawn_.precision)) return 5e-2;
    if (drawn_.autocast) return 3e-3;
    if (std::ranges::any_of(drawn_.blocks, has_complex)) return 2e-5;
    return drawn_.rough ? 1e-3 : 1e-6;
  }
  std::string where() const {
    return "phase " + std::to_string(phase_) + " step " + std::to_string(step_) + ": ";
  }

  void compare_loss(double mine) {
    if (!is_known(step_)) return;
    const double theirs = expected_[step_].losses[mesh_.rank()];
    if (std::abs(mine - theirs) <= tolerance() * std::max(1.0, std::abs(theirs))) return;
    if (!std::isfinite(theirs) && !std::isfinite(mine)) return;  // exploded here as there
    throw Differs(where() + "the loss is " + std::to_string(mine) + ", in one process " +
                  std::to_string(theirs));
  }

  void compare_norm(double mine) {
    if (!is_known(step_)) return;
    const double theirs = expected_[step_].norm;
    if (std::abs(mine - theirs) <= tolerance() * std::max(1.0, theirs)) return;
    if (!std::isfinite(theirs) && !std::isfinite(mine)) return;  // exploded here as there
    throw Differs(where() + "the gradients' norm is " + std::to_string(mine) + ", in one process " +
                  std::to_string(theirs));
  }

  void compare(const Tensor& mine, const Tensor& theirs, const std::string& name) {
    if (mine.sizes() != theirs.sizes()) throw Differs(where() + name + " has another shape");
    if (mine.numel() == 0) return;
    const auto scale = std::max(1.0, theirs.abs().max().item<double>());
    const auto difference = (mine - theirs).abs().max().item<double>();
    if (!torch::isfinite(theirs).all().item<bool>() && !torch::isfinite(mine).all().item<bool>())
      return;  // exploded here as there
    // Not a number is no number below the tolerance either.
    if (difference <= tolerance() * scale) return;
    throw Differs(where() + name + " differs by " + std::to_string(difference));
  }

  void compare_parameters() {
    const torch::NoGradGuard no_grad;
    const auto& expected = expected_[step_].parameters;
    for (const auto& parameter : parameters_) {
      const auto local = parameter.local.detach();
      for (const auto& member : parameter.members) {
        const auto theirs = expected.at(member.name).flatten();
        compare(local.narrow(0, member.base, numel(member.range)),
                theirs.narrow(0, member.range.begin, numel(member.range)), member.name);
      }
      if (!parameter.members.empty()) continue;
      auto theirs = expected.at(parameter.name());
      if (parameter.sharded && parameter.flat) {
        theirs = theirs.flatten().narrow(0, parameter.offset, local.numel());
      } else if (parameter.sharded) {
        theirs = theirs.narrow(parameter.dim, parameter.offset, local.size(parameter.dim));
      }
      compare(local, theirs, parameter.name());
    }
  }

  const Layout& layout() const { return drawn_.phases[phase_].layout; }

  const Case& drawn_;
  int phase_;
  int step_ = 0;
  Mesh& mesh_;
  const PhaseResult& expected_;
  const std::string& directory_;
  c10::intrusive_ptr<c10d::Store> store_;
  Root root_;
  std::vector<ShardedParameter> parameters_;
  std::optional<Trainer> trainer_;
  std::optional<Saved> saved_;
  std::optional<SecondModel> second_;
};

Outcome outcome_of(const std::function<void()>& work) {
  try {
    work();
    return {};
  } catch (const Leaves&) {
    return {Outcome::Kind::left, "left"};
  } catch (const Differs& differs) {
    return {Outcome::Kind::differs, differs.what()};
  } catch (const Error& error) {
    return {Outcome::Kind::error, error.what()};
  } catch (const std::exception& other) {
    const std::string text = other.what();
    return {text == "bad batch" ? Outcome::Kind::failed_as_meant : Outcome::Kind::other_exception,
            text};
  }
}

}  // namespace

std::vector<Outcome> run_sharded(const Case& drawn, const std::vector<PhaseResult>& expected,
                                 const std::string& directory) {
  const auto deadline = std::chrono::seconds(drawn.odd == Odd::nothing ? 60 : 4);
  std::optional<Saved> saved;
  std::vector<Outcome> outcomes;
  for (int phase = 0; phase < static_cast<int>(drawn.phases.size()); ++phase) {
    outcomes.assign(drawn.phases[phase].layout.world, {});
    std::optional<Saved> next;  // written by rank 0
    const auto store = c10::make_intrusive<c10d::HashStore>();
    testing::run_mesh(
        static_cast<int>(outcomes.size()),
        [&](Mesh& mesh) {
          outcomes[mesh.rank()] = outcome_of([&] {
            Rank rank(drawn, phase, mesh, expected[phase], directory, store);
            if (phase > 0) rank.load_from(saved);
            rank.run();
            if (mesh.rank() == 0) next = rank.saved();
          });
        },
        deadline, !drawn.gloo);
    saved = std::move(next);
    const bool all_finished = std::ranges::all_of(
        outcomes, [](const Outcome& outcome) { return outcome.kind == Outcome::Kind::finished; });
    if (!all_finished) break;
  }
  return outcomes;
}

}  // namespace tessera::generated
