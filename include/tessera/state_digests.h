// Digests of a training state that are the same on every number of ranks and in every layout.
//
// A load that brings elements to wrong places shows here, and not only in the loss.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "tessera/comm.h"
#include "tessera/load_options.h"
#include "tessera/storage.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// By name: the CRC-32 of a tensor's bytes in row-major order, which torch.save records of it, too.
using StateDigests = std::map<std::string, std::uint32_t>;

// What a load has brought into memory, summed while it was in the cache. Of tensors all of whose
// elements came so on this rank, state_digests() does not read the memory again. Whoever changes
// them in between gets the digests of before.
class LoadedSums {
 public:
  LoadedSums();
  ~LoadedSums();
  LoadedSums(const LoadedSums&) = delete;
  LoadedSums& operator=(const LoadedSums&) = delete;

  // For LoadOptions::filled of one load; the sums outlive it.
  [[nodiscard]] FilledHook hook();

 private:
  friend StateDigests state_digests(const Value& tree, Group& group, int threads,
                                    const LoadedSums* loaded);
  struct Sums;
  std::unique_ptr<Sums> sums_;
};

// Of all tensors in the dicts and lists of `tree`, of which each rank holds its own pieces, as in
// save() of checkpoint.h; on every rank. Ranks digest what they hold, and nothing else travels.
// Throws `mismatch` naming the first tensor that differs between ranks that hold the same part of
// it, `unsupported` for a tensor of which ranks cannot compute what the others hold. `threads`: of
// this rank, 1 to 256. `loaded`: of a load into this tree's memory, under the names that it has
// here. Collective.
[[nodiscard]] StateDigests state_digests(const Value& tree, Group& group, int threads = 1,
                                         const LoadedSums* loaded = nullptr);

// What a save of an OLMo kind left about its tensors in the checkpoint; empty: it has none. Throws
// `corrupt` for a file that is damaged.
[[nodiscard]] StateDigests saved_digests(const Store& checkpoint);

}  // namespace tessera
