#include "tessera/value.h"

#include <array>

#include "tessera/error.h"
#include "value/integer.h"
#include "value/node.h"
#include "value/render.h"

namespace tessera {

thread_local unsigned Value::Node::Deferred::nesting = 0;
thread_local std::vector<std::shared_ptr<void>>* Value::Node::Deferred::nodes = nullptr;

void Value::Node::Deferred::destroy_all() noexcept {
  ++nesting;  // releases below defer instead of coming here
  while (!nodes->empty()) {
    const std::shared_ptr<void> gone = std::move(nodes->back());
    nodes->pop_back();
  }
  --nesting;
  delete nodes;
  nodes = nullptr;
}

void Value::Node::refuse(const Value& value, std::string_view wanted) {
  throw Error(ErrorCode::mismatch,
              "found " + std::string(describe(value.kind())) + ", expected " + std::string(wanted));
}

Value::Value() = default;

Value::Value(std::shared_ptr<Node> node) : node_(std::move(node)) {}

Value Value::of_bool(bool value) {
  // As in Python there is one True and one False. Made while the library is loaded, see below.
  static const std::array<std::shared_ptr<Node>, 2> both = {std::make_shared<Node::OfBool>(false),
                                                            std::make_shared<Node::OfBool>(true)};
  return Value(both[value ? 1 : 0]);
}

Value Value::of_int(std::int64_t value) {
  constexpr std::int64_t kShared = 257;  // small integers are one node each, as in Python
  // Made while the library is loaded, too.
  static const auto small = [] {
    std::array<std::shared_ptr<Node>, kShared> nodes;
    for (std::int64_t i = 0; i < kShared; ++i) {
      nodes[static_cast<std::size_t>(i)] = std::make_shared<Node::OfInteger>(Integer{i, {}});
    }
    return nodes;
  }();
  if (value >= 0 && value < kShared) return Value(small[static_cast<std::size_t>(value)]);
  return Value(std::make_shared<Node::OfInteger>(Integer{value, {}}));
}

// At their first use it would be too late: a child of a process that forks just then would wait for
// them for ever.
[[maybe_unused]] const auto kMadeEarly = std::array{Value(true), Value(0)};

Value Value::of_large(std::uint64_t value) {
  std::vector<std::byte> bytes;  // and a last one without a sign
  for (; value != 0; value >>= 8) bytes.push_back(static_cast<std::byte>(value & 0xff));
  bytes.push_back(std::byte{0});
  return integer({0, std::move(bytes)});
}

Value Value::of_real(double value) {
  return Value(std::make_shared<Node::OfReal>(value));
}

Value::Value(const char* value) {
  if (value == nullptr) {
    throw Error(ErrorCode::invalid_argument, "a null pointer, expected a string");
  }
  *this = Value(std::string(value));
}
Value::Value(std::string_view value) : Value(std::string(value)) {}
Value::Value(std::string value) : node_(std::make_shared<Node::OfString>(std::move(value))) {}
Value::Value(Tensor value) : node_(std::make_shared<Node::OfTensor>(std::move(value))) {}

Value Value::integer(Integer value) {
  if (value.big.empty()) return Value(value.small);
  Integer normal = integer_from_bytes(value.big);
  if (normal.big.empty()) return Value(normal.small);
  return Value(std::make_shared<Node::OfInteger>(std::move(normal)));
}

Value Value::complex(std::complex<double> value) {
  return Value(std::make_shared<Node::OfComplex>(value));
}

Value Value::bytes(std::vector<std::byte> value) {
  return Value(std::make_shared<Node::OfBytes>(Kind::bytes, std::move(value)));
}

Value Value::bytearray(std::vector<std::byte> value) {
  return Value(std::make_shared<Node::OfBytes>(Kind::bytearray, std::move(value)));
}

Value Value::list(List items) {
  return Value(std::make_shared<Node::OfSequence>(Kind::list, std::move(items)));
}

Value Value::tuple(List items) {
  return Value(std::make_shared<Node::OfSequence>(Kind::tuple, std::move(items)));
}

Value Value::set(List items) {
  return Value(std::make_shared<Node::OfSequence>(Kind::set, std::move(items)));
}

Value Value::frozenset(List items) {
  return Value(std::make_shared<Node::OfSequence>(Kind::frozenset, std::move(items)));
}

Value Value::global(std::string module, std::string name) {
  return global_of(Value(std::move(module)), Value(std::move(name)));
}

Value Value::global_of(Value module, Value name) {
  (void)module.as_string();  // both are strings, or this throws
  (void)name.as_string();
  return Value(std::make_shared<Node::OfGlobal>(std::move(module), std::move(name)));
}

Value Value::object(Object object) {
  return Value(std::make_shared<Node::OfObject>(std::move(object)));
}

Value::Kind Value::kind() const noexcept {
  return node_ ? node_->kind : Kind::none;
}
const void* Value::identity() const noexcept {
  return node_.get();
}

bool Value::as_bool() const {
  return Node::as<Node::OfBool>(*this, "a bool", Kind::boolean).value;
}

const Integer& Value::as_integer() const& {
  return Node::as<Node::OfInteger>(*this, "an integer", Kind::integer).value;
}

std::int64_t Value::as_int() const {
  const Integer& integer = as_integer();
  if (!integer.big.empty()) {
    throw Error(ErrorCode::limit,
                "found " + to_decimal(integer) + ", expected an integer of at most 64 bits");
  }
  return integer.small;
}

double Value::as_real() const {
  if (is(Kind::integer)) return to_real(as_integer());
  return Node::as<Node::OfReal>(*this, "a number", Kind::real).value;
}

std::complex<double> Value::as_complex() const {
  return Node::as<Node::OfComplex>(*this, "a complex number", Kind::complex).value;
}

const std::string& Value::as_string() const& {
  return Node::as<Node::OfString>(*this, "a string", Kind::string).value;
}

const std::vector<std::byte>& Value::as_bytes() const& {
  return Node::as<Node::OfBytes>(*this, "bytes", Kind::bytes, Kind::bytearray).value;
}

const Value::List& Value::items() const& {
  return Node::as<Node::OfSequence>(*this, "a sequence", Kind::list, Kind::tuple, Kind::set,
                                    Kind::frozenset)
      .items;
}

Value::List& Value::items() & {
  return Node::as<Node::OfSequence>(*this, "a sequence", Kind::list, Kind::tuple, Kind::set,
                                    Kind::frozenset)
      .items;
}

const Value& Value::at(std::size_t index) const& {
  const List& all = items();
  if (index >= all.size()) {
    throw Error(ErrorCode::not_found, "no element " + std::to_string(index) + " in a sequence of " +
                                          std::to_string(all.size()));
  }
  return all[index];
}

Value& Value::at(std::size_t index) & {
  return const_cast<Value&>(std::as_const(*this).at(index));
}

const Tensor& Value::as_tensor() const& {
  return Node::as<Node::OfTensor>(*this, "a tensor", Kind::tensor).value;
}

Tensor& Value::as_tensor() & {
  return Node::as<Node::OfTensor>(*this, "a tensor", Kind::tensor).value;
}

// NOLINTNEXTLINE(readability-const-return-type)
const Tensor Value::as_tensor() const&& {
  return this->as_tensor();
}

const Object& Value::as_object() const& {
  return Node::as<Node::OfObject>(*this, "an object", Kind::object).value;
}

Object& Value::as_object() & {
  return Node::as<Node::OfObject>(*this, "an object", Kind::object).value;
}

// NOLINTNEXTLINE(readability-const-return-type)
const Object Value::as_object() const&& {
  return this->as_object();
}

const Value& Value::global_module_node() const& {
  return Node::as<Node::OfGlobal>(*this, "a global name", Kind::global).module;
}

const Value& Value::global_name_node() const& {
  return Node::as<Node::OfGlobal>(*this, "a global name", Kind::global).name;
}

const std::string& Value::global_module() const& {
  return global_module_node().as_string();
}
const std::string& Value::global_name() const& {
  return global_name_node().as_string();
}

std::size_t Value::size() const {
  return is(Kind::dict) ? pairs().size() : items().size();
}

std::string Object::name() const {
  if (!callable.is(Value::Kind::global)) return {};
  return callable.global_module() + "." + callable.global_name();
}

}  // namespace tessera
