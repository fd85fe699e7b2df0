// The OLMo kinds, against files that PyTorch's FSDP1 wrote (tests/golden/make/mp2.py) and OLMo's
// own safetensors: F-00, F-02, F-04, F-05, F-06, O-15, O-42, O-70.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/test_support.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorCode::not_found, "no such file").at_path(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::string& text) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
}

ConvertOptions to(CheckpointKind kind, int ranks = 1) {
  ConvertOptions options;
  options.to = kind;
  options.ranks = ranks;
  if (kind == CheckpointKind::olmo_local) options.olmo.unit = "l[0-9]+";
  return options;
}

// A training state as torch_new has it, with the trainer's part that the legacy files have.
std::string torch_new_of(const std::string& golden, const std::string& directory) {
  fs::copy(kGolden + golden + "/model_and_optim", directory + "/model_and_optim",
           fs::copy_options::recursive);
  return directory;
}

struct Case {
  const char* golden;
  int ranks;
  bool aligned;
};
// The name is GoogleTest's. NOLINTNEXTLINE(readability-identifier-naming)
void PrintTo(const Case& row, std::ostream* out) {
  *out << row.golden;
}

std::string rank_file(const std::string& folder, int rank) {
  return folder + "/rank" + std::to_string(rank) + ".pt";
}

class OlmoLocal : public testing::TestWithParam<Case> {};

// From FSDP's own sharded checkpoint to flat parameters: the files that FSDP's own ranks saved,
// byte for byte. The optimizer's names in its state stand in another order there: compared below.
TEST_P(OlmoLocal, ModelFilesAreThoseOfFsdp) {
  const Case& row = GetParam();
  const std::string work = temporary_directory();
  fs::create_directories(work + "/in");
  ConvertOptions options = to(CheckpointKind::olmo_local, row.ranks);
  options.olmo.orig_params = row.aligned;
  (void)convert(torch_new_of(row.golden, work + "/in"), work + "/out", options);
  const std::string theirs = kGolden + row.golden + "/local/model";
  for (int rank = 0; rank < row.ranks; ++rank) {
    EXPECT_EQ(content(rank_file(work + "/out/model", rank)), content(rank_file(theirs, rank)));
  }
  EXPECT_EQ(content(work + "/out/metadata.yaml"),
            "world_size: " + std::to_string(row.ranks) + "\n");
}

Value read_file(const std::string& path) {
  const fs::path as_path(path);
  return torch_file::read(
      posix_store(as_path.parent_path().string())->open(as_path.filename().string()));
}

std::vector<std::byte> bytes_of(const Tensor& tensor) {
  const Storage& storage = *tensor.pieces.at(0).storage;
  std::vector<std::byte> bytes(static_cast<std::size_t>(numel(tensor.shape)) *
                               size_of(tensor.dtype));
  storage.source->read_at(
      storage.offset +
          static_cast<std::uint64_t>(tensor.pieces[0].storage_offset) * size_of(tensor.dtype),
      bytes);
  return bytes;
}

// Two optimizer states alike but for the order of keys.
void expect_same_state(const Value& found, const Value& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    const auto& [id, entries] = wanted.pairs()[i];
    ASSERT_EQ(found.pairs()[i].first, id);
    const Value& own = found.pairs()[i].second;
    ASSERT_EQ(own.size(), entries.size());
    for (const auto& [key, value] : entries.pairs()) {
      const Tensor& a = own.at(key.as_string()).as_tensor();
      EXPECT_EQ(a.shape, value.as_tensor().shape);
      EXPECT_EQ(bytes_of(a), bytes_of(value.as_tensor())) << key.as_string();
    }
  }
}

