#include "checkpoint/open/rank_files.h"

#include <filesystem>
#include <fstream>
#include <map>

#include "checkpoint/test_support.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "storage/lazy_source.h"

namespace tessera {

// Files of one rank each: what is missing, too many, or does not fit together (L01, L02, L03, O-60
// to O-77). Their values are compared with PyTorch's in golden_test.cpp.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;
using Kind = Value::Kind;

const std::string kRoot = std::string(TESSERA_TEST_DATA) + "/golden/checkpoints/";

class RankFiles : public testing::Test {
 protected:
  // A copy of a golden that may be changed.
  std::string copy_of(const std::string& golden) {
    directory_ = temporary_directory() + "/" + fs::path(golden).filename().string();
    fs::copy(kRoot + golden, directory_, fs::copy_options::recursive);
    return directory_;
  }
  [[nodiscard]] ErrorCode code() const {
    return code_of([&] { (void)Checkpoint::open(directory_); });
  }
  [[nodiscard]] std::string text() const {
    try {
      (void)Checkpoint::open(directory_);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }
  void rename(const std::string& from, const std::string& to) const {
    fs::rename(directory_ + "/" + from, directory_ + "/" + to);
  }
  [[nodiscard]] const std::string& path() const { return directory_; }
  void remove(const std::string& name) const { fs::remove(directory_ + "/" + name); }

  // Rewrites a file of the copy after `change` had its tree.
  void change(const std::string& name, const std::function<void(Value&)>& change) const {
    const auto store = posix_store(directory_);
    Value tree = torch_file::read(store->open(name));
    change(tree);
    to_memory(tree);
    put(*store, name, torch_file::write(tree, "rank"), IfExists::replace);
  }

 private:
  static void to_memory(Value value) {
    if (value.is(Kind::tensor)) {
      Storage& storage = *value.as_tensor().pieces.at(0).storage;
      if (storage.data != nullptr) return;
      const auto bytes = std::make_shared<std::vector<std::byte>>(storage.size);
      storage.source->read_at(storage.offset, *bytes);
      storage.data = bytes->data();
      storage.owner = bytes;
    } else if (value.is(Kind::dict)) {
      for (const auto& [key, item] : value.pairs()) to_memory(item);
    } else if (value.is(Kind::list) || value.is(Kind::tuple)) {
      for (const Value& item : value.items()) to_memory(item);
    } else if (value.is(Kind::object)) {
      to_memory(value.as_object().arguments);
      if (value.as_object().state) to_memory(*value.as_object().state);
      for (const Value& item : value.as_object().list_items) to_memory(item);
    }
  }

  std::string directory_;
};

// In the middle, where tensors are.
void flip_a_byte_of(const std::string& file) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(fs::file_size(file) / 2));
  const auto byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(static_cast<std::streamoff>(fs::file_size(file) / 2));
  stream.put(byte);
}

Value& handle(Value& model, std::size_t module) {
  Value modules = model.at("modules");
  Value handles = modules.items().at(module).at("handles");
  return handles.items().at(0);
}

TEST_F(RankFiles, KindsAndWorldSizes) {
  const Checkpoint legacy = Checkpoint::open(kRoot + "fsdp1_uop1_ws4_legacy");
  EXPECT_EQ(legacy.kind, CheckpointKind::olmo_legacy);
  EXPECT_EQ(to_string(legacy.kind), "olmo-legacy");
  EXPECT_EQ(legacy.world_size, 4);
  EXPECT_EQ(legacy.files.size(), 4U);
  const Checkpoint local = Checkpoint::open(kRoot + "fsdp1_uop0_ws2_old_local");
  EXPECT_EQ(to_string(local.kind), "olmo-local");
  EXPECT_EQ(local.world_size, 5);
  EXPECT_EQ(local.files.size(), 15U);
}

// F-04: pieces are the ranks' own, in the order of ranks; a rank without rows has none (P-18).
TEST_F(RankFiles, PiecesSayWhoHoldsThem) {
  const Checkpoint legacy = Checkpoint::open(kRoot + "fsdp1_uop1_ws4_legacy");
  const Tensor& tensor = legacy.find("model.l1.weight")->value.as_tensor();
  ASSERT_EQ(tensor.pieces.size(), 3U);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(tensor.pieces[static_cast<std::size_t>(rank)].rank, rank);
  }
  EXPECT_EQ(std::get<Box>(tensor.pieces[2].slice), (Box{{4, 0}, {1, 3}}));
}

