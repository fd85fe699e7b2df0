#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include <torch/torch.h>

#include "base/parallel.h"
#include "base/text.h"
#include "checkpointer/save.h"
#include "comm/launcher.h"
#include "format/olmo/yaml.h"
#include "optim_state/tree.h"
#include "tessera/checkpointer.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::KindNames;

// In the order of CheckpointerKind.
constexpr std::array<KindNames, 4> kNames{{
    {"full", CheckpointKind::olmo_full},
    {"torch_new", CheckpointKind::olmo_torch_new},
    {"torch_legacy", CheckpointKind::olmo_legacy},
    {"local", CheckpointKind::olmo_local},
}};

// The one whose row has `value` there.
template <typename Value>
std::optional<CheckpointerKind> find_kind(Value KindNames::*member, const Value& value) noexcept {
  const auto* row = std::ranges::find(kNames, value, member);
  if (row == kNames.end()) return std::nullopt;
  return static_cast<CheckpointerKind>(row - kNames.begin());
}

int thread_count(const std::optional<int>& asked) {
  if (!asked) return default_thread_count();
  require_threads(*asked);
  return *asked;
}

std::optional<std::string> named_in(const std::string& config) {
  return olmo::sharded_checkpointer_of(std::as_bytes(std::span(config)));
}

}  // namespace

const KindNames& detail::names_of(CheckpointerKind kind) noexcept {
  return kNames[static_cast<std::size_t>(kind)];
}

void detail::require_named(CheckpointerKind kind, const std::optional<std::string>& named) {
  if (kind == CheckpointerKind::full || !named || *named == to_string(kind)) return;
  throw Error(ErrorCode::invalid_argument, "config.yaml names the sharded checkpointer " + *named +
                                               ", this is " + std::string(to_string(kind)))
      .at_key("sharded_checkpointer");
}

std::string_view to_string(CheckpointerKind kind) noexcept {
  return detail::names_of(kind).name;
}

std::optional<CheckpointerKind> checkpointer_named(std::string_view name) noexcept {
  return find_kind(&KindNames::name, name);
}

std::optional<CheckpointerKind> checkpointer_of(CheckpointKind kind) noexcept {
  return find_kind(&KindNames::files, kind);
}

CheckpointerKind checkpointer_of(const Location& path) {
  if (const auto known = olmo_kind_at(path)) return checkpointer_of(*known).value();
  const auto kind = Checkpoint::open(path).kind;
  throw Error(ErrorCode::unsupported,
              "no checkpointer of OLMo's saved this: it is " + std::string(to_string(kind)))
      .at_path(to_string(path));
}

CheckpointerKind checkpointer_of(const Location& path, Group& group) {
  Bytes kind(1);
  agree(group, "telling what saved a checkpoint", [&] {
    if (group.rank() == 0) kind[0] = static_cast<std::byte>(checkpointer_of(path));
  });
  return static_cast<CheckpointerKind>(group.spread(kind).at(0));
}

Checkpointer::Checkpointer(CheckpointerKind kind, Group& group, CheckpointerOptions options)
    : kind_(kind),
      group_(group),
      options_(std::move(options)),
      threads_(thread_count(options_.thread_count)) {
  detail::require_named(kind_, named_in(options_.config));
}

LoadOptions Checkpointer::load_options() const {
  LoadOptions options;
  options.threads = threads_;
  return options;
}

Checkpointer build_sharded_checkpointer(std::string_view name, Group& group,
                                        const CheckpointerOptions& options) {
  const std::string wanted =
      name.empty() ? named_in(options.config).value_or("") : std::string(name);
  const auto kind = checkpointer_named(wanted);
  if (kind && *kind != CheckpointerKind::full) return {*kind, group, options};
  if (wanted == "olmo_core") {
    throw Error(ErrorCode::unsupported, "checkpoints of olmo_core are another format")
        .at_key("sharded_checkpointer");
  }
  throw Error(ErrorCode::invalid_argument,
              (wanted.empty() ? "nothing names a sharded checkpointer"
                              : "there is no sharded checkpointer " + wanted) +
                  std::string(", expected torch_new, torch_legacy or local"))
      .at_key("sharded_checkpointer");
}

// Whole tensors of a checkpoint, in memory or as files (checkpoint-rows O-43, O-62, O-76).

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
