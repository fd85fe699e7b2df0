// What lies in a directory beside a checkpoint, and what of one is missing there
// (docs/guide/what-is-in-a-directory.md).
#include <gmock/gmock.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/open/directory.h"
#include "checkpoint/open/testing.h"
#include "tessera/copy.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(Directory, TheIndexDecidesWhereATensorLiesInTwoShards) {
  const std::string directory = two_shards();
  write_vectors(directory + "/A.safetensors",
                {{"a", {1, 2}}, {"b", {3}}, {"c", {9, 9}}, {"d", {7}}});
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(numbers_of(checkpoint, "c"), (std::vector<float>{4, 5, 6}));
  EXPECT_EQ(numbers_of(checkpoint, "d"), std::vector<float>{7});
  EXPECT_THAT(checkpoint.warnings,
              ElementsAre("the index does not name a tensor that the files have: d",
                          "A.safetensors: superseded, by what the index says: c"));
  EXPECT_TRUE(verify(directory).findings.empty());
}

TEST(Directory, WhatLiesInAMissingShardMattersToWhoAsks) {
  const std::string directory = two_shards();
  fs::remove(directory + "/B.safetensors");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(checkpoint.names("c*"), std::vector<std::string>{"c"});
  EXPECT_EQ(numbers_of(checkpoint, "a"), (std::vector<float>{1, 2}));
  EXPECT_EQ(state_of(checkpoint, "B.safetensors"), "missing");
  EXPECT_THAT(checkpoint.warnings, ElementsAre(HasSubstr("a file is missing: B.safetensors")));
  for (const std::function<void()>& work : std::vector<std::function<void()>>{
           [&] { (void)checkpoint.load(); }, [&] { (void)checkpoint.only({"c"}).load(); },
           [&] { (void)checkpoint.tensor("c"); }, [&] { checkpoint.require_files(); },
           [&] { (void)convert(directory, directory + "/out.pt", to_torch()); },
           [&] {
             Value tree = Value::dict({{"c", counting({3}, whole({3}), 0, false)}});
             (void)load(tree, directory);
           }}) {
    const Error error = error_of(work);
    EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
    EXPECT_EQ(error.key(), "c");
    EXPECT_THAT(error.path(), HasSubstr("B.safetensors"));
    EXPECT_THAT(error.message(), HasSubstr("--partial"));
  }
  EXPECT_FALSE(fs::exists(directory + "/out.pt"));
  const VerifyReport report = verify(directory);
  ASSERT_EQ(report.findings.size(), 1U);
  EXPECT_THAT(report.findings[0].text, HasSubstr("B.safetensors"));

  ConvertOptions options = to_torch();
  options.only = {"a"};
  (void)convert(directory, directory + "/a.pt", options);
  Value tree = Value::dict({{"b", counting({1}, whole({1}), 0, false)}});
  (void)load(tree, directory);
  EXPECT_EQ(floats(tree.at("b").as_tensor()), std::vector<float>{3});
}

// Its shape is what the shards reach to: without some of them it would be a smaller one.
TEST(Directory, OfATensorInShardsAllFilesAreNeeded) {
  const std::string directory = temporary_directory();
  write_one(directory + "/A.safetensors",
            R"({"DCP_SHARDING_INFO": "{\"t\": {\"saved_offsets\": [0]}}", "DCP_VERSION": "1.0"})",
            "t", {1, 2});
  write_map(directory + kIndexFile, {{"t", "A.safetensors"}, {"u", "B.safetensors"}});
  const auto checkpoint = Checkpoint::open(directory);
  for (const std::function<void()>& work : std::vector<std::function<void()>>{
           [&] { (void)checkpoint.tensor("t"); }, [&] { (void)checkpoint.only({"t"}).load(); }}) {
    const Error error = error_of(work);
    EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
    EXPECT_THAT(error.path(), HasSubstr("B.safetensors"));
  }
  EXPECT_EQ(verify(directory).findings.size(), 1U);
  const auto partial = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(partial.find("t"), nullptr);
  EXPECT_THAT(partial.warnings, Contains(HasSubstr("left out: t")));
}

