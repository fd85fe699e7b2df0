// Sets of safetensors files: what an index and shards say, and what is wrong with damaged ones
// (F-07, reliability J01 to J08).
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>

#include "checkpoint/open/tree.h"
#include "checkpoint/read/safetensors_digests.h"
#include "checkpoint/test_support.h"
#include "format/safetensors/safetensors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)

const char* const kIndex = "/model.safetensors.index.json";
const char* const kFirst = "/model-00001-of-00002.safetensors";
const char* const kSecond = "/model-00002-of-00002.safetensors";

void patch(const std::string& path, const std::string& from, const std::string& to) {
  std::string text = text_of(path);
  ASSERT_NE(text.find(from), std::string::npos);
  write_text(path, text.replace(text.find(from), from.size(), to));
}

// The consolidated files come with the ranks' own in a folder: those are not counted again.
TEST(SafetensorsSet, FollowsTheIndex) {
  const Checkpoint checkpoint = Checkpoint::open(kGolden + "c2_hf_cons");
  EXPECT_EQ(checkpoint.leaves.size(), 7U);
  EXPECT_EQ(checkpoint.files.size(), 3U);
  EXPECT_TRUE(checkpoint.warnings.empty());
  EXPECT_EQ(Checkpoint::open(kGolden + "c2_hf_cons" + kIndex).leaves.size(), 7U);
  EXPECT_TRUE(diff(checkpoint, Checkpoint::open(kGolden + "c2_hf_cons/sharded")).size() ==
              1U);  // OQ-12
}

