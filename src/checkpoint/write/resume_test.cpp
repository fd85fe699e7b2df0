// Conversions that are interrupted and go on: what was left is used when it is right, and the
// target is what one run would have made.
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <thread>

#include "checkpoint/test_support.h"
#include "storage/posix/replaced_directory.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)

constexpr std::int64_t kRows = 200;
constexpr std::int64_t kColumns = 250;
constexpr std::uint64_t kTensorBytes = kRows * kColumns * 4;
constexpr int kTensors = 4;

// What interrupts a conversion.
struct Stop {};

class ResumeTest : public testing::Test {
 protected:
  ResumeTest() {
    const auto group = solo_group();
    Value model = Value::dict();
    for (int i = 0; i < kTensors; ++i) {
      const Shape shape{kRows, kColumns};
      model.set_item("blocks." + std::to_string(i) + ".w",
                     Value(counting(shape, whole(shape), static_cast<float>(i) * 1000)));
    }
    save(Value::dict({{Value("model"), model}}), source_, *group);
    options_.threads = 1;
    options_.resume = true;
  }

  // Converts until `bytes` were read.
  void interrupt(const std::string& target, std::uint64_t bytes) {
    ConvertOptions options = options_;
    options.progress = [bytes](const Progress& progress) {
      if (progress.done >= bytes) throw Stop();
      std::this_thread::sleep_for(std::chrono::milliseconds(101));  // else it is not called again
    };
    EXPECT_THROW(convert(source_, target, options), Stop);
    EXPECT_FALSE(fs::exists(target) && fs::is_regular_file(target));
  }
  ConvertReport resume(const std::string& target) { return convert(source_, target, options_); }

  // The same without an interruption.
  std::string reference(const std::string& name) {
    ConvertOptions options = options_;
    options.resume = false;
    std::string target = temporary_directory() + "/" + name;
    convert(source_, target, options);
    return target;
  }
  void expect_equal(const std::string& target) {
    const auto differences = diff(Checkpoint::open(source_), Checkpoint::open(target));
    EXPECT_TRUE(differences.empty()) << target << ": " << differences.at(0).text;
    EXPECT_TRUE(verify(target).findings.empty()) << target;
  }

  std::string source_ = temporary_directory() + "/source";
  std::string root_ = temporary_directory();
  ConvertOptions options_;
};

// All files below, by name.
std::map<std::string, std::string> files_of(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file()) {
      files.emplace(fs::relative(entry.path(), directory), text_of(entry.path()));
    }
  }
  return files;
}

void flip(const std::string& path, std::size_t at) {
  std::string text = text_of(path);
  text.at(at) = static_cast<char>(text.at(at) ^ 1);
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(at))
      .put(text[at]);
}

TEST_F(ResumeTest, FilesAreByteForByteThoseOfOneRun) {
  for (const auto& [name, kind] : {std::pair("a.safetensors", CheckpointKind::safetensors),
                                   std::pair("a.pt", CheckpointKind::torch_file)}) {
    options_.to = kind;
    const std::string target = root_ + "/" + name;
    interrupt(target, 3 * kTensorBytes);
    EXPECT_TRUE(fs::exists(root_ + "/." + name + ".resume/journal"));
    const ConvertReport report = resume(target);
    EXPECT_EQ(report.bytes_resumed, 2 * kTensorBytes) << name;
    EXPECT_EQ(report.io.bytes_needed, 2 * kTensorBytes) << name;
    EXPECT_EQ(text_of(target), text_of(reference(name))) << name;
    EXPECT_FALSE(fs::exists(root_ + "/." + name + ".resume"));
  }
}

