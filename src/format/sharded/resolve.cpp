#include "format/sharded/attributes.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera::sharded {
namespace {

using Kind = Value::Kind;

void walk(Value& value, const Rank& rank);

// The tensor inside of a Parameter that is an object node because of what it is around.
const Value& inside_parameter(const Value& value) {
  const bool parameter =
      value.is(Kind::object) && value.as_object().arguments.is(Kind::tuple) &&
      value.as_object().arguments.size() >= 1 &&
      is_global(value.as_object().callable, "torch._utils", "_rebuild_parameter");
  return parameter ? value.as_object().arguments.items()[0] : value;
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

void walk(Value& value, const Rank& rank) {
  if (value.is(Kind::list) || value.is(Kind::tuple)) {
    for (Value& item : value.items()) visit(item, rank);
  } else if (value.is(Kind::dict)) {
    for (std::size_t i = 0; i < value.size(); ++i) {
      const auto& [key, old] = value.pairs()[i];
      Value item = old;
      try {
        visit(item, rank);
      } catch (Error& error) {
        throw error.at_key(printable(key_text(key)));
      }
      if (item.identity() != old.identity()) value.set_item(key, std::move(item));
    }
  }
}

}  // namespace

void resolve(Value& tree, const Rank& rank) {
  visit(tree, rank);
}

}  // namespace tessera::sharded
