#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "format/exported/config.h"
#include "format/exported/exported.h"
#include "format/torch/modules.h"
#include "format/torch/rebuild.h"
#include "format/torch/records.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::exported {
namespace {

using torch_file::ArchiveKind;
using torch_file::Records;
using Kind = Value::Kind;

constexpr std::uint64_t kMostJson =
    100'000'000;  // bytes of all tables together, about 400,000 tensors
constexpr std::size_t kNamesInNote = 5;
constexpr std::string_view kModels = "models/", kTable = ".json", kCompiled = "data/aotinductor/";

// What a model's tensors are in: `folder` has the records and the table.
struct Part {
  std::string_view folder;
  std::string_view table;  // behind the model's name
  std::string_view old;    // of torch 2.7, the state dict's name
};
constexpr Part kWeights{"data/weights/", "_weights_config.json", "serialized_state_dict.pt"};
constexpr Part kConstants{"data/constants/", "_constants_config.json", "serialized_constants.pt"};

// Constants that are no tensors, by their records' names.
bool is_of_object(std::string_view record) {
  return record.starts_with("custom_obj_") || record.starts_with("opaque_obj_");
}

class Reader {
 public:
  explicit Reader(zip::Archive archive) : records_(std::move(archive)) {}

  Models run() {
    if (records_.kind() == ArchiveKind::exported_27) return run_old();
    require_version();
    const std::vector<std::string> names = model_names();
    Models made;
    if (names.size() == 1) {
      made.tree = model(names[0]);
    } else {
      made.tree = Value::dict();
      for (const std::string& name : names) made.tree.set_item(name, model(name));
    }
    require_values();
    made.notes = notes();
    return made;
  }

 private:
  [[noreturn]] void fail(ErrorCode code, std::string what) const {
    throw Error(code, std::move(what)).at_path(records_.name());
  }

  void require_version() const {
    records_.require_readable();
    if (const std::string format = records_.text("archive_format"); format != "pt2")
      fail(ErrorCode::unsupported, "an archive of format '" + printable(format) + "', pt2 is read");
    if (const std::string version = records_.text("archive_version"); version != "0") {
      fail(ErrorCode::unsupported,
           "an archive of torch.export of version '" + printable(version) + "', 0 is read");
    }
  }

  // Each has a file of JSON, in the archive's order.
  [[nodiscard]] std::vector<std::string> model_names() const {
    const std::string prefix = records_.root() + std::string(kModels);
    std::vector<std::string> names;
    for (const zip::Entry& entry : records_.archive().entries()) {
      std::string_view name = entry.name;
      if (!name.starts_with(prefix) || !name.ends_with(kTable)) continue;
      name.remove_prefix(prefix.size());
      if (name.size() <= kTable.size()) fail(ErrorCode::corrupt, "a model without a name");
      name.remove_suffix(kTable.size());
      names.emplace_back(name);
    }
    if (names.empty()) {
      fail(ErrorCode::unsupported,
           std::string("an archive of torch.export without a model") +
               (has_compiled() ? ": what AOTInductor compiled is not read" : ""));
    }
    return names;
  }

  [[nodiscard]] bool has_compiled() const {
    const std::string prefix = records_.root() + std::string(kCompiled);
    return std::ranges::any_of(records_.archive().entries(), [&prefix](const zip::Entry& entry) {
      return entry.name.starts_with(prefix);
    });
  }

  // Who exported a whole model of the meta device may think that its weights are here.
  void require_values() const {
    if (kept_ > 0 || without_values_.empty()) return;
    throw Error(ErrorCode::incomplete, "it was exported without its values, and so was all else")
        .at_path(records_.name())
        .at_key(without_values_.front());
  }

  Value model(const std::string& name) {
    pairs_.clear();
    taken_.clear();
    for (const Part& part : {kWeights, kConstants}) {
      const std::string old = std::string(part.folder) + name + ".pt";
      const std::string table = std::string(part.folder) + name + std::string(part.table);
      if (records_.find(old) != nullptr) {
        add_saved(old);  // before there were tables
      } else if (const zip::Entry* entry = records_.find(table)) {
        add_table(part, *entry);
      } else {
        fail(ErrorCode::corrupt, "model '" + printable(name, 200) + "' has no " + table);
      }
    }
    return Value::dict(std::move(pairs_));
  }

  Models run_old() {
    for (const Part& part : {kWeights, kConstants}) {
      if (records_.find(part.old) == nullptr)
        fail(ErrorCode::corrupt, "an archive of torch.export without " + std::string(part.old));
      add_saved(std::string(part.old));
    }
    return {Value::dict(std::move(pairs_)), notes()};
  }

  // A dict by torch.save, in a record.
  void add_saved(const std::string& record) {
    const Value saved = pickled(record, *records_.find(record));
    if (!saved.is(Kind::dict)) fail(ErrorCode::corrupt, record + " holds no dict");
    for (const auto& [key, value] : saved.pairs()) {
      if (!key.is(Kind::string)) fail(ErrorCode::corrupt, record + " has a key that is no name");
      add_pair(key.as_string(), torch_file::detached(value));
    }
  }

  void add_table(const Part& part, const zip::Entry& entry) {
    const std::vector<std::byte> text = records_.archive().read(entry, kMostJson - json_);
    json_ += text.size();
    std::vector<Entry> entries;
    try {
      entries = read_config(text);
    } catch (Error& error) {
      throw error.at_path(records_.name() + ":" + entry.name);
    }
    for (const Entry& one : entries) {
      try {
        add_entry(part, one);
      } catch (Error& error) {
        throw error.at_path(records_.name()).at_key(one.name);
      }
    }
  }

