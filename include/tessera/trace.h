// Trace: what the units of a model did on this rank, and when. Use it to test schedules and to look
// at overlap.
//
//   Trace trace(model);
//   for (int step = 0; step < 3; ++step) train(step);
//   trace.write("step.json", mesh);   // opens in chrome://tracing and in Perfetto
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/parameter.h"

namespace [[gnu::visibility("default")]] tessera {

namespace detail {
class Unit;
}  // namespace detail

enum class TraceStep : std::uint8_t {
  start_gather,   // the shards are on their way
  wait_gather,    // this rank can do nothing else until they are here
  finish_gather,  // the parameters are whole, or turned out not to be wanted
  free,           // the parameters are no longer whole
  enter_forward,
  leave_forward,
  enter_backward,
  leave_backward,
  start_reduce,
  wait_reduce,
  finish_reduce,  // this rank has its part of the average
};
[[nodiscard]] std::string_view to_string(TraceStep step) noexcept;

struct TraceEvent {
  TraceStep step = TraceStep::start_gather;
  std::string unit;                          // name of its module below the root
  std::uint64_t bytes = 0;                   // of the unit's whole parameters, in the type gathered
  std::chrono::steady_clock::time_point at;  // one clock for all processes of a host
};

// Records while it lives. Steps of communication are those of sharded units; all that happens
// inside DistributedDataParallel's buckets is one reduction here. Throws `invalid_argument` if a
// unit is being recorded already. Not thread-safe, as the model is not.
class [[nodiscard]] Trace {
 public:
  explicit Trace(ModuleRef module);
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  [[nodiscard]] const std::vector<TraceEvent>& events() const noexcept { return *events_; }
  void clear() noexcept { events_->clear(); }

  // Rank 0 writes to `path` what all ranks recorded, in Chrome's trace format. Each rank is a
  // process there, with one lane each for computing, gathers and reductions, and with the memory of
  // gathered parameters. Throws `io` on every rank if the file cannot be written. Collective.
  void write(const std::string& path, const Mesh& mesh) const;

 private:
  std::shared_ptr<std::vector<TraceEvent>> events_;
  std::vector<std::weak_ptr<detail::Unit>> units_;
};

// What a unit holds and has done, for tests and reports.
struct UnitReport {
  std::string name;                  // of its module, below the module asked for; empty: itself
  std::int64_t parameters = 0;       // elements, whole
  std::uint64_t shard_bytes = 0;     // held always
  std::uint64_t gathered_bytes = 0;  // held now for the gathered parameters; 0 when freed
  std::uint64_t gathers = 0;         // since fully_shard
  std::uint64_t reductions = 0;
};
[[nodiscard]] std::vector<UnitReport> unit_reports(ModuleRef module);

}  // namespace tessera
