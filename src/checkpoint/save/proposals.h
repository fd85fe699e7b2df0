// What ranks tell of the leaves whose parts not every rank can compute, and what they are told.
//
// If all ranks have the same leaves, they tell the chunks that they hold of those without a
// placement. If their leaves differ, they tell everything.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/save/planned_leaf.h"

namespace tessera {

// Names a chunk, or a value (without offsets), on all ranks.
[[nodiscard]] std::uint64_t key_of(const std::string& name, const Shape& offsets);

// One value of a rank.
struct ToldValue {
  std::uint64_t digest = 0;
  std::uint64_t length = 0;  // of its item
};

// What one rank tells. `leaves` are its own, `tensors[i]` what it holds of leaf i if that is a
// tensor that has to be told, `values[i]` of a value.
struct Proposal {
  int rank = 0;
  bool everything = false;
  std::span<const PlannedLeaf> leaves;
  std::span<const std::vector<HeldChunk>> tensors;
  std::span<const ToldValue> values;  // used if everything is told
};
// Proposals combine by standing side by side.
[[nodiscard]] Bytes encode_proposal(const Proposal& proposal);

// Who writes what several ranks hold.
struct WriterChoice {
  std::uint64_t key = 0;
  int writer = 0;
  int holders = 0;
};
auto fields(FieldsOf<WriterChoice> auto& choice) {
  return std::tie(choice.key, choice.writer, choice.holders);
}
using Choices = std::unordered_map<std::uint64_t, WriterChoice>;
// The choices in a message of a vector of them.
[[nodiscard]] Choices choices_of(const Bytes& told);

// What all ranks told, on rank 0.
class ToldLeaves {
 public:
  // `leaves`: of rank 0, if not everything is told.
  explicit ToldLeaves(std::vector<PlannedLeaf> leaves, bool everything);
  // Adds proposals that stand side by side in rank order.
  void add(const Bytes& proposals);
  // That everything is told, and every leaf by every rank: finish() tells of those that some rank
  // lacks (checkpoint-rows P-06).
  void require_same_keys();
  // Proves that ranks agree on what a leaf is and that chunks cover every tensor once
  // (checkpoint-rows P-14). Throws one error with all that does not fit: `mismatch`, `conflict`,
  // `incomplete` or `corrupt`.
  void finish();

  // In order of first appearance by rank.
  [[nodiscard]] const std::vector<PlannedLeaf>& leaves() const { return leaves_; }
  [[nodiscard]] bool is_told(std::size_t leaf) const;
  // The chunks of a leaf, in row-major order of where they begin, with the ranks that hold each,
  // ascending. What `visit` is given lives for the call.
  using VisitChunk = std::function<void(const Box& box, std::span<const int> holders)>;
  void chunks(std::size_t leaf, const VisitChunk& visit) const;
  // A rank that has a value, and what it has of it, if everything was told.
  struct Holder {
    int rank = 0;
    ToldValue value;
  };
  [[nodiscard]] const std::vector<Holder>& holders_of_value(std::size_t leaf) const {
    return values_[leaf];
  }

 private:
  // Columns, because there may be millions of chunks.
  struct Column {
    std::vector<std::int64_t> boxes;  // of each row: offsets and sizes of a chunk
    std::vector<int> ranks;           // of each row: who holds it
  };
  // The ranks that told a leaf.
  struct Tellers {
    int count = 0;
    int lacking = -1;  // the first rank that did not, while a later one did
    void add(int rank) {
      if (rank != count && lacking < 0) lacking = count;
      ++count;
    }
  };
  // A leaf that a rank tells of; not `fits`: what it says of it is passed over.
  struct Target {
    std::size_t leaf = 0;
    bool is_tensor = true;
    std::size_t dimensions = 0;
    bool fits = true;
  };
  void add_proposal(MessageReader& message);
  Target target_of(MessageReader& message, int rank);
  void count_kept(const PlannedLeaf& kept, int rank);
  void read_chunks(MessageReader& message, const Target& target, int rank);
  void read_value(MessageReader& message, const Target& target, int rank);
  void sort(std::size_t leaf);
  void require_covered(std::size_t leaf) const;
  using Numbers = std::span<const std::int64_t>;
  [[nodiscard]] Numbers row(std::size_t leaf, std::size_t index) const;
  [[nodiscard]] bool is_sorted(std::size_t leaf) const;

  std::vector<PlannedLeaf> leaves_;
  bool everything_;
  std::vector<Column> columns_;              // by leaf
  std::vector<std::vector<Holder>> values_;  // by leaf
  std::vector<Tellers> tellers_;             // by leaf, if everything is told
  int ranks_ = 0;                            // that have told
  std::unordered_map<std::string, std::size_t> by_name_;
  KeyErrors errors_;
};

}  // namespace tessera
