// Whether the ranks of a save write into the same place: before they do, rank 0 puts a small object
// there, and every other rank looks for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/fork.h"
#include "comm/message.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// "tessera-ATTEMPT.probe"
[[nodiscard]] std::string probe_name(const std::string& attempt);
[[nodiscard]] bool is_probe_name(std::string_view name);  // of any save

// An object that goes with this.
class Probe {
 public:
  Probe(std::shared_ptr<Store> store, std::string name);
  ~Probe();
  Probe(const Probe&) = delete;
  Probe& operator=(const Probe&) = delete;

  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  std::shared_ptr<Store> store_;
  MadeHere made_here_;
  std::string name_;
};

// On another rank: whether the store here has the object.
[[nodiscard]] bool shows_probe(const Store& store, const std::string& name);
// The ranks that do not see it: the lowest sixteen, and how many more.
struct Unseeing {
  struct Rank {
    int rank = 0;
    std::string host;
    std::string probe = {};  // what it has put there itself; empty: it could not
  };
  std::vector<Rank> ranks;
  std::uint64_t more = 0;

  void add(const Unseeing& higher);
};

// What a rank sees of rank 0's object. If that is nothing, it puts one of its own there. If rank 0
// sees that, both look at one place, and this rank sees late what is in it (fault-rows F24).
class ProbeLook {
 public:
  // Takes up to one and a half seconds where the store may show late what others make.
  void look(const std::shared_ptr<Store>& store, const std::string& name);
  [[nodiscard]] bool sees() const { return sees_; }
  // Adds this rank if it does not.
  void tell(Unseeing& unseeing, int rank) const;
  void drop_own() { own_.reset(); }

 private:
  bool sees_ = true;
  std::optional<Probe> own_;
};

void write_unseeing(MessageWriter& message, const Unseeing& unseeing);
[[nodiscard]] Unseeing read_unseeing(MessageReader& message);

// On rank 0: whether it sees what each of them has put there, and still its own object: a directory
// that was deleted and made again is none that is seen late.
[[nodiscard]] bool see_late(const Unseeing& unseeing, const Store& store, const std::string& own);
// Waits until all ranks see rank 0's object, for 90 seconds at most; then it throws as
// require_seen_by_all. Collective.
void await_probe(Group& group, const Store& store, const std::string& name,
                 const std::stop_token& stop);

// On rank 0: throws `incomplete` if there are any.
void require_seen_by_all(const Unseeing& unseeing, int ranks, const Store& store);

}  // namespace tessera
