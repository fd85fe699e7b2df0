// Whether ranks that hold the same chunk hold the same bytes. Only one of them writes it, so values
// that drifted apart (a parameter that nobody averages, a buffer of each rank's own) would be lost
// in silence. Every holder digests a sample of its copy; rank 0 compares.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/save/save_plan.h"

namespace tessera {

// Which of `count` elements of `element_size` bytes a sample is made of, ascending: all of them up
// to 64 KiB, above that 64 windows of 1 KiB from the first to the last. What differs between the
// windows only is not seen.
[[nodiscard]] std::vector<FlatRange> sampled(std::int64_t count, std::size_t element_size);
// A digest of these elements, which are asked for in this order.
[[nodiscard]] std::uint64_t sample_of(const ElementSource& elements, std::int64_t count,
                                      std::size_t element_size);

// The copies of a chunk that are unlike the one that is written.
struct UnlikeCopies {
  std::string key;          // of the first such chunk, by name
  std::size_t keys = 0;     // that have one
  std::size_t writer = 0;   // rank whose bytes are written
  std::vector<int> unlike;  // ranks that hold others, ascending
};

// `samples[r]`: of the items that plan.copied[r] lists, in this order. Null: all copies are equal.
[[nodiscard]] std::optional<UnlikeCopies> compare_copies(
    const std::vector<std::vector<WriteItem>>& proposals, const SavePlan& plan,
    const std::vector<std::vector<std::uint64_t>>& samples);

// What to tell the user.
[[nodiscard]] std::string to_string(const UnlikeCopies& copies);

}  // namespace tessera
