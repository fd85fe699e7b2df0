#include "tessera/stats.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "base/numbers.h"
#include "base/parallel.h"
#include "base/recent_blocks.h"
#include "checkpoint/check/block_sums.h"
#include "checkpoint/check/tally.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/storage_checks.h"
#include "layout/boxes.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Bytes that are read at once: some whole blocks of digests, which are checked where they are.
constexpr std::size_t kStatsWindow = 4 << 20;

// The values of the patterns of each type that is counted so, made once for all tensors.
using PatternTable = std::map<DType, std::vector<double>>;

// A storage that torch.save refers to as such: its bits are numbers only with a quantizer's scales.
bool is_quantized(const Tensor& tensor) {
  return std::ranges::any_of(tensor.pieces, [](const Piece& piece) {
    return piece.storage && piece.storage->torch_class.starts_with('Q');
  });
}

bool is_compressed(const Tensor& tensor) {
  return std::ranges::any_of(tensor.pieces, [](const Piece& piece) {
    return piece.storage && piece.storage->encoding == Encoding::torch_item_zstd;
  });
}

// A tensor, cut into parts of a size that its dtype alone decides.
class TensorJob {
 public:
  explicit TensorJob(const Leaf& leaf)
      : leaf_(leaf),
        tensor_(leaf.value.as_tensor()),
        elements_(is_quantized(tensor_) ? 0 : numel(tensor_.shape)),
        form_(form_of(tensor_.dtype)),
        part_(static_cast<std::int64_t>(TensorReader::kTileBytes / size_of(tensor_.dtype))),
        parts_(static_cast<std::size_t>(elements_ / part_ + (elements_ % part_ == 0 ? 0 : 1))),
        left_(parts_) {}

  [[nodiscard]] std::size_t parts() const noexcept { return parts_; }
  // What has to be decompressed from its beginning is read by one thread.
  [[nodiscard]] std::size_t parts_at_once() const { return is_compressed(tensor_) ? parts_ : 1; }

  // Throws for a tensor that nobody could read to its end: its parts would fill the memory.
  void prepare(PatternTable& patterns) {
    require_bounded(tensor_, leaf_.name);
    const auto numbers = static_cast<std::uint64_t>(elements_) * form_.per_element;
    if (!is_counted_by_patterns(form_.dtype, numbers)) return;
    std::vector<double>& values = patterns[form_.dtype];
    if (values.empty()) values = pattern_values(form_.dtype);
    values_ = values;
  }

  // Parts [begin, end), from any thread. Returns whether all parts have been counted now.
  bool count(std::size_t begin, std::size_t end, StorageChecks& checks, Meter& meter) {
    TensorReader reader(tensor_, leaf_.name);
    const std::unique_ptr<PartTally> tally = make_tally(form_.dtype, values_);
    bool is_last = false;
    for (std::size_t part = begin; part < end; ++part) {
      visit(reader, part, [&](std::span<const std::byte> numbers) {
        tally->add(numbers);
        meter.add(numbers.size());
        return true;
      });
      is_last = take(part, *tally);
    }
    reader.hand_over(checks);
    return is_last;
  }

  // When all parts have been counted, or there are none. Once.
  TensorStats finish() {
    TensorStats stats = described();
    if (elements_ == 0) return stats;
    Moments all = resolve_patterns(*counts_, values_);
    for (const Moments& part : moments_) all.add(part);
    fill(stats, *counts_, all);
    counts_.reset();
    moments_ = {};
    return stats;
  }

 private:
  // Calls `see` with the numbers of a part, window by window, while it returns true.
  template <typename See>
  void visit(TensorReader& reader, std::size_t part, const See& see) const {
    const auto step = static_cast<std::int64_t>(kStatsWindow / size_of(tensor_.dtype));
    const std::int64_t begin = static_cast<std::int64_t>(part) * part_;
    const std::int64_t end = std::min(begin + part_, elements_);
    const Slice all = whole(tensor_.shape);
    std::vector<std::byte> room;
    for (std::int64_t at = begin; at < end; at += step) {
      const std::int64_t count = std::min(step, end - at);
      ByteView bytes = reader.view(all, at, count);
      if (bytes.empty()) {
        room.resize(static_cast<std::size_t>(count) * size_of(tensor_.dtype));
        reader.read(all, at, count, room.data());
        bytes = room;
      }
      if (!see(bytes)) return;
    }
  }

  bool take(std::size_t part, PartTally& tally) {
    const std::lock_guard lock(mutex_);
    if (!counts_) {
      counts_ = std::make_unique<Counts>();
      moments_.resize(parts_);
    }
    const std::uint64_t before = counts_->not_finite();
    moments_[part] = tally.finish(*counts_);
    if (counts_->not_finite() != before) first_odd_ = std::min(first_odd_, part);
    return --left_ == 0;
  }

  [[nodiscard]] TensorStats described() const {
    TensorStats stats;
    stats.name = leaf_.name;
    stats.dtype = tensor_.dtype;
    stats.shape = tensor_.shape;
    stats.elements = static_cast<std::uint64_t>(numel(tensor_.shape));
    return stats;
  }

  void fill(TensorStats& stats, const Counts& counts, const Moments& moments) const {
    stats.nans = counts.nans;
    stats.positive_infinities = counts.positive_infinities;
    stats.negative_infinities = counts.negative_infinities;
    stats.zeros = counts.zeros;
    stats.numbers = moments.count + counts.not_finite();
    if (!stats.is_finite()) stats.first_not_finite = find_not_finite();
    fill_exponents(stats, counts.exponents);
    if (moments.count == 0) return;
    const auto number = static_cast<long double>(moments.count);
    stats.smallest = end_value(counts.smallest, counts.smallest_bits);
    stats.largest = end_value(counts.largest, counts.largest_bits);
    stats.mean = static_cast<double>(moments.mean);
    stats.deviation = static_cast<double>(std::sqrt(moments.squares / number));
    stats.norm =
        static_cast<double>(std::sqrt(moments.squares + moments.mean * moments.mean * number));
  }

