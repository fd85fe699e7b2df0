// How ranks decide together: every rank contributes, rank 0 concludes; a failure reaches all.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>

#include "comm/message.h"
#include "tessera/comm.h"

namespace tessera {

// A rank's failure.

// What `work` throws, as an Error.
[[nodiscard]] std::optional<Error> failure_of(const std::function<void()>& work);
// What a rank throws that fails while the others cannot be heard any more: its own failure says
// more, and may follow from theirs, so it tells of both.
[[nodiscard]] Error with_loss(const Error& own, const Error& loss);
// Adds what `rank` reported. What it learnt of others by agreeing with them itself counts instead
// of its own words; what it agreed on with nobody else is its own.
void add_failure(std::map<int, Error>& failures, int rank, const Error& failure);

// One way up the tree of a group and one way down: every rank contributes, rank 0 concludes, and
// all ranks get the conclusion or the same error.

struct Conference {
  std::function<Bytes()> contribute;  // on every rank
  Combine combine;                    // any rank, if no rank has failed; may throw
  // On rank 0, if no rank has failed: what all ranks are told.
  std::function<Bytes(Bytes all)> conclude;
};

// Returns the conclusion on every rank. What any of the functions throws reaches every rank as with
// agree(). Collective: one fold and one spread.
Bytes confer(Group& group, const std::string& operation, const Conference& conference);

// Combines messages of one T each: `join(all, more)` adds what higher ranks have to that of lower
// ones.
template <typename T, typename Join>
[[nodiscard]] Combine combine_by(Join join) {
  return [join](const Bytes& left, const Bytes& right) {
    T all = from_message<T>(left);
    join(all, from_message<T>(right));
    return to_message(all);
  };
}

// A conference whose ranks contribute a value each (comm/message.h), which combine_by() joins. What
// is told is a message of what `conclude` returns, or empty if that is nothing.
template <typename Contribute, typename Join, typename Conclude>
[[nodiscard]] Conference conference_of(Contribute contribute, Join join, Conclude conclude) {
  using T = std::invoke_result_t<Contribute>;
  return {[contribute] { return to_message(contribute()); }, combine_by<T>(join),
          [conclude](const Bytes& all) {
            if constexpr (std::is_void_v<std::invoke_result_t<Conclude, T>>) {
              conclude(from_message<T>(all));
              return Bytes();
            } else {
              return to_message(conclude(from_message<T>(all)));
            }
          }};
}

// Combines nothing: for conferences whose ranks contribute only their success.
[[nodiscard]] Bytes combine_nothing(const Bytes& left, const Bytes& right);

}  // namespace tessera