TEST_F(ResumeTest, DirectoriesAreThoseOfOneRun) {
  struct Case {
    const char* name;
    CheckpointKind kind;
    int ranks;
    std::uint64_t shard;
  };
  for (const Case& c :
       {Case{"set", CheckpointKind::safetensors, 1, 2 * kTensorBytes},
        Case{"dcp", CheckpointKind::dcp, 1, 0}, Case{"dcp2", CheckpointKind::dcp, 2, 0},
        Case{"full", CheckpointKind::olmo_full, 1, 0},
        Case{"new", CheckpointKind::olmo_torch_new, 2, 0},
        Case{"legacy", CheckpointKind::olmo_legacy, 2, 0},
        Case{"local", CheckpointKind::olmo_local, 2, 0}}) {
    options_.to = c.kind;
    options_.ranks = c.ranks;
    options_.max_shard_size = c.shard;
    const std::string target = root_ + "/" + c.name;
    interrupt(target, 2 * kTensorBytes);
    const ConvertReport report = resume(target);
    EXPECT_GE(report.bytes_resumed, kTensorBytes) << c.name;
    EXPECT_LT(report.io.bytes_needed, kTensors * kTensorBytes) << c.name;
    expect_equal(target);
    EXPECT_FALSE(fs::exists(target + "/.resume"));
    EXPECT_FALSE(fs::exists(root_ + "/." + c.name + ".resume"));
    const auto expected = files_of(reference(c.name));
    const auto found = files_of(target);
    EXPECT_EQ(found.size(), expected.size()) << c.name;
    if (c.kind == CheckpointKind::dcp || c.kind == CheckpointKind::olmo_torch_new) continue;
    EXPECT_TRUE(found == expected) << c.name;
  }
}

TEST_F(ResumeTest, DamageToWhatWasLeftIsMadeGood) {
  const std::string target = root_ + "/a.safetensors";
  const std::string left = root_ + "/.a.safetensors.resume/new/a.safetensors";
  const std::string expected = text_of(reference("a.safetensors"));
  interrupt(target, 3 * kTensorBytes);
  for (std::size_t at = 0; at < 200; ++at) flip(left, at);
  flip(left, expected.size() - (kTensors - 1) * kTensorBytes + 5);
  EXPECT_EQ(resume(target).bytes_resumed, kTensorBytes);
  EXPECT_EQ(text_of(target), expected);
}

TEST_F(ResumeTest, AFileThatBecameShortIsMadeGood) {
  options_.to = CheckpointKind::torch_file;
  const std::string target = root_ + "/a.pt";
  const std::string expected = text_of(reference("a.pt"));
  interrupt(target, 3 * kTensorBytes);
  fs::resize_file(root_ + "/.a.pt.resume/new/a.pt", kTensorBytes + 20000);
  EXPECT_EQ(resume(target).bytes_resumed, kTensorBytes);
  EXPECT_EQ(text_of(target), expected);
}

TEST_F(ResumeTest, AnythingMayBeInTheJournal) {
  const std::string target = root_ + "/a.safetensors";
  const std::string journal = root_ + "/.a.safetensors.resume/journal";
  const std::string expected = text_of(reference("a.safetensors"));
  for (const int damage : {0, 1, 2}) {
    interrupt(target, 3 * kTensorBytes);
    const std::string text = text_of(journal);
    if (damage == 0) write_text(journal, text.substr(0, text.size() - 10));
    if (damage == 1) write_text(journal, std::string(100000, 'x'));
    if (damage == 2) fs::remove(journal);
    const ConvertReport report = resume(target);
    EXPECT_EQ(report.bytes_resumed, damage == 0 ? kTensorBytes : 0) << damage;
    EXPECT_EQ(report.notes.size(), damage == 1 ? 1U : 0U) << damage;
    EXPECT_EQ(text_of(target), expected) << damage;
    fs::remove(target);
  }
}