// OQ-12: consolidation turned the scalar 3 into 0; the shards still have it.
TEST(SafetensorsSet, ShardsAreReadFromTheirOffsets) {
  const Checkpoint checkpoint = Checkpoint::open(kGolden + "c2_hf_dist");
  EXPECT_EQ(checkpoint.world_size, 2);
  const Value tree = checkpoint.load();
  EXPECT_EQ(floats(tree.at("step").as_tensor()), std::vector<float>{3});
  EXPECT_EQ(tree.at("s1").as_tensor().shape, (Shape{3, 4}));
  EXPECT_EQ(floats(tree.at("s1").as_tensor()),
            (std::vector<float>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(checkpoint.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
}

// P-27: PyTorch's reader counts both.
TEST(SafetensorsSet, WholeTensorsComeBeforeShards) {
  const std::string directory = copy_of(kGolden + "c2_hf_cons");
  for (const auto& entry : fs::directory_iterator(directory + "/sharded")) {
    fs::copy_file(entry.path(), directory / entry.path().filename());
  }
  const Checkpoint indexed = Checkpoint::open(directory);
  EXPECT_EQ(indexed.leaves.size(), 7U);
  EXPECT_EQ(indexed.warnings.size(), 1U);
  fs::remove(directory + kIndex);
  const Checkpoint mixed = Checkpoint::open(directory);
  EXPECT_EQ(mixed.leaves.size(), 7U);
  EXPECT_EQ(mixed.warnings.size(), 1U);
  EXPECT_TRUE(diff(indexed, mixed).empty());
}

TEST(SafetensorsSet, ShardsOfTwoSavesInOneDirectory) {
  const std::string missing = copy_of(kGolden + "c2_hf_dist");
  fs::remove(missing + "/shard-00001-model-00001-of-00001.safetensors");
  EXPECT_EQ(open_code(missing), ErrorCode::incomplete);
  const std::string twice = copy_of(kGolden + "c2_hf_dist");
  fs::copy_file(twice + "/shard-00001-model-00001-of-00001.safetensors",
                twice + "/old.safetensors");
  EXPECT_EQ(open_code(twice), ErrorCode::conflict);
  const std::string types = copy_of(kGolden + "c2_hf_dist");
  patch(types + "/shard-00001-model-00001-of-00001.safetensors",
        "\"dtype\":\"F32\",\"shape\":[3,3]", "\"dtype\":\"I32\",\"shape\":[3,3]");
  EXPECT_EQ(open_code(types), ErrorCode::corrupt);
}

TEST(SafetensorsSet, J01AnIndexThatLeavesTheDirectory) {
  const std::string directory = copy_of(kGolden + "c2_hf_cons");
  patch(directory + kIndex, "model-00001-of-00002.safetensors", "../model.safetensors");
  EXPECT_EQ(open_code(directory), ErrorCode::unsafe);
}

// Links out of the directory, except those of the hub's cache.
TEST(SafetensorsSet, J01LinksThatLeaveTheDirectory) {
  const std::string root = temporary_directory() + "/models--x";
  fs::create_directories(root + "/blobs");
  fs::create_directories(root + "/snapshots");
  fs::copy(kGolden + "c2_hf_cons", root + "/snapshots/revision", fs::copy_options::recursive);
  const std::string directory = root + "/snapshots/revision";
  fs::rename(directory + kFirst, root + "/blobs/0123");
  fs::create_symlink("../../blobs/0123", directory + kFirst);
  EXPECT_EQ(Checkpoint::open(directory).leaves.size(), 7U);
  EXPECT_EQ(Checkpoint::open(directory + kFirst).leaves.size(), 2U);
  fs::rename(root + "/snapshots", root + "/other");
  EXPECT_EQ(open_code(root + "/other/revision"), ErrorCode::unsafe);
}

TEST(SafetensorsSet, J02FilesThatContradictTheIndex) {
  const std::string two = copy_of(kGolden + "c2_hf_cons");
  fs::copy_file(two + kFirst, two + kSecond, fs::copy_options::overwrite_existing);
  EXPECT_EQ(open_code(two), ErrorCode::incomplete);  // of what only the second one had
  const std::string without = copy_of(kGolden + "c2_hf_cons");
  patch(without + kIndex, "\"s0\"", "\"s9\"");
  EXPECT_EQ(open_code(without), ErrorCode::incomplete);
  const std::string elsewhere = copy_of(kGolden + "c2_hf_cons");
  patch(elsewhere + kIndex, "\"s0\": \"model-00001", "\"s0\": \"model-00002");
  EXPECT_EQ(open_code(elsewhere), ErrorCode::incomplete);
  const std::string more = copy_of(kGolden + "c2_hf_cons");
  patch(more + kIndex, "\"s0\": \"model-00001-of-00002.safetensors\",", "");
  EXPECT_EQ(Checkpoint::open(more).leaves.size(), 7U);
  EXPECT_EQ(Checkpoint::open(more).warnings.size(), 2U);  // and the sizes do not add up
}

TEST(SafetensorsSet, J03AWrongTotal) {
  const std::string directory = copy_of(kGolden + "c2_hf_cons");
  patch(directory + kIndex, "\"total_size\": 176", "\"total_size\": 177");
  EXPECT_EQ(Checkpoint::open(directory).warnings.size(), 1U);
  const VerifyReport report = verify(directory);
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
}

TEST(SafetensorsSet, J07AShardThatIsTooShort) {
  const std::string directory = copy_of(kGolden + "c2_hf_cons");
  fs::resize_file(directory + kSecond, fs::file_size(directory + kSecond) - 1);
  EXPECT_EQ(open_code(directory), ErrorCode::incomplete);
}

TEST(SafetensorsSet, J08FilesThatAreMissingOrTooMany) {
  const std::string missing = copy_of(kGolden + "c2_hf_cons");
  fs::remove(missing + kSecond);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(missing).load(); }), ErrorCode::incomplete);
  EXPECT_EQ(verify(missing).findings.size(), 1U);
  fs::remove(missing + kIndex);
  EXPECT_EQ(open_code(missing), ErrorCode::incomplete);  // 1 of 2 by their names
  fs::remove(missing + kFirst);
  write_text(missing + kIndex, text_of(kGolden + "c2_hf_cons" + kIndex));
  EXPECT_EQ(open_code(missing), ErrorCode::incomplete);

  const std::string both = copy_of(kGolden + "c2_hf_cons");
  fs::copy_file(both + kFirst, both + "/model.safetensors");
  EXPECT_EQ(open_code(both), ErrorCode::conflict);
  EXPECT_EQ(Checkpoint::open(both, {.ignore_index = true}).leaves.size(), 2U);
}

TEST(SafetensorsSet, AnyNames) {
  const std::string directory = copy_of(kGolden + "c2_hf_cons");
  fs::rename(directory + kFirst, directory + "/one.safetensors");
  fs::rename(directory + kSecond, directory + "/two.safetensors");
  fs::remove(directory + kIndex);
  EXPECT_EQ(Checkpoint::open(directory).leaves.size(), 7U);
}

