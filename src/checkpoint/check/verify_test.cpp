#include "checkpoint/check/verify.h"

#include <filesystem>
#include <fstream>

#include "checkpoint/open/kinds.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/test_support.h"

namespace tessera {

// Digests of our own checkpoints and of sealed ones (M09, M15, D05, D08): what was changed is
// refused on every way in.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

constexpr std::int64_t kRows = 600;
constexpr std::int64_t kColumns = 1000;

// 2.4 MB in two ranks' files, so that files have several blocks; elements from `first` on.
std::string saved(float first, const std::string& directory = temporary_directory() + "/c") {
  run_ranks(2, [&](Group& group) {
    const Shape shape = {kRows, kColumns};
    Value tree = Value::dict();
    tree.set_item("w", Value(counting(shape, chunk(shape, group.rank(), 2), first)));
    tree.set_item("step", Value(3));
    SaveOptions options;
    options.overwrite = true;
    options.threads = 1;
    save(tree, directory, options, group);
  });
  return directory;
}

std::vector<std::string> files_with(const std::string& directory, const std::string& part) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().filename().string().find(part) != std::string::npos)
      found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

void flip(const std::string& path, std::int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ 4);
  file.seekp(at);
  file.put(byte);
}

// Every way in refuses with `code`.
void expect_refused(const std::string& path, ErrorCode code) {
  const VerifyReport report = verify(path);
  ASSERT_FALSE(report.findings.empty()) << path;
  EXPECT_EQ(report.findings[0].code, code) << report.findings[0].text;
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(path).load(); }), code);
  const std::string target = temporary_directory() + "/a.pt";
  ConvertOptions options;
  options.to = CheckpointKind::torch_file;
  EXPECT_EQ(code_of([&] { convert(path, target, options); }), code);
  EXPECT_FALSE(fs::exists(target));
  EXPECT_EQ(code_of([&] { (void)diff(Checkpoint::open(path), Checkpoint::open(path)); }), code);
}

TEST(SideFile, ThereAndBack) {
  SideFile side_file{"id", "someone", {{"a", {kDigestBlock + 1, {1, ~std::uint64_t{0}}, 0}}}};
  const SideFile back = decode_side_file(encode_side_file(side_file));
  EXPECT_EQ(back.save_id, "id");
  EXPECT_EQ(back.producer, "someone");
  EXPECT_EQ(back.files.at("a").size, kDigestBlock + 1);
  EXPECT_EQ(back.files.at("a").blocks, side_file.files.at("a").blocks);
}

// Looking at all names for each of them would take longer than tests may.
TEST(SideFile, MayNameVeryManyFiles) {
  constexpr int kFiles = 300000;
  SideFile side_file{"id", "someone", {}};
  for (int i = 0; i < kFiles; ++i) side_file.files["f" + std::to_string(i)] = {3, {7}, 0};
  side_file.types = R"({"version": 1, "leaves": [], "containers": []})";
  const SideFile back = decode_side_file(encode_side_file(side_file));
  EXPECT_EQ(back.files.size(), side_file.files.size());
  EXPECT_EQ(back.files.at("f299999").size, 3U);
  std::string members;
  for (int i = 0; i < kFiles; ++i) members += ", \"m" + std::to_string(i) + "\": 0";
  side_file.types.insert(side_file.types.size() - 1, members);
  std::vector<Leaf> leaves;
  add_types(side_file.types, leaves);
  EXPECT_TRUE(leaves.empty());
}

TEST(SideFile, EveryChangedByteIsCorrupt) {
  const std::string text = encode_side_file({"id", "someone", {{"a", {3, {7}, 0}}}});
  for (std::size_t at = 0; at < text.size(); ++at) {
    std::string changed = text;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_EQ(code_of([&] { (void)decode_side_file(changed); }), ErrorCode::corrupt) << at;
    EXPECT_EQ(code_of([&] { (void)decode_side_file(text.substr(0, at)); }), ErrorCode::corrupt);
  }
}

TEST(SideFile, DigestsThatDoNotFitTheSizeAreCorrupt) {
  EXPECT_EQ(
      code_of([] {
        (void)decode_side_file(encode_side_file({"", "", {{"a", {kDigestBlock, {1, 2}, 0}}}}));
      }),
      ErrorCode::corrupt);
}

