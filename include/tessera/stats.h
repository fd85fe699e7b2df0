// What numbers the tensors of a checkpoint hold: how many are not finite, how large the others are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/job.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// What makes a tensor worth a look; the first that is true.
enum class Suspicion : std::uint8_t {
  none,
  no_numbers,  // a storage of quantized elements, whose bits mean nothing without their scales
  empty,       // no elements
  not_finite,  // a NaN or an infinity
  zero,        // all of it
  constant,    // two numbers or more, and all the same
  tiny,        // the median magnitude is below 2^-50, about 1e-15
  huge,        // the median magnitude is 2^50 or more, about 1e15
};
[[nodiscard]] std::string_view to_string(Suspicion suspicion) noexcept;  // "not finite"

// A complex element is two numbers, its real and its imaginary part, and one of float4_e2m1fn_x2
// is two as well; any other element is one. False and true are 0 and 1.
struct TensorStats {
  // Exponents that have a bin: the first one has all smaller numbers besides, the last one all
  // larger ones.
  static constexpr int kFirstExponent = -47;
  static constexpr std::size_t kBins = 64;

  std::string name;
  DType dtype = DType::float32;
  Shape shape;
  std::uint64_t elements = 0;
  std::uint64_t numbers = 0;  // 0: there are no elements, or their bits are no numbers
  std::uint64_t nans = 0;
  std::uint64_t positive_infinities = 0;
  std::uint64_t negative_infinities = 0;
  std::optional<Shape> first_not_finite = {};  // the index of the first such element
  std::uint64_t zeros = 0;

  // Of the finite numbers, in float64; none where there are none. Integers have no rounding in
  // `smallest` and `largest`; -0.0 is 0.0 there.
  std::optional<Value> smallest = {};
  std::optional<Value> largest = {};
  std::optional<double> mean = {};
  std::optional<double> deviation = {};  // the standard deviation, divided by how many there are
  std::optional<double> norm = {};       // the root of the sum of the squares

  // Of the finite numbers that are not zero. Bin i counts those whose magnitude is from 2^e to
  // below 2^(e + 1), where e is kFirstExponent + i.
  std::array<std::uint64_t, kBins> exponents = {};
  std::optional<int> median_exponent =
      {};  // e of the median magnitude, whether it has a bin or not

  [[nodiscard]] bool is_finite() const noexcept {
    return nans + positive_infinities + negative_infinities == 0;
  }
  [[nodiscard]] Suspicion suspicion() const;
};

struct StatsOptions {
  int threads = 2;  // 1 to 1024
  ProgressHook progress = {};
  std::stop_token stop = {};  // ends the work with `cancelled`
};

// One for each tensor among the leaves, in their order; values are left out, and so are tensors
// inside of them (of tuples and objects). All elements are read once, with every checksum that
// there is. The results do not depend on the number of threads, nor on how a tensor is cut into
// pieces: sums are taken over blocks of its elements in row-major order, which are combined in that
// order. Memory is bounded: a window and the sums of a tensor for each thread. Throws `incomplete`
// where leaves lie in missing files, and what reading throws.
[[nodiscard]] std::vector<TensorStats> stats_of(const Checkpoint& checkpoint,
                                                const StatsOptions& options = {});

}  // namespace tessera
