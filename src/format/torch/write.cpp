#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/crc32.h"
#include "base/numbers.h"
#include "base/text.h"
#include "format/pickle/pickle.h"
#include "format/pickle/text.h"
#include "format/torch/rebuild.h"
#include "format/torch/torch_file.h"
#include "layout/plan.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

constexpr const char* kPickle = "data.pkl";
constexpr std::pair<const char*, const char*> kLabels[] = {
    {".format_version", "1"}, {".storage_alignment", "64"}, {"byteorder", "little"}};
constexpr std::pair<const char*, const char*> kVersion = {"version", "3\n"};
constexpr const char* kSerializationId = ".data/serialization_id";
constexpr std::size_t kSerializationIdSize = 40;

ByteView view(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

void append(std::vector<std::byte>& to, ByteView bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

// Turns tensors into what torch.save pickles for them, and numbers their storages in order of first
// use.
class Pickler {
 public:
  Pickler(std::vector<Writer::Slot>& slots, const Expand& expand)
      : slots_(slots), expand_(expand) {}

  std::vector<std::byte> run(const Value& tree) {
    pickle::WriteOptions options;
    options.persistent_id = [this](const Value& value, Value& id) {
      if (!is_bare_storage(value)) return false;
      id = storage_id(value.as_tensor());
      return true;
    };
    options.reduce = [this](const Value& value, Value& replacement) {
      if (expand_ && expand_(value, replacement)) return true;
      if (!value.is(Kind::tensor)) return false;
      replacement = reduced(value.as_tensor());
      return true;
    };
    return pickle::write(tree, options);
  }

 private:
  // A storage that is written: what its persistent id says.
  struct Known {
    std::size_t slot = 0;
    std::string_view class_name;
    Value key;
  };

  Value storage_id(const Tensor& bare) {
    const std::shared_ptr<Storage>& storage = bare.pieces.at(0).storage;
    if (!storage) return id_of(fresh_, cpu_, storage_);
    // The stand-in that `reduced` makes has no shape; a storage in the tree has one.
    if (!bare.shape.empty()) known(storage, class_name(*storage), bare);
    const Known& found = known_.at(storage.get());
    if (const Value::List* strings = kept_strings(*storage))
      return id_of(found, (*strings)[1], (*strings)[0]);
    // torch has one string for "cpu" and makes "cuda:0" anew each time.
    return id_of(found, storage->location == "cpu" ? cpu_ : Value(storage->location), storage_);
  }

  // The strings that the storage's file had for its id. Null: none, or it is elsewhere now.
  static const Value::List* kept_strings(const Storage& storage) {
    if (!storage.id_strings) return nullptr;
    const Value::List& strings = storage.id_strings->items();
    return strings[1].as_string() == storage.location ? &strings : nullptr;
  }

  Value id_of(const Known& of, const Value& location, const Value& word) {
    const std::size_t size = size_of(storage_class(of.class_name).dtype);
    const auto count = narrow<std::int64_t>(slots_[of.slot].size / size);
    Value& global = classes_[of.class_name];
    if (global.is(Kind::none)) global = class_global(of.class_name);
    return Value::tuple({word, global, of.key, location, Value(count)});
  }

  Known add_slot(std::uint64_t size, std::string_view name, const Tensor& leaf,
                 std::shared_ptr<Storage> storage) {
    const std::size_t slot = slots_.size();
    slots_.push_back({0, size, &leaf, std::move(storage)});
    return {slot, name, Value(std::to_string(slot))};
  }

  // Registers `leaf` as a view of `storage`.
  void known(const std::shared_ptr<Storage>& storage, std::string_view name, const Tensor& leaf) {
    auto [found, added] = known_.try_emplace(storage.get());
    if (added) found->second = add_slot(storage->size, name, leaf, storage);
    if (found->second.class_name != name) {
      throw Error(ErrorCode::invalid_argument,
                  "tensors of two types share a storage: " + std::string(name) + " and " +
                      std::string(found->second.class_name));
    }
  }

  static bool is_whole(const Slice& slice, const Shape& shape) {
    const Box* box = std::get_if<Box>(&slice);
    return box != nullptr && *box == whole(shape);
  }

  // A tensor keeps its storage when the storage holds all of it as plain elements.
  static bool keeps_storage(const Tensor& tensor) {
    if (tensor.pieces.size() != 1) return false;
    const Piece& piece = tensor.pieces[0];
    return is_whole(piece.slice, tensor.shape) && piece.storage &&
           piece.storage->encoding == Encoding::raw;
  }

  // The place to which a tensor's elements are written.
  struct Elements {
    std::shared_ptr<Storage> storage;  // null: `fresh_`
    std::int64_t offset = 0;
    Shape strides;
    std::vector<Value::Pair> bits;
  };

  Elements kept_elements(const Tensor& tensor) {
    const Piece& piece = tensor.pieces[0];
    Elements kept{piece.storage, piece.storage_offset, piece.strides, {}};
    if (piece.conj) kept.bits.emplace_back("conj", true);
    if (piece.neg) kept.bits.emplace_back("neg", true);
    if (kept.strides.empty()) kept.strides = torch_strides(tensor.shape);
    require_inside({kept.offset, tensor.shape, kept.strides}, tensor.dtype, kept.storage->size);
    known(kept.storage, class_name(tensor.dtype), tensor);
    return kept;
  }

  // Elements that are gathered have no bits left.
  Elements gathered_elements(const Tensor& tensor) {
    const auto size = checked_mul<std::uint64_t>(narrow<std::uint64_t>(numel(tensor.shape)),
                                                 size_of(tensor.dtype));
    fresh_ = add_slot(size, class_name(tensor.dtype), tensor, nullptr);
    return {nullptr, 0, torch_strides(tensor.shape), {}};
  }

  Value tensor_arguments(const Tensor& tensor, bool requires_grad) {
    Elements elements = keeps_storage(tensor) ? kept_elements(tensor) : gathered_elements(tensor);
    Tensor stand_in;
    stand_in.bare_storage = true;
    stand_in.pieces = {{.slice = Box{}, .storage = std::move(elements.storage), .strides = {}}};
    Value::List arguments = {Value(std::move(stand_in)), Value(elements.offset),
                             tuple_of(tensor.shape),     tuple_of(elements.strides),
                             Value(requires_grad),       no_hooks()};
    if (class_name(tensor.dtype) == kUntyped) {
      arguments.push_back(Value::global("torch", std::string(info(tensor.dtype).torch)));
    }
    if (!elements.bits.empty()) arguments.push_back(Value::dict(std::move(elements.bits)));
    return Value::tuple(std::move(arguments));
  }

  // The parameter around the tensor that `inner` makes.
  static Value parameter_around(Value inner, const Tensor& tensor) {
    Value::List arguments = {std::move(inner), Value(tensor.requires_grad), no_hooks()};
    if (tensor.attributes) arguments.push_back(*tensor.attributes);
    return call(Value::global("torch._utils", tensor.attributes ? "_rebuild_parameter_with_state"
                                                                : "_rebuild_parameter"),
                Value::tuple(std::move(arguments)));
  }

  Value reduced(const Tensor& tensor) {
    const Value& rebuild = class_name(tensor.dtype) == kUntyped ? rebuild_v3_ : rebuild_v2_;
    Value arguments = tensor_arguments(tensor, tensor.requires_grad && !tensor.parameter);
    if (tensor.parameter) return parameter_around(call(rebuild, std::move(arguments)), tensor);
    if (!tensor.attributes) return call(rebuild, std::move(arguments));
    return call(Value::global("torch._tensor", "_rebuild_from_type_v2"),
                Value::tuple({rebuild, Value::global("torch", "Tensor"), std::move(arguments),
                              *tensor.attributes}));
  }

  static Value call(Value callable, Value arguments) {
    return Value::object({.callable = std::move(callable), .arguments = std::move(arguments)});
  }
  static Value no_hooks() { return Value::dict({}, DictKind::ordered_dict); }
  static Value tuple_of(const Shape& shape) { return Value::tuple({shape.begin(), shape.end()}); }

  std::vector<Writer::Slot>& slots_;
  const Expand& expand_;
  std::unordered_map<const Storage*, Known> known_;
  Known fresh_;                                // of the gathered tensor whose stand-in is next
  std::map<std::string_view, Value> classes_;  // one node for each
  // Strings and functions that are one object each in Python.
  Value storage_ = "storage";
  Value cpu_ = "cpu";
  Value rebuild_v2_ = Value::global("torch._utils", "_rebuild_tensor_v2");
  Value rebuild_v3_ = Value::global("torch._utils", "_rebuild_tensor_v3");
};

std::uint64_t combine(std::uint64_t seed, std::uint64_t value) {
  return seed ^ (value + 0x9e3779b9U + (seed << 6U) + (seed >> 2U));
}

std::string twenty_digits(std::uint64_t value) {
  const std::string digits = std::to_string(value);
  return std::string(20 - digits.size(), '0') + digits;
}

// PyTorch's identity of an archive: a hash of the record names, in the order of a
// std::unordered_set that they were put into one by one, then a hash of the CRCs in record order.
std::string serialization_id(std::size_t slots, std::uint64_t crcs) {
  std::unordered_set<std::string> names;
  names.insert(kPickle);
  for (const auto& [label, text] : kLabels) names.insert(label);
  for (std::size_t i = 0; i < slots; ++i) names.insert("data/" + std::to_string(i));
  names.insert(kVersion.first);
  std::uint64_t hash = 0;
  for (const std::string& name : names) hash = combine(hash, std::hash<std::string>{}(name));
  return twenty_digits(hash) + twenty_digits(crcs);
}

void require_folder(const std::string& root) {
  if (is_one_of(root, "", ".", "..") ||
      root.find_first_of(std::string("/\\\0", 3)) != std::string::npos) {
    throw Error(ErrorCode::invalid_argument, "the archive folder '" + root + "' is not one name");
  }
  try {
    pickle::require_utf8(root);
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument, "the archive folder is not UTF-8");
  }
}

void require_checksum_each(std::size_t checksums, std::size_t storages) {
  if (checksums == storages) return;
  throw Error(ErrorCode::invalid_argument, std::to_string(checksums) + " checksums for " +
                                               std::to_string(storages) + " storages");
}

void place(std::vector<Writer::Slot>& slots, zip::Writer& zip, const std::string& prefix) {
  for (std::size_t i = 0; i < slots.size(); ++i)
    slots[i].offset = zip.add(prefix + "data/" + std::to_string(i), slots[i].size).data_offset;
}

}  // namespace

