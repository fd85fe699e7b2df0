// The OLMo kinds saved by N ranks: the files are those that a conversion writes, byte for byte.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "base/crc32.h"
#include "checkpoint/together/testing.h"
#include "io/testing.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

using namespace testing_support;

constexpr CheckpointKind kOlmoKinds[] = {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
                                         CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};

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

// Ranks r and r + parts hold the same.
void save_hybrid(Cut cut, int copies, int parts, const std::string& path, bool damage = false) {
  SaveOptions options = options_for(CheckpointKind::olmo_legacy);
  options.olmo.mesh = OlmoMesh{.copies = copies};
  run_ranks(copies * parts, [&](Group& group) {
    Value state = state_of(cut, group.rank(), parts);
    if (damage && group.rank() == parts) {
      Tensor other = state.at("model").at("transformer.wte.weight").as_tensor();
      other.pieces.at(0).storage->data[5] ^= std::byte{1};
    }
    save(state, path, options, group);
  });
}

TEST(SaveOlmo, AHybridMeshSavesDTensors_O60) {
  for (const Cut cut : {Cut::rows, Cut::flat}) {
    for (const auto& [copies, parts] : {std::pair{2, 1}, {2, 2}, {3, 2}, {2, 3}}) {
      SCOPED_TRACE(std::to_string(copies) + " x " + std::to_string(parts));
      const std::string path = temporary_directory() + "/step4";
      save_hybrid(cut, copies, parts, path);
      expect_state(Checkpoint::open(path));
      EXPECT_TRUE(verify(path).findings.empty());
      const auto archive = read_all(*posix_store(path)->open("rank1.pt"), 1 << 24);
      const std::string bytes(reinterpret_cast<const char*>(archive.data()), archive.size());
      EXPECT_NE(bytes.find("DeviceMesh"), std::string::npos);
      EXPECT_EQ(bytes.find("ShardedTensor"), std::string::npos);
    }
  }
}

// What differs in the memory of ranks is in their files.
TEST(SaveOlmo, CopiesInAHybridMeshAreCompared_O60) {
  const std::string path = temporary_directory() + "/step4";
  save_hybrid(Cut::rows, 2, 2, path, true);
  const VerifyReport report = verify(path);
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_NE(report.findings.at(0).text.find("transformer.wte.weight"), std::string::npos);
}

TEST(SaveOlmo, AHybridMeshHasAsManyCopiesAsItSays) {
  const std::string path = temporary_directory() + "/step4";
  SaveOptions options = options_for(CheckpointKind::olmo_legacy);
  for (const int copies : {0, 2, -1}) {
    options.olmo.mesh = OlmoMesh{.copies = copies};
    EXPECT_EQ(code_of([&] { save_by(3, Cut::rows, path, options); }), ErrorCode::invalid_argument);
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
    how.ranks = kind == CheckpointKind::olmo_full ? 1 : ranks;
    if (kind == CheckpointKind::olmo_local) how.olmo.unit = "transformer\\.blocks\\.[0-9]+";
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

// Elements of `tensor` come from sources that count.
using Sources = std::vector<std::shared_ptr<CountingSource>>;
void count_reads(Tensor& tensor, Sources& sources) {
  for (Piece& piece : tensor.pieces) {
    const std::byte* data = piece.storage->data;
    auto counted = std::make_shared<Storage>();
    counted->size = piece.storage->size;
    sources.push_back(std::make_shared<CountingSource>(
        memory_source(std::vector<std::byte>(data, data + counted->size), "elements")));
    counted->source = sources.back();
    piece.storage = counted;
  }
}

// For the file's CRC-32 and for the digest of the state.
TEST(StateDigests, ASaveReadsEachByteOnce) {
  for (const CheckpointKind kind :
       {CheckpointKind::olmo_full, CheckpointKind::olmo_legacy, CheckpointKind::olmo_local}) {
    const std::string path = temporary_directory() + "/step4";
    run_ranks(2, [&](Group& group) {
      Value state = state_of(Cut::flat, group.rank(), 2);
      Sources sources;
      for (const Parameter& parameter : kParameters)
        count_reads(state.at("model").at(parameter.name).as_tensor(), sources);
      (void)save(state, path, options_for(kind), group);
      for (const auto& source : sources) EXPECT_EQ(source->bytes(), source->size());
    });
    expect_state(Checkpoint::open(path));
  }
}

// Nobody goes over the memory again after a load that sums what it reads: not even to see a change.
TEST(StateDigests, OfALoadThatSumsNeedNoSecondReading) {
  for (const Cut cut : {Cut::whole, Cut::rows, Cut::flat}) {
    const std::string path = temporary_directory() + "/step4";
    save_by(3, Cut::rows, path, options_for(CheckpointKind::olmo_legacy));
    run_ranks(2, [&](Group& group) {
      Value tree = Value::dict({{"model", state_of(cut, group.rank(), 2).at("model")}});
      for (const Parameter& parameter : kParameters)
        for (const Piece& piece : tree.at("model").at(parameter.name).as_tensor().pieces)
          std::memset(piece.storage->data, 0, piece.storage->size);
      LoadedSums sums;
      LoadOptions options;
      options.filled = sums.hook();
      load(tree, path, options, group);
      StateDigests saved = saved_digests(*posix_store(path));
      std::erase_if(saved, [](const auto& entry) { return !entry.first.starts_with("model."); });
      EXPECT_EQ(state_digests(tree, group, 1, &sums), saved);
      tree.at("model").at(kParameters[0].name).as_tensor().pieces.at(0).storage->data[0] ^=
          std::byte{1};
      EXPECT_EQ(state_digests(tree, group, 1, &sums), saved);
      EXPECT_NE(state_digests(tree, group), saved);
    });
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
