// What the Hugging Face Hub has named by its content: its cache, and records of downloads. The
// blobs' names are those that sha256sum and git hash-object give.
#include <gtest/gtest.h>

#include <ctime>
#include <filesystem>

#include "base/sha.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
namespace fs = std::filesystem;

// A file of safetensors as others write it, without digests in it.
std::string foreign_file(std::size_t elements = 16) {
  const std::string header = R"({"w":{"dtype":"F32","shape":[)" + std::to_string(elements) +
                             R"(],"data_offsets":[0,)" + std::to_string(4 * elements) + "]}}";
  std::string text(8, '\0');
  text[0] = static_cast<char>(header.size());
  return text + header + std::string(4 * elements, 'x');
}

std::string sha_of(Sha kind, const std::string& text) {
  RunningSha sha(kind);
  sha.add(std::as_bytes(std::span(text)));
  return sha.text();
}

std::string git_sha_of(const std::string& text) {
  return sha_of(Sha::sha1, "blob " + std::to_string(text.size()) + '\0' + text);
}

// A model in a cache as huggingface_hub lays it out; returns the directory of its revision.
std::string cached(const std::string& name, const std::string& content) {
  const std::string model = temporary_directory() + "/models--o--m";
  fs::create_directories(model + "/blobs");
  fs::create_directories(model + "/snapshots/c0ffee");
  write_text(model + "/blobs/" + name, content);
  fs::create_symlink("../../blobs/" + name, model + "/snapshots/c0ffee/model.safetensors");
  return model + "/snapshots/c0ffee";
}

// A model as `hf download --local-dir` leaves it.
std::string downloaded(const std::string& etag, const std::string& content,
                       const std::string& seconds = std::to_string(std::time(nullptr)) + ".5") {
  const std::string directory = temporary_directory() + "/m";
  fs::create_directories(directory + "/.cache/huggingface/download");
  write_text(directory + "/model.safetensors", content);
  write_text(directory + "/.cache/huggingface/download/model.safetensors.metadata",
             "c0ffee\n" + etag + "\n" + seconds + "\n");
  return directory;
}

void expect_checked(const std::string& path, CheckedBy by, std::uint64_t bytes) {
  const VerifyReport report = verify(path);
  ASSERT_TRUE(report.findings.empty()) << report.findings[0].text;
  ASSERT_EQ(report.files.size(), 1U) << path;
  EXPECT_EQ(report.files[0].by, by) << path << ": " << to_string(report.files[0].by);
  EXPECT_EQ(report.files[0].bytes, bytes);
  const bool is_checked = by != CheckedBy::nothing;
  EXPECT_EQ(report.bytes, is_checked ? bytes : 0);
  EXPECT_EQ(report.bytes_unchecked, is_checked ? 0 : bytes);
}

// A blob is all of its file, be it that no tensor lies in its last bytes.
TEST(NamedFiles, BytesBehindTheLastTensorAreOfTheBlob) {
  const std::string content = foreign_file() + "tail";
  const std::string path = cached(sha_of(Sha::sha256, content), content) + "/model.safetensors";
  const VerifyOptions accepting{.open = {.accept = {"trailing-bytes"}}};
  const VerifyReport report = verify(path, accepting);
  ASSERT_TRUE(report.findings.empty()) << report.findings[0].text;
  EXPECT_EQ(report.bytes, content.size());
  std::string flipped = content;
  flipped.back() ^= 1;
  const std::string damaged = cached(sha_of(Sha::sha256, content), flipped) + "/model.safetensors";
  EXPECT_EQ(verify(damaged, accepting).findings.size(), 1U);
}

void expect_damage(const std::string& path, const std::string& digest) {
  const VerifyReport report = verify(path);
  ASSERT_EQ(report.findings.size(), 1U) << path;
  EXPECT_EQ(report.findings[0].code, ErrorCode::corrupt);
  EXPECT_NE(report.findings[0].text.find(digest), std::string::npos) << report.findings[0].text;
}

TEST(NamedFiles, BlobsOfACacheAreComparedWithTheirNames) {
  const std::string content = foreign_file();
  std::string flipped = content;
  flipped.back() ^= 1;
  const std::string sha256 = sha_of(Sha::sha256, content), git = git_sha_of(content);
  for (const auto& [name, by] :
       {std::pair(sha256, CheckedBy::sha256), {git, CheckedBy::git_sha1}}) {
    const std::string directory = cached(name, content);
    expect_checked(directory, by, content.size());
    expect_checked(directory + "/model.safetensors", by, content.size());
    const fs::path snapshot = directory;
    expect_checked((snapshot / "../../blobs" / name).string(), by, content.size());
    expect_damage(cached(name, flipped), name);
  }
}

TEST(NamedFiles, DownloadsAreComparedWithTheirRecords) {
  const std::string content = foreign_file();
  std::string flipped = content;
  flipped[flipped.size() / 2] ^= 1;
  const std::string sha256 = sha_of(Sha::sha256, content), git = git_sha_of(content);
  expect_checked(downloaded(sha256, content), CheckedBy::sha256, content.size());
  expect_checked(downloaded(git, content), CheckedBy::git_sha1, content.size());
  expect_damage(downloaded(sha256, content.substr(0, content.size() - 1) + "y"), sha256);
}

TEST(NamedFiles, OtherNamesAndRecordsTellNothing) {
  const std::string content = foreign_file();
  const std::string sha256 = sha_of(Sha::sha256, content);
  for (const std::string& name : {sha256 + "0", sha256.substr(1), "G" + sha256.substr(1)}) {
    expect_checked(cached(name, content), CheckedBy::nothing, 64);
    expect_checked(downloaded(name, content), CheckedBy::nothing, 64);
  }
  // A name outside of a cache is no digest.
  const std::string path = temporary_directory() + "/" + std::string(kSha256Digits, '0');
  write_text(path, content);
  expect_checked(path, CheckedBy::nothing, 64);
  // A file that was written behind its record, or nobody knows.
  for (const char* seconds : {"1764500000.5", "", "soon"})
    expect_checked(downloaded(sha256, content.substr(0, content.size() - 1) + "y", seconds),
                   CheckedBy::nothing, 64);
  // A record of one line.
  const std::string directory = downloaded(sha256, content);
  write_text(directory + "/.cache/huggingface/download/model.safetensors.metadata", sha256);
  expect_checked(directory, CheckedBy::nothing, 64);
}

TEST(NamedFiles, AreCheckedOnce) {
  const std::string directory = temporary_directory() + "/models--o--m";
  fs::create_directories(directory + "/blobs");
  save(Value::dict({{"w", counting({8}, whole({8}), 1)}}), directory + "/model.safetensors");
  const std::string content = text_of(directory + "/model.safetensors");
  const std::string blob = directory + "/blobs/" + sha_of(Sha::sha256, content);
  fs::rename(directory + "/model.safetensors", blob);
  expect_checked(blob, CheckedBy::sha256, content.size());  // and not by its own digests, too
}

}  // namespace
}  // namespace tessera