// What a rank has inside of a list does not go into the dict that rank 0 has in the list's place.
TEST_F(RankFiles, AListIsNoDict) {
  copy_of("fsdp1_uop0_ws2_legacy");
  const auto put_into_optim = [](const Value& more) {
    return [more](Value& tree) { tree.at("optim").set_item(Value("more"), more); };
  };
  change("rank0.pt", put_into_optim(Value::dict({{"y", 1}})));
  change("rank1.pt", put_into_optim(Value::list({Value::dict({{"y", 1}})})));
  EXPECT_EQ(code(), ErrorCode::mismatch);
  EXPECT_NE(text().find("rank 1 has it, rank 0 does not"), std::string::npos) << text();
}

// L02: no file can be of none of zero ranks.
TEST(WorldSizeFiles, OfZeroRanksAreRefused) {
  const auto store = memory_store();
  put(*store, "model_world_size_0_rank_0.pt", {}, IfExists::fail);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(store); }), ErrorCode::corrupt);
}

TEST_F(RankFiles, L01MissingRank) {
  copy_of("fsdp1_uop1_ws4_legacy");
  remove("rank3.pt");
  EXPECT_EQ(code(), ErrorCode::incomplete);
  EXPECT_NE(text().find("of 4 ranks, there are files of 3"), std::string::npos) << text();
  remove("rank1.pt");
  EXPECT_EQ(code(), ErrorCode::incomplete);
  EXPECT_NE(text().find("not rank1.pt"), std::string::npos) << text();
}

TEST_F(RankFiles, L01ExtraRank) {
  const std::string directory = copy_of("fsdp1_uop0_ws2_legacy");
  fs::copy(directory + "/rank1.pt", directory + "/rank2.pt");
  EXPECT_EQ(code(), ErrorCode::corrupt);
  rename("rank2.pt", "rank7.pt");  // O-63: an index above the count
  EXPECT_EQ(code(), ErrorCode::incomplete);
}

TEST_F(RankFiles, L01WrongRankInside) {
  copy_of("fsdp1_uop0_ws2_legacy");
  rename("rank0.pt", "other");
  rename("rank1.pt", "rank0.pt");
  rename("other", "rank1.pt");
  EXPECT_EQ(code(), ErrorCode::corrupt);
  EXPECT_NE(text().find("is rank 1's, the file rank 0's"), std::string::npos) << text();
}

// A shard that says it is of another rank than its process group.
TEST_F(RankFiles, L01ShardOfAnotherRank) {
  copy_of("fsdp1_uop0_ws2_legacy");
  change("rank1.pt", [](Value& tree) {
    const Value tensor = tree.at("model").at("l1.weight");
    const Value shards = tensor.as_object().arguments.items()[3].items()[0];
    const Value shard = shards.items().at(0);
    const Value metadata = shard.as_object().state->items()[1].at("metadata");
    const Value placement = metadata.as_object().state->items()[1].at("placement");
    Value(*placement.as_object().state).set_item("_rank", Value(0));
  });
  EXPECT_EQ(code(), ErrorCode::corrupt);
}

TEST_F(RankFiles, OptimizerValuesMustAgree) {
  copy_of("fsdp1_uop0_ws2_legacy");
  change("rank1.pt", [](Value& tree) {
    Value group = tree.at("optim").at("param_groups").items().at(0);
    group.set_item("lr", Value(0.5));
  });
  EXPECT_EQ(code(), ErrorCode::mismatch);
  EXPECT_NE(text().find("rank 0 has 0.001, rank 1 has 0.5"), std::string::npos) << text();
}

