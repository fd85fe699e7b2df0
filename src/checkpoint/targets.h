// The kinds that convert() writes. Each streams `leaves` of an opened checkpoint into a store.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/meter.h"
#include "checkpoint/reader.h"
#include "tessera/checkpoint.h"

namespace tessera {

struct ConvertJob {
  const Checkpoint& source;
  const std::vector<Leaf>& leaves;  // of `source`, selected, renamed, with their new types
  bool as_they_are = true;          // names and types are the source's own
  Store& store;                     // where the target goes
  std::string name;                 // the target file, for single files
  IfExists if_exists = IfExists::fail;
  int threads = 1;
  std::size_t window = 1 << 20;  // bytes of one buffer
  Meter& meter;
  IoCounters& counters;
  ConvertReport& report;
};

void write_safetensors(const ConvertJob& job);
void write_torch(const ConvertJob& job);
void write_dcp(const ConvertJob& job);

// Streams a whole tensor to `sink` from `at` on in row-major order; returns the CRC-32 of its
// bytes.
std::uint32_t stream_tensor(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                            ByteSink& sink, std::uint64_t at);

}  // namespace tessera
