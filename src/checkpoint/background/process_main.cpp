// The writer process of a CheckpointWriter: one thread hears what the trainer says, the other does
// the saves, one after another. The trainer may end at any moment; then the process finishes the
// saves that it has, if all ranks' writers have them too, and ends.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/parallel.h"
#include "base/signals.h"
#include "base/text.h"
#include "checkpoint/background/job_message.h"
#include "checkpoint/background/kept_snapshot.h"
#include "checkpoint/background/partner_copies.h"
#include "checkpoint/background/process.h"
#include "checkpoint/background/store_group.h"
#include "checkpoint/background/writer.h"
#include "checkpoint/open/arena_tree.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/steps.h"
#include "checkpoint/save.h"
#include "comm/confer.h"
#include "comm/segment.h"
#include "storage/arena/peer.h"
#include "storage/storage.h"
#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/library.h"

namespace tessera {
namespace {

// A job, and what the trainer's ranks have made of it.
struct HeardJob {
  WriterJob what;
  Value tree;
  ByteView arena;                    // in which its tensors are
  std::shared_ptr<const Fd> memory;  // that it is; null: there is none
  std::shared_ptr<Store> meeting;    // null: nobody needs one
  std::unique_ptr<StoreHold> mark;   // while it lives, others see that the save is under way
  std::stop_source stop;
  enum class Word : std::uint8_t { none, go, drop } word = Word::none;
};

class WriterMain {
 public:
  explicit WriterMain(Fd socket) : channel_(std::move(socket)) {}

  int run() {
    if (!hear_hello()) return 1;
    std::jthread worker([this] { work(); });
    const auto failure = failure_of([this] { hear(); });
    {
      const std::lock_guard lock(mutex_);
      is_alone_ = true;
      changed_.notify_all();
    }
    if (failure) log(LogLevel::warning, std::string("a writer process: ") + failure->what());
    worker.join();
    keep_on();
    set_log({});
    return failure ? 1 : 0;
  }

 private:
  bool hear_hello() {
    const auto frame = channel_.receive();
    if (!frame || frame->kind != FrameKind::hello) return false;
    MessageReader message(frame->content);
    const std::string theirs = message.text();
    if (theirs != version()) {
      log(LogLevel::warning, "a writer process of version " + std::string(version()) +
                                 " was started by a library of version " + theirs);
      return false;
    }
    hello_ = from_message<WriterHello>(frame->content);
    if (!hello_.trainer.empty()) {
      const auto failure =
          failure_of([this] { trainer_.emplace(same_host::process_from_text(hello_.trainer)); });
      has_trainer_gone_ = failure && failure->code() == ErrorCode::peer_failed;
    }
    set_log([this](LogLevel level, std::string_view text) { tell_log(level, text); });
    if (hello_.has_partner) serve_partner();
    return true;
  }

  // Others may read what is kept from here on.
  void serve_partner() {
    PeerPlace place;
    const auto failure = failure_of([&] {
      server_ = std::make_unique<ArenaServer>(
          ArenaServerOptions{.silence = std::chrono::milliseconds(hello_.silence)});
      place = {to_text(server_->address()), server_->interface()};
    });
    (void)tell(FrameKind::address, 0, to_message(std::pair(failure, place)));
  }

  // Until the trainer has ended. A child that it has forked keeps its end of the connection open.
  void hear() {
    constexpr std::chrono::milliseconds kMostBetweenLooks{250};
    const auto beat = std::clamp(std::chrono::milliseconds(hello_.silence / 4),
                                 std::chrono::milliseconds(1), kMostBetweenLooks);
    while (true) {
      if (!channel_.await(beat)) {
        tell_in_passing(FrameKind::sign, 0, {});
        if (has_trainer_gone_ || (trainer_ && !trainer_->alive())) return;
        continue;
      }
      auto frame = channel_.receive();
      if (!frame) return;
      if (frame->kind == FrameKind::arena) {
        map_arena(from_message<std::uint64_t>(frame->content), frame->fd);
      } else if (frame->kind == FrameKind::end) {
        is_dismissed_ = true;
      } else if (frame->kind == FrameKind::partners) {
        copies_ = std::make_unique<PartnerCopies>(
            from_message<std::vector<PartnerPlace>>(frame->content), hello_.trainer,
            std::chrono::milliseconds(hello_.silence));
      } else if (frame->kind == FrameKind::job) {
        let_go();  // its memory is another snapshot's
        hear_job(frame->content);
      } else {
        hear_word(frame->kind, frame->job);
      }
    }
  }

