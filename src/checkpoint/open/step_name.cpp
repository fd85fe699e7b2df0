#include "checkpoint/open/step_name.h"

#include <charconv>

namespace tessera {
namespace {

constexpr std::string_view kStep = "step", kUnsharded = "-unsharded";

bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const auto digits = text.substr(0, static_cast<std::size_t>(end - text.data()));
  if (error != std::errc() || digits != std::to_string(number) || number < 0) return std::nullopt;
  text.remove_prefix(digits.size());
  return number;
}

}  // namespace

std::string to_string(const StepName& name) {
  return std::string(kStep) + std::to_string(name.step) +
         std::string(name.unsharded ? kUnsharded : "");
}

std::optional<StepName> take_step_name(std::string_view& text) {
  if (!take_prefix(text, kStep)) return std::nullopt;
  const auto step = take_number(text);
  if (!step) return std::nullopt;
  return StepName{*step, take_prefix(text, kUnsharded)};
}

}  // namespace tessera