TEST_P(OlmoLocal, OptimizerStateIsThatOfFsdp) {
  const Case& row = GetParam();
  const std::string work = temporary_directory();
  fs::create_directories(work + "/in");
  ConvertOptions options = to(CheckpointKind::olmo_local, row.ranks);
  options.olmo.orig_params = row.aligned;
  (void)convert(torch_new_of(row.golden, work + "/in"), work + "/out", options);
  const std::string theirs = kGolden + row.golden + "/local/optim";
  for (int rank = 0; rank < row.ranks; ++rank) {
    const Value found = read_file(rank_file(work + "/out/optim", rank));
    const Value wanted = read_file(rank_file(theirs, rank));
    expect_same_state(found.at("state"), wanted.at("state"));
    const Value& groups = wanted.at("param_groups");
    ASSERT_EQ(found.at("param_groups").size(), groups.size());
    for (const auto& [key, value] : groups.items()[0].pairs()) {
      EXPECT_EQ(found.at("param_groups").items()[0].at(key.as_string()), value) << key.as_string();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, OlmoLocal,
                         testing::Values(Case{"fsdp1_uop0_ws2", 2, false},
                                         Case{"fsdp1_uop1_ws2", 2, true},
                                         Case{"fsdp1_uop1_ws4", 4, true}));

// State that is cut lies end to end in one flat parameter, which has one type.
TEST(OlmoLocalFlat, StateOfSeveralTypesIsRefused) {
  const auto four = [](DType dtype) {
    Tensor tensor = counting({4}, whole({4}), 0);
    tensor.dtype = dtype;
    return Value(std::move(tensor));
  };
  const auto state = [&](DType dtype) { return Value::dict({{"exp_avg", four(dtype)}}); };
  const Value tree = Value::dict(
      {{"model", Value::dict({{"a", four(DType::float32)}, {"b", four(DType::float32)}})},
       {"optim",
        Value::dict(
            {{"state", Value::dict({{"a", state(DType::float16)}, {"b", state(DType::float32)}})},
             {"param_groups",
              Value::list({Value::dict({{"params", Value::list({"a", "b"})}})})}})}});
  const std::string work = temporary_directory();
  save(tree, work + "/dcp", *solo_group());
  ConvertOptions options = to(CheckpointKind::olmo_local, 2);
  EXPECT_NO_THROW((void)convert(work + "/dcp", work + "/aligned", options));
  options.olmo.orig_params = false;
  const Error error = error_of([&] { (void)convert(work + "/dcp", work + "/flat", options); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported) << error.what();
  EXPECT_EQ(error.key(), "optim.state.b");
}

class OlmoLegacy : public testing::TestWithParam<Case> {};

// The golden's first file, taken apart and given back as one rank's whole tensors.
// One optimizer of two blocks and a root, in an order that is not the modules', of which a block
// has no state. With and without the groups' param_names it comes back under its own names.
TEST(OlmoLocalFlat, StateStaysWithItsParameters) {
  for (const bool names : {false, true}) {
    const auto four = [](float first) { return Value(counting({4}, whole({4}), first)); };
    Value group = Value::dict({{"params", Value::list({"l1.w", "out", "l0.w"})}, {"lr", 0.5}});
    if (names) group.set_item("param_names", group.at("params"));
    const Value tree = Value::dict(
        {{"model", Value::dict({{"l0.w", four(0)}, {"l1.w", four(10)}, {"out", four(20)}})},
         {"optim",
          Value::dict({{"state", Value::dict({{"l1.w", Value::dict({{"exp_avg", four(30)}})},
                                              {"out", Value::dict({{"exp_avg", four(40)}})}})},
                       {"param_groups", Value::list({group})}})}});
    const std::string work = temporary_directory();
    save(tree, work + "/dcp", *solo_group());
    ConvertOptions options = to(CheckpointKind::olmo_local, 2);
    options.olmo.orig_params = false;
    (void)convert(work + "/dcp", work + "/local", options);
    EXPECT_TRUE(verify(work + "/local").findings.empty());
    const Value all = Checkpoint::open(work + "/local").load();
    const Value& state = all.at("optim").at("state");
    EXPECT_EQ(floats(state.at("l1.w").at("exp_avg").as_tensor()),
              (std::vector<float>{30, 31, 32, 33}));
    EXPECT_EQ(floats(state.at("out").at("exp_avg").as_tensor()),
              (std::vector<float>{40, 41, 42, 43}));
    EXPECT_EQ(state.find("l0.w"), nullptr);
  }
}

TEST_P(OlmoLegacy, FilesAreThoseOfTorch) {
  const Case& row = GetParam();
  const std::string work = temporary_directory();
  const std::string legacy = kGolden + row.golden + "/legacy";
  // model.pt brings the order of names and the module's metadata, the rank's file the rest.
  fs::create_directories(work + "/in");
  fs::copy_file(kGolden + row.golden + "/model.pt", work + "/in/model.pt");
  ConvertOptions options = to(CheckpointKind::olmo_legacy, row.ranks);
  write(work + "/in/config.yaml", "run_name: x\n");
  (void)convert(work + "/in", work + "/out", options);
  for (int rank = 0; rank < row.ranks; ++rank) {
    const Value found = read_file(rank_file(work + "/out", rank));
    const Value wanted = read_file(rank_file(legacy, rank));
    EXPECT_EQ(found.at("model"), wanted.at("model"));
    ASSERT_EQ(found.at("model").size(), wanted.at("model").size());
    for (const auto& [key, value] : wanted.at("model").pairs()) {
      const auto shard = [](const Value& sharded) -> const Value::List& {
        return sharded.as_object().arguments.items().at(3).items().at(0).items();
      };
      const Value::List& mine = shard(found.at("model").at(key.as_string()));
      const Value::List& theirs = shard(value);
      ASSERT_EQ(mine.size(), theirs.size()) << key.as_string();
      if (mine.empty()) continue;
      const auto tensor = [](const Value& local) -> const Tensor& {
        return local.as_object().state->items().at(1).at("tensor").as_tensor();
      };
      EXPECT_EQ(bytes_of(tensor(mine[0])), bytes_of(tensor(theirs[0]))) << key.as_string();
    }
  }
  EXPECT_EQ(content(work + "/out/config.yaml"), "run_name: x\n");
}

INSTANTIATE_TEST_SUITE_P(Golden, OlmoLegacy,
                         testing::Values(Case{"fsdp1_uop0_ws2", 2, false},
                                         Case{"fsdp1_uop1_ws2", 2, true},
                                         Case{"fsdp1_uop1_ws4", 4, true}));

// F-02: what Python wrote comes out as it went in; `other.pt` is an old name of train.pt (O-41).
TEST(OlmoFull, PythonsFilesAreCopiedByteForByte) {
  const std::string work = temporary_directory();
  fs::create_directories(work + "/in");
  for (const char* name : {"model.pt", "optim.pt"}) {
    fs::copy_file(kGolden + "fsdp1_uop0_ws2/" + name, work + "/in/" + name);
  }
  fs::copy_file(kGolden + "train.pt", work + "/in/other.pt");
  write(work + "/in/config.yaml", "a: 1 # as it was\n");
  const Checkpoint source = Checkpoint::open(work + "/in");
  EXPECT_EQ(source.kind, CheckpointKind::olmo_full);
  EXPECT_NE(source.find("model.l1.weight"), nullptr);
  EXPECT_NE(source.find("optim.state.l1.weight.exp_avg"), nullptr);
  (void)convert(work + "/in", work + "/out", to(CheckpointKind::olmo_full));
  for (const char* name : {"model.pt", "optim.pt", "config.yaml"}) {
    EXPECT_EQ(content(work + "/out/" + name), content(work + "/in/" + name)) << name;
  }
  EXPECT_TRUE(diff(source, Checkpoint::open(work + "/out")).empty());
}

TEST(OlmoFull, SafetensorsThereAndBack) {
  const std::string work = temporary_directory();
  fs::create_directories(work + "/in");
  for (const char* name : {"model.pt", "optim.pt"}) {
    fs::copy_file(kGolden + "fsdp1_uop1_ws2/" + name, work + "/in/" + name);
  }
  ConvertOptions options = to(CheckpointKind::olmo_full);
  options.olmo.safetensors = true;
  (void)convert(work + "/in", work + "/st", options);
  EXPECT_TRUE(fs::exists(work + "/st/model.safetensors"));
  const Checkpoint source = Checkpoint::open(work + "/in");
  EXPECT_TRUE(diff(source, Checkpoint::open(work + "/st")).empty());
  options.olmo.safetensors = false;
  (void)convert(work + "/st", work + "/back", options);
  EXPECT_TRUE(diff(source, Checkpoint::open(work + "/back")).empty());
}

// F-06: a file that OLMo's own function wrote: nested dicts with number keys, a pickled list.
TEST(OlmoFull, ReadsOlmosOwnSafetensors) {
  const std::string work = temporary_directory();
  fs::create_directories(work + "/in");
  fs::copy_file(kGolden + "olmo.safetensors", work + "/in/model.safetensors");
  write(work + "/in/config.yaml", "a: 1\n");
  const Checkpoint checkpoint = Checkpoint::open(work + "/in");
  ASSERT_NE(checkpoint.find("model.transformer.wte.weight"), nullptr);
  EXPECT_NE(checkpoint.find("model.state.0.step"), nullptr);
  EXPECT_EQ(checkpoint.find("model.param_groups.0.lr")->value.as_real(), 0.1);
}

TEST(OlmoTorchNew, IsADcpCheckpointAndTrainFiles) {
  const std::string work = temporary_directory();
  fs::create_directories(work + "/in");
  const std::string source = torch_new_of("fsdp1_uop1_ws2", work + "/in");
  fs::create_directories(work + "/in/train");
  fs::copy_file(kGolden + "train.pt", work + "/in/train/rank0.pt");
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(source); }), ErrorCode::incomplete);  // L03
  fs::copy_file(kGolden + "train.pt", work + "/in/train/rank2.pt");
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(source); }), ErrorCode::incomplete);
  fs::rename(work + "/in/train/rank2.pt", work + "/in/train/rank1.pt");
  const Checkpoint opened = Checkpoint::open(source);
  EXPECT_EQ(opened.kind, CheckpointKind::olmo_torch_new);
  EXPECT_EQ(opened.world_size, 2);
  for (const int ranks : {1, 3}) {
    const std::string out = work + "/out" + std::to_string(ranks);
    (void)convert(source, out, to(CheckpointKind::olmo_torch_new, ranks));
    const Checkpoint written = Checkpoint::open(out);
    EXPECT_TRUE(diff(opened, written).empty());
    EXPECT_EQ(written.world_size, ranks);
    // l1.weight has five rows: two, two, one (torch.chunk).
    EXPECT_EQ(written.find("model.l1.weight")->value.as_tensor().pieces.size(),
              static_cast<std::size_t>(ranks));
  }
}

