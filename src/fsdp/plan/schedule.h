// The states of a unit and the only ways between them. No libtorch, no ranks.
//
//   parameters:  sharded --start_gather--> gathering --finish_gather--> full --free--> sharded
//   gradients:   idle --enter_backward--> collecting --start_reduce--> reducing --finish_reduce-->
//   idle
//                                         collecting --keep--> idle
//
// Whoever asks for a step that the tables do not have gets an Error: a schedule that would compute
// with a shard or reduce twice cannot be expressed.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

enum class ParamState : std::uint8_t { sharded, gathering, full };
enum class ParamStep : std::uint8_t { start_gather, finish_gather, free };

enum class GradState : std::uint8_t { idle, collecting, reducing };
enum class GradStep : std::uint8_t { enter_backward, start_reduce, keep, finish_reduce };

[[nodiscard]] std::string_view to_string(ParamState state) noexcept;
[[nodiscard]] std::string_view to_string(GradState state) noexcept;

// The state after `step`; throws `invalid_argument` where the table has none.
[[nodiscard]] ParamState next(ParamState state, ParamStep step);
[[nodiscard]] GradState next(GradState state, GradStep step);

}  // namespace tessera
