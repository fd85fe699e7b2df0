// Whole tensors of a checkpoint, in memory or as files (checkpoint-rows O-43, O-62, O-76).
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>

#include "base/one_of.h"
#include "checkpointer/kinds.h"
#include "checkpointer/places.h"
#include "optim_state/tree.h"
#include "tessera/checkpointer.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kTrain = "train";

// Whether the place of a leaf begins with these steps.
bool is_at(const Leaf& leaf, const char* part, const char* key = nullptr) {
  const auto has = [&leaf](std::size_t at, const char* step) {
    return leaf.path.size() > at && leaf.path[at] == PathPart(std::string(step));
  };
  return has(0, part) && (key == nullptr || has(1, key));
}

// The parts of a checkpoint of the kind that the options ask for.
Checkpoint wanted_parts(const Location& path, CheckpointerKind kind,
                        const UnshardOptions& options) {
  auto opened = Checkpoint::open(detail::seen_through(path, options.local_cache));
  if (opened.kind != detail::names_of(kind).files) {
    throw Error(ErrorCode::invalid_argument, "the checkpoint is " +
                                                 std::string(to_string(opened.kind)) +
                                                 ", which the checkpointer " +
                                                 std::string(to_string(kind)) + " does not unshard")
        .at_path(opened.path);
  }
  return opened.map([&](Leaf leaf) -> std::optional<Leaf> {
    const bool is_unwanted = (is_at(leaf, kOptim) && !options.load_optimizer_state) ||
                             (is_at(leaf, kTrain) && !options.load_trainer_state) ||
                             // As OLMo does: each rank's file has its own beside what all share.
                             (kind == CheckpointerKind::torch_legacy && is_at(leaf, kTrain, "rng"));
    return is_unwanted ? std::nullopt : std::optional(std::move(leaf));
  });
}

Value on_device(const Value& tree, torch::Device device) {
  if (device.is_cpu()) return tree;
  return detail::map_tensors(
      tree, [&](const Tensor& leaf) { return Value(leaf_of(tensor_of(leaf).to(device))); });
}

std::optional<Value> find_part(const Value& tree, const char* part) {
  const Value* found = tree.find(part);
  return found == nullptr ? std::nullopt : std::optional(*found);
}

}  // namespace

UnshardedState Checkpointer::unshard_checkpoint(const Location& path,
                                                const UnshardOptions& options) const {
  const auto tree = wanted_parts(path, kind_, options).load(load_options());
  UnshardedState state{.model = on_device(tree.at(kModel), options.device),
                       .optim = find_part(tree, kOptim),
                       .trainer = find_part(tree, kTrain)};
  if (state.optim) state.optim = on_device(*state.optim, options.device);
  return state;
}

ConvertReport Checkpointer::unshard_checkpoint(const Location& path, const Location& target,
                                               const UnshardOptions& options) const {
  ConvertOptions how;
  how.to = CheckpointKind::olmo_full;
  how.overwrite = options_.save_overwrite;
  how.threads = threads_;
  return convert(wanted_parts(path, kind_, options), target, how);
}

}  // namespace tessera
