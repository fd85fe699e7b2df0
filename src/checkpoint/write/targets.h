// The kinds that convert() writes. Each streams `leaves` of an opened checkpoint into a store.
#pragma once

#include <algorithm>
#include <complex>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"

namespace tessera {

class Resumption;

// The tensors whose numbers --dtype changed otherwise than by rounding. Any thread may add.
class CastLosses {
 public:
  void add(const std::string& name, const CastLoss& loss);
  // One for each way, with the first name.
  [[nodiscard]] std::vector<std::string> notes(DType dtype) const;

 private:
  std::mutex mutex_;
  std::set<std::string> infinities_, integers_;  // guarded by mutex_ while threads add
};

struct ConvertJob {
  const Checkpoint& source;
  const std::vector<Leaf>& leaves;  // of `source`, selected, renamed, with their new types
  const ConvertOptions& options;
  Store& store;            // where the target goes
  std::string name;        // the target file, for single files
  std::string final_name;  // what the target directory is called when all is done
  IfExists if_exists = IfExists::fail;
  int threads = 1;
  std::size_t window = 1 << 20;                 // bytes of one buffer
  std::size_t tile = TensorReader::kTileBytes;  // bytes of a thread's elements put into order
  Meter& meter;
  IoCounters& counters;
  ConvertReport& report;
  StorageChecks* checks;  // of what was read in this job
  CastLosses& losses;
  bool appears_whole =
      false;             // `store` is a directory that the caller makes visible when all is done
  bool is_alone = true;  // nobody else writes into `store`
  Resumption* resumption = nullptr;  // null: an interrupted conversion leaves nothing

  // Compares the checksums that are still open. To be called before a file or a set of files is
  // made visible. Throws `cancelled` when the work is to end: later it is too late.
  void before_visible() const {
    if (!appears_whole) counters.add(checks->read_rest(threads, meter.stop()));
    require_going_on(meter.stop());
  }

  // A buffer for `bytes` that are worked on a window at a time. Zeroing a whole window for each of
  // many small tensors would cost more than their bytes.
  [[nodiscard]] std::vector<std::byte> buffer_for(std::uint64_t bytes) const {
    const std::uint64_t least = sizeof(std::complex<double>);  // one element of any type
    return std::vector<std::byte>(
        static_cast<std::size_t>(std::clamp<std::uint64_t>(bytes, least, window)));
  }

  // A part of this job: other leaves of the source, into a directory of its own.
  [[nodiscard]] ConvertJob with(const std::vector<Leaf>& part, Store& into,
                                const std::string& directory) const {
    return {.source = source,
            .leaves = part,
            .options = options,
            .store = into,
            .name = "",
            .final_name = final_name + "/" + directory,
            .if_exists = if_exists,
            .threads = threads,
            .window = window,
            .tile = tile,
            .meter = meter,
            .counters = counters,
            .report = report,
            .checks = checks,
            .losses = losses,
            .appears_whole = appears_whole,
            .is_alone = is_alone,
            .resumption = resumption};
  }
};

void write_safetensors(const ConvertJob& job);
void write_torch(const ConvertJob& job);
// `ranks` of the options: the data files are those of so many ranks, tensors split along dimension
// 0 as torch.chunk does.
void write_dcp(ConvertJob& job);
// The OLMo kinds (docs/formats/olmo.md); `store` is a directory that the caller commits afterwards.
void write_olmo(ConvertJob& job);

// Whether the leaves that are converted keep their names and types.
[[nodiscard]] bool keeps_leaves(const ConvertOptions& options);
// Whether the whole of a source that has a tree of its own is converted: then the tree is kept,
// with what its objects share.
[[nodiscard]] bool keeps_tree(const ConvertJob& job);
// The rows of `shape` that each rank has when `ranks` share dimension 0 as torch.chunk does: there
// may be fewer chunks than ranks.
[[nodiscard]] std::vector<Box> row_chunks(const Shape& shape, int ranks);
// Throws `unsupported` for elements that safetensors has no type for. `key`: the tensor's.
void require_safetensors_type(DType dtype, const std::string& key);

// What the writer of a file has to know of it later; nothing, of most.
using FileNotes = std::vector<std::uint64_t>;
using FileMaker = std::function<FileNotes(const ConvertJob& job)>;

// Lets `make` write and commit the object `name` of the job's store, or keeps the one that an
// interrupted run has finished, with the notes of then. `make` gets the job with checks of its own.
FileNotes make_file(const ConvertJob& job, const std::string& name, const FileMaker& make);

// Streams a slice of a tensor to `sink` from `at` on in row-major order; returns the CRC-32 of its
// bytes.
std::uint32_t stream_slice(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                           const Slice& slice, ByteSink& sink, std::uint64_t at);
// The same for a whole tensor.
std::uint32_t stream_tensor(const ConvertJob& job, const std::string& name, const Tensor& tensor,
                            ByteSink& sink, std::uint64_t at);

}  // namespace tessera