// A note in the metadata of a file that is there is all that is known of the second name.
TEST(Directory, ATieToATensorInAMissingShardIsTold) {
  const std::string directory = temporary_directory();
  write_one(directory + "/A.safetensors", R"({"head.weight": "embed.weight"})", "a", {1, 2});
  write_map(directory + kIndexFile, {{"a", "A.safetensors"}, {"embed.weight", "B.safetensors"}});
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(code_of([&] { (void)checkpoint.tensor("head.weight"); }), ErrorCode::incomplete);
  const auto partial = Checkpoint::open(directory, {.partial = true});
  EXPECT_THAT(partial.warnings, ElementsAre(HasSubstr("left out: embed.weight, head.weight")));
}

TEST(Directory, CopiesOfASetNeedItsFiles) {
  const std::string directory = two_shards();
  fs::remove(directory + "/B.safetensors");
  const std::string target = temporary_directory() + "/to";
  const Error error = error_of([&] { (void)copy(directory, target); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.key(), "c");
  EXPECT_THAT(error.path(), HasSubstr("B.safetensors"));
  EXPECT_THAT(error.message(), HasSubstr("; --allow-incomplete copies what is there"));
  EXPECT_THAT(error.message(), testing::Not(HasSubstr("--partial")));
  EXPECT_FALSE(fs::exists(target + "/A.safetensors"));
  (void)copy(directory, target, {.allow_incomplete = true});
  EXPECT_TRUE(fs::exists(target + "/A.safetensors"));

  fs::remove(directory + kIndexFile);
  fs::rename(directory + "/A.safetensors", directory + "/model-00001-of-00002.safetensors");
  const std::string other = temporary_directory() + "/to";
  EXPECT_EQ(code_of([&] { (void)copy(directory, other); }), ErrorCode::incomplete);
  EXPECT_EQ(copy(directory, other, {.allow_incomplete = true}).files, 1U);
}

TEST(Directory, NumbersTellOfFilesWithoutAnIndex) {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/model-00002-of-00003.safetensors", {{"a", {1, 2}}});
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory); }), ErrorCode::incomplete);
  const auto partial = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(numbers_of(partial, "a"), (std::vector<float>{1, 2}));
  EXPECT_EQ(state_of(partial, "model-00001-of-00003.safetensors"), "missing");
  EXPECT_EQ(state_of(partial, "model-00003-of-00003.safetensors"), "missing");
  EXPECT_THAT(partial.warnings, ElementsAre(HasSubstr("2 files are missing: ")));
  fs::rename(directory + "/model-00002-of-00003.safetensors",
             directory + "/model-00002-of-00001.safetensors");
  write_vectors(directory + "/model-00001-of-00001.safetensors", {{"b", {3}}});
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory); }), ErrorCode::incomplete);
  EXPECT_THAT(Checkpoint::open(directory, {.partial = true}).warnings,
              ElementsAre("model-00002-of-00001.safetensors: its number is too large"));
}

TEST(Directory, PartsOfARankMayBeMissing) {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/model-rank-0-part-1.safetensors", {{"a", {1, 2}}});
  const Error error = error_of([&] { (void)Checkpoint::open(directory, {.rank = 0}); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.message(), HasSubstr("; --partial takes what is there"));
  const auto partial = Checkpoint::open(directory, {.partial = true, .rank = 0});
  EXPECT_EQ(numbers_of(partial, "a"), (std::vector<float>{1, 2}));
  EXPECT_EQ(state_of(partial, "model-rank-0-part-0.safetensors"), "missing");
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory, {.rank = -1}); }),
            ErrorCode::invalid_argument);
}