TEST_F(RankFiles, ValuesThatDifferAreSaidToDiffer) {
  copy_of("fsdp1_uop0_ws2_legacy");
  change("rank1.pt", [](Value& tree) {
    Value step = tree.at("optim").at("state").at("ln.weight").at("step");
    step.as_tensor().pieces = {Piece{whole({}), memory(4), 0, {}, -1}};
  });
  EXPECT_NE(text().find("the values differ: rank 0 has float32 [], rank"), std::string::npos);
}

// O-62: what the trainer keeps for itself may differ; rank 0's is taken, and it is said.
TEST_F(RankFiles, TrainStateIsRankZeros) {
  const Checkpoint local = Checkpoint::open(kRoot + "fsdp1_uop0_ws2_old_local");
  EXPECT_EQ(local.find("train.rng.python")->value.items()[1].items()[0], Value(0));
  ASSERT_EQ(local.warnings.size(), 1U);
  EXPECT_EQ(local.warnings[0],
            "rank 0's values are kept where ranks differ: train.rng.python and 1 more");
}

TEST_F(RankFiles, L02GeometryMustAgree) {
  for (const char* name : {"_shapes", "_numels_with_padding", "_fqns"}) {
    copy_of("fsdp1_uop1_ws2_local");
    change("model/rank1.pt", [name](Value& model) {
      const std::string key = std::string("flat_param.") + name;
      Value changed = Value::list();
      const Value old = handle(model, 1).at(key);
      for (const Value& item : old.items()) changed.items().push_back(item);
      if (changed.items()[0].is(Kind::string)) {
        changed.items()[0] = Value("other");
      } else if (changed.items()[0].is(Kind::integer)) {
        changed.items()[0] = Value(16);
      } else {
        changed.items()[0] = Value::tuple({Value(3), Value(5)});
      }
      handle(model, 1).set_item(Value(key), changed);
    });
    EXPECT_EQ(code(), ErrorCode::corrupt);
    EXPECT_NE(text().find("of rank 1 are not those of rank 0"), std::string::npos) << text();
  }
}

TEST_F(RankFiles, FlatPlacesMustFit) {
  copy_of("fsdp1_uop1_ws2_local");
  change("model/rank0.pt", [](Value& model) {
    Value infos = handle(model, 1).at("flat_param._shard_param_infos");
    Value info = infos.items().at(0);
    Value arguments = info.as_object().arguments;
    arguments.items()[1] = Value(5);  // offset_in_shard
  });
  EXPECT_EQ(code(), ErrorCode::corrupt);
}

// O-74: the padding at the end is zeros.
TEST_F(RankFiles, PaddingMustBeZero) {
  copy_of("fsdp1_uop0_ws2_old_local");
  change("model/rank4.pt", [](Value& model) {
    const Tensor& tensor = handle(model, 0).at("flat_param.data").as_tensor();
    const auto bytes = std::make_shared<std::vector<std::byte>>(8, std::byte{1});
    tensor.pieces[0].storage->data = bytes->data();
    tensor.pieces[0].storage->owner = bytes;
  });
  EXPECT_EQ(code(), ErrorCode::corrupt);
}

// O-76
TEST_F(RankFiles, LocalOptimizerMustAgree) {
  copy_of("fsdp1_uop1_ws2_local");
  change("optim/rank1.pt", [](Value& optim) {
    Value group = optim.at("param_groups").items().at(0);
    group.set_item("weight_decay", Value(0.25));
  });
  EXPECT_EQ(code(), ErrorCode::mismatch);
  copy_of("fsdp1_uop1_ws2_local");
  change("optim/rank1.pt", [](Value& optim) {
    const Value state = optim.at("state").pairs().at(0).second;
    const auto bytes = std::make_shared<std::vector<std::byte>>(4, std::byte{1});
    Storage& storage = *state.at("step").as_tensor().pieces[0].storage;
    storage.data = bytes->data();
    storage.owner = bytes;
  });
  EXPECT_EQ(code(), ErrorCode::mismatch);
}

