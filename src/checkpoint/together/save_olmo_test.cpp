// The OLMo kinds saved by N ranks: the files are those that a conversion writes, byte for byte.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <mutex>

#include "base/crc32.h"
#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"
#include "io/faulty.h"
#include "layout/placement.h"
#include "tessera/new_directory.h"
#include "tessera/state_digests.h"

namespace tessera {
namespace {

using namespace testing_support;

constexpr CheckpointKind kOlmoKinds[] = {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
                                         CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};

// How the test's parameters lie: as rows, as shards of flat parameters, or whole on every rank.
enum class Cut { rows, flat, whole };

// A tensor whose element i is `first + i`, of which rank r holds what the placement says; the
// element type's own bytes for types that are no float.
Tensor part_of(const Shape& shape, const Placement& placement, int rank, float first,
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
const std::vector<Parameter> kParameters = {
    {"transformer.wte.weight", {7, 3}}, {"transformer.blocks.0.w", {5, 3}},
    {"transformer.blocks.0.b", {5}},    {"transformer.blocks.1.w", {2, 9}},
    {"transformer.blocks.1.b", {1}},    {"transformer.ln_f.weight", {3}}};

std::vector<FlatUnit> units() {
  return {{"", {"transformer.wte.weight", "transformer.ln_f.weight"}},
          {"transformer.blocks.0", {"transformer.blocks.0.w", "transformer.blocks.0.b"}},
          {"transformer.blocks.1", {"transformer.blocks.1.w", "transformer.blocks.1.b"}}};
}

// Where each parameter begins in its flat parameter, and the shards' size.
Placement flat_placement(const std::string& name, int ranks) {
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

Placement placement_of(const Parameter& parameter, Cut cut, int ranks) {
  if (ranks == 1 || cut == Cut::whole) return {};
  if (cut == Cut::rows) return {.parts = ranks};
  return flat_placement(parameter.name, ranks);
}

// A training state as rank `rank` of `ranks` has it.
Value state_of(Cut cut, int rank, int ranks) {
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

SaveOptions options_for(CheckpointKind kind) {
  SaveOptions options;
  options.kind = kind;
  options.olmo.units = units();
  return options;
}

using Files = std::map<std::string, std::vector<std::byte>>;

Files files_in(const Store& store, const std::string& directory) {
  Files files;
  for (const ObjectInfo& object : store.list(directory)) {
    files.emplace(object.name.substr(directory.empty() ? 0 : directory.size() + 1),
                  read_all(*store.open(object.name), 1 << 24));
  }
  return files;
}

void save_by(int ranks, Cut cut, const Location& where, const SaveOptions& options) {
  run_ranks(ranks, [&](Group& group) {
    const SaveResult result = save(state_of(cut, group.rank(), ranks), where, options, group);
    EXPECT_FALSE(result.save_id.empty());
  });
}

bool fits_kind(CheckpointKind kind, Cut cut, int ranks) {
  return kind != CheckpointKind::olmo_local || cut == Cut::flat || ranks == 1;
}

// Everything but the trainer's state, whole.
void expect_state(const Checkpoint& checkpoint) {
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

struct Case {
  CheckpointKind kind;
  Cut cut;
  int ranks;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const CheckpointKind kind : kOlmoKinds)
    for (const Cut cut : {Cut::rows, Cut::flat, Cut::whole})
      for (int ranks = 1; ranks <= 4; ++ranks)
        if (fits_kind(kind, cut, ranks)) all.push_back({kind, cut, ranks});
  return all;
}

TEST(SaveOlmo, EveryLayoutIsReadBack_O40_O50_O60_O72) {
  for (const auto& [kind, cut, ranks] : cases()) {
    SCOPED_TRACE(std::string(to_string(kind)) + " cut " + std::to_string(static_cast<int>(cut)) +
                 " by " + std::to_string(ranks));
    const std::string path = temporary_directory() + "/step4";
    save_by(ranks, cut, path, options_for(kind));
    const Checkpoint checkpoint = Checkpoint::open(path);
    EXPECT_EQ(checkpoint.kind, kind);
    expect_state(checkpoint);
    EXPECT_TRUE(verify(path).findings.empty());
  }
}

// A conversion of the whole state writes the same files, but for the trainer's, which differ.
TEST(SaveOlmo, FilesAreThoseOfAConversion) {
  const std::string whole = temporary_directory() + "/whole.pt";
  Value state = state_of(Cut::whole, 0, 1);
  state.erase("train");
  save(state, whole);
  Files full;
  for (const auto& [kind, cut, ranks] : cases()) {
    if (kind == CheckpointKind::olmo_torch_new) continue;  // its data files are laid out otherwise
    SCOPED_TRACE(std::string(to_string(kind)) + " cut " + std::to_string(static_cast<int>(cut)) +
                 " by " + std::to_string(ranks));
    ConvertOptions how;
    how.to = kind;
    how.ranks = ranks;
    how.olmo.unit = "transformer\\.blocks\\.[0-9]+";
    const std::string converted = temporary_directory() + "/converted";
    convert(whole, converted, how);
    const std::string saved = temporary_directory() + "/saved";
    const int n = ranks;
    const Cut by = cut;
    run_ranks(n, [&, kind = kind](Group& group) {
      Value own = state_of(by, group.rank(), n);
      own.erase("train");
      save(own, saved, options_for(kind), group);
    });
    Files files = files_in(*posix_store(saved), "");
    EXPECT_EQ(files.erase("tessera-state.json"), 1U);
    EXPECT_EQ(files.erase("config.yaml"), 1U);
    Files expected = files_in(*posix_store(converted), "");
    EXPECT_EQ(expected.erase("tessera-digests.json"), 1U);
    // A file keeps which strings of a tree are one object; a tree in memory has others.
    if (kind == CheckpointKind::olmo_full) expected = full.empty() ? full = files : full;
    EXPECT_TRUE(files == expected);
  }
}

TEST(SaveOlmo, FullIsSavedAsSafetensorsToo_O15) {
  SaveOptions options = options_for(CheckpointKind::olmo_full);
  options.olmo.safetensors = true;
  Files first;
  for (const Cut cut : {Cut::rows, Cut::flat, Cut::whole}) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      const std::string path = temporary_directory() + "/step4";
      save_by(ranks, cut, path, options);
      const Checkpoint checkpoint = Checkpoint::open(path);
      EXPECT_EQ(checkpoint.kind, CheckpointKind::olmo_full);
      expect_state(checkpoint);
      Files files = files_in(*posix_store(path), "");
      EXPECT_TRUE(files.contains("model.safetensors"));
      files.erase("tessera-state.json");  // has the save's id
      if (first.empty()) first = files;
      EXPECT_TRUE(files == first) << ranks;
    }
  }
}

TEST(SaveOlmo, EachRankKeepsItsOwnTrainerState) {
  for (const CheckpointKind kind : {CheckpointKind::olmo_torch_new, CheckpointKind::olmo_local}) {
    const std::string path = temporary_directory() + "/step4";
    save_by(3, Cut::flat, path, options_for(kind));
    for (int rank = 0; rank < 3; ++rank) {
      const Checkpoint train =
          Checkpoint::open(path + "/train/rank" + std::to_string(rank) + ".pt");
      EXPECT_EQ(train.tree().at("rank").as_int(), rank);
    }
  }
}

TEST(SaveOlmo, GoesIntoADirectoryOfAnyStore) {
  for (const CheckpointKind kind : kOlmoKinds) {
    const auto store = memory_store();
    save_by(2, Cut::flat, Location(store, "run/step4"), options_for(kind));
    for (const ObjectInfo& object : store->list())
      EXPECT_TRUE(object.name.starts_with("run/step4/")) << object.name;
    EXPECT_TRUE(store->exists("run/step4/config.yaml"));
    EXPECT_EQ(code_of([&] { save_by(2, Cut::flat, Location(store), options_for(kind)); }),
              ErrorCode::invalid_argument);
  }
}

TEST(SaveOlmo, AnExistingCheckpointIsKeptOrReplacedWhole) {
  for (const CheckpointKind kind : kOlmoKinds) {
    const std::string path = temporary_directory() + "/step4";
    SaveOptions options = options_for(kind);
    save_by(2, Cut::flat, path, options);
    const Files before = files_in(*posix_store(path), "");
    EXPECT_EQ(code_of([&] { save_by(2, Cut::flat, path, options); }), ErrorCode::already_exists);
    EXPECT_EQ(files_in(*posix_store(path), ""), before);
    options.overwrite = true;
    save_by(1, Cut::flat, path, options);
    expect_state(Checkpoint::open(path));
    EXPECT_EQ(Checkpoint::open(path).world_size, 1 - (kind == CheckpointKind::olmo_full ? 1 : 0));
  }
}

TEST(SaveOlmo, WhatIsNoCheckpointIsNotReplaced) {
  const std::string path = temporary_directory() + "/mine";
  std::filesystem::create_directory(path);
  write_text(path + "/thesis.txt", "years");
  SaveOptions options = options_for(CheckpointKind::olmo_full);
  options.overwrite = true;
  EXPECT_EQ(code_of([&] { save_by(2, Cut::rows, path, options); }), ErrorCode::already_exists);
  EXPECT_EQ(text_of(path + "/thesis.txt"), "years");
}

TEST(SaveOlmo, ValuesThatDifferOutsideOfTheTrainersStateAreRefused_OQ09) {
  const std::string path = temporary_directory() + "/step4";
  const auto differing = [&](Group& group) {
    Value state = state_of(Cut::rows, group.rank(), 2);
    state.at("optim").at("param_groups").at(std::size_t{0}).set_item("lr", 0.1 * group.rank());
    save(state, path, options_for(CheckpointKind::olmo_full), group);
  };
  try {
    run_ranks(2, differing);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_NE(std::string(error.what()).find("optim.param_groups"), std::string::npos)
        << error.what();
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(SaveOlmo, CopiesThatDifferAreRefusedIfAskedFor) {
  SaveOptions options = options_for(CheckpointKind::olmo_full);
  options.copies = IfDiffers::refuse;
  const std::string path = temporary_directory() + "/step4";
  const auto differing = [&](Group& group) {
    Value state = state_of(Cut::whole, 0, 3);
    if (group.rank() == 2) {
      Piece& piece = state.at("model").at("transformer.ln_f.weight").as_tensor().pieces.at(0);
      piece.storage->data[5] ^= std::byte{1};
    }
    save(state, path, options, group);
  };
  EXPECT_EQ(code_of([&] { run_ranks(3, differing); }), ErrorCode::mismatch);
  EXPECT_TRUE(std::filesystem::is_empty(std::filesystem::path(path).parent_path()));
}

TEST(SaveOlmo, ConfigSaysWhichCheckpointerItIs) {
  SaveOptions options = options_for(CheckpointKind::olmo_legacy);
  options.olmo.config = "sharded_checkpointer: local\n";
  const std::string path = temporary_directory() + "/step4";
  EXPECT_EQ(code_of([&] { save_by(2, Cut::rows, path, options); }), ErrorCode::invalid_argument);
  options.olmo.config = "model: {d_model: 3}\nsharded_checkpointer: torch_legacy\n";
  save_by(2, Cut::rows, path, options);
  EXPECT_EQ(text_of(path + "/config.yaml"), options.olmo.config);
  const std::string own = temporary_directory() + "/step4";
  save_by(2, Cut::rows, own, options_for(CheckpointKind::olmo_torch_new));
  EXPECT_EQ(text_of(own + "/config.yaml"), "sharded_checkpointer: torch_new\n");
}

TEST(SaveOlmo, LocalNeedsTheUnitsOfAllParameters) {
  const std::string path = temporary_directory() + "/step4";
  const auto code_with = [&](const std::vector<FlatUnit>& given) {
    SaveOptions options = options_for(CheckpointKind::olmo_local);
    options.olmo.units = given;
    return code_of([&] { save_by(2, Cut::flat, path, options); });
  };
  EXPECT_EQ(code_with({}), ErrorCode::mismatch);
  std::vector<FlatUnit> twice = units();
  twice.push_back(twice.back());
  EXPECT_EQ(code_with(twice), ErrorCode::mismatch);
  std::vector<FlatUnit> elsewhere = units();
  elsewhere.back().path = "transformer.blocks.1.w";
  EXPECT_EQ(code_with(elsewhere), ErrorCode::invalid_argument);
}

TEST(SaveOlmo, LocalNeedsFlatParameters) {
  const std::string path = temporary_directory() + "/step4";
  EXPECT_EQ(code_of([&] { save_by(2, Cut::rows, path, options_for(CheckpointKind::olmo_local)); }),
            ErrorCode::unsupported);
}

TEST(SaveOlmo, TypesAndGenuineNaNsComeBack_OQ03_OQ05) {
  for (const CheckpointKind kind :
       {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new, CheckpointKind::olmo_legacy}) {
    const std::string path = temporary_directory() + "/step4";
    run_ranks(3, [&](Group& group) {
      Value model = Value::dict();
      for (const DType type : {DType::bfloat16, DType::int64, DType::int8, DType::uint8}) {
        model.set_item(std::string(to_string(type)),
                       part_of({5, 3}, {.parts = 3}, group.rank(), 7, type));
      }
      Tensor nans = part_of({4, 2}, {.parts = 3}, group.rank(), 0);
      for (const Piece& piece : nans.pieces) {
        const float nan = std::numeric_limits<float>::quiet_NaN();
        std::memcpy(piece.storage->data, &nan, 4);
      }
      model.set_item("nans", std::move(nans));
      save(Value::dict({{"model", model}}), path, options_for(kind), group);
    });
    const Checkpoint checkpoint = Checkpoint::open(path);
    std::vector<float> values(8);
    checkpoint.read("model.nans", TensorView::of(values.data(), DType::float32, {4, 2}));
    EXPECT_TRUE(std::isnan(values[0]));
    EXPECT_EQ(values[1], 1.0F);
    std::vector<std::int64_t> numbers(15);
    checkpoint.read("model.int64", TensorView::of(numbers.data(), DType::int64, {5, 3}));
    EXPECT_EQ(numbers.at(14), 21);
    EXPECT_EQ(checkpoint.tensor("model.bfloat16").dtype, DType::bfloat16);
  }
}

TEST(StateDigests, AreTheSameOnEveryWorldAndLayout) {
  StateDigests expected;
  for (const Cut cut : {Cut::whole, Cut::rows, Cut::flat}) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      run_ranks(ranks, [&](Group& group) {
        const StateDigests digests = state_digests(state_of(cut, group.rank(), ranks), group);
        if (group.rank() != 0) return;
        if (expected.empty()) expected = digests;
        EXPECT_EQ(digests, expected);
      });
    }
  }
  EXPECT_EQ(expected.size(), 3 * kParameters.size());
  std::vector<float> values(21);
  std::iota(values.begin(), values.end(), 0.0F);
  EXPECT_EQ(expected.at("model.transformer.wte.weight"), crc32(std::as_bytes(std::span(values))));
}

TEST(StateDigests, LieBesideTheCheckpoint) {
  for (const CheckpointKind kind : kOlmoKinds) {
    const std::string path = temporary_directory() + "/step4";
    save_by(2, Cut::flat, path, options_for(kind));
    run_ranks(2, [&](Group& group) {
      Value state = state_of(Cut::flat, group.rank(), 2);
      state.erase("train");
      EXPECT_EQ(state_digests(state, group), saved_digests(*posix_store(path)));
    });
    write_text(path + "/tessera-state.json", "{");
    EXPECT_EQ(code_of([&] { (void)saved_digests(*posix_store(path)); }), ErrorCode::corrupt);
  }
}

TEST(StateDigests, ADifferenceBetweenCopiesIsAnError) {
  const auto differing = [&](Group& group) {
    Value state = state_of(Cut::whole, 0, 2);
    if (group.rank() == 1)
      state.at("model").at("transformer.ln_f.weight").as_tensor().pieces.at(0).storage->data[0] ^=
          std::byte{1};
    (void)state_digests(state, group);
  };
  EXPECT_EQ(code_of([&] { run_ranks(2, differing); }), ErrorCode::mismatch);
}

// A store whose calls fail from a given one on, on one rank.
class FailingStore final : public testing::ForwardingStore {
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
    return inner().new_directory(name, if_exists);
  }

 private:
  std::shared_ptr<Fault> fault_;
};

// A full or dead disk at each call of each rank (fault-rows F06 to F17): the same error on every
// rank, the old checkpoint whole, and nothing beside it.
void fail_at_every_call(CheckpointKind kind, int rank, bool is_posix) {
  const std::string directory = temporary_directory();
  const std::shared_ptr<Store> store = is_posix ? posix_store(directory) : memory_store();
  SaveOptions options = options_for(kind);
  options.overwrite = true;
  save_by(2, Cut::flat, Location(store, "step4"), options);
  const Files before = files_in(*store, "step4");
  for (std::uint64_t calls = 0;; ++calls) {
    ASSERT_LT(calls, 500U);
    const auto failing = std::make_shared<FailingStore>(
        store, std::make_shared<Fault>(ErrorCode::out_of_space, calls));
    std::mutex mutex;
    std::vector<std::string> errors;
    try {
      run_ranks(2, [&](Group& group) {
        try {
          const Location where =
              group.rank() == rank ? Location(failing, "step4") : Location(store, "step4");
          save(state_of(Cut::flat, group.rank(), 2), where, options, group);
        } catch (const Error& error) {
          const std::lock_guard lock(mutex);
          errors.emplace_back(error.what());
        }
      });
    } catch (const Error& error) {
      FAIL() << error.what();
    }
    if (errors.empty()) break;
    ASSERT_EQ(errors.size(), 2U) << "call " << calls << ": " << errors.front();
    EXPECT_EQ(errors[0], errors[1]) << "call " << calls;
    ASSERT_EQ(files_in(*store, "step4"), before) << "call " << calls;
    ASSERT_EQ(store->list().size(), before.size()) << "call " << calls;
  }
}

TEST(SaveOlmo, AFaultAtAnyCallIsOneErrorAndKeepsTheOldCheckpoint_F06) {
  for (const CheckpointKind kind : kOlmoKinds) {
    for (const int rank : {0, 1}) {
      for (const bool is_posix : {false, true}) {
        if (is_posix && kind != CheckpointKind::olmo_legacy) continue;  // each fsync takes its time
        SCOPED_TRACE(std::string(to_string(kind)) + " rank " + std::to_string(rank));
        fail_at_every_call(kind, rank, is_posix);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
