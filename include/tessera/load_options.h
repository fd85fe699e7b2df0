// What a load takes and reports, beside its tree and its checkpoint (checkpoint.h).
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/io.h"
#include "tessera/job.h"
#include "tessera/open_options.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// What a load does about a key that the tree and the checkpoint do not have alike. All keys that
// are refused are in one error, which counts them, names a hundred with what differs, and has the
// first one as its key. Its code is
//   `not_found`    keys are missing, and nothing else
//   `mismatch`     a shape differs; a tensor is a plain value in the checkpoint; dtypes differ
//                  without allow_cast, or the cast needs allow_wrap; keys are extra; or these and
//                  others together
//   `unsupported`  there is no conversion between the dtypes, and nothing else is wrong
// The lists of up to 16 ranks go to all ranks where ranks differ; equal lists come once.
enum class OnDifference : std::uint8_t {
  refuse,  // the load throws before it has written any memory
  report,  // the key is left alone and named in LoadReport
};

// Who asks the store.
enum class LoadReader : std::uint8_t {
  // Rank 0 opens the checkpoint for all, and each rank reads the parts that it needs.
  every_rank,
  // Rank 0 opens and reads, and tells all ranks what any of them wants, 4 MiB at a time: for a
  // checkpoint that the others cannot see. Theirs is not looked at. Every byte goes to every rank,
  // so this takes longer. Values that hold tensors are `unsupported`.
  rank_zero,
};

// Called with elements that a load has just brought into the memory of a key as the checkpoint has
// them, one behind the other: `bytes` are those of the tensor from its element number `first` on,
// in row-major order. By several threads at once. Elements that are cast, lie at strides or on a
// device, or are told by rank 0, come without a call.
using FilledHook = std::function<void(const std::string& key, const Tensor& tensor,
                                      std::int64_t first, ByteView bytes)>;

struct LoadOptions {
  // The first four are for a tree that is loaded into; Checkpoint::load has none.
  OnDifference missing = OnDifference::refuse;  // keys of the tree that the checkpoint lacks
  OnDifference unfit = OnDifference::refuse;    // tensors that cannot take what it has for them
  OnDifference extra = OnDifference::report;    // its keys that no rank's tree has
  // The checkpoint's key for a key of the tree; several keys may get one. Empty: the same. Errors
  // and reports name the tree's keys, but for extra ones. To rename the keys of the checkpoint for
  // all that is done with it, use Checkpoint::map.
  std::function<std::string(const std::string& key)> rename = {};
  // How it is opened, unless it was open already; rank 0's count. Its `stop` is not asked: `stop`
  // is.
  OpenOptions open = {};
  LoadReader reader = LoadReader::every_rank;  // rank 0's counts; Checkpoint::load has none
  bool allow_cast = true;                      // dtypes may differ; elements are converted
  bool allow_wrap = false;                     // as in ReadOptions
  int threads = 2;                             // reading threads on each rank
  ProgressHook progress = {};
  FilledHook filled = {};  // Checkpoint::load has none
  // For Checkpoint::load alone: tensors are views of mapped files where they can be (mapped.h),
  // which counts as nothing read. Their bytes are not checked.
  bool map = false;
  // Phases: "open", unless the checkpoint was open already; "plan"; "read"; "all".
  EventHook events = {};
  std::stop_token stop = {};
};

struct UnfitKey {
  std::string key;
  std::string reason;  // what was found, what was expected
};

// Keys that differ and were left alone, sorted. Empty where the options refuse them.
struct LoadReport : IoReport {
  std::vector<std::string> missing;  // of this rank's tree; the checkpoint lacks them
  std::vector<UnfitKey> unfit;       // of this rank's tree
  // The checkpoint's, in no rank's tree; of this rank's tree alone where the ranks' checkpoints
  // have different leaves. An empty dict holds nothing and does not count.
  std::vector<std::string> extra;
};

}  // namespace tessera