TEST_F(RankFiles, LocalFilesMustBeThere) {
  copy_of("fsdp1_uop0_ws2_old_local");
  remove("train/rank4.pt");  // L03: OLMo would take rank 0's
  EXPECT_EQ(code(), ErrorCode::incomplete);
  copy_of("fsdp1_uop0_ws2_old_local");
  remove("optim/rank2.pt");
  EXPECT_EQ(code(), ErrorCode::incomplete);
  copy_of("fsdp1_uop0_ws2_old_local");
  for (const char* part : {"model", "optim", "train"}) remove(std::string(part) + "/rank4.pt");
  EXPECT_EQ(code(), ErrorCode::incomplete);  // O-77: metadata.yaml says 5
  EXPECT_NE(text().find("metadata.yaml says 5 ranks"), std::string::npos) << text();
  EXPECT_NE(text().find("missing: model/rank4.pt"), std::string::npos) << text();
}

// The world is large, and its files lie on many nodes.
TEST_F(RankFiles, OfMissingFilesSixteenAreNamed) {
  write_text(copy_of("fsdp1_uop0_ws2_local") + "/metadata.yaml", "world_size: 40\n");
  EXPECT_EQ(code(), ErrorCode::incomplete);
  EXPECT_NE(text().find("model/rank17.pt and 22 more"), std::string::npos) << text();
}

// The listing that decides what a directory is goes through a link to the files.
TEST_F(RankFiles, FoldersMayBeLinks) {
  const std::string directory = copy_of("fsdp1_uop0_ws2_local");
  for (const char* part : {"model", "optim"}) {
    rename(part, std::string("of_") + part);
    fs::create_directory_symlink(std::string("of_") + part, directory + "/" + part);
  }
  EXPECT_EQ(Checkpoint::open(directory).world_size, 2);
  const std::string outside = temporary_directory() + "/model";
  fs::rename(directory + "/of_model", outside);
  EXPECT_EQ(code(), ErrorCode::not_found);
  remove("model");
  fs::create_directory_symlink(outside, directory + "/model");
  EXPECT_EQ(code(), ErrorCode::unsafe);
}

// A copy that was interrupted is no rank's.
TEST_F(RankFiles, UnfinishedFilesCountForNobody) {
  const std::string directory = copy_of("fsdp1_uop0_ws2_local");
  write_text(directory + "/model/rank7.pt.tmp", "");
  EXPECT_EQ(Checkpoint::open(directory).world_size, 2);
  remove("model/rank1.pt");
  EXPECT_EQ(text().find("rank6"), std::string::npos) << text();
}

TEST_F(RankFiles, LocalWithoutOptimizerIsAModel) {
  const std::string directory = copy_of("fsdp1_uop0_ws2_local");
  fs::remove_all(directory + "/optim");
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.leaves.size(), 6U);
  EXPECT_EQ(checkpoint.warnings.size(), 2U);
}

// A hole is seen by the proof of coverage, not by NaNs (OQ-03, OQ-06).
TEST_F(RankFiles, HolesAreIncomplete) {
  copy_of("fsdp1_uop0_ws2_legacy");
  change("rank1.pt", [](Value& tree) {
    const Value tensor = tree.at("model").at("l1.weight");
    Value shards = tensor.as_object().arguments.items()[3].items()[0];
    shards.items().clear();
  });
  EXPECT_EQ(code(), ErrorCode::incomplete);
  EXPECT_NE(text().find("model.l1.weight"), std::string::npos) << text();
}

TEST_F(RankFiles, WorldSizeFilesMustAllBeThere) {
  const std::string directory = copy_of("ranks_fsdp2_ws3");
  EXPECT_EQ(Checkpoint::open(directory).kind, CheckpointKind::rank_files);
  remove("extra_state_world_size_3_rank_1.pt");
  EXPECT_EQ(code(), ErrorCode::incomplete);
  copy_of("ranks_fsdp2_ws3");
  remove("model_world_size_3_rank_2.pt");
  EXPECT_EQ(code(), ErrorCode::incomplete);
  copy_of("ranks_fsdp2_ws3");
  rename("model_world_size_3_rank_2.pt", "model_world_size_4_rank_2.pt");
  EXPECT_EQ(code(), ErrorCode::conflict);
}

TEST_F(RankFiles, DTensorOfAnotherRank) {
  copy_of("ranks_fsdp2_ws2");
  rename("model_world_size_2_rank_0.pt", "other");
  rename("model_world_size_2_rank_1.pt", "model_world_size_2_rank_0.pt");
  rename("other", "model_world_size_2_rank_1.pt");
  EXPECT_EQ(code(), ErrorCode::corrupt);
}