TEST(Sealed, WhatWeSaveIsCheckedAlsoInPart) {
  const std::string directory = saved(0);
  EXPECT_EQ(files_with(directory, "tessera-").size(), 1U);
  // A quarter of the columns: no item is read whole.
  Shape shape = {kRows, kColumns};
  Value tree = Value::dict({{Value("w"), Value(counting(shape, chunk(shape, 1, 4, 1), 0, false))}});
  const auto group = solo_group();
  const IoReport report = load(tree, directory, *group);
  EXPECT_EQ(report.bytes_unchecked, 0U);
  EXPECT_EQ(floats(tree.at("w").as_tensor()), floats(counting(shape, chunk(shape, 1, 4, 1), 0)));
  const VerifyReport verified = verify(directory);
  EXPECT_TRUE(verified.findings.empty());
  EXPECT_EQ(verified.bytes_unchecked, 0U);
}

TEST(Sealed, AnyFlippedByteIsRefused) {
  const std::string directory = saved(0);
  for (const std::string& file : files_with(directory, "")) {
    const auto size = static_cast<std::int64_t>(fs::file_size(file));
    for (const std::int64_t at : {std::int64_t{0}, size / 3, size - 1}) {
      flip(file, at);
      EXPECT_FALSE(verify(directory).findings.empty()) << file << " " << at;
      flip(file, at);
    }
  }
  EXPECT_TRUE(verify(directory).findings.empty());
  flip(files_with(directory, "__1_0").at(0), 400000);
  expect_refused(directory, ErrorCode::corrupt);
}

TEST(Sealed, SwappedFilesAreRefused) {  // D08
  const std::string directory = saved(0);
  const auto files = files_with(directory, ".distcp");
  ASSERT_EQ(fs::file_size(files.at(0)) == fs::file_size(files.at(1)), false);
  // The files have one size, so that only their content tells them apart.
  const std::string even = temporary_directory() + "/c";
  run_ranks(2, [&](Group& group) {
    const Shape shape = {kRows, kColumns};
    save(Value::dict({{Value("w"), Value(counting(shape, chunk(shape, group.rank(), 2), 0))}}),
         even, {.overwrite = false, .threads = 1, .progress = {}}, group);
  });
  const auto halves = files_with(even, ".distcp");
  ASSERT_EQ(fs::file_size(halves.at(0)), fs::file_size(halves.at(1)));
  fs::rename(halves[0], even + "/x");
  fs::rename(halves[1], halves[0]);
  fs::rename(even + "/x", halves[1]);
  expect_refused(even, ErrorCode::corrupt);
}

TEST(Sealed, AFileOfAnotherSaveIsRefused) {  // D05, M09
  const std::string older = saved(0);
  const std::string newer = saved(1);
  const std::string ours = files_with(newer, "__1_0").at(0);
  fs::copy_file(files_with(older, "__1_0").at(0), ours, fs::copy_options::overwrite_existing);
  expect_refused(newer, ErrorCode::corrupt);
}

TEST(Sealed, ASideFileOfAnotherSaveIsNoExcuse) {
  const std::string older = saved(0);
  const std::string newer = saved(1);
  const std::string ours = files_with(newer, "tessera-").at(0);
  fs::copy_file(files_with(older, "tessera-").at(0), ours, fs::copy_options::overwrite_existing);
  EXPECT_FALSE(verify(newer).findings.empty());
  // Under its own name it is another save's, but then it must not know our data files.
  fs::rename(ours, newer + "/tessera-0.json");
  EXPECT_TRUE(verify(newer).findings.empty());
  EXPECT_EQ(Checkpoint::open(newer).warnings.size(), 1U);
}

TEST(Sealed, AMetadataWhoseIdWasChangedIsRefused) {  // M15
  const std::string directory = saved(0);
  const std::string id = Checkpoint::open(directory).save_id;
  std::fstream file(directory + "/.metadata", std::ios::in | std::ios::out | std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), {});
  file.close();
  flip(directory + "/.metadata", static_cast<std::int64_t>(bytes.find(id)));
  expect_refused(directory, ErrorCode::corrupt);
}

