#include "torch/torch_group.h"

#include <signal.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/types.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/tree_links.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"
#include "torch/c10_error.h"
#include "torch/compat.h"

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

namespace {

class TorchGroup final : public Group {
  // After one failure the ranks no longer agree on what comes next: every later call throws at
  // once.
  template <typename Work>
  auto collective(const char* operation, const Work& work) {
    if (broken_by_) {
      throw Error(ErrorCode::peer_failed,
                  "the group was broken by an earlier failure: " + *broken_by_)
          .while_doing(operation);
    }
    try {
      return communicate(operation, [&] {
        require_same_call(names_.get(), operation);
        return work();
      });
    } catch (const std::exception& error) {
      broken_by_ = error.what();
      throw;
    } catch (...) {
      broken_by_ = "no exception of the standard library";
      throw;
    }
  }

 public:
  TorchGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<CallNames> names)
      : group_(std::move(group)), names_(std::move(names)) {}

  int rank() const noexcept override { return group_->getRank(); }
  int size() const noexcept override { return group_->getSize(); }

  void barrier() override {
    const Purpose purpose("a barrier");
    all_gather_sizes(0);
  }

  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    const Purpose purpose("a message to rank " + std::to_string(root));
    const auto sizes = all_gather_sizes(static_cast<std::int64_t>(mine.size()));
    const auto widest = *std::max_element(sizes.begin(), sizes.end());
    if (widest == 0) return std::vector<Bytes>(rank() == root ? size() : 0);
    return collective("gather of messages", [&] {
      std::vector<at::Tensor> in{tensor_of(mine, widest)};
      std::vector<std::vector<at::Tensor>> out;
      if (rank() == root) out.push_back(empty_tensors(size(), widest));
      c10d::GatherOptions options;
      options.rootRank = root;
      group_->gather(out, in, options)->wait();
      std::vector<Bytes> messages;
      for (int r = 0; rank() == root && r < size(); ++r)
        messages.push_back(bytes_of(out[0][r], sizes[r]));
      return messages;
    });
  }

  std::vector<Bytes> all_gather(const Bytes& mine) override {
    const Purpose purpose("a message to all ranks");
    const auto sizes = all_gather_sizes(static_cast<std::int64_t>(mine.size()));
    const auto widest = *std::max_element(sizes.begin(), sizes.end());
    if (widest == 0) return std::vector<Bytes>(size());
    return collective("all-gather of messages", [&] {
      auto in = tensor_of(mine, widest);
      auto out = torch::empty({size() * widest}, torch::kUInt8);
      compat::all_gather(*group_, out, in)->wait();
      std::vector<Bytes> messages;
      for (int r = 0; r < size(); ++r)
        messages.push_back(bytes_of(out.narrow(0, r * widest, widest), sizes[r]));
      return messages;
    });
  }

  Bytes broadcast(const Bytes& message, int root) override {
    const Purpose purpose("a message from rank " + std::to_string(root));
    return collective("broadcast of a message", [&] {
      c10d::BroadcastOptions options;
      options.rootRank = root;
      std::vector<at::Tensor> length{torch::tensor({static_cast<std::int64_t>(message.size())})};
      group_->broadcast(length, options)->wait();
      const auto count = length[0].item<std::int64_t>();
      if (count == 0) return Bytes();
      std::vector<at::Tensor> data{rank() == root ? tensor_of(message, count)
                                                  : torch::empty({count}, torch::kUInt8)};
      group_->broadcast(data, options)->wait();
      return bytes_of(data[0], count);
    });
  }

  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    if (rank() == root && messages.size() != static_cast<std::size_t>(size())) {
      throw Error(ErrorCode::invalid_argument, "scatter of " + std::to_string(messages.size()) +
                                                   " messages over " + std::to_string(size()) +
                                                   " ranks");
    }
    const Purpose purpose("messages to each rank");
    const auto table = broadcast(rank() == root ? size_table(messages) : Bytes(), root);
    std::vector<std::int64_t> sizes(size());
    std::memcpy(sizes.data(), table.data(), table.size());
    const auto widest = *std::max_element(sizes.begin(), sizes.end());
    if (widest == 0) return {};
    return collective("scatter of messages", [&] {
      std::vector<at::Tensor> out = empty_tensors(1, widest);
      std::vector<std::vector<at::Tensor>> in;
      if (rank() == root) in.push_back(tensors_of(messages, widest));
      c10d::ScatterOptions options;
      options.rootRank = root;
      group_->scatter(out, in, options)->wait();
      return bytes_of(out[0], sizes[rank()]);
    });
  }

 private:
  // Messages differ in length but collectives do not: all are padded to the longest.
  static at::Tensor tensor_of(const Bytes& message, std::int64_t width) {
    auto tensor = torch::zeros({width}, torch::kUInt8);
    if (!message.empty())
      std::memcpy(tensor.data_ptr<std::uint8_t>(), message.data(), message.size());
    return tensor;
  }
  static std::vector<at::Tensor> tensors_of(const std::vector<Bytes>& messages,
                                            std::int64_t width) {
    std::vector<at::Tensor> tensors;
    for (const auto& message : messages) tensors.push_back(tensor_of(message, width));
    return tensors;
  }
  // The messages' sizes as a message.
  static Bytes size_table(const std::vector<Bytes>& messages) {
    Bytes table(messages.size() * sizeof(std::int64_t));
    for (std::size_t r = 0; r < messages.size(); ++r) {
      const auto count = static_cast<std::int64_t>(messages[r].size());
      std::memcpy(table.data() + r * sizeof count, &count, sizeof count);
    }
    return table;
  }
  static std::vector<at::Tensor> empty_tensors(int count, std::int64_t width) {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < count; ++i) tensors.push_back(torch::empty({width}, torch::kUInt8));
    return tensors;
  }
  static Bytes bytes_of(const at::Tensor& tensor, std::int64_t count) {
    const auto* begin = reinterpret_cast<const std::byte*>(tensor.const_data_ptr<std::uint8_t>());
    return Bytes(begin, begin + count);
  }

  std::vector<std::int64_t> all_gather_sizes(std::int64_t mine) {
    return collective("all-gather of message sizes", [&] {
      auto in = torch::tensor({mine});
      auto out = torch::empty({size()}, torch::kInt64);
      compat::all_gather(*group_, out, in)->wait();
      const auto* begin = out.const_data_ptr<std::int64_t>();
      return std::vector<std::int64_t>(begin, begin + size());
    });
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<CallNames> names_;
  std::optional<std::string> broken_by_;  // what failed first; none: nothing has
};

}  // namespace

std::unique_ptr<Group> make_torch_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                        std::shared_ptr<CallNames> names) {
  return std::make_unique<TorchGroup>(std::move(group), std::move(names));
}

}  // namespace tessera
