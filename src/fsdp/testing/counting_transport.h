// A transport and a group that count what passes through them, for tests of schedules.
#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "torch/mesh_state.h"
#include "torch/transport.h"

namespace tessera::testing {

struct Counts {
  int gathers = 0;
  int gathers_in_place = 0;  // of them: nobody copies what came
  int exchanges = 0;
  int reductions = 0;
  int sums = 0;
  int messages = 0;               // of the group
  std::size_t message_bytes = 0;  // that this rank gave to all_gather
  // What travelled, of every gather and reduction.
  std::vector<at::ScalarType> gathered_in = {}, reduced_in = {};
  // Numbers of calls alone.
  friend bool operator==(const Counts& a, const Counts& b) {
    return a.gathers == b.gathers && a.exchanges == b.exchanges && a.reductions == b.reductions &&
           a.sums == b.sums && a.messages == b.messages;
  }
};

// For messages of tests.
inline std::ostream& operator<<(std::ostream& out, const Counts& counts) {
  return out << counts.gathers << " gathers, " << counts.exchanges << " exchanges, "
             << counts.reductions << " reductions, " << counts.sums << " sums, " << counts.messages
             << " messages";
}

class CountingChannel final : public Channel {
 public:
  CountingChannel(std::unique_ptr<Channel> inner, Counts& counts)
      : inner_(std::move(inner)), counts_(counts) {}
  const at::Tensor& shard() const override { return inner_->shard(); }
  void set_label(std::string label) override { inner_->set_label(std::move(label)); }
  void start_gather(Take take, bool may_change) override {
    ++counts_.gathers;
    inner_->start_gather(
        [&counts = counts_, take = std::move(take)](int rank, std::int64_t begin,
                                                    const auto& part) {
          if (rank == 0 && begin == 0) counts.gathered_in.push_back(part.scalar_type());
          take(rank, begin, part);
        },
        may_change);
  }
  bool start_gather_into(const Memory& memory, bool may_change) override {
    if (!inner_->start_gather_into(memory, may_change)) return false;
    ++counts_.gathers;
    ++counts_.gathers_in_place;
    counts_.gathered_in.push_back(shard().scalar_type());
    return true;
  }
  void finish_gather() override { inner_->finish_gather(); }
  at::Tensor exchange(const at::Tensor& mine) override {
    ++counts_.exchanges;
    return inner_->exchange(mine);
  }
  void start_reduce(const SliceSum& sum, Fill fill) override {
    ++counts_.reductions;
    counts_.reduced_in.push_back(sum.dtype);
    inner_->start_reduce(sum, std::move(fill));
  }
  at::Tensor finish_reduce() override { return inner_->finish_reduce(); }

 private:
  std::unique_ptr<Channel> inner_;
  Counts& counts_;
};

class CountingTransport final : public Transport {
 public:
  CountingTransport(std::unique_ptr<Transport> inner, Counts& counts)
      : inner_(std::move(inner)), counts_(counts) {}
  std::unique_ptr<Channel> open(std::int64_t elements, const at::TensorOptions& shard,
                                const at::TensorOptions& travelling) override {
    return std::make_unique<CountingChannel>(inner_->open(elements, shard, travelling), counts_);
  }
  std::unique_ptr<PendingSum> start_sum(const at::Tensor& values) override {
    ++counts_.sums;
    return inner_->start_sum(values);
  }
  std::unique_ptr<PendingSum> start_average(const std::vector<at::Tensor>& parts,
                                            const at::Tensor& flags) override {
    auto sum = inner_->start_average(parts, flags);
    if (sum) ++counts_.sums;
    return sum;
  }

 private:
  std::unique_ptr<Transport> inner_;
  Counts& counts_;
};

class CountingGroup final : public Group {
 public:
  CountingGroup(std::unique_ptr<Group> inner, Counts& counts)
      : inner_(std::move(inner)), counts_(counts) {}
  int rank() const noexcept override { return inner_->rank(); }
  int size() const noexcept override { return inner_->size(); }
  void barrier() override { count().barrier(); }
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    return count().gather(mine, root);
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override {
    counts_.message_bytes += mine.size();
    return count().all_gather(mine);
  }
  Bytes broadcast(const Bytes& message, int root) override {
    return count().broadcast(message, root);
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    return count().scatter(messages, root);
  }

 private:
  Group& count() {
    ++counts_.messages;
    return *inner_;
  }
  std::unique_ptr<Group> inner_;
  Counts& counts_;
};

// From here on `counts`, which outlives the mesh, sees all that passes through `mesh`.
inline void count(const Mesh& mesh, Counts& counts) {
  auto& state = *detail::state_of(mesh);
  state.transport = std::make_unique<CountingTransport>(std::move(state.transport), counts);
  state.group = std::make_unique<CountingGroup>(std::move(state.group), counts);
}

}  // namespace tessera::testing
