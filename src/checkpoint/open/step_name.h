// What a run calls the checkpoint of a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

struct StepName {
  std::int64_t step = 0;
  bool unsharded = false;
};

// "step4" or "step4-unsharded".
[[nodiscard]] std::string to_string(const StepName& name);
// Takes such a name from the beginning of `text`, with a number as to_string writes it. None:
// `text` begins otherwise, and is unspecified then.
[[nodiscard]] std::optional<StepName> take_step_name(std::string_view& text);

}  // namespace tessera
