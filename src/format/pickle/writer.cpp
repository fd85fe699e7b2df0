// Writes what CPython's C pickler writes: the same opcodes, batches, memo entries and frames.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <unordered_map>

#include "format/pickle/names.h"
#include "format/pickle/output.h"
#include "format/pickle/pickle.h"
#include "format/pickle/text.h"
#include "tessera/error.h"
#include "value/integer.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;

constexpr std::size_t kBatch = 1000;
constexpr int kMaxDepth =
    3000;  // the reader's default, and room for what stands in place of tensors

ByteView view(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// Saving is recursive. What does not recurse stays out of line, so that the frames of what does are
// small enough for the deepest tree, with sanitizers too.
class Writer {
 public:
  explicit Writer(const WriteOptions& options) : options_(options), modern_(options.protocol >= 4) {
    if (options.protocol != 2 && options.protocol != 4) {
      throw Error(ErrorCode::invalid_argument,
                  "pickle protocol " + std::to_string(options.protocol) + ", expected 2 or 4");
    }
  }

  std::vector<std::byte> run(const Value& value) && {
    out_.op(Op::proto, static_cast<std::uint8_t>(options_.protocol));
    if (modern_) out_.begin_framing();
    save(value);
    out_.op(Op::stop);
    return std::move(out_).finish();
  }

 private:
  void save(const Value& value) {
    out_.boundary();
    if (!options_.persistent_id || !save_persistent(value)) save_value(value);
  }

  [[gnu::noinline]] bool save_persistent(const Value& value) {
    Value id;
    if (!options_.persistent_id(value, id)) return false;
    ++making_;
    save_in_place(id);
    out_.op(Op::binpersid);
    forget(std::move(id));
    return true;
  }

  void save_in_place(const Value& value) {
    out_.boundary();
    save_value(value);
  }

  void save_value(const Value& value) {
    if (save_atom(value) || recall(value)) return;
    if (++depth_ > kMaxDepth) refuse_depth();
    if (!options_.reduce || !save_reduced(value)) save_memoized(value);
    --depth_;
  }

  [[noreturn, gnu::noinline]] static void refuse_depth() {
    throw Error(ErrorCode::limit,
                "values nested deeper than " + std::to_string(kMaxDepth) + ", or a cycle of them");
  }

  [[gnu::noinline]] bool save_reduced(const Value& value) {
    Value replacement;
    if (!options_.reduce(value, replacement)) return false;
    save_replacement(value, std::move(replacement));
    return true;
  }

  // What is never in the memo.
  [[gnu::noinline]] bool save_atom(const Value& value) {
    switch (value.kind()) {
      case Kind::none:
        out_.op(Op::none);
        return true;
      case Kind::boolean:
        out_.op(value.as_bool() ? Op::newtrue : Op::newfalse);
        return true;
      case Kind::integer:
        save_integer(value.as_integer());
        return true;
      case Kind::real:
        out_.op(Op::binfloat, __builtin_bswap64(std::bit_cast<std::uint64_t>(value.as_real())));
        return true;
      default:
        return false;
    }
  }

  void save_integer(const Integer& integer) {
    if (integer.big.empty() && std::in_range<std::int32_t>(integer.small))
      return save_int32(static_cast<std::int32_t>(integer.small));
    const auto bytes = integer_to_bytes(integer);
    if (bytes.size() < 256) {
      out_.op(Op::long1, static_cast<std::uint8_t>(bytes.size()));
    } else {
      out_.op(Op::long4, static_cast<std::int32_t>(require_below_2_31(bytes.size())));
    }
    out_.text({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }

  void save_int32(std::int32_t number) {
    if (std::in_range<std::uint8_t>(number)) {
      out_.op(Op::binint1, static_cast<std::uint8_t>(number));
    } else if (std::in_range<std::uint16_t>(number)) {
      out_.op(Op::binint2, static_cast<std::uint16_t>(number));
    } else {
      out_.op(Op::binint, number);
    }
  }

  static std::size_t require_below_2_31(std::size_t size) {
    if (!std::in_range<std::int32_t>(size)) throw Error(ErrorCode::limit, "a value of over 2 GiB");
    return size;
  }

  void save_memoized(const Value& value) {
    switch (value.kind()) {
      case Kind::string:
        return save_string(value);
      case Kind::bytes:
        return save_bytes(value);
      case Kind::bytearray:
        return save_bytearray(value);
      case Kind::complex:
        return save_complex(value);
      case Kind::tuple:
        return save_tuple(value);
      case Kind::list:
        return save_list(value);
      case Kind::set:
      case Kind::frozenset:
        return save_set(value);
      case Kind::dict:
        return save_dict(value);
      case Kind::global:
        return save_global(value);
      case Kind::object:
        return save_object(value, value.as_object());
      default:
        throw Error(ErrorCode::unsupported, "a tensor in a plain pickle");
    }
  }

  [[gnu::noinline]] void save_replacement(const Value& value, Value replacement) {
    ++making_;
    if (replacement.is(Kind::object)) {
      save_object(value, replacement.as_object());
    } else {
      save_in_place(replacement);
      if (const std::uint32_t* index = memo_entry(replacement)) set_memo_entry(value, *index);
    }
    forget(std::move(replacement));
  }

  [[gnu::noinline]] void save_string(const Value& value) {
    const std::string& text = value.as_string();
    require_utf8(text);
    if (modern_ && text.size() < 256) {
      out_.op(Op::short_binunicode, static_cast<std::uint8_t>(text.size()), view(text));
    } else if (std::in_range<std::uint32_t>(text.size())) {
      out_.op(Op::binunicode, static_cast<std::uint32_t>(text.size()), view(text));
    } else if (modern_) {
      out_.op(Op::binunicode8, std::uint64_t{text.size()}, view(text));
    } else {
      throw Error(ErrorCode::limit, "a string of over 4 GiB in pickle protocol 2");
    }
    memoize(value);
  }

  [[gnu::noinline]] void save_bytes(const Value& value) {
    const auto& bytes = value.as_bytes();
    if (!modern_) {
      if (bytes.empty()) return save_call(value, "builtins", "bytes", Value::tuple());
      return save_call(value, "_codecs", "encode", Value::tuple({bytes_to_latin1(bytes), latin1_}));
    }
    if (bytes.size() < 256) {
      out_.op(Op::short_binbytes, static_cast<std::uint8_t>(bytes.size()), bytes);
    } else if (std::in_range<std::uint32_t>(bytes.size())) {
      out_.op(Op::binbytes, static_cast<std::uint32_t>(bytes.size()), bytes);
    } else {
      out_.op(Op::binbytes8, std::uint64_t{bytes.size()}, bytes);
    }
    memoize(value);
  }

  [[gnu::noinline]] void save_bytearray(const Value& value) {
    const auto& bytes = value.as_bytes();
    save_call(value, "builtins", "bytearray",
              bytes.empty() ? Value::tuple() : Value::tuple({Value::bytes(bytes)}));
  }

  [[gnu::noinline]] void save_complex(const Value& value) {
    const auto number = value.as_complex();
    save_call(value, "builtins", "complex",
              Value::tuple({Value(number.real()), Value(number.imag())}));
  }

  void save_tuple(const Value& value) {
    const auto& items = value.items();
    if (items.empty()) return out_.op(Op::empty_tuple);
    if (items.size() > 3) out_.op(Op::mark);
    for (const Value& item : items) save(item);
    constexpr std::array kShort = {Op::empty_tuple, Op::tuple1, Op::tuple2, Op::tuple3};
    out_.op(items.size() < kShort.size() ? kShort[items.size()] : Op::tuple);
    memoize(value);
  }

  void save_list(const Value& value) {
    const auto& items = value.items();
    out_.op(Op::empty_list);
    memoize(value);
    if (items.size() == 1) {
      save(items[0]);
      out_.op(Op::append);
      return;
    }
    for (std::size_t begin = 0; begin < items.size(); begin += kBatch) {
      out_.op(Op::mark);
      for (std::size_t i = begin; i < std::min(begin + kBatch, items.size()); ++i) save(items[i]);
      out_.op(Op::appends);
    }
  }

  void save_set(const Value& value) {
    const auto& items = value.items();
    const bool frozen = value.is(Kind::frozenset);
    if (!modern_) {
      return save_call(value, "builtins", frozen ? "frozenset" : "set",
                       Value::tuple({Value::list(items)}));
    }
    if (frozen) {
      out_.op(Op::mark);
      for (const Value& item : items) save(item);
      out_.op(Op::frozenset);
      return memoize(value);
    }
    out_.op(Op::empty_set);
    memoize(value);
    in_full_batches(items.size(), Op::additems, [&](std::size_t i) { save(items[i]); });
  }

  void save_dict(const Value& value) {
    const auto& pairs = value.pairs();
    if (value.dict_kind() == DictKind::dict) {
      out_.op(Op::empty_dict);
      memoize(value);
      if (pairs.size() == 1) {
        save_pair(pairs[0]);
        return out_.op(Op::setitem);
      }
      return in_full_batches(pairs.size(), Op::setitems,
                             [&](std::size_t i) { save_pair(pairs[i]); });
    }
    if (value.dict_kind() == DictKind::ordered_dict) {
      save_call(value, "collections", "OrderedDict", Value::tuple());
    } else {
      const Value* factory = value.default_factory();
      save_call(value, "collections", "defaultdict",
                factory == nullptr ? Value::tuple() : Value::tuple({*factory}));
    }
    save_iterated_pairs(pairs);
    if (const Value* state = value.container_state()) {
      save(*state);
      out_.op(Op::build);
    }
  }

  void save_pair(const Value::Pair& pair) {
    save(pair.first);
    save(pair.second);
  }

  // CPython goes on after a batch that is exactly full, and then writes an empty one.
  template <class Save>
  void in_full_batches(std::size_t count, Op end, const Save& save_one) {
    if (count == 0) return;
    std::size_t done = 0;
    std::size_t batch = 0;
    do {
      batch = std::min(kBatch, count - done);
      out_.op(Op::mark);
      for (std::size_t i = 0; i < batch; ++i) save_one(done++);
      out_.op(end);
    } while (batch == kBatch);
  }

  // What comes from an iterator has its own rule: a last batch of one has no mark.
  template <class Save>
  void in_iterated_batches(std::size_t count, Op one, Op many, const Save& save_one) {
    for (std::size_t done = 0; done < count;) {
      const std::size_t batch = std::min(kBatch, count - done);
      if (batch > 1) out_.op(Op::mark);
      for (std::size_t i = 0; i < batch; ++i) save_one(done++);
      out_.op(batch > 1 ? many : one);
    }
  }

  void save_iterated_pairs(const std::vector<Value::Pair>& pairs) {
    in_iterated_batches(pairs.size(), Op::setitem, Op::setitems,
                        [&](std::size_t i) { save_pair(pairs[i]); });
  }

  [[gnu::noinline]] void save_global(const Value& value) {
    if (modern_) {
      save(value.global_module_node());
      save(value.global_name_node());
      out_.op(Op::stack_global);
      return memoize(value);
    }
    std::string module = value.global_module();
    std::string name = value.global_name();
    if (const std::size_t dot = name.rfind('.'); dot != std::string::npos) {
      // A nested class is named through the class around it.
      return save_call(
          value, "builtins", "getattr",
          Value::tuple({Value::global(module, name.substr(0, dot)), name.substr(dot + 1)}));
    }
    to_python2(module, name);
    require_visible_ascii(module + name);
    out_.op(Op::global);
    out_.text(module + "\n" + name + "\n");
    memoize(value);
  }

  static void require_visible_ascii(const std::string& name) {
    const bool visible =
        std::ranges::all_of(name, [](unsigned char c) { return c >= 0x21 && c <= 0x7e; });
    if (!visible) throw Error(ErrorCode::unsupported, "a name that pickle protocol 2 cannot hold");
  }

  // `callable(*arguments)` in the place of `value`.
  [[gnu::noinline]] void save_call(const Value& value, const char* module, const char* name,
                                   Value arguments) {
    ++making_;
    save_object(value, {.callable = well_known(module, name), .arguments = arguments});
    forget(std::move(arguments));
  }

  void save_object(const Value& value, const Object& object) {
    save(object.callable);
    save(object.arguments);
    if (object.keywords) {
      if (!modern_) refuse_keywords();
      save(*object.keywords);
      out_.op(Op::newobj_ex);
    } else {
      out_.op(object.by_new ? Op::newobj : Op::reduce);
    }
    memoize(value);
    in_iterated_batches(object.list_items.size(), Op::append, Op::appends,
                        [&](std::size_t i) { save(object.list_items[i]); });
    save_iterated_pairs(object.dict_items);
    if (object.state) {
      save(*object.state);
      out_.op(Op::build);
    }
  }

  [[noreturn, gnu::noinline]] static void refuse_keywords() {
    throw Error(ErrorCode::unsupported, "keywords of a new object in pickle protocol 2");
  }

  // One node for each name that the writer itself mentions; modules are interned strings in Python.
  Value well_known(const char* module, const char* name) {
    Value& global = well_known_[{module, name}];
    if (global.is(Kind::none)) {
      Value& of_module = modules_[module];
      if (of_module.is(Kind::none)) of_module = Value(module);
      global = Value::global_of(of_module, Value(name));
    }
    return global;
  }

  // Ends `made`, a value that was made while writing, for which `making_` was counted up before it
  // was written. What ends leaves the memo, since a later value may get its identity; what others
  // hold stays alive for it. A value is memoized after those inside of it, and so ends before them.
  [[gnu::noinline]] void forget(Value made) {
    if (--making_ > 0) return;
    made = {};
    for (; !memoized_.empty(); memoized_.pop_back()) {
      Value& last = memoized_.back();
      if (last.is_shared()) {
        kept_.push_back(std::move(last));
      } else {
        by_identity_.erase(last.identity());
      }
    }
  }

  // Memo. Python has only one object for a class, so globals are known by their names too.
  const std::uint32_t* memo_entry(const Value& value) const {
    if (!value.is_shared() && !value.is(Kind::global)) return nullptr;
    const auto found = by_identity_.find(value.identity());
    if (found != by_identity_.end()) return &found->second;
    return value.is(Kind::global) ? named_entry(value) : nullptr;
  }

  const std::uint32_t* named_entry(const Value& global) const {
    const auto found = by_name_.find(full_name(global));
    return found == by_name_.end() ? nullptr : &found->second;
  }

  // A node that one place holds is met once: its place is in one that is met once, or known itself.
  void set_memo_entry(const Value& value, std::uint32_t index) {
    if (value.is(Kind::global)) by_name_[full_name(value)] = index;
    if (!value.is_shared()) return;
    by_identity_[value.identity()] = index;
    if (making_ > 0) memoized_.push_back(value);
  }

  static std::string full_name(const Value& global) {
    return global.global_module() + "\n" + global.global_name();
  }

  [[gnu::noinline]] bool recall(const Value& value) {
    const std::uint32_t* index = memo_entry(value);
    if (index == nullptr) return false;
    if (*index < 256) {
      out_.op(Op::binget, static_cast<std::uint8_t>(*index));
    } else {
      out_.op(Op::long_binget, *index);
    }
    return true;
  }

  [[gnu::noinline]] void memoize(const Value& value) {
    const std::uint32_t index = memo_size_++;
    set_memo_entry(value, index);
    if (modern_) {
      out_.op(Op::memoize);
    } else if (index < 256) {
      out_.op(Op::binput, static_cast<std::uint8_t>(index));
    } else {
      out_.op(Op::long_binput, index);
    }
  }

  const WriteOptions& options_;
  const bool modern_;
  Output out_;
  int depth_ = 0;
  std::uint32_t memo_size_ = 0;
  std::unordered_map<const void*, std::uint32_t> by_identity_;
  std::unordered_map<std::string, std::uint32_t> by_name_;
  std::map<std::pair<std::string_view, std::string_view>, Value> well_known_;
  std::map<std::string_view, Value> modules_;
  Value latin1_ = "latin1";
  int making_ = 0;               // values that were made while writing, one inside of the other
  std::vector<Value> memoized_;  // since the outermost of them
  std::vector<Value> kept_;      // values of memoized_ that others hold
};

}  // namespace

std::vector<std::byte> write(const Value& value, const WriteOptions& options) {
  return Writer(options).run(value);
}

}  // namespace tessera::pickle
