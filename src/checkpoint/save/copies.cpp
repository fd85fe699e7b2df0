#include "checkpoint/save/copies.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/digest.h"

namespace tessera {
namespace {

constexpr std::int64_t kWindows = 64;
constexpr std::int64_t kWindowBytes = 1024;

// One holder of a chunk.
struct Holder {
  std::size_t rank = 0;
  std::size_t item = 0;
  std::uint64_t sample = 0;
};

bool writes(const SavePlan& plan, const Holder& copy) {
  return std::ranges::binary_search(plan.assignment[copy.rank], copy.item);
}

// By name and where a chunk begins: the copies of it.
using Holders = std::map<std::pair<std::string, Shape>, std::vector<Holder>>;

Holders holders_of(const std::vector<std::vector<WriteItem>>& proposals, const SavePlan& plan,
                   const std::vector<std::vector<std::uint64_t>>& samples) {
  Holders chunks;
  for (std::size_t rank = 0; rank < plan.copied.size(); ++rank) {
    for (std::size_t i = 0; i < plan.copied[rank].size(); ++i) {
      const auto item = plan.copied[rank][i];
      const WriteItem& chunk = proposals[rank].at(item);
      chunks[{chunk.name, chunk.box.offsets}].push_back({rank, item, samples[rank].at(i)});
    }
  }
  return chunks;
}

// The ranks whose copies have another sample than the one that is written.
std::vector<int> unlike_ranks(const std::vector<Holder>& copies, const Holder& written) {
  std::vector<int> ranks;
  for (const Holder& copy : copies) {
    if (copy.sample != written.sample) ranks.push_back(static_cast<int>(copy.rank));
  }
  return ranks;
}

}  // namespace

std::vector<FlatRange> sampled(std::int64_t count, std::size_t element_size) {
  const std::int64_t window = kWindowBytes / static_cast<std::int64_t>(element_size);
  const bool is_small = count <= kWindows * window;
  std::vector<FlatRange> windows;
  for (std::int64_t i = 0; i < kWindows; ++i) {
    const auto begin = is_small ? window * i : (count - window) * i / (kWindows - 1);
    if (begin >= count) break;
    windows.push_back({begin, std::min(begin + window, count)});
  }
  return windows;
}

std::uint64_t sample_of(const ElementSource& elements, std::int64_t count,
                        std::size_t element_size) {
  std::vector<std::byte> scratch(kWindowBytes);
  RunningDigest digest;
  for (const FlatRange& window : sampled(count, element_size))
    digest.add(elements(window.begin, window.end - window.begin, MutableByteView(scratch)));
  return digest.value();
}

std::optional<UnlikeCopies> compare_copies(const std::vector<std::vector<WriteItem>>& proposals,
                                           const SavePlan& plan,
                                           const std::vector<std::vector<std::uint64_t>>& samples) {
  UnlikeCopies found;
  std::set<std::string> keys;
  for (const auto& [place, copies] : holders_of(proposals, plan, samples)) {
    const auto written =
        std::ranges::find_if(copies, [&](const Holder& copy) { return writes(plan, copy); });
    std::vector<int> unlike = unlike_ranks(copies, *written);
    if (unlike.empty()) continue;
    if (keys.empty()) found = {place.first, 0, written->rank, std::move(unlike)};
    keys.insert(place.first);
  }
  if (keys.empty()) return std::nullopt;
  found.keys = keys.size();
  return found;
}

std::string to_string(const UnlikeCopies& copies) {
  std::string ranks;
  for (const int rank : copies.unlike) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  std::string text = "rank" + std::string(copies.unlike.size() > 1 ? "s " : " ") + ranks +
                     (copies.unlike.size() > 1 ? " hold" : " holds") + " other values of '" +
                     copies.key + "' than rank " + std::to_string(copies.writer) +
                     ", the one that writes them";
  if (copies.keys > 1) text += "; so it is with " + std::to_string(copies.keys - 1) + " more keys";
  return text + ". A parameter that no unit holds, or a buffer that each rank changes by itself?";
}

}  // namespace tessera