Writer::Writer(const Value& tree, const std::string& root, const Expand& expand) {
  require_folder(root);
  std::vector<std::byte> pickle = Pickler(slots_, expand).run(tree);
  pickle_size_ = pickle.size();
  const std::string prefix = root + "/";
  const auto add_fixed = [&](const char* name, ByteView bytes) {
    zip_.add(prefix + name, bytes.size());
    fixed_crcs_.push_back(crc32(bytes));
    return fixed_crcs_.size() - 1;
  };
  // The pickle may be large: what is around it is put around it.
  std::size_t index = add_fixed(kPickle, pickle);
  std::vector<std::byte>& front = fixed_.emplace_back().bytes;
  front = std::move(pickle);
  const std::vector<std::byte> header = zip_.header(index);
  front.insert(front.begin(), header.begin(), header.end());
  append(front, zip_.descriptor(index, fixed_crcs_[index]));
  for (const auto& [label, text] : kLabels) {
    index = add_fixed(label, view(text));
    append(front, zip_.header(index));
    append(front, view(text));
    append(front, zip_.descriptor(index, fixed_crcs_[index]));
  }
  place(slots_, zip_, prefix);
  zip_.add(prefix + kVersion.first, view(kVersion.second).size());
  zip_.add(prefix + kSerializationId, kSerializationIdSize);
  size_ = checked_add(zip_.tail_offset(), zip_.tail_size());
  if (!slots_.empty()) append(front, zip_.header(index + 1));
}

