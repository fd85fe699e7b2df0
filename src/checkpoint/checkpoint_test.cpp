// Save and load by several ranks, resharding, replicas, and what bad input says (P-01..P-18).
#include <atomic>
#include <filesystem>
#include <fstream>

#include "checkpoint/test_support.h"
#include "conformance/forwarding_store.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// A small model: uneven rows, a vector shorter than the ranks, a replicated scalar, values.
Value model_of(int rank, int ranks, bool fill = true, std::size_t dim = 0) {
  Value model = Value::dict();
  model.set_item("w", Value(counting({7, 5}, chunk({7, 5}, rank, ranks, dim), 100, fill)));
  model.set_item("b", Value(counting({3}, chunk({3}, rank, ranks), 1000, fill)));
  model.set_item("step", Value(counting({}, whole({}), 42, fill)));
  Value group = Value::dict();
  group.set_item("lr", Value(fill ? 0.5 : 0.0));
  group.set_item("betas", Value::tuple({Value(0.9), Value(0.95)}));
  Value tree = Value::dict();
  tree.set_item("model", model);
  tree.set_item("groups", Value::list({group}));
  return tree;
}

void save_model(const std::string& directory, int ranks, std::size_t dim = 0,
                SaveOptions options = {}) {
  run_ranks(ranks, [&](Group& group) {
    save(model_of(group.rank(), ranks, true, dim), directory, options, group);
  });
}

void expect_model(const Value& tree, int rank, int ranks, std::size_t dim = 0) {
  const Value expected = model_of(rank, ranks, true, dim);
  for (const char* name : {"w", "b", "step"}) {
    EXPECT_EQ(floats(tree.at("model").at(name).as_tensor()),
              floats(expected.at("model").at(name).as_tensor()))
        << name << " on rank " << rank;
  }
  EXPECT_EQ(tree.at("groups").items().at(0).at("lr").as_real(), 0.5);
}

TEST(Checkpoint, AnyNumberOfRanksLoadsWhatAnyOtherSaved) {  // P-17
  for (const int writers : {1, 2, 3, 4}) {
    const std::string directory = temporary_directory() + "/c";
    save_model(directory, writers);
    for (const int readers : {1, 2, 4}) {
      run_ranks(readers, [&](Group& group) {
        Value tree = model_of(group.rank(), readers, false);
        load(tree, directory, group);
        expect_model(tree, group.rank(), readers);
      });
    }
  }
}

TEST(Checkpoint, ColumnsAreLoadedFromRowsAndBack) {  // P-17
  const std::string directory = temporary_directory() + "/c";
  save_model(directory, 3, 1);
  run_ranks(2, [&](Group& group) {
    Value tree = model_of(group.rank(), 2, false, 0);
    load(tree, directory, group);
    expect_model(tree, group.rank(), 2, 0);
  });
}

TEST(Checkpoint, AFlatRangeIsLoadedFromBoxes) {
  const std::string directory = temporary_directory() + "/c";
  save_model(directory, 2);
  const auto group = solo_group();
  Value tree = Value::dict();
  Value model = Value::dict();
  model.set_item("w", Value(counting({7, 5}, FlatRange{3, 29}, 100, false)));
  tree.set_item("model", model);
  load(tree, directory, *group);
  EXPECT_EQ(floats(model.at("w").as_tensor()), floats(counting({7, 5}, FlatRange{3, 29}, 100)));
}

TEST(Checkpoint, ReplicasAreWrittenOnce) {  // P-13
  const std::string directory = temporary_directory() + "/c";
  save_model(directory, 4);
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.find("model.step")->value.as_tensor().pieces.size(), 1U);
  EXPECT_EQ(checkpoint.find("model.b")->value.as_tensor().pieces.size(), 3U);
  EXPECT_EQ(checkpoint.kind, CheckpointKind::dcp);
}

