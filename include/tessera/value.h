// Value: the tree that a checkpoint is.
//
// A Value is a handle to a node. Copies of the handle share the node, as names share objects in
// Python. Identity (one node in two places) survives reading and writing. The tree holds plain
// data, tensor leaves, and object nodes for everything else; objects are kept and written back, but
// never executed. A tree has no cycles: readers refuse them with `unsupported`, and functions that
// take a caller's tree with `invalid_argument`. Several threads may call reading members at once
// while nobody changes the tree.
#pragma once

#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/io.h"
#include "tessera/layout.h"

namespace [[gnu::visibility("default")]] tessera {

class Value;

// How the bytes of a Storage are kept in its source.
enum class Encoding : std::uint8_t {
  raw,              // the elements themselves
  torch_item,       // a DCP item: a whole torch.save archive of one tensor
  torch_item_zstd,  // one zstd frame around such an archive
};

// Bytes that one or more tensors are views of: in a file, in memory, or (all null) not here.
struct Storage {
  std::shared_ptr<const ByteSource> source;  // where the bytes are, unless in memory
  std::uint64_t offset = 0;                  // of the first byte in `source`
  std::uint64_t size = 0;                    // bytes; for encoded storages the encoded size
  Encoding encoding = Encoding::raw;
  std::byte* data = nullptr;             // the bytes in memory; null when in `source`
  std::shared_ptr<void> owner;           // keeps `data` alive
  std::shared_ptr<DeviceMemory> device;  // has the bytes, from its first on; the others are null
  std::optional<std::uint32_t> crc32;    // of all bytes, as the file records it; 0: not computed
  std::string location = "cpu";          // torch.save's device tag
  DType dtype = DType::float32;          // element type that torch.save's storage class names
  std::string torch_class;  // the class, if the dtype does not imply it: "UntypedStorage",
                            // "QInt8Storage"; empty: the dtype's own
  // The strings "storage" and `location` as the file has them (a tuple). In Python they are single
  // objects, which other places of the tree may share. Null: this storage has strings of its own.
  std::shared_ptr<const Value> id_strings;
};

// A slice of a tensor and where its elements are.
struct Piece {
  Slice slice;
  std::shared_ptr<Storage> storage;  // null: held by another rank
  std::int64_t storage_offset = 0;   // elements from the storage's first byte (0 if encoded)
  Shape strides;                     // elements, one per dimension of the box; empty: row-major
  int rank = -1;                     // who holds it, when known
  // torch's lazy bits: an element is the conjugate, or the negative, of what the storage holds.
  // Readers of elements get them resolved; only torch.save files store the bits as they are.
  bool conj = false;  // has no effect on elements that are not complex
  bool neg = false;
};

// A tensor leaf: what the tensor is, and which of its pieces are known here. In an opened
// checkpoint they cover the tensor; in a tree that one of N ranks saves, they are that rank's own.
struct Tensor {
  DType dtype = DType::float32;
  Shape shape;
  std::vector<Piece> pieces;
  bool requires_grad = false;
  bool parameter = false;              // wrapped in a torch.nn.Parameter
  bool sharded = false;                // pieces are chunks of a DTensor: saved as a sharded tensor
  std::optional<Placement> placement;  // in a tree that N ranks save: what each of them holds
  bool bare_storage = false;  // the storage itself, as torch.save refers to it: one-dimensional
  // Element type of the pieces' bytes if it is not `dtype`: readers convert. Set only while a
  // conversion runs.
  std::optional<DType> stored;
  std::shared_ptr<const Value> attributes;  // of the Python object (its pickled state); null: none
};

// An integer of any size. If it does not fit 64 bits, `big` holds its two's complement, little end
// first.
struct Integer {
  std::int64_t small = 0;
  std::vector<std::byte> big;  // empty: `small` is the value
  bool operator==(const Integer&) const = default;
};

enum class DictKind : std::uint8_t { dict, ordered_dict, default_dict };

// What pickle can say about a thing that is not plain data: REDUCE of a global with arguments
// (NEWOBJ if `by_new`), then a state, then list and dict items.
struct Object;

// Numbers that count as data. Characters do not.
template <class T>
concept IntegerNumber = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char> &&
                        !std::same_as<T, wchar_t> && !std::same_as<T, char8_t> &&
                        !std::same_as<T, char16_t> && !std::same_as<T, char32_t>;
template <class T>
concept RealNumber = std::same_as<T, float> || std::same_as<T, double>;

class Value {
 public:
  enum class Kind : std::uint8_t {
    none,
    boolean,
    integer,
    real,
    complex,
    string,
    bytes,
    bytearray,
    list,
    tuple,
    set,
    frozenset,
    dict,
    tensor,
    global,
    object,
  };
  using List = std::vector<Value>;
  using Pair = std::pair<Value, Value>;