Value& spec_of(Value& tree, const char* name) {
  const Value tensor = tree.at("values").at(name);
  const Value state = tensor.as_object().arguments.items()[3].items()[1];
  const Value& spec = state.at("_spec");
  return const_cast<Value&>(*spec.as_object().state);
}

// Up to torch 2.8 a mesh had a tensor of ranks in the place of its layout.
TEST_F(RankFiles, OlderMeshes) {
  copy_of("ranks_mesh_ws4");
  for (int rank = 0; rank < 4; ++rank) {
    change("rank" + std::to_string(rank) + ".pt", [](Value& tree) {
      for (const char* name : {"v0", "v3", "v4"}) {
        Value mesh = spec_of(tree, name).at("mesh");
        const Value state = *mesh.as_object().state;
        if (state.find("mesh") != nullptr) continue;  // one mesh for several tensors
        const Value& map = state.at("_rank_map");
        Tensor ranks = map.as_tensor();
        ranks.shape = {2, 2};
        ranks.pieces[0].slice = whole(ranks.shape);
        mesh.as_object().state = Value::dict({{"device_type", "cpu"}, {"mesh", Value(ranks)}});
      }
    });
  }
  const Checkpoint old = Checkpoint::open(text().empty() ? path() : "");
  EXPECT_TRUE(diff(old, Checkpoint::open(kRoot + "ranks_mesh_ws4")).empty());
}

TEST_F(RankFiles, PlacementsThatHoldNoPart) {
  copy_of("ranks_mesh_ws4");
  change("rank2.pt", [](Value& tree) {
    Value placements = spec_of(tree, "v0").at("placements");
    placements.items()[0] = Value::object(
        {.callable = Value::global("torch.distributed.tensor.placement_types", "Partial"),
         .arguments = Value::tuple(),
         .by_new = true});
  });
  EXPECT_EQ(code(), ErrorCode::unsupported);
}

// A shard over three of four ranks leaves a hole or an overlap that the proof of coverage sees, or
// does not have the shape of its place.
TEST_F(RankFiles, PlacementsMustFit) {
  copy_of("ranks_mesh_ws4");
  change("rank1.pt", [](Value& tree) {
    Value placements = spec_of(tree, "v3").at("placements");
    std::swap(placements.items()[0], placements.items()[1]);
  });
  EXPECT_EQ(code(), ErrorCode::corrupt);
}

std::size_t open_descriptors() {
  const fs::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(fs::begin(all), fs::end(all)));
}

// More files than a process may have open.
TEST_F(RankFiles, FewFilesAreOpenAtOnce) {
  const auto store = posix_store(kRoot + "fsdp1_uop0_ws2_old_local/model");
  const auto files = std::make_shared<OpenFiles>(2);
  std::vector<std::unique_ptr<LazySource>> sources;
  for (const ObjectInfo& object : store->list()) {
    sources.push_back(std::make_unique<LazySource>(store, object, files));
  }
  ASSERT_EQ(sources.size(), 5U);
  const std::size_t before = open_descriptors();
  for (int round = 0; round < 3; ++round) {
    for (const auto& source : sources) {
      std::byte first{};
      source->read_at(0, {&first, 1});
      EXPECT_EQ(first, std::byte{'P'});
    }
  }
  EXPECT_EQ(open_descriptors(), before + 2);
  sources.clear();
  EXPECT_EQ(open_descriptors(), before);
}

// Parameters are views of one flat parameter: its checksum is compared once.
TEST_F(RankFiles, SharedStoragesAreCheckedOnce) {
  const std::string golden = kRoot + "fsdp1_uop1_ws2_local";
  const Checkpoint checkpoint = Checkpoint::open(golden);
  std::map<const Storage*, std::uint64_t> storages;
  std::size_t pieces = 0;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!leaf.value.is(Kind::tensor)) continue;
    for (const Piece& piece : leaf.value.as_tensor().pieces) {
      storages.emplace(piece.storage.get(), piece.storage->size);
      ++pieces;
    }
  }
  EXPECT_LT(storages.size(), pieces);
  std::uint64_t bytes = 0;
  for (const auto& [storage, size] : storages) bytes += size;
  EXPECT_EQ(verify(golden).bytes, bytes);
}