TEST(Directory, DigestsTellOfFilesWithoutAnIndex) {
  const std::string directory = temporary_directory();
  write_one(directory + "/model-00001-of-00002.safetensors", "{}", "a", {1, 2});
  write_one(directory + "/model-00002-of-00002.safetensors", "{}", "b", {3});
  write_one(directory + "/extra.safetensors", "{}", "c", {3});
  (void)seal(directory);
  fs::remove(directory + "/extra.safetensors");
  fs::remove(directory + "/model-00002-of-00002.safetensors");
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.message(), HasSubstr("when digests were made; --partial"));
  const auto partial = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(partial.names(), std::vector<std::string>{"a"});
  EXPECT_EQ(state_of(partial, "extra.safetensors"), "missing");
  EXPECT_EQ(state_of(partial, "model-00002-of-00002.safetensors"), "missing");
}

TEST(Directory, WithoutTheIndexAFileHasToBeLeft) {
  const std::string directory = temporary_directory();
  write_map(directory + kIndexFile, {{"a", "A.safetensors"}});
  const auto code = [&] {
    return code_of([&] { (void)Checkpoint::open(directory, {.ignore_index = true}); });
  };
  EXPECT_EQ(code(), ErrorCode::not_found);
  write_text(directory + "/pytorch_model.bin", "x");  // is beside the index's set
  EXPECT_EQ(code(), ErrorCode::not_found);
}

TEST(Directory, AnAdapterIsBesideAModelOfTorch) {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/x.safetensors", {{"a", {1, 2}}});
  (void)convert(directory + "/x.safetensors", directory + "/pytorch_model.bin", to_torch());
  fs::rename(directory + "/x.safetensors", directory + "/adapter_model.safetensors");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.kind, CheckpointKind::torch_file);
  EXPECT_EQ(state_of(checkpoint, "pytorch_model.bin"), "used");
  EXPECT_EQ(state_of(checkpoint, "adapter_model.safetensors"), "not part of it");
  EXPECT_THAT(checkpoint.warnings, Contains(HasSubstr("adapter_model.safetensors: not part")));
}

TEST(Directory, AnIndexOfAnotherFormIsBesideTheModel) {
  const std::string directory = temporary_directory();
  const std::string index = "consolidated.safetensors.index.json";
  write_vectors(directory + "/consolidated-00001-of-00001.safetensors", {{"x", {1}}});
  write_map(directory + "/" + index, {{"x", "consolidated-00001-of-00001.safetensors"}});
  EXPECT_EQ(Checkpoint::open(directory).names(), std::vector<std::string>{"x"});
  write_vectors(directory + "/model-00001-of-00001.safetensors", {{"a", {1}}});
  for (const bool single : {false, true}) {
    if (single)
      fs::rename(directory + "/model-00001-of-00001.safetensors", directory + "/model.safetensors");
    const auto checkpoint = Checkpoint::open(directory);
    EXPECT_EQ(checkpoint.names(), std::vector<std::string>{"a"});
    EXPECT_EQ(state_of(checkpoint, index), "not part of it");
    EXPECT_EQ(state_of(checkpoint, "consolidated-00001-of-00001.safetensors"), "not part of it");
  }
}

TEST(Directory, OffersOfOptionsThatNobodyHasAreLeftOut) {
  const Error error = Error(ErrorCode::corrupt, "a; --accept x passes; b: --rank R reads it")
                          .at_path("p")
                          .at_offset(3);
  const Error none = without_offers(error);
  EXPECT_EQ(none.message(), "a; b");
  EXPECT_EQ(none.path(), "p");
  EXPECT_EQ(none.offset(), 3U);
  EXPECT_EQ(
      without_offers(error, [](const std::string& name) { return name == "--rank"; }).message(),
      "a; b: --rank R reads it");
  EXPECT_EQ(without_offers(error, [](const std::string&) { return true; }).message(),
            error.message());
}

