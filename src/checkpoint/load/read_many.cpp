// Slices of an open checkpoint into the caller's memory.
#include "base/parallel.h"
#include "base/stop.h"
#include "checkpoint/load/fill.h"
#include "checkpoint/read/buffers.h"
#include "checkpoint/read/castable.h"
#include "checkpoint/read/memory.h"
#include "layout/boxes.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {
namespace {

Filling filling_of(const Checkpoint& checkpoint, const ReadRequest& request,
                   const ReadOptions& options) {
  const Tensor& have = checkpoint.tensor(request.name);
  const Slice slice = request.slice.value_or(whole(have.shape));
  try {
    if (request.to.shape() != array_of(slice)) {
      throw Error(ErrorCode::mismatch, "memory of shape " + to_string(request.to.shape()) +
                                           " for " + to_string(slice) + " of a tensor of shape " +
                                           to_string(have.shape));
    }
    require_castable(have.dtype, request.to.dtype(), options.allow_cast, options.allow_wrap);
    Tensor wanted = request.to.tensor();
    wanted.shape = have.shape;
    wanted.pieces[0].slice = slice;
    require_writable(wanted, request.name);
    return {request.name, Value(std::move(wanted)), checkpoint.find(request.name)->value};
  } catch (Error& error) {
    throw error.at_key(request.name).at_path(checkpoint.path);
  }
}

}  // namespace

IoReport Checkpoint::read_many(const std::vector<ReadRequest>& requests,
                               const ReadOptions& options) const {
  require_going_on(options.stop);
  const HeedStop heeding(options.stop);
  require_threads(options.threads);
  std::vector<Filling> fillings;
  fillings.reserve(requests.size());
  for (const ReadRequest& request : requests)
    fillings.push_back(filling_of(*this, request, options));
  const Owners owners = owners_of(fillings);
  const std::uint64_t workers =
      std::min<std::uint64_t>(static_cast<std::uint64_t>(options.threads), fillings.size());
  const std::uint64_t cost =
      fillings.empty() ? kNearRequest : request_cost_of(fillings[0].found.as_tensor());
  const Buffers buffers = buffers_for(options.memory, workers, cost);
  IoCounters counters;
  Meter meter(options.progress, bytes_of(fillings), options.stop);
  // Half a window: elements that are converted are there twice.
  FillJob job{fillings, owners, options.threads,    nullptr,
              counters, meter,  buffers.window / 2, buffers.tile};
  job.shared = options.memory / 4;
  fill_all(job);
  meter.finish();
  return counters.report();
}

IoReport Checkpoint::read(std::string_view name, const TensorView& to,
                          const ReadOptions& options) const {
  return read_many({{std::string(name), to, std::nullopt}}, options);
}

IoReport Checkpoint::read(std::string_view name, const Slice& slice, const TensorView& to,
                          const ReadOptions& options) const {
  return read_many({{std::string(name), to, slice}}, options);
}

}  // namespace tessera
