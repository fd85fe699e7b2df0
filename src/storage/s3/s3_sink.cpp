#include "storage/s3/s3_sink.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "base/parallel.h"
#include "base/process.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr std::uint64_t kStep = 1'000;        // parts until their size doubles
constexpr std::uint64_t kExpectedIn = 5'000;  // parts; as many are left if there comes more

[[noreturn]] void refuse(std::uint64_t size) {
  throw Error(ErrorCode::limit, "an object of " + std::to_string(size) +
                                    " bytes, the store takes " + std::to_string(kLargestObject) +
                                    ", and " + std::to_string(kMostParts) +
                                    " parts by the size that was announced");
}

}  // namespace

PartPlan::PartPlan(std::uint64_t size_hint)
    : size_(kSmallestPart), even_(size_hint == 0 ? kStep : kExpectedIn) {
  if (size_hint > kLargestObject) refuse(size_hint);
  const std::uint64_t needed = (size_hint + kExpectedIn - 1) / kExpectedIn;
  size_ = std::max(size_, (needed + kMiB - 1) / kMiB * kMiB);
}

Part PartPlan::part_at(std::uint64_t offset) const {
  if (offset >= kLargestObject) refuse(offset);
  std::uint64_t first = 0;  // part of the parts of one size, counted from 0
  std::uint64_t begin = 0;  // of that part
  std::uint64_t size = size_;
  std::uint64_t count = even_;
  while (offset - begin >= count * size) {
    begin += count * size;
    first += count;
    if (first >= kMostParts) refuse(offset);
    size *= 2;
    count = std::min(kStep, kMostParts - first);
  }
  const std::uint64_t behind = (offset - begin) / size;
  begin += behind * size;
  return {static_cast<int>(first + behind + 1), begin, begin + size};
}

void PartBuffer::copy(std::size_t offset, ByteView bytes) {
  std::memcpy(bytes_.get() + offset, bytes.data(), bytes.size());
}

void PartBuffer::note(std::size_t offset, std::size_t size) {
  std::size_t begin = offset;
  std::size_t end = offset + size;
  auto run = written_.upper_bound(begin);
  if (run != written_.begin() && std::prev(run)->second >= begin) --run;
  while (run != written_.end() && run->first <= end) {
    begin = std::min(begin, run->first);
    end = std::max(end, run->second);
    run = written_.erase(run);
  }
  written_.emplace(begin, end);
}

bool PartBuffer::is_full() const {
  return !written_.empty() && written_.begin()->first == 0 && written_.begin()->second == size_;
}

ByteView PartBuffer::filled(std::size_t size) {
  std::size_t done = 0;
  const auto zero_until = [&](std::size_t end) {
    if (end > done) std::memset(bytes_.get() + done, 0, end - done);
  };
  for (const auto& [begin, end] : written_) {
    zero_until(begin);
    done = end;
  }
  zero_until(size);
  return {bytes_.get(), size};
}

namespace {

constexpr int kSentAtOnce = 8;  // parts of one write

// A part's bytes on their way: in a buffer, or in the caller's memory.
struct Outgoing {
  int number = 0;
  ByteView bytes;
  std::shared_ptr<PartBuffer> buffer = nullptr;
};

struct Pending {
  std::shared_ptr<PartBuffer> buffer;
  int writers = 0;  // threads that copy into it
};

class S3Sink final : public ByteSink {
 public:
  S3Sink(std::shared_ptr<Bucket> bucket, std::string key, Condition condition,
         std::uint64_t size_hint)
      : bucket_(std::move(bucket)),
        key_(std::move(key)),
        path_(bucket_->path_of(key_)),
        attempt_(random_uuid()),
        condition_(std::move(condition)),
        plan_(size_hint),
        first_(plan_.part_at(0)),
        reaches_behind_first_(size_hint > first_.end) {}