TEST(Directory, PartialTakesWhatIsThere) {
  const std::string directory = two_shards();
  fs::remove(directory + "/B.safetensors");
  const auto checkpoint = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(checkpoint.load().size(), 2U);
  EXPECT_THAT(checkpoint.warnings, ElementsAre("a file is missing: B.safetensors; left out: c"));
  EXPECT_TRUE(verify(directory, {.open = {.partial = true}}).findings.empty());
  ConvertOptions options = to_torch();
  options.open.partial = true;
  EXPECT_EQ(convert(directory, directory + "/a.pt", options).tensors, 2U);
}

TEST(Directory, AnIndexWithoutFilesSaysWhoElseHasAll) {
  const std::string directory = two_shards();
  fs::rename(directory + "/A.safetensors", directory + "/one.safetensors");
  fs::rename(directory + "/B.safetensors", directory + "/two.safetensors");
  write_text(directory + "/._one.safetensors", "no header of safetensors");
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.message(), HasSubstr("hold all 3 tensors: --ignore-index"));
  const auto checkpoint = Checkpoint::open(directory, {.ignore_index = true});
  EXPECT_EQ(numbers_of(checkpoint, "c"), (std::vector<float>{4, 5, 6}));
  fs::remove(directory + "/two.safetensors");
  EXPECT_THAT(error_of([&] { (void)Checkpoint::open(directory); }).message(),
              testing::Not(HasSubstr("--ignore-index")));
}

TEST(Directory, AStrayModelBesideAnIndexIsAConflict) {
  const std::string directory = two_shards();
  write_vectors(directory + "/model.safetensors", {{"a", {8, 8}}});
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_THAT(error.message(), HasSubstr("model.safetensors.index.json and model.safetensors"));
  EXPECT_EQ(numbers_of(Checkpoint::open(directory + kIndexFile), "a"), (std::vector<float>{1, 2}));
  EXPECT_EQ(numbers_of(Checkpoint::open(directory + "/model.safetensors"), "a"),
            (std::vector<float>{8, 8}));
  EXPECT_EQ(Checkpoint::open(directory, {.ignore_index = true}).leaves.size(), 1U);
  // An index that names it is about it.
  write_map(directory + kIndexFile, {{"a", "model.safetensors"}});
  EXPECT_EQ(numbers_of(Checkpoint::open(directory), "a"), (std::vector<float>{8, 8}));
}

TEST(Directory, OtherFormsOfAModelAreNotPartOfIt) {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/consolidated.safetensors", {{"x", {1}}});
  write_vectors(directory + "/adapter_model.safetensors", {{"y", {1}}});
  write_vectors(directory + "/model.safetensors", {{"a", {1, 2}}});
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.names(), std::vector<std::string>{"a"});
  EXPECT_EQ(state_of(checkpoint, "consolidated.safetensors"), "not part of it");
  EXPECT_THAT(checkpoint.warnings,
              ElementsAre(HasSubstr("adapter_model.safetensors, consolidated.safetensors: ")));
  fs::rename(directory + "/model.safetensors", directory + "/model-00001-of-00001.safetensors");
  EXPECT_EQ(Checkpoint::open(directory).names(), std::vector<std::string>{"a"});
  fs::remove(directory + "/model-00001-of-00001.safetensors");
  fs::remove(directory + "/adapter_model.safetensors");
  EXPECT_EQ(Checkpoint::open(directory).names(), std::vector<std::string>{"x"});
}

