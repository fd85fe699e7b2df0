// The checkpoints of a run: their names, what marks a whole one, which ones the run has left,
// whether one is sound.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/sharded/sharded.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"
#include "tessera/storage.h"

namespace tessera {

// The names in a run's directory.

// A directory in a run that has to do with a step.
struct StepDirectory {
  enum class Role : std::uint8_t {
    current,   // NAME
    replaced,  // NAME.old-<id>: one that was being replaced
    attempt,   // NAME-tmp-<id>: one that was being written
  };
  std::int64_t step = 0;
  bool unsharded = false;
  Role role = Role::current;
  std::string directory;  // its name
};

// All of them, the newest first, sharded before unsharded, the current one of a name before others.
[[nodiscard]] std::vector<StepDirectory> step_directories(const Location& run);
// Those that hold a checkpoint or should: the current ones, and where that is missing and a single
// one was replaced, that one.
[[nodiscard]] std::vector<StepDirectory> standing(std::vector<StepDirectory> directories);

// Those that have their marker. In a store these are many small requests, made at once.
[[nodiscard]] std::vector<StepDirectory> marked(const Location& run,
                                                std::vector<StepDirectory> directories);

// What says that a directory holds a whole checkpoint, and the order in which one comes and goes.

// The object whose presence says that the checkpoint in `store` is whole: `.metadata` of a DCP
// checkpoint, `config.yaml` of an OLMo kind. Empty: there is none.
[[nodiscard]] std::string marker_in(const Store& store);

// A digest of it, which differs from save to save; 0: there is none.
[[nodiscard]] std::uint64_t marker_digest(const Store& store);

// Throws `already_exists` if there is one.
void require_no_marker(const Store& store);

// Whether it says that a checkpoint is whole, or in `olmo_torch_new` that its DCP part is.
[[nodiscard]] bool is_marker(std::string_view name);
// Whether a reader begins with it where there is no marker: it comes after all data.
[[nodiscard]] bool is_read_first(std::string_view name);
// Sorts the objects of a checkpoint so that it may come in this order, and go in the opposite one:
// markers last, and before them what a reader begins with. So at no moment a reader takes a part of
// a checkpoint for all of it, and one who opens it without asking for a marker finds nothing to
// begin with.
void sort_markers_last(std::vector<ObjectInfo>& objects);

// Removes all objects of the store in that order. `unmarked` is called after the markers.
void remove_markers_first(Store& store, const std::function<void()>& unmarked = {});

// Which checkpoints of a run are of a line that it has left, because it went on from an earlier
// step (fault-rows C11).

// The digests of markers when their checkpoints were left, by the names of the directories. One
// that is saved again with another marker is not left any more.
//
// In the run it is the object `tessera-left.txt`, with a line "NAME DIGEST" for each; absent where
// there are none.
using LeftLine = std::map<std::string, std::uint64_t>;
inline constexpr std::string_view kLeftRecord = "tessera-left.txt";

// Throws `corrupt` for a record that write_left has not written.
[[nodiscard]] LeftLine read_left(const Store& run);
void write_left(Store& run, const LeftLine& left);

// Whether the checkpoint in that directory of the run is one of them.
[[nodiscard]] bool is_left(const LeftLine& left, const Location& run, const std::string& directory);

// Whether a checkpoint of a run is whole.

// What is wrong with the checkpoint, as RunCheck says; none: nothing. Throws what says nothing
// about it, such as a store that does not answer.
[[nodiscard]] std::optional<Error> fault_of(const Location& where, const RunCheck& check);
// The same of the files that one rank has of it, where those of others are on other disks: an
// olmo-local or olmo-legacy checkpoint of so many ranks.
[[nodiscard]] std::optional<Error> own_fault_of(const Location& where, const RunCheck& check,
                                                const sharded::Rank& rank);

}  // namespace tessera
