// Work that takes time: without the interpreter's lock, and ended by Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <stop_token>
#include <type_traits>

#include "ending.h"
#include "tessera/job.h"

namespace tessera::python {

namespace nb = nanobind;

// Fewer bytes than this are read or written before somebody could interrupt it: they need no job.
constexpr std::uint64_t kQuick = 1U << 20U;

// What a job hears while it runs.
class Job {
 public:
  // `progress`: called with (done, total) in bytes, or None.
  explicit Job(nb::object progress)
      : progress_(std::move(progress)), at_end_(ending(), [this] { source_.request_stop(); }) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() = default;

  [[nodiscard]] std::stop_token stop() const { return source_.get_token(); }
  [[nodiscard]] ProgressHook progress();

  // Runs `work` on a thread of its own and waits for it; signals are handled meanwhile. Throws what
  // `work` throws. A signal handler or progress function that raises has ended the work then, and
  // what it raised is thrown. The end of the interpreter ends the work, too; the thread that has
  // called this sleeps then.
  void run(const std::function<void()>& work);

 private:
  void note_error() noexcept;  // Python's, which is set

  nb::object progress_;
  std::stop_source source_;
  std::stop_callback<std::function<void()>> at_end_;
  std::optional<nb::python_error> raised_;  // the first one; guarded by the interpreter's lock
};

// From now on what the library warns of is a UserWarning of the call that the job belongs to, or of
// the next one. The error of a job that fails goes before them where warnings are made errors.
void hear_warnings();
// Says those that were heard so far, and throws `failure` or what a warning became; null: there is
// no failure.
void say_warnings(const std::exception_ptr& failure);

// The result of `work(job)`.
template <typename Work>
auto run_job(nb::object progress, const Work& work) {
  Job job(std::move(progress));
  if constexpr (std::is_void_v<std::invoke_result_t<Work, Job&>>) {
    job.run([&] { work(job); });
  } else {
    std::optional<std::invoke_result_t<Work, Job&>> result;
    job.run([&] { result.emplace(work(job)); });
    return std::move(*result);
  }
}

}  // namespace tessera::python
