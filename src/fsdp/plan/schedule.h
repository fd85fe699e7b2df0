// The states of a unit and the only ways between them. No libtorch, no ranks.
//
// Parameters:
//
//   sharded --start_gather--> gathering --finish_gather--> full --free--> sharded
//   full --park--> parked            a larger part stays on this rank after a forward
//   parked --start_gather--> gathering
//   parked --free--> sharded
//   sharded --show--> shown --hide--> sharded    whole, while nobody computes
//
// Gradients:
//
//   idle --enter_backward--> collecting --start_reduce--> reducing --finish_reduce--> idle
//   collecting --keep--> idle        they stay on this rank for a later reduction
//   any state --forget--> idle
//
// Whoever asks for a step that the tables do not have gets an Error: a schedule that would compute
// with a shard or reduce twice cannot be expressed.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

enum class ParamState : std::uint8_t { sharded, gathering, full, parked, shown };
enum class ParamStep : std::uint8_t { start_gather, finish_gather, free, park, show, hide };

enum class GradState : std::uint8_t { idle, collecting, reducing };
enum class GradStep : std::uint8_t { enter_backward, start_reduce, keep, finish_reduce, forget };

[[nodiscard]] std::string_view to_string(ParamState state) noexcept;
[[nodiscard]] std::string_view to_string(GradState state) noexcept;

// The state after `step`; throws `invalid_argument` where the table has none.
[[nodiscard]] ParamState next(ParamState state, ParamStep step);
[[nodiscard]] GradState next(GradState state, GradStep step);

}  // namespace tessera
