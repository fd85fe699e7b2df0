// The `__{rank}.metadata` of a save without collectives, as one.
#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include "format/dcp/dcp.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {
namespace {

std::string describe(const Entry& entry) {
  if (!entry.is_tensor) return "a value";
  return std::string(to_string(entry.dtype)) + " " + to_string(entry.shape);
}

class Merger {
 public:
  void add(Metadata&& part, std::size_t rank) {
    for (Entry& entry : part.entries) add_entry(entry, rank);
    std::ranges::move(part.warnings, std::back_inserter(whole_.warnings));
  }

  Metadata run(std::vector<Metadata>&& ranks) && {
    whole_.version = ranks.front().version;
    whole_.checkpoint_id = ranks.front().checkpoint_id;
    whole_.save_id = ranks.front().save_id;
    whole_.has_planner_data = ranks.front().has_planner_data;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) add(std::move(ranks[rank]), rank);
    return std::move(whole_);
  }

 private:
  using ByOffset = std::map<Shape, std::size_t>;

  [[noreturn]] static void fail(const Entry& entry, const std::string& what) {
    throw Error(ErrorCode::corrupt, what).at_key(printable(entry.name));
  }

  void add_entry(Entry& entry, std::size_t rank) {
    const auto [found, fresh] = by_name_.try_emplace(entry.name, whole_.entries.size());
    if (fresh) {
      whole_.entries.push_back(entry);
      whole_.entries.back().chunks = Chunks(texts_);
      chunks_.emplace_back();
    }
    Entry& known = whole_.entries[found->second];
    if (describe(known) != describe(entry)) {
      fail(entry, "rank " + std::to_string(rank) + " has " + describe(entry) +
                      ", a rank before it " + describe(known));
    }
    for (const Chunk& chunk : entry.chunks) take(known, chunks_[found->second], chunk);
  }

  static void take(Entry& known, ByOffset& by_offset, const Chunk& chunk) {
    const auto [found, fresh] = by_offset.try_emplace(chunk.box.offsets, known.chunks.size());
    if (fresh) {
      known.chunks.push_back(chunk);
    } else if (known.chunks[found->second].box != chunk.box) {
      fail(known, "two ranks have chunks of different sizes at " + to_string(chunk.box.offsets));
    }
  }

  Metadata whole_;
  std::shared_ptr<ItemTexts> texts_ = std::make_shared<ItemTexts>();
  std::unordered_map<std::string, std::size_t> by_name_;
  std::vector<ByOffset> chunks_;  // of each entry
};

}  // namespace

Metadata merge(std::vector<Metadata> ranks) {
  return Merger().run(std::move(ranks));
}

}  // namespace tessera::dcp