TEST(SafetensorsSet, SeveralIndices) {
  const std::string directory = copy_of(kGolden + "c2_hf_cons");
  fs::rename(directory + kIndex, directory + "/a.safetensors.index.json");
  EXPECT_EQ(Checkpoint::open(directory).leaves.size(), 7U);
  fs::copy_file(directory + "/a.safetensors.index.json", directory + "/b.safetensors.index.json");
  EXPECT_EQ(open_code(directory), ErrorCode::conflict);
  EXPECT_EQ(Checkpoint::open(directory + "/b.safetensors.index.json").leaves.size(), 7U);
}

ConvertOptions sharded(std::uint64_t bytes) {
  ConvertOptions options;
  options.max_shard_size = bytes;
  return options;
}

// The tree in the first file names tensors of all.
TEST(SafetensorsSet, OwnSetsWithoutOneOfTheirFiles) {
  const std::string source = kGolden + "checkpoints/c1";
  const std::string whole_set = temporary_directory() + "/set";
  (void)convert(source, whole_set, sharded(20));
  const auto tensors = Checkpoint::open(source).names();
  for (const ObjectInfo& file : Checkpoint::open(whole_set).files) {
    if (!file.name.ends_with(".safetensors")) continue;
    const std::string directory = copy_of(whole_set);
    fs::remove(directory + "/" + file.name);
    const Checkpoint checkpoint = Checkpoint::open(directory);
    EXPECT_EQ(verify(directory).findings.size(), 1U) << file.name;
    if (!checkpoint.has_types) continue;  // the tree was in that file
    EXPECT_EQ(checkpoint.names(), tensors);
    const auto here = Checkpoint::open(directory, {.partial = true}).names();
    EXPECT_LT(here.size(), tensors.size());
    for (const std::string& name : here) {
      EXPECT_TRUE(diff(checkpoint.only({name}), Checkpoint::open(source).only({name})).empty())
          << name;
    }
  }
}

// 36 + 48 + 12 + 4 ... bytes of float: the next tensor never makes a file larger than asked for.
TEST(SafetensorsSet, IsWrittenWithAnIndex) {
  const std::string target = temporary_directory() + "/set";
  const std::string source = kGolden + "c2_hf_dist";
  (void)convert(source, target, sharded(64));
  const Checkpoint checkpoint = Checkpoint::open(target);
  EXPECT_TRUE(checkpoint.warnings.empty());
  EXPECT_TRUE(diff(Checkpoint::open(source), checkpoint).empty());
  EXPECT_TRUE(verify(target).findings.empty());
  std::size_t files = 0;
  for (const ObjectInfo& file : checkpoint.files) {
    if (!file.name.ends_with(".safetensors")) continue;
    std::uint64_t bytes = 0;
    const Checkpoint one = Checkpoint::open(target + "/" + file.name);
    for (const Leaf& leaf : one.leaves)
      bytes += static_cast<std::uint64_t>(numel(leaf.value.as_tensor().shape)) * 4;
    EXPECT_TRUE(bytes <= 64) << file.name;
    ++files;
  }
  EXPECT_EQ(files, 3U);
  EXPECT_TRUE(fs::exists(target + "/model-00001-of-00003.safetensors"));
  EXPECT_EQ(code_of([&] { (void)convert(source, target, sharded(64)); }),
            ErrorCode::already_exists);
  ConvertOptions larger = sharded(1 << 20);
  larger.overwrite = true;  // the whole directory is replaced
  (void)convert(source, target, larger);
  EXPECT_EQ(Checkpoint::open(target).files.size(), 1U);
}

TEST(SafetensorsSet, OneFileHasNoIndex) {
  const std::string target = temporary_directory() + "/set";
  (void)convert(kGolden + "c2_hf_dist", target, sharded(1 << 20));
  EXPECT_TRUE(fs::exists(target + "/model.safetensors"));
  EXPECT_FALSE(fs::exists(target + kIndex));
}

// A tree of containers and values in several files.
TEST(SafetensorsSet, KeepsTheTree) {
  const std::string root = temporary_directory();
  const std::string source = kGolden + "checkpoints/c1";
  (void)convert(source, root + "/set", sharded(16));
  const Checkpoint set = Checkpoint::open(root + "/set");
  EXPECT_TRUE(diff(Checkpoint::open(source), set).empty());
  EXPECT_TRUE(set.tree() == Checkpoint::open(source).tree());
}

