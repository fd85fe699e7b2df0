#include "writers.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "ending.h"
#include "errands.h"
#include "groups.h"
#include "jobs.h"
#include "options.h"
#include "reports.h"
#include "saves.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/error.h"
#include "text.h"
#include "trees.h"

namespace tessera::python {
namespace {

constexpr std::chrono::milliseconds kGrace{10'000};  // for threads that are asked to stop

using Stopping = std::stop_callback<std::function<void()>>;

// What a save in the background needs until it is decided. Its hook has it.
class Told {
 public:
  // `decided` is called when the save is. Who ends `closing` stops it, as the interpreter's end
  // does.
  Told(std::shared_ptr<Errands> errands, nb::object decided, const std::stop_token& closing)
      : errands_(std::move(errands)),
        decided_(shared(std::move(decided))),
        at_end_(ending(), [this] { stop_.request_stop(); }),
        at_close_(closing, [this] { stop_.request_stop(); }) {}

  [[nodiscard]] std::stop_token stop() const { return stop_.get_token(); }

  // Its caller was interrupted, and has no handle of it.
  void drop() {
    is_dropped_ = true;
    stop_.request_stop();
  }

  void hear(const PendingSave& save) {
    if (is_dropped_) {
      try {
        save.result();
      } catch (const Error&) {  // the interrupt was told already
      }
    }
    errands_->run([this] {
      const nb::object decided = std::exchange(*decided_, nb::object());
      PyObject* const heard = PyObject_CallNoArgs(decided.ptr());
      if (heard == nullptr) PyErr_WriteUnraisable(decided.ptr());
      Py_XDECREF(heard);
    });
  }

 private:
  const AtWork at_work_;
  const std::shared_ptr<Errands> errands_;
  const std::shared_ptr<nb::object> decided_;
  std::stop_source stop_;
  std::atomic<bool> is_dropped_ = false;
  const Stopping at_end_, at_close_;
};

// A PendingSave whose calls do not wait.
class Pending {
 public:
  explicit Pending(PendingSave save) : save_(std::move(save)) {}

  [[nodiscard]] bool staged() const { return save_.staged(); }
  [[nodiscard]] bool done() const { return save_.done(); }
  // Throws where a wait for it is an error, or would not end.
  void require_may_wait() const {
    if (save_.done() || !Errands::is_on()) return;
    throw Error(ErrorCode::invalid_argument,
                "a callback of a save in the background waits for such a save");
  }
  // Of a save that is decided.
  [[nodiscard]] nb::dict result() const {
    SaveResult result;
    std::exception_ptr failure;
    try {
      result = save_.result();
    } catch (const Error&) {
      failure = std::current_exception();
    }
    say_warnings(failure);
    return dict_of(result);
  }

 private:
  PendingSave save_;
};

IfBusy if_busy_named(const std::string& name) {
  if (name == "wait") return IfBusy::wait;
  if (name == "refuse") return IfBusy::refuse;
  throw Error(ErrorCode::invalid_argument, "if_busy is 'wait' or 'refuse', and not '" + name + "'");
}

WriterOptions writer_options(const Options& all) {
  WriterOptions options;
  all.get("bytes", options.bytes);
  std::string if_busy = "wait";
  all.get("if_busy", if_busy);
  options.if_busy = if_busy_named(if_busy);
  all.get("rate", options.rate);
  all.get("idle", options.idle);
  all.get("threads", options.threads);
  auto milliseconds = static_cast<std::uint64_t>(options.end_within.count());
  all.get("end_within_ms", milliseconds);
  options.end_within = std::chrono::milliseconds(milliseconds);
  all.get("process", options.process);
  all.get("program", options.program);
  milliseconds = static_cast<std::uint64_t>(options.silence.count());
  all.get("silence_ms", milliseconds);
  options.silence = std::chrono::milliseconds(milliseconds);
  milliseconds = static_cast<std::uint64_t>(options.keep.count());
  all.get("keep_ms", milliseconds);
  options.keep = std::chrono::milliseconds(milliseconds);
  all.get("partner", options.partner);
  return options;
}

// The end of a writer, which may come later than that of its object.
struct End {
  std::shared_future<void> gone;  // ready when it has ended
  std::stop_source closing;       // an interrupt ends the wait for it
  std::chrono::milliseconds within{};
  int process = ::getpid();

  // Waits, and then asks what is left to stop.
  void await(const Job& job) {
    const Stopping interrupted(job.stop(), [this] { closing.request_stop(); });
    if (gone.wait_for(within) == std::future_status::ready) return;
    closing.request_stop();
    gone.wait_for(kGrace);
  }
  [[nodiscard]] bool is_over() const {
    return process != ::getpid() ||
           gone.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
};

// Of writers that callbacks have ended. Guarded by the interpreter's lock.
std::vector<End>& ends_left() {
  static auto& ends = *new std::vector<End>;
  return ends;
}

void await_ends_left() {
  for (End& end : std::exchange(ends_left(), {})) {
    if (!end.is_over()) run_job(nb::none(), [&](Job& job) { end.await(job); });
  }
}

class Writer {
 public:
  Writer(nb::dict given, nb::handle carrier) : errands_(std::make_shared<Errands>()) {
    const WriterOptions options = writer_options(Options(std::move(given)));
    std::shared_ptr<Group> group = group_of(carrier, errands_);
    const auto gone = std::make_shared<std::promise<void>>();
    end_.gone = gone->get_future().share();
    end_.within = options.end_within;
    run_job(nb::none(), [&](Job&) {  // which touches the arena
      writer_ = {new CheckpointWriter(std::move(group), options), [gone](CheckpointWriter* writer) {
                   delete writer;
                   gone->set_value();
                 }};
    });
  }
  ~Writer() {
    if (writer_ && end_.process == ::getpid()) end_apart(std::move(writer_));
  }
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  Pending save(const Tree& tree, nb::handle target, nb::dict given, nb::object decided) {
    const std::string to = place_of(target);
    SaveOptions options = save_options(Options(std::move(given)));
    const auto told =
        std::make_shared<Told>(errands_, std::move(decided), end_.closing.get_token());
    options.stop = told->stop();
    return asked([&](Job& job, CheckpointWriter& writer) {
      const Stopping interrupted(job.stop(), [&] { told->drop(); });
      return Pending(writer.save(tree.value, to, options,
                                 [told](const PendingSave& save) { told->hear(save); }));
    });
  }

  void wait() {
    asked([](Job&, CheckpointWriter& writer) { writer.wait(); });
  }

  void require_alive() {
    if (!writer_) throw Error(ErrorCode::invalid_argument, "the writer is closed");
    writer_->require_alive();
  }

  void leave() {
    if (writer_) writer_->leave();
  }

  void close() {
    auto writer = std::exchange(writer_, nullptr);
    if (!writer) return;
    if (Errands::is_on()) {  // which its thread waits for
      std::erase_if(ends_left(), [](const End& end) { return end.is_over(); });
      ends_left().push_back(end_);
      end_apart(std::move(writer));
      return;
    }
    run_job(nb::none(), [&](Job& job) {
      const Stopping interrupted(job.stop(), [this] { end_.closing.request_stop(); });
      writer.reset();
      end_.await(job);  // other threads may be in save(); the last one ends the writer
    });
  }

  [[nodiscard]] bool is_closed() const { return writer_ == nullptr; }

 private:
  // Whoever drops the last reference waits for the saves, and so must not have the lock.
  template <typename Work>
  std::invoke_result_t<Work, Job&, CheckpointWriter&> asked(const Work& work) {
    auto writer = writer_;
    if (!writer) throw Error(ErrorCode::invalid_argument, "the writer is closed");
    if (Errands::is_on()) {
      throw Error(ErrorCode::invalid_argument,
                  "a CheckpointWriter is called by a callback of a save in the background");
    }
    return run_job(nb::none(), [&](Job& job) {
      const auto used = std::move(writer);
      return work(job, *used);
    });
  }

  static void end_apart(std::shared_ptr<CheckpointWriter> writer) {
    std::thread([writer = std::move(writer)]() mutable { writer.reset(); }).detach();
  }

  const std::shared_ptr<Errands> errands_;
  End end_;
  std::shared_ptr<CheckpointWriter> writer_;  // null once it is closed; guarded by the lock
};

}  // namespace

void bind_writers(nb::module_& module) {
  nb::class_<Pending>(module, "PendingSave")
      .def("staged", &Pending::staged)
      .def("done", &Pending::done)
      .def("require_may_wait", &Pending::require_may_wait)
      .def("result", &Pending::result);
  nb::class_<Writer>(module, "Writer")
      .def(nb::init<nb::dict, nb::handle>(), nb::arg(), nb::arg().none())
      .def("save", &Writer::save)
      .def("wait", &Writer::wait)
      .def("require_alive", &Writer::require_alive)
      .def("leave", &Writer::leave)
      .def("close", &Writer::close)
      .def_prop_ro("is_closed", &Writer::is_closed);
  module.def("is_on_errand", &Errands::is_on);
  module.def("await_ends_left", await_ends_left);
  module.def("bytes_of", [](const Tree& tree) { return CheckpointWriter::bytes_of(tree.value); });
}

}  // namespace tessera::python
