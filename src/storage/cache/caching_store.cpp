#include "storage/cache/caching_store.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "io/range.h"
#include "storage/forwarding_store.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/local_cache.h"

namespace tessera {
namespace {

constexpr std::size_t kMostAround = 16;  // blocks that are in memory because parts are wanted

class CachingSource final : public ByteSource {
 public:
  CachingSource(std::shared_ptr<ByteSource> source, std::shared_ptr<BlockCache> cache)
      : source_(std::move(source)), cache_(std::move(cache)), key_(BlockCache::key_of(*source_)) {}

  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] std::string identity() const override { return source_->identity(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return source_->request_cost(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    const ReadRange range{offset, out};
    read_ranges({&range, 1});
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    Missing missing;
    for (ReadRange range : ranges) {
      require_range(*this, range.offset, range.out.size());
      while (!range.out.empty()) {
        const auto place = place_at(range.offset);
        const std::uint64_t within = range.offset % BlockCache::kBlock;
        const auto part =
            range.out.first(std::min<std::uint64_t>(range.out.size(), place.size - within));
        if (!cache_->read(place, within, part)) add(missing, place, within, part);
        range.offset += part.size();
        range.out = range.out.subspan(part.size());
      }
    }
    fetch(missing);
  }

 private:
  struct Part {
    std::uint64_t block, within;
    MutableByteView out;
  };
  struct Missing {
    std::map<std::uint64_t, MutableByteView> whole;  // wanted whole, where they go
    std::map<std::uint64_t, std::vector<std::byte>> around;
    std::vector<Part> parts;  // of those
  };

  [[nodiscard]] BlockCache::Place place_at(std::uint64_t offset) const {
    const std::uint64_t block = offset / BlockCache::kBlock;
    return {key_, block, std::min(BlockCache::kBlock, size() - block * BlockCache::kBlock)};
  }

  void add(Missing& missing, const BlockCache::Place& place, std::uint64_t within,
           MutableByteView part) const {
    if (part.size() == place.size && missing.whole.emplace(place.block, part).second) return;
    missing.around.try_emplace(place.block);
    missing.parts.push_back({place.block, within, part});
    if (missing.around.size() >= kMostAround) fetch(missing);
  }

  void fetch(Missing& missing) const {
    std::vector<ReadRange> wanted;
    std::map<std::uint64_t, ByteView> blocks;
    for (const auto& [block, out] : missing.whole) blocks.emplace(block, out);
    for (const auto& [block, out] : missing.whole)
      wanted.push_back({block * BlockCache::kBlock, out});
    for (auto& [block, bytes] : missing.around) {
      const std::uint64_t begin = block * BlockCache::kBlock;
      bytes.resize(place_at(begin).size);
      wanted.push_back({begin, bytes});
      blocks.emplace(block, bytes);
    }
    if (wanted.empty()) return;
    std::ranges::sort(wanted, {}, &ReadRange::offset);
    source_->read_ranges(wanted);
    for (const auto& [block, bytes] : blocks)
      cache_->keep(place_at(block * BlockCache::kBlock), bytes);
    for (const Part& part : missing.parts)
      std::memcpy(part.out.data(), missing.around.at(part.block).data() + part.within,
                  part.out.size());
    missing = {};
  }

  const std::shared_ptr<ByteSource> source_;
  const std::shared_ptr<BlockCache> cache_;
  const std::string key_;
};

class CachingStore final : public ForwardingStore {
 public:
  CachingStore(std::shared_ptr<Store> store, std::shared_ptr<BlockCache> cache)
      : ForwardingStore(std::move(store)), cache_(std::move(cache)) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return cached(ForwardingStore::open(name));
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_listed(const ObjectInfo& object) const override {
    return cached(inner().open_listed(object));
  }

 private:
  [[nodiscard]] std::shared_ptr<ByteSource> cached(std::shared_ptr<ByteSource> source) const {
    if (source->identity().empty()) return source;
    return std::make_shared<CachingSource>(std::move(source), cache_);
  }

  const std::shared_ptr<BlockCache> cache_;
};

struct Used {
  ShortMutex mutex;
  std::shared_ptr<BlockCache> cache;  // guarded by mutex; null: none
};

constinit Used used;

}  // namespace

std::shared_ptr<Store> caching_store(std::shared_ptr<Store> store,
                                     std::shared_ptr<BlockCache> cache) {
  return std::make_shared<CachingStore>(std::move(store), std::move(cache));
}

std::shared_ptr<Store> with_local_cache(std::shared_ptr<Store> store) {
  const std::lock_guard lock(used.mutex);
  return used.cache ? caching_store(std::move(store), used.cache) : store;
}

void use_local_cache(std::optional<LocalCache> cache) {
  std::shared_ptr<BlockCache> made;
  if (cache) {
    if (cache->directory.empty())
      throw Error(ErrorCode::invalid_argument, "a local cache needs a directory");
    require_local(cache->directory);
    made = std::make_shared<BlockCache>(cache->directory, cache->most_bytes);
  }
  const std::lock_guard lock(used.mutex);
  used.cache = std::move(made);
}

}  // namespace tessera
