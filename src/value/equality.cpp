#include "value/equality.h"

#include <algorithm>
#include <bit>
#include <set>
#include <span>
#include <unordered_map>

#include "base/digest.h"
#include "tessera/error.h"
#include "value/children.h"

namespace tessera {

// Hash and deep equality. Both stay cheap for values in which nodes are shared many times over.

namespace {

using Kind = Value::Kind;

constexpr int kHashedNodes = 64;     // a longer value is known by its beginning
constexpr int kHashedDictDepth = 2;  // and a deeper one by its outer layers
constexpr std::size_t kHashedPairs = 16;

class Hasher {
 public:
  explicit Hasher(int depth) : depth_(depth) {}

  std::size_t finish(const Value& value) {
    add(value);
    return hash_;
  }

 private:
  void mix(std::size_t more) {
    hash_ ^= more + 0x9e3779b97f4a7c15ULL + (hash_ << 6U) + (hash_ >> 2U);
  }

  void add(const Value& value) {
    if (left_-- <= 0) return;
    mix(static_cast<std::size_t>(value.kind()));
    if (is_container(value.kind())) {
      add_container(value);
    } else {
      add_leaf(value);
    }
  }

  void add_leaf(const Value& value) {
    switch (value.kind()) {
      case Kind::boolean:
        return mix(static_cast<std::size_t>(value.as_bool()));
      case Kind::integer:
        return add_integer(value.as_integer());
      case Kind::real:
        return mix(std::bit_cast<std::uint64_t>(value.as_real()));
      case Kind::complex:
        mix(std::bit_cast<std::uint64_t>(value.as_complex().real()));
        return mix(std::bit_cast<std::uint64_t>(value.as_complex().imag()));
      case Kind::string:
        return mix(hash_of(std::string_view(value.as_string())));
      case Kind::bytes:
      case Kind::bytearray:
        return add_bytes(value.as_bytes());
      case Kind::tensor:
        return mix(static_cast<std::size_t>(value.as_tensor().dtype));
      case Kind::global:
        mix(hash_of(std::string_view(value.global_module())));
        return mix(hash_of(std::string_view(value.global_name())));
      default:
        return;  // none
    }
  }

  void add_container(const Value& value) {
    switch (value.kind()) {
      case Kind::list:
      case Kind::tuple:
        return add_items(value.items());
      case Kind::dict:
        return add_dict(value);
      case Kind::object:
        return add_object(value.as_object());
      default:
        return mix(value.size());  // sets, whose order does not count
    }
  }

  void add_integer(const Integer& integer) {
    mix(static_cast<std::size_t>(integer.small));
    for (const std::byte byte : integer.big) mix(std::to_integer<std::size_t>(byte));
  }

