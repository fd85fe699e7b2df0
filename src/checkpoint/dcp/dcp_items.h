// What lies at the items of a DCP checkpoint (checkpoint-rows F-03b, P-21 to P-24).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/dcp/catalog.h"
#include "format/dcp/dcp.h"
#include "format/safetensors/safetensors.h"
#include "storage/storage.h"
#include "tessera/storage.h"
#include "tessera/value.h"

namespace tessera {

class OpenFiles;

// How an item's archive is kept. Throws `unsupported` for an unknown transform.
[[nodiscard]] Encoding encoding_of(const dcp::ItemView& item);
[[nodiscard]] dcp::ItemView view_of(const dcp::Item& item);

// Whether a chunk is in the safetensors format: its length is that of its elements alone, and a
// torch.save archive of them is always longer.
[[nodiscard]] bool is_raw_chunk(const dcp::Entry& entry, std::size_t number);

// The data files that `.metadata` names, each opened at its first read. Entries must outlive it.
class DataFiles {
 public:
  explicit DataFiles(std::shared_ptr<Store> store);

  // The place of a chunk's bytes. Throws `io` when something else than a file has its name,
  // `unsupported` for an unknown transform, and for chunks in the safetensors format `corrupt` when
  // the file's own header says something else. A file that is missing, or a cut one, is not looked
  // into.
  [[nodiscard]] ItemRange chunk(const dcp::Entry& entry, std::size_t number);
  // The place of a bytes item.
  [[nodiscard]] ItemRange item(const dcp::Entry& entry);
  // Whether the item's file is there.
  [[nodiscard]] bool is_here(const dcp::ItemView& item);
  // The names of missing files that somebody has asked for.
  [[nodiscard]] std::vector<std::string> missing() const;
  // The names of files of which nothing was asked for, but that was passed over.
  [[nodiscard]] std::vector<std::string> idle() const;
  // Whether a file has ended before an item that was asked for.
  [[nodiscard]] bool is_cut() const { return cut_.has_value(); }
  // Throws `incomplete` for files that end before an item of theirs does, naming each.
  void require_long_enough(const dcp::Metadata& metadata);
  // Throws `corrupt` when two of the items that were asked for lie on the same bytes: every item is
  // an archive of its own. Those in the safetensors format share one file, whose header is checked.
  void require_apart();
  // Notes where an item ends that nobody reads.
  void pass_over(const dcp::ItemView& item);
  // The same for all items of an entry that the checkpoint is opened without.
  void leave_out(const dcp::Entry& entry);
  // The bytes of a file that was asked for, by its number.
  [[nodiscard]] std::shared_ptr<const ByteSource> source(std::uint32_t number) const {
    return numbered_[number]->source;
  }
  // The files that were asked for, by number, without their digests.
  [[nodiscard]] std::vector<CatalogFile> used() const;
  // Files that go on after their last item, by more than the tail that we write.
  [[nodiscard]] std::vector<std::string> warnings() const;

 private:
  // The header of the safetensors file that begins at an offset of a data file, and its end.
  struct Body {
    safetensors::Header header;
    std::map<std::string, Shape> offsets;  // DCP_SHARDING_INFO's, by name
  };
  // The bytes [begin, end) of a data file are an item's.
  struct Extent {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    const std::string* key = nullptr;  // the entry's name
  };
  struct File {
    ObjectInfo object = {};  // as listed, or what is needed of a missing one
    bool is_missing = false;
    bool is_wanted = false;   // somebody asked for what lies there, or for a missing one
    std::uint64_t end = 0;    // of the last item
    std::uint64_t items = 0;  // that were asked for or passed over
    std::uint32_t number = 0;
    std::vector<Extent> extents;
    std::shared_ptr<const ByteSource> source;  // null: nobody asked for it
  };
  using Files = std::map<std::string, File, std::less<>>;  // by name
  // The first item that a file ends before.
  struct Cut {
    const std::string* key = nullptr;
    std::uint64_t offset = 0;
    std::string path = {};  // of the file
  };

  Files::iterator find(std::string_view path);
  // `apart`: nothing else lies on the item's bytes.
  File& file(const dcp::ItemView& item, const std::string& key, bool apart);
  const Body& body(const dcp::ItemView& item, const std::shared_ptr<const ByteSource>& source);
  // What a body has of the chunk, which `.metadata` must say too.
  static const safetensors::Entry& entry_of(const Body& body, const dcp::Entry& entry,
                                            std::size_t number, const ByteSource& source);
  // Throws when something else than a file has the name that the store does not list.
  void require_nothing_there(std::string_view path) const;

  std::shared_ptr<Store> store_;
  std::shared_ptr<OpenFiles> open_;
  NearObjects near_;
  Files files_;           // that .metadata names, as far as somebody has asked for them
  Files::iterator last_;  // that was found last, or the end
  std::vector<File*> numbered_;
  std::map<std::pair<std::string, std::uint64_t>, Body> bodies_;
  std::optional<Cut> cut_;
};

// Bytes of a value that is decompressed; more are `limit`. Its tensors' bytes stay in memory.
inline constexpr std::uint64_t kValueCap = 1ULL << 30;
// The value of a bytes item in its data file.
[[nodiscard]] Value read_value(std::shared_ptr<const ByteSource> file, const ItemRange& place);

}  // namespace tessera
