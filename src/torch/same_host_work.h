// A collective under way through shared memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/same_host/exchange.h"

namespace tessera {

class SameHostWork final : public c10d::Work {
 public:
  struct Options {
    c10d::OpType type;
    std::chrono::milliseconds deadline;
    std::vector<at::Tensor> outputs;
  };
  SameHostWork(std::shared_ptr<same_host::Exchange> exchange, std::uint64_t number,
               Options options);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  std::vector<at::Tensor> result() override { return outputs_; }
  void synchronize() override {}
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override { exchange_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return number_; }

 private:
  void end(std::exception_ptr failure);

  const std::shared_ptr<same_host::Exchange> exchange_;
  const std::uint64_t number_;  // of the call
  const std::chrono::milliseconds deadline_;
  const std::vector<at::Tensor> outputs_;
};

}  // namespace tessera
