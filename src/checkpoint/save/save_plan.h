// Which item of a save lies where in which data file. Every rank computes it for itself, and rank 0
// for all: an item's length follows from what it holds, and items follow one another in their file.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/save/planned_leaf.h"
#include "checkpoint/save/proposals.h"
#include "tessera/layout.h"
#include "tessera/save_options.h"
#include "tessera/value.h"

namespace tessera {

// Bytes of an item (item_writer.h) of one chunk.
class ItemLengths {
 public:
  [[nodiscard]] std::uint64_t of(DType dtype, const Shape& sizes);

 private:
  std::map<std::pair<DType, Shape>, std::uint64_t> known_;
  std::pair<DType, Shape> last_;  // chunks of one tensor have few sizes
  std::uint64_t last_length_ = 0;
};
// The bytes of an item of a value.
[[nodiscard]] std::uint64_t item_length(const Value& value);

// The place of an item. All but offset and length is known of a compressed one before it is
// written; these are what they would be without compression.
struct ItemPlace {
  int file = 0;  // number of the rank's file
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
  std::uint64_t number = 0;  // of the item in its file
};

// The data files of each rank.
struct FileRules {
  int most = 1;              // files of a rank
  bool one_an_item = false;  // then there are as many as the rank has items
  Compression compression = Compression::none;
  int level = 0;  // of the compression
  [[nodiscard]] bool are_compressed() const { return compression != Compression::none; }
};
constexpr Compression last_of(Compression) {
  return Compression::zstd;
}
auto fields(FieldsOf<FileRules> auto& rules) {
  return std::tie(rules.most, rules.one_an_item, rules.compression, rules.level);
}
// Those that the options ask for. Throws `invalid_argument` for a number of threads or a
// level that is none.
[[nodiscard]] FileRules file_rules(const SaveOptions& options);

// Keeps a few numbers for each file; with one file an item, 8 bytes for each item.
class FilePlan {
 public:
  // The plan of ranks [first, first + ranks).
  FilePlan(int first, int ranks, FileRules rules);
  // The next item of `rank` goes into the rank's next file if each has one of its own. Else it goes
  // behind the others of the file with the fewest bytes of tensors so far; ties go to the first.
  // `bytes`: of elements, 0 of a value.
  ItemPlace place(int rank, std::uint64_t length, std::uint64_t bytes);
  // The size of the whole file, with its tail, if it is not compressed; 0 if it has no items.
  [[nodiscard]] std::uint64_t size_of(int rank, int file) const;
  [[nodiscard]] std::uint64_t items_of(int rank, int file) const;
  // The number of a rank's files, those without items too.
  [[nodiscard]] int files_of(int rank) const;

 private:
  struct File {
    std::uint64_t load = 0;  // bytes of elements, and one for each value
    std::uint64_t end = 0;
    std::uint64_t items = 0;
  };
  [[nodiscard]] std::size_t first_file_of(int rank) const;
  [[nodiscard]] std::size_t index_of(int rank) const {
    return static_cast<std::size_t>(rank - first_);
  }

  int first_;
  FileRules rules_;
  std::vector<File> all_;                        // rules_.most of each rank
  std::vector<std::vector<std::uint64_t>> own_;  // by rank and file: its item's length
};

// Who writes what, and where: the pure part of a save. No I/O, no ranks, no tensors' bytes.
//
// Every rank lays out its own data files, and rank 0 those of all, by the same rules: values first,
// by name; then the tensors that have a placement, in the order of the leaves; then those that were
// told, by name and by where their chunks begin. So nobody has to say where an item is.

// The same on all ranks.
struct PlanRules {
  int ranks = 1;
  FileRules files = {};
  ReplicaWriter replicas = ReplicaWriter::fewest_bytes;
  bool everything_told = false;  // the leaves of ranks differ
  // This rank's own function, which chooses as those of the others do; if everything is told, that
  // of rank 0 is the one that counts.
  WriterFunction writer = {};
  [[nodiscard]] WriterRules writers() const { return {replicas, writer}; }
};
constexpr ReplicaWriter last_of(ReplicaWriter) {
  return ReplicaWriter::lowest_rank;
}
// Each rank has a writer of its own.
auto fields(FieldsOf<PlanRules> auto& rules) {
  return std::tie(rules.ranks, rules.files, rules.replicas, rules.everything_told);
}

// What one rank holds of a leaf, and may have to write.
struct OwnItem {
  std::size_t leaf = 0;  // index of this rank's leaves
  HeldChunk chunk = {};  // of a tensor
  std::uint64_t key = 0;
  int holders = 1;
  bool is_written = false;
  ItemPlace place = {};  // if it is written
};

// One rank's part of a save.
struct OwnPlan {
  std::vector<OwnItem> items;                   // what it holds, in the order of each file
  std::vector<std::vector<std::size_t>> files;  // which of them are written into each data file;
                                                // a file without any is not written
};

struct OwnLeaves {
  int rank = 0;
  const std::vector<PlannedLeaf>& leaves;
  const std::vector<std::vector<HeldChunk>>& chunks;  // by leaf
  std::function<std::uint64_t(std::size_t leaf)> value_length;
};
// `choices`: what rank 0 said of things that were told and that several ranks hold.
[[nodiscard]] OwnPlan own_plan(const PlanRules& rules, const OwnLeaves& own,
                               const Choices& choices);

// Makes `plan.files` of the places of its items.
void list_files(OwnPlan& plan, int files);

// The save of all ranks, on rank 0.
class SavePlan {
 public:
  // `told`: finished. `value_length`: of a leaf of rank 0 that is a value, if not everything is
  // told.
  SavePlan(const PlanRules& rules, ToldLeaves told,
           const std::function<std::uint64_t(std::size_t leaf)>& value_length);

  [[nodiscard]] const std::vector<PlannedLeaf>& leaves() const { return told_.leaves(); }
  [[nodiscard]] const std::vector<WriterChoice>& choices() const { return choices_; }
  [[nodiscard]] const PlanRules& rules() const { return rules_; }
  [[nodiscard]] const FilePlan& files() const { return files_; }
  [[nodiscard]] std::uint64_t size_of(int rank, int file) const {
    return files_.size_of(rank, file);
  }

  // The boxes of a tensor's chunks, in the order of items().
  using VisitBox = std::function<void(const Box& box)>;
  void boxes(std::size_t leaf, const VisitBox& visit) const;
  // Items says where everything is: it goes through the leaves in their order, once. `box` is null
  // for a value.
  class Items {
   public:
    // `plan` outlives this.
    explicit Items(const SavePlan& plan);
    using Visit = std::function<void(const Box* box, int rank, const ItemPlace& place)>;
    // The items of leaf number next(), in the order of boxes().
    void leaf(const Visit& visit);
    [[nodiscard]] std::size_t next() const { return next_; }

   private:
    const SavePlan& plan_;
    PlacedWalk walk_;
    FilePlan files_;
    ItemLengths lengths_;
    std::size_t next_ = 0;
  };

 private:
  struct Told {
    int rank = 0;
    ItemPlace place;
  };
  void place_values(const std::function<std::uint64_t(std::size_t leaf)>& value_length);
  void place_told();
  void choose(const std::string& name, const Shape& offsets, int writer, std::size_t holders);

  PlanRules rules_;
  ToldLeaves told_;
  std::vector<std::vector<Told>> places_;  // by leaf: of values and told chunks
  std::vector<WriterChoice> choices_;
  FilePlan after_values_;
  FilePlan files_;  // with everything
};

}  // namespace tessera
