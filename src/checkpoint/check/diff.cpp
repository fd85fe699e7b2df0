#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <span>

#include "base/text.h"
#include "checkpoint/read/cast.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "tessera/numpy_array.h"
#include "tessera/verify.h"
#include "value/children.h"
#include "value/equality.h"
#include "value/meaning.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::int64_t kWindow = 1 << 20;  // bytes compared at once

// A tensor of one of the two checkpoints.
struct Side {
  const Tensor& tensor;
  const std::string& name;
  StorageChecks& checks;
};

using Elements = Difference::Elements;

// An integer of `size` bytes, sign-extended.
std::uint64_t integer_at(const std::byte* element, std::size_t size, bool is_signed) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, size);
  const std::size_t unused = 64 - 8 * size;
  bits <<= unused;
  return is_signed ? static_cast<std::uint64_t>(static_cast<std::int64_t>(bits) >> unused)
                   : bits >> unused;
}

// The elements in which two tensors differ, and how much.
class Differences {
 public:
  explicit Differences(DType dtype)
      : dtype_(dtype),
        size_(size_of(dtype)),
        is_numeric_(can_cast(dtype, DType::float64)),
        is_integer_(is_numeric_ && !info(dtype).floating),
        is_signed_(is_one_of(dtype, DType::int8, DType::int16, DType::int32, DType::int64)) {}

  // Element number i.
  void compare(const std::byte* x, const std::byte* y, std::int64_t i) {
    if (std::memcmp(x, y, size_) == 0) return;
    if (count_++ == 0) first_ = i;
    if (is_integer_) {
      largest_integer_ = std::max(largest_integer_, distance(x, y));
    } else if (is_numeric_) {
      const double distance = std::abs(number(x) - number(y));
      // NaN is the largest of all.
      if (!std::isnan(largest_) && !(distance <= largest_)) largest_ = distance;
    }
  }

  // None: there are no differences.
  [[nodiscard]] std::optional<Elements> found(const Shape& shape) const {
    if (count_ == 0) return std::nullopt;
    Elements made{.different = count_, .all = numel(shape), .first = index_at(shape, first_)};
    if (is_integer_) made.largest = Value(largest_integer_);
    if (is_numeric_ && !is_integer_) made.largest = Value(largest_);
    return made;
  }

 private:
  [[nodiscard]] std::uint64_t distance(const std::byte* x, const std::byte* y) const {
    const std::uint64_t a = integer_at(x, size_, is_signed_);
    const std::uint64_t b = integer_at(y, size_, is_signed_);
    const bool is_less =
        is_signed_ ? static_cast<std::int64_t>(a) < static_cast<std::int64_t>(b) : a < b;
    return is_less ? b - a : a - b;
  }
  [[nodiscard]] double number(const std::byte* element) const {
    double value = 0;
    cast(dtype_, element, DType::float64, reinterpret_cast<std::byte*>(&value), 1);
    return value;
  }

  DType dtype_;
  std::size_t size_;
  bool is_numeric_, is_integer_, is_signed_;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  std::uint64_t largest_integer_ = 0;
  double largest_ = 0;
};

// Reals as "%g" writes them: nobody looks for the seventeenth digit.
std::string text_of(const Value& number) {
  if (!number.is(Value::Kind::real)) return render(number);
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", number.as_real());
  return text.data();
}

std::string text_of(const Elements& elements) {
  std::string text = std::to_string(elements.different) + " of " + std::to_string(elements.all) +
                     " elements differ, first at " + to_string(elements.first);
  if (!elements.largest) return text;
  const bool is_zero = elements.largest->is(Value::Kind::real) && elements.largest->as_real() == 0;
  return text + (is_zero ? ", equal as numbers: 0.0 and -0.0"
                         : ", largest difference " + text_of(*elements.largest));
}

// Elements that are looked at together.
std::int64_t step_of(DType dtype, std::int64_t count) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  return std::min(kWindow / element, std::max<std::int64_t>(count, 1));
}

