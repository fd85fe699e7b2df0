#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <thread>
#include <utility>

#include "base/digest.h"
#include "base/parallel.h"
#include "io/checked_source.h"
#include "io/source.h"
#include "storage/arena/arenas.h"
#include "storage/arena/peer.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Bytes of memory. They are copied by the kernel, so that memory which is cut off meanwhile is an
// error and not a signal.
class KeptSource final : public ByteSource {
 public:
  KeptSource(std::shared_ptr<const Fd> memory, std::uint64_t size, std::string name)
      : name_(std::move(name)), size_(size), memory_(std::move(memory)) {}

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    for (std::size_t done = 0; done < out.size();) {
      const ssize_t got = transferred([&] {
        return ::pread(memory_->get(), out.data() + done, out.size() - done,
                       static_cast<off_t>(offset + done));
      });
      if (got < 0) throw_errno(errno, "pread", name_);
      if (got == 0) throw Error(ErrorCode::incomplete, "the memory was cut off").at_path(name_);
      done += static_cast<std::size_t>(got);
    }
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const std::string name_;
  const std::uint64_t size_;
  const std::shared_ptr<const Fd> memory_;
};

class ArenaStore final : public Store {
 public:
  explicit ArenaStore(const KeptPart& any) : name_("arena://" + save_place(any)) {}

  // From the host that has it. False: it has it no more. Throws what RemoteArena throws.
  [[nodiscard]] bool take_remote(const KeptPart& part) {
    constexpr std::chrono::seconds kSilence{10};  // the others wait meanwhile
    const auto remote = std::make_shared<RemoteArena>(peer_address_from_text(part.peer), kSilence);
    const KeptPart served = remote->next_part("", 0).value_or(KeptPart());
    if (save_name(served) != save_name(part) || served.rank != part.rank) return false;
    for (const KeptObject& object : served.objects)
      remote_.insert_or_assign(object.name, RemoteObject{remote, served, object.bytes});
    return true;
  }
  // False: the memory is not there any more, or holds something else.
  [[nodiscard]] bool take(KeptPart part) {
    for (KeptObject& object : part.objects) {
      auto memory = open_kept(part.process, object);
      if (!memory) return false;
      const auto kept = std::make_shared<const Fd>(std::move(*memory));
      object.fd = kept->get();
      objects_[object.name] = {kept, object.bytes};
    }
    parts_.push_back(std::move(part));
    return true;
  }
  // Other ranks that load from here find this memory even when the training has gone on.
  void keep_for_others() {
    try {
      for (KeptPart& part : parts_) {
        part.is_readers = true;
        notices_.push_back(std::make_unique<KeptNotice>(std::move(part)));
      }
    } catch (const Error&) {
      notices_.clear();  // one that reads alone needs none
    }
    parts_.clear();
  }

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    std::vector<ObjectInfo> found;
    for (const auto& [name, object] : objects_) {
      if (prefix.empty()) found.push_back({name, object.second});
    }
    for (const auto& [name, object] : remote_) {
      if (prefix.empty()) found.push_back({name, object.bytes});
    }
    return found;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    require_safe_name(name, name_);
    const auto found = objects_.find(name);
    const std::string path = name_ + "/" + std::string(name);
    const auto remote = remote_.find(name);
    if (remote != remote_.end())
      return remote->second.arena->open(remote->second.part, std::string(name));
    if (found == objects_.end())
      throw Error(ErrorCode::not_found, "there is no such object").at_path(path);
    return std::make_shared<KeptSource>(found->second.first, found->second.second, path);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view /*name*/, IfExists /*if_exists*/,
                                                 std::uint64_t /*size_hint*/) override {
    refuse();
  }
  void remove(std::string_view /*name*/) override { refuse(); }
  [[nodiscard]] bool is_read_only() const override { return true; }

 private:
  struct RemoteObject {
    std::shared_ptr<RemoteArena> arena;
    KeptPart part;
    std::uint64_t bytes = 0;
  };

  [[noreturn]] void refuse() const {
    throw Error(ErrorCode::unsupported, "a snapshot in memory is only read").at_path(name_);
  }

  const std::string name_;
  std::map<std::string, std::pair<std::shared_ptr<const Fd>, std::uint64_t>, std::less<>> objects_;
  std::map<std::string, RemoteObject, std::less<>> remote_;
  std::vector<KeptPart> parts_;  // with this process's descriptors
  std::vector<std::unique_ptr<KeptNotice>> notices_;
};

// What a URL asks for.
struct Wanted {
  std::string place;
  std::string save;  // a save_name(), whatever the place is called here; empty: the newest
};

Wanted wanted_by(const std::string& place) {
  const std::size_t mark = place.rfind('#');
  const std::size_t dash = place.rfind('-');
  const bool has_save = mark != std::string::npos && dash != std::string::npos && dash > mark &&
                        is_attempt(place.substr(mark + 1, dash - mark - 1));
  if (!has_save) return {kept_place(place), {}};
  return {kept_place(place.substr(0, mark)), place.substr(mark + 1)};
}

std::vector<KeptPart> parts_of(const Wanted& wanted) {
  auto parts = kept_parts();
  std::erase_if(parts, [&](const KeptPart& part) {
    // What readers hold is an older one, unless somebody asks for just that.
    if (wanted.save.empty()) return part.is_readers || !is_kept_in(part.place, wanted.place);
    return wanted.save != save_name(part);
  });
  return parts;
}

// Of one save, for each rank those that have its part.
using KeptSave = std::map<int, std::vector<KeptPart>>;