TEST(SafetensorsSet, AFailureLeavesNothing) {
  const std::string root = temporary_directory();
  const std::string source = copy_of(kGolden + "checkpoints/c1");
  std::string text = text_of(source + "/__0_0.distcp");
  const std::size_t at = text.find("archive/data/0");
  ASSERT_NE(at, std::string::npos);
  for (std::size_t i = text.size() / 2; i < text.size() / 2 + 2000; ++i) text[i] = 'x';
  write_text(source + "/__0_0.distcp", text);
  EXPECT_THROW((void)convert(source, root, sharded(16)), Error);
  EXPECT_TRUE(fs::is_empty(root));
}

TEST(SafetensorsSet, ATargetThatNamesAFileIsRefused) {
  const std::string target = temporary_directory() + "/a.safetensors";
  EXPECT_EQ(code_of([&] { (void)convert(kGolden + "c2_hf_dist", target, sharded(64)); }),
            ErrorCode::invalid_argument);
}

// A file of the reference library keeps its metadata, the order of its tensors and their bytes;
// the digests are all that is added.
TEST(SafetensorsSet, MetadataIsKept) {
  const std::string target = temporary_directory() + "/a.safetensors";
  const std::string source = kGolden + "dtypes.safetensors";
  (void)convert(source, target);
  const auto header_of = [](const std::string& path) {
    const fs::path file(path);
    return safetensors::read_header(
        *posix_store(file.parent_path())->open(file.filename().string()));
  };
  safetensors::Header theirs = header_of(source);
  safetensors::Header ours = header_of(target);
  EXPECT_EQ(
      std::erase_if(ours.metadata, [](const auto& entry) { return is_digest_key(entry.first); }),
      2U);
  EXPECT_EQ(ours.metadata, theirs.metadata);
  const auto order = [](const safetensors::Header& header) {
    std::vector<std::pair<std::string, std::uint64_t>> names;
    for (const auto& entry : header.entries) names.emplace_back(entry.name, entry.begin);
    return names;
  };
  EXPECT_EQ(order(ours), order(theirs));
  EXPECT_EQ(text_of(target).substr(ours.data_offset), text_of(source).substr(theirs.data_offset));
}

TEST(SafetensorsSet, TheHeaderLimitIsTheCallers) {
  OpenOptions options;
  options.header_limit = 64;
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(kGolden + "c2_hf_cons", options); }),
            ErrorCode::limit);
}

// Tied tensors ------------------------------------------------------------------------------------

// "a", "m.b" and "z" are one tensor, "y" is another one with the same elements, "x" a part of it.
Value tied_tree() {
  const Tensor shared = counting({6, 2}, whole({6, 2}), 1);
  Tensor rows = counting({3, 2}, whole({3, 2}), 1);
  rows.pieces[0].storage = shared.pieces[0].storage;
  Value tree = Value::dict({{"z", Value(Tensor(shared))},
                            {"y", counting({6, 2}, whole({6, 2}), 1)},
                            {"x", std::move(rows)},
                            {"a", Value(Tensor(shared))},
                            {"m", Value::dict({{"b", Value(Tensor(shared))}})}});
  return tree;
}

std::vector<std::string> stored_names(const std::string& path) {
  const auto store = posix_store(fs::path(path).parent_path().string());
  std::vector<std::string> names;
  for (const auto& entry :
       safetensors::read_header(*store->open(fs::path(path).filename().string())).entries)
    names.push_back(entry.name);
  std::ranges::sort(names);
  return names;
}

std::string tied_file() {
  const std::string path = temporary_directory() + "/tied.safetensors";
  save(tied_tree(), path);
  return path;
}

using Names = std::vector<std::string>;
using Notes = std::map<std::string, std::string>;

Notes notes_in(const std::string& path) {
  Notes notes = Checkpoint::open(path).metadata;
  notes.erase("format");
  return notes;
}