// Every kind as one torch.save file, and that file is the same checkpoint.
TEST_F(RankFiles, ConvertToTorchAndSafetensors) {
  for (const char* golden : {"fsdp1_uop1_ws4_legacy", "fsdp1_uop1_ws2_local",
                             "fsdp1_uop0_ws2_old_local", "ranks_mesh_ws4"}) {
    for (const CheckpointKind kind :
         {CheckpointKind::torch_file, CheckpointKind::safetensors, CheckpointKind::dcp}) {
      const std::string directory = temporary_directory();
      const std::string target = kind == CheckpointKind::torch_file ? directory + "/all.pt"
                                 : kind == CheckpointKind::safetensors
                                     ? directory + "/all.safetensors"
                                     : directory + "/dcp";
      ConvertOptions options;
      options.to = kind;
      convert(kRoot + golden, target, options);
      const auto differences = diff(Checkpoint::open(kRoot + golden), Checkpoint::open(target));
      EXPECT_TRUE(differences.empty()) << golden << " " << to_string(kind) << ": "
                                       << differences[0].name << " " << differences[0].text;
    }
  }
}

// Four ranks in a hybrid mesh: ranks 2 and 3 hold what 0 and 1 do. Shards of torch_legacy are
// DTensors then, which OLMo's own unsharding refuses.
TEST_F(RankFiles, OlmosHybridMeshesAreOneState) {
  const Checkpoint full = Checkpoint::open(kRoot + "olmo_hybrid/full");
  for (const char* kind : {"torch_legacy", "local"}) {
    const std::string directory = temporary_directory() + "/whole";
    ConvertOptions options;
    options.to = CheckpointKind::olmo_full;
    convert(kRoot + "olmo_hybrid/" + kind, directory, options);
    const Checkpoint whole = Checkpoint::open(directory).only({"model", "optim.state"});
    const auto differences = diff(full.only({"model", "optim.state"}), whole);
    EXPECT_TRUE(differences.empty()) << kind << ": " << differences[0].name;
  }
}

// Bytes of copies that a checkpoint does not use are compared with their checksums, too.
TEST_F(RankFiles, VerifyReadsEveryCopyOfAHybridMesh) {
  const std::uint64_t once = verify(kRoot + "olmo_hybrid/full").bytes;
  EXPECT_GT(verify(kRoot + "olmo_hybrid/local").bytes, once * 19 / 10);
  for (const char* name : {"model/rank3.pt", "optim/rank2.pt"}) {
    flip_a_byte_of(copy_of("olmo_hybrid/local") + "/" + name);
    const auto report = verify(path());
    ASSERT_EQ(report.findings.size(), 1U);
    EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
    EXPECT_NE(report.findings[0].text.find(name), std::string::npos) << report.findings[0].text;
  }
}

// A copy that was saved so, with a checksum that fits.
TEST_F(RankFiles, VerifyNamesTheRanksWhoseCopiesDiffer) {
  copy_of("olmo_hybrid/local");
  change("model/rank2.pt", [](Value& model) {
    const Storage& data = *handle(model, 1).at("flat_param.data").as_tensor().pieces[0].storage;
    const auto bytes = std::make_shared<std::vector<std::byte>>(data.size);
    data.source->read_at(data.offset, *bytes);
    (*bytes)[8] ^= std::byte{1};
    Storage& changed = const_cast<Storage&>(data);
    changed.data = bytes->data();
    changed.owner = bytes;
  });
  const Checkpoint checkpoint = Checkpoint::open(path());
  const auto report = verify(checkpoint);
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_EQ(report.findings[0].code, ErrorCode::mismatch);
  EXPECT_NE(report.findings[0].text.find("ranks 0 and 2 hold copies of elements 0 to "),
            std::string::npos)
      << report.findings[0].text;
  EXPECT_NE(report.findings[0].text.find("blocks.0."), std::string::npos);
  EXPECT_TRUE(verify(checkpoint.only({"optim"})).findings.empty());
  EXPECT_TRUE(verify(path(), {.read_data = false}).findings.empty());
}