std::vector<Writer::Slot> slots_of(const Value& tree, const std::string& root,
                                   std::uint64_t pickle_size, const Expand& expand) {
  std::vector<Writer::Slot> slots;
  (void)Pickler(slots, expand).run(tree);
  const std::string prefix = root + "/";
  zip::Writer zip;
  zip.add(prefix + kPickle, pickle_size);
  for (const auto& [label, text] : kLabels) zip.add(prefix + label, view(text).size());
  place(slots, zip, prefix);
  return slots;
}

void Writer::finish(const std::vector<std::uint32_t>& slot_crcs, const Put& put) {
  require_checksum_each(slot_crcs.size(), slots_.size());
  stream([next = slot_crcs.begin()](const Slot&) mutable { return *next++; }, put);
}

void Writer::stream(const SlotCrc& crc_of, const Put& put) {
  std::uint64_t crcs =
      std::accumulate(fixed_crcs_.begin(), fixed_crcs_.end(), std::uint64_t{0}, combine);
  std::size_t record = fixed_crcs_.size();
  std::vector<std::byte> bytes = slots_.empty() ? zip_.header(record) : std::vector<std::byte>();
  std::uint64_t at = zip_.placed(record).header_offset;  // of `bytes`
  for (std::size_t i = 0; i < slots_.size(); ++i, ++record) {
    if (!bytes.empty()) put(at, bytes);
    const std::uint32_t crc = crc_of(slots_[i]);
    at = zip_.placed(record).descriptor_offset;
    bytes = zip_.descriptor(record, crc);
    // A record without data has no descriptor, and counts for nothing.
    if (slots_[i].size != 0) crcs = combine(crcs, crc);
    append(bytes, zip_.header(record + 1));
  }
  const auto close = [&](std::string_view text) {
    const std::uint32_t crc = crc32(view(text));
    append(bytes, view(text));
    append(bytes, zip_.descriptor(record, crc));
    crcs = combine(crcs, crc);
    ++record;
  };
  close(kVersion.second);
  append(bytes, zip_.header(record));
  close(serialization_id(slots_.size(), crcs));
  put(at, bytes);
  put(zip_.tail_offset(), zip_.tail());
}

