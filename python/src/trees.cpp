#include "trees.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "tensors.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "text.h"

namespace tessera::python {
namespace {

constexpr std::size_t kDeepest = 1000;  // objects around another, as Python's own limit

std::vector<std::byte> bytes_of(const char* data, std::size_t size) {
  const auto* const begin = reinterpret_cast<const std::byte*>(data);
  return {begin, begin + size};
}

class Builder {
 public:
  explicit Builder(nb::object describe)
      : describe_(std::move(describe)),
        opaque_(nb::module_::import_("tessera._values").attr("Opaque")) {}

  std::vector<nb::object> take_kept() { return std::move(kept_); }

  Value operator()(nb::handle object) {
    if (object.is_none()) return {};
    if (PyBool_Check(object.ptr())) return object.ptr() == Py_True;
    if (PyLong_CheckExact(object.ptr())) return integer(object);
    if (PyFloat_CheckExact(object.ptr())) return PyFloat_AsDouble(object.ptr());
    const auto found = made_.find(object.ptr());
    if (found != made_.end()) return found->second;
    if (!open_.insert(object.ptr()).second)
      throw Error(ErrorCode::invalid_argument, "the tree contains itself").at_key(key());
    if (open_.size() - 1 > kDeepest)
      throw Error(ErrorCode::limit, "the tree is too deep").at_key(key());
    Value value = made(object);
    open_.erase(object.ptr());
    made_.emplace(object.ptr(), value);
    kept_.push_back(nb::borrow(object));
    return value;
  }

 private:
  Value made(nb::handle object) {
    PyObject* const it = object.ptr();
    if (PyUnicode_CheckExact(it)) return text_of(object);
    if (PyBytes_CheckExact(it)) {
      const auto bytes = nb::borrow<nb::bytes>(object);
      return Value::bytes(bytes_of(bytes.c_str(), bytes.size()));
    }
    if (PyByteArray_CheckExact(it)) {
      const auto bytes = nb::borrow<nb::bytearray>(object);
      return Value::bytearray(bytes_of(bytes.c_str(), bytes.size()));
    }
    if (PyComplex_CheckExact(it))
      return Value::complex({PyComplex_RealAsDouble(it), PyComplex_ImagAsDouble(it)});
    if (PyList_CheckExact(it)) return Value::list(items(object));
    if (PyTuple_CheckExact(it)) return Value::tuple(items(object));
    if (Py_IS_TYPE(it, &PySet_Type)) return Value::set(items(object));
    if (Py_IS_TYPE(it, &PyFrozenSet_Type)) return Value::frozenset(items(object));
    if (PyDict_CheckExact(it)) return Value::dict(pairs(nb::borrow<nb::dict>(object)));
    if (object.type().is(opaque_)) return opaque(object);
    return described(object);
  }

  static Value integer(nb::handle object) {
    int overflow = 0;
    const long long small = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow == 0) return small;
    const auto bits = nb::cast<std::size_t>(object.attr("bit_length")());
    const auto bytes = nb::cast<nb::bytes>(
        object.attr("to_bytes")(bits / 8 + 1, "little", nb::arg("signed") = true));
    return Value::integer({0, bytes_of(bytes.c_str(), bytes.size())});
  }

  Value at(std::string step, nb::handle object) {
    path_.push_back(std::move(step));
    Value value = (*this)(object);
    path_.pop_back();
    return value;
  }

  Value::List items(nb::handle sequence) {
    Value::List list;
    for (const nb::handle item : nb::iter(sequence))
      list.push_back(at(std::to_string(list.size()), item));
    return list;
  }

  std::vector<Value::Pair> pairs(const nb::dict& dict) {
    std::vector<Value::Pair> pairs;
    for (const auto& [key, item] : dict) {
      Value name = at(text_of(nb::str(key)), key);
      pairs.emplace_back(std::move(name), at(text_of(nb::str(key)), item));
    }
    return pairs;
  }

  Value opaque(nb::handle given) {
    const nb::object name = given.attr("name");
    Value callable;
    if (PyUnicode_Check(name.ptr())) {
      const std::string dotted = text_of(name);
      const std::size_t dot = dotted.rfind('.');
      if (dot == std::string::npos)
        throw Error(ErrorCode::invalid_argument, "an Opaque's name is 'module.name'").at_key(key());
      callable = Value::global(dotted.substr(0, dot), dotted.substr(dot + 1));
    } else {
      callable = at("name", name);
    }
    const nb::object arguments = given.attr("arguments");
    if (arguments.is_none()) return callable;
    Object object;
    object.callable = std::move(callable);
    object.arguments = at("arguments", arguments);
    object.by_new = nb::cast<bool>(given.attr("by_new"));
    const nb::object keywords = given.attr("keywords");
    if (nb::len(keywords) > 0) object.keywords = at("keywords", keywords);
    const nb::object state = given.attr("state");
    if (!state.is_none()) object.state = at("state", state);
    object.list_items = items(given.attr("list_items"));
    for (const nb::handle pair : given.attr("dict_items")) {
      Value name_of_item = at("dict_items", pair[nb::int_(0)]);
      object.dict_items.emplace_back(std::move(name_of_item), at("dict_items", pair[nb::int_(1)]));
    }
    return Value::object(std::move(object));
  }