TEST(Directory, SeveralFilesOfTorchNeedTheirIndex) {
  const std::string directory = temporary_directory();
  const std::string index = directory + "/pytorch_model.bin.index.json";
  write_map(index, {{"a", "A.bin"}, {"b", "B.bin"}});
  const auto refusal = [&] {
    return error_of([&] { (void)Checkpoint::open(directory, {.ignore_index = true}); });
  };
  EXPECT_EQ(refusal().code(), ErrorCode::unsupported);
  EXPECT_THAT(refusal().message(), HasSubstr("0 .bin files"));
  ConvertOptions options = to_torch();
  for (const std::string name : {"a", "b"}) {
    const std::string made = fs::path(directory) / (name + ".safetensors");
    write_vectors(made, {{name, {1}}});
    options.overwrite = true;
    (void)convert(made, directory + (name == "a" ? "/A.bin" : "/B.bin"), options);
    fs::remove(made);
  }
  EXPECT_EQ(Checkpoint::open(directory).names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(refusal().code(), ErrorCode::unsupported);
  EXPECT_THAT(refusal().message(), HasSubstr("2 .bin files"));
  fs::remove(directory + "/B.bin");
  EXPECT_EQ(Checkpoint::open(directory, {.ignore_index = true}).names(),
            std::vector<std::string>{"a"});
}

TEST(Directory, HiddenFilesAreNotPartOfASetWithoutAnIndex) {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/w.safetensors", {{"a", {1}}});
  write_text(directory + "/._w.safetensors", "no header of safetensors");
  write_text(directory + "/consolidated", "a name that is no file of another form");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.names(), std::vector<std::string>{"a"});
  EXPECT_EQ(state_of(checkpoint, "._w.safetensors"), "not part of it");
}

TEST(Directory, FilesOfRanksThatDoNotSayHowTheyAreCut) {
  const std::string directory = temporary_directory();
  for (const char* rank : {"0", "1"}) {
    const std::string file = directory + "/model-rank-" + rank + "-part-";
    write_vectors(file + "0.safetensors", {{"a", {rank[0] == '0' ? 1.0F : 2.0F}}});
    write_vectors(file + "1.safetensors", {{"b", {3}}});
  }
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::unsupported);
  EXPECT_THAT(error.message(), HasSubstr("vLLM"));
  EXPECT_THAT(error.message(), HasSubstr("--rank R"));
  EXPECT_EQ(numbers_of(Checkpoint::open(directory, {.rank = 1}), "a"), std::vector<float>{2});
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory, {.rank = 2}); }), ErrorCode::not_found);
  fs::remove(directory + "/model-rank-1-part-0.safetensors");
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory, {.rank = 1}); }),
            ErrorCode::incomplete);
}

TEST(Directory, EachFileThatIsCutShortIsTold) {
  const std::string directory = two_shards();
  for (const char* name : {"/A.safetensors", "/B.safetensors"})
    fs::resize_file(directory + name, fs::file_size(directory + name) - 3);
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.path(), HasSubstr("A.safetensors"));
  EXPECT_THAT(error.message(), HasSubstr("the file lacks 3 bytes at its end; and "));
  EXPECT_THAT(error.message(), HasSubstr("B.safetensors: "));
}

TEST(Directory, BytesBehindTheLastTensorCanBePassedOver) {
  const std::string path = temporary_directory() + "/x.safetensors";
  write_vectors(path, {{"a", {1, 2}}});
  write_text(path, text_of(path) + std::string(16, '\0'));
  const Error error = error_of([&] { (void)Checkpoint::open(path); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_THAT(error.message(),
              HasSubstr("16 bytes after the last tensor; --accept trailing-bytes"));
  const auto checkpoint = Checkpoint::open(path, {.accept = {"trailing-bytes"}});
  EXPECT_EQ(numbers_of(checkpoint, "a"), (std::vector<float>{1, 2}));
  EXPECT_THAT(checkpoint.warnings, ElementsAre(HasSubstr("16 bytes after the last tensor")));
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(path, {.accept = {"all"}}); }),
            ErrorCode::invalid_argument);
}

