#include "torch/same_host_work.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <torch/types.h>

#include <utility>

namespace tessera {

SameHostWork::SameHostWork(std::shared_ptr<same_host::Exchange> exchange, std::uint64_t number,
                           Options options)
    : Work(exchange->rank(), options.type),
      exchange_(std::move(exchange)),
      number_(number),
      deadline_(options.deadline),
      outputs_(std::move(options.outputs)) {}

bool SameHostWork::isCompleted() {
  {
    const std::lock_guard lock(mutex_);
    if (completed_) return true;
  }
  try {
    if (!exchange_->done(number_)) return false;
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
  }
  return true;
}

bool SameHostWork::isSuccess() const {
  const std::lock_guard lock(mutex_);
  return completed_ && !exception_;
}

std::exception_ptr SameHostWork::exception() const {
  const std::lock_guard lock(mutex_);
  return exception_;
}

bool SameHostWork::wait(std::chrono::milliseconds timeout) {
  try {
    exchange_->wait(number_, timeout == kNoTimeout ? deadline_ : timeout);
    end(nullptr);
  } catch (...) {
    end(std::current_exception());
    throw;
  }
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> SameHostWork::getFuture() {
  auto future =
      c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  try {
    wait(kNoTimeout);
    future->markCompleted(c10::IValue(outputs_));
  } catch (...) {
    future->setError(std::current_exception());
  }
  return future;
}

// Not Work::finish: it would throw what it is given a second time around.
void SameHostWork::end(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  completed_ = true;
  exception_ = std::move(failure);
}

}  // namespace tessera
