#include "checkpoint/together/olmo_files.h"

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "base/digest.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/safetensors_digests.h"
#include "checkpoint/save/hooks.h"
#include "checkpoint/together/share.h"
#include "checkpoint/together/shared_file.h"
#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::uint32_t number(int rank) {
  return static_cast<std::uint32_t>(rank);
}

// How a live model's parameters are cut into shards; all alike.
const Placement* flat_placement(const PlacedTensors& tensors) {
  for (const PlacedTensor& tensor : tensors.all()) {
    if (tensor.placement.shard > 0) return &tensor.placement;
  }
  return nullptr;
}

void require_flat(const PlacedTensors& tensors, int ranks) {
  if (ranks == 1 || flat_placement(tensors) != nullptr) return;
  throw Error(ErrorCode::unsupported,
              "the model has no flat parameters, which the kind olmo-local is made of: save "
              "olmo-full, olmo-torch-new, olmo-legacy or dcp");
}

void require_mesh(const std::optional<OlmoMesh>& mesh, int ranks) {
  if (!mesh || (mesh->copies > 0 && ranks % mesh->copies == 0)) return;
  throw Error(ErrorCode::invalid_argument, "a mesh of " + std::to_string(mesh->copies) +
                                               " copies, of " + std::to_string(ranks) + " ranks");
}

}  // namespace

OlmoFiles::OlmoFiles(const Of& of) : of_(of) {
  if (of_.kind == CheckpointKind::olmo_local) {
    require_flat(of_.tensors, of_.ranks);
    const OlmoSave& olmo = of_.options.olmo;
    const std::vector<std::string> names = names_in_flat_model(of_.state.model);
    const Placement* placement = flat_placement(of_.tensors);
    const FlatRules rules{placement == nullptr ? 1 : placement->parts, olmo.orig_params,
                          olmo.aligned_as};
    local_.emplace(of_.state, of_.sources, UnitPlan::of_units(olmo.units, olmo.orig_params, names),
                   rules);
  } else if (of_.kind == CheckpointKind::olmo_legacy) {
    require_mesh(of_.options.olmo.mesh, of_.ranks);
    own_legacy_ = std::make_unique<SharedArchive>(
        legacy_archive(of_.state, of_.sources, legacy(of_.rank)),
        FileRole{number(of_.rank), of_.rank, true, {}}, of_.rank, of_.ranks);
  } else if (of_.kind == CheckpointKind::safetensors) {
    plan_set();
  }
}

// As a conversion of the whole tree writes them.
void OlmoFiles::plan_set() {
  const std::vector<Leaf> leaves = leaves_to_save(leaves_of(of_.state.model), of_.options);
  set_ = safetensors_files(leaves, *of_.options.safetensors, kSetFile);
  for (SafetensorsFile& file : set_) {
    file.header.metadata.emplace("format", "pt");
    reserve_digests(file.header);
  }
  std::uint64_t values = 0;
  if (!set_.empty()) set_[0].header.metadata[kTreeKey] = encode_tree(leaves, values);
  const std::string text = index_text(set_);
  set_digest_ = digest64(std::as_bytes(std::span(text)));
  if (has_index(set_, kSetFile)) index_ = text;
}

// Each file is another rank's to finish, where it reaches it.
void OlmoFiles::open_set(bool travels) {
  std::map<std::string, const Leaf*> by_name;
  for (const PlacedTensor& placed : of_.tensors.all())
    by_name.emplace(placed.leaf->name, placed.leaf);
  int file = 0;
  for (SafetensorsFile& of : set_) {
    EncodedPart part{std::move(of.header), {}, {}, {}, true};
    part.head = safetensors::encode_header(part.header);
    for (const safetensors::Entry& entry : part.header.entries)
      part.tensors.emplace(entry.name, by_name.at(entry.name));
    const FileRole role{number(file), travels ? 0 : file % of_.ranks, false, {}};
    files_.push_back(std::make_unique<SharedSafetensors>(std::move(of.name), std::move(part), role,
                                                         of_.rank, of_.ranks));
    ++file;
  }
}

