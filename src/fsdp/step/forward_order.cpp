#include "fsdp/step/forward_order.h"

#include <algorithm>
#include <string>

#include "base/log.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

std::string unit_called(const std::string& name) {
  return "unit '" + name + "'";
}

// The unit's name, and for each of its parameters whether it is trained.
std::string text_of(const Unit& unit) {
  std::string text = unit.name() + '\n';
  for (const auto& param : unit.params()) text += param.full.requires_grad() ? '1' : '0';
  return text;
}

std::string name_in(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

void require_same_on_all_ranks(const Unit& unit) {
  const Purpose purpose("comparing units in the first training pass");
  // Copies too: they meet in the sums of gradients.
  const auto all = unit.all_ranks().group().all_gather(to_bytes(text_of(unit)));
  const auto first = to_text(all[0]);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const auto other = to_text(all[rank]);
    if (other == first) continue;
    if (name_in(other) != name_in(first)) {
      throw Error(ErrorCode::mismatch,
                  "Forward order differs across ranks: rank 0 is all-gathering "
                  "parameters for " +
                      unit_called(name_in(first)) + " while rank " + std::to_string(rank) +
                      " is all-gathering parameters for " + unit_called(name_in(other)));
    }
    const auto differs = std::ranges::mismatch(first, other).in1 - first.begin();
    const auto index = static_cast<std::size_t>(differs) - unit.name().size() - 1;
    throw Error(ErrorCode::mismatch,
                "rank 0 and rank " + std::to_string(rank) +
                    " do not both train this parameter: freeze the same ones on every rank")
        .at_key(unit.param_name(index));
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
    known_.push_back(unit.weak_from_this());
  } else if (!has_warned_ && !is_expected(unit, at)) {
    warn(unit);
  }
}

bool ForwardOrder::is_expected(const Unit& unit, std::size_t at) const {
  return at < first_.size() && first_[at] == unit.name();
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
