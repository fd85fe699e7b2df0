#include "checkpoint/save/data_files.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/parallel.h"
#include "checkpoint/test_support.h"
#include "format/dcp/dcp.h"
#include "tessera/data_files.h"

namespace tessera {

// A DCP directory whose plan somebody else has made.

namespace {

using testing_support::counting;
using testing_support::floats;
using testing_support::names_in;
using testing_support::temporary_directory;

const Shape kShape{4, 3};

// What a planner elsewhere says of this save: tensor "w" in two parts, and value "n".
struct Planned {
  std::vector<std::byte> metadata;
  std::vector<DataFileReceipt> receipts;
};

dcp::Chunk chunk_in(const std::string& file, const Box& box, const ItemExtent& place) {
  return {box, {file, place.offset, place.length, {}}};
}

Planned write_files(const std::string& directory, const std::string& save_id, float first) {
  const Box top{{0, 0}, {1, 3}};
  const Box rest{{1, 0}, {3, 3}};
  const std::string attempt = new_attempt();
  DataFileWriter lower(directory, data_file_name(0, 0, attempt));
  DataFileWriter upper(directory, data_file_name(1, 0, attempt));
  const ItemExtent value = lower.value(Value(7));
  const auto part = [&](const Box& box) {
    Tensor tensor = counting(kShape, box, first);
    tensor.shape = box.sizes;
    tensor.pieces.front().slice = whole(box.sizes);
    return tensor;
  };
  const ItemExtent w0 = lower.tensor(part(top));
  const ItemExtent w1 = upper.tensor(part(rest));
  Planned planned;
  planned.receipts = {lower.finish(), upper.finish()};
  dcp::Metadata metadata;
  static_cast<dcp::Origin&>(metadata) = {"1.0.0", directory, save_id, true};
  dcp::Entry w;
  static_cast<dcp::EntryHead&>(w) = {"w",  Path{std::string("w")}, true, DType::float32, kShape,
                                     false};
  w.chunks.push_back(chunk_in(planned.receipts[0].name, top, w0));
  w.chunks.push_back(chunk_in(planned.receipts[1].name, rest, w1));
  dcp::Entry n;
  static_cast<dcp::EntryHead&>(n) = {"n", Path{std::string("n")}, false, DType::float32, {}, false};
  n.item = {planned.receipts[0].name, value.offset, value.length, {}};
  metadata.entries = {w, n};
  planned.metadata = dcp::encode(metadata);
  return planned;
}

void require_loads(const std::string& directory, float first) {
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_TRUE(checkpoint.warnings.empty());
  const Value tree = checkpoint.load();
  EXPECT_EQ(tree.at("n").as_int(), 7);
  EXPECT_EQ(floats(tree.at("w").as_tensor()).back(), first + 11);
  EXPECT_THAT(verify(directory).findings, testing::IsEmpty());
}

TEST(DataFiles, AreACheckpointWithDigestsOnceCommitted) {
  const std::string directory = temporary_directory() + "/c";
  DcpDirectory to(directory);
  const Planned planned = write_files(directory, "abc-1", 0);
  to.commit(planned.metadata, "abc-1", planned.receipts);
  require_loads(directory, 0);
  std::fstream file(directory + "/" + planned.receipts[1].name, std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(planned.receipts[1].size / 2)).put('?');
  file.close();
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory).load(); }), ErrorCode::corrupt);
}

TEST(DataFiles, TheOldCheckpointStaysUntilTheCommitAndItsFilesUntilTheNextSave) {
  const std::string directory = temporary_directory() + "/c";
  for (const float first : {0.F, 100.F}) {
    DcpDirectory to(directory);
    const std::string id = first > 0 ? "abc-2" : "abc-1";
    const Planned planned = write_files(directory, id, first);
    if (first > 0) require_loads(directory, 0);
    to.commit(planned.metadata, id, planned.receipts);
    require_loads(directory, first);
    EXPECT_EQ(Checkpoint::open(directory).save_id, id);
  }
}

TEST(DataFiles, OneThatIsNotFinishedLeavesNothing) {
  const std::string directory = temporary_directory();
  {
    DataFileWriter file(directory, data_file_name(0, 0, new_attempt()));
    (void)file.value(Value(1));
  }
  EXPECT_THAT(names_in(directory), testing::IsEmpty());
}

TEST(DataFiles, OneThatIsMissingOrOfAnotherSizeEndsTheSave) {
  const auto before = visible_within.exchange(std::chrono::milliseconds(1));
  const std::string directory = temporary_directory() + "/c";
  for (const bool missing : {true, false}) {
    DcpDirectory to(directory);
    Planned planned = write_files(directory, "abc-1", 0);
    const std::filesystem::path file = directory + "/" + planned.receipts[1].name;
    missing ? (void)std::filesystem::remove(file) : std::filesystem::resize_file(file, 10);
    EXPECT_EQ(code_of([&] { to.commit(planned.metadata, "abc-1", planned.receipts); }),
              missing ? ErrorCode::incomplete : ErrorCode::corrupt);
    for (const std::string& name : names_in(directory)) EXPECT_FALSE(name.ends_with(".distcp"));
  }
  visible_within = before;
}

TEST(DataFiles, TheirDirectoryIsForOneSave) {
  const std::string directory = temporary_directory() + "/c";
  DcpDirectory to(directory);
  EXPECT_EQ(code_of([&] { DcpDirectory rival(directory); }), ErrorCode::conflict);
  const Planned planned = write_files(directory, "abc-1", 0);
  EXPECT_EQ(code_of([&] { to.commit(planned.metadata, "a/b", planned.receipts); }),
            ErrorCode::invalid_argument);
  to.commit(planned.metadata, "abc-1", planned.receipts);
  to = DcpDirectory(temporary_directory());
  EXPECT_EQ(code_of([&] { DcpDirectory late(directory, {.overwrite = false}); }),
            ErrorCode::already_exists);
}

TEST(DataFiles, TakeWholeTensorsAlone) {
  DataFileWriter file(temporary_directory(), data_file_name(0, 0, new_attempt()));
  EXPECT_EQ(code_of([&] {
              (void)file.tensor(counting(kShape, Box{{0, 0}, {1, 3}}, 0));
            }),
            ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
