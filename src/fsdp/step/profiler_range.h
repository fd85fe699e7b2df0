// Ranges of libtorch's profiler, with the names that PyTorch gives them (docs/fsdp-rows.md, 6.21).
#pragma once

#include <ATen/record_function.h>

#include <string>
#include <string_view>

#include "fsdp/unit/unit.h"

namespace tessera::detail {

// The name of a step in FSDP1 and in FSDP2.
struct RangeName {
  std::string_view fsdp1;
  std::string_view fsdp2;
};
inline constexpr RangeName kRangeForward{".forward", "forward"};
inline constexpr RangeName kRangeRootPreForward{"._root_pre_forward", "root_pre_forward"};
inline constexpr RangeName kRangeInputs{"._to_kwargs", "inputs_to_device"};
inline constexpr RangeName kRangePreForward{"._pre_forward", "pre_forward"};
inline constexpr RangeName kRangePostForward{"._post_forward", "post_forward"};
inline constexpr RangeName kRangePreForwardPrefetch{"._pre_forward_prefetch", "forward_prefetch"};
inline constexpr RangeName kRangePreBackward{"._pre_backward_hook", "pre_backward"};
inline constexpr RangeName kRangePostBackward{"._post_backward_hook", "post_backward"};
inline constexpr RangeName kRangePreBackwardPrefetch{"._pre_backward_prefetch",
                                                     "backward_prefetch"};
inline constexpr RangeName kRangePostBackwardPrefetch{"._post_backward_prefetch",
                                                      "backward_prefetch"};

// Within its life; costs next to nothing while nobody records.
class Range {
 public:
  Range(const Unit& unit, const RangeName& name) : record_(at::RecordScope::USER_SCOPE) {
    if (!record_.isActive()) return;
    auto text = "FullyShardedDataParallel" + std::string(name.fsdp1);
    if (!unit.is_fsdp1()) {
      text = "FSDP::" + std::string(name.fsdp2);
      if (!unit.name().empty()) text += " (" + unit.name() + ")";
    }
    record_.before(std::string_view(text));
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  at::RecordFunction record_;
};

}  // namespace tessera::detail