TEST(Sealed, ASaveRemovesTheSideFilesOfThoseBeforeTheLast) {
  const std::string directory = saved(0);
  for (const float first : {1.0F, 2.0F, 3.0F}) saved(first, directory);
  EXPECT_EQ(files_with(directory, "tessera-").size(), 2U);  // the present one and the one before
  EXPECT_EQ(files_with(directory, ".distcp").size(), 4U);
  EXPECT_TRUE(verify(directory).findings.empty());
}

TEST(Sealed, ASafetensorsFileCarriesItsDigests) {
  const std::string root = temporary_directory();
  const std::string file = root + "/a.safetensors";
  convert(saved(0), file, {});
  const VerifyReport report = verify(file);
  EXPECT_TRUE(report.findings.empty());
  EXPECT_EQ(report.bytes_unchecked, 0U);
  const auto size = static_cast<std::int64_t>(fs::file_size(file));
  for (const std::int64_t at : {size / 3, size - 1}) {
    flip(file, at);
    expect_refused(file, ErrorCode::corrupt);
    flip(file, at);
  }
  const auto header = static_cast<std::int64_t>(
      Checkpoint::open(file).leaves.at(0).value.as_tensor().pieces.at(0).storage->offset);
  for (std::int64_t at = 0; at < header; ++at) {
    flip(file, at);
    EXPECT_FALSE(verify(file).findings.empty()) << at;
    flip(file, at);
  }
}

struct Directory {
  CheckpointKind kind;
  std::uint64_t max_shard_size;
  const char* damaged;  // part of the name of a file with elements
};

class SealedDirectory : public testing::TestWithParam<Directory> {
 protected:
  // A model whose elements begin with `first`, as this kind of directory.
  static std::string written(float first) {
    const std::string source = temporary_directory() + "/source";
    const Shape shape = {kRows, kColumns};
    const auto group = solo_group();
    Value model = Value::dict();
    model.set_item("a", Value(counting(shape, whole(shape), first)));
    model.set_item("b", Value(counting(shape, whole(shape), first)));
    save(Value::dict({{Value("model"), model}}), source, *group);
    ConvertOptions options;
    options.to = GetParam().kind;
    options.max_shard_size = GetParam().max_shard_size;
    options.ranks = row_of(options.to).is_split ? 2 : 1;
    const std::string target = temporary_directory() + "/target";
    convert(source, target, options);
    return target;
  }
};

TEST_P(SealedDirectory, FilesThatAreWholeButOfAnotherCheckpointAreRefused) {  // D05, D08
  const std::string older = written(0);
  const std::string newer = written(1);
  const VerifyReport report = verify(newer);
  EXPECT_TRUE(report.findings.empty()) << report.findings[0].text;
  EXPECT_EQ(report.bytes_unchecked, 0U);
  const std::string file = GetParam().damaged;
  fs::copy_file(older + "/" + file, newer + "/" + file, fs::copy_options::overwrite_existing);
  expect_refused(newer, ErrorCode::corrupt);
}

TEST_P(SealedDirectory, ItsConfigurationMayBeEdited) {
  const std::string directory = written(0);
  write_text(directory + "/config.yaml", "run_name: another\n");
  EXPECT_TRUE(verify(directory).findings.empty());
}

INSTANTIATE_TEST_SUITE_P(Kinds, SealedDirectory,
                         testing::Values(Directory{CheckpointKind::safetensors, 2'500'000,
                                                   "model-00001-of-00002.safetensors"},
                                         Directory{CheckpointKind::olmo_full, 0, "model.pt"},
                                         Directory{CheckpointKind::olmo_legacy, 0, "rank1.pt"},
                                         Directory{CheckpointKind::olmo_local, 0,
                                                   "model/rank0.pt"}));

