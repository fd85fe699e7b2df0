// GradReducer: from the gradients of a unit's parameters on each rank to their average, where the
// optimizer looks for it. Unit says when; both kinds treat what is special in the same way:
//
// - Behind the gradients travels one element a parameter, 1 where this rank has a gradient. A
//   parameter that no rank has one for keeps the gradient it had: none, as in torch.
// - After those travels the unit's number, that of the pass and which of its parameters require a
//   gradient, bit by bit: ranks that reduce different units or passes at the same time, or froze
//   different parameters, get `mismatch`, not numbers. Two numbers travel for each bit, who has it
//   and who has not, and what nobody says must be 0: that is exact in every type, for any number of
//   ranks.
// - Sums are divided by the number of ranks, by a part before the sum where it could overflow.
#pragma once

#include <c10/core/Event.h>
#include <torch/types.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace tessera::detail {

class StoragePool;

struct UnitParam {
  at::Tensor full;  // the module's tensor
  at::Tensor
      local;  // what the optimizer works on, a leaf; the same tensor where nothing is sharded
  at::Tensor
      dead_grad;  // stands for a gradient that is in local.grad(): no bytes, throws on access
  bool mirrored = false;  // full.grad() is dead_grad
  // Negative zeros that are local.grad() in the place of what is kept (Unit::show_kept).
  at::Tensor stand_in = {};
  // The version of local.grad() when it stood for what is kept.
  std::optional<std::uint32_t> shown_version = {};
  bool trains = false;   // requires a gradient, as `full` and `local` last agreed
  bool watched = false;  // Unit::watch has seen it
  // The last pass with gradients may bring it one, though it is frozen since.
  bool in_graph = false;
};

// A digest of which parameters require a gradient.
[[nodiscard]] std::uint32_t digest_of_trained(const std::vector<bool>& trained);
[[nodiscard]] std::uint32_t digest_of_trained(const std::vector<UnitParam>& params);

// The numbers that gradients are divided by, before and after they are summed (fsdp-rows GD1 to
// GD4, 9.4).
struct GradScale {
  double before = 1;
  double after = 1;
  // Sums in float32, float64 and bfloat16 cannot overflow where the mean does not.
  [[nodiscard]] static GradScale make(double divisor, at::ScalarType reduced_in);
};

// Called with a sum before it is divided, which it may change in place.
using ReduceHook = std::function<void(at::Tensor& sum)>;

// How sums become averages, as the user last said.
struct AverageRules {
  double divisor = 1;
  // Null: none. One object, so that what a hook keeps in itself lasts.
  std::shared_ptr<const ReduceHook> hook = {};
};

[[nodiscard]] bool are_all_defined(const std::vector<at::Tensor>& gradients);
// Throws when a gradient has a graph of its own.
void require_without_graph(const at::Tensor& gradient);
// Throws when a gradient is of a kind that is not reduced.
void require_reducible(const at::Tensor& gradient);

// One backward of a unit.
struct BackwardPlan {
  std::uint32_t id = 0;    // the unit's number
  std::uint32_t pass = 0;  // of the training pass, the same on all ranks that did the same
  bool sync = true;        // its gradients will be reduced
  bool replicas = true;    // over the copies too, not only over the ranks that share the parameters
  std::shared_ptr<StoragePool> pool = {};  // has the streams of a device
};

// The numbers that have to be the same on all ranks that reduce together; of each the lowest 16
// bits count.
struct Reduced {
  std::uint32_t id = 0;       // of the unit or bucket
  std::uint32_t pass = 0;     // BackwardPlan::pass
  std::uint32_t trained = 0;  // digest_of_trained
};

// The numbers that travel behind the gradients of some parameters, and what their sums say.
class Trailer {
 public:
  static constexpr int kBits = 16;  // of each number, and two elements for each
  // `gradients`: of the parameters of one message; undefined where this rank has none.
  [[nodiscard]] static std::int64_t size(std::size_t parameters) {
    return static_cast<std::int64_t>(parameters) + 3 * 2 * kBits;
  }
  [[nodiscard]] static at::Tensor make(const std::vector<at::Tensor>& gradients,
                                       const Reduced& what, const at::TensorOptions& options);
  // The same for each of `ranks` slices, one below the other. The host does not wait for a device.
  [[nodiscard]] static at::Tensor make_rows(const std::vector<at::Tensor>& gradients,
                                            const Reduced& what, const at::TensorOptions& options,
                                            int ranks);
  // Reads from the summed slice which parameters some rank had a gradient for. Throws `mismatch`
  // when the ranks reduced different things. Sums of sums say the same.
  [[nodiscard]] static std::vector<bool> read(const at::Tensor& sum, std::size_t parameters,
                                              const Reduced& what);
};

