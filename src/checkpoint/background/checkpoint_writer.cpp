// What users call: CheckpointWriter and the handles of its saves.
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/parallel.h"
#include "checkpoint/background/snapshot.h"
#include "checkpoint/background/writer.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/comm.h"

namespace tessera {
namespace {

const WriterOptions& require_meant(const WriterOptions& options) {
  require_threads(options.threads);
  const auto require = [](const char* name, std::chrono::milliseconds time, int least) {
    if (time.count() >= least) return;
    throw Error(
        ErrorCode::invalid_argument,
        fmt::format("WriterOptions::{} is {} ms, expected {} or more", name, time.count(), least));
  };
  require("silence", options.silence, 1);
  require("end_within", options.end_within, 0);
  require("ask_within", options.ask_within, 0);
  require("keep", options.keep, 0);
  if (options.keep.count() > 0 && !options.process) {
    throw Error(
        ErrorCode::invalid_argument,
        "WriterOptions::keep is for a writer by a process: memory of a thread ends with it");
  }
  if (options.partner < 0 || options.partner > 1 ||
      (options.partner > 0 && (!options.process || options.keep.count() == 0))) {
    throw Error(ErrorCode::invalid_argument,
                "WriterOptions::partner is 0 or, with `process` and `keep`, 1, not " +
                    std::to_string(options.partner));
  }
  return options;
}

std::shared_ptr<Group> require_there(std::shared_ptr<Group> group) {
  if (group) return group;
  throw Error(ErrorCode::invalid_argument, "a CheckpointWriter without a group");
}

}  // namespace

bool PendingSave::staged() const {
  outcome_->require_own();
  outcome_->pass_copy_within({});
  return outcome_->is_staged();
}

void PendingSave::await_staged() const {
  outcome_->require_own();
  outcome_->pass_copy();
  outcome_->staging().wait();
}

bool PendingSave::done() const {
  outcome_->require_own();
  outcome_->pass_copy_within({});
  return outcome_->decision().is_made();
}

bool PendingSave::failed() const {
  return done() && outcome_->failure().has_value();
}

SaveResult PendingSave::result() const {
  if (!done() && thread_job().behind != nullptr) {
    throw Error(ErrorCode::invalid_argument,
                "a hook of a save in the background waits for such a save");
  }
  outcome_->pass_copy();
  outcome_->decision().wait();
  if (!outcome_->failure()) return outcome_->result();
  outcome_->take();
  throw Error(*outcome_->failure());
}

CheckpointWriter::CheckpointWriter(std::shared_ptr<Group> group, const WriterOptions& options)
    : writer_(std::make_shared<BackgroundWriter>(require_there(std::move(group)),
                                                 require_meant(options))) {
  writer_->start();
}

CheckpointWriter::CheckpointWriter(const WriterOptions& options)
    : CheckpointWriter(solo_group(), options) {}

CheckpointWriter::~CheckpointWriter() {
  writer_->close();
}

PendingSave CheckpointWriter::save(const Value& tree, const Location& where,
                                   const SaveOptions& options, SaveDone done) {
  return writer_->save(tree, where, options, std::move(done), {});
}

PendingSave CheckpointWriter::save(const Value& tree, const Location& where,
                                   const SaveOptions& options, SaveDone done, SteadyMemory steady) {
  return writer_->save(tree, where, options, std::move(done), std::move(steady));
}

int CheckpointWriter::ranks() const noexcept {
  return writer_->ranks();
}

void CheckpointWriter::require_alive() const {
  writer_->require_alive();
}

void CheckpointWriter::leave() noexcept {
  writer_->leave();
}

void CheckpointWriter::wait() {
  writer_->wait();
}

std::uint64_t CheckpointWriter::bytes_of(const Value& tree) {
  return TreeSnapshot(tree).bytes();
}

}  // namespace tessera