  void add_bytes(const std::vector<std::byte>& bytes) {
    mix(hash_of({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
  }

  void add_items(const Value::List& items) {
    mix(items.size());
    for (const Value& item : items) {
      if (left_ <= 0) break;
      add(item);
    }
  }

  void add_object(const Object& object) {
    add(object.callable);
    add(object.arguments);
    if (object.state) add(*object.state);
  }

  // The order of a dict does not count: each pair is hashed by itself, from the same bound.
  void add_dict(const Value& dict) {
    mix(dict.size());
    if (depth_ >= kHashedDictDepth || dict.size() > kHashedPairs) return;
    std::size_t sum = 0;
    for (const auto& [key, value] : dict.pairs()) {
      Hasher pair(depth_ + 1);
      pair.add(key);
      pair.add(value);
      sum += pair.hash_;
    }
    mix(sum);
  }

  int depth_;
  int left_ = kHashedNodes;
  std::size_t hash_ = 0;
};

Shape strides_of(const Tensor& tensor) {
  const Piece& piece = tensor.pieces.front();
  if (!piece.strides.empty()) return piece.strides;
  const Box* box = std::get_if<Box>(&piece.slice);
  return box == nullptr ? Shape() : contiguous_strides(box->sizes);
}

// `elements`: they are compared elsewhere, and how they lie does not count.
bool same_tensor(const Tensor& a, const Tensor& b, bool elements) {
  if (a.dtype != b.dtype || a.shape != b.shape) return false;
  if (elements) return true;
  if (a.pieces.size() != 1 || b.pieces.size() != 1) return true;
  return strides_of(a) == strides_of(b);
}

// Compares two values node by node. Pairs of shared nodes that were compared before are not entered
// again, so the work is bounded by the nodes, not by the paths to them.
class Comparison {
 public:
  // `same`, if there is one, compares tensors' elements. It must outlive this.
  explicit Comparison(const SameElements* same) : same_(same) {}

  bool equal(const Value& a, const Value& b) {
    if (a.kind() != b.kind()) return false;
    if (a.identity() == b.identity()) return true;
    if (!is_container(a.kind())) return equal_leaves(a, b);
    if (seen(a, b)) return true;
    if (++levels_ > kMaxLevels) refuse_depth();
    const bool same = equal_containers(a, b);
    --levels_;
    return same;
  }

 private:
  [[noreturn, gnu::noinline]] static void refuse_depth() {
    throw Error(ErrorCode::limit, "values that are compared are nested deeper than " +
                                      std::to_string(kMaxLevels) + " levels");
  }

  // What a level needs of the stack stays small while the cases do not share one frame.
  [[gnu::noinline]] bool equal_leaves(const Value& a, const Value& b) const {
    switch (a.kind()) {
      case Kind::boolean:
        return a.as_bool() == b.as_bool();
      case Kind::integer:
        return a.as_integer() == b.as_integer();
      case Kind::real:
        return same_bits(a.as_real(), b.as_real());
      case Kind::complex:
        return same_bits(a.as_complex(), b.as_complex());
      case Kind::string:
        return a.as_string() == b.as_string();
      case Kind::bytes:
      case Kind::bytearray:
        return a.as_bytes() == b.as_bytes();
      case Kind::tensor:
        return equal_tensors(a.as_tensor(), b.as_tensor());
      case Kind::global:
        return equal_globals(a, b);
      default:
        return true;  // none
    }
  }

  static bool same_bits(double a, double b) {
    return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
  }

  static bool same_bits(std::complex<double> a, std::complex<double> b) {
    return same_bits(a.real(), b.real()) && same_bits(a.imag(), b.imag());
  }

  [[nodiscard]] bool equal_tensors(const Tensor& a, const Tensor& b) const {
    return same_tensor(a, b, same_ != nullptr) && (same_ == nullptr || (*same_)(a, b));
  }

  static bool equal_globals(const Value& a, const Value& b) {
    return a.global_module() == b.global_module() && a.global_name() == b.global_name();
  }

  // A pair that was seen is equal, or the comparison as a whole has ended or will end with false.
  bool seen(const Value& a, const Value& b) {
    return !seen_.emplace(a.identity(), b.identity()).second;
  }

  bool equal_containers(const Value& a, const Value& b) {
    switch (a.kind()) {
      case Kind::list:
      case Kind::tuple:
        return equal_lists(a.items(), b.items());
      case Kind::set:
      case Kind::frozenset:
        return equal_sets(a, b);
      case Kind::dict:
        return equal_dicts(a, b);
      default:
        return equal_objects(a.as_object(), b.as_object());
    }
  }

  bool equal_lists(const Value::List& a, const Value::List& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [this](const Value& x, const Value& y) { return equal(x, y); });
  }

  bool equal_pairs(const std::vector<Value::Pair>& a, const std::vector<Value::Pair>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [this](const auto& x, const auto& y) {
      return equal(x.first, y.first) && equal(x.second, y.second);
    });
  }

  [[gnu::noinline]] bool equal_sets(const Value& a, const Value& b) {
    if (a.size() != b.size()) return false;
    std::unordered_multimap<std::size_t, const Value*> rest;
    for (const Value& item : b.items()) rest.emplace(hash_of(item), &item);
    return std::all_of(a.items().begin(), a.items().end(), [&](const Value& item) {
      auto [first, last] = rest.equal_range(hash_of(item));
      // Each trial by itself: what differs in one of them may be equal elsewhere.
      const auto found = std::find_if(first, last, [&](const auto& other) {
        return Comparison(same_).equal(*other.second, item);
      });
      if (found == last) return false;
      rest.erase(found);
      return true;
    });
  }

  [[gnu::noinline]] bool equal_dicts(const Value& a, const Value& b) {
    if (a.dict_kind() != b.dict_kind() || a.size() != b.size() || !equal_extras(a, b)) return false;
    if (equal_keys(a.pairs(), b.pairs())) return equal_pairs(a.pairs(), b.pairs());
    return a.dict_kind() != DictKind::ordered_dict && equal_unordered(a.pairs(), b.pairs());
  }

  bool equal_extras(const Value& a, const Value& b) {
    return equal_options(a.container_state(), b.container_state()) &&
           equal_options(a.default_factory(), b.default_factory());
  }

  // `a` and `b` have equally many pairs, and one each for a key.
  [[gnu::noinline]] bool equal_unordered(const std::vector<Value::Pair>& a,
                                         const std::vector<Value::Pair>& b) {
    std::unordered_multimap<std::size_t, const Value::Pair*> others;
    for (const auto& pair : b) others.emplace(hash_of(pair.first), &pair);
    return std::ranges::all_of(a, [&](const Value::Pair& pair) {
      auto [first, last] = others.equal_range(hash_of(pair.first));
      const auto found = std::find_if(
          first, last, [&pair](const auto& other) { return other.second->first == pair.first; });
      return found != last && equal(pair.second, found->second->second);
    });
  }

  static bool equal_keys(const std::vector<Value::Pair>& a, const std::vector<Value::Pair>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const auto& x, const auto& y) { return x.first == y.first; });
  }