// A trailer on its way from a device, for whoever knows already which gradients there are.
class LateTrailer {
 public:
  // Queued on the current stream of the sum's device.
  LateTrailer(const at::Tensor& sum, std::size_t parameters, const Reduced& what);
  // It has come.
  [[nodiscard]] bool is_here() const { return event_.query(); }
  void wait() const { event_.synchronize(); }
  // Throws as Trailer::read. When it is here.
  void require() const;

 private:
  std::size_t parameters_;
  Reduced what_;
  at::Tensor numbers_;  // page-locked
  c10::Event event_;
};

class GradReducer {
 public:
  virtual ~GradReducer() = default;
  // Gradients travel in `dtype`.
  GradReducer(double divisor, at::ScalarType dtype);
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  // From the next reduction on: one that is under way ends by the rules that it began with.
  [[nodiscard]] const AverageRules& rules() const noexcept { return wanted_; }
  void set_rules(AverageRules rules) { wanted_ = std::move(rules); }
  // What lies in grad() can be reduced by them.
  [[nodiscard]] virtual bool may_set(const AverageRules& rules) const = 0;
  void set_comm_hook(CommHook hook) { comm_hook_ = std::move(hook); }

  virtual void begin(const BackwardPlan& plan) = 0;
  // The gradient of parameter `param` is complete for this backward. False: it was thought to be
  // before, and was sent off.
  [[nodiscard]] virtual bool arrived(std::size_t param) = 0;
  // All gradients are there: sends them off. False: there is nothing to send.
  virtual bool start() = 0;
  // Starts the next stage of what is under way, if there is one.
  virtual void advance() = 0;
  // Until the averages are in `local.grad()`.
  virtual void finish() = 0;
  // The gradients stay on this rank, for a later start.
  virtual void keep() = 0;
  // Whether it keeps a gradient of parameter `param` outside of its grad(), where nobody sees it.
  [[nodiscard]] virtual bool keeps(std::size_t param) const = 0;
  virtual void drop_kept(std::size_t param) = 0;
  // Waits for what is under way and forgets all gradients of this rank.
  virtual void forget() = 0;

  // Looks at what the ranks compare of reductions that have ended on a device, which is late there:
  // throws `mismatch` as a finish does. `now`: of what has come; `pass`: a pass begins, so of all
  // that was late at the beginning of the one before too; `all`: of all.
  enum class Look : std::uint8_t { now, pass, all };
  void look(Look how);

 protected:
  // Trailer::read, unless this rank `has_all` gradients and the sum is on a device: then the ranks
  // are compared when the trailer has come.
  [[nodiscard]] std::vector<bool> read_trailer(const at::Tensor& sum, std::size_t parameters,
                                               const Reduced& what, bool has_all);
  void forget_late() { late_.clear(); }
  // A reduction begins.
  void adopt_rules();
  [[nodiscard]] const GradScale& scale() const noexcept { return scale_; }
  [[nodiscard]] bool has_hook() const noexcept { return hook_ != nullptr; }
  void call_hook(at::Tensor& sum) const {
    if (hook_) (*hook_)(sum);
  }
  // Does the whole of a reduction, when there is one.
  [[nodiscard]] const CommHook& comm_hook() const noexcept { return comm_hook_; }

 private:
  at::ScalarType dtype_;
  AverageRules wanted_;
  // The scale of the reduction that began last.
  GradScale scale_;
  std::shared_ptr<const ReduceHook> hook_;
  CommHook comm_hook_;
  struct Late {
    LateTrailer trailer;
    bool is_old = false;  // a pass has begun since
  };
  std::deque<Late> late_;
};

}  // namespace tessera::detail