  // Literals and numbers become data. Pointers, characters and enumerators, which C++ would
  // silently turn into a bool or a number, do not convert.
  Value();  // none
  template <std::same_as<bool> T>
  Value(T value) : Value(of_bool(value)) {}  // NOLINT(google-explicit-constructor)
  template <IntegerNumber T>                 // of any width and sign
  Value(T value)                             // NOLINT
      : Value(std::in_range<std::int64_t>(value) ? of_int(static_cast<std::int64_t>(value))
                                                 : of_large(static_cast<std::uint64_t>(value))) {}
  template <RealNumber T>
  Value(T value) : Value(of_real(value)) {}  // NOLINT
  Value(const char* value);                  // NOLINT; null is `invalid_argument`
  Value(std::nullptr_t) = delete;
  Value(std::string value);       // NOLINT
  Value(std::string_view value);  // NOLINT
  Value(Tensor value);            // NOLINT
  static Value integer(Integer value);
  static Value complex(std::complex<double> value);
  static Value bytes(std::vector<std::byte> value);
  static Value bytearray(std::vector<std::byte> value);
  static Value list(List items = {});
  static Value tuple(List items = {});
  static Value set(List items = {});
  static Value frozenset(List items = {});
  static Value dict(std::vector<Pair> pairs = {}, DictKind kind = DictKind::dict);
  // A class or function by name, "module.name". If the module is torch, it names a dtype.
  static Value global(std::string module, std::string name);
  // The same from two string nodes, whose identity is kept: pickle protocol 4 writes names as
  // shared strings.
  static Value global_of(Value module, Value name);
  static Value object(Object object);

  [[nodiscard]] Kind kind() const noexcept;
  [[nodiscard]] bool is(Kind kind) const noexcept { return this->kind() == kind; }
  // Equal only for two handles of one node.
  [[nodiscard]] const void* identity() const noexcept;
  // Whether other handles of the node exist, so that its identity outlives this handle.
  [[nodiscard]] bool is_shared() const noexcept { return node_.use_count() > 1; }

  // Each throws `mismatch`, saying what was found, if the node is of another kind. References and
  // pointers into the tree live as long as the node that they lead into. A temporary gives no
  // references: its members return values, which outlive it, as in
  // `checkpoint.load().at("w").as_tensor()`.
  [[nodiscard]] bool as_bool() const;
  [[nodiscard]] std::int64_t as_int() const;  // `limit` if it does not fit 64 bits
  [[nodiscard]] const Integer& as_integer() const&;
  [[nodiscard]] Integer as_integer() const&& { return this->as_integer(); }
  [[nodiscard]] double as_real() const;  // also of an integer
  [[nodiscard]] std::complex<double> as_complex() const;
  [[nodiscard]] const std::string& as_string() const&;
  [[nodiscard]] std::string as_string() const&& { return this->as_string(); }
  [[nodiscard]] const std::vector<std::byte>& as_bytes() const&;  // bytes and bytearray
  [[nodiscard]] std::vector<std::byte> as_bytes() const&& { return this->as_bytes(); }
  // list, tuple, set, frozenset
  [[nodiscard]] const List& items() const&;
  [[nodiscard]] List& items() &;
  [[nodiscard]] List items() const&& { return this->items(); }
  [[nodiscard]] const Tensor& as_tensor() const&;
  [[nodiscard]] Tensor& as_tensor() &;
  [[nodiscard]] const Tensor as_tensor() const&&;  // NOLINT(readability-const-return-type): a
                                                   // change to it would be lost
  [[nodiscard]] const Object& as_object() const&;
  [[nodiscard]] Object& as_object() &;
  [[nodiscard]] const Object as_object() const&&;  // NOLINT(readability-const-return-type)
  [[nodiscard]] const std::string& global_module() const&;
  [[nodiscard]] std::string global_module() const&& { return this->global_module(); }
  [[nodiscard]] const std::string& global_name() const&;
  [[nodiscard]] std::string global_name() const&& { return this->global_name(); }
  [[nodiscard]] const Value& global_module_node() const&;
  [[nodiscard]] Value global_module_node() const&& { return this->global_module_node(); }
  [[nodiscard]] const Value& global_name_node() const&;
  [[nodiscard]] Value global_name_node() const&& { return this->global_name_node(); }