  bool equal_options(const Value* a, const Value* b) {
    if (a == nullptr || b == nullptr) return a == b;
    return equal(*a, *b);
  }

  bool equal_options(const std::optional<Value>& a, const std::optional<Value>& b) {
    return equal_options(a ? &*a : nullptr, b ? &*b : nullptr);
  }

  [[gnu::noinline]] bool equal_objects(const Object& a, const Object& b) {
    return a.by_new == b.by_new && equal(a.callable, b.callable) &&
           equal(a.arguments, b.arguments) && equal_options(a.keywords, b.keywords) &&
           equal_options(a.state, b.state) && equal_lists(a.list_items, b.list_items) &&
           equal_pairs(a.dict_items, b.dict_items);
  }

  const SameElements* same_;
  std::size_t levels_ = 0;  // on the way to the nodes that are compared now
  std::set<std::pair<const void*, const void*>> seen_;
};

}  // namespace

std::size_t hash_of(const Value& value) {
  if (value.is(Kind::string)) return hash_of(std::string_view(value.as_string()));
  return Hasher(0).finish(value);
}

bool operator==(const Value& a, const Value& b) {
  if (a.is(Kind::string) && b.is(Kind::string)) return a.as_string() == b.as_string();
  return Comparison(nullptr).equal(a, b);
}

bool equal_with_elements(const Value& a, const Value& b, const SameElements& same) {
  return Comparison(&same).equal(a, b);
}

namespace {

using Kind = Value::Kind;

class Digester {
 public:
  explicit Digester(const std::function<std::uint64_t(const Tensor&)>& of_elements)
      : of_elements_(of_elements) {}