// A name from a file that a recursive matcher would overflow the stack with.
TEST(OlmoTargets, RefuseNamesWithoutEnd) {
  const std::vector<std::string> names = {std::string(1 << 20, 'a') + ".weight"};
  EXPECT_EQ(code_of([&] { (void)UnitPlan::by_expression(names, "(a|b)*c"); }), ErrorCode::limit);
}

// Elements whose bytes are all 255: NaN in a floating-point type, -1 in an integer one.
Value all_ones(DType dtype, const Shape& shape) {
  const auto bytes = std::make_shared<std::vector<std::byte>>(64, std::byte{255});
  auto storage = std::make_shared<Storage>();
  storage->dtype = dtype;
  storage->size = byte_size(dtype, shape);
  storage->data = bytes->data();
  storage->owner = bytes;
  Tensor made;
  made.dtype = dtype;
  made.shape = shape;
  made.pieces.push_back(Piece{whole(shape), std::move(storage), 0, {}, -1});
  return Value(std::move(made));
}

// The tree, saved, as that kind on three ranks: nothing has changed.
void expect_unchanged(const Value& tree, CheckpointKind kind) {
  const std::string work = temporary_directory();
  save(tree, work + "/all.pt");
  convert(work + "/all.pt", work + "/out", to(kind, kind == CheckpointKind::olmo_full ? 1 : 3));
  EXPECT_TRUE(verify(work + "/out").findings.empty());
  const auto differences =
      diff(Checkpoint::open(work + "/all.pt"), Checkpoint::open(work + "/out"));
  EXPECT_TRUE(differences.empty())
      << to_string(kind) << ": " << differences[0].name << " " << differences[0].text;
}