  Value described(nb::handle object) {
    const nb::object given = describe_(object);
    if (given.is_none()) {
      throw Error(ErrorCode::unsupported, "an object of type " +
                                              text_of(object.type().attr("__name__")) +
                                              " is no tensor and no plain data")
          .at_key(key());
    }
    kept_.push_back(given);
    const std::string what = text_of(given[0]);
    if (what == "unsupported") throw Error(ErrorCode::unsupported, text_of(given[1])).at_key(key());
    if (what == "mismatch") throw Error(ErrorCode::mismatch, text_of(given[1])).at_key(key());
    if (what == "value") return (*this)(given[1]);
    if (what == "global") return Value::global(text_of(given[1]), text_of(given[2]));
    if (what == "ordered_dict") {
      Value dict = Value::dict(pairs(given[1]), DictKind::ordered_dict);
      if (!given[2].is_none())
        dict.set_container_state(Value::dict({{"_metadata", at("_metadata", given[2])}}));
      return dict;
    }
    if (what == "default_dict") {
      Value dict = Value::dict(pairs(given[1]), DictKind::default_dict);
      if (!given[2].is_none())
        dict.set_default_factory(Value::global("builtins", text_of(given[2])));
      return dict;
    }
    if (what == "archive") return archived(nb::cast<nb::bytes>(given[1]));
    return what == "sharded" ? sharded(given) : tensor(given);
  }

  // What torch.save made of an object that only its own class knows.
  [[nodiscard]] Value archived(const nb::bytes& bytes) const {
    try {
      return value_of_archive(bytes);
    } catch (Error& error) {
      error.at_key(key());
      throw;
    }
  }

  // Nobody writes to it; the objects in `kept_` have the memory until the call returns. What begins
  // at one address is one storage, as long as the longest of its views, whichever came first. No
  // bytes are nobody's.
  std::shared_ptr<Storage> storage_at(std::uintptr_t address, std::uint64_t size, DType dtype) {
    std::shared_ptr<Storage> none;
    std::shared_ptr<Storage>& storage = size == 0 ? none : storages_[{address, dtype}];
    if (!storage) {
      storage = std::make_shared<Storage>();
      storage->data = reinterpret_cast<std::byte*>(address);
      storage->dtype = dtype;
      storage->owner = std::shared_ptr<void>(storage->data, [](void*) {});
    }
    storage->size = std::max(storage->size, size);
    return storage;
  }

  Value sharded(const nb::object& given) {
    Tensor tensor;
    tensor.dtype = dtype_from_torch(text_of(given[1]));
    tensor.shape = shape_of(given[2]);
    tensor.sharded = true;
    tensor.requires_grad = nb::cast<bool>(given[4]);
    for (const nb::handle part : given[3]) {
      const auto storage = storage_at(nb::cast<std::uintptr_t>(part[0]),
                                      nb::cast<std::uint64_t>(part[1]), tensor.dtype);
      tensor.pieces.push_back({Box{shape_of(part[4]), shape_of(part[5])}, storage,
                               nb::cast<std::int64_t>(part[2]), shape_of(part[3])});
    }
    const nb::object placement = given[5];
    if (!placement.is_none()) {
      tensor.placement = Placement{nb::cast<int>(placement[0]), nb::cast<int>(placement[1]),
                                   nb::cast<int>(placement[2])};
    }
    return Value(std::move(tensor));
  }

  Value tensor(const nb::object& given) {
    const auto address = nb::cast<std::uintptr_t>(given[1]);
    Tensor tensor;
    tensor.dtype = dtype_from_torch(text_of(given[4]));
    tensor.shape = shape_of(given[5]);
    tensor.requires_grad = nb::cast<bool>(given[7]);
    tensor.parameter = nb::cast<bool>(given[8]);
    const auto storage = storage_at(address, nb::cast<std::uint64_t>(given[2]), tensor.dtype);
    tensor.pieces.push_back(
        {whole(tensor.shape), storage, nb::cast<std::int64_t>(given[3]), shape_of(given[6])});
    return Value(std::move(tensor));
  }

  [[nodiscard]] std::string key() const {
    std::string key;
    for (const std::string& step : path_) key += (key.empty() ? "" : ".") + step;
    return key;
  }

  nb::object describe_, opaque_;
  std::vector<std::string> path_;
  std::unordered_map<PyObject*, Value> made_;
  std::unordered_set<PyObject*> open_;  // on the way to what is being made
  std::vector<nb::object> kept_;        // so that no address comes twice
  std::map<std::pair<std::uintptr_t, DType>, std::shared_ptr<Storage>> storages_;
};

}  // namespace

Value value_of_archive(const nb::bytes& bytes) {
  const auto store = memory_store();
  put(*store, "value.pt", bytes_of(bytes.c_str(), bytes.size()), IfExists::fail);
  return Checkpoint::open({store, "value.pt"}).load();
}

Tree tree_of(nb::handle tree, nb::object describe) {
  Builder builder(std::move(describe));
  Value value = builder(tree);
  return {std::move(value), builder.take_kept()};
}

}  // namespace tessera::python
