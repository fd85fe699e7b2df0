// A small training state that ranks save as any kind of directory, and what is read of it
// afterwards: for programs in which a save goes wrong.
#pragma once

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "layout/placement.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/verify.h"

namespace tessera::testing {

constexpr CheckpointKind kFiveKinds[] = {CheckpointKind::dcp, CheckpointKind::olmo_full,
                                         CheckpointKind::olmo_torch_new,
                                         CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};
constexpr const char* kParameterNames[] = {"a.w", "b.bias"};

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

// Sizes that ranks do not divide.
inline Value training_state(int rank, int ranks, int number) {
  Value model = Value::dict({}, DictKind::ordered_dict);
  Value states = Value::dict();
  Value names = Value::list();
  for (const char* name : kParameterNames) {
    const Shape shape = name[0] == 'b' ? Shape{13} : Shape{11, 5};
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

inline SaveOptions options_for_kind(CheckpointKind kind, bool overwrite) {
  SaveOptions options;
  options.kind = kind;
  options.overwrite = overwrite;
  options.threads = 2;
  if (kind == CheckpointKind::dcp) return options;
  options.olmo.units = {{"", {}}};
  for (const char* name : kParameterNames)
    options.olmo.units.push_back({std::string(1, name[0]), {std::string(name)}});
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

// The number that the checkpoint at `path` holds. Throws if its elements are not all of one save.
inline int loaded_number(const std::string& path) {
  const Value tree = Checkpoint::open(path).load();
  const auto number = static_cast<int>(tree.at("train").at("global_step").as_int());
  for (const Leaf& leaf : leaves_of(tree)) {
    if (leaf.value.is(Value::Kind::tensor) && !is_filled_with(leaf.value.as_tensor(), number))
      throw Error(ErrorCode::corrupt, "elements of two saves").at_path(path).at_key(leaf.name);
  }
  return number;
}

// The same; 0: there is none. Throws what is wrong with its files.
inline int number_at(const std::string& path) {
  if (!is_checkpoint_at(path)) return 0;
  const VerifyReport report = verify(path);
  if (!report.findings.empty())
    throw Error(ErrorCode::corrupt, report.findings.front().text).at_path(path);
  return loaded_number(path);
}

}  // namespace tessera::testing