  // Each node once, however many places share it.
  std::uint64_t of(const Value& value) {
    const auto known = known_.find(value.identity());
    if (known != known_.end()) return known->second;
    RunningDigest digest;
    add_number(digest, static_cast<std::uint64_t>(value.kind()));
    if (is_container(value.kind())) {
      add_container(digest, value);
    } else {
      add_leaf(digest, value);
    }
    if (value.is_shared()) known_.emplace(value.identity(), digest.value());
    return digest.value();
  }

 private:
  static void add_number(RunningDigest& digest, std::uint64_t number) {
    digest.add(std::as_bytes(std::span(&number, 1)));
  }
  static void add_text(RunningDigest& digest, std::string_view text) {
    add_number(digest, text.size());
    digest.add(std::as_bytes(std::span(text)));
  }
  static void add_real(RunningDigest& digest, double real) {
    add_number(digest, std::bit_cast<std::uint64_t>(real));
  }

  void add_leaf(RunningDigest& digest, const Value& value) {
    switch (value.kind()) {
      case Kind::boolean:
        return add_number(digest, value.as_bool() ? 1 : 0);
      case Kind::integer:
        add_number(digest, static_cast<std::uint64_t>(value.as_integer().small));
        return digest.add(value.as_integer().big);
      case Kind::real:
        return add_real(digest, value.as_real());
      case Kind::complex:
        add_real(digest, value.as_complex().real());
        return add_real(digest, value.as_complex().imag());
      case Kind::string:
        return add_text(digest, value.as_string());
      case Kind::bytes:
      case Kind::bytearray:
        return digest.add(value.as_bytes());
      case Kind::tensor:
        return add_tensor(digest, value.as_tensor());
      case Kind::global:
        add_text(digest, value.global_module());
        return add_text(digest, value.global_name());
      default:
        return;  // none
    }
  }

  void add_tensor(RunningDigest& digest, const Tensor& tensor) {
    add_number(digest, static_cast<std::uint64_t>(tensor.dtype));
    add_number(digest, tensor.shape.size());
    digest.add(std::as_bytes(std::span(tensor.shape)));
    add_number(digest, of_elements_(tensor));
    if (tensor.attributes) add_number(digest, of(*tensor.attributes));
  }

  void add_container(RunningDigest& digest, const Value& value) {
    if (value.is(Kind::dict)) {
      add_number(digest, sum_of(value.pairs()));
      add_number(digest, value.size());
    } else if (value.is(Kind::object)) {
      add_object(digest, value.as_object());
    } else if (value.is(Kind::list) || value.is(Kind::tuple)) {
      for (const Value& item : value.items()) add_number(digest, of(item));
    } else {
      std::uint64_t sum = 0;
      for (const Value& item : value.items()) sum += of(item);
      add_number(digest, sum);
    }
    const bool can_have_state = value.is(Kind::dict);
    const Value* state = can_have_state ? value.container_state() : nullptr;
    if (state != nullptr) add_number(digest, of(*state));
  }

  void add_object(RunningDigest& digest, const Object& object) {
    add_number(digest, of(object.callable));
    add_number(digest, of(object.arguments));
    add_number(digest, object.keywords ? of(*object.keywords) : 0);
    add_number(digest, object.state ? of(*object.state) : 0);
    for (const Value& item : object.list_items) add_number(digest, of(item));
    add_number(digest, sum_of(object.dict_items));
  }

  std::uint64_t sum_of(const std::vector<Value::Pair>& pairs) {
    std::uint64_t sum = 0;
    for (const auto& [key, value] : pairs) {
      RunningDigest pair;
      add_number(pair, of(key));
      add_number(pair, of(value));
      sum += pair.value();
    }
    return sum;
  }

  const std::function<std::uint64_t(const Tensor&)>& of_elements_;
  std::unordered_map<const void*, std::uint64_t> known_;  // of nodes that others share
};

}  // namespace

std::uint64_t digest_of(const Value& value,
                        const std::function<std::uint64_t(const Tensor&)>& of_elements) {
  require_walkable(value);
  return Digester(of_elements).of(value);
}

}  // namespace tessera