TEST(Checkpoint, ElementsAreConvertedToTheTargetsType) {  // P-16
  const std::string directory = temporary_directory() + "/c";
  save_model(directory, 2);
  Tensor want;
  want.dtype = DType::float64;
  want.shape = {7, 5};
  want.pieces.push_back({whole({7, 5}), memory(35 * 8), 0, {}, -1});
  Value tree = Value::dict();
  tree.set_item("model", Value::dict({{Value("w"), Value(want)}}));
  const auto group = solo_group();
  load(tree, directory, *group);
  double last = 0;
  std::memcpy(&last, want.pieces[0].storage->data + 34 * 8, 8);
  EXPECT_EQ(last, 134.0);
  LoadOptions strict;
  strict.allow_cast = false;
  EXPECT_EQ(code_of([&] { load(tree, directory, strict, *group); }), ErrorCode::mismatch);
}

TEST(Checkpoint, StridedMemoryIsSavedAndFilled) {
  const std::string directory = temporary_directory() + "/c";
  Tensor transposed = counting({4, 3}, whole({4, 3}), 0);  // memory is read as its transpose
  transposed.shape = {3, 4};
  transposed.pieces[0].slice = whole({3, 4});
  transposed.pieces[0].strides = {1, 3};
  const auto group = solo_group();
  save(Value::dict({{Value("t"), Value(transposed)}}), directory, *group);
  Value dense = Value::dict({{Value("t"), Value(counting({3, 4}, whole({3, 4}), 0, false))}});
  load(dense, directory, *group);
  EXPECT_EQ(floats(dense.at("t").as_tensor()),
            (std::vector<float>{0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}));
  Tensor target = transposed;
  target.pieces[0].storage = memory(48);
  Value strided = Value::dict({{Value("t"), Value(target)}});
  load(strided, directory, *group);
  EXPECT_EQ(std::memcmp(target.pieces[0].storage->data, transposed.pieces[0].storage->data, 48), 0);
}

TEST(Checkpoint, AnExistingCheckpointIsKeptUnlessOverwritten) {
  const std::string directory = temporary_directory() + "/c";
  SaveOptions overwrite;
  overwrite.threads = 1;  // one file a rank
  save_model(directory, 2, 0, overwrite);
  EXPECT_EQ(code_of([&] { save_model(directory, 2, 0, overwrite); }), ErrorCode::already_exists);
  overwrite.overwrite = true;
  save_model(directory, 3, 0, overwrite);
  save_model(directory, 3, 0, overwrite);
  EXPECT_EQ(Checkpoint::open(directory).files.size(), 4U);
  // The replaced save's files and side file stay for readers of the old `.metadata`; those before
  // it are gone.
  EXPECT_EQ(posix_store(directory)->list().size(), 9U);
}

TEST(Checkpoint, EveryRankSeesTheErrorOfOne) {  // P-03
  const std::string directory = temporary_directory() + "/c";
  std::atomic<int> seen{0};
  run_ranks(3, [&](Group& group) {
    Value tree = model_of(group.rank(), 3);
    Value broken = tree;
    if (group.rank() == 2) {
      broken =
          Value::dict({{Value("model"),
                        Value::dict({{Value("w"), Value(counting({9, 9}, whole({9, 9}), 0))}})}});
    }
    try {
      save(broken, directory, group);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("'model.w'"), std::string::npos) << error.what();
      ++seen;
    }
  });
  EXPECT_EQ(seen, 3);
  EXPECT_FALSE(std::filesystem::exists(directory + "/.metadata"));
}

TEST(Checkpoint, AHoleBetweenChunksIsRefusedBeforeAnythingIsWritten) {  // P-14
  const std::string directory = temporary_directory() + "/c";
  const auto group = solo_group();
  const Value tree = Value::dict({{Value("w"), Value(counting({4, 2}, Box{{0, 0}, {3, 2}}, 0))}});
  EXPECT_EQ(code_of([&] { save(tree, directory, *group); }), ErrorCode::incomplete);
  EXPECT_FALSE(std::filesystem::exists(directory));
}

// Bad input: one clear error, and the tree's memory is as it was.
class BadInput : public ::testing::Test {
 protected:
  BadInput() : directory_(temporary_directory() + "/c") { save_model(directory_, 2); }

  ErrorCode load_code(Value& tree) {
    const auto group = solo_group();
    return code_of([&] { load(tree, directory_, *group); });
  }

