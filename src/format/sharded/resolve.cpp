#include "base/one_of.h"
#include "format/sharded/attributes.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

void walk(Value& value, const Rank& rank);

// The tensor inside of a Parameter that is an object node because of what it is around.
const Value& inside_parameter(const Value& value) {
  if (!is_instance(value, "torch._utils", "_rebuild_parameter")) return value;
  const Value& arguments = value.as_object().arguments;
  return arguments.is(Kind::tuple) && arguments.size() >= 1 ? arguments.items()[0] : value;
}

void visit(Value& value, const Rank& rank) {
  const Value& tensor = inside_parameter(value);
  if (tensor.is(Kind::tensor) && tensor.as_tensor().sharded) {
    value = Value(tensor);  // a Rebuilder's
  } else if (is_sharded_tensor(tensor)) {
    value = Value(read_sharded_tensor(tensor, rank));
  } else if (is_dtensor(tensor)) {
    value = Value(read_dtensor(tensor, rank));
  } else {
    walk(value, rank);
  }
}

// An item of a dict, by its number.
void visit_item(Value& dict, std::size_t number, const Rank& rank) {
  const auto& [key, old] = dict.pairs()[number];
  Value item = old;
  try {
    visit(item, rank);
  } catch (Error& error) {
    throw error.at_key(printable(key_text(key)));
  }
  if (item.identity() != old.identity()) dict.set_item(key, std::move(item));
}

void walk(Value& value, const Rank& rank) {
  if (is_one_of(value.kind(), Kind::list, Kind::tuple)) {
    for (Value& item : value.items()) visit(item, rank);
  } else if (value.is(Kind::dict)) {
    for (std::size_t i = 0; i < value.size(); ++i) visit_item(value, i, rank);
  }
}

}  // namespace

void resolve(Value& tree, const Rank& rank) {
  visit(tree, rank);
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
