#include "checkpoint/background/kept_snapshot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "checkpoint/open/open.h"
#include "io/checked_source.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Memory without a name, with these bytes.
Fd memory_with(ByteView bytes) {
  Fd memory(::memfd_create("tessera-snapshot", MFD_CLOEXEC));
  if (!memory) throw_errno(errno, "memfd_create", "a snapshot in memory");
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t written = transferred(
        [&] { return ::write(memory.get(), bytes.data() + done, bytes.size() - done); });
    if (written < 0) throw_errno(errno, "write", "a snapshot in memory");
    done += static_cast<std::size_t>(written);
  }
  return memory;
}

std::string run_of(const std::string& place) {
  return place.substr(0, std::max<std::size_t>(place.rfind('/'), 1));
}

}  // namespace

// Those of trainers that have died.
void forget_older(const WriterJob& job) {
  const std::string run = run_of(without_file_scheme(job.place));
  std::vector<KeptPart> parts = kept_parts();
  std::erase_if(parts, [&](const KeptPart& part) {
    return part.writer == job.writer || run_of(part.place) != run || has_trainer(part);
  });
  if (!parts.empty()) forget(parts);
}

KeptSnapshot::KeptSnapshot(const WriterJob& job, const WriterHello& hello, ByteView arena,
                           const Fd& memory) {
  BlockDigests blocks;
  blocks.add(0, arena);
  Digests digests = blocks.finish(arena.size());
  digests.insert(digests.begin(), digest64(job.tree));
  tree_ = memory_with(job.tree);
  digests_ = memory_with(std::as_bytes(std::span(digests)));
  const ArenaNames names = arena_names(hello.rank);
  KeptPart part{.place = without_file_scheme(job.place),
                .writer = job.writer,
                .number = job.number,
                .rank = hello.rank,
                .size = hello.size,
                .trainer = hello.trainer,
                .process = same_host::this_process()};
  part.objects.push_back(kept_object(names.tree, tree_, job.tree.size()));
  part.objects.push_back(kept_object(names.arena, memory, arena.size()));
  part.objects.push_back(
      kept_object(names.digests, digests_, digests.size() * sizeof(std::uint64_t)));
  notice_ = std::make_unique<KeptNotice>(part);
}

}  // namespace tessera
