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
  if (is_sharded_tensor(tensor)) {
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

}  // namespace tessera::sharded
