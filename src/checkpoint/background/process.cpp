#include "checkpoint/background/process.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/parallel.h"
#include "checkpoint/background/job_message.h"
#include "comm/confer.h"
#include "storage/posix/spawn.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr int kSocket = 3;  // in the process

// The file that this library is in: a shared one, or the program.
fs::path own_file() {
  Dl_info found{};
  if (::dladdr(reinterpret_cast<const void*>(&run_writer_process), &found) == 0 ||
      found.dli_fname == nullptr)
    return {};
  std::error_code none;
  return fs::canonical(found.dli_fname, none);
}

// Where the command may be, the likeliest first.
std::vector<std::string> places_of_command(const std::string& given) {
  if (!given.empty()) return {given};
  if (const auto named = environment_variable("TESSERA_COMMAND")) return {*named};
  std::vector<std::string> places;
  const fs::path beside = own_file().parent_path();
  if (!beside.empty()) {
    places.push_back((beside / "tessera").string());
    places.push_back((beside.parent_path() / "bin" / "tessera").string());
  }
  const std::string path = environment_variable("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  for (std::size_t begin = 0; begin <= path.size();) {
    const std::size_t end = std::min(path.find(':', begin), path.size());
    if (end > begin) places.push_back(path.substr(begin, end - begin) + "/tessera");
    begin = end + 1;
  }
  return places;
}

std::string command(const std::string& given) {
  const std::vector<std::string> places = places_of_command(given);
  std::string tried;
  for (const std::string& place : places) {
    std::error_code none;
    if (::access(place.c_str(), X_OK) == 0 && fs::is_regular_file(place, none)) return place;
    tried.append(tried.empty() ? "" : ", ").append(place);
  }
  throw Error(ErrorCode::not_found,
              "no command `tessera` for a writer process (WriterOptions::program or the variable "
              "TESSERA_COMMAND names it); it is not " +
                  tried);
}

pid_t start(const std::string& program, int socket) {
  SpawnOptions how;
  how.descriptors = {{socket, kSocket}};
  how.null = {STDIN_FILENO, STDOUT_FILENO};
  how.own_session = true;
  pid_t id = -1;
  const int failed = spawn(id, program, {program, "writer", std::to_string(kSocket)}, how);
  if (failed == 0) return id;
  throw Error(ErrorCode::io,
              "a writer process cannot be started: " + std::system_category().message(failed))
      .at_path(program);
}

// Those that were left and may have ended since.
class LeftProcesses {
 public:
  void add(pid_t id) {
    const std::lock_guard lock(mutex_);
    left_.push_back(id);
  }
  void reap() {
    const std::lock_guard lock(mutex_);
    std::erase_if(left_, [](pid_t id) {
      return uninterrupted([&] { return ::waitpid(id, nullptr, WNOHANG); }) != 0;
    });
  }

 private:
  std::mutex mutex_;
  std::vector<pid_t> left_;
};
LeftProcesses& left_processes = *new LeftProcesses;

}  // namespace

WriterProcess::WriterProcess(const std::string& program, const WriterHello& hello)
    : silence_(hello.silence) {
  const std::string path = command(program);
  left_processes.reap();
  {
    const NoFork moment;  // a child would hold the process's end of the connection open
    auto [channel, theirs] = Channel::pair();
    // A program may have closed its standard streams; and dup2() of a descriptor onto itself would
    // leave it closed in the process.
    theirs = Fd(::fcntl(theirs.get(), F_DUPFD_CLOEXEC, kSocket + 1));
    id_ = start(path, theirs.get());
    channel_.emplace(std::move(channel));
  }
  try {
    send({FrameKind::hello, 0, to_message(hello), {}});
    listener_ = std::thread([this] { listen(); });
  } catch (const std::exception&) {
    ::kill(id_, SIGKILL);
    (void)uninterrupted([&] { return ::waitpid(id_, nullptr, 0); });
    throw;
  }
}