TEST(Directory, ADataFileThatIsOnAnotherNode) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  fs::remove(directory + "/__0_0.distcp");
  fs::remove(directory + "/__0_2.distcp");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(state_of(checkpoint, "__0_0.distcp"), "missing");
  EXPECT_EQ(numbers_of(checkpoint, "plain"),
            numbers_of(Checkpoint::open(kGolden + "variants/c2_multi"), "plain"));
  const Error error = error_of([&] { (void)checkpoint.only({"s0"}).load(); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.key(), "s0");
  EXPECT_THAT(error.path(), HasSubstr("__0_0.distcp"));
  const VerifyReport report = verify(directory);
  ASSERT_EQ(report.findings.size(), 2U);
  EXPECT_THAT(report.findings[0].text, HasSubstr("s0"));
  EXPECT_THAT(report.findings[1].text, HasSubstr("tiny"));

  const auto partial = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(partial.find("s0"), nullptr);
  EXPECT_EQ(partial.find("tiny"), nullptr);
  EXPECT_THAT(partial.warnings, Contains(HasSubstr("left out: s0, tiny")));
  (void)partial.load();
}

// Every rank takes what is there, and all hear of what is not before anything is written.
TEST(Directory, RanksLoadWhatTheyAskFor) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  fs::remove(directory + "/__0_0.distcp");
  const auto own = [](int rank, const Shape& shape, std::int64_t begin, std::int64_t end) {
    (void)rank;
    const Box box{{begin, 0}, {end - begin, shape[1]}};
    return counting(shape, box, -1, false);
  };
  for (const LoadReader reader : {LoadReader::every_rank, LoadReader::rank_zero}) {
    LoadOptions options;
    options.reader = reader;
    run_ranks(2, [&](Group& group) {
      Value tree = Value::dict({{"plain", counting({4}, whole({4}), -1, false)}});
      (void)load(tree, directory, options, group);
      EXPECT_NE(floats(tree.at("plain").as_tensor())[1], -1);
      // Rows 0 to 2 are missing, and rank 0 wants them.
      Value sharded =
          Value::dict({{"s0", group.rank() == 0 ? own(0, {5, 3}, 0, 3) : own(1, {5, 3}, 3, 5)}});
      const Error error = error_of([&] { (void)load(sharded, directory, options, group); });
      EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
      EXPECT_EQ(error.key(), "s0");
    });
  }
  run_ranks(2, [&](Group& group) {
    Value sharded =
        Value::dict({{"s0", own(group.rank(), {5, 3}, 3 + group.rank(), 4 + group.rank())}});
    (void)load(sharded, directory, group);
    LoadOptions options;
    options.open.partial = true;
    EXPECT_EQ(code_of([&] { (void)load(sharded, directory, options, group); }),
              ErrorCode::not_found);
  });
}

// Of a model in rows whose second half is missing, a rank may ask for the first alone.
TEST(Directory, RowsThatAreThereAreTold) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  fs::remove(directory + "/__0_0.distcp");
  const auto rows = [](std::int64_t begin, std::int64_t end, float fill) {
    return Value::dict({{"s0", counting({5, 3}, Box{{begin, 0}, {end - begin, 3}}, fill, false)}});
  };
  Value whole_rows = rows(3, 5, -1);
  (void)load(whole_rows, kGolden + "variants/c2_multi");
  LoadOptions options;
  options.reader = LoadReader::rank_zero;
  run_ranks(2, [&](Group& group) {
    Value there = rows(3, 5, -1);
    (void)load(there, directory, options, group);
    EXPECT_EQ(floats(there.at("s0").as_tensor()), floats(whole_rows.at("s0").as_tensor()));
    Value lost = group.rank() == 0 ? rows(2, 3, -1) : rows(3, 5, -1);
    const Error error = error_of([&] { (void)load(lost, directory, options, group); });
    EXPECT_EQ(error.code(), ErrorCode::incomplete) << error.what();
    EXPECT_THAT(error.path(), HasSubstr("__0_0.distcp"));
  });
}