// The difference of two tensors of one dtype in the box of `shape` that both begin with; none, if
// they are equal there bit for bit.
std::optional<Elements> compare_elements(const Side& a, const Side& b, const Shape& shape,
                                         Meter& meter) {
  const Tensor& tensor = a.tensor;
  const std::size_t element = size_of(tensor.dtype);
  const std::int64_t count = numel(shape);
  const std::int64_t step = step_of(tensor.dtype, count);
  const Slice all = whole(shape);
  TensorReader reader_a(tensor, a.name);
  TensorReader reader_b(b.tensor, b.name);
  std::vector<std::byte> bytes_a(static_cast<std::size_t>(step) * element);
  std::vector<std::byte> bytes_b(bytes_a.size());
  Differences differences(tensor.dtype);
  for (std::int64_t begin = 0; begin < count; begin += step) {
    const std::int64_t part = std::min(step, count - begin);
    const std::size_t size = static_cast<std::size_t>(part) * element;
    reader_a.read(all, begin, part, bytes_a.data());
    reader_b.read(all, begin, part, bytes_b.data());
    meter.add(size);
    if (std::memcmp(bytes_a.data(), bytes_b.data(), size) == 0) continue;
    for (std::int64_t i = 0; i < part; ++i) {
      const auto at = static_cast<std::size_t>(i) * element;
      differences.compare(&bytes_a[at], &bytes_b[at], begin + i);
    }
  }
  reader_a.hand_over(a.checks);
  reader_b.hand_over(b.checks);
  return differences.found(shape);
}

// Whether all bits of a tensor are zero from row `first` on.
bool is_zero_from(const Side& side, std::int64_t first) {
  Box rest = whole(side.tensor.shape);
  rest.offsets[0] = first;
  rest.sizes[0] -= first;
  const std::int64_t count = numel(rest.sizes);
  const std::int64_t step = step_of(side.tensor.dtype, count);
  TensorReader reader(side.tensor, side.name);
  std::vector<std::byte> bytes(static_cast<std::size_t>(step) * size_of(side.tensor.dtype));
  bool is_zero = true;
  for (std::int64_t begin = 0; begin < count && is_zero; begin += step) {
    const std::int64_t part = std::min(step, count - begin);
    reader.read(rest, begin, part, bytes.data());
    const auto read =
        std::span(bytes).first(static_cast<std::size_t>(part) * size_of(side.tensor.dtype));
    is_zero = std::ranges::all_of(read, [](std::byte byte) { return byte == std::byte{0}; });
  }
  reader.hand_over(side.checks);
  return is_zero;
}

// Whether the first dimension alone differs.
bool differ_in_rows(const Tensor& x, const Tensor& y) {
  return x.dtype == y.dtype && !x.shape.empty() && x.shape.size() == y.shape.size() &&
         std::equal(x.shape.begin() + 1, x.shape.end(), y.shape.begin() + 1);
}

std::string text_of(const Difference::Rows& rows, const std::optional<Elements>& elements) {
  if (rows.common == 0) return rows.is_zero_behind ? ": all is zero" : "";
  const bool one = rows.common == 1;
  const std::string common = "the first " + std::to_string(rows.common) + (one ? " row" : " rows");
  const std::string found = elements ? "of " + common + " " + text_of(*elements)
                                     : common + (one ? " is equal" : " are equal");
  return ": " + found + (rows.is_zero_behind ? ", the rest is zero" : ", the rest is not zero");
}

bool are_tensors(const Leaf& a, const Leaf& b) {
  return a.value.is(Value::Kind::tensor) && b.value.is(Value::Kind::tensor);
}

// Null: a plain dict.
std::string described(const Container* container) {
  const Container shown = container == nullptr ? Container() : *container;
  std::string text(type_name(shown.kind));
  if (shown.default_factory) text += "(" + render(*shown.default_factory) + ")";
  if (shown.state) text += " with " + render(*shown.state);
  return text;
}

