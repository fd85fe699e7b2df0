// The writer of a CheckpointWriter as a process of its own, which finishes what is staged when the
// trainer dies: this side of it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>

#include "checkpoint/background/arena.h"
#include "checkpoint/background/channel.h"
#include "checkpoint/background/partner_copies.h"
#include "comm/message.h"
#include "tessera/checkpoint.h"
#include "tessera/save_options.h"
#include "tessera/value.h"

namespace tessera {

// Who a writer process is, as its trainer says first of all.
struct WriterHello {
  std::string version = {};  // of the library
  std::string trainer = {};  // its process, as same_host::to_text() has it; empty: nobody can tell
  std::int32_t rank = 0, size = 1;
  bool idle = true;
  std::uint64_t rate = 0;
  std::uint64_t silence = 0;  // milliseconds
  std::uint64_t keep = 0;     // likewise: how long it keeps a snapshot without its trainer
  bool has_partner = false;   // of another host, which copies what this one keeps
};
auto fields(FieldsOf<WriterHello> auto& hello) {
  return std::tie(hello.version, hello.trainer, hello.rank, hello.size, hello.idle, hello.rate,
                  hello.silence, hello.keep, hello.has_partner);
}

// A save, as it goes to the process.
struct WriterJob {
  std::uint64_t number = 0;
  std::string place = {};
  std::string meeting = {};  // a directory that is of this save alone, beside the place
  std::string writer = {};   // the name of the writer on all ranks
  // Of the arena while the tree is in it: Arena::overwrites() and used().
  std::uint64_t overwrites = 0, used = 0;
  bool is_kept = false;  // for others of this host, if processes keep anything
  Bytes options = {}, tree = {};
  bool hears_events = false, hears_progress = false;
};
auto fields(FieldsOf<WriterJob> auto& job) {
  return std::tie(job.number, job.place, job.meeting, job.writer, job.overwrites, job.used,
                  job.is_kept, job.options, job.tree, job.hears_events, job.hears_progress);
}

class WriterProcess {
 public:
  // Starts `tessera writer`. `program`: where that command is; empty: it is looked for. Throws
  // `not_found` naming where, and `io`.
  WriterProcess(const std::string& program, const WriterHello& hello);
  // Says that nothing more comes, and leaves the process alone with what it has.
  ~WriterProcess();
  WriterProcess(const WriterProcess&) = delete;
  WriterProcess& operator=(const WriterProcess&) = delete;

  // Hands over a job, whose tree is in `arena`. Returns when whoever opens the place sees that the
  // save is under way. Throws what the process says, and `io` where it has ended.
  void begin(const WriterJob& job, const Arena& arena);
  // What has become of it on all ranks.
  void go(std::uint64_t number);
  void drop(std::uint64_t number) noexcept;
  // Waits for the end of the job that goes. Hooks and stop of `options` work as in a save.
  SaveResult result(std::uint64_t number, const SaveOptions& options);
  // Where processes of other hosts read what this one keeps; it was asked to be a partner. Once.
  [[nodiscard]] PeerPlace peer_place();
  // Whose snapshots the process is to copy.
  void copy_from(const std::vector<PartnerPlace>& owners);
  // The trainer has failed: the process goes on as if somebody had killed it, with what it saves
  // and keeps. It is not waited for any more; result() is `io`.
  void leave() noexcept;
  // Throws `io` if the process has ended.
  void require_alive() const;
  [[nodiscard]] pid_t id() const noexcept { return id_; }

 private:
  void listen();
  void hear_frames();
  void send(const Frame& frame);
  template <typename IsOver>
  [[nodiscard]] bool wait(std::unique_lock<std::mutex>& lock, const std::stop_token& stop,
                          const IsOver& is_over);
  [[nodiscard]] std::optional<Frame> next(const std::stop_token& stop);
  void hear(const Frame& frame, const SaveOptions& options, std::uint64_t id) const;

  const MadeHere made_here_;
  std::atomic<bool> is_left_ = false;
  pid_t id_ = -1;
  std::optional<Channel> channel_;
  std::uint64_t sent_arena_ = 0;             // its generation
  std::optional<int> status_;                // as waitpid() has it; the listener's
  const std::chrono::milliseconds silence_;  // after which it counts as lost while it is waited for
  std::mutex sending_;                       // a frame is sent whole
  mutable std::mutex mutex_;                 // guards what follows
  std::condition_variable_any changed_;
  std::uint64_t begun_ = 0;           // the last job that has
  std::optional<Error> refused_;      // what came in its place
  std::deque<Frame> frames_;          // of the job that goes
  std::uint64_t heard_ = 0;           // frames that came
  std::optional<std::string> ended_;  // how the process has
  std::thread listener_;
};

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
// What `tessera writer` does with the connection that it got as `socket`. Returns its exit status.
int run_writer_process(int socket);
#pragma GCC visibility pop

}  // namespace tessera