// One of its files holds a value alone.
TEST(SealOwn, ASaveOfOursIsSealedAlready) {
  const std::string path = temporary_directory() + "/c";
  const std::vector<float> ones(12, 1.F);
  const auto w = ConstTensorView::of(ones.data(), DType::float32, {3, 4}).tensor();
  save(Value::dict({{"w", w}, {"step", Value::dict({{"a", 1}}, DictKind::ordered_dict)}, {5, 7}}),
       path);
  const std::string name = files_with(path, "tessera-").at(0);
  const auto written = fs::last_write_time(name);
  EXPECT_TRUE(seal(path).was_sealed);
  EXPECT_EQ(fs::last_write_time(name), written);
  const auto store = posix_store(path);
  SideFile less = read_side_file(*store, fs::path(name).filename().string());
  less.files.erase(fs::path(files_with(path, "__0_0").at(0)).filename().string());
  write_text(name, encode_side_file(less));
  EXPECT_FALSE(seal(path).was_sealed);
  const Value tree = Checkpoint::open(path).load();
  EXPECT_EQ(tree.at("step").dict_kind(), DictKind::ordered_dict);
  EXPECT_NE(tree.find_key(Value(5)), nullptr);
}

class Seal : public testing::TestWithParam<const char*> {
 protected:
  Seal() : path_(temporary_directory() + "/" + fs::path(GetParam()).filename().string()) {
    fs::copy(std::string(TESSERA_TEST_DATA) + "/golden/" + GetParam(), path_,
             fs::copy_options::recursive);
  }
  std::string path_;
};

TEST_P(Seal, AForeignCheckpointIsCheckedFromThenOn) {
  const SealReport report = seal(path_);
  EXPECT_FALSE(report.was_sealed);
  ASSERT_TRUE(fs::exists(report.side_file)) << report.side_file;
  const VerifyReport verified = verify(path_);
  EXPECT_TRUE(verified.findings.empty());
  EXPECT_EQ(verified.bytes, report.bytes);
  EXPECT_EQ(verified.bytes_unchecked, 0U);
  const auto written = fs::last_write_time(report.side_file);
  EXPECT_TRUE(seal(path_).was_sealed);
  EXPECT_EQ(fs::last_write_time(report.side_file), written);
  const Checkpoint checkpoint = Checkpoint::open(path_);
  for (const ObjectInfo& object : checkpoint.files) {
    const std::string file = checkpoint.store->name() + "/" + object.name;
    for (const std::uint64_t at : {object.size / 2, object.size - 1}) {
      flip(file, static_cast<std::int64_t>(at));
      EXPECT_FALSE(verify(path_).findings.empty()) << file << " " << at;
      flip(file, static_cast<std::int64_t>(at));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PyTorch, Seal,
                         testing::Values("checkpoints/g4_ws2", "checkpoints/hand",
                                         "checkpoints/c2_lowest", "c2_hf_cons", "train.pt",
                                         "nocrc.pt", "dtypes.safetensors"));

// JSON has no name for it: the side file would be of another file.
TEST(Seal, AFileWhoseNameIsNotUtf8IsNotSealed) {
  const std::string directory = temporary_directory() + "/d\x80";
  fs::create_directory(directory);
  const std::string path = directory + "/x\xff.pt";
  fs::copy(std::string(TESSERA_TEST_DATA) + "/golden/kinds.pt", path);
  EXPECT_EQ(code_of([&] { (void)seal(path); }), ErrorCode::unsupported);
  EXPECT_EQ(files_with(directory, "").size(), 1U);
  // One that has its digests in itself needs none.
  const std::string own = directory + "/y\xff.safetensors";
  save(Value(counting({2, 3}, Box{{0, 0}, {2, 3}}, 1)), own);
  EXPECT_TRUE(seal(own).was_sealed);
  fs::rename(path, directory + "/x.pt");
  (void)seal(directory + "/x.pt");
  (void)Checkpoint::open(directory + "/x.pt");
}

TEST(Seal, DamageIsNotSealed) {
  const std::string directory = temporary_directory() + "/c";
  fs::copy(std::string(TESSERA_TEST_DATA) + "/golden/checkpoints/g4_ws2", directory,
           fs::copy_options::recursive);
  const Checkpoint checkpoint = Checkpoint::open(directory);
  const Storage& storage =
      *checkpoint.find("app.model.net1.weight")->value.as_tensor().pieces.at(0).storage;
  flip(storage.source->name(), static_cast<std::int64_t>(storage.offset + storage.size / 2));
  EXPECT_EQ(code_of([&] { seal(directory); }), ErrorCode::corrupt);
  EXPECT_TRUE(files_with(directory, "tessera-").empty());
}

}  // namespace
}  // namespace tessera