namespace {

void read(const Storage& storage, std::uint64_t offset, MutableByteView out) {
  if (out.empty()) return;
  StorageReader(storage, offset, offset + out.size()).read(offset, out);
}

const Slice& plain_slice(const Piece& piece) {
  if (!piece.storage || piece.storage->encoding != Encoding::raw) {
    throw Error(ErrorCode::invalid_argument,
                "a tensor with a piece that is not plain elements here");
  }
  return piece.slice;
}

// The sizes of the array that a piece is.
Shape array_of(const Slice& slice) {
  const Box* box = std::get_if<Box>(&slice);
  return box != nullptr ? box->sizes : Shape{numel(slice)};
}

// The tensor's elements, row-major, from all of its pieces.
void gather(const Tensor& tensor, MutableByteView out) {
  const auto size = static_cast<std::int64_t>(size_of(tensor.dtype));
  std::vector<Slice> from;
  std::ranges::transform(tensor.pieces, std::back_inserter(from), plain_slice);
  const std::vector<Slice> to = {whole(tensor.shape)};
  const std::vector<Copy> plan = plan_copies(tensor.shape, from, to);
  require_filled(tensor.shape, to, plan);
  for (const Copy& copy : plan) {
    const Piece& piece = tensor.pieces[copy.from];
    const Shape sizes = array_of(piece.slice);
    const Shape strides = piece.strides.empty() ? contiguous_strides(sizes) : piece.strides;
    std::int64_t to_element = copy.to_local;
    for_each_strided_run(
        sizes, strides, copy.from_local, copy.count,
        [&](std::int64_t position, std::int64_t count) {
          const auto target = out.subspan(static_cast<std::size_t>(to_element * size),
                                          static_cast<std::size_t>(count * size));
          read(*piece.storage, static_cast<std::uint64_t>((piece.storage_offset + position) * size),
               target);
          resolve_bits(piece, tensor.dtype, target.data(), count);
          to_element += count;
        });
  }
}

}  // namespace

std::vector<std::byte> write(const Value& tree, const std::string& root) {
  Writer writer(tree, root);
  std::vector<std::byte> bytes(writer.size());
  const auto place = [&](std::uint64_t offset, ByteView part) {
    std::copy(part.begin(), part.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
  };
  for (const Writer::Segment& segment : writer.fixed()) place(segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs;
  for (const Writer::Slot& slot : writer.slots()) {
    const MutableByteView out = MutableByteView(bytes).subspan(slot.offset, slot.size);
    if (slot.storage) {
      read(*slot.storage, 0, out);
    } else {
      gather(*slot.tensor, out);
    }
    crcs.push_back(crc32(out));
  }
  writer.finish(crcs, place);
  return bytes;
}

}  // namespace tessera::torch_file
