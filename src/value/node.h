// The nodes that a Value's handle points to: one struct a kind. Seen by src/value alone.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/value.h"

namespace tessera {

struct Value::Node {
  explicit Node(Kind of) : kind(of) {}
  Kind kind;

  struct OfBool;
  struct OfInteger;
  struct OfReal;
  struct OfComplex;
  struct OfString;
  struct OfBytes;
  struct OfSequence;
  struct OfDict;
  struct OfTensor;
  struct OfGlobal;
  struct OfObject;

  // The node of `value` as a T; throws `mismatch` when its kind is not one of `kinds`.
  template <class T, class... Kinds>
  static T& as(const Value& value, std::string_view wanted, Kinds... kinds) {
    if (!value.node_ || ((value.node_->kind != kinds) && ...)) refuse(value, wanted);
    return static_cast<T&>(*value.node_);
  }
  [[noreturn]] static void refuse(const Value& value, std::string_view wanted);

  // Destroys what a container held. Nesting deeper than a fixed bound is put aside and destroyed
  // later by the outermost call, so that no tree, however deep, overflows the stack.
  template <class Held>
  static void release(Held& held) noexcept;

  struct Deferred;
};

struct Value::Node::OfBool : Node {
  explicit OfBool(bool of) : Node(Kind::boolean), value(of) {}
  bool value;
};

struct Value::Node::OfInteger : Node {
  explicit OfInteger(Integer of) : Node(Kind::integer), value(std::move(of)) {}
  Integer value;
};

struct Value::Node::OfReal : Node {
  explicit OfReal(double of) : Node(Kind::real), value(of) {}
  double value;
};

struct Value::Node::OfComplex : Node {
  explicit OfComplex(std::complex<double> of) : Node(Kind::complex), value(of) {}
  std::complex<double> value;
};

struct Value::Node::OfString : Node {
  explicit OfString(std::string of) : Node(Kind::string), value(std::move(of)) {}
  std::string value;
};

struct Value::Node::OfBytes : Node {
  OfBytes(Kind which, std::vector<std::byte> of) : Node(which), value(std::move(of)) {}
  std::vector<std::byte> value;
};

struct Value::Node::OfSequence : Node {
  OfSequence(Kind which, List of) : Node(which), items(std::move(of)) {}
  OfSequence(const OfSequence&) = delete;
  OfSequence& operator=(const OfSequence&) = delete;
  ~OfSequence() { release(items); }
  List items;
};

struct Value::Node::OfDict : Node {
  explicit OfDict(DictKind which) : Node(Kind::dict), dict_kind(which) {}
  OfDict(const OfDict&) = delete;
  OfDict& operator=(const OfDict&) = delete;
  ~OfDict();

  // Position of the pair with this key; pairs.size() when there is none.
  [[nodiscard]] std::size_t position(std::string_view key) const;
  [[nodiscard]] std::size_t position(const Value& key) const;
  void append(Value key, Value value);
  void remove(std::size_t position);
  // `key` is not in the dict.
  void set_key(std::size_t position, Value key);

  DictKind dict_kind;
  std::vector<Pair> pairs;
  // Properties that few dicts have.
  struct Extras {
    Value state;
    Value factory;
    bool has_state = false;
    bool has_factory = false;
  };
  std::unique_ptr<Extras> extras;

 private:
  template <class Key, class Equal>
  [[nodiscard]] std::size_t search(const Key& key, const Equal& equal) const;
  template <class Equal>
  [[nodiscard]] std::size_t probe(std::size_t hash, const Equal& equal) const;
  void index(std::size_t position);
  void rebuild_index();
  void forget_index();

  // Open addressing over positions + 1 (0: free); empty while the dict is small enough to scan.
  std::vector<std::uint32_t> slots_;
  std::vector<std::size_t> hashes_;  // one a pair, when there is an index
};

struct Value::Node::OfTensor : Node {
  explicit OfTensor(Tensor of) : Node(Kind::tensor), value(std::move(of)) {}
  Tensor value;
};

struct Value::Node::OfGlobal : Node {
  OfGlobal(Value of_module, Value of_name)
      : Node(Kind::global), module(std::move(of_module)), name(std::move(of_name)) {}
  Value module;  // both strings
  Value name;
};

struct Value::Node::OfObject : Node {
  explicit OfObject(Object of) : Node(Kind::object), value(std::move(of)) {}
  OfObject(const OfObject&) = delete;
  OfObject& operator=(const OfObject&) = delete;
  ~OfObject() { release(value); }
  Object value;
};

struct Value::Node::Deferred {
  static constexpr unsigned kMaxNesting = 200;
  static thread_local unsigned nesting;                           // releases now on the stack
  static thread_local std::vector<std::shared_ptr<void>>* nodes;  // owned by the outermost release
  static void destroy_all() noexcept;
};

template <class Held>
void Value::Node::release(Held& held) noexcept {
  if (Deferred::nesting >= Deferred::kMaxNesting) {
    if (Deferred::nodes == nullptr) Deferred::nodes = new std::vector<std::shared_ptr<void>>;
    Deferred::nodes->push_back(std::make_shared<Held>(std::move(held)));
    return;
  }
  ++Deferred::nesting;
  { const Held gone = std::move(held); }
  --Deferred::nesting;
  if (Deferred::nesting == 0 && Deferred::nodes != nullptr) Deferred::destroy_all();
}

}  // namespace tessera