std::string described(const PathPart& part) {
  const std::optional<Value> key = key_of_step(part);
  return key ? "key " + render(*key) : "index " + step_text(part);
}

std::string described(const Tensor& tensor) {
  return std::string(tensor.parameter ? "Parameter" : "Tensor") +
         (tensor.requires_grad ? " that requires grad" : "");
}

// What two values are that differ, as far as a line can show it.
std::string texts_of(const Value& a, const Value& b) {
  const std::string short_a = render(a), short_b = render(b);
  if (short_a != short_b) return short_a + " / " + short_b;
  constexpr std::size_t kMost = 1 << 20;  // bytes
  constexpr std::size_t kBefore = 20;     // in front of what differs
  const std::string x = render(a, kMost), y = render(b, kMost);
  if (x == y) return "both look like " + short_a + ", and differ in what that does not show";
  std::size_t at = static_cast<std::size_t>(std::ranges::mismatch(x, y).in1 - x.begin());
  at -= std::min(at, kBefore);
  while (at > 0 && (x[at] & 0xc0) == 0x80) --at;  // not in the middle of a letter
  const auto from = [at](const std::string& text) {
    return "..." + printable(std::string_view(text).substr(at), 100);
  };
  return from(x) + " / " + from(y);
}

bool same_container(const Container* x, const Container* y) {
  return x == y || (x != nullptr && y != nullptr && *x == *y);
}

using LeafByName = std::map<std::string, const Leaf*>;

LeafByName leaves_by_name(const Checkpoint& checkpoint) {
  LeafByName leaves;
  for (const Leaf& leaf : checkpoint.leaves) leaves.emplace(leaf.name, &leaf);
  return leaves;
}

// The comparison of two checkpoints, which must outlive it.
class Diff {
 public:
  Diff(const Checkpoint& a, const Checkpoint& b, const ProgressHook& progress)
      : a_(a), b_(b), meter_(progress, tensor_bytes(a.leaves)) {}

  std::vector<Difference> run() {
    const LeafByName in_a = leaves_by_name(a_);
    const LeafByName in_b = leaves_by_name(b_);
    for (const auto& [name, leaf] : in_a) compare_with(in_b, *leaf);
    for (const auto& [name, leaf] : in_b) {
      if (!in_a.contains(name)) add(Kind::extra, name, "only in " + b_.path);
    }
    checks_a_.read_rest(1);
    checks_b_.read_rest(1);
    meter_.finish();
    return std::move(differences_);
  }

 private:
  using Kind = Difference::Kind;

  void add(Kind kind, const std::string& name, std::string text) {
    differences_.push_back({kind, name, std::move(text), {}, {}});
  }

  // `leaf` is one of the first checkpoint's.
  void compare_with(const LeafByName& in_b, const Leaf& leaf) {
    const auto other = in_b.find(leaf.name);
    if (other == in_b.end()) return add(Kind::missing, leaf.name, "only in " + a_.path);
    const std::size_t before = differences_.size();
    if (are_tensors(leaf, *other->second)) {
      compare_tensors(leaf, leaf.value.as_tensor(), *other->second,
                      other->second->value.as_tensor());
    } else {
      compare_values(leaf, *other->second);
    }
    const bool equal = differences_.size() == before;
    if (equal && a_.has_types && b_.has_types) compare_types(leaf, *other->second);
  }

  void compare_tensors(const Leaf& a, const Tensor& x, const Leaf& b, const Tensor& y) {
    if (x.shape != y.shape) return add_shapes(a, x, b, y);
    if (x.dtype != y.dtype) {
      return add(Kind::dtype, a.name,
                 std::string(to_string(x.dtype)) + " / " + std::string(to_string(y.dtype)));
    }
    if (const auto elements = differing_elements(a, x, b, y))
      differences_.push_back({Kind::value, a.name, text_of(*elements), elements, {}});
  }