// Those of which all ranks' parts are here, the newest first.
std::vector<KeptSave> whole_saves(const std::vector<KeptPart>& parts) {
  std::map<std::pair<std::string, std::uint64_t>, KeptSave> saves;
  for (const KeptPart& part : parts)
    if (!part.objects.empty()) saves[{part.writer, part.number}][part.rank].push_back(part);
  std::vector<KeptSave> whole;
  for (auto& [save, ranks] : saves) {
    if (std::ssize(ranks) == ranks.begin()->second.front().size) whole.push_back(std::move(ranks));
  }
  std::ranges::sort(whole, std::greater<>(), [](const KeptSave& save) {
    std::uint64_t made = 0;
    for (const auto& [rank, parts_of_rank] : save)
      made = std::max(made, parts_of_rank.front().made);
    return made;
  });
  return whole;
}

// Null: it is gone.
std::shared_ptr<ArenaStore> opened(const KeptSave& save) {
  const auto store = std::make_shared<ArenaStore>(save.begin()->second.front());
  for (const auto& [rank, parts] : save) {
    const auto take = [&](const KeptPart& part) {
      return is_remote(part) ? store->take_remote(part) : store->take(part);
    };
    if (std::ranges::none_of(parts, take)) return nullptr;
  }
  return store;
}

// Whether a training writes the next snapshot just now, on some of its ranks or on all.
bool is_next_coming(const std::vector<KeptPart>& parts) {
  std::map<std::string, std::uint64_t> numbers;
  return std::ranges::any_of(parts, [&](const KeptPart& part) {
    const auto [at, is_first] = numbers.try_emplace(part.writer, part.number);
    return part.objects.empty() || at->second != part.number;
  });
}

[[noreturn]] void refuse_bytes(const ByteSource& source) {
  throw Error(ErrorCode::corrupt, "the digest differs").at_path(source.name());
}

void require_digests(const Store& store, const ArenaNames& names, int threads) {
  const auto digests = store.open(names.digests), arena = store.open(names.arena);
  const std::uint64_t blocks = digest_blocks(arena->size());
  if (digests->size() != (1 + blocks) * sizeof(std::uint64_t)) refuse_bytes(*digests);
  Digests expected(static_cast<std::size_t>(1 + blocks));
  digests->read_at(0, std::as_writable_bytes(std::span(expected)));
  const auto tree = store.open(names.tree);
  if (digest64(read_all(*tree, tree->size())) != expected.front()) refuse_bytes(*tree);
  if (threads == 0) return;
  parallel_for(threads, static_cast<std::size_t>(blocks), [&](std::size_t block) {
    const std::uint64_t begin = block * kDigestBlock;
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(std::min(kDigestBlock, arena->size() - begin)));
    arena->read_at(begin, bytes);
    if (digest64(bytes) != expected[block + 1]) refuse_bytes(*arena);
  });
}

}  // namespace

std::shared_ptr<Store> arena_store(const std::string& place) {
  constexpr std::chrono::milliseconds kBetweenLooks{5}, kGlimpse{200};
  constexpr std::chrono::seconds kMost{30}, kMostWithoutTrainer{2};
  const Wanted wanted = wanted_by(place);
  const auto begun = std::chrono::steady_clock::now();
  while (true) {
    const auto parts = parts_of(wanted);
    bool is_moving = is_next_coming(parts);
    for (const KeptSave& save : whole_saves(parts)) {
      const auto store = opened(save);
      is_moving = is_moving || !store;
      if (!store) continue;
      if (std::ranges::any_of(parts, has_trainer)) store->keep_for_others();
      return store;
    }
    const auto most = std::ranges::any_of(parts, has_trainer) ? kMost : kMostWithoutTrainer;
    const auto waited = std::chrono::steady_clock::now() - begun;
    const bool is_over = waited >= most;
    // Who lists a directory in which others write may miss a file.
    is_moving = is_moving || (!parts.empty() && waited < kGlimpse);
    if (is_moving && !is_over && !HeedStop::is_requested()) {
      std::this_thread::sleep_for(kBetweenLooks);
      continue;
    }
    const std::string name = "arena://" + place;
    if (parts.empty()) {
      throw Error(ErrorCode::not_found, "no process on this host keeps a snapshot of that place")
          .at_path(name);
    }
    throw Error(ErrorCode::incomplete, is_moving
                                           ? "the next snapshot is being written over the last one"
                                           : "of " + std::to_string(parts.front().size) +
                                                 " ranks this host keeps a part of " +
                                                 std::to_string(parts.size()) + " alone")
        .at_path(name);
  }
}

bool is_remote(const KeptPart& part) noexcept {
  return !part.objects.empty() && part.objects.front().fd < 0;
}

namespace {

// Of remote parts that this process has noted, by save and rank. They end with the process.
struct RemoteNotices {
  ShortMutex mutex;
  std::map<std::pair<std::string, int>, std::unique_ptr<KeptNotice>> notices;
};
RemoteNotices remote_notices;

}  // namespace

void note_remote(const KeptPart& part) {
  KeptPart noted = part;
  noted.trainer = kEnded;
  noted.is_readers = true;
  noted.run_mark = run_mark(part.place);
  for (KeptObject& object : noted.objects) object.fd = -1;
  auto notice = std::make_unique<KeptNotice>(std::move(noted));
  const std::lock_guard lock(remote_notices.mutex);
  remote_notices.notices[{save_name(part), part.rank}].swap(notice);
}

void require_intact(const KeptPart& part, int threads, const std::stop_token& stop) {
  const HeedStop heeding(stop);
  ArenaStore store(part);
  if (!store.take(part)) {
    throw Error(ErrorCode::not_found, "the process that kept this in memory has given it back")
        .at_path(store.name());
  }
  require_digests(store, arena_names(part.rank), threads);
}

}  // namespace tessera
