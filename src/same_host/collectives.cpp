#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "base/numbers.h"
#include "same_host/same_host.h"
#include "tessera/error.h"

namespace tessera::same_host {
namespace {

// Elements that are added up at a time, in a buffer that stays in the nearest cache.
constexpr std::size_t kBlock = 512;

template <typename T>
inline constexpr bool kShort = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

// In what a type is added up.
template <typename T>
using SumOf = std::conditional_t<kShort<T>, float, T>;

template <typename T>
T stored(SumOf<T> value) {
  if constexpr (kShort<T>) {
    return T::from(value);
  } else {
    return value;
  }
}

template <Reduction kReduction, typename T>
T combine(T a, T b) {
  if constexpr (kReduction == Reduction::minimum) {
    return a < b || a != a ? a : b;
  } else if constexpr (kReduction == Reduction::maximum) {
    return a > b || a != a ? a : b;
  } else if constexpr (std::is_integral_v<T>) {
    using Wrapping = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
  } else {
    return a + b;
  }
}

// One block; `count` is a constant for all but the last, so that the loops become vector code.
template <typename T, Reduction kReduction>
inline __attribute__((always_inline)) void reduce_block(std::span<const std::byte* const> sources,
                                                        std::byte* out, std::size_t first,
                                                        std::size_t count) {
  using Sum = SumOf<T>;
  Sum sums[kBlock];
  const auto* own = reinterpret_cast<const T*>(sources[0]) + first;
  for (std::size_t i = 0; i < count; ++i) sums[i] = own[i];
  for (std::size_t rank = 1; rank < sources.size(); ++rank) {
    const auto* from = reinterpret_cast<const T*>(sources[rank]) + first;
    for (std::size_t i = 0; i < count; ++i)
      sums[i] = combine<kReduction>(sums[i], static_cast<Sum>(from[i]));
  }
  if constexpr (kReduction == Reduction::average) {
    const auto ranks = static_cast<Sum>(sources.size());
    for (std::size_t i = 0; i < count; ++i) sums[i] /= ranks;
  }
  auto* to = reinterpret_cast<T*>(out) + first;
  for (std::size_t i = 0; i < count; ++i) to[i] = stored<T>(sums[i]);
}

template <typename T, Reduction kReduction>
void reduce_all(std::span<const std::byte* const> sources, std::byte* out, std::size_t elements) {
  std::size_t first = 0;
  for (; first + kBlock <= elements; first += kBlock)
    reduce_block<T, kReduction>(sources, out, first, kBlock);
  reduce_block<T, kReduction>(sources, out, first, elements - first);
}

template <typename T>
void reduce_as(Reduction reduction, std::span<const std::byte* const> sources, std::byte* out,
               std::size_t elements) {
  switch (reduction) {
    case Reduction::sum:
      return reduce_all<T, Reduction::sum>(sources, out, elements);
    case Reduction::average:
      if constexpr (!std::is_integral_v<T>)
        return reduce_all<T, Reduction::average>(sources, out, elements);
      break;
    case Reduction::minimum:
      return reduce_all<T, Reduction::minimum>(sources, out, elements);
    case Reduction::maximum:
      return reduce_all<T, Reduction::maximum>(sources, out, elements);
  }
  throw Error(ErrorCode::unsupported, "integers have no average");
}

// Bytes 0 and 1: the sum of two could be a 2.
void reduce_bools(Reduction reduction, std::span<const std::byte* const> sources, std::byte* out,
                  std::size_t elements) {
  reduce_as<std::uint8_t>(reduction == Reduction::sum ? Reduction::maximum : reduction, sources,
                          out, elements);
}

struct Reducible {
  DType dtype;
  bool has_average;
  void (*reduce)(Reduction, std::span<const std::byte* const>, std::byte*, std::size_t);
};

constexpr std::array<Reducible, 10> kReducible{{{DType::float32, true, reduce_as<float>},
                                                {DType::float64, true, reduce_as<double>},
                                                {DType::float16, true, reduce_as<Half>},
                                                {DType::bfloat16, true, reduce_as<BFloat16>},
                                                {DType::int8, false, reduce_as<std::int8_t>},
                                                {DType::int16, false, reduce_as<std::int16_t>},
                                                {DType::int32, false, reduce_as<std::int32_t>},
                                                {DType::int64, false, reduce_as<std::int64_t>},
                                                {DType::uint8, false, reduce_as<std::uint8_t>},
                                                {DType::bool8, false, reduce_bools}}};

}  // namespace

bool can_reduce(DType dtype, Reduction reduction) noexcept {
  const auto* found = std::ranges::find(kReducible, dtype, &Reducible::dtype);
  if (found == kReducible.end()) return false;
  return found->has_average || reduction != Reduction::average;
}

void reduce(DType dtype, Reduction reduction, std::span<const std::byte* const> sources,
            std::byte* out, std::size_t elements) {
  const auto* found = std::ranges::find(kReducible, dtype, &Reducible::dtype);
  if (found == kReducible.end()) {
    throw Error(ErrorCode::unsupported,
                "tensors of " + std::string(to_string(dtype)) + " are not reduced");
  }
  found->reduce(reduction, sources, out, elements);
}

namespace {

using Slots = std::span<const std::byte* const>;

// Elements are not cut: no type is longer.
constexpr std::size_t kWhole = 16;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  // Null pointers of empty arrays are not for memcpy.
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

// The terms of a sum: `own` of this rank and what the others put at `offset` of their slots.
std::vector<const std::byte*> sources_of(Slots slots, std::size_t offset, int rank,
                                         const std::byte* own) {
  std::vector<const std::byte*> sources;
  for (const auto* slot : slots) sources.push_back(slot + offset);
  sources[static_cast<std::size_t>(rank)] = own;
  return sources;
}

void reduce_slice(const ReduceArguments& args, std::span<const std::byte* const> sources,
                  std::size_t begin, std::size_t size) {
  reduce(args.dtype, args.reduction, sources, args.out + begin, size / size_of(args.dtype));
}

}  // namespace

Slices whole_slots(const Exchange& exchange, std::size_t bytes) {
  return {bytes, exchange.slot_bytes()};
}
Slices shared_slots(const Exchange& exchange, std::size_t bytes) {
  const auto part = exchange.slot_bytes() / static_cast<std::size_t>(exchange.size());
  if (part < kWhole) {
    throw Error(ErrorCode::unsupported, "slots of " + std::to_string(exchange.slot_bytes()) +
                                            " bytes are too small for " +
                                            std::to_string(exchange.size()) + " ranks");
  }
  return {bytes, part / kWhole * kWhole};
}

Call barrier_call() {
  return {.name = "barrier"};
}

Call gather_call(const Exchange& exchange, std::string name, GatherArguments args) {
  const auto slices = whole_slots(exchange, args.bytes);
  const int rank = exchange.rank();
  Call call{.name = std::move(name),
            .rounds = slices.rounds(),
            .source = args.outs.empty() ? kNobody : kEveryone};
  if (args.root == kEveryone || args.root != rank) {
    call.put = [slices, in = args.in](std::int64_t round, std::byte* slot) {
      copy_bytes(slot, in + slices.begin(round), slices.size(round));
    };
  }
  if (!args.outs.empty()) {
    call.take = [slices, rank, args = std::move(args)](std::int64_t round, Slots slots) {
      const auto begin = slices.begin(round);
      for (std::size_t r = 0; r < slots.size(); ++r) {
        const auto* from = static_cast<int>(r) == rank ? args.in + begin : slots[r];
        copy_bytes(args.outs[r] + begin, from, slices.size(round));
      }
    };
  }
  return call;
}

Call scatter_call(const Exchange& exchange, std::string name, ScatterArguments args) {
  const auto slices = shared_slots(exchange, args.bytes);
  const auto rank = static_cast<std::size_t>(exchange.rank());
  Call call{.name = std::move(name), .rounds = slices.rounds(), .source = args.root};
  if (exchange.rank() == args.root) {
    call.put = [slices, rank, ins = args.ins](std::int64_t round, std::byte* slot) {
      for (std::size_t r = 0; r < ins.size(); ++r) {
        if (r != rank)
          copy_bytes(slot + r * slices.most, ins[r] + slices.begin(round), slices.size(round));
      }
    };
  }
  call.take = [slices, rank, args = std::move(args)](std::int64_t round, Slots slots) {
    const auto begin = slices.begin(round);
    const auto* from = args.ins.empty()
                           ? slots[static_cast<std::size_t>(args.root)] + rank * slices.most
                           : args.ins[rank] + begin;
    copy_bytes(args.out + begin, from, slices.size(round));
  };
  return call;
}

Call broadcast_call(const Exchange& exchange, std::string name, const BroadcastArguments& args) {
  const auto slices = whole_slots(exchange, args.bytes);
  Call call{.name = std::move(name), .rounds = slices.rounds(), .source = args.root};
  if (exchange.rank() == args.root) {
    call.put = [slices, args](std::int64_t round, std::byte* slot) {
      copy_bytes(slot, args.data + slices.begin(round), slices.size(round));
    };
  } else {
    call.take = [slices, args](std::int64_t round, Slots slots) {
      copy_bytes(args.data + slices.begin(round), slots[static_cast<std::size_t>(args.root)],
                 slices.size(round));
    };
  }
  return call;
}

Call all_reduce_call(const Exchange& exchange, std::string name, const std::byte* in,
                     const ReduceArguments& args) {
  const auto slices = whole_slots(exchange, args.elements * size_of(args.dtype));
  return {.name = std::move(name),
          .rounds = slices.rounds(),
          .source = kEveryone,
          .put =
              [slices, in](std::int64_t round, std::byte* slot) {
                copy_bytes(slot, in + slices.begin(round), slices.size(round));
              },
          .take =
              [slices, in, args, rank = exchange.rank()](std::int64_t round, Slots slots) {
                const auto begin = slices.begin(round);
                reduce_slice(args, sources_of(slots, 0, rank, in + begin), begin,
                             slices.size(round));
              }};
}

Call reduce_scatter_call(const Exchange& exchange, std::string name,
                         std::vector<const std::byte*> ins, const ReduceArguments& args) {
  const auto slices = shared_slots(exchange, args.elements * size_of(args.dtype));
  const auto rank = static_cast<std::size_t>(exchange.rank());
  const auto* own = ins[rank];
  return {.name = std::move(name),
          .rounds = slices.rounds(),
          .source = kEveryone,
          .put =
              [slices, rank, ins = std::move(ins)](std::int64_t round, std::byte* slot) {
                for (std::size_t r = 0; r < ins.size(); ++r) {
                  if (r != rank)
                    copy_bytes(slot + r * slices.most, ins[r] + slices.begin(round),
                               slices.size(round));
                }
              },
          .take =
              [slices, rank, own, args](std::int64_t round, Slots slots) {
                const auto begin = slices.begin(round);
                reduce_slice(
                    args,
                    sources_of(slots, rank * slices.most, static_cast<int>(rank), own + begin),
                    begin, slices.size(round));
              }};
}

}  // namespace tessera::same_host