TEST_F(RankFiles, VerifyComparesCopiesOfDTensors) {
  copy_of("olmo_hybrid/torch_legacy");
  EXPECT_TRUE(verify(path()).findings.empty());
  change("rank3.pt", [](Value& tree) {
    const Value tensor = tree.at("model").at("transformer.wte.weight");
    const Value state = tensor.as_object().arguments.items()[3].items()[1];
    Storage& data = *state.at("_local_tensor").as_tensor().pieces[0].storage;
    const auto bytes = std::make_shared<std::vector<std::byte>>(data.size, std::byte{1});
    data.data = bytes->data();
    data.owner = bytes;
  });
  const auto report = verify(path());
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_EQ(report.findings[0].code, ErrorCode::mismatch);
  EXPECT_NE(report.findings[0].text.find("ranks 1 and 3"), std::string::npos)
      << report.findings[0].text;
}

// Shard.metadata of rows [begin, begin + rows) in place of the given one's.
Value rows_of(const Value& shard, std::int64_t begin, std::int64_t rows) {
  const Value& attributes = shard.as_object().state->items()[1];
  const Value& metadata = attributes.at("metadata").as_object().state->items()[1];
  Object described = attributes.at("metadata").as_object();
  described.state =
      Value::tuple({Value(), Value::dict({{"shard_offsets", Value::list({begin, std::int64_t{0}})},
                                          {"shard_sizes", Value::list({rows, std::int64_t{3}})},
                                          {"placement", metadata.at("placement")}})});
  Tensor tensor = attributes.at("tensor").as_tensor();
  tensor.shape = {rows, 3};
  tensor.pieces[0].slice = whole(tensor.shape);
  tensor.pieces[0].storage_offset += begin * 3;
  Object made = shard.as_object();
  made.state =
      Value::tuple({Value(), Value::dict({{"tensor", Value(std::move(tensor))},
                                          {"metadata", Value::object(std::move(described))}})});
  return Value::object(std::move(made));
}

// OLMo's unsharding takes one shard of a rank.
TEST_F(RankFiles, SeveralShardsOfARank_OQ05) {
  copy_of("fsdp1_uop0_ws2_legacy");
  change("rank0.pt", [](Value& tree) {
    const Value tensor = tree.at("model").at("l1.weight");
    Value shards = tensor.as_object().arguments.items()[3].items()[0];
    const Value shard = shards.items().at(0);
    shards.items() = {rows_of(shard, 0, 1), rows_of(shard, 1, 2)};
  });
  const Checkpoint split = Checkpoint::open(path());
  EXPECT_EQ(split.tensor("model.l1.weight").pieces.size(), 3U);
  EXPECT_TRUE(diff(split, Checkpoint::open(kRoot + "fsdp1_uop0_ws2_legacy")).empty());
}

TEST(CleanName, AWrapperAtTheEndStays_OQ14) {
  EXPECT_EQ(sharded::clean_name("_fsdp_wrapped_module.a._fsdp_wrapped_module.b"), "a.b");
  EXPECT_EQ(sharded::clean_name("_fsdp_wrapped_module"), "_fsdp_wrapped_module");
  EXPECT_EQ(sharded::clean_name("a._fsdp_wrapped_module"), "a._fsdp_wrapped_module");
}

// Python 3.11.2 writes the memory format of a ShardedTensor, and the class of its group, by
// getattr.
TEST_F(RankFiles, AShardedTensorOfPython3112) {
  const auto checkpoint = Checkpoint::open(copy_of("../sharded_forms"));
  EXPECT_EQ(checkpoint.kind, CheckpointKind::rank_files);
  const Value tree = checkpoint.load();
  const Tensor& tensor = tree.at("w").as_tensor();
  EXPECT_EQ(tensor.shape, (Shape{3, 2}));
  EXPECT_EQ(reinterpret_cast<const float*>(tensor.pieces.at(0).storage->data)[5], 5.0F);
}

}  // namespace
}  // namespace tessera
