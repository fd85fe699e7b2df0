#include "fsdp/forward_order.h"

#include <string>

#include "base/log.h"
#include "comm/text.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

std::string unit_called(const std::string& name) {
  return "unit '" + name + "'";
}

void require_same_on_all_ranks(const Unit& unit) {
  const auto names = unit.mesh().group().all_gather(to_bytes(unit.name()));
  for (std::size_t rank = 1; rank < names.size(); ++rank) {
    if (names[rank] == names[0]) continue;
    throw Error(ErrorCode::mismatch,
                "Forward order differs across ranks: rank 0 is all-gathering "
                "parameters for " +
                    unit_called(to_text(names[0])) + " while rank " + std::to_string(rank) +
                    " is all-gathering parameters for " + unit_called(to_text(names[rank])));
  }
}

}  // namespace

void ForwardOrder::begin_pass(bool is_training) {
  entered_ = 0;
  mode_ = !is_training ? Mode::off : first_.empty() ? Mode::first : Mode::later;
}

void ForwardOrder::enter(const Unit& unit) {
  if (mode_ == Mode::off) return;
  const auto at = entered_++;
  if (mode_ == Mode::first) {
    require_same_on_all_ranks(unit);
    first_.push_back(unit.name());
  } else if (!has_warned_ && (at >= first_.size() || first_[at] != unit.name())) {
    warn(unit);
  }
}

void ForwardOrder::warn(const Unit& unit) {
  deviates_ = true;
  const auto at = entered_ - 1;
  const auto expected =
      at < first_.size()
          ? "Expected to all-gather for " + unit_called(first_[at]) + " but trying to all-gather"
          : std::string(
                "Expected to not all-gather any more parameters in the forward but trying to "
                "all-gather");
  log(LogLevel::warning,
      "Forward order differs from that of the first iteration on rank " +
          std::to_string(unit.mesh().rank()) +
          ". Collectives are unchecked and may give incorrect results or hang.\n" + expected +
          " parameters for " + unit_called(unit.name()));
}

void ForwardOrder::end_pass() {
  if (deviates_) has_warned_ = true;
  mode_ = Mode::off;
}

}  // namespace tessera::detail
