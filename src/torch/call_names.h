// Names of calls, where messages between ranks do not say what they are for (Gloo): before a rank
// uses what a collective brings, all ranks tell each other what they called, and those that called
// different things learn it at once instead of waiting until the deadline.
//
// Names have a tag of their own and one length, so that those of the n-th operation meet whatever
// the operations are. All operations of a group have one order, so they share one CallNames.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/process.h"
#include "tessera/error.h"

namespace tessera {

class CallNames {
 public:
  // Names under way to and from all others.
  class Pending {
    friend class CallNames;
    at::Tensor mine_;
    std::vector<at::Tensor> theirs_;  // by rank; none in this one's place
    std::vector<std::pair<int, c10::intrusive_ptr<c10d::Work>>> works_;  // with which rank
  };

  // Messages on their way, and the memory that they come from and go to.
  struct UnderWay {
    std::vector<at::Tensor> memory;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    Pending name;
  };

  explicit CallNames(c10::intrusive_ptr<c10d::ProcessGroup> group) : group_(std::move(group)) {}

  // Sends the first kComparedBytes of what has to be equal on all ranks; whereabouts travel along
  // (comm/whereabouts.h). Throws what compare has thrown before.
  [[nodiscard]] Pending start(const std::string& name);
  // For what Gloo does not survive when ranks called different things, since it ends the process
  // where messages have other lengths: `begin` runs once the names were compared, which is when the
  // next operation starts or when begin_held is called, whatever comes first. That is the same on
  // all ranks.
  void start_before(const std::string& name, std::function<void()> begin);
  // Throws what compare throws.
  void begin_held();
  // Waits for the others' names. Throws `mismatch` when a rank called something else, `timeout` or
  // `peer_failed` naming a rank that does not come. From then on every start throws the same:
  // messages that nobody took are still under way and would match later ones.
  void compare(Pending pending);
  // Lets messages of an operation end whose user has gone before. Gloo would not send them any
  // more, and another operation's would match in their place. They stay until a later operation has
  // ended, which is behind them on the wire.
  void let_end(UnderWay messages);

 private:
  void end_left();
  void wait_for_all(const Pending& pending);
  [[noreturn]] void fail(Error error);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  MadeHere made_;
  std::vector<UnderWay> left_;
  std::function<void()> held_;  // compares the last names and begins; empty: nothing waits for them
  std::optional<Error> broken_;
};

// Null where the group's own collectives compare what is called, or it is not Gloo's.
[[nodiscard]] std::shared_ptr<CallNames> make_call_names(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

// Tells the others of an operation that is waited for at once. `names` may be null.
inline void require_same_call(CallNames* names, const std::string& name) {
  if (names != nullptr) names->compare(names->start(name));
}

}  // namespace tessera