  ~S3Sink() override {
    if (!upload_ || is_done_ || is_gone_ || !made_here_) return;
    try {
      bucket_->abort(*upload_);
    } catch (...) {  // found later among the unfinished uploads
    }
  }
  S3Sink(const S3Sink&) = delete;
  S3Sink& operator=(const S3Sink&) = delete;

  void write_at(std::uint64_t offset, ByteView bytes) override {
    guarded([&] { write(offset, bytes); });
  }

  void commit() override {
    guarded([&] {
      close();
      if (!upload_ && size_ <= first_.end) {
        put_whole();
      } else {
        complete();
      }
    });
  }

  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  void guarded(const std::function<void()>& work) {
    require_usable();
    try {
      work();
    } catch (Error& error) {
      error.at_path(path_);
      remember_failure();
      throw;
    } catch (...) {
      remember_failure();
      throw;
    }
  }

  void require_usable() {
    const std::lock_guard lock(mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (!is_open_) throw Error(ErrorCode::invalid_argument, "already committed").at_path(path_);
  }

  void close() {
    const std::lock_guard lock(mutex_);
    is_open_ = false;
  }

  void remember_failure() {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
  }

  void write(std::uint64_t offset, ByteView bytes) {
    if (bytes.empty()) return;
    const std::uint64_t end = checked_add<std::uint64_t>(offset, bytes.size());
    (void)plan_.part_at(end - 1);  // refused before anything is sent
    {
      const std::lock_guard lock(mutex_);
      size_ = std::max(size_, end);
      if (end > first_.end) reaches_behind_first_ = true;
    }
    std::vector<Outgoing> ready;
    std::vector<int> touched = {first_.number};  // which may have waited for what is behind it
    while (!bytes.empty()) {
      const Part part = plan_.part_at(offset);
      const ByteView here = bytes.first(std::min<std::uint64_t>(part.end - offset, bytes.size()));
      if (is_claimed_whole(part, here.size())) {
        ready.push_back({part.number, here});
      } else {
        copy(part, offset - part.begin, here);
        touched.push_back(part.number);
      }
      offset += here.size();
      bytes = bytes.subspan(here.size());
    }
    take_full(touched, ready);
    send(ready);
  }

  // Whether a part goes straight from the caller's memory.
  bool is_claimed_whole(const Part& part, std::size_t size) {
    if (size != part.end - part.begin) return false;
    const std::lock_guard lock(mutex_);
    if (!reaches_behind_first_ || pending_.contains(part.number)) return false;
    return sent_.try_emplace(part.number).second;
  }

  void copy(const Part& part, std::size_t offset, ByteView bytes) {
    std::shared_ptr<PartBuffer> buffer;
    {
      const std::lock_guard lock(mutex_);
      if (sent_.contains(part.number)) {
        throw Error(ErrorCode::invalid_argument, "these bytes were written already, and sent")
            .at_offset(part.begin + offset);
      }
      Pending& pending = pending_[part.number];
      if (!pending.buffer)
        pending.buffer = std::make_shared<PartBuffer>(narrow<std::size_t>(part.end - part.begin));
      ++pending.writers;
      buffer = pending.buffer;
    }
    buffer->copy(offset, bytes);
    const std::lock_guard lock(mutex_);
    buffer->note(offset, bytes.size());
    --pending_[part.number].writers;
  }

  // Moves parts that have all their bytes to `ready`.
  void take_full(const std::vector<int>& numbers, std::vector<Outgoing>& ready) {
    const std::lock_guard lock(mutex_);
    if (!reaches_behind_first_) return;
    for (const int number : numbers) {
      const auto found = pending_.find(number);
      if (found == pending_.end()) continue;
      const Pending& pending = found->second;
      if (pending.writers > 0 || !pending.buffer->is_full()) continue;
      ready.push_back({number, pending.buffer->filled(pending.buffer->size()), pending.buffer});
      sent_.try_emplace(number);
      pending_.erase(found);
    }
  }

  void send(const std::vector<Outgoing>& ready) {
    if (ready.empty()) return;
    bool is_new = false;
    const Upload& upload = begun(is_new);
    const std::size_t marks = is_new ? 1 : 0;  // the first of what is sent at once
    parallel_for(kSentAtOnce, ready.size() + marks, [&](std::size_t i) {
      if (i < marks) return bucket_->mark(upload, PartsAre::sent);
      const Outgoing& out = ready[i - marks];
      const CompletedPart part = bucket_->upload_part(upload, out.number, out.bytes);
      const std::lock_guard lock(mutex_);
      sent_[out.number] = part;
    });
  }

  const Upload& begun(bool& is_new) {
    const std::lock_guard lock(beginning_);
    is_new = !upload_;
    if (is_new && condition_.is_asked_first) bucket_->require_absent(key_);
    if (is_new) upload_ = bucket_->create_upload(key_, attempt_, PartsAre::sent);
    return *upload_;
  }

  void put_whole() {
    const auto found = pending_.find(first_.number);
    // Somebody has said meanwhile that this server heeds no conditions.
    if (condition_.is_asked_first && !bucket_->sends_conditions()) bucket_->require_absent(key_);
    const ByteView bytes =
        found == pending_.end() ? ByteView() : found->second.buffer->filled(size_);
    end_with(bucket_->put(key_, bytes, condition_, attempt_));
  }

  void complete() {
    std::vector<Outgoing> rest;
    for (std::uint64_t begin = 0; begin < size_;) {
      const Part part = plan_.part_at(begin);
      const auto size = narrow<std::size_t>(std::min(part.end, size_) - begin);
      const auto found = pending_.find(part.number);
      if (found != pending_.end()) {
        rest.push_back({part.number, found->second.buffer->filled(size), found->second.buffer});
      } else if (!sent_.contains(part.number)) {
        PartBuffer gap(size);
        send({{part.number, gap.filled(size)}});
      }
      begin = part.end;
    }
    send(rest);
    std::vector<CompletedPart> parts;
    for (const auto& [number, part] : sent_) parts.push_back(part);
    end_with(bucket_->complete(*upload_, parts, condition_,
                               {key_, attempt_, size_, condition_.is_absent}));
  }

  void end_with(Written outcome) {
    is_done_ = outcome == Written::done;
    if (is_done_) return;
    is_gone_ = outcome == Written::gone;
    if (is_gone_) throw Error(ErrorCode::conflict, "somebody aborted the upload of this object");
    if (!condition_.version.empty())
      throw Error(ErrorCode::conflict, "another writer has replaced or removed the object");
    throw Error(ErrorCode::already_exists, "the object is there already");
  }

  const std::shared_ptr<Bucket> bucket_;
  const std::string key_;
  const std::string path_;
  const std::string attempt_;
  const MadeHere made_here_;
  const Condition condition_;
  const PartPlan plan_;
  const Part first_;
  bool is_done_ = false;  // the object is visible
  bool is_gone_ = false;  // there is no upload that could be aborted

  std::mutex beginning_;          // held while the upload is created; before mutex_
  std::optional<Upload> upload_;  // guarded by beginning_

  std::mutex mutex_;  // guards what follows until commit, which is alone
  bool reaches_behind_first_;
  bool is_open_ = true;
  std::exception_ptr failure_;
  std::uint64_t size_ = 0;             // where the last byte so far ends
  std::map<int, Pending> pending_;     // parts that lack bytes
  std::map<int, CompletedPart> sent_;  // and those on their way
};

}  // namespace

std::unique_ptr<ByteSink> s3_sink(std::shared_ptr<Bucket> bucket, std::string key,
                                  Condition condition, std::uint64_t size_hint) {
  return std::make_unique<S3Sink>(std::move(bucket), std::move(key), std::move(condition),
                                  size_hint);
}

}  // namespace tessera::s3