WriterProcess::~WriterProcess() {
  if (!made_here_) {
    static_cast<void>(new std::thread(std::move(listener_)));  // there is no such thread in a child
    return;
  }
  if (!is_left_) (void)failure_of([this] { send({FrameKind::end, 0, {}, {}}); });
  channel_->end_sending();
  if (is_left_) {
    channel_->end();
  } else {
    std::unique_lock lock(mutex_);
    Silence silence(silence_);
    const auto has_ended = [this] { return ended_.has_value(); };
    while (!changed_.wait_for(lock, silence.slice(), has_ended) && !silence.is_over()) continue;
    if (!ended_ && !is_left_) ::kill(id_, SIGKILL);  // it was stopped, and has nothing left to do
  }
  listener_.join();
  if (is_left_) left_processes.add(id_);
}

void WriterProcess::hear_frames() {
  constexpr std::chrono::milliseconds kBetweenLooks{500};
  while (true) {
    // Somebody else's child may have the other end open.
    if (!channel_->await(kBetweenLooks)) {
      int status = 0;
      if (uninterrupted([&] { return ::waitpid(id_, &status, WNOHANG); }) == 0) continue;
      status_ = status;
      return;
    }
    auto frame = channel_->receive();
    if (!frame) return;
    if (frame->kind == FrameKind::log) {
      MessageReader message(frame->content);
      const auto level = message.number<LogLevel>();
      log(level, message.text());
    }
    const std::lock_guard lock(mutex_);
    ++heard_;
    if (frame->kind == FrameKind::sign || frame->kind == FrameKind::log) continue;
    if (frame->kind == FrameKind::stays) {
      is_left_ = true;
      return;
    }
    if (frame->kind == FrameKind::begun) {
      begun_ = frame->job;
      refused_ = from_message<std::optional<Error>>(frame->content);
    } else {
      frames_.push_back(*std::move(frame));
    }
    changed_.notify_all();
  }
}

// Until the process has ended.
void WriterProcess::listen() {
  const auto failure = failure_of([this] { hear_frames(); });
  if (failure && !is_left_) ::kill(id_, SIGKILL);  // it says what nobody understands
  int status = 0;
  if (!status_ && !is_left_ && uninterrupted([&] { return ::waitpid(id_, &status, 0); }) == id_)
    status_ = status;
  std::string how = "the writer process " + std::to_string(id_);
  if (status_ && WIFSIGNALED(*status_)) {
    how += " was ended by signal " + std::to_string(WTERMSIG(*status_));
  } else if (status_ && WEXITSTATUS(*status_) != 0) {
    how += " has ended with status " + std::to_string(WEXITSTATUS(*status_));
  } else {
    how += " has ended";
  }
  const std::lock_guard lock(mutex_);
  if (!ended_) ended_ = how;
  changed_.notify_all();
}

void WriterProcess::require_alive() const {
  const std::lock_guard lock(mutex_);
  if (ended_) throw Error(ErrorCode::io, *ended_);
}

// One that does not read must not go on later with what its trainer believes lost.
void WriterProcess::send(const Frame& frame) {
  const std::lock_guard lock(sending_);
  Silence silence(silence_);
  try {
    channel_->send(frame, [&] { return !silence.is_over(); });
  } catch (const Error&) {
    if (!is_left_) ::kill(id_, SIGKILL);
    // The listener knows how it has ended, which says more.
    constexpr std::chrono::seconds kMost{1};
    std::unique_lock lock(mutex_);
    const auto has_ended = [this] { return ended_.has_value(); };
    if (listener_.joinable() && changed_.wait_for(lock, kMost, has_ended))
      throw Error(ErrorCode::io, *ended_);
    throw;
  }
}

// Only who waits for the end of a save stops to: what is being staged is handed over yet.
void WriterProcess::leave() noexcept {
  const std::lock_guard lock(mutex_);
  is_left_ = true;
  changed_.notify_all();
}

PeerPlace WriterProcess::peer_place() {
  const auto frame = next({});
  if (!frame) require_alive();
  const auto [failure, place] =
      from_message<std::pair<std::optional<Error>, PeerPlace>>(frame->content);
  if (failure) throw Error(*failure);
  return place;
}

void WriterProcess::copy_from(const std::vector<PartnerPlace>& owners) {
  send({FrameKind::partners, 0, to_message(owners), {}});
}

