#include "checkpoint/background/kept_snapshot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/parallel.h"
#include "checkpoint/background/job_message.h"
#include "checkpoint/open/arena_tree.h"
#include "checkpoint/open/kinds.h"
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

// The digest of the tree, then those of the arena's blocks.
Digests digests_of(ByteView tree, ByteView arena) {
  BlockDigests blocks;
  for (std::size_t at = 0; at < arena.size();) {
    const ByteView some = arena.subspan(at, std::min<std::size_t>(kDigestBlock, arena.size() - at));
    if (HeedStop::is_requested()) throw_cancelled();
    blocks.add(at, some);
    at += some.size();
  }
  Digests digests = blocks.finish(arena.size());
  digests.insert(digests.begin(), digest64(tree));
  return digests;
}

// The run that a place is a step of, without the step; none: it is none of a run.
std::optional<std::string> run_of(const std::string& place) {
  const std::size_t slash = place.rfind('/');
  std::string_view name = place;
  name.remove_prefix(slash == std::string::npos ? 0 : slash + 1);
  if (slash == std::string::npos || !take_step_name(name) || !name.empty()) return std::nullopt;
  return place.substr(0, slash);
}

bool is_step(const WriterJob& job) {
  const auto by_name = kind_of_file_name(job.place).value_or(CheckpointKind::dcp);
  return is_marked_kind(options_from_message(job.options).kind.value_or(by_name));
}

}  // namespace

void forget_older(const WriterJob& job) {
  const std::string place = kept_place(job.place);
  const auto run = run_of(place);
  std::vector<KeptPart> parts = kept_parts();
  std::erase_if(parts, [&](const KeptPart& part) {
    const bool is_of_run = part.place == place || (run && run_of(part.place) == run);
    return part.writer == job.writer || !is_of_run || has_trainer(part);
  });
  if (!parts.empty()) forget(parts);
}

KeptSnapshot::KeptSnapshot(const WriterJob& job, const WriterHello& hello, KeptMemory memory,
                           const std::shared_ptr<KeptNotice>& earlier)
    : memory_(std::move(memory)), overwrites_(job.overwrites) {
  const bool is_counted = memory_.fd != nullptr;
  if (!is_counted) memory_.fd = std::make_shared<const Fd>(memory_with({}));
  const ByteView arena = memory_.arena.first(static_cast<std::size_t>(is_counted ? job.used : 0));
  const Bytes tree = with_head(
      {.rank = hello.rank, .size = hello.size, .writer = job.writer, .number = job.number},
      job.tree);
  const Digests digests = digests_of(tree, arena);
  tree_ = memory_with(tree);
  digests_ = memory_with(std::as_bytes(std::span(digests)));
  const ArenaNames names = arena_names(hello.rank);
  KeptPart part{.place = kept_place(job.place),
                .writer = job.writer,
                .number = job.number,
                .rank = hello.rank,
                .size = hello.size,
                .made = host_time(),
                .run_mark = run_mark(job.place),
                .is_step = is_step(job),
                .trainer = hello.trainer,
                .peer = memory_.peer};
  part.objects.push_back(kept_object(names.tree, tree_, tree.size()));
  part.objects.push_back(kept_object(names.arena, *memory_.fd, arena.size()));
  if (is_counted) {
    part.objects.back().count_at = count_place(memory_.arena.size());
    part.objects.back().overwrites = job.overwrites;
  }
  part.objects.push_back(
      kept_object(names.digests, digests_, digests.size() * sizeof(std::uint64_t)));
  if (is_counted && overwrites_of(*memory_.fd, memory_.arena.size()) != job.overwrites)
    throw Error(ErrorCode::conflict, "the trainer has begun the next one").at_path(part.place);
  notice_ = earlier;
  if (notice_) {
    notice_->renew(std::move(part));
  } else {
    notice_ = std::make_shared<KeptNotice>(std::move(part));
  }
}

bool KeptSnapshot::is_there() const {
  if (is_let_go_) return false;
  const bool has_tensors = memory_.arena.data() != nullptr;
  return !has_tensors || overwrites_of(*memory_.fd, memory_.arena.size()) == overwrites_;
}

void KeptSnapshot::let_go() {
  is_let_go_ = true;
  notice_->let_go();
  memory_ = {};
  tree_ = {};
  digests_ = {};
}

}  // namespace tessera
