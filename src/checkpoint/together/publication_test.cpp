// When a checkpoint that ranks save is there.
#include <gtest/gtest.h>

#include <atomic>

#include "checkpoint/together/testing.h"

namespace tessera {
namespace {

using namespace testing_support;

// Does not show the published directory before it was asked for it some times.
class LateDirectory final : public testing_support::ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] bool exists(std::string_view name) const override {
    if (name == "step4/config.yaml" && refusals_-- > 0) return false;
    return inner().exists(name);
  }
  [[nodiscard]] bool was_asked_often() const { return refusals_ < 0; }

 private:
  mutable std::atomic<int> refusals_{3};
};

TEST(Publication, ADirectoryThatAppearsLateIsWaitedFor_O04_F24) {
  const auto store = memory_store();
  run_ranks(2, [&](Group& group) {
    const auto late = std::make_shared<LateDirectory>(store);
    const Location where = group.rank() == 0 ? Location(store, "step4") : Location(late, "step4");
    const SaveResult result = save(state_of(Cut::flat, group.rank(), 2), where,
                                   options_for(CheckpointKind::olmo_full), group);
    EXPECT_GT(result.files, 0U);
    EXPECT_EQ(late->was_asked_often(), group.rank() == 1);
  });
}

}  // namespace
}  // namespace tessera
