#include "comm/same_host/collectives.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "tessera/error.h"

namespace tessera::same_host {
namespace {

using Slots = std::span<const std::byte* const>;

// Elements are not cut: no type is longer.
constexpr std::size_t kWhole = 16;

void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  // Null pointers of empty arrays are not for memcpy.
  if (to != from && bytes > 0) std::memcpy(to, from, bytes);
}

// What is added up: `own` of this rank and what the others put at `offset` of their slots.
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
