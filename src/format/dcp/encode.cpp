// Writes `.metadata` (checkpoint-rows F-03): the classes that PyTorch's pickler writes, chunk after
// chunk (docs/formats/dcp.md).
#include <algorithm>
#include <array>
#include <unordered_set>
#include <variant>

#include "base/numbers.h"
#include "base/text.h"
#include "format/dcp/assemble.h"
#include "format/dcp/dcp.h"
#include "format/dcp/pickle_stream.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::dcp {
namespace {

using Op = pickle::Op;
using Numbers = MetadataSource::Numbers;

// What the preamble puts into the memo, in this order; the names of the entries follow.
enum class Memo : std::uint8_t {
  metadata,
  tensor,
  bytes,
  chunk,
  properties,
  index,
  storage_meta,
  memory_format,
  storage_info,
  size,
  layout,
  properties_key,
  size_key,
  chunks_key,
  offsets_key,
  sizes_key,
  name_key,
  index_key,
  offset_key,
  path_key,
  length_key,
  first_name,
};
constexpr std::size_t entry_of(Memo memo) {
  return static_cast<std::size_t>(memo);
}

struct Global {
  const char* module;
  const char* name;
};
constexpr std::array<Global, entry_of(Memo::properties_key)> kGlobals{{
    {kMetadataModule, "Metadata"},
    {kMetadataModule, "TensorStorageMetadata"},
    {kMetadataModule, "BytesStorageMetadata"},
    {kMetadataModule, "ChunkStorageMetadata"},
    {kMetadataModule, "TensorProperties"},
    {kMetadataModule, "MetadataIndex"},
    {kMetadataModule, "StorageMeta"},
    {kMetadataModule, "_MEM_FORMAT_ENCODING"},
    {kFilesystemModule, "_StorageInfo"},
    {"torch", "Size"},
    {"torch.serialization", "_get_layout"},
}};
constexpr std::array<const char*, entry_of(Memo::first_name) - entry_of(Memo::properties_key)>
    kKeys{"properties", "size",  "chunks", "offsets",       "sizes",
          "fqn",        "index", "offset", "relative_path", "length"};

// The members of a list or dict, in batches: whoever reads them has one batch on the stack.
class Batches {
 public:
  Batches(PickleStream& out, Op end) : out_(out), end_(end) {}

  // Before each member.
  void next() {
    if (count_ % kBatch == 0) {
      close();
      out_.op(Op::mark);
    }
    ++count_;
    out_.boundary();
  }
  // Behind the last one.
  void close() {
    if (count_ != 0) out_.op(end_);
  }
  [[nodiscard]] std::size_t count() const { return count_; }

 private:
  static constexpr std::size_t kBatch = 1000;  // as in CPython
  PickleStream& out_;
  Op end_;
  std::size_t count_ = 0;
};

class Encoder {
 public:
  Encoder(const MetadataSource& source, const PickleStream::Write& write)
      : source_(source), out_(write), chunk_counts_(source.entry_count()) {}

  void run() {
    require_different_names();
    write_preamble();
    begin_instance(Memo::metadata);
    write_part("state_dict_metadata", [this](Batches& batches) { write_entries(batches); });
    if (source_.origin().has_planner_data) {
      write_part("planner_data", [this](Batches& batches) { write_paths(batches); });
    } else {
      out_.text("planner_data");
      out_.op(Op::none);
    }
    write_part("storage_data", [this](Batches& batches) { write_items(batches); });
    write_origin();
    end_instance();
    out_.finish();
  }

 private:
  void require_different_names() const {
    std::unordered_set<std::string_view> names;
    for (std::size_t i = 0; i < source_.entry_count(); ++i) {
      const std::string& name = source_.head(i).name;
      if (names.insert(name).second) continue;
      throw Error(ErrorCode::conflict, "two entries have this name").at_key(printable(name));
    }
  }

  // What is used again and again goes into the memo, and off the stack. No results of calls: a call
  // whose result is dropped looks like one that is made for its effect.
  void write_preamble() {
    for (const auto& [module, name] : kGlobals) {
      write_global(module, name);
      keep();
    }
    for (const char* key : kKeys) {
      out_.text(key);
      keep();
    }
  }

  void keep() {
    out_.memoize();
    out_.op(Op::pop);
  }

  void write_global(const char* module, std::string_view name) {
    out_.text(module);
    out_.text(name);
    out_.op(Op::stack_global);
  }

  // Calls what lies below the one argument.
  void end_call() {
    out_.op(Op::tuple1);
    out_.op(Op::reduce);
  }

