#include "value/digest.h"

#include <bit>
#include <span>
#include <unordered_map>

#include "base/digest.h"
#include "value/children.h"
#include "value/depth.h"

namespace tessera {
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
