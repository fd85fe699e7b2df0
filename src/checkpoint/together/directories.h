// Into which directories the ranks of a save write, and who publishes each.
//
// The sibling of rank 0's directory is the only one if all ranks see what rank 0 has put into it.
// Nodes that have disks of their own each have a sibling on their disk, made and published by one
// of their ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "checkpoint/save/place.h"
#include "comm/message.h"
#include "tessera/comm.h"
#include "tessera/storage.h"

namespace tessera {

class Directories {
 public:
  // `group` outlives this. Throws `invalid_argument` for a place that is no directory.
  Directories(const Location& where, bool overwrite, Group& group);
  Directories(const Directories&) = delete;
  Directories& operator=(const Directories&) = delete;
  ~Directories();

  // Rank 0 makes the sibling of its directory, with a probe in it. Collective.
  void begin();
  // Throws `mismatch` where rank 0 saves under another name: nobody would publish what this rank
  // waits for (fault-rows R06).
  void require_same_name() const;
  // Throws `out_of_space` where the store says that it has not as many bytes (fault-rows C14).
  void require_room(std::uint64_t bytes) const;
  // Adds this rank if it does not see that. Where the store may show it late, it takes a second and
  // a half to say so.
  void look_for_first(Unseeing& unseeing);
  // On rank 0: whether those ranks see late what is there.
  [[nodiscard]] bool is_first_seen_late(const Unseeing& unseeing) const;
  // Then this waits until they see it (save/place.h). Collective.
  void await_first(const std::stop_token& stop);

  // One of these follows, with what all ranks have said. Ranks that do not see the first sibling
  //   - are none;
  void share();
  //   - write nothing themselves;
  void keep_first();
  //   - write into another one, on the disk that they see: of each host the lowest rank makes one,
  //     until every rank sees one. Collective.
  void find_others();

  // Whether each node has one.
  [[nodiscard]] bool are_several() const { return !publishers_.empty(); }
  // Whether this rank writes into the one in which the files of `maker` are.
  [[nodiscard]] bool reaches(int maker) const;
  // The store into which this rank writes; null: it writes nothing.
  [[nodiscard]] const std::shared_ptr<Store>& working() const { return working_; }
  [[nodiscard]] int publisher() const { return publisher_; }  // of the sibling in which it writes
  [[nodiscard]] bool publishes() const { return publisher_ == group_.rank(); }

  // Publishers call this before any publishes. Throws `conflict` where this rank sees another's
  // sibling after all: both would publish one directory.
  void require_apart() const;
  // Takes the probe away, if this rank has one.
  void drop_probe() { probe_.reset(); }
  // Publishers give the sibling the directory's name.
  void publish();
  [[nodiscard]] bool is_published() const { return is_published_; }
  // A network file system may show the new directory late to others than publishers; opening its
  // `file` asks the server.
  void wait_until_visible(const std::string& file, const std::stop_token& stop) const;

  [[nodiscard]] const std::string& save_id() const { return save_id_; }
  [[nodiscard]] std::string path() const { return parent_->name() + "/" + name_; }

 private:
  struct Sibling {
    int publisher = 0;
    std::string working;  // in the store that the directory is in
    std::string probe;    // in the sibling
  };
  friend auto fields(FieldsOf<Sibling> auto& sibling) {
    return std::tie(sibling.publisher, sibling.working, sibling.probe);
  }

  void require_replaceable() const;
  [[nodiscard]] Sibling make();
  void enter(const Sibling& sibling);
  [[nodiscard]] bool shows(const Sibling& sibling) const;
  [[nodiscard]] bool enter_lowest_seen();
  void look_for_one();
  [[nodiscard]] std::vector<int> elect();
  void make_more(const std::vector<int>& makers);

  Group& group_;
  std::shared_ptr<Store> parent_;  // the store that the directory is in
  std::string name_;               // there
  const bool overwrite_;
  std::string save_id_;
  std::unique_ptr<NewDirectory> directory_;  // of a publisher
  std::optional<Probe> probe_;               // of a publisher, while others look for it
  std::vector<Sibling> siblings_;            // that ranks have made
  std::shared_ptr<Store> working_;
  int publisher_ = 0;            // -1: none yet
  std::vector<int> publishers_;  // by rank; empty: all write into rank 0's
  ProbeLook look_;               // for rank 0's
  bool is_published_ = false;
};

}  // namespace tessera
