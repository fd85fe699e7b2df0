// Conversions that are interrupted and go on: what was left is used when it is right, and the
// target is what one run would have made.
#include <chrono>
#include <filesystem>
#include <map>
#include <span>
#include <thread>
#include <tuple>

#include "checkpoint/test_support.h"
#include "storage/posix/replaced_directory.h"
#include "tessera/run_directory.h"

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
    save_model(0);
    options_.threads = 1;
    options_.resume = true;
  }

  // As `source_`, whose elements count from `first`.
  void save_model(float first) {
    Value model = Value::dict();
    for (int i = 0; i < kTensors; ++i) {
      const Shape shape{kRows, kColumns};
      model.set_item("blocks." + std::to_string(i) + ".w",
                     Value(counting(shape, whole(shape), first + static_cast<float>(i) * 1000)));
    }
    save(Value::dict({{Value("model"), model}}), source_, *solo_group());
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

// Nothing can be kept of one file.
TEST_F(ResumeTest, AFileThatIsTheWholeTargetBeginsAnew) {
  for (const auto& [name, kind] : {std::pair("a.safetensors", CheckpointKind::safetensors),
                                   std::pair("a.pt", CheckpointKind::torch_file)}) {
    options_.to = kind;
    const std::string target = root_ + "/" + name;
    interrupt(target, 3 * kTensorBytes);
    EXPECT_FALSE(fs::exists(root_ + "/." + name + ".resume"));
    const ConvertReport report = resume(target);
    EXPECT_EQ(report.bytes_resumed, 0U) << name;
    EXPECT_EQ(report.io.bytes_needed, kTensors * kTensorBytes) << name;
    EXPECT_EQ(text_of(target), text_of(reference(name))) << name;
    EXPECT_FALSE(fs::exists(root_ + "/." + name + ".resume"));
  }
}

// The first file of each target is finished, and is kept whole.
TEST_F(ResumeTest, DirectoriesAreThoseOfOneRun) {
  struct Case {
    const char* name;
    CheckpointKind kind;
    int ranks;
    std::uint64_t shard;
  };
  for (const Case& c :
       {Case{"set", CheckpointKind::safetensors, 1, 2 * kTensorBytes},
        Case{"dcp", CheckpointKind::dcp, 2, 0}, Case{"new", CheckpointKind::olmo_torch_new, 2, 0},
        Case{"legacy", CheckpointKind::olmo_legacy, 2, 0},
        Case{"local", CheckpointKind::olmo_local, 2, 0}}) {
    options_.to = c.kind;
    options_.ranks = c.ranks;
    options_.max_shard_size = c.shard;
    const std::string target = root_ + "/" + c.name;
    interrupt(target, 3 * kTensorBytes);
    const ConvertReport report = resume(target);
    EXPECT_GE(report.bytes_resumed, 2 * kTensorBytes) << c.name;
    EXPECT_LT(report.bytes_resumed, 3 * kTensorBytes) << c.name;
    EXPECT_EQ(report.io.bytes_needed, 2 * kTensorBytes) << c.name;
    EXPECT_LT(report.io.bytes_written, 3 * kTensorBytes) << c.name;
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

// A file of each tensor, of which three are finished when a run is interrupted.
class ResumedSetTest : public ResumeTest {
 protected:
  // A file of one tensor, whose header is on top.
  ResumedSetTest() { options_.max_shard_size = kTensorBytes + kTensorBytes / 2; }

  // What three files hold, which are left in `left_`, besides tensors.
  void interrupt() { ResumeTest::interrupt(target_, kTensors * kTensorBytes); }
  void expect_kept(std::uint64_t files, const std::string& what) {
    const ConvertReport report = resume(target_);
    EXPECT_EQ(report.bytes_resumed / kTensorBytes, files) << what;
    EXPECT_EQ(report.io.bytes_needed, (kTensors - files) * kTensorBytes) << what;
    EXPECT_EQ(report.notes.size(), is_noted_ ? 1U : 0U) << what;
    EXPECT_TRUE(files_of(target_) == expected_) << what;
    EXPECT_FALSE(fs::exists(work_)) << what;
    fs::remove_all(target_);
  }

  const std::string target_ = root_ + "/set";
  const std::string work_ = root_ + "/.set.resume";
  const std::string name_ = "model-00002-of-00004.safetensors";
  const std::string left_ = work_ + "/new/" + name_;
  std::map<std::string, std::string> expected_ = files_of(set_reference());
  bool is_noted_ = false;

 private:
  std::string set_reference() {
    options_.max_shard_size = kTensorBytes;
    return reference("set");
  }
};

TEST_F(ResumedSetTest, DamageToAFileIsMadeGood) {
  interrupt();
  flip(left_, text_of(left_).size() - 5);
  expect_kept(2, "flipped");
  interrupt();
  fs::resize_file(left_, kTensorBytes - 1);
  expect_kept(2, "short");
  interrupt();
  fs::remove(left_);
  expect_kept(2, "removed");
}

// A backup made of hard links keeps what it has, and a link may lead anywhere.
TEST_F(ResumedSetTest, AFileThatIsNotOursAloneIsMadeAnew) {
  const std::string backup = temporary_directory() + "/backup";
  interrupt();
  fs::create_hard_link(left_, backup);
  expect_kept(2, "linked");
  interrupt();
  fs::rename(left_, left_ + ".x");
  fs::create_symlink(name_ + ".x", left_);
  expect_kept(2, "a link");
  EXPECT_EQ(text_of(backup), expected_.at(name_));
}

// Also files of work that was not finished, under names that the target has and others.
TEST_F(ResumedSetTest, WhatNoRecordSpeaksOfGoes) {
  interrupt();
  for (const char* name : {"x", "model-00004-of-00004.safetensors", "model.safetensors.index.json",
                           "tessera-digests.json", ".model.tmp-0123456789ab"})
    write_text(work_ + "/new/" + name, "half");
  expect_kept(3, "strays");
}

// A directory appears with all that is in it.
TEST_F(ResumedSetTest, WhatIsNoFileGoesToo) {
  interrupt();
  const std::string elsewhere = temporary_directory();
  write_text(elsewhere + "/mine", "mine");
  fs::create_directory_symlink(elsewhere, work_ + "/new/a");
  fs::create_symlink("nowhere", work_ + "/new/b");
  fs::create_directories(work_ + "/new/c/d");
  const ConvertReport report = resume(target_);
  EXPECT_EQ(report.bytes_resumed / kTensorBytes, 3U);
  for (const auto& entry : fs::recursive_directory_iterator(target_))
    EXPECT_TRUE(expected_.contains(fs::relative(entry.path(), target_).string())) << entry.path();
  EXPECT_TRUE(fs::exists(elsewhere + "/mine"));
}

// A link that somebody has put in the place of the files is no directory of ours.
TEST_F(ResumedSetTest, FilesThatWereMovedElsewhereAreMadeAnew) {
  interrupt();
  const std::string elsewhere = temporary_directory() + "/moved";
  fs::rename(work_ + "/new", elsewhere);
  fs::create_directory_symlink(elsewhere, work_ + "/new");
  EXPECT_EQ(resume(target_).bytes_resumed, 0U);
  EXPECT_FALSE(fs::is_symlink(target_));
  EXPECT_TRUE(files_of(target_) == expected_);
}

// `source_` as one file, and one of the same size with other elements.
class ReplacedSourceTest : public ResumedSetTest {
 protected:
  ReplacedSourceTest() {
    as_file(first_);
    source_ = temporary_directory() + "/other";
    save_model(1'000'000);
    as_file(second_);
  }

  void interrupt_of(const Checkpoint& source) {
    ConvertOptions half = options_;
    half.progress = [](const Progress& progress) {
      if (progress.done >= kTensors * kTensorBytes) throw Stop();
      std::this_thread::sleep_for(std::chrono::milliseconds(101));
    };
    EXPECT_THROW(convert(source, target_, half), Stop);
  }

  const std::string first_ = temporary_directory() + "/a.safetensors";
  const std::string second_ = temporary_directory() + "/a.safetensors";

 private:
  void as_file(const std::string& path) const {
    ConvertOptions options;
    options.to = CheckpointKind::safetensors;
    (void)convert(source_, path, options);
  }
};

// What is open is read, though another file has its name by then, which the next run opens.
TEST_F(ReplacedSourceTest, FilesOfWhatWasOpenAreMadeAnew) {
  const Checkpoint opened = Checkpoint::open(first_);
  fs::rename(second_, first_);
  interrupt_of(opened);
  EXPECT_EQ(convert(first_, target_, options_).bytes_resumed, 0U);
  expect_equal(target_);
}

// Whoever names an object has no listing that tells its version.
TEST_F(ReplacedSourceTest, FilesOfAnotherObjectOfThatNameAreMadeAnew) {
  const auto store = memory_store();
  const auto write = [&](const std::string& path) {
    const std::string text = text_of(path);
    put(*store, "a.safetensors", std::as_bytes(std::span(text)), IfExists::replace);
  };
  const Location source{store, "a.safetensors"};
  write(first_);
  interrupt_of(Checkpoint::open(source));
  write(second_);
  EXPECT_EQ(convert(source, target_, options_).bytes_resumed, 0U);
  expect_equal(target_);
}

TEST_F(ResumedSetTest, AnythingMayBeInARecord) {
  const std::string begun = work_ + "/begun";
  const std::string finished = work_ + "/finished/" + name_;
  for (const std::string& record : {begun, finished}) {
    const std::uint64_t kept = record == begun ? 0 : 2;
    is_noted_ = record == begun;
    interrupt();
    const std::string text = text_of(record);
    write_text(record, text.substr(0, text.size() - 1));
    expect_kept(kept, "a record cut short");
    interrupt();
    flip(record, text.size() / 2);
    expect_kept(kept, "a record flipped");
    interrupt();
    write_text(record, std::string(100000, 'x'));
    expect_kept(kept, "no record");
    interrupt();
    write_text(record, "");
    expect_kept(kept, "an empty record");
    interrupt();
    fs::copy_file(work_ + "/finished/model-00001-of-00004.safetensors", record,
                  fs::copy_options::overwrite_existing);
    expect_kept(kept, "another file's record");
    is_noted_ = false;
    interrupt();
    fs::remove(record);
    expect_kept(kept, "a record removed");
  }
}

TEST_F(ResumedSetTest, OtherOptionsOrAnotherSourceBeginAnew) {
  is_noted_ = true;
  interrupt();
  options_.max_shard_size += 1;  // which makes no difference, but might
  expect_kept(0, "another size");
  interrupt();
  for (const auto& entry : fs::directory_iterator(source_)) {
    fs::last_write_time(entry, fs::last_write_time(entry) + std::chrono::nanoseconds(1000));
  }
  expect_kept(0, "another time");
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
  EXPECT_EQ(report.io.bytes_needed, 2 * kTensorBytes);
  EXPECT_EQ(report.io.bytes_read, report.io.bytes_needed);  // no storage was read again
  EXPECT_EQ(report.io.bytes_unchecked, 0U);
  expect_equal(target);
  fs::remove_all(target);

  const Checkpoint opened = Checkpoint::open(archive);
  const Piece& piece = opened.find("model.blocks.1.w")->value.as_tensor().pieces.at(0);
  flip(archive, static_cast<std::size_t>(piece.storage->offset) + 100);
  interrupt(target, 3 * kTensorBytes);
  EXPECT_TRUE(fs::exists(target + "/.resume"));
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
        std::pair("l", CheckpointKind::olmo_legacy)}) {
    options_.to = kind;
    options_.ranks = kind == CheckpointKind::torch_file ? 1 : 2;
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
    EXPECT_EQ(resume(target).bytes_resumed > 0, options_.ranks == 2) << name;
    EXPECT_EQ(Checkpoint::open(target).leaves.size(), 3U) << name;
    options_.only.clear();
  }
}

// Killed after the target has its name and before the work directory is gone.
TEST_F(ResumeTest, ATargetThatWasFinishedIsDone) {
  for (const auto& [name, kind, last] : {std::tuple("a.pt", CheckpointKind::torch_file, ""),
                                         std::tuple("d", CheckpointKind::dcp, "/.metadata"),
                                         std::tuple("f", CheckpointKind::olmo_full, "")}) {
    options_.to = kind;
    const std::string target = root_ + "/" + name;
    const std::string work = kind == CheckpointKind::dcp
                                 ? target + "/.resume"
                                 : root_ + "/." + std::string(name) + ".resume";
    for (const bool changed : {false, true}) {
      // Something has the name in the last moment, and gives it up.
      const std::string in_the_way = kind == CheckpointKind::olmo_full ? "/mine" : last;
      ConvertOptions options = options_;
      options.progress = [&](const Progress&) {
        fs::create_directories(fs::path(target + in_the_way).parent_path());
        write_text(target + in_the_way, "mine");
      };
      EXPECT_EQ(code_of([&] { (void)convert(source_, target, options); }),
                ErrorCode::already_exists);
      fs::remove_all(target + last);
      fs::rename(work + "/new" + (kind == CheckpointKind::torch_file ? "/a.pt" : last),
                 target + last);
      if (changed) {
        flip(kind == CheckpointKind::olmo_full ? target + "/model.pt" : target + last, 1000);
        EXPECT_EQ(code_of([&] { (void)resume(target); }), ErrorCode::already_exists) << name;
      } else {
        const ConvertReport report = resume(target);
        EXPECT_EQ(report.bytes_resumed, kTensors * kTensorBytes) << name;
        EXPECT_EQ(report.notes.size(), 1U) << name;
        EXPECT_FALSE(fs::exists(work)) << name;
        expect_equal(target);
      }
      fs::remove_all(target);
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
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(target); }), ErrorCode::incomplete);
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

// Files that a conversion will publish look like leftovers of a killed one; nobody holds their
// directory.
TEST_F(ResumeTest, GcTakesTheWorkWholeOrLeavesIt) {
  const GcOptions at_once{.remove = true, .older_than = std::chrono::seconds(0)};
  for (const auto& [name, kind] :
       {std::pair("d", CheckpointKind::dcp), std::pair("n", CheckpointKind::olmo_torch_new)}) {
    options_.to = kind;
    options_.ranks = 2;
    const std::string target = root_ + "/" + name;
    interrupt(target, 3 * kTensorBytes);
    EXPECT_EQ(gc(root_, {.remove = true}).spared, 1U);  // it is young
    (void)gc(posix_store(root_), at_once);
    EXPECT_GE(resume(target).bytes_resumed, 2 * kTensorBytes) << name;
    expect_equal(target);
    fs::remove_all(target);
    ConvertOptions live = options_;
    live.progress = [&](const Progress& progress) {
      if (progress.done >= 3 * kTensorBytes) (void)gc(root_, at_once);
      std::this_thread::sleep_for(std::chrono::milliseconds(101));
    };
    (void)convert(source_, target, live);
    expect_equal(target);
    fs::remove_all(target);
    interrupt(target, 3 * kTensorBytes);
    const GcReport report = gc(root_, at_once);
    ASSERT_EQ(report.leftovers.size(), 1U) << name;
    EXPECT_TRUE(report.leftovers[0].path.ends_with(kResumeMark));
    EXPECT_GE(report.leftovers[0].bytes, 2 * kTensorBytes);
    EXPECT_TRUE(report.leftovers[0].removed);
    EXPECT_EQ(resume(target).bytes_resumed, 0U) << name;
    expect_equal(target);
  }
}

// A later torch may have written it, with other dtypes.
TEST_F(ResumeTest, ACheckpointThatCannotBeReadIsReplaced) {
  options_.to = CheckpointKind::dcp;
  options_.ranks = 2;
  options_.overwrite = true;
  for (const bool resumes : {false, true}) {
    const std::string target = root_ + "/d" + std::to_string(resumes);
    fs::create_directory(target);
    write_text(target + "/.metadata", "of another");
    options_.resume = resumes;
    if (resumes) {
      interrupt(target, 3 * kTensorBytes);
      for (const auto& entry : fs::directory_iterator(target + "/.resume/new"))
        fs::rename(entry.path(), target + "/" + entry.path().filename().string());
    }
    EXPECT_EQ(resume(target).bytes_resumed > 0, resumes);
    expect_equal(target);
  }
}

// What a file has besides tensors is no progress.
TEST_F(ResumedSetTest, KeptFilesAreNoMoreThanTheirTensors) {
  interrupt();
  std::uint64_t most = 0;
  options_.progress = [&](const Progress& progress) {
    EXPECT_LE(progress.done, progress.total);
    most = std::max(most, progress.done);
    std::this_thread::sleep_for(std::chrono::milliseconds(101));
  };
  (void)resume(target_);
  EXPECT_EQ(most, kTensors * kTensorBytes);
}

TEST_F(ResumeTest, AFailureThatMadeNothingLeavesNothing) {
  options_.to = CheckpointKind::rank_files;
  EXPECT_EQ(code_of([&] { (void)resume(root_ + "/r"); }), ErrorCode::unsupported);
  EXPECT_TRUE(fs::is_empty(root_));
}

}  // namespace
}  // namespace tessera
