#include "checkpoint/read/slices.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/read/reader.h"
#include "checkpoint/read/select.h"
#include "checkpoint/read/storage_checks.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr const char* kForm = "slices are begin:end, one a dimension, as [0:2,-1,3:]";

[[noreturn]] void refuse_slices(const std::string& slices, const std::string& why) {
  throw Error(ErrorCode::invalid_argument, "the slice " + printable(slices, 100) + " " + why);
}

std::optional<std::int64_t> index_in(std::string_view text, const std::string& slices) {
  if (text.empty()) return std::nullopt;
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::result_out_of_range) refuse_slices(slices, "has a number beyond 64 bits");
  if (error != std::errc() || end != text.data() + text.size())
    refuse_slices(slices, "is not of numbers and begin:end, one a dimension, as [0:2,-1,3:]");
  return value;
}

// One range of the slices, in a dimension of a shape.
struct RangeText {
  std::string_view text;
  const std::string& slices;
  const Shape& shape;
  std::size_t dimension;
  Outside outside;

  [[noreturn]] void refuse_outside(const std::string& what) const {
    refuse_slices(slices, "has " + what + " outside of " + to_string(shape));
  }

  // Python's meaning: negative numbers count from the end, what leaves the tensor is cut.
  [[nodiscard]] std::int64_t bound(std::string_view of, std::int64_t otherwise) const {
    const std::optional<std::int64_t> index = index_in(of, slices);
    if (!index) return otherwise;
    const std::int64_t size = shape[dimension];
    if (outside == Outside::refuse && (*index > size || *index < -size)) refuse_outside("a range");
    if (*index < 0) return *index < -size ? 0 : *index + size;
    return std::min(*index, size);
  }

  [[nodiscard]] FlatRange range() const {
    const std::size_t colon = text.find(':');
    if (colon != std::string_view::npos && text.find(':', colon + 1) != std::string_view::npos)
      refuse_slices(slices, std::string("has a step; ") + kForm);
    if (colon != std::string_view::npos)
      return {bound(text.substr(0, colon), 0), bound(text.substr(colon + 1), shape[dimension])};
    const auto index = index_in(text, slices);
    if (!index || *index >= shape[dimension] || *index < -shape[dimension])
      refuse_outside("an index");
    const std::int64_t begin = bound(text, 0);
    return {begin, begin + 1};
  }
};

}  // namespace

Box box_of(const std::string& slices, const Shape& shape, Outside outside) {
  Box box = whole(shape);
  std::string_view rest = slices;
  if (rest.empty()) return box;
  rest = rest.substr(1, rest.size() - 2);
  if (rest.empty()) refuse_slices(slices, std::string("is empty; ") + kForm);
  for (std::size_t d = 0; !rest.empty(); ++d) {
    if (d == shape.size()) refuse_slices(slices, "has more dimensions than " + to_string(shape));
    const std::size_t comma = std::min(rest.find(','), rest.size());
    const FlatRange range = RangeText{rest.substr(0, comma), slices, shape, d, outside}.range();
    box.offsets[d] = range.begin;
    box.sizes[d] = std::max<std::int64_t>(0, range.end - range.begin);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return box;
}

namespace {

// A part of a tensor, whose elements are read when somebody asks for them.
class SlicedTensor {
 public:
  SlicedTensor(const Leaf& leaf, Box box)
      : tensor_(leaf.value),
        box_(std::move(box)),
        count_(numel(box_.sizes)),
        reader_(tensor_.as_tensor(), leaf.name) {}

  void read(const FlatRange& elements, MutableByteView out) {
    const std::lock_guard lock(mutex_);
    reader_.read(box_, elements.begin, elements.end - elements.begin, out.data());
    if (elements.end != count_) return;
    reader_.hand_over(checks_);
    checks_.read_rest(1);
  }

 private:
  Value tensor_;
  Box box_;
  std::int64_t count_;
  std::mutex mutex_;  // guards what follows
  TensorReader reader_;
  StorageChecks checks_;
};

struct SliceRule {
  std::string name, slices;
};

SliceRule slice_rule(const std::string& text) {
  const std::size_t open = text.rfind('[');
  if (open != 0 && open != std::string::npos && text.ends_with(']'))
    return {text.substr(0, open), text.substr(open)};
  throw Error(ErrorCode::invalid_argument,
              "the rule '" + printable(text, 200) + "' is not NAME[BEGIN:END]");
}

Leaf& leaf_to_slice(std::vector<Leaf>& leaves, const std::string& name, const std::string& path) {
  const auto named = [&leaves](const std::string& wanted) {
    return std::ranges::find(leaves, wanted, &Leaf::name);
  };
  const auto printed = printed_name(name);
  auto found = printed ? named(*printed) : leaves.end();
  if (found == leaves.end()) found = named(name);
  if (found == leaves.end()) refuse_key(name, leaves, path);
  if (!found->value.is(Value::Kind::tensor))
    throw Error(ErrorCode::mismatch, "only a tensor has slices").at_key(name);
  return *found;
}

Tensor sliced(const Leaf& leaf, const Box& box) {
  const Tensor& whole = leaf.value.as_tensor();
  const auto part = std::make_shared<SlicedTensor>(leaf, box);
  Tensor made = computed_tensor(
      whole.dtype, box.sizes,
      [part](const FlatRange& elements, MutableByteView out) { part->read(elements, out); });
  made.parameter = whole.parameter;
  made.requires_grad = whole.requires_grad;
  return made;
}

}  // namespace

void slice(std::vector<Leaf>& leaves, const std::vector<std::string>& rules,
           const std::string& path) {
  std::set<std::string> known;
  for (const std::string& text : rules) {
    const SliceRule rule = slice_rule(text);
    Leaf& leaf = leaf_to_slice(leaves, rule.name, path);
    try {
      if (!known.insert(leaf.name).second)
        throw Error(ErrorCode::invalid_argument, "the tensor has a second slice");
      const Box box = box_of(rule.slices, leaf.value.as_tensor().shape, Outside::refuse);
      if (numel(box.sizes) == 0) refuse_slices(rule.slices, "has no elements");
      leaf.value = Value(sliced(leaf, box));
    } catch (Error& error) {
      throw error.at_key(leaf.name).at_path(path);
    }
  }
}

}  // namespace tessera