  void add_entry(const Part& part, const Entry& entry) {
    const std::string name = std::string(part.folder) + entry.record;
    const zip::Entry* const record = records_.find(name);
    if (record == nullptr) torch_file::corrupt("there is no record " + name);
    if (part.folder == kConstants.folder && is_of_object(entry.record)) {
      left_out_.push_back(entry.name);
    } else if (entry.is_pickled) {
      Value& known = pickled_[name];
      if (known.is(Kind::none)) known = torch_file::detached(pickled(name, *record));
      add_pair(entry.name, known);
    } else if (record->size == 0 && numel(entry.meta->sizes) != 0) {
      without_values_.push_back(entry.name);
    } else {
      add_pair(entry.name, tensor_of(*entry.meta, name, *record));
    }
  }

  // What torch.save made in a record.
  [[nodiscard]] Value pickled(const std::string& name, const zip::Entry& record) const {
    require_stored(name, record);
    return torch_file::read(
        slice_source(records_.archive().source(), record.data_offset, record.size));
  }

  static void require_stored(const std::string& name, const zip::Entry& record) {
    if (record.deflated) throw Error(ErrorCode::unsupported, "record " + name + " is deflated");
  }

  // The storage in a record, which several tensors of one dtype may be views of.
  const std::shared_ptr<Storage>& storage_of(DType dtype, const std::string& name,
                                             const zip::Entry& record) {
    const auto [known, fresh] = storages_.try_emplace(name, dtype, nullptr);
    auto& [of_first, storage] = known->second;
    if (of_first != dtype) torch_file::corrupt("record " + name + " is of two dtypes");
    if (!fresh) return storage;
    require_stored(name, record);
    storage = std::make_shared<Storage>();
    storage->source = records_.archive().source();
    storage->offset = record.data_offset;
    storage->size = record.size;
    storage->crc32 = record.crc32;
    storage->dtype = torch_file::has_storage_class(dtype) ? dtype : DType::uint8;
    if (!torch_file::has_storage_class(dtype)) storage->torch_class = torch_file::kUntyped;
    return storage;
  }

  Value tensor_of(const TensorMeta& meta, const std::string& name, const zip::Entry& record) {
    if (record.size % size_of(meta.dtype) != 0) {
      torch_file::corrupt("record " + name + " of " + std::to_string(record.size) +
                          " bytes holds no whole number of elements of " +
                          std::to_string(size_of(meta.dtype)));
    }
    torch_file::require_inside({meta.offset, meta.sizes, meta.strides}, meta.dtype, record.size);
    Tensor tensor;
    tensor.dtype = meta.dtype;
    tensor.shape = meta.sizes;
    Piece piece;
    piece.slice = whole(tensor.shape);
    piece.storage = storage_of(meta.dtype, name, record);
    piece.storage_offset = meta.offset;
    if (meta.strides != torch_file::torch_strides(tensor.shape)) piece.strides = meta.strides;
    tensor.pieces.push_back(std::move(piece));
    return Value(std::move(tensor));
  }

  void add_pair(const std::string& name, Value value) {
    if (!taken_.insert(name).second) {
      throw Error(ErrorCode::conflict, "a weight and a constant of one name")
          .at_path(records_.name())
          .at_key(name);
    }
    pairs_.emplace_back(name, std::move(value));
    ++kept_;
  }

  static std::string listed(const std::vector<std::string>& names) {
    std::string text;
    for (std::size_t i = 0; i < std::min(names.size(), kNamesInNote); ++i)
      text += (i == 0 ? "" : ", ") + printable(names[i], 200);
    if (names.size() > kNamesInNote)
      text += " and " + std::to_string(names.size() - kNamesInNote) + " more";
    return text;
  }

  [[nodiscard]] std::vector<std::string> notes() const {
    std::vector<std::string> notes;
    if (!left_out_.empty())
      notes.push_back("constants that only code can load are left out: " + listed(left_out_));
    if (!without_values_.empty())
      notes.push_back("what was exported without its values is left out: " +
                      listed(without_values_));
    if (has_compiled())
      notes.emplace_back("code that AOTInductor compiled, and what is for it alone, is left out");
    return notes;
  }

  Records records_;
  std::vector<Value::Pair> pairs_;  // of the model
  std::unordered_set<std::string> taken_;
  std::size_t kept_ = 0;                     // of all models
  std::vector<std::string> left_out_;        // constants
  std::vector<std::string> without_values_;  // tensors of the meta device
  // By record, with the dtype of the tensors.
  std::unordered_map<std::string, std::pair<DType, std::shared_ptr<Storage>>> storages_;
  std::unordered_map<std::string, Value> pickled_;  // by record
  std::uint64_t json_ = 0;                          // bytes that were read
};

}  // namespace

std::optional<Models> read(const std::shared_ptr<const ByteSource>& source) {
  auto archive = torch_file::archive_of(source, {ArchiveKind::exported, ArchiveKind::exported_27});
  if (!archive) return std::nullopt;
  return Reader(*std::move(archive)).run();
}

std::set<std::string> pickled_entries(const zip::Archive& archive) {
  std::set<std::string> names;
  std::uint64_t json = 0;
  for (const zip::Entry& entry : archive.entries()) {
    for (const Part& part : {kWeights, kConstants}) {
      const std::size_t folder = entry.name.find(part.folder);
      if (folder == std::string::npos) continue;
      const std::size_t own = folder + part.folder.size();
      if (is_of_object(std::string_view(entry.name).substr(own))) names.insert(entry.name);
      if (!entry.name.ends_with(part.table)) continue;
      const std::vector<std::byte> text = archive.read(entry, kMostJson - json);
      json += text.size();
      for (const Entry& one : read_config(text))
        if (one.is_pickled) names.insert(entry.name.substr(0, own) + one.record);
    }
  }
  return names;
}

}  // namespace tessera::exported