  // Of an end that was found as a number and, of integers of 64 bits, by its bits.
  [[nodiscard]] Value end_value(double number, std::uint64_t bits) const {
    if (form_.dtype == DType::uint64) return {bits};
    if (form_.dtype == DType::int64) return {static_cast<std::int64_t>(ordered_bits(bits))};
    const bool is_real = info(form_.dtype).floating || form_.dtype == DType::float4_e2m1fn_x2;
    if (is_real) return {number + 0.0};
    return {static_cast<std::int64_t>(number)};
  }

  static void fill_exponents(TensorStats& stats, const std::vector<std::uint64_t>& exponents) {
    constexpr auto kLast = static_cast<int>(TensorStats::kBins) - 1;
    std::uint64_t all = 0;
    for (std::size_t e = 0; e < exponents.size(); ++e) {
      const int bin = static_cast<int>(e) - Counts::kBias - TensorStats::kFirstExponent;
      stats.exponents.at(static_cast<std::size_t>(std::clamp(bin, 0, kLast))) += exponents[e];
      all += exponents[e];
    }
    std::uint64_t passed = 0;
    for (std::size_t e = 0; e < exponents.size() && !stats.median_exponent; ++e) {
      passed += exponents[e];
      if (passed > 0 && passed >= all - passed)
        stats.median_exponent = static_cast<int>(e) - Counts::kBias;
    }
  }

  // Reads the first part with such a number again.
  [[nodiscard]] std::optional<Shape> find_not_finite() const {
    TensorReader reader(tensor_, leaf_.name);
    std::size_t passed = static_cast<std::size_t>(part_) * first_odd_ * form_.per_element;
    std::optional<Shape> found;
    visit(reader, first_odd_, [&](std::span<const std::byte> numbers) {
      const auto at = first_not_finite(form_.dtype, numbers);
      if (at) {
        const std::size_t element = (passed + *at) / form_.per_element;
        found = index_at(tensor_.shape, static_cast<std::int64_t>(element));
      }
      passed += numbers.size() / size_of(form_.dtype);
      return !found;
    });
    return found;
  }

  const Leaf& leaf_;
  const Tensor& tensor_;
  std::int64_t elements_;  // that are read
  NumberForm form_;
  std::int64_t part_;  // elements of a part; a multiple of kSumBlock
  std::size_t parts_;
  std::span<const double> values_;  // of patterns; empty: they are not counted

  std::mutex mutex_;  // guards what follows, until all parts are counted
  std::size_t left_;
  std::unique_ptr<Counts> counts_;  // null: no part is counted yet, or all is told
  std::vector<Moments> moments_;    // by part
  std::size_t first_odd_ = std::numeric_limits<std::size_t>::max();  // the first part that has one
};

// Parts of a tensor that one thread counts.
struct PartsOf {
  std::size_t tensor;
  std::size_t begin, end;
};

std::vector<PartsOf> work_of(const std::deque<TensorJob>& tensors) {
  std::vector<PartsOf> work;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::size_t at_once = tensors[i].parts_at_once();
    for (std::size_t part = 0; part < tensors[i].parts(); part += at_once)
      work.push_back({i, part, part + at_once});
  }
  return work;
}

// At most the blocks at both ends of what each thread reads.
std::size_t shared_blocks(int threads) {
  return 2 * static_cast<std::size_t>(threads) + 2;
}

}  // namespace

std::string_view to_string(Suspicion suspicion) noexcept {
  constexpr std::array<std::string_view, 8> kNames{"none", "no numbers", "empty", "not finite",
                                                   "zero", "constant",   "tiny",  "huge"};
  return kNames[static_cast<std::size_t>(suspicion)];
}

Suspicion TensorStats::suspicion() const {
  constexpr int kTiny = -50, kHuge = 50;
  if (elements == 0) return Suspicion::empty;
  if (numbers == 0) return Suspicion::no_numbers;
  if (!is_finite()) return Suspicion::not_finite;
  if (zeros == numbers) return Suspicion::zero;
  if (numbers > 1 && *smallest == *largest) return Suspicion::constant;
  if (*median_exponent < kTiny) return Suspicion::tiny;
  return *median_exponent >= kHuge ? Suspicion::huge : Suspicion::none;
}

std::vector<TensorStats> stats_of(const Checkpoint& checkpoint, const StatsOptions& options) {
  require_threads(options.threads);
  require_going_on(options.stop);
  const HeedStop heeding(options.stop);
  checkpoint.require_files();
  std::deque<TensorJob> tensors;
  PatternTable patterns;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (leaf.value.is(Value::Kind::tensor)) tensors.emplace_back(leaf).prepare(patterns);
  }
  std::vector<TensorStats> stats(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].parts() == 0) stats[i] = tensors[i].finish();
  }
  Meter meter(options.progress, tensor_bytes(checkpoint.leaves), options.stop);
  StorageChecks checks;
  const SharedBlocks sharing(shared_blocks(options.threads));
  const std::vector<PartsOf> work = work_of(tensors);
  parallel_for(options.threads, work.size(), [&](std::size_t i) {
    TensorJob& job = tensors[work[i].tensor];
    if (job.count(work[i].begin, work[i].end, checks, meter)) stats[work[i].tensor] = job.finish();
  });
  checks.read_rest(options.threads, options.stop);
  meter.finish();
  return stats;
}

}  // namespace tessera
