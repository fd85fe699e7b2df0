// Dict nodes: pairs in order of insertion, with an index by key once there are many.
#include "tessera/error.h"
#include "value/equality.h"
#include "value/node.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr std::size_t kScanned = 8;  // up to here a scan is faster than an index

}  // namespace

Value::Node::OfDict::~OfDict() {
  release(pairs);
  if (extras) {
    List last = {std::move(extras->state), std::move(extras->factory)};
    release(last);
  }
}

template <class Equal>
std::size_t Value::Node::OfDict::probe(std::size_t hash, const Equal& equal) const {
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = hash & mask; slots_[slot] != 0; slot = (slot + 1) & mask) {
    const std::size_t at = slots_[slot] - 1;
    if (hashes_[at] == hash && equal(pairs[at].first)) return at;
  }
  return pairs.size();
}

template <class Key, class Equal>
std::size_t Value::Node::OfDict::search(const Key& key, const Equal& equal) const {
  if (!slots_.empty()) return probe(hash_of(key), equal);
  std::size_t at = 0;
  while (at < pairs.size() && !equal(pairs[at].first)) ++at;
  return at;
}

std::size_t Value::Node::OfDict::position(std::string_view key) const {
  return search(key, [key](const Value& other) {
    return other.is(Kind::string) && other.as_string() == key;
  });
}

std::size_t Value::Node::OfDict::position(const Value& key) const {
  if (key.is(Kind::string)) return position(std::string_view(key.as_string()));
  return search(key, [&key](const Value& other) { return other == key; });
}

void Value::Node::OfDict::append(Value key, Value value) {
  if (pairs.size() >= std::uint32_t(-1) - 1) {
    throw Error(ErrorCode::limit, "a dict of more than 2^32 keys");
  }
  pairs.emplace_back(std::move(key), std::move(value));
  if (pairs.size() <= kScanned) return;
  if (pairs.size() * 2 > slots_.size()) {
    rebuild_index();
  } else {
    hashes_.push_back(hash_of(pairs.back().first));
    index(pairs.size() - 1);
  }
}

void Value::Node::OfDict::remove(std::size_t position) {
  pairs.erase(pairs.begin() + static_cast<std::ptrdiff_t>(position));
  forget_index();
}

void Value::Node::OfDict::set_key(std::size_t position, Value key) {
  pairs[position].first = std::move(key);
  forget_index();
}

void Value::Node::OfDict::forget_index() {
  hashes_.clear();
  slots_.clear();
  if (pairs.size() > kScanned) rebuild_index();
}

void Value::Node::OfDict::index(std::size_t position) {
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = hashes_[position] & mask;
  while (slots_[slot] != 0) slot = (slot + 1) & mask;
  slots_[slot] = static_cast<std::uint32_t>(position + 1);
}

void Value::Node::OfDict::rebuild_index() {
  std::size_t capacity = 32;
  while (capacity < pairs.size() * 4) capacity *= 2;
  slots_.assign(capacity, 0);
  for (std::size_t i = hashes_.size(); i < pairs.size(); ++i) {
    hashes_.push_back(hash_of(pairs[i].first));
  }
  for (std::size_t i = 0; i < pairs.size(); ++i) index(i);
}

Value Value::dict(std::vector<Pair> pairs, DictKind kind) {
  Value made(std::make_shared<Node::OfDict>(kind));
  for (Pair& pair : pairs) made.set_item(std::move(pair.first), std::move(pair.second));
  return made;
}

const std::vector<Value::Pair>& Value::pairs() const& {
  return Node::as<Node::OfDict>(*this, "a dict", Kind::dict).pairs;
}

DictKind Value::dict_kind() const {
  return Node::as<Node::OfDict>(*this, "a dict", Kind::dict).dict_kind;
}

const Value* Value::find(std::string_view key) const& {
  const auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  const std::size_t at = dict.position(key);
  return at < dict.pairs.size() ? &dict.pairs[at].second : nullptr;
}

const Value* Value::find_key(const Value& key) const& {
  const auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  const std::size_t at = dict.position(key);
  return at < dict.pairs.size() ? &dict.pairs[at].second : nullptr;
}

const Value& Value::at(std::string_view key) const& {
  const Value* found = find(key);
  if (found == nullptr) {
    throw Error(ErrorCode::not_found, "no such key in a dict of " + std::to_string(size()))
        .at_key(printable(key));
  }
  return *found;
}

Value& Value::at(std::string_view key) & {
  return const_cast<Value&>(std::as_const(*this).at(key));
}

Value& Value::operator[](std::string_view key) & {
  auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  const std::size_t at = dict.position(key);
  if (at == dict.pairs.size()) dict.append(Value(key), Value());
  return dict.pairs[at].second;
}

bool Value::erase(std::string_view key) {
  auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  const std::size_t at = dict.position(key);
  if (at == dict.pairs.size()) return false;
  dict.remove(at);
  return true;
}

void Value::rename(std::string_view from, std::string_view to) {
  auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  (void)at(from);
  if (from == to) return;
  if (find(to) != nullptr) {
    throw Error(ErrorCode::conflict,
                "the dict has a key of this name already, '" + printable(from) + "' cannot have it")
        .at_key(printable(to));
  }
  dict.set_key(dict.position(from), Value(to));
}

void Value::set_item(Value key, Value value) {
  auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  const std::size_t at = dict.position(key);
  if (at < dict.pairs.size()) {
    dict.pairs[at].second = std::move(value);
  } else {
    dict.append(std::move(key), std::move(value));
  }
}

const Value* Value::container_state() const& {
  const auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  return dict.extras && dict.extras->has_state ? &dict.extras->state : nullptr;
}

void Value::set_container_state(Value state) {
  auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  if (!dict.extras) dict.extras = std::make_unique<Node::OfDict::Extras>();
  dict.extras->state = std::move(state);
  dict.extras->has_state = true;
}

const Value* Value::default_factory() const& {
  const auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  return dict.extras && dict.extras->has_factory ? &dict.extras->factory : nullptr;
}

void Value::set_default_factory(Value factory) {
  auto& dict = Node::as<Node::OfDict>(*this, "a dict", Kind::dict);
  if (!dict.extras) dict.extras = std::make_unique<Node::OfDict::Extras>();
  dict.extras->factory = std::move(factory);
  dict.extras->has_factory = true;
}

}  // namespace tessera
