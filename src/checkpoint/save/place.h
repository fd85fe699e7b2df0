// The place that a save writes to: whether ranks share it, whether it has room, what was left
// there, whether all arrived.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "comm/message.h"
#include "storage/storage.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

// Whether the ranks of a save write into the same place: before they do, rank 0 puts a small object
// there, and every other rank looks for it.

// An object that goes with this; it has a probe's name (storage/storage.h).
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
auto fields(FieldsOf<Unseeing::Rank> auto& rank) {
  return std::tie(rank.rank, rank.host, rank.probe);
}
auto fields(FieldsOf<Unseeing> auto& unseeing) {
  return std::tie(unseeing.ranks, unseeing.more);
}

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

// On rank 0: whether it sees what each of them has put there, and still its own object: a directory
// that was deleted and made again is none that is seen late.
[[nodiscard]] bool see_late(const Unseeing& unseeing, const Store& store, const std::string& own);
// Waits until all ranks see rank 0's object, for 90 seconds at most; then it throws as
// require_seen_by_all. Collective.
void await_probe(Group& group, const Store& store, const std::string& name,
                 const std::stop_token& stop);

// On rank 0: throws `incomplete` if there are any.
void require_seen_by_all(const Unseeing& unseeing, int ranks, const Store& store);

// What is in the place already.

// The version of the `.metadata` that a commit replaces; empty where the store knows no versions.
// None: there is none.
using Replaced = std::optional<std::string>;

struct Present {
  Replaced metadata;
  std::vector<ObjectInfo> objects;  // of the root
  // Whether either has told of a `.metadata`. A store may list an object of which it says that it
  // is not there, or the other way round (fault-rows O17).
  [[nodiscard]] bool has_metadata() const;
};
// Asks for both at once.
[[nodiscard]] Present present_in(const Store& store);

// Throws `already_exists` at `path` when the store holds a checkpoint that was saved together.
void require_no_metadata(const Store& store, const std::string& path);
// The same, and when it holds parts that ranks saved each for itself (save_part.h): readers would
// take the new one for them.
void require_no_checkpoint(const Present& present, const std::string& path);

// Whether what is to be saved finds room.

// Throws `out_of_space` if the store says that less than `bytes` are free. What a save replaces
// stays until the new checkpoint is there, so its room does not count (fault-rows C14).
void require_free(const Store& store, std::uint64_t bytes);

// Whether the data files that ranks have written are where rank 0 commits.

// A data file that rank 0 looks for.
struct Sought {
  std::string name;
  std::string writer;      // "rank 3 on host7"
  std::uint64_t size = 0;  // bytes
};

// What ends the looking, each by a throw.
struct Looking {
  std::stop_token stop;
  // A rank that fails takes its files away, and who deletes the directory takes all.
  std::function<void()> require_writers;
};

// Throws `incomplete` for files that the store does not show here, with who wrote them where, and
// `corrupt` for those of another size: ranks that write into different directories, or to disks of
// their own, would get a checkpoint of which a part is missing. What is not in `listed`, a listing
// of the store's root, is opened, and looked for again for 90 seconds.
void require_in_store(const std::vector<Sought>& files, const Store& store,
                      const std::vector<ObjectInfo>& listed, const Looking& looking);

// What killed saves and replaced checkpoints left in a DCP directory.

// Probes, and data files and side files that are not the present checkpoint's own_files(). Without
// a checkpoint only those with names of ours: they belong to nobody, or to a save that goes on.
[[nodiscard]] std::vector<std::string> leftovers_in(const Store& store, const Present& present);

// What reading a checkpoint throws that is another library's, or damaged.
[[nodiscard]] bool is_unreadable(ErrorCode code);

// The same leftovers; none where the checkpoint that is there cannot be read or is damaged.
[[nodiscard]] std::vector<std::string> known_leftovers(const Store& store, const Present& present);

// Removes these and unfinished files. Only while nobody writes.
void remove_leftovers(Store& store, const Present& present);

// What a save or conversion removes of them.
class Leftovers {
 public:
  // At its begin. `present`: by what it will commit. If nobody else writes, they go now and make
  // room. Else some may be a rival's, and wait.
  void find(Store& store, const Present& present, bool is_alone);
  // After the commit. Rivals that had files by then have lost, because another checkpoint is there
  // than they have planned on.
  void after_commit(Store& store) const noexcept;

 private:
  std::vector<std::string> waiting_;
};

}  // namespace tessera
