// Ranks that would need files which lie on the disk of another node: checkpoint-rows O-73,
// fault-rows F25.
#include <gmock/gmock.h>

#include <mutex>
#include <set>

#include "base/process.h"
#include "checkpoint/together/testing.h"
#include "storage/forwarding_store.h"
#include "tessera/restore.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;

using TwoDisks = std::vector<std::shared_ptr<Store>>;

// A checkpoint of four ranks, of which each disk has the files of two.
TwoDisks disks_with(CheckpointKind kind) {
  const auto saved = memory_store();
  save_by(4, Cut::flat, Location(saved, "c"), options_for(kind));
  TwoDisks disks{memory_store("disk-0"), memory_store("disk-1")};
  for (const auto& [name, bytes] : files_in(*saved, "c")) {
    for (std::size_t node = 0; node < 2; ++node) {
      if (!is_of_other_node(name, node)) put(*disks[node], "c/" + name, bytes, IfExists::fail);
    }
  }
  return disks;
}

// How ranks on these disks say that they cannot open it, all in the same words; empty: they can.
std::string refusal_of(const TwoDisks& disks, const std::vector<std::size_t>& disk_of, Cut cut) {
  const int ranks = static_cast<int>(disk_of.size());
  std::mutex mutex;
  std::set<std::string> said;
  run_ranks(ranks, [&](Group& group) {
    const auto rank = static_cast<std::size_t>(group.rank());
    std::string text;
    try {
      const Value model = state_of(cut, group.rank(), ranks).at("model");
      const auto where = std::make_shared<SubStore>(disks[disk_of[rank]], "c");
      (void)GroupCheckpoint::open(where, model, {}, group);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::incomplete);
      text = error.what();
    }
    const std::lock_guard lock(mutex);
    said.insert(text);
  });
  EXPECT_EQ(said.size(), 1U);
  return *said.begin();
}

std::string has_files(int rank, const std::string& of) {
  return "rank " + std::to_string(rank) + " on " + host_name() + " has those of ranks " + of;
}

TEST(SeveralDisks, OtherRanksAreToldWhoHasWhichFiles_F25) {
  for (const CheckpointKind kind : {CheckpointKind::olmo_local, CheckpointKind::olmo_legacy}) {
    SCOPED_TRACE(to_string(kind));
    const TwoDisks disks = disks_with(kind);
    const auto advice = HasSubstr("copy all files into one directory that every rank sees");
    EXPECT_THAT(refusal_of(disks, {0, 1}, Cut::flat),
                AllOf(HasSubstr("rank2.pt"), HasSubstr(has_files(0, "0 to 1")),
                      HasSubstr(has_files(1, "2 to 3")), advice));
    // As many as have saved it, whose nodes have changed places.
    EXPECT_THAT(
        refusal_of(disks, {1, 1, 0, 0}, Cut::flat),
        AllOf(HasSubstr(has_files(0, "2 to 3")), HasSubstr(has_files(2, "0 to 1")), advice));
    // Who sees no others has nothing to say of disks.
    EXPECT_THAT(refusal_of(disks, {0, 0}, Cut::flat),
                AllOf(HasSubstr("rank2.pt"), ::testing::Not(advice)));
  }
}

// Flat parameters, wanted as rows. Those of olmo_legacy are told by their ranks.
TEST(SeveralDisks, OtherLayoutsOfLocalAreToldWhoHasWhichFiles_O73) {
  const TwoDisks disks = disks_with(CheckpointKind::olmo_local);
  const std::vector<std::size_t> disk_of{0, 0, 1, 1};
  EXPECT_EQ(refusal_of(disks, disk_of, Cut::flat), "");
  EXPECT_THAT(refusal_of(disks, disk_of, Cut::rows),
              AllOf(HasSubstr("these are missing: model/rank2.pt"),
                    HasSubstr(has_files(0, "0 to 1")), HasSubstr(has_files(2, "2 to 3"))));
  EXPECT_EQ(refusal_of(disks_with(CheckpointKind::olmo_legacy), disk_of, Cut::rows), "");
  // As the error says: with all files on both disks any layout is restored.
  for (const std::size_t node : {0, 1}) {
    for (const auto& [name, bytes] : files_in(*disks[1 - node], "c"))
      put(*disks[node], "c/" + name, bytes, IfExists::replace);
  }
  EXPECT_EQ(refusal_of(disks, disk_of, Cut::rows), "");
}

}  // namespace
}  // namespace tessera
