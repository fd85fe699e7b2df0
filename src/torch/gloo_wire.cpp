#include "torch/gloo_wire.h"

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm/tree.h"
#include "tessera/error.h"
#include "torch/c10_error.h"

namespace tessera {
namespace {

using Gloo = c10d::ProcessGroupGloo;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A wait of Gloo that times out closes its connection, so none may: who is silent is judged by the
// signs of life that come or do not come.
constexpr auto kForever = std::chrono::hours(24 * 365);
constexpr int kTag = 0;

class GlooWire final : public Wire {
 public:
  // `group`: of this rank and its neighbour.
  explicit GlooWire(c10::intrusive_ptr<Gloo> group)
      : group_(std::move(group)), peer_(1 - group_->getRank()) {}

  void send(std::span<const std::byte> bytes) override {
    // Gloo reads it only.
    auto* data = const_cast<std::byte*>(bytes.data());
    transfer("sending to a neighbour", sending_, data, bytes.size(),
             [this](std::vector<at::Tensor>& block) { return group_->send(block, peer_, kTag); });
  }
  void receive(std::span<std::byte> bytes) override {
    transfer("hearing from a neighbour", receiving_, bytes.data(), bytes.size(),
             [this](std::vector<at::Tensor>& block) { return group_->recv(block, peer_, kTag); });
  }
  void shut_down() noexcept override {
    const std::lock_guard lock(mutex_);
    shut_down_ = true;
    if (sending_) sending_->abort();
    if (receiving_) receiving_->abort();
  }

 private:
  // `under_way`: where shut_down finds the work.
  template <typename Start>
  void transfer(const char* operation, WorkPtr& under_way, std::byte* data, std::size_t size,
                const Start& start) {
    std::vector<at::Tensor> block{
        torch::from_blob(data, {static_cast<std::int64_t>(size)}, torch::kUInt8)};
    communicate(operation, [&] {
      WorkPtr work;
      {
        const std::lock_guard lock(mutex_);
        if (shut_down_) throw ended();
        work = under_way = start(block);
      }
      const bool whole = work->wait(kForever);
      const std::lock_guard lock(mutex_);
      under_way.reset();
      if (!whole || shut_down_) throw ended();
    });
  }
  static Error ended() { return {ErrorCode::peer_failed, "this rank has ended the connection"}; }

  const c10::intrusive_ptr<Gloo> group_;
  const int peer_;
  std::mutex mutex_;
  bool shut_down_ = false;
  WorkPtr sending_;
  WorkPtr receiving_;
};

class Connector {
 public:
  // Asks for all neighbours at once: whoever comes finds that without a pause between two of them.
  Connector(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
            std::chrono::milliseconds deadline)
      : store_(std::move(store)), rank_(rank), deadline_(deadline), device_(make_gloo_device()) {
    const TreePlace place = place_in_tree(rank, size);
    if (rank != 0) ask(place.parent);
    for (const int child : place.children) ask(child);
  }

  std::unique_ptr<Wire> connect(int peer) {
    if (!store_->check({key(peer, rank_)})) return nullptr;
    auto options = Gloo::Options::create(deadline_);
    options->threads = 0;  // they run collectives
    options->devices.push_back(device_);
    const int low = std::min(rank_, peer), high = std::max(rank_, peer);
    const auto place = "edge/" + std::to_string(low) + "/" + std::to_string(high);
    return std::make_unique<GlooWire>(c10::make_intrusive<Gloo>(
        c10::make_intrusive<c10d::PrefixStore>(place, store_), rank_ == low ? 0 : 1, 2, options));
  }

 private:
  void ask(int peer) { store_->set(key(rank_, peer), std::vector<std::uint8_t>{1}); }
  static std::string key(int from, int to) {
    return "asked/" + std::to_string(from) + "/" + std::to_string(to);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_;
  std::chrono::milliseconds deadline_;
  std::shared_ptr<gloo::transport::Device> device_;
};

}  // namespace

std::shared_ptr<gloo::transport::Device> make_gloo_device() {
  // The variable that PyTorch users set to pick a network.
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  return interface != nullptr ? Gloo::createDeviceForInterface(interface)
                              : Gloo::createDefaultDevice();
}

void survive_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
    ::signal(SIGPIPE, SIG_IGN);
}

Connect connect_by_gloo(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                        std::chrono::milliseconds deadline) {
  if (size > 1) survive_broken_pipes();
  auto connector = communicate("opening the network", [&] {
    return std::make_shared<Connector>(std::move(store), rank, size, deadline);
  });
  return [connector](int peer) {
    const auto operation = "connecting with rank " + std::to_string(peer);
    return communicate(operation, [&] { return connector->connect(peer); });
  };
}

}  // namespace tessera
