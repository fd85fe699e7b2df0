// What tests of saves as OLMo's kinds share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "io/testing.h"
#include "layout/boxes.h"
#include "tessera/stores.h"

namespace tessera::testing_support {

// How the test's parameters lie: as rows, as shards of flat parameters, or whole on every rank.
enum class Cut { rows, flat, whole };

// A tensor whose element i is `first + i`, of which rank r holds what the placement says; the
// element type's own bytes for types that are no float.
inline Tensor part_of(const Shape& shape, const Placement& placement, int rank, float first,
                      DType dtype = DType::float32) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.sharded = placement.parts > 1;
  tensor.placement = placement;
  const std::size_t element = size_of(dtype);
  for (const Box& box : boxes_of_part(placement, shape, part_of_rank(placement, rank))) {
    Piece piece{box, memory(static_cast<std::size_t>(numel(box)) * element), 0, {}, rank};
    const RunSequence runs(box, shape);
    for (std::int64_t r = 0; r < runs.size(); ++r) {
      const Run run = runs[r];
      for (std::int64_t i = 0; i < run.count; ++i) {
        std::byte* at = piece.storage->data + static_cast<std::size_t>(run.local + i) * element;
        const float value = first + static_cast<float>(run.global + i);
        if (dtype == DType::float32) {
          std::memcpy(at, &value, 4);
        } else {
          const auto number = static_cast<std::int64_t>(value);
          std::memcpy(at, &number, element);
        }
      }
    }
    tensor.pieces.push_back(std::move(piece));
  }
  return tensor;
}

struct Parameter {
  const char* name;
  Shape shape;
};

// Odd shapes, a vector, fewer rows than ranks, a tensor without rows for most ranks.
inline const std::vector<Parameter> kParameters = {
    {"transformer.wte.weight", {7, 3}}, {"transformer.blocks.0.w", {5, 3}},
    {"transformer.blocks.0.b", {5}},    {"transformer.blocks.1.w", {2, 9}},
    {"transformer.blocks.1.b", {1}},    {"transformer.ln_f.weight", {3}}};

inline std::vector<FlatUnit> units() {
  return {{"", {"transformer.wte.weight", "transformer.ln_f.weight"}},
          {"transformer.blocks.0", {"transformer.blocks.0.w", "transformer.blocks.0.b"}},
          {"transformer.blocks.1", {"transformer.blocks.1.w", "transformer.blocks.1.b"}}};
}

// The place of each parameter in its flat parameter, and the shards' size.
inline Placement flat_placement(const std::string& name, int ranks) {
  for (const FlatUnit& unit : units()) {
    std::int64_t end = 0;
    std::int64_t begin = -1;
    for (const std::string& member : unit.names) {
      end = (end + 3) / 4 * 4;  // 16 bytes of float32
      if (member == name) begin = end;
      for (const Parameter& parameter : kParameters)
        if (parameter.name == member) end += numel(parameter.shape);
    }
    if (begin < 0) continue;
    end = (end + ranks - 1) / ranks * ranks;
    return {ranks, 1, 0, std::max<std::int64_t>(end / ranks, 1), begin};
  }
  throw std::logic_error("no such parameter");
}

inline Placement placement_of(const Parameter& parameter, Cut cut, int ranks) {
  if (ranks == 1 || cut == Cut::whole) return {};
  if (cut == Cut::rows) return {.parts = ranks};
  return flat_placement(parameter.name, ranks);
}

// A training state as rank `rank` of `ranks` has it.
inline Value state_of(Cut cut, int rank, int ranks) {
  Value model = Value::dict({}, DictKind::ordered_dict);
  Value states = Value::dict();
  Value names = Value::list();
  float first = 0;
  for (const Parameter& parameter : kParameters) {
    const Placement placement = placement_of(parameter, cut, ranks);
    model.set_item(parameter.name, part_of(parameter.shape, placement, rank, first));
    Value state = Value::dict();
    state.set_item("step", part_of({}, {}, rank, 4));
    state.set_item("exp_avg", part_of(parameter.shape, placement, rank, first + 1000));
    states.set_item(parameter.name, std::move(state));
    names.items().emplace_back(parameter.name);
    first += 100;
  }
  Value group = Value::dict({{"lr", 0.25}, {"params", names}, {"param_names", names}});
  Value optim = Value::dict({{"state", states}, {"param_groups", Value::list({group})}});
  Value train = Value::dict({{"epoch", 3},
                             {"rank", rank},
                             {"rng", std::string(static_cast<std::size_t>(rank) * 50, 'x')}});
  return Value::dict({{"model", model}, {"optim", optim}, {"train", train}});
}