std::uint64_t OlmoFiles::pickle_size() const {
  return own_legacy_ ? own_legacy_->pickle_size() : 0;
}

int OlmoFiles::own_shard() const {
  const Placement* placement = flat_placement(of_.tensors);
  return placement == nullptr ? 0 : part_of_rank(*placement, of_.rank);
}

void OlmoFiles::add(Archive archive, const FileRole& role) {
  files_.push_back(std::make_unique<SharedArchive>(std::move(archive), role, of_.rank, of_.ranks));
}

void OlmoFiles::open(const std::vector<std::uint64_t>& pickle_sizes, bool travels) {
  switch (of_.kind) {
    case CheckpointKind::olmo_full:
      return open_full();
    case CheckpointKind::olmo_legacy:
      return open_legacy(pickle_sizes);
    case CheckpointKind::safetensors:
      return open_set(travels);
    case CheckpointKind::olmo_local:
      open_local();
      return open_own_train();
    default:
      return open_own_train();  // olmo_torch_new: the rest is a DCP checkpoint
  }
}

// A file that is everybody's.
void OlmoFiles::add_part(const std::string& name, const Value& dict, std::uint32_t number) {
  const FileRole role{number, 0, false, {}};
  if (of_.options.olmo.safetensors) {
    files_.push_back(std::make_unique<SharedSafetensors>(
        name + ".safetensors", encoded_part(of_.sources, dict), role, of_.rank, of_.ranks));
  } else {
    add(part_archive(of_.sources, name + ".pt", dict), role);
  }
}

// The same on all ranks but for the trainer's part, which is rank 0's.
void OlmoFiles::open_full() {
  add_part("model", of_.state.model, 0);
  if (of_.state.optim) add_part("optim", *of_.state.optim, 1);
  if (of_.state.train && of_.rank == 0) add({"train.pt", *of_.state.train, {}}, {2, 0, true, {}});
}

void OlmoFiles::open_own_train() {
  if (!of_.state.train) return;
  add({own_file("train", of_.rank), *of_.state.train, {}},
      {3 * number(of_.rank) + 2, of_.rank, true, {}});
}

void OlmoFiles::open_local() {
  const std::uint32_t first = 3 * number(of_.rank);
  add(local_->model(own_file("model", of_.rank), own_shard()), {first, of_.rank, true, {}});
  if (of_.state.optim)
    add(local_->optim(own_file("optim", of_.rank), own_shard()), {first + 1, of_.rank, true, {}});
}

LegacyRank OlmoFiles::legacy(int rank) const {
  return {rank, of_.ranks, of_.options.olmo.mesh};
}

// Whether this rank has some of the rows that `other` has in its legacy file, and `other` has not.
bool OlmoFiles::writes_into_rows_of(int other) const {
  return std::ranges::any_of(of_.tensors.all(), [&](const PlacedTensor& placed) {
    const Shape& shape = placed.leaf->value.as_tensor().shape;
    const std::vector<Box> boxes =
        boxes_to_write(placed.placement, shape, {of_.rank, of_.ranks, other});
    if (boxes.empty()) return false;
    if (shape.empty()) return true;
    const std::optional<Box> rows = legacy_rows(shape, legacy(other));
    if (!rows) return false;
    return std::ranges::any_of(boxes,
                               [&](const Box& box) { return common_box(box, *rows).has_value(); });
  });
}

void OlmoFiles::open_legacy(const std::vector<std::uint64_t>& pickle_sizes) {
  files_.push_back(std::move(own_legacy_));
  OlmoState no_train = of_.state;
  no_train.train.reset();
  for (int other = 0; other < of_.ranks; ++other) {
    if (other == of_.rank || !writes_into_rows_of(other)) continue;
    add(legacy_archive(no_train, of_.sources, legacy(other)),
        {number(other), other, true, pickle_sizes[static_cast<std::size_t>(other)]});
  }
}

}  // namespace tessera