TEST_F(ResumeTest, OtherOptionsOrAnotherSourceBeginAnew) {
  const std::string target = root_ + "/a.safetensors";
  interrupt(target, 2 * kTensorBytes);
  options_.dtype = DType::bfloat16;
  const ConvertReport report = resume(target);
  EXPECT_EQ(report.bytes_resumed, 0U);
  ASSERT_EQ(report.notes.size(), 1U);
  EXPECT_EQ(text_of(target), text_of(reference("a.safetensors")));
  fs::remove(target);
  options_.dtype.reset();
  interrupt(target, 2 * kTensorBytes);
  for (const auto& entry : fs::directory_iterator(source_)) {
    fs::last_write_time(entry, fs::last_write_time(entry) + std::chrono::nanoseconds(1000));
  }
  EXPECT_EQ(resume(target).bytes_resumed, 0U);
  EXPECT_EQ(text_of(target), text_of(reference("a.safetensors")));
}

// A rank's rows are a part of a storage, whose checksum shows the damage when the other rank's rows
// are read: in the next run.
TEST_F(ResumeTest, DamageInWhatWasConvertedBeforeIsFound) {
  const std::string archive = temporary_directory() + "/a.pt";
  ConvertOptions to_torch;
  to_torch.to = CheckpointKind::torch_file;
  convert(source_, archive, to_torch);
  source_ = archive;
  options_.to = CheckpointKind::dcp;
  options_.ranks = 2;
  const std::string target = root_ + "/a";
  interrupt(target, 3 * kTensorBytes);  // the first rank has half of each tensor
  const ConvertReport report = resume(target);
  EXPECT_GE(report.bytes_resumed, 2 * kTensorBytes);
  EXPECT_EQ(report.io.bytes_needed + report.bytes_resumed, kTensors * kTensorBytes);
  EXPECT_EQ(report.io.bytes_read, report.io.bytes_needed);  // no storage was read again
  EXPECT_EQ(report.io.bytes_unchecked, 0U);
  expect_equal(target);
  fs::remove_all(target);

  const Checkpoint opened = Checkpoint::open(archive);
  const Piece& piece = opened.find("model.blocks.1.w")->value.as_tensor().pieces.at(0);
  flip(archive, static_cast<std::size_t>(piece.storage->offset) + 100);
  interrupt(target, 2 * kTensorBytes);
  const Error error = error_of([&] { (void)resume(target); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_FALSE(fs::exists(target + "/.metadata"));
  // What was read from there is not trusted again.
  EXPECT_FALSE(fs::exists(target + "/.resume"));
}

// What the first run read wrong stays wrong when the source reads right again: its checksums tell.
TEST_F(ResumeTest, WhatWasReadWrongBeforeIsFound) {
  const std::string archive = temporary_directory() + "/a.pt";
  ConvertOptions to_torch;
  to_torch.to = CheckpointKind::torch_file;
  convert(source_, archive, to_torch);
  source_ = archive;
  options_.to = CheckpointKind::dcp;
  options_.ranks = 2;
  const std::string target = root_ + "/a";
  const Checkpoint opened = Checkpoint::open(archive);
  const Piece& piece = opened.find("model.blocks.1.w")->value.as_tensor().pieces.at(0);
  const auto flip_unnoticed = [&] {
    const auto time = fs::last_write_time(archive);
    flip(archive, static_cast<std::size_t>(piece.storage->offset) + 100);
    fs::last_write_time(archive, time);
  };
  flip_unnoticed();
  interrupt(target, 3 * kTensorBytes);
  flip_unnoticed();
  EXPECT_EQ(code_of([&] { (void)resume(target); }), ErrorCode::corrupt);
  EXPECT_EQ(resume(target).bytes_resumed, 0U);
  expect_equal(target);
}

TEST_F(ResumeTest, TwoAtATimeAreRefused) {
  const std::string target = root_ + "/a.safetensors";
  const WorkDirectory other(root_ + "/.a.safetensors.resume");
  EXPECT_EQ(code_of([&] { (void)resume(target); }), ErrorCode::conflict);
}

TEST_F(ResumeTest, AnExistingTargetIsKeptUnlessOverwritten) {
  for (const auto& [name, kind] :
       {std::pair("a.pt", CheckpointKind::torch_file), std::pair("d", CheckpointKind::dcp),
        std::pair("f", CheckpointKind::olmo_full)}) {
    options_.to = kind;
    options_.overwrite = false;
    const std::string target = root_ + "/" + name;
    (void)resume(target);
    EXPECT_EQ(code_of([&] { (void)resume(target); }), ErrorCode::already_exists) << name;
    EXPECT_FALSE(fs::exists(root_ + "/." + name + ".resume"));
    EXPECT_FALSE(fs::exists(target + "/.resume"));
    options_.overwrite = true;
    options_.only = {"*.1.w", "*.2.w", "*.3.w"};
    ConvertOptions stopped = options_;
    stopped.progress = [](const Progress& progress) {
      if (progress.done >= 2 * kTensorBytes) throw Stop();
      std::this_thread::sleep_for(std::chrono::milliseconds(101));
    };
    EXPECT_THROW(convert(source_, target, stopped), Stop);
    EXPECT_EQ(Checkpoint::open(target).leaves.size(), std::size_t{kTensors}) << name;
    EXPECT_GT(resume(target).bytes_resumed, 0U) << name;
    EXPECT_EQ(Checkpoint::open(target).leaves.size(), 3U) << name;
    options_.only.clear();
  }
}

// Killed after the target has its name and before the journal is gone.
TEST_F(ResumeTest, ATargetThatWasFinishedIsDone) {
  for (const auto& [name, kind] :
       {std::pair("a.pt", CheckpointKind::torch_file), std::pair("d", CheckpointKind::dcp),
        std::pair("f", CheckpointKind::olmo_full)}) {
    options_.to = kind;
    const std::string target = root_ + "/" + name;
    const std::string work = kind == CheckpointKind::dcp
                                 ? target + "/.resume"
                                 : root_ + "/." + std::string(name) + ".resume";
    interrupt(target, 2 * kTensorBytes);
    const std::string kept = temporary_directory() + "/journal";
    fs::create_hard_link(work + "/journal", kept);
    (void)resume(target);
    for (const bool changed : {false, true}) {
      fs::create_directory(work);
      fs::copy_file(kept, work + "/journal");
      if (changed) {
        if (fs::is_regular_file(target)) {
          flip(target, 1000);
        } else {
          flip(kind == CheckpointKind::dcp ? target + "/.metadata" : target + "/model.pt", 1000);
        }
        EXPECT_EQ(code_of([&] { (void)resume(target); }), ErrorCode::already_exists) << name;
      } else {
        const ConvertReport report = resume(target);
        EXPECT_EQ(report.bytes_resumed, kTensors * kTensorBytes) << name;
        EXPECT_EQ(report.notes.size(), 1U) << name;
        EXPECT_FALSE(fs::exists(work)) << name;
        expect_equal(target);
      }
    }
    fs::remove_all(work);
  }
}

// Killed while the data files of a DCP directory get their places.
TEST_F(ResumeTest, DataFilesThatWereMovedAreTakenBack) {
  options_.to = CheckpointKind::dcp;
  options_.ranks = 2;
  const std::string target = root_ + "/d";
  interrupt(target, 3 * kTensorBytes);
  int moved = 0;
  for (const auto& entry : fs::directory_iterator(target + "/.resume/new")) {
    fs::rename(entry.path(), target + "/" + entry.path().filename().string());
    ++moved;
  }
  EXPECT_GT(moved, 0);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(target); }), ErrorCode::incomplete);
  EXPECT_GE(resume(target).bytes_resumed, 2 * kTensorBytes);
  expect_equal(target);
}

TEST_F(ResumeTest, AFailureThatMadeNothingLeavesNothing) {
  options_.to = CheckpointKind::rank_files;
  EXPECT_EQ(code_of([&] { (void)resume(root_ + "/r"); }), ErrorCode::unsupported);
  EXPECT_TRUE(fs::is_empty(root_));
}

}  // namespace
}  // namespace tessera
