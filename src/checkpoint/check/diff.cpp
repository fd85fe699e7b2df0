#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "checkpoint/read/cast.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "tessera/error.h"
#include "tessera/verify.h"
#include "value/equality.h"
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

// Which elements of two tensors differ, and how much.
class Differences {
 public:
  explicit Differences(DType dtype)
      : dtype_(dtype), size_(size_of(dtype)), numeric_(can_cast(dtype, DType::float64)) {}

  // Element number i.
  void compare(const std::byte* x, const std::byte* y, std::int64_t i) {
    if (std::memcmp(x, y, size_) == 0) return;
    if (count_++ == 0) first_ = i;
    if (!numeric_) return;
    const double distance = std::abs(number(x) - number(y));
    if (!(distance <= largest_)) largest_ = distance;  // NaN is the largest of all
  }

  // Empty when there are none.
  [[nodiscard]] std::string text(std::int64_t elements) const {
    if (count_ == 0) return "";
    std::string text = std::to_string(count_) + " of " + std::to_string(elements) +
                       " elements differ, first at " + std::to_string(first_);
    if (numeric_) text += ", largest difference " + std::to_string(largest_);
    return text;
  }

 private:
  [[nodiscard]] double number(const std::byte* element) const {
    double value = 0;
    cast(dtype_, element, DType::float64, reinterpret_cast<std::byte*>(&value), 1);
    return value;
  }

  DType dtype_;
  std::size_t size_;
  bool numeric_;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  double largest_ = 0;
};

// What two tensors of one shape and dtype have against each other; empty: nothing, bit for bit.
std::string compare_elements(const Side& a, const Side& b, Meter& meter) {
  const Tensor& tensor = a.tensor;
  const std::size_t element = size_of(tensor.dtype);
  const std::int64_t count = numel(tensor.shape);
  const std::int64_t step =
      std::min(kWindow / static_cast<std::int64_t>(element), std::max<std::int64_t>(count, 1));
  const Slice all = whole(tensor.shape);
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
  return differences.text(count);
}

std::optional<Difference> compare(const Leaf& a, const Leaf& b, StorageChecks& checks_a,
                                  StorageChecks& checks_b, Meter& meter) {
  using Kind = Difference::Kind;
  const auto compare_tensors = [&](const Tensor& x, const Tensor& y) {
    return compare_elements({x, a.name, checks_a}, {y, b.name, checks_b}, meter);
  };
  const bool tensors = a.value.is(Value::Kind::tensor) && b.value.is(Value::Kind::tensor);
  if (!tensors) {
    // Tuples and objects may hold tensors.
    std::string text;
    const bool equal = equal_with_elements(a.value, b.value, [&](const Tensor& x, const Tensor& y) {
      text = compare_tensors(x, y);
      return text.empty();
    });
    if (equal) return std::nullopt;
    if (!text.empty()) return Difference{Kind::value, a.name, "a tensor in it: " + text};
    const Kind kind = a.value.kind() == b.value.kind() ? Kind::value : Kind::type;
    return Difference{kind, a.name, render(a.value) + " / " + render(b.value)};
  }
  const Tensor& x = a.value.as_tensor();
  const Tensor& y = b.value.as_tensor();
  if (x.shape != y.shape) {
    return Difference{Kind::shape, a.name, to_string(x.shape) + " / " + to_string(y.shape)};
  }
  if (x.dtype != y.dtype) {
    return Difference{Kind::dtype, a.name,
                      std::string(to_string(x.dtype)) + " / " + std::string(to_string(y.dtype))};
  }
  const std::string text = compare_tensors(x, y);
  if (text.empty()) return std::nullopt;
  return Difference{Kind::value, a.name, text};
}

std::string described(const Container* container) {
  const DictKind kind = container == nullptr ? DictKind::dict : container->kind;
  std::string text(type_name(kind));
  if (container != nullptr && container->default_factory)
    text += "(" + render(*container->default_factory) + ")";
  if (container != nullptr && container->state) text += " with " + render(*container->state);
  return text;
}

std::string described(const PathPart& part) {
  if (const auto* index = std::get_if<std::int64_t>(&part))
    return "index " + std::to_string(*index);
  const auto* odd = std::get_if<DictKey>(&part);
  return "key " + render(odd != nullptr ? odd->key : Value(std::get<std::string>(part)));
}

std::string described(const Tensor& tensor) {
  return std::string(tensor.parameter ? "Parameter" : "Tensor") +
         (tensor.requires_grad ? " that requires grad" : "");
}

const Container* container_at(const Leaf& leaf, std::size_t step) {
  const bool there = leaf.containers && step < leaf.containers->size();
  return there ? (*leaf.containers)[step].get() : nullptr;
}

bool same_container(const Container* x, const Container* y) {
  return x == y || (x != nullptr && y != nullptr && *x == *y);
}

// What differs in the types of two leaves of one name and of the dicts around them. Dicts and keys
// that `known` has been told of are passed over.
void compare_types(const Leaf& a, const Leaf& b, std::set<std::string>& known,
                   std::vector<Difference>& differences) {
  const auto differ = [&](std::string name, const std::string& x, const std::string& y) {
    const std::string text = x + " / " + y;
    if (x != y && known.insert(name + '\0' + text).second)
      differences.push_back({Difference::Kind::type, std::move(name), text});
  };
  if (a.path.size() == b.path.size()) {
    Path way;
    for (std::size_t step = 0; step < a.path.size(); ++step) {
      const Container* x = container_at(a, step);
      const Container* y = container_at(b, step);
      if (!same_container(x, y)) differ(dotted(way), described(x), described(y));
      way.push_back(a.path[step]);
      if (a.path[step] != b.path[step])
        differ(dotted(way), described(a.path[step]), described(b.path[step]));
    }
  }
  if (a.value.is(Value::Kind::tensor) && b.value.is(Value::Kind::tensor))
    differ(a.name, described(a.value.as_tensor()), described(b.value.as_tensor()));
}

}  // namespace

std::string_view to_string(Difference::Kind kind) noexcept {
  constexpr std::array<std::string_view, 6> kNames{"missing", "extra", "shape",
                                                   "dtype",   "value", "type"};
  return kNames[static_cast<std::size_t>(kind)];
}

std::vector<Difference> diff(const Checkpoint& a, const Checkpoint& b,
                             const ProgressHook& progress) {
  std::map<std::string, const Leaf*> in_a;
  std::map<std::string, const Leaf*> in_b;
  for (const Leaf& leaf : a.leaves) in_a.emplace(leaf.name, &leaf);
  for (const Leaf& leaf : b.leaves) in_b.emplace(leaf.name, &leaf);
  Meter meter(progress, tensor_bytes(a.leaves));
  StorageChecks checks_a;
  StorageChecks checks_b;
  std::vector<Difference> differences;
  std::set<std::string> known_types;
  for (const auto& [name, leaf] : in_a) {
    const auto other = in_b.find(name);
    if (other == in_b.end()) {
      differences.push_back({Difference::Kind::missing, name, "only in " + a.path});
    } else if (auto difference = compare(*leaf, *other->second, checks_a, checks_b, meter)) {
      differences.push_back(std::move(*difference));
    } else if (a.has_types && b.has_types) {
      compare_types(*leaf, *other->second, known_types, differences);
    }
  }
  for (const auto& [name, leaf] : in_b) {
    if (!in_a.contains(name))
      differences.push_back({Difference::Kind::extra, name, "only in " + b.path});
  }
  checks_a.read_rest(1);
  checks_b.read_rest(1);
  meter.finish();
  return differences;
}

}  // namespace tessera