  // cls.__new__(cls), and the dict of its attributes up to end_instance.
  void begin_instance(Memo cls) {
    write_empty(cls);
    out_.op(Op::empty_dict);
    out_.op(Op::mark);
  }
  void end_instance() {
    out_.op(Op::setitems);
    out_.op(Op::build);
  }
  void write_empty(Memo cls) {
    recall(cls);
    out_.op(Op::empty_tuple);
    out_.op(Op::newobj);
  }

  // A dict of the whole.
  template <class Work>
  void write_part(const char* name, const Work& write_members) {
    out_.text(name);
    out_.op(Op::empty_dict);
    Batches batches(out_, Op::setitems);
    write_members(batches);
    batches.close();
  }

  void recall(Memo memo) { out_.recall(static_cast<std::uint32_t>(memo)); }
  void recall_name(std::size_t entry) {
    out_.recall(narrow<std::uint32_t>(entry_of(Memo::first_name) + entry));
  }

  void write_tuple(std::size_t size, const auto& write_member) {
    constexpr std::array kShort{Op::empty_tuple, Op::tuple1, Op::tuple2, Op::tuple3};
    if (size >= kShort.size()) out_.op(Op::mark);
    for (std::size_t i = 0; i < size; ++i) write_member(i);
    out_.op(size < kShort.size() ? kShort[size] : Op::tuple);
  }

  void write_size(Memo key, Numbers numbers) {
    recall(key);
    recall(Memo::size);
    write_tuple(numbers.size(), [&](std::size_t i) { out_.integer(numbers[i]); });
    end_call();
  }

  void write_entries(Batches& batches) {
    for (std::size_t i = 0; i < source_.entry_count(); ++i) {
      const EntryHead& head = source_.head(i);
      about_entry(head.name, [&] {
        batches.next();
        out_.text(head.name);
        out_.memoize();
        if (head.is_tensor) {
          write_tensor(i, head);
        } else {
          write_empty(Memo::bytes);
        }
      });
    }
  }

  void write_tensor(std::size_t entry, const EntryHead& head) {
    begin_instance(Memo::tensor);
    recall(Memo::properties_key);
    write_properties(head);
    write_size(Memo::size_key, head.shape);
    recall(Memo::chunks_key);
    out_.op(Op::empty_list);
    Batches batches(out_, Op::appends);
    source_.for_each_chunk(entry, [&](Numbers offsets, Numbers sizes) {
      batches.next();
      begin_instance(Memo::chunk);
      write_size(Memo::offsets_key, offsets);
      write_size(Memo::sizes_key, sizes);
      end_instance();
    });
    batches.close();
    chunk_counts_[entry] = batches.count();
    end_instance();
  }

  // Their state is a tuple: dtype, layout, requires_grad, memory format, pinned.
  void write_properties(const EntryHead& head) {
    write_empty(Memo::properties);
    out_.op(Op::mark);
    write_global("torch", to_string(head.dtype));
    recall(Memo::layout);
    out_.text("torch.strided");
    end_call();
    out_.op(head.requires_grad ? Op::newtrue : Op::newfalse);
    recall(Memo::memory_format);
    out_.integer(0);
    end_call();
    out_.op(Op::newfalse);
    out_.op(Op::tuple);
    out_.op(Op::build);
  }

  void write_paths(Batches& batches) {
    for (std::size_t i = 0; i < source_.entry_count(); ++i) {
      const EntryHead& head = source_.head(i);
      about_entry(head.name, [&] {
        batches.next();
        recall_name(i);
        write_path(i, head);
      });
    }
  }

  void write_path(std::size_t entry, const EntryHead& head) {
    if (!head.path) return write_tuple(1, [&](std::size_t) { recall_name(entry); });
    write_tuple(head.path->size(), [&](std::size_t i) { write_step((*head.path)[i]); });
  }

  // An integer is the index of a list to PyTorch: keys are strings.
  void write_step(const PathPart& part) {
    if (const auto* index = std::get_if<std::int64_t>(&part)) return out_.integer(*index);
    out_.text(step_text(part));
  }

  void write_items(Batches& batches) {
    for (std::size_t i = 0; i < source_.entry_count(); ++i) {
      const EntryHead& head = source_.head(i);
      about_entry(head.name, [&] { write_items_of(i, head.is_tensor, batches); });
    }
  }

