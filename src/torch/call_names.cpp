#include "torch/call_names.h"

#include <torch/torch.h>

#include <cstring>
#include <string_view>
#include <utility>

#include "comm/whereabouts.h"
#include "torch/c10_error.h"

namespace tessera {
namespace {

// Beside the tags of slices; the high bit keeps away from tags of the user's own.
constexpr int kNameTag = (1 << 30) | (1 << 29);
constexpr std::int64_t kNameBytes = kCalledBytes + 1;

std::string_view name_in(const at::Tensor& message) {
  const auto* text = static_cast<const char*>(message.const_data_ptr());
  return {text, ::strnlen(text, kNameBytes)};
}

}  // namespace

CallNames::Pending CallNames::start(const std::string& name) {
  begin_held();
  const auto called = called_here(name);
  Pending pending;
  pending.mine_ = torch::zeros({kNameBytes}, torch::kChar);
  std::memcpy(pending.mine_.mutable_data_ptr(), called.data(), called.size());
  const int size = group_->getSize(), rank = group_->getRank();
  pending.theirs_.resize(size);
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank) continue;
    pending.theirs_[peer] = torch::empty({kNameBytes}, torch::kChar);
    std::vector<at::Tensor> in{pending.theirs_[peer]}, out{pending.mine_};
    pending.works_.emplace_back(peer, group_->recv(in, peer, kNameTag));
    pending.works_.emplace_back(peer, group_->send(out, peer, kNameTag));
  }
  return pending;
}

void CallNames::start_before(const std::string& name, std::function<void()> begin) {
  auto pending = start(name);
  held_ = [this, pending = std::move(pending), begin = std::move(begin)] {
    compare(pending);
    try {
      communicate("beginning what was called", begin);
    } catch (const Error& error) {
      fail(error);
    }
  };
}

void CallNames::begin_held() {
  require_own_connections(made_);
  if (const auto held = std::exchange(held_, {})) held();
  if (broken_) throw *broken_;
}

void CallNames::fail(Error error) {
  broken_ = std::move(error);
  throw *broken_;
}

// Gloo says which address and nothing else.
void CallNames::wait_for_all(const Pending& pending) {
  for (const auto& [peer, work] : pending.works_) {
    try {
      communicate("telling what is called", [&] { work->wait(); });
    } catch (const Error& error) {
      fail(Error(error.code(), "rank " + std::to_string(peer) + " did not come to " +
                                   to_sentence(name_in(pending.mine_)) + ": " + error.message()));
    }
  }
}

void CallNames::compare(Pending pending) {
  wait_for_all(pending);
  if (!pending.mine_.defined()) return;
  const auto mine = name_in(pending.mine_);
  for (std::size_t peer = 0; peer < pending.theirs_.size(); ++peer) {
    if (!pending.theirs_[peer].defined()) continue;
    const auto theirs = name_in(pending.theirs_[peer]);
    if (compared_part(theirs) == compared_part(mine)) continue;
    fail(different_calls(group_->getRank(), mine, static_cast<int>(peer), theirs));
  }
  end_left();
}

void CallNames::let_end(UnderWay messages) {
  left_.push_back(std::move(messages));
}

void CallNames::end_left() {
  for (const auto& messages : std::exchange(left_, {})) {
    wait_for_all(messages.name);
    for (const auto& work : messages.works) {
      try {
        communicate("ending what nobody waits for", [&] { work->wait(); });
      } catch (const Error& error) {
        fail(error);
      }
    }
  }
}

std::shared_ptr<CallNames> make_call_names(c10::intrusive_ptr<c10d::ProcessGroup> group) {
  if (group->getDefaultBackend()->getBackendName() != "gloo") return {};
  return std::make_shared<CallNames>(std::move(group));
}

}  // namespace tessera