  // Dicts. They keep the order of insertion and compare keys by value.
  [[nodiscard]] const std::vector<Pair>& pairs() const&;
  [[nodiscard]] std::vector<Pair> pairs() const&& { return this->pairs(); }
  [[nodiscard]] DictKind dict_kind() const;
  [[nodiscard]] const Value* find(std::string_view key) const&;  // null: absent
  const Value* find(std::string_view key) const&& = delete;
  [[nodiscard]] const Value* find_key(const Value& key) const&;  // for a key of any type
  const Value* find_key(const Value& key) const&& = delete;
  [[nodiscard]] const Value& at(std::string_view key) const&;  // `not_found` naming the key
  [[nodiscard]] Value& at(std::string_view key) &;
  [[nodiscard]] Value at(std::string_view key) const&& { return this->at(key); }
  // As `at`. But in a dict that may change, a missing key is appended, with the value none.
  [[nodiscard]] const Value& operator[](std::string_view key) const& { return at(key); }
  [[nodiscard]] Value& operator[](std::string_view key) &;
  [[nodiscard]] Value operator[](std::string_view key) const&& { return this->at(key); }
  void set_item(Value key, Value value);  // replaces or appends
  // Returns whether the key was there. Takes time in proportion to the dict, as does `rename`.
  bool erase(std::string_view key);
  // Gives a key another name; its place and value stay. Throws `not_found` if there is no such key,
  // and `conflict` if `to` is another key of the dict.
  void rename(std::string_view from, std::string_view to);
  // Sequences. Throws `not_found` naming the index.
  [[nodiscard]] const Value& at(std::size_t index) const&;
  [[nodiscard]] Value& at(std::size_t index) &;
  [[nodiscard]] Value at(std::size_t index) const&& { return this->at(index); }
  [[nodiscard]] const Value& operator[](std::size_t index) const& { return at(index); }
  [[nodiscard]] Value& operator[](std::size_t index) & { return at(index); }
  [[nodiscard]] Value operator[](std::size_t index) const&& { return this->at(index); }
  [[nodiscard]] std::size_t size() const;  // dicts and sequences
  // Attributes of the container itself: a module state dict's `_metadata`; default_dict's factory.
  [[nodiscard]] const Value* container_state() const&;  // null: none
  const Value* container_state() const&& = delete;
  void set_container_state(Value state);
  [[nodiscard]] const Value* default_factory() const&;
  const Value* default_factory() const&& = delete;
  void set_default_factory(Value factory);

  // A separate copy: its containers, objects and tensor leaves may change while this tree stays as
  // it is. Places that share a node in this tree also share one in the copy. The tensors' bytes are
  // not copied: the pieces of both trees lead to the same memory or file. Throws `invalid_argument`
  // for a tree that contains itself, and `limit` for a tree of more than 2000 levels.
  [[nodiscard]] Value clone() const;

  // Deep equality of data. Tensors compare dtype, shape and strides, but not their elements.
  friend bool operator==(const Value& a, const Value& b);

 private:
  struct Node;
  explicit Value(std::shared_ptr<Node> node);
  static Value of_bool(bool value);
  static Value of_int(std::int64_t value);
  static Value of_large(std::uint64_t value);
  static Value of_real(double value);
  std::shared_ptr<Node> node_;
};

struct Object {
  Value callable;                      // a global or, in nested constructions, an object
  Value arguments;                     // tuple
  bool by_new = false;                 // NEWOBJ (cls.__new__) instead of REDUCE
  std::optional<Value> keywords = {};  // NEWOBJ_EX
  std::optional<Value> state = {};     // BUILD
  std::vector<Value> list_items = {};  // APPEND(S)
  std::vector<std::pair<Value, Value>> dict_items = {};  // SETITEM(S)
  // "module.name" of the callable if it is a global, else empty.
  [[nodiscard]] std::string name() const;
};

}  // namespace tessera
