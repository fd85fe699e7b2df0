// Whether the ranks of a save write into the same place: before they do, rank 0 puts a small object
// there, and every other rank looks for it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/message.h"
#include "tessera/storage.h"

namespace tessera {

// "tessera-ATTEMPT.probe"
[[nodiscard]] std::string probe_name(const std::string& attempt);
[[nodiscard]] bool is_probe_name(std::string_view name);  // of any save

// Rank 0's object, which goes with this.
class Probe {
 public:
  Probe(std::shared_ptr<Store> store, std::string name);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

 private:
  std::shared_ptr<Store> store_;
  std::string name_;
};

// On another rank: whether the store here has the object.
[[nodiscard]] bool shows_probe(const Store& store, const std::string& name);
// The same, or gets it within one and a half seconds.
[[nodiscard]] bool sees_probe(Store& store, const std::string& name);

// The ranks that do not see it: the lowest sixteen, and how many more.
struct Unseeing {
  struct Rank {
    int rank = 0;
    std::string host;
  };
  std::vector<Rank> ranks;
  std::uint64_t more = 0;

  void add(const Unseeing& higher);
};
void write_unseeing(MessageWriter& message, const Unseeing& unseeing);
[[nodiscard]] Unseeing read_unseeing(MessageReader& message);

// On rank 0: throws `incomplete` if there are any.
void require_seen_by_all(const Unseeing& unseeing, int ranks, const Store& store);

}  // namespace tessera