  ErrorCode load_model_code() {
    Value tree = model_of(0, 1, false);
    const ErrorCode code = load_code(tree);
    EXPECT_EQ(floats(tree.at("model").at("w").as_tensor()), std::vector<float>(35, 0.0F));
    return code;
  }

  [[nodiscard]] std::string data_file() const {
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
      if (entry.path().extension() == ".distcp") return entry.path().string();
    }
    return "";
  }

  std::string directory_;
};

TEST_F(BadInput, MissingDirectory) {
  std::filesystem::remove_all(directory_);
  EXPECT_EQ(load_model_code(), ErrorCode::not_found);
}

TEST_F(BadInput, EmptyDirectory) {
  std::filesystem::remove_all(directory_);
  std::filesystem::create_directory(directory_);
  EXPECT_EQ(load_model_code(), ErrorCode::not_found);
}

TEST_F(BadInput, DataWithoutMetadata) {
  std::filesystem::remove(directory_ + "/.metadata");
  EXPECT_EQ(load_model_code(), ErrorCode::incomplete);
}

TEST_F(BadInput, TruncatedMetadata) {
  std::filesystem::resize_file(directory_ + "/.metadata",
                               std::filesystem::file_size(directory_ + "/.metadata") / 2);
  EXPECT_EQ(load_model_code(), ErrorCode::incomplete);
}

TEST_F(BadInput, MissingDataFile) {
  std::filesystem::remove(data_file());
  EXPECT_EQ(load_model_code(), ErrorCode::incomplete);
}

TEST_F(BadInput, TruncatedDataFile) {
  std::filesystem::resize_file(data_file(), std::filesystem::file_size(data_file()) - 1);
  EXPECT_EQ(load_model_code(), ErrorCode::incomplete);
}

TEST_F(BadInput, MissingKeyAndOtherShape) {  // P-16
  Value tree = Value::dict({{Value("other"), Value(counting({2}, whole({2}), 0, false))}});
  EXPECT_EQ(load_code(tree), ErrorCode::not_found);
  tree = Value::dict(
      {{Value("model"),
        Value::dict({{Value("w"), Value(counting({5, 7}, whole({5, 7}), 0, false))}})}});
  EXPECT_EQ(load_code(tree), ErrorCode::mismatch);
}

TEST_F(BadInput, AFlippedDataByteIsFoundByItsChecksum) {
  // The first element of `w`, 100.0f, somewhere in a data file.
  for (const auto& entry : std::filesystem::directory_iterator(directory_)) {
    if (entry.path().extension() != ".distcp") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    const float values[2] = {100.0F, 101.0F};
    const auto at = bytes.find(std::string(reinterpret_cast<const char*>(values), 8));
    if (at == std::string::npos) continue;
    file.clear();
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(bytes[at] ^ 1));
  }
  Value tree = model_of(0, 1, false);
  EXPECT_EQ(load_code(tree), ErrorCode::corrupt);
  const VerifyReport report = verify(directory_);
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
}

TEST(Verify, AWholeCheckpointHasNoFindings) {
  const std::string directory = temporary_directory() + "/c";
  save_model(directory, 2);
  const VerifyReport report = verify(directory);
  EXPECT_TRUE(report.findings.empty());
  EXPECT_EQ(report.tensors, 3U);
  EXPECT_GT(report.bytes, (35U + 3U + 1U) * 4U);  // whole files are under digests
  EXPECT_EQ(report.bytes_unchecked, 0U);
}

// A store in which whatever lies below what was asked for must not be looked at.
class LevelStore final : public testing_support::ForwardingStore {
 public:
  LevelStore() : ForwardingStore(memory_store("home")) {}
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view) const override {
    throw std::logic_error("the whole directory was listed");
  }
};

TEST(OpenCheckpoint, OneLevelTellsThatADirectoryIsNone) {
  const auto store = std::make_shared<LevelStore>();
  for (const char* name : {"notes.txt", "a/b/c/model.safetensors", "model/x/rank0.pt"})
    put(*store, name, {}, IfExists::fail);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(store); }), ErrorCode::not_found);
  put(*store, "x.distcp", {}, IfExists::fail);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(store); }), ErrorCode::incomplete);
}

}  // namespace
}  // namespace tessera