  void map_arena(std::uint64_t size, const Fd& fd) {
    const auto bytes = static_cast<std::size_t>(size);
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    if (mapped == MAP_FAILED) throw Error(ErrorCode::io, "the arena cannot be mapped");
    owner_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(mapped),
                                        [bytes](std::byte* memory) { ::munmap(memory, bytes); });
    arena_ = {owner_.get(), bytes};
    memory_ = std::make_shared<const Fd>(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 0));
  }

  void hear_job(ByteView content) {
    auto job = std::make_shared<HeardJob>();
    job->what = from_message<WriterJob>(content);
    const auto refusal = failure_of([&] {
      const auto pace = hello_.rate > 0 ? std::make_shared<Pace>(hello_.rate) : nullptr;
      job->tree =
          tree_from_message(job->what.tree, arena_.size(),
                            [&](Storage& storage, auto begin) { place(storage, begin, pace); });
      if (hello_.keep == 0) job->what.tree = {};
      job->arena = arena_;
      job->memory = memory_;
      const bool is_near = is_on_disk(job->what.meeting);
      if (hello_.size > 1 || is_near) job->meeting = open_store(job->what.meeting);
      if (hello_.rank == 0 && is_near) mark(*job);
    });
    // A trainer that ends before it hears of the mark is one whose save() has not returned: who
    // looks for the latest then has seen no mark, and nothing may appear later.
    const bool is_told = tell(FrameKind::begun, job->what.number, to_message(refusal));
    if (refusal || !is_told) return end(*job);
    const std::lock_guard lock(mutex_);
    jobs_.push_back(job);
    changed_.notify_all();
  }

