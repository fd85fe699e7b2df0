#include "comm/host_copy.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "comm/confer.h"
#include "comm/message.h"
#include "comm/segment.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The memory of a host's lowest rank. Hosts are known by digests of what names them.
struct HostMemory {
  std::uint64_t host = 0;
  int rank = 0;
  std::int64_t pid = 0;
  int descriptor = -1;  // none: it has no memory to share
};
using HostMemories = std::map<std::uint64_t, HostMemory>;

Bytes encode(const HostMemory& memory) {
  MessageWriter message;
  message.number(memory.host).number(static_cast<std::int32_t>(memory.rank));
  message.number(memory.pid).number(static_cast<std::int32_t>(memory.descriptor));
  return message.take();
}

// Of several ranks of a host the first one counts.
HostMemories decode_memories(const Bytes& bytes) {
  HostMemories memories;
  for (MessageReader message(bytes); !message.at_end();) {
    HostMemory memory;
    memory.host = message.number<std::uint64_t>();
    memory.rank = message.number<std::int32_t>();
    memory.pid = message.number<std::int64_t>();
    memory.descriptor = message.number<std::int32_t>();
    if (memory.host != 0) memories.try_emplace(memory.host, memory);
  }
  return memories;
}

Bytes encode(const HostMemories& memories) {
  Bytes bytes;
  for (const auto& [host, memory] : memories)
    bytes = side_by_side(std::move(bytes), encode(memory));
  return bytes;
}

Bytes lowest_of_hosts(const Bytes& left, const Bytes& right) {
  return encode(decode_memories(side_by_side(left, right)));
}

// What every rank knows after `contribute` has run on all.
HostMemories memories_of_all(Group& group, const std::string& operation,
                             const std::function<HostMemory()>& contribute) {
  return decode_memories(confer(
      group, operation,
      {[&] { return encode(contribute()); }, lowest_of_hosts, [](Bytes all) { return all; }}));
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
    const HostMemory mine{host, group.rank(), 0, -1};
    const HostMemories first = memories_of_all(group, operation, [&] { return mine; });
    leads_ = host != 0 && first.at(host).rank == group.rank();
    const HostMemories made = memories_of_all(group, operation, [&] { return led(mine); });
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
  HostMemory led(HostMemory mine) {
    if (!leads_) return {0, mine.rank, 0, -1};
    segment_ = new_segment(size_);
    mine.pid = same_host::this_process().pid;
    mine.descriptor = segment_ ? segment_->descriptor() : -1;
    return mine;
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