TEST(Tied, TensorsAreWrittenOnceUnderTheFirstOfTheirNames) {
  const std::string path = tied_file();
  EXPECT_EQ(stored_names(path), (Names{"a", "x", "y"}));
  EXPECT_EQ(notes_in(path), (Notes{{"m.b", "a"}, {"z", "a"}}));
  const Checkpoint checkpoint = Checkpoint::open(path);
  EXPECT_EQ(checkpoint.names(), (Names{"a", "m.b", "x", "y", "z"}));
  const Value tree = checkpoint.load();
  const std::vector<float> expected = floats(tree.at("y").as_tensor());
  EXPECT_EQ(floats(tree.at("m").at("b").as_tensor()), expected);
  EXPECT_EQ(floats(tree.at("z").as_tensor()), expected);
}

TEST(Tied, TensorsFollowTheirNames) {
  const std::string path = tied_file();
  const std::string target = temporary_directory() + "/t.safetensors";
  const auto converted = [&](ConvertOptions how) {
    how.overwrite = true;
    convert(path, target, how);
    return stored_names(target);
  };
  EXPECT_EQ(converted({}), (Names{"a", "x", "y"}));
  EXPECT_EQ(notes_in(target), (Notes{{"m.b", "a"}, {"z", "a"}}));
  ConvertOptions part;
  part.only = {"z", "m"};
  EXPECT_EQ(converted(part), Names{"m.b"});
  EXPECT_EQ(notes_in(target), (Notes{{"z", "m.b"}}));
  ConvertOptions named;
  named.rename = {"^a$=>zz"};
  named.dtype = DType::float16;
  EXPECT_EQ(converted(named), (Names{"m.b", "x", "y"}));
  EXPECT_EQ(notes_in(target), (Notes{{"z", "m.b"}, {"zz", "m.b"}}));
  ConvertOptions all;
  all.keep_duplicates = true;
  EXPECT_EQ(converted(all), (Names{"a", "m.b", "x", "y", "z"}));
  EXPECT_EQ(notes_in(target), Notes());
}

TEST(Tied, TensorsComeBackAsOne) {
  const std::string target = temporary_directory() + "/t.pt";
  ConvertOptions how;
  how.to = CheckpointKind::torch_file;
  convert(tied_file(), target, how);
  const Value tree = Checkpoint::open(target).tree();
  const auto storage_of = [&](const Value& value) { return value.as_tensor().pieces[0].storage; };
  EXPECT_EQ(storage_of(tree.at("z")), storage_of(tree.at("a")));
  EXPECT_EQ(storage_of(tree.at("m").at("b")), storage_of(tree.at("a")));
  EXPECT_NE(storage_of(tree.at("y")), storage_of(tree.at("a")));
  EXPECT_TRUE(diff(Checkpoint::open(target), Checkpoint::open(tied_file())).empty());
}

// An optimizer adds to each parameter's own.
TEST(Tied, StepsAreNot) {
  const Tensor step = counting({}, whole({}), 3);
  const std::string path = temporary_directory() + "/steps.safetensors";
  save(Value::dict({{"a.step", Value(Tensor(step))}, {"b.step", Value(Tensor(step))}}), path);
  EXPECT_EQ(stored_names(path), (Names{"a.step", "b.step"}));
  const std::string target = temporary_directory() + "/steps.pt";
  ConvertOptions how;
  how.to = CheckpointKind::torch_file;
  convert(path, target, how);
  const Value tree = Checkpoint::open(target).tree();
  EXPECT_NE(tree.at("a.step").as_tensor().pieces[0].storage,
            tree.at("b.step").as_tensor().pieces[0].storage);
}

TEST(Tied, TensorsInASetAreNotedBesideTheirElements) {
  const std::string target = temporary_directory() + "/set";
  ConvertOptions how;
  how.max_shard_size = 100;  // "a" and "x" have 48 and 24 bytes, "y" 48
  convert(tied_file(), target, how);
  const Checkpoint checkpoint = Checkpoint::open(target);
  EXPECT_TRUE(checkpoint.warnings.empty());
  EXPECT_EQ(checkpoint.names(), (Names{"a", "m.b", "x", "y", "z"}));
  EXPECT_TRUE(verify(target).findings.empty());
  EXPECT_TRUE(diff(checkpoint, Checkpoint::open(tied_file())).empty());
}

