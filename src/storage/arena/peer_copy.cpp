// A peer's part, copied into memory of this process and compared with its digests on the way.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/digest.h"
#include "base/parallel.h"
#include "io/checked_source.h"
#include "storage/arena/peer.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// A block, which stays in the processor's cache between the socket, its digest and the memory:
// larger pieces were slower, and so were pages of the memory mapped for the socket to fill.
constexpr std::size_t kPiece = kDigestBlock;

struct PartObjects {
  const KeptObject* tree = nullptr;
  const KeptObject* arena = nullptr;
  const KeptObject* digests = nullptr;
};

// As a writer process names them.
PartObjects objects_of(const KeptPart& part) {
  const auto object = [&part](const std::string& name) {
    const auto found = std::ranges::find(part.objects, name, &KeptObject::name);
    if (found == part.objects.end() || part.objects.size() != 3)
      throw Error(ErrorCode::corrupt, "a part of a snapshot is not one rank's").at_path(part.place);
    return &*found;
  };
  const ArenaNames names = arena_names(part.rank);
  return {object(names.tree), object(names.arena), object(names.digests)};
}

void make_room(Fd& memory, std::uint64_t bytes) {
  const char* const what = "a copy of a snapshot in memory";
  if (!memory) memory = Fd(::memfd_create("tessera-copy", MFD_CLOEXEC));
  if (!memory) throw_errno(errno, "memfd_create", what);
  if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0)
    throw_errno(errno, "ftruncate", what);
}

// By the kernel, so that memory which is not there is an error and not a signal.
void put(const Fd& memory, std::uint64_t offset, ByteView bytes) {
  while (!bytes.empty()) {
    const ssize_t written = transferred([&] {
      return ::pwrite(memory.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    });
    if (written < 0) throw_errno(errno, "pwrite", "a copy of a snapshot in memory");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

// Called with each piece, before that is written.
using Check = std::function<void(std::uint64_t offset, ByteView bytes)>;

// With one thread the pieces come in their order.
void copy_object(int threads, const ByteSource& source, const Fd& memory, const Check& check) {
  const std::uint64_t size = source.size();
  std::atomic<std::uint64_t> next = 0;
  parallel_for(threads, static_cast<std::size_t>(threads), [&](std::size_t) {
    const auto most = static_cast<std::size_t>(std::min<std::uint64_t>(kPiece, size));
    const auto buffer = std::make_unique_for_overwrite<std::byte[]>(most);
    try {
      for (std::uint64_t at = next.fetch_add(kPiece); at < size; at = next.fetch_add(kPiece)) {
        const MutableByteView piece(buffer.get(), std::min<std::uint64_t>(most, size - at));
        source.read_at(at, piece);
        check(at, piece);
        put(memory, at, piece);
      }
    } catch (...) {
      next = size;  // the others end, too
      throw;
    }
  });
}

[[noreturn]] void refuse_digest(const ByteSource& source) {
  throw Error(ErrorCode::corrupt, "the digest differs").at_path(source.name());
}

// The digest of the tree, then those of the arena's blocks.
Digests copy_digests(const ByteSource& source, const Fd& memory, std::uint64_t arena_bytes) {
  const std::uint64_t expected = (1 + digest_blocks(arena_bytes)) * sizeof(std::uint64_t);
  if (source.size() != expected) {
    throw Error(ErrorCode::corrupt, "found digests of " + std::to_string(source.size()) +
                                        " bytes, expected " + std::to_string(expected))
        .at_path(source.name());
  }
  Digests digests;  // grows as the bytes come
  copy_object(1, source, memory, [&](std::uint64_t, ByteView bytes) {
    const std::size_t had = digests.size(), more = bytes.size() / sizeof(std::uint64_t);
    digests.resize(had + more);
    std::memcpy(digests.data() + had, bytes.data(), more * sizeof(std::uint64_t));
  });
  return digests;
}

void copy_tree(const ByteSource& source, const Fd& memory, std::uint64_t digest) {
  RunningDigest running;
  copy_object(1, source, memory, [&](std::uint64_t, ByteView bytes) { running.add(bytes); });
  if (running.value() != digest) refuse_digest(source);
}

// `digests`: those of copy_digests().
void copy_blocks(const ByteSource& source, const Fd& memory, const Digests& digests) {
  constexpr int kThreads = 4;  // as many as a RemoteArena reads by at once
  copy_object(kThreads, source, memory, [&](std::uint64_t offset, ByteView block) {
    if (digest64(block) != digests.at(1 + offset / kDigestBlock)) refuse_digest(source);
  });
}

}  // namespace

CopyOutcome copy_part(const RemoteArena& from, const KeptPart& part, CopiedPart& into,
                      const std::stop_token& stop) {
  const auto begin = std::chrono::steady_clock::now();
  const HeedStop heeding(stop);
  into.part_.reset();
  const PartObjects objects = objects_of(part);
  auto& [tree, arena, digests] = into.memory_;
  const std::uint64_t arena_bytes = objects.arena->bytes;
  digests = {};
  tree = {};  // somebody may read the last ones
  make_room(digests, objects.digests->bytes);
  make_room(tree, objects.tree->bytes);
  const bool is_free =
      arena && into.arena_bytes_ == arena_bytes && begin_overwriting(arena, arena_bytes);
  if (!is_free) {
    arena = {};
    into.arena_bytes_ = 0;
    make_room(arena, count_place(arena_bytes) + kCountBytes);
    into.arena_bytes_ = arena_bytes;
  }
  try {
    const Digests expected =
        copy_digests(*from.open(part, objects.digests->name), digests, objects.arena->bytes);
    copy_tree(*from.open(part, objects.tree->name), tree, expected.front());
    copy_blocks(*from.open(part, objects.arena->name), arena, expected);
  } catch (const Error& error) {
    // The next save has come over this one.
    if (error.code() == ErrorCode::corrupt) from.require_served(part, stop);
    throw;
  }
  KeptPart copied = part;
  copied.process = same_host::this_process();
  copied.objects = {kept_object(objects.tree->name, tree, objects.tree->bytes),
                    kept_object(objects.arena->name, arena, objects.arena->bytes),
                    kept_object(objects.digests->name, digests, objects.digests->bytes)};
  copied.objects[1].count_at = count_place(arena_bytes);
  copied.objects[1].overwrites = overwrites_of(arena, arena_bytes);
  into.part_ = std::move(copied);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return {objects.tree->bytes + objects.arena->bytes + objects.digests->bytes, took.count()};
}

}  // namespace tessera
