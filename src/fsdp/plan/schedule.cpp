#include "fsdp/plan/schedule.h"

#include <array>
#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

template <typename State, typename Step>
struct Transition {
  State from;
  Step step;
  State to;
};

constexpr std::array<Transition<ParamState, ParamStep>, 8> kParamTable{{
    {ParamState::sharded, ParamStep::start_gather, ParamState::gathering},
    {ParamState::gathering, ParamStep::finish_gather, ParamState::full},
    {ParamState::full, ParamStep::free, ParamState::sharded},
    {ParamState::full, ParamStep::park, ParamState::parked},
    {ParamState::parked, ParamStep::start_gather, ParamState::gathering},
    {ParamState::parked, ParamStep::free, ParamState::sharded},
    {ParamState::sharded, ParamStep::show, ParamState::shown},
    {ParamState::shown, ParamStep::hide, ParamState::sharded},
}};

constexpr std::array<Transition<GradState, GradStep>, 7> kGradTable{{
    {GradState::idle, GradStep::enter_backward, GradState::collecting},
    {GradState::collecting, GradStep::start_reduce, GradState::reducing},
    {GradState::collecting, GradStep::keep, GradState::idle},
    {GradState::reducing, GradStep::finish_reduce, GradState::idle},
    {GradState::idle, GradStep::forget, GradState::idle},
    {GradState::collecting, GradStep::forget, GradState::idle},
    {GradState::reducing, GradStep::forget, GradState::idle},
}};

constexpr std::array<std::string_view, 5> kParamNames{"sharded", "gathering", "full", "parked",
                                                      "shown"};
constexpr std::array<std::string_view, 6> kParamStepNames{"start_gather", "finish_gather", "free",
                                                          "park",         "show",          "hide"};
constexpr std::array<std::string_view, 3> kGradNames{"idle", "collecting", "reducing"};
constexpr std::array<std::string_view, 5> kGradStepNames{"enter_backward", "start_reduce", "keep",
                                                         "finish_reduce", "forget"};

template <typename Names, typename Value>
std::string name_of(const Names& names, Value value) {
  return std::string(names[static_cast<std::size_t>(value)]);
}

template <typename Table, typename State, typename Step>
const typename Table::value_type* find(const Table& table, State state, Step step) {
  for (const auto& row : table) {
    if (row.from == state && row.step == step) return &row;
  }
  return nullptr;
}

}  // namespace

std::string_view to_string(ParamState state) noexcept {
  return kParamNames[static_cast<std::size_t>(state)];
}
std::string_view to_string(GradState state) noexcept {
  return kGradNames[static_cast<std::size_t>(state)];
}

ParamState next(ParamState state, ParamStep step) {
  if (const auto* row = find(kParamTable, state, step)) return row->to;
  throw Error(ErrorCode::invalid_argument, "no step " + name_of(kParamStepNames, step) +
                                               " for parameters that are " +
                                               name_of(kParamNames, state));
}

GradState next(GradState state, GradStep step) {
  if (const auto* row = find(kGradTable, state, step)) return row->to;
  throw Error(ErrorCode::invalid_argument, "no step " + name_of(kGradStepNames, step) +
                                               " for gradients that are " +
                                               name_of(kGradNames, state));
}

}  // namespace tessera
