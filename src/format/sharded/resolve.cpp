#include <algorithm>

#include "base/text.h"
#include "format/sharded/attributes.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

// The replacement of a value; none: its items are looked at. Parameters are looked into.
using Replace = std::function<std::optional<Value>(const Value& tensor)>;

void walk(Value& value, const Replace& replace);

// The tensor inside of a Parameter that is an object node because of what it is around.
const Value& inside_parameter(const Value& value) {
  if (!is_instance(value, "torch._utils", "_rebuild_parameter")) return value;
  const Value& arguments = value.as_object().arguments;
  return arguments.is(Kind::tuple) && arguments.size() >= 1 ? arguments.items()[0] : value;
}

void visit(Value& value, const Replace& replace) {
  if (std::optional<Value> other = replace(inside_parameter(value))) {
    value = std::move(*other);
  } else {
    walk(value, replace);
  }
}

// An item of a dict, by its number.
void visit_item(Value& dict, std::size_t number, const Replace& replace) {
  const auto& [key, old] = dict.pairs()[number];
  Value item = old;
  try {
    visit(item, replace);
  } catch (Error& error) {
    throw error.at_key(printable(key_text(key)));
  }
  if (item.identity() != old.identity()) dict.set_item(key, std::move(item));
}

void walk(Value& value, const Replace& replace) {
  if (is_one_of(value.kind(), Kind::list, Kind::tuple)) {
    for (Value& item : value.items()) visit(item, replace);
  } else if (value.is(Kind::dict)) {
    for (std::size_t i = 0; i < value.size(); ++i) visit_item(value, i, replace);
  }
}

// None: the value is no such tensor, or of a form that is not known.
std::optional<Local> local_of(const Value& value) {
  try {
    if (is_sharded_tensor(value)) return local_of_sharded_tensor(value);
    if (is_dtensor(value)) return local_of_dtensor(value);
  } catch (const Error&) {
    return std::nullopt;
  }
  return std::nullopt;
}

bool is_part(const Local& local) {
  std::int64_t held = 0;
  for (const Value& tensor : local.tensors)
    held += tensor.is(Kind::tensor) ? numel(tensor.as_tensor().shape) : 0;
  return held < numel(local.whole);
}

}  // namespace

void resolve(Value& tree, const Rank& rank) {
  visit(tree, [&rank](const Value& tensor) -> std::optional<Value> {
    if (tensor.is(Kind::tensor) && tensor.as_tensor().sharded) return tensor;  // a Rebuilder's
    if (is_sharded_tensor(tensor)) return Value(read_sharded_tensor(tensor, rank));
    if (is_dtensor(tensor)) return Value(read_dtensor(tensor, rank));
    return std::nullopt;
  });
}

std::optional<Shape> partly_held(const Value& tree) {
  if (const auto local = local_of(inside_parameter(tree)))
    return is_part(*local) ? std::optional(local->whole) : std::nullopt;
  std::optional<Shape> found;
  const auto look = [&found](const Value& value) { found = found ? found : partly_held(value); };
  if (is_one_of(tree.kind(), Kind::list, Kind::tuple)) {
    std::ranges::for_each(tree.items(), look);
  } else if (tree.is(Kind::dict)) {
    std::ranges::for_each(tree.pairs(), look, &Value::Pair::second);
  }
  return found;
}

void keep_local(Value& tree) {
  visit(tree, [](const Value& tensor) -> std::optional<Value> {
    std::optional<Local> local = local_of(tensor);
    if (!local) return std::nullopt;
    return local->tensors.size() == 1 ? local->tensors.front() : Value::list(local->tensors);
  });
}

bool Rebuilder::operator()(const Value& callable, const Value& arguments, Value& result) {
  if (!is_global(callable, "torch._tensor", "_rebuild_from_type_v2")) return false;
  const Value made = Value::object({.callable = callable, .arguments = arguments});
  try {
    const bool is_sharded = is_sharded_tensor(made);
    if (!is_sharded && !is_dtensor(made)) return false;
    const std::optional<int> world = world_of(made);
    result = Value(is_sharded ? read_sharded_tensor(made, rank_) : read_dtensor(made, rank_));
    if (!any_) world_ = world;
    any_ = true;
  } catch (const Error&) {
    return false;
  }
  return true;
}

}  // namespace tessera::sharded