// What a file says of itself may be the name of a tensor; of another one's it would be a note.
TEST(Tied, MetadataIsNoNoteByChance) {
  const auto file_of = [](std::map<std::string, std::string> metadata, const Names& names) {
    Checkpoint source;
    source.kind = CheckpointKind::safetensors;
    source.path = "memory";
    source.metadata = std::move(metadata);
    float first = 0;
    for (const std::string& name : names)
      source.leaves.push_back({name, Path{name}, Value(counting({2}, whole({2}), first += 10))});
    const std::string target = temporary_directory() + "/t.safetensors";
    convert(source, target, {});
    return target;
  };
  const std::string chance = file_of({{"license", "a"}, {"x.y", "y"}}, {"a", "x.y", "y"});
  EXPECT_EQ(Checkpoint::open(chance).names(), (Names{"a", "x.y", "y"}));
  EXPECT_EQ(Checkpoint::open(chance).warnings.size(), 1U);  // of the license
  ConvertOptions part;
  part.only = {"a", "y"};
  const std::string target = temporary_directory() + "/part.safetensors";
  const ConvertReport report = convert(chance, target, part);
  EXPECT_EQ(Checkpoint::open(target).names(), (Names{"a", "y"}));
  EXPECT_EQ(notes_in(target), (Notes{{"license", "a"}}));
  ASSERT_EQ(report.notes.size(), 1U);
  EXPECT_NE(report.notes[0].find("'x.y' is left out"), std::string::npos) << report.notes[0];
}

// As save_model writes them: {"lm_head.weight": "embed.weight"}, or names that end otherwise.
TEST(Tied, NotesOfOthersAreTaken) {
  const std::vector<Leaf> leaves = {{"embed.weight", {}, Value(counting({2}, whole({2}), 1))},
                                    {"w", {}, Value(counting({2}, whole({2}), 3))}};
  tessera::Notes notes(leaves);
  notes.add({{"format", "pt"},
             {"lm_head.weight", "embed.weight"},
             {"out.kernel", "embed.weight"},
             {"w", "embed.weight"},
             {"title", "w"},
             {"base", "absent"}});
  const std::vector<Leaf> noted = notes.take();
  ASSERT_EQ(noted.size(), 2U);
  EXPECT_EQ(noted[0].name, "lm_head.weight");
  EXPECT_EQ(noted[1].name, "out.kernel");
  const std::vector<std::string> doubts = notes.take_doubts();
  ASSERT_EQ(doubts.size(), 1U);  // what is not taken is said
  EXPECT_NE(doubts[0].find("'title' is the name of the tensor 'w'"), std::string::npos);
}

// A small set with many notes of one tensor in many shards is no bomb.
TEST(Tied, NotesShareWhatTheyAreTiedTo) {
  std::vector<Leaf> leaves = {{"w", Path{"w"}, Value(counting({2}, whole({2}), 1))}};
  std::map<std::string, std::string> metadata = {{"tessera.ties", "1"}};
  for (int i = 0; i < 1000; ++i) metadata.emplace("n" + std::to_string(i), "w");
  tessera::Notes notes(leaves);
  for (int file = 0; file < 3; ++file) notes.add(metadata);
  const std::vector<Leaf> noted = notes.take();
  ASSERT_EQ(noted.size(), 1000U);
  EXPECT_EQ(noted.front().value.identity(), noted.back().value.identity());
  EXPECT_NE(noted.front().value.identity(), leaves[0].value.identity());
}

// A file that notes what it has, what is not there, and what the metadata has a meaning for.
TEST(Tied, NotesThatMeanSomethingElse) {
  Tensor shared = counting({2}, whole({2}), 1);
  Checkpoint source;
  source.kind = CheckpointKind::safetensors;
  source.path = "memory";
  source.metadata = {{"z", "a note"}, {"y", "a"}, {"none", "absent"}};
  for (const char* name : {"a", "z", "format"})
    source.leaves.push_back({name, Path{name}, Value(Tensor(shared))});
  source.leaves.push_back({"y", Path{"y"}, Value(counting({2}, whole({2}), 5))});
  const std::string target = temporary_directory() + "/t.safetensors";
  convert(source, target, {});
  EXPECT_EQ(stored_names(target), (Names{"a", "format", "y", "z"}));
  EXPECT_EQ(notes_in(target), source.metadata);
  EXPECT_EQ(Checkpoint::open(target).names(), (Names{"a", "format", "y", "z"}));
}

}  // namespace
}  // namespace tessera