constexpr CheckpointKind kOlmoKinds[] = {CheckpointKind::olmo_full, CheckpointKind::olmo_torch_new,
                                         CheckpointKind::olmo_legacy, CheckpointKind::olmo_local};

// OLMo fills what it has not read yet with NaNs, so it refuses genuine ones, and cannot tell of
// integers.
TEST(OlmoTargets, NansAndIntegersAreValues_OQ03) {
  for (const CheckpointKind kind : kOlmoKinds) {
    Value model = Value::dict(
        {{"l0.w", all_ones(DType::float32, {5, 3})}, {"l1.w", all_ones(DType::float32, {2})}});
    // A flat parameter has no integers.
    if (kind != CheckpointKind::olmo_local) model.set_item("n", all_ones(DType::int64, {4}));
    expect_unchanged(Value::dict({{"model", model}}), kind);
  }
}

// OLMo's unsharding takes float32 alone, from ranks with rows, under keys that are strings, whose
// names together have at most 255 characters.
TEST(OlmoTargets, AnyTypeAndAnyKey_OQ05) {
  for (const CheckpointKind kind : {CheckpointKind::olmo_full, CheckpointKind::olmo_legacy}) {
    const Value seen = Value::dict();
    Value(seen).set_item(Value(7), all_ones(DType::uint8, {4}));
    expect_unchanged(
        Value::dict({{"model", Value::dict({{"w", all_ones(DType::bfloat16, {5, 3})},
                                            {std::string(300, 'n'), all_ones(DType::int64, {1})},
                                            {"none", all_ones(DType::float16, {0, 4})}})},
                     {"train", Value::dict({{"seen", seen}})}}),
        kind);
  }
}