TEST(Directory, NothingIsWrittenBeforeTheMissingFileIsTold) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  fs::remove(directory + "/__0_0.distcp");
  const auto checkpoint = Checkpoint::open(directory);
  std::vector<float> plain(4, -1), sharded(15, -1);
  const std::vector<ReadRequest> requests{
      {"plain", TensorView::of(plain.data(), DType::float32, {4}), std::nullopt},
      {"s0", TensorView::of(sharded.data(), DType::float32, {5, 3}), std::nullopt}};
  const Error error = error_of([&] { (void)checkpoint.read_many(requests, {.threads = 1}); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.key(), "s0");
  EXPECT_THAT(error.path(), HasSubstr("__0_0.distcp"));
  EXPECT_EQ(plain, std::vector<float>(4, -1));
  EXPECT_EQ(sharded, std::vector<float>(15, -1));
  // The rows that are there can be read.
  const Slice there = Box{{3, 0}, {2, 3}};
  (void)checkpoint.read("s0", there, TensorView::of(sharded.data(), DType::float32, {2, 3}));
  EXPECT_NE(sharded[0], -1);
}

TEST(Directory, EachMissingFileOfWhatIsLeftOutIsTold) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  const auto whole_one = Checkpoint::open(directory);
  std::vector<std::string> files;  // of s0, in the order of its rows
  for (const Piece& piece : whole_one.tensor("s0").pieces)
    files.push_back(fs::path(piece.storage->source->name()).filename());
  ASSERT_GE(files.size(), 2U);
  ASSERT_NE(files.front(), files.back());
  fs::remove(directory + "/" + files.front());
  const auto one = Checkpoint::open(directory, {.partial = true});
  for (const FileRow& row : one.directory())
    EXPECT_NE(row.state, FileState::not_understood) << row.name;
  EXPECT_THAT(one.warnings, testing::Not(Contains(HasSubstr("after its last item"))));
  EXPECT_EQ(one.world_size, whole_one.world_size);
  fs::remove(directory + "/" + files.back());
  const auto both = Checkpoint::open(directory, {.partial = true});
  EXPECT_EQ(state_of(both, files.front()), "missing");
  EXPECT_EQ(state_of(both, files.back()), "missing");
  EXPECT_THAT(both.warnings, Contains(HasSubstr("2 files are missing")));
  EXPECT_EQ(both.world_size, whole_one.world_size);
}

TEST(Directory, EachCutDataFileIsTold) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  for (const char* name : {"/__0_0.distcp", "/__1_1.distcp"})
    fs::resize_file(directory + name, fs::file_size(directory + name) - 5);
  const Error error = error_of([&] { (void)Checkpoint::open(directory); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.key(), "s0");
  EXPECT_THAT(error.message(), HasSubstr("__0_0.distcp"));
  EXPECT_THAT(error.message(), HasSubstr("__1_1.distcp"));
  EXPECT_THAT(error.message(), HasSubstr(": 5 are missing"));
}

TEST(Directory, WhatNothingNamesIsInTheTable) {
  const std::string directory = copy_of(kGolden + "variants/c2_multi");
  write_text(directory + "/notes.txt", "x");
  write_text(directory + "/__7_0.distcp", "x");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(state_of(checkpoint, "notes.txt"), "not part of it");
  EXPECT_EQ(state_of(checkpoint, "__7_0.distcp"), "not understood");
  EXPECT_EQ(state_of(checkpoint, "__1_1.distcp"), "used");
  EXPECT_EQ(state_of(checkpoint, ".metadata"), "used");
}

TEST(Directory, OptionsWithoutAnEffectAreRefused) {
  const std::string dcp = kGolden + "variants/c2_multi";
  for (const OpenOptions& options : {OpenOptions{.ignore_index = true}, OpenOptions{.rank = 0},
                                     OpenOptions{.accept = {"trailing-bytes"}}}) {
    EXPECT_EQ(code_of([&] { (void)Checkpoint::open(dcp, options); }), ErrorCode::invalid_argument);
    LoadOptions how;
    how.open = options;
    Value tree = Value::dict();
    EXPECT_EQ(code_of([&] { (void)load(tree, dcp, how); }), ErrorCode::invalid_argument);
  }
}

}  // namespace
}  // namespace tessera