  void place(Storage& storage, std::uint64_t begin, const std::shared_ptr<Pace>& pace) const {
    const auto bytes =
        arena_.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(storage.size));
    if (pace) {
      storage.source = paced_source(bytes, owner_, pace);
    } else {
      storage.data = bytes.data();
      storage.owner = owner_;
    }
  }

  // Who looks for the latest checkpoint of a run sees that one is to come, and whose.
  void mark(HeardJob& job) const {
    try {
      job.mark = job.meeting->hold();
      put(*job.meeting, kMeetingTrainer, to_bytes(hello_.trainer), IfExists::replace);
    } catch (const Error&) {
      // One process needs no meeting: its place alone may be open to it.
      if (hello_.size > 1) throw;
    }
  }

  void hear_word(FrameKind kind, std::uint64_t number) {
    std::shared_ptr<HeardJob> job;
    {
      const std::lock_guard lock(mutex_);
      for (const auto& one : jobs_)
        if (one->what.number == number) job = one;
      // What was kept may have been written over before its rank could not go on.
      if (!job && kind == FrameKind::drop && kept_ && !kept_->is_there()) kept_.reset();
      if (!job) return;
      if (kind == FrameKind::go) job->word = HeardJob::Word::go;
      if (kind == FrameKind::drop) job->word = HeardJob::Word::drop;
      changed_.notify_all();
    }
    // One that is dropped may have begun, because others had met.
    if (kind == FrameKind::stop || kind == FrameKind::drop) job->stop.request_stop();
  }

  void work() {
    while (const auto job = next()) {
      SaveResult result;
      std::optional<Error> failure;
      const bool goes = is_to_go(*job);
      if (goes) failure = failure_of([&] { result = save(*job); });
      if (goes) {
        judge_kept(*job, failure);
      } else {
        forget_kept();
      }
      job->tree = Value();
      end(*job);
      {
        const std::lock_guard lock(mutex_);
        jobs_.pop_front();
      }
      if (goes) tell_outcome(*job, result, failure);
    }
  }

  // The next that the ranks have decided on, or have left to their writers. Null: there is none. A
  // trainer that was stopped says nothing; but nobody meets for what one of the ranks lacks.
  std::shared_ptr<HeardJob> next() {
    constexpr std::chrono::milliseconds kBetweenLooks{500};
    std::unique_lock lock(mutex_);
    const auto is_decided = [this] {
      if (jobs_.empty()) return is_alone_.load();
      return is_alone_ || jobs_.front()->word != HeardJob::Word::none;
    };
    while (!changed_.wait_for(lock, kBetweenLooks, is_decided)) {
      if (jobs_.empty() || hello_.size == 1) continue;
      const auto job = jobs_.front();
      lock.unlock();
      const bool have_others_met = has_met(*job->meeting);
      lock.lock();
      if (have_others_met && !is_decided()) return job;
    }
    return jobs_.empty() ? nullptr : jobs_.front();
  }

  bool is_to_go(const HeardJob& job) {
    const std::lock_guard lock(mutex_);
    return job.word != HeardJob::Word::drop;
  }

  // From now on others of this user find the snapshot, as far as all ranks come so far. As a part
  // of the save, so that other ranks see signs of life.
  void keep(const HeardJob& job) {
    if (hello_.keep == 0) return;
    if (!job.what.is_kept) {
      log(LogLevel::warning, "the snapshot of " + job.what.place +
                                 " is not kept in memory: ranks may have values of their own in it "
                                 "(IfDiffers::keep)");
      forget_kept();
      return;
    }
    const HeedStop heeding(job.stop.get_token());
    std::unique_ptr<KeptSnapshot> kept;
    auto failure = failure_of([&] {
      const std::string peer = server_ ? to_text(server_->address()) : "";
      kept = std::make_unique<KeptSnapshot>(
          job.what, hello_, KeptMemory{job.arena, job.memory, peer}, earlier_notice());
    });
    if (failure && failure->code() == ErrorCode::cancelled) throw Error(*failure);
    {
      const std::lock_guard lock(mutex_);
      if (jobs_.front()->what.number == job.what.number && jobs_.size() == 1)
        kept_ = std::move(kept);
      if (kept_ && server_ && !failure)
        failure = failure_of([this] { server_->serve(kept_->part()); });
    }
    if (failure) {
      log(LogLevel::warning, "the snapshot of " + job.what.place +
                                 " cannot be kept for a restart: " + failure->what());
    }
  }
  // Of what a save refused nobody goes on; what it could not write is good.
  void judge_kept(const HeardJob& job, const std::optional<Error>& failure) {
    if (!failure) (void)failure_of([&] { forget_older(job.what); });
    const std::lock_guard lock(mutex_);
    has_failed_ = failure.has_value();
    if (!kept_) return;
    const bool is_good =
        !failure || is_one_of(failure->code(), ErrorCode::io, ErrorCode::out_of_space,
                              ErrorCode::timeout, ErrorCode::peer_failed, ErrorCode::cancelled);
    if (!is_good) {
      if (server_) server_->serve_nothing();
      kept_.reset();
    } else if (!failure && hello_.rank == 0) {
      (void)failure_of([&] { kept_->note_stored(marker_digest(*open_store(job.what.place))); });
    }
  }
  std::shared_ptr<KeptNotice> earlier_notice() {
    const std::lock_guard lock(mutex_);
    return kept_ ? kept_->notice() : nullptr;
  }
  void forget_kept() {
    const std::lock_guard lock(mutex_);
    if (server_) server_->serve_nothing();
    kept_.reset();
  }
  void let_go() {
    const std::lock_guard lock(mutex_);
    if (server_) server_->serve_nothing();
    if (kept_) (void)failure_of([this] { kept_->let_go(); });
  }
  // For who starts again, once the trainer has died.
  void keep_on() {
    constexpr std::chrono::milliseconds kBetweenLooks{100};
    // One that ends well has on the disk what it saved last, or knows that it has not.
    if (!kept_ || (is_dismissed_ && !has_failed_)) return;
    (void)failure_of([this] { kept_->note_end_of_trainer(); });
    if (copies_) copies_->note_end_of_trainer();
    // A trainer that goes on waits for no more.
    (void)failure_of([this] {
      channel_.send({FrameKind::stays, 0, {}, {}}, [] { return false; });
    });
    channel_.end();
    // Who started the trainer waits until nobody has its stderr any more.
    const Fd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
    (void)::dup2(nowhere.get(), STDERR_FILENO);
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(hello_.keep);
    while (kept_->is_wanted() && !told_to_end_.came() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(kBetweenLooks);
    copies_.reset();
    server_.reset();
    kept_.reset();
  }

  SaveResult save(HeardJob& job) {
    std::unique_ptr<Group> group;
    SaveResult result;
    const auto failure = failure_of([&] {
      SaveOptions options = options_from_message(job.what.options);
      const std::uint64_t number = job.what.number;
      options.stop = job.stop.get_token();
      if (job.what.hears_progress) {
        options.progress = [this, number](const Progress& progress) {
          tell_in_passing(FrameKind::progress, number,
                          to_message(std::pair(progress.done, progress.total)));
        };
      }
      if (job.what.hears_events)
        options.events = [this, number](const Event& event) { tell_event(number, event); };
      group = hello_.size == 1 ? solo_group()
                               : make_store_group(job.meeting, hello_.rank, hello_.size,
                                                  std::chrono::milliseconds(hello_.silence));
      // The threads of the group give signs of life, and so are not idle.
      std::optional<Error> thrown;
      std::jthread([&] {
        if (hello_.idle) run_when_idle();
        thrown = failure_of([&] {
          keep(job);
          result = save_or_fail(std::nullopt, job.tree, job.what.place, options, *group);
        });
      }).join();
      if (thrown) throw Error(*thrown);
    });
    if (hello_.size > 1 && group) end_meeting(std::move(group));
    if (failure) throw Error(*failure);
    return result;
  }

  void tell_outcome(const HeardJob& job, const SaveResult& result,
                    const std::optional<Error>& failure) {
    if (failure && is_alone_) {
      log(LogLevel::warning, "the save to " + job.what.place +
                                 ", whose trainer has ended, failed: " + failure->what());
    }
    if (failure) {
      (void)tell(FrameKind::failure, job.what.number, encode_error(*failure));
    } else {
      (void)tell(FrameKind::result, job.what.number, message_of_result(result));
    }
  }

  // Nobody sees the save any more.
  static void end(HeardJob& job) {
    if (job.mark) (void)failure_of([&] { job.meeting->remove(kMeetingTrainer); });
    job.mark.reset();
    std::error_code none;
    if (job.meeting && is_on_disk(job.what.meeting))
      std::filesystem::remove(without_file_scheme(job.what.meeting), none);  // if it is empty
  }

  // Whether the trainer was told. One that was stopped is waited for.
  bool tell(FrameKind kind, std::uint64_t job, Bytes content) {
    const std::lock_guard lock(telling_);
    return tell_now(kind, job, std::move(content));
  }
  bool tell_now(FrameKind kind, std::uint64_t job, Bytes content) {
    const auto lives = [this] {
      return !is_alone_ && !has_trainer_gone_ && (!trainer_ || trainer_->alive());
    };
    return lives() && !failure_of([&] {
             channel_.send({kind, job, std::move(content), {}}, lives);
           });
  }
  // What is worth no waiting.
  void tell_in_passing(FrameKind kind, std::uint64_t job, Bytes content) {
    const std::unique_lock lock(telling_, std::try_to_lock);
    if (lock && channel_.has_room()) (void)tell_now(kind, job, std::move(content));
  }
  void tell_log(LogLevel level, std::string_view text) {
    if (tell(FrameKind::log, 0, MessageWriter().number(level).text(text).take())) return;
    if (level != LogLevel::warning) return;
    std::fprintf(stderr, "tessera: warning: %.*s\n", static_cast<int>(text.size()), text.data());
  }
  void tell_event(std::uint64_t job, const Event& event) {
    EventMessage message{std::string(event.job), std::string(event.phase),
                         event.checkpoint,       event.rank,
                         event.nanoseconds,      event.bytes};
    if (event.error != nullptr) message.error = *event.error;
    (void)tell(FrameKind::event, job, to_message(message));
  }

  // A scheduler that ends a whole job sends it to all processes, and the trainer may save once
  // more. But then nobody starts again here.
  const NotedSignal told_to_end_{SIGTERM};
  Channel channel_;
  WriterHello hello_;
  std::optional<same_host::Watch> trainer_;  // none: nobody can tell whether it lives
  bool has_trainer_gone_ = false;            // before this process had looked
  std::shared_ptr<std::byte> owner_;         // of the arena
  MutableByteView arena_;
  std::shared_ptr<const Fd> memory_;  // that it is
  bool is_dismissed_ = false;         // the trainer has ended well
  std::mutex telling_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<HeardJob>> jobs_;
  std::unique_ptr<KeptSnapshot> kept_;
  bool has_failed_ = false;                // the last save
  std::unique_ptr<ArenaServer> server_;    // null: no other host reads it
  std::unique_ptr<PartnerCopies> copies_;  // of other hosts' snapshots
  std::atomic<bool> is_alone_ = false;     // the trainer has ended
};

// Of the trainer's files and devices this process needs none. Before Linux 5.9 they stay open.
void close_what_is_not_ours(int socket) {
  (void)::syscall(SYS_close_range, static_cast<unsigned>(socket) + 1, ~0U, 0U);
}

}  // namespace

int run_writer_process(int socket) {
  std::signal(SIGPIPE, SIG_IGN);  // who reads the trainer's stderr may end with the trainer
  close_what_is_not_ours(socket);
  (void)::fcntl(socket, F_SETFD, FD_CLOEXEC);
  return WriterMain(Fd(socket)).run();
}

}  // namespace tessera