inline SaveOptions options_for(CheckpointKind kind) {
  SaveOptions options;
  options.kind = kind;
  options.olmo.units = units();
  return options;
}

using Files = std::map<std::string, std::vector<std::byte>>;

inline Files files_in(const Store& store, const std::string& directory) {
  Files files;
  for (const ObjectInfo& object : store.list(directory)) {
    files.emplace(object.name.substr(directory.empty() ? 0 : directory.size() + 1),
                  read_all(*store.open(object.name), 1 << 24));
  }
  return files;
}

// Whether a file is of a rank on the other of two nodes, with four ranks in all.
inline bool is_of_other_node(const std::string& name, std::size_t node) {
  for (std::size_t rank = 0; rank < 4; ++rank) {
    if (name.ends_with("rank" + std::to_string(rank) + ".pt")) return rank / 2 != node;
  }
  return false;
}

inline void save_by(int ranks, Cut cut, const Location& where, const SaveOptions& options) {
  run_ranks(ranks, [&](Group& group) {
    const SaveResult result = save(state_of(cut, group.rank(), ranks), where, options, group);
    EXPECT_FALSE(result.save_id.empty());
  });
}

inline bool fits_kind(CheckpointKind kind, Cut cut, int ranks) {
  return kind != CheckpointKind::olmo_local || cut == Cut::flat || ranks == 1;
}

// Everything but the trainer's state, whole.
inline void expect_state(const Checkpoint& checkpoint) {
  float first = 0;
  const bool by_number = checkpoint.kind == CheckpointKind::olmo_local;
  for (std::size_t i = 0; i < kParameters.size(); ++i) {
    const Parameter& parameter = kParameters[i];
    const auto read = [&](const std::string& name) {
      const Tensor& tensor = checkpoint.tensor(name);
      EXPECT_EQ(tensor.shape, parameter.shape) << name;
      std::vector<float> values(static_cast<std::size_t>(numel(tensor.shape)));
      checkpoint.read(name, TensorView::of(values.data(), DType::float32, tensor.shape));
      return values;
    };
    std::vector<float> expected(static_cast<std::size_t>(numel(parameter.shape)));
    std::iota(expected.begin(), expected.end(), first);
    EXPECT_EQ(read("model." + std::string(parameter.name)), expected) << parameter.name;
    std::iota(expected.begin(), expected.end(), first + 1000);
    const std::string key = by_number ? std::to_string(i) : parameter.name;
    EXPECT_EQ(read("optim.state." + key + ".exp_avg"), expected) << parameter.name;
    first += 100;
  }
}

// Its commit is a call that may fail.
class FailingDirectory final : public NewDirectory {
 public:
  FailingDirectory(std::unique_ptr<NewDirectory> inner, std::shared_ptr<Fault> fault)
      : inner_(std::move(inner)), fault_(std::move(fault)) {}
  [[nodiscard]] const std::string& working() const override { return inner_->working(); }
  void commit(const IsReplaced& is_replaced) override {
    fault_->pass(working(), 0);
    inner_->commit(is_replaced);
  }

 private:
  std::unique_ptr<NewDirectory> inner_;
  std::shared_ptr<Fault> fault_;
};

// A store whose calls fail from a given one on, on one rank.
class FailingStore final : public testing_support::ForwardingStore {
 public:
  FailingStore(std::shared_ptr<Store> inner, std::shared_ptr<Fault> fault)
      : ForwardingStore(std::move(inner)), fault_(std::move(fault)) {}

  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t hint) override {
    fault_->pass(this->name(), 0);
    return std::make_unique<FaultySink>(inner().create(name, if_exists, hint), fault_);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    fault_->pass(this->name(), 0);
    return std::make_unique<FaultySink>(inner().share(name), fault_);
  }
  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                            IfExists if_exists) override {
    fault_->pass(this->name(), 0);
    return std::make_unique<FailingDirectory>(inner().new_directory(name, if_exists), fault_);
  }

 private:
  std::shared_ptr<Fault> fault_;
};

}  // namespace tessera::testing_support
