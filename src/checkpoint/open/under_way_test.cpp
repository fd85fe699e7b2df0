#include "checkpoint/open/under_way.h"

#include <chrono>
#include <future>
#include <memory>
#include <vector>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

// A save of a path, as others name it.
struct Named {
  Location saved;
  Location looked_at;
  Looks looks;
  bool is_awaited;
};

TEST(UnderWay, PlacesAreTheSameByTheirNames) {
  const auto store = memory_store();
  const std::vector<Named> cases = {
      {"/a/b", "/a/b", Looks::at_place, true},
      {"/a/b", "/a/b/model.pt", Looks::at_place, true},
      {"/a/b", "/a", Looks::at_place, false},
      {"/a/b", "/a", Looks::at_run, true},
      {"/a/b", "/a/b", Looks::at_run, true},
      {"/a/b", "/a/bc", Looks::at_place, false},
      {"/a/bc", "/a/b", Looks::at_run, false},
      {"s3://bucket/a/", "s3://bucket/a", Looks::at_place, true},
      {"s3://bucket/a", "s3://bucket/b", Looks::at_place, false},
      {Location(store, "a"), Location(store, "a"), Looks::at_place, true},
      {Location(store, "a"), Location(store), Looks::at_run, true},
      {Location(store, "a"), Location(store, "b"), Looks::at_place, false},
      {Location(store), Location(memory_store()), Looks::at_run, false},
      {"/a/b", Location(posix_store("/a/b")), Looks::at_place, true},
      {"/a/b", Location(posix_store("/a"), "b"), Looks::at_place, true}};
  for (const Named& named : cases) {
    const auto decision = std::make_shared<Decision>();
    const UnderWay under_way_now(named.saved, decision);
    auto wait = std::async(std::launch::async, [&] { await_saves(named.looked_at, named.looks); });
    const bool has_waited = wait.wait_for(30ms) == std::future_status::timeout;
    EXPECT_EQ(has_waited, named.is_awaited)
        << to_string(named.saved) << " and " << to_string(named.looked_at);
    decision->make();
    wait.get();
  }
}

}  // namespace
}  // namespace tessera
