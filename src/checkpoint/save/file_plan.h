// Which item of a save lies where in which data file. Every rank computes it for itself, and rank 0
// for all: an item's length follows from what it holds, and items follow one another in their file.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "tessera/dtype.h"
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
// Of an item of a value.
[[nodiscard]] std::uint64_t item_length(const Value& value);

// Of compressed items all but offset and length is known before they are written; these are what
// they would be without compression.
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
// Those that the options ask for. Throws `invalid_argument` for a number of threads or a
// level that is none.
[[nodiscard]] FileRules file_rules(const SaveOptions& options);

// Keeps a few numbers for each file; with one file an item, 8 bytes for each item.
class FilePlan {
 public:
  // Of ranks [first, first + ranks).
  FilePlan(int first, int ranks, FileRules rules);
  // The next item of `rank` goes into the rank's next file if each has one of its own. Else it goes
  // behind the others of the file with the fewest bytes of tensors so far; ties go to the first.
  // `bytes`: of elements, 0 of a value.
  ItemPlace place(int rank, std::uint64_t length, std::uint64_t bytes);
  // Of the whole file, with its tail, if it is not compressed; 0 if it has no items.
  [[nodiscard]] std::uint64_t size_of(int rank, int file) const;
  [[nodiscard]] std::uint64_t items_of(int rank, int file) const;
  // Of a rank, those without items too.
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

}  // namespace tessera
