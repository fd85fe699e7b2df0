#include "torch/test_device/race_log.h"

#include <algorithm>
#include <utility>

namespace tessera::testing {

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
  for (std::size_t i = 0; i < other.times_.size(); ++i)
    times_[i] = std::max(times_[i], other.times_[i]);
}

void Clock::advance(Line line, std::uint64_t to) {
  if (times_.size() <= line) times_.resize(line + 1);
  times_[line] = to;
}

Line RaceLog::add_line() {
  const std::lock_guard lock(mutex_);
  lines_.emplace_back();
  return lines_.size() - 1;
}

Clock RaceLog::clock(Line line) const {
  const std::lock_guard lock(mutex_);
  return lines_.at(line);
}

void RaceLog::join(Line line, const Clock& clock) {
  const std::lock_guard lock(mutex_);
  lines_.at(line).join(clock);
}

Moment RaceLog::begin(Line stream, Line host, std::string what) {
  const std::lock_guard lock(mutex_);
  auto& clock = lines_.at(stream);
  clock.join(lines_.at(host));
  const auto time = clock.at(stream) + 1;
  clock.advance(stream, time);
  return {stream, time, std::move(what)};
}

void RaceLog::allocate(const void* first, std::size_t bytes, Line stream, Line host) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(first);
  const Moment before{stream, lines_.at(stream).at(stream), "what had the memory before"};
  Span span{begin, begin + bytes, {before}};
  blocks_.insert_or_assign(begin, Block{begin + bytes, stream, host, {std::move(span)}});
}

// As with CUDA's caching allocator: the next owner's kernels come after those on the block's
// stream, and after what the host knows to be over.
void RaceLog::free(const void* first, const std::string& where) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(first));
  if (found == blocks_.end()) return;
  auto known = lines_.at(found->second.stream);
  known.join(lines_.at(found->second.host));
  for (const auto& span : found->second.spans) {
    require_before(span.writes, known, "the memory was freed" + where);
    require_before(span.reads, known, "the memory was freed" + where);
  }
  blocks_.erase(found);
}

RaceLog::Block* RaceLog::block_of(std::uintptr_t address) {
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  auto& block = std::prev(after)->second;
  return address < block.end ? &block : nullptr;
}

void RaceLog::split(std::vector<Span>& spans, std::uintptr_t at) {
  const auto span =
      std::ranges::find_if(spans, [&](const auto& one) { return one.begin < at && at < one.end; });
  if (span == spans.end()) return;
  auto tail = *span;
  tail.begin = at;
  span->end = at;
  spans.insert(span + 1, std::move(tail));
}

void RaceLog::touch(const Moment& moment, const void* first, std::size_t bytes, bool writes) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  const auto begin = reinterpret_cast<std::uintptr_t>(first);
  auto* const block = block_of(begin);
  if (block == nullptr) return;
  const auto end = begin + bytes;
  split(block->spans, begin);
  split(block->spans, end);
  const auto& known = lines_.at(moment.line);
  for (auto& span : block->spans) {
    if (span.begin >= begin && span.end <= end) touch(span, moment, known, writes);
  }
}

void RaceLog::touch(Span& span, const Moment& moment, const Clock& known, bool writes) {
  require_before(span.writes, known, moment.what);
  if (writes) {
    require_before(span.reads, known, moment.what);
    span.writes = {moment};
    span.reads.clear();
    return;
  }
  const auto mine = std::ranges::find(span.reads, moment.line, &Moment::line);
  if (mine == span.reads.end()) {
    span.reads.push_back(moment);
  } else {
    *mine = moment;
  }
}

void RaceLog::require_before(const std::vector<Moment>& earlier, const Clock& known,
                             const std::string& what) {
  for (const auto& moment : earlier) {
    if (known.at(moment.line) < moment.time)
      races_.push_back(what + " may run beside " + moment.what);
  }
}

void RaceLog::report(std::string race) {
  const std::lock_guard lock(mutex_);
  races_.push_back(std::move(race));
}

std::vector<std::string> RaceLog::take_races() {
  const std::lock_guard lock(mutex_);
  return std::exchange(races_, {});
}

}  // namespace tessera::testing