  void write_items_of(std::size_t entry, bool is_tensor, Batches& batches) {
    std::size_t count = 0;
    source_.for_each_item(entry, [&](Numbers offsets, const ItemView& item) {
      batches.next();
      begin_instance(Memo::index);
      recall(Memo::name_key);
      recall_name(entry);
      write_place(is_tensor, count++, offsets);
      end_instance();
      write_info(item);
    });
    const std::size_t expected = is_tensor ? chunk_counts_[entry] : 1;
    if (count != expected) {
      throw Error(ErrorCode::invalid_argument,
                  std::to_string(count) + " items, expected " + std::to_string(expected));
    }
  }

  // What an index says behind the name. Complete before it becomes a key: PyTorch hashes the
  // offset.
  void write_place(bool is_tensor, std::size_t number, Numbers offsets) {
    recall(Memo::index_key);
    if (!is_tensor) return out_.op(Op::none);
    out_.integer(narrow<std::int64_t>(number));
    write_size(Memo::offset_key, offsets);
  }

  void write_info(const ItemView& item) {
    begin_instance(Memo::storage_info);
    recall(Memo::path_key);
    out_.text(item.path);
    recall(Memo::offset_key);
    out_.integer(narrow<std::int64_t>(item.offset));
    recall(Memo::length_key);
    out_.integer(narrow<std::int64_t>(item.length));
    if (!item.transforms.empty()) write_transforms(item.transforms);
    end_instance();
  }

  void write_transforms(std::span<const std::string> transforms) {
    out_.text("transform_descriptors");
    out_.op(Op::empty_list);
    out_.op(Op::mark);
    for (const std::string& transform : transforms) out_.text(transform);
    out_.op(Op::appends);
  }

  void write_text_or_none(const char* key, const std::string& text) {
    out_.text(key);
    if (text.empty()) return out_.op(Op::none);
    out_.text(text);
  }

  // The checkpoint's path as Python's os.fsdecode gives it: each byte that is no UTF-8 is a lone
  // surrogate.
  static std::string path_as_text(std::string_view path) {
    std::string text;
    while (!path.empty()) {
      std::size_t length = first_rune(path).length;
      if (length != 0) {
        text += path.substr(0, length);
      } else {
        append_utf8(text, 0xdc00U + static_cast<unsigned char>(path[0]));
        length = 1;
      }
      path.remove_prefix(length);
    }
    return text;
  }

  void write_origin() {
    const Origin& origin = source_.origin();
    out_.text("storage_meta");
    if (origin.checkpoint_id.empty() && origin.save_id.empty()) {
      out_.op(Op::none);
    } else {
      begin_instance(Memo::storage_meta);
      write_text_or_none("checkpoint_id", path_as_text(origin.checkpoint_id));
      write_text_or_none("save_id", origin.save_id);
      write_text_or_none("load_id", {});
      out_.text("modules");
      out_.op(Op::empty_list);
      end_instance();
    }
    write_text_or_none("version", origin.version);
  }

  const MetadataSource& source_;
  PickleStream out_;
  std::vector<std::size_t> chunk_counts_;  // of the entries
};

class Stored final : public MetadataSource {
 public:
  explicit Stored(const Metadata& metadata) : metadata_(metadata) {}

  [[nodiscard]] const Origin& origin() const override { return metadata_; }
  [[nodiscard]] std::size_t entry_count() const override { return metadata_.entries.size(); }
  [[nodiscard]] const EntryHead& head(std::size_t entry) const override {
    return metadata_.entries[entry];
  }
  void for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const override {
    const Chunks& chunks = metadata_.entries[entry].chunks;
    for (std::size_t i = 0; i < chunks.size(); ++i)
      visit(chunks.box_offsets(i), chunks.box_sizes(i));
  }
  void for_each_item(std::size_t entry, const ItemVisitor& visit) const override {
    const Entry& from = metadata_.entries[entry];
    const Item& item = from.item;
    if (!from.is_tensor) return visit({}, {item.path, item.offset, item.length, item.transforms});
    for (std::size_t i = 0; i < from.chunks.size(); ++i)
      visit(from.chunks.box_offsets(i), from.chunks.item(i));
  }

 private:
  const Metadata& metadata_;
};

}  // namespace

void encode(const MetadataSource& source, const std::function<void(ByteView bytes)>& write) {
  Encoder(source, write).run();
}

std::unique_ptr<MetadataSource> source_of(const Metadata& metadata) {
  return std::make_unique<Stored>(metadata);
}

std::vector<std::byte> encode(const Metadata& metadata) {
  std::vector<std::byte> bytes;
  encode(Stored(metadata),
         [&](ByteView piece) { bytes.insert(bytes.end(), piece.begin(), piece.end()); });
  return bytes;
}

}  // namespace tessera::dcp