  void add_shapes(const Leaf& a, const Tensor& x, const Leaf& b, const Tensor& y) {
    const std::string shapes = to_string(x.shape) + " / " + to_string(y.shape);
    if (!differ_in_rows(x, y)) return add(Kind::shape, a.name, shapes);
    const Side one{x, a.name, checks_a_}, other{y, b.name, checks_b_};
    const bool is_longer = x.shape[0] > y.shape[0];
    const Tensor& shorter = is_longer ? y : x;
    const auto elements = compare_elements(one, other, shorter.shape, meter_);
    const Difference::Rows rows{
        .common = shorter.shape[0],
        .different = elements ? elements->different : 0,
        .is_zero_behind = is_zero_from(is_longer ? one : other, shorter.shape[0])};
    differences_.push_back({Kind::shape, a.name, shapes + text_of(rows, elements), {}, rows});
  }

  // Tuples and objects may hold tensors. Arrays of numpy are compared as tensors are.
  void compare_values(const Leaf& a, const Leaf& b) {
    std::optional<Elements> elements;
    const SameElements same = [&](const Tensor& x, const Tensor& y) {
      elements = differing_elements(a, x, b, y);
      return !elements;
    };
    if (equal_with_elements(a.value, b.value, same)) return;
    const auto x = numpy_array(a.value), y = numpy_array(b.value);
    if (x && y && !x->is_scalar && !y->is_scalar)
      return compare_tensors(a, x->tensor, b, y->tensor);
    // One meaning may have been pickled in several ways.
    elements.reset();
    if (equal_with_elements(meaning_of(a.value), meaning_of(b.value), same)) return;
    if (elements) return add(Kind::value, a.name, "a tensor or array in it: " + text_of(*elements));
    const Kind kind = a.value.kind() == b.value.kind() ? Kind::value : Kind::type;
    add(kind, a.name, texts_of(a.value, b.value));
  }

  // The difference of the leaves' tensors x and y, which have one shape and dtype.
  std::optional<Elements> differing_elements(const Leaf& a, const Tensor& x, const Leaf& b,
                                             const Tensor& y) {
    return compare_elements({x, a.name, checks_a_}, {y, b.name, checks_b_}, x.shape, meter_);
  }

  // Compares the types of two leaves of one name and of the dicts around them. Dicts and keys that
  // were told of before are passed over.
  void compare_types(const Leaf& a, const Leaf& b) {
    if (a.path.size() == b.path.size()) compare_ways(a, b);
    if (are_tensors(a, b))
      add_type(a.name, described(a.value.as_tensor()), described(b.value.as_tensor()));
  }

  void compare_ways(const Leaf& a, const Leaf& b) {
    Path way;
    for (std::size_t step = 0; step < a.path.size(); ++step) {
      const Container* x = container_at(a, step);
      const Container* y = container_at(b, step);
      if (!same_container(x, y)) add_type(dotted(way), described(x), described(y));
      way.push_back(a.path[step]);
      if (a.path[step] != b.path[step])
        add_type(dotted(way), described(a.path[step]), described(b.path[step]));
    }
  }

  void add_type(const std::string& name, const std::string& x, const std::string& y) {
    const std::string text = x + " / " + y;
    if (x != y && known_types_.insert(name + '\0' + text).second) add(Kind::type, name, text);
  }

  const Checkpoint& a_;
  const Checkpoint& b_;
  Meter meter_;
  StorageChecks checks_a_;
  StorageChecks checks_b_;
  std::vector<Difference> differences_;
  std::set<std::string> known_types_;  // differences that were told of
};

}  // namespace

std::string_view to_string(Difference::Kind kind) noexcept {
  constexpr std::array<std::string_view, 6> kNames{"missing", "extra", "shape",
                                                   "dtype",   "value", "type"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::vector<Difference> diff(const Checkpoint& a, const Checkpoint& b,
                             const ProgressHook& progress) {
  a.require_files();
  b.require_files();
  return Diff(a, b, progress).run();
}

}  // namespace tessera
