// Saves a training that OLMo saved as `full` again, as N ranks that hold it in parts.
//   olmo_save_tool SOURCE TARGET KIND CUT RANKS COPIES
// CUT: rows, as fully_shard cuts tensors, or flat, as FSDP1 with original parameters does. The
// units are the blocks. COPIES: of the state, as in a hybrid mesh. The ranks are threads; the
// source's trainer state is everybody's.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "layout/boxes.h"
#include "tessera/checkpoint.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)

// "transformer.blocks.0" of a parameter of the first block; the root's is empty.
std::string unit_of(const std::string& name) {
  const std::string blocks = "transformer.blocks.";
  if (!name.starts_with(blocks)) return "";
  return name.substr(0, name.find('.', blocks.size()));
}

// In the order of the model, which is that of its modules.
std::vector<FlatUnit> units_of(const Value& model) {
  std::vector<FlatUnit> units{{"", {}}};
  for (const auto& [name, tensor] : model.pairs()) {
    const std::string path = unit_of(name.as_string());
    auto unit = units.begin();
    while (unit != units.end() && unit->path != path) ++unit;
    if (unit == units.end()) unit = units.insert(units.end(), {path, {}});
    unit->names.push_back(name.as_string());
  }
  return units;
}

Placement flat_placement(const Value& model, const FlatUnit& unit, const std::string& name,
                         int parts) {
  constexpr std::int64_t kAligned = 4;  // elements of float32 in 16 bytes
  std::int64_t end = 0;
  std::int64_t begin = 0;
  for (const std::string& member : unit.names) {
    end = (end + kAligned - 1) / kAligned * kAligned;
    if (member == name) begin = end;
    end += numel(model.at(member).as_tensor().shape);
  }
  return {.parts = parts, .shard = (end + parts - 1) / parts, .begin = begin};
}

// What the rank holds of a whole tensor: parts of its memory.
Value part_of(const Tensor& whole_tensor, const Placement& placement, int rank) {
  Tensor part = whole_tensor;
  const Piece all = part.pieces.at(0);
  const Shape strides = contiguous_strides(part.shape);
  part.sharded = true;
  part.placement = placement;
  part.pieces.clear();
  for (Box& box : boxes_of_part(placement, part.shape, part_of_rank(placement, rank))) {
    Piece piece = all;
    for (std::size_t d = 0; d < box.offsets.size(); ++d)
      piece.storage_offset += box.offsets[d] * strides[d];
    piece.strides = strides;
    piece.rank = rank;
    piece.slice = std::move(box);
    part.pieces.push_back(std::move(piece));
  }
  return Value(std::move(part));
}

struct Job {
  std::string source, target, kind;
  bool is_flat = false;
  int ranks = 1;
  int copies = 1;

  [[nodiscard]] int parts() const { return ranks / copies; }
};

void save_part(const Job& job, Group& group) {
  const Value whole_state = Checkpoint::open(job.source).load();
  const Value& model = whole_state.at("model");
  SaveOptions options;
  options.olmo.units = units_of(model);
  if (job.copies > 1) options.olmo.mesh = OlmoMesh{.copies = job.copies};
  options.kind = job.kind == "full"           ? CheckpointKind::olmo_full
                 : job.kind == "torch_new"    ? CheckpointKind::olmo_torch_new
                 : job.kind == "torch_legacy" ? CheckpointKind::olmo_legacy
                                              : CheckpointKind::olmo_local;
  const auto placement = [&](const std::string& name) -> Placement {
    if (!job.is_flat) return {.parts = job.parts()};
    for (const FlatUnit& unit : options.olmo.units)
      if (unit.path == unit_of(name)) return flat_placement(model, unit, name, job.parts());
    return {};
  };
  Value parts = Value::dict({}, DictKind::ordered_dict);
  Value states = Value::dict();
  for (const auto& [key, tensor] : model.pairs()) {
    const std::string& name = key.as_string();
    const Placement place = placement(name);
    parts.set_item(key, part_of(tensor.as_tensor(), place, group.rank()));
    Value state = Value::dict();
    for (const auto& [what, value] : whole_state.at("optim").at("state").at(name).pairs()) {
      const bool is_split = !value.as_tensor().shape.empty();
      state.set_item(what, is_split ? part_of(value.as_tensor(), place, group.rank()) : value);
    }
    states.set_item(key, std::move(state));
  }
  const Value optim = Value::dict(
      {{"state", states}, {"param_groups", whole_state.at("optim").at("param_groups")}});
  save(Value::dict({{"model", parts}, {"optim", optim}, {"train", whole_state.at("train")}}),
       job.target, options, group);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: olmo_save_tool SOURCE TARGET KIND rows|flat RANKS COPIES\n");
    return 2;
  }
  try {
    const Job job{
        argv[1],           argv[2], argv[3], std::string(argv[4]) == "flat", std::atoi(argv[5]),
        std::atoi(argv[6])};
    run_ranks(job.ranks, [&](Group& group) { save_part(job, group); });
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "olmo_save_tool: %s\n", error.what());
    return 1;
  }
}