// What makes one checkpoint of another is tested by diff; what must not happen, here.
TEST(OlmoTargets, RefuseWhatTheyCannotHold) {
  const std::string work = temporary_directory();
  const std::string model = kGolden + "fsdp1_uop1_ws2/model.pt";
  const auto code = [&](const std::string& source, const ConvertOptions& options) {
    return code_of([&] { (void)convert(source, work + "/out", options); });
  };
  ConvertOptions options = to(CheckpointKind::olmo_local, 2);
  options.olmo.unit = "(";
  EXPECT_EQ(code(model, options), ErrorCode::invalid_argument);
  EXPECT_EQ(code(kGolden + "fsdp1_uop1_ws2/optim.pt", to(CheckpointKind::olmo_local, 2)),
            ErrorCode::mismatch);
  EXPECT_EQ(code(kGolden + "dtypes.safetensors", to(CheckpointKind::olmo_local, 2)),
            ErrorCode::unsupported);
  EXPECT_TRUE(fs::is_empty(work));
  // Only a checkpoint is replaced.
  write(work + "/out/diary.txt", "mine");
  options = to(CheckpointKind::olmo_legacy, 2);
  EXPECT_EQ(code(model, options), ErrorCode::already_exists);
  options.overwrite = true;
  EXPECT_EQ(code(model, options), ErrorCode::already_exists);
  EXPECT_EQ(content(work + "/out/diary.txt"), "mine");
  write(work + "/out/config.yaml", "");
  (void)convert(model, work + "/out", options);
  EXPECT_EQ(content(work + "/out/diary.txt"), "mine");  // beside it, as before
}

TEST(TrainingState, NamesTakeThePlaceOfNumbers) {
  const Value optim = Value::dict(
      {{"state", Value::dict({{1, Value::dict({{"step", 5}})}})},
       {"param_groups",
        Value::list({Value::dict(
            {{"lr", 0.1},
             {"params", Value::list({0, 1})},
             {"param_names", Value::list({"_fsdp_wrapped_module.a",
                                          "_fsdp_wrapped_module.b._fsdp_wrapped_module.c"})}})})}});
  const Value named = named_optim(optim);
  EXPECT_EQ(named.at("state").at("b.c").at("step").as_int(), 5);
  const Value& group = named.at("param_groups").items()[0];
  EXPECT_EQ(group.at("params"), Value::list({"a", "b.c"}));
  EXPECT_EQ(group.at("param_names"), Value::list({"a", "b.c"}));
  EXPECT_EQ(named_optim(named).identity(), named.identity());
  const Value nameless =
      Value::dict({{"state", Value::dict()},
                   {"param_groups", Value::list({Value::dict({{"params", Value::list({0})}})})}});
  EXPECT_EQ(code_of([&] { (void)named_optim(nameless); }), ErrorCode::mismatch);
  EXPECT_EQ(sharded::clean_name("_fsdp_wrapped_module"), "_fsdp_wrapped_module");
}

// The files of an OLMo checkpoint lie in its folders.
TEST(OlmoCheckpoint, MissingFilesHaveTheirNamesInTheDirectory) {
  const std::string directory = temporary_directory();
  fs::copy(kGolden + "variants/c2_multi", directory + "/model_and_optim");
  fs::remove(directory + "/model_and_optim/__0_0.distcp");
  const auto checkpoint = Checkpoint::open(directory);
  ASSERT_EQ(checkpoint.kind, CheckpointKind::olmo_torch_new);
  const auto rows = checkpoint.directory();
  const auto row = std::ranges::find(rows, "model_and_optim/__0_0.distcp", &FileRow::name);
  ASSERT_NE(row, rows.end());
  EXPECT_EQ(row->state, FileState::missing);
  EXPECT_THAT(
      checkpoint.warnings,
      testing::Contains(testing::HasSubstr("model_and_optim: a file is missing: __0_0.distcp")));
  const VerifyReport report = verify(directory);
  ASSERT_FALSE(report.findings.empty());
  EXPECT_EQ(report.findings[0].error.path(), directory + "/model_and_optim/__0_0.distcp");
  run_ranks(2, [&](Group& group) {
    LoadOptions options;
    options.reader = LoadReader::rank_zero;
    Value tree = Value::dict({{"s0", counting({5, 3}, whole({5, 3}), -1, false)}});
    try {
      (void)load(tree, directory, options, group);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_THAT(error.path(), testing::HasSubstr("model_and_optim/__0_0.distcp"));
    }
  });
}

}  // namespace
}  // namespace tessera
