// A small training state that ranks save as any kind of directory, and what is read of it
// afterwards: for programs in which a save goes wrong.
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/boxes.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace tessera::testing {

constexpr CheckpointKind kFiveKinds[] = {CheckpointKind::dcp, CheckpointKind::olmo_full,
                                         CheckpointKind::olmo_torch_new,
                                         CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};

// The parameters of a state; each is a unit of FSDP1, called by its first letter.
struct NamedShape {
  std::string name;
  Shape shape;
};
using NamedShapes = std::vector<NamedShape>;

// Sizes that ranks do not divide.
inline NamedShapes small_shapes() {
  return {{"a.w", {11, 5}}, {"b.bias", {13}}};
}

// Everything lies as FSDP1 lays it, each parameter a flat one of its own, so that any kind fits.
// All elements are `number`.
inline Tensor flat_tensor(const Shape& shape, int rank, int ranks, int number) {
  Tensor tensor;
  tensor.shape = shape;
  tensor.sharded = ranks > 1;
  const std::int64_t aligned = (numel(shape) + ranks - 1) / ranks * ranks;
  tensor.placement = ranks > 1 ? Placement{ranks, 1, 0, aligned / ranks, 0} : Placement{};
  for (Box& box : boxes_of_part(*tensor.placement, shape, rank)) {
    auto elements = std::make_shared<std::vector<float>>(static_cast<std::size_t>(numel(box)),
                                                         static_cast<float>(number));
    auto storage = std::make_shared<Storage>();
    storage->data = reinterpret_cast<std::byte*>(elements->data());
    storage->size = elements->size() * sizeof(float);
    storage->owner = elements;
    tensor.pieces.push_back({std::move(box), std::move(storage), 0, {}, rank});
  }
  return tensor;
}

inline Value training_state(int rank, int ranks, int number,
                            const NamedShapes& parameters = small_shapes()) {
  Value model = Value::dict({}, DictKind::ordered_dict);
  Value states = Value::dict();
  Value names = Value::list();
  for (const auto& [name, shape] : parameters) {
    model.set_item(name, flat_tensor(shape, rank, ranks, number));
    states.set_item(name, Value::dict({{"exp_avg", flat_tensor(shape, rank, ranks, number)}}));
    names.items().emplace_back(name);
  }
  Value group = Value::dict({{"lr", 0.5}, {"params", names}, {"param_names", names}});
  return Value::dict(
      {{"model", model},
       {"optim", Value::dict({{"state", states}, {"param_groups", Value::list({group})}})},
       {"train", Value::dict({{"global_step", number}})}});
}

inline SaveOptions options_for_kind(CheckpointKind kind, bool overwrite,
                                    const NamedShapes& parameters = small_shapes()) {
  SaveOptions options;
  options.kind = kind;
  options.overwrite = overwrite;
  options.threads = 2;
  if (kind == CheckpointKind::dcp) return options;
  options.olmo.units = {{"", {}}};
  for (const auto& [name, shape] : parameters)
    options.olmo.units.push_back({name.substr(0, 1), {name}});
  return options;
}

inline bool is_filled_with(const Tensor& tensor, int number) {
  const Piece& piece = tensor.pieces.at(0);
  const auto* elements = reinterpret_cast<const float*>(piece.storage->data);
  return std::all_of(elements, elements + numel(tensor.shape),
                     [number](float element) { return element == static_cast<float>(number); });
}

inline bool is_checkpoint_at(const std::string& path) {
  return std::filesystem::exists(path + "/.metadata") ||
         std::filesystem::exists(path + "/config.yaml");
}

inline int number_of(const Value& state) {
  return static_cast<int>(state.at("train").at("global_step").as_int());
}

// The state that the checkpoint at `path` holds. Throws if its elements are not all of one save.
inline Value loaded_state(const std::string& path) {
  Value state = Checkpoint::open(path).load();
  for (const Leaf& leaf : leaves_of(state)) {
    const bool is_other = leaf.value.is(Value::Kind::tensor) &&
                          !is_filled_with(leaf.value.as_tensor(), number_of(state));
    if (is_other)
      throw Error(ErrorCode::corrupt, "elements of two saves").at_path(path).at_key(leaf.name);
  }
  return state;
}
inline int loaded_number(const std::string& path) {
  return number_of(loaded_state(path));
}

// The same. Throws what is wrong with its files, too.
inline Value verified_state(const std::string& path) {
  const VerifyReport report = verify(path);
  if (!report.findings.empty())
    throw Error(ErrorCode::corrupt, report.findings.front().text).at_path(path);
  return loaded_state(path);
}

// Its number; 0: there is no checkpoint.
inline int number_at(const std::string& path) {
  return is_checkpoint_at(path) ? number_of(verified_state(path)) : 0;
}

}  // namespace tessera::testing