void WriterProcess::begin(const WriterJob& job, const Arena& arena) {
  require_alive();
  if (arena.generation() != sent_arena_) {
    const auto size = static_cast<std::uint64_t>(arena.memory().size());
    send(
        {FrameKind::arena, 0, to_message(size), Fd(::fcntl(arena.fd().get(), F_DUPFD_CLOEXEC, 0))});
    sent_arena_ = arena.generation();
  }
  send({FrameKind::job, job.number, to_message(job), {}});
  std::unique_lock lock(mutex_);
  const auto is_answered = [&] { return begun_ == job.number || ended_.has_value(); };
  (void)wait(lock, {}, is_answered);
  if (ended_) throw Error(ErrorCode::io, *ended_);
  if (refused_) throw Error(*refused_);
}

void WriterProcess::go(std::uint64_t number) {
  send({FrameKind::go, number, {}, {}});
}

void WriterProcess::drop(std::uint64_t number) noexcept {
  (void)failure_of([&] { send({FrameKind::drop, number, {}, {}}); });
}

// As long as it gives signs of life. False: `stop` is requested.
template <typename IsOver>
bool WriterProcess::wait(std::unique_lock<std::mutex>& lock, const std::stop_token& stop,
                         const IsOver& is_over) {
  Silence silence(silence_);
  std::uint64_t known = heard_;
  while (!changed_.wait_for(lock, stop, silence.slice(), is_over)) {
    if (stop.stop_requested()) return false;
    if (std::exchange(known, heard_) != heard_) {
      silence.heard();
    } else if (silence.is_over()) {
      ::kill(id_, SIGKILL);  // so that it does not go on later with what is reported lost
      ended_ = "the writer process " + std::to_string(id_) + " gave no sign of life for " +
               std::to_string(silence_.count()) + " ms, and was killed";
      throw Error(ErrorCode::timeout, *ended_);
    }
  }
  return true;
}

// Null: the process has ended, or `stop` is requested.
std::optional<Frame> WriterProcess::next(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  const auto is_over = [this] { return !frames_.empty() || ended_.has_value() || is_left_; };
  if (!wait(lock, stop, is_over) || frames_.empty()) return std::nullopt;
  Frame frame = std::move(frames_.front());
  frames_.pop_front();
  return frame;
}

void WriterProcess::hear(const Frame& frame, const SaveOptions& options, std::uint64_t id) const {
  if (frame.kind == FrameKind::progress && options.progress) {
    const auto [done, total] = from_message<std::pair<std::uint64_t, std::uint64_t>>(frame.content);
    options.progress({done, total});
  } else if (frame.kind == FrameKind::event && options.events) {
    const auto told = from_message<EventMessage>(frame.content);
    const Event event{told.job,   told.phase,      told.rank, told.nanoseconds,
                      told.bytes, told.checkpoint, id,        told.error ? &*told.error : nullptr};
    (void)failure_of([&] { options.events(event); });
  }
}

SaveResult WriterProcess::result(std::uint64_t number, const SaveOptions& options) {
  static std::atomic<std::uint64_t> last_id{std::uint64_t{1} << 63U};  // no JobLog comes so far
  const std::uint64_t id = ++last_id;
  std::optional<Error> thrown;  // by the progress hook
  std::stop_token stop = options.stop;
  const auto ask_to_stop = [&] {
    (void)failure_of([&] { send({FrameKind::stop, number, {}, {}}); });
  };
  while (true) {
    const auto frame = next(stop);
    if (!frame) {
      require_alive();
      if (is_left_) {
        throw Error(ErrorCode::io,
                    "the trainer has failed, and leaves the save to the writer "
                    "process " +
                        std::to_string(id_));
      }
      ask_to_stop();
      stop = {};
      continue;
    }
    if (frame->job != number) continue;  // of one that was dropped when it had begun
    if (frame->kind == FrameKind::result && thrown)
      throw Error(thrown->code(), thrown->message() + "; the save is complete all the same");
    if (frame->kind == FrameKind::result) return result_from_message(frame->content);
    if (frame->kind == FrameKind::failure) throw thrown ? *thrown : decode_error(frame->content);
    const auto failure = failure_of([&] { hear(*frame, options, id); });
    if (!failure || thrown) continue;
    thrown = failure;
    ask_to_stop();
  }
}

}  // namespace tessera
