#include "checkpoint/save/item_ends.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace tessera {

ItemEnds::ItemEnds(Reports& reports) {
  for (RankReport& report : reports.ranks) {
    const auto index = static_cast<std::size_t>(report.rank);
    if (ranks_.size() <= index) ranks_.resize(index + 1);
    Rank& rank = ranks_[index];
    rank.ends = std::move(report.lengths);
    std::uint64_t first = 0;
    for (const FileReport& file : report.files) {
      const auto number = static_cast<std::size_t>(file.file);
      if (rank.firsts.size() <= number) rank.firsts.resize(number + 1);
      rank.firsts[number] = first;
      const auto begin = rank.ends.begin() + static_cast<std::ptrdiff_t>(first);
      const auto end = begin + static_cast<std::ptrdiff_t>(file.items);
      std::partial_sum(begin, end, begin);
      first += file.items;
    }
  }
}

ItemPlace ItemEnds::of(int rank, const ItemPlace& planned) const {
  if (ranks_.empty()) return planned;
  const Rank& told = ranks_.at(static_cast<std::size_t>(rank));
  const std::uint64_t at = told.firsts.at(static_cast<std::size_t>(planned.file)) + planned.number;
  ItemPlace place = planned;
  place.offset = planned.number == 0 ? 0 : told.ends.at(at - 1);
  place.length = told.ends.at(at) - place.offset;
  return place;
}

}  // namespace tessera
