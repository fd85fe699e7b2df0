// A reader that is held up while its checkpoint is replaced twice: what it began with is gone, not
// only renamed (fault-rows C04). At every call of its store, for every kind.
#include "five_kinds_testing.h"

#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/open/located.h"
#include "stepping_store.h"
#include "tessera/checkpoint.h"

namespace tessera {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::AnyOf;

constexpr int kMostSteps = 1000;

class ListeningToSteps {
 public:
  explicit ListeningToSteps(OnStep listener) { on_step() = std::move(listener); }
  ~ListeningToSteps() { on_step() = nullptr; }
  ListeningToSteps(const ListeningToSteps&) = delete;
  ListeningToSteps& operator=(const ListeningToSteps&) = delete;
};

// Reads saves of number 1 while, before step `at`, those of 2 and 3 take its place. Returns whether
// there was such a step. `far`: opened as in a store far away.
bool read_replaced_at(int at, CheckpointKind kind, const std::string& path, bool far) {
  save_by(2, kind, path, 1);
  int steps = 0;
  const ListeningToSteps listening([&](const char*, std::string_view) {
    if (++steps != at) return;
    for (const int number : {2, 3}) save_by(2, kind, path, number);
  });
  try {
    std::shared_ptr<Store> store = std::make_shared<SteppingStore>(posix_store(path));
    if (far) store = snapshot_store(std::move(store), true);
    const Value tree = Checkpoint::open(Location(store)).load();
    const bool is_of_one = std::ranges::any_of(std::array{1, 2, 3}, [&](int number) {
      return std::ranges::all_of(leaves_of(tree), [&](const Leaf& leaf) {
        return !leaf.value.is(Value::Kind::tensor) ||
               is_filled_with(leaf.value.as_tensor(), number);
      });
    });
    EXPECT_TRUE(is_of_one) << "step " << at;
  } catch (const Error& error) {
    EXPECT_THAT(error.code(), AnyOf(ErrorCode::not_found, ErrorCode::conflict))
        << "step " << at << ": " << error.what();
  }
  return steps >= at;
}

TEST(FiveKindsReplaced, C04_AtEveryStepAReaderFindsOneSaveOrHearsOfTheOther) {
  for_each_kind([](CheckpointKind kind, const std::string& path) {
    for (const bool far : {false, true}) {
      int at = 1;
      while (at < kMostSteps && read_replaced_at(at, kind, path, far)) ++at;
      EXPECT_GT(at, 3);
      EXPECT_LT(at, kMostSteps);
    }
  });
}

}  // namespace
}  // namespace tessera
