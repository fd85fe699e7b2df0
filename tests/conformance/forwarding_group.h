// A group that does what another one does: tests override what they count or break.
#pragma once

#include <utility>
#include <vector>

#include "tessera/comm.h"

namespace tessera::testing_support {

class ForwardingGroup : public Group {
 public:
  explicit ForwardingGroup(Group& inner) : inner_(inner) {}  // which outlives this one

  [[nodiscard]] int rank() const noexcept override { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_.size(); }
  void barrier() override { inner_.barrier(); }
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    return inner_.gather(mine, root);
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override { return inner_.all_gather(mine); }
  Bytes broadcast(const Bytes& message, int root) override {
    return inner_.broadcast(message, root);
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    return inner_.scatter(messages, root);
  }
  Bytes fold(Bytes mine, const Combine& combine) override {
    return inner_.fold(std::move(mine), combine);
  }
  Bytes spread(Bytes message) override { return inner_.spread(std::move(message)); }
  [[nodiscard]] bool carries_interrupts() const noexcept override {
    return inner_.carries_interrupts();
  }
  void interrupt() override { inner_.interrupt(); }
  [[nodiscard]] std::stop_token interrupted() override { return inner_.interrupted(); }
  void make_progress(std::uint64_t bytes_so_far) override { inner_.make_progress(bytes_so_far); }
  void require_peers() override { inner_.require_peers(); }

 protected:
  [[nodiscard]] Group& inner() noexcept { return inner_; }

 private:
  Group& inner_;
};

}  // namespace tessera::testing_support
