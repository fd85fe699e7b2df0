#include "comm/host_copy.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <utility>

#include "comm/confer.h"
#include "comm/message.h"
#include "comm/segment.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The memory of a host's lowest rank.
struct HostMemory {
  int rank = 0;
  std::int64_t pid = 0;
  int descriptor = -1;  // none: it has no memory to share
};
auto fields(FieldsOf<HostMemory> auto& memory) {
  return std::tie(memory.rank, memory.pid, memory.descriptor);
}
using HostMemories = std::map<std::uint64_t, HostMemory>;  // by digests of what names hosts

// The first of several ranks of a host counts.
void join_memories(HostMemories& all, HostMemories more) {
  all.merge(more);
}

// What every rank knows after `contribute` has run on all.
HostMemories memories_of_all(Group& group, const std::string& operation,
                             const std::function<HostMemories()>& contribute) {
  return from_message<HostMemories>(
      confer(group, operation, conference_of(contribute, join_memories, std::identity())));
}

std::optional<same_host::Segment> new_segment(std::size_t size) {
  try {
    return same_host::Segment::create(size);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::optional<same_host::Segment> segment_of(const HostMemory& memory, std::size_t size) {
  try {
    return same_host::Segment::attach(static_cast<pid_t>(memory.pid), memory.descriptor, size);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// A large copy: where this rank has it, and whether it is the one that writes it there.
class Room {
 public:
  Room(Group& group, const std::string& operation, std::size_t size)
      : group_(group), operation_(operation), size_(size) {
    const std::uint64_t host = same_host::host_digest();
    const auto mine = [&] {
      return host == 0 ? HostMemories() : HostMemories{{host, {group.rank()}}};
    };
    const HostMemories first = memories_of_all(group, operation, mine);
    leads_ = host != 0 && first.at(host).rank == group.rank();
    const HostMemories made = memories_of_all(group, operation, [&] { return led(host); });
    agree(group, operation, [&] { attach(made, host); });
  }

  void receive(ByteView from, std::size_t window) {
    for (std::size_t at = 0; at < size_; at += window) {
      const std::size_t part = std::min(window, size_ - at);
      Bytes message;
      if (group_.rank() == 0)
        message.assign(from.begin() + static_cast<std::ptrdiff_t>(at),
                       from.begin() + static_cast<std::ptrdiff_t>(at + part));
      message = group_.spread(std::move(message));
      if (writes_) std::memcpy(to_ + at, message.data(), part);
    }
    agree(group_, operation_, [] {});  // all has been written
  }

  HostCopy take() {
    if (segment_) segment_->close_descriptor();  // whoever wanted it has it
    return segment_ ? HostCopy(std::move(*segment_)) : HostCopy(std::move(own_));
  }

 private:
  HostMemories led(std::uint64_t host) {
    if (!leads_) return {};
    segment_ = new_segment(size_);
    const std::int64_t pid = same_host::this_process().pid;
    return {{host, {group_.rank(), pid, segment_ ? segment_->descriptor() : -1}}};
  }

  void attach(const HostMemories& memories, std::uint64_t host) {
    const auto there = memories.find(host);
    const bool is_shared = there != memories.end() && there->second.descriptor >= 0;
    if (!leads_ && is_shared) segment_ = segment_of(there->second, size_);
    writes_ = leads_ || !segment_;
    if (!segment_) own_.resize(size_);
    to_ = segment_ ? segment_->data() : own_.data();
  }

  Group& group_;
  const std::string& operation_;
  std::size_t size_;
  bool leads_ = false;   // this rank is its host's lowest
  bool writes_ = false;  // what comes has to be written by this rank
  std::optional<same_host::Segment> segment_;
  Bytes own_;
  std::byte* to_ = nullptr;
};

}  // namespace

HostCopy copy_to_hosts(Group& group, const std::string& operation,
                       const std::function<void()>& begin, const std::function<Bytes()>& make,
                       const HostCopyOptions& options) {
  Bytes made;
  const auto contribute = [&] {
    begin();
    return Bytes();
  };
  const auto conclude = [&](const Bytes&) {
    made = make();
    MessageWriter message;
    message.number(static_cast<std::uint64_t>(made.size()));
    if (made.size() <= options.small) message.rest(made);
    return message.take();
  };
  const Bytes answer = confer(group, operation, {contribute, combine_nothing, conclude});
  MessageReader message(answer);
  const auto size = static_cast<std::size_t>(message.number<std::uint64_t>());
  const auto rest = message.rest();
  if (size <= options.small) return HostCopy(Bytes(rest.begin(), rest.end()));
  if (group.size() == 1) return HostCopy(std::move(made));
  Room room(group, operation, size);
  room.receive(made, options.window);
  return room.take();
}

}  // namespace tessera
