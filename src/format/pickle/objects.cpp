// The opcodes that would import, call and build in Python, and the closed table of names that
// become values. Everything else is kept as an object node; nothing is ever called.
#include <algorithm>
#include <array>
#include <optional>
#include <unordered_set>
#include <vector>

#include "base/text.h"
#include "format/pickle/machine.h"
#include "format/pickle/names.h"
#include "format/pickle/text.h"
#include "format/pickle/vetted.h"
#include "value/children.h"
#include "value/equality.h"
#include "value/render.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;

std::string name_of(const Value& global) {
  return printable(global.global_module() + "." + global.global_name(), 200);
}

bool is_nested_class(const Value& callable, const Value& arguments);

bool is_harmless_class(const Value& value) {
  if (value.is(Kind::object))
    return is_nested_class(value.as_object().callable, value.as_object().arguments);
  return value.is(Kind::global) && !is_dangerous(value.global_module(), value.global_name());
}

// Nested classes are written as getattr(Outer, "Inner") below protocol 4. That form, and no other
// use of getattr, only names something.
bool is_nested_class(const Value& callable, const Value& arguments) {
  if (!is_global(callable, "builtins", "getattr") || arguments.size() != 2) return false;
  const Value& inner = arguments.items()[1];
  return inner.is(Kind::string) && !is_dangerous_attribute(inner.as_string()) &&
         is_harmless_class(arguments.items()[0]);
}

// The settings of torch.compile hold a method of its backend, as getattr(backend, "name").
bool is_backends_method(const Value& arguments) {
  if (arguments.size() != 2) return false;
  const Value& backend = arguments.items()[0];
  const Value& name = arguments.items()[1];
  return backend.is(Kind::object) &&
         is_global(backend.as_object().callable, "torch", "_TorchCompileInductorWrapper") &&
         name.is(Kind::string) && !is_dangerous_attribute(name.as_string());
}

[[noreturn]] void refuse(const Value& callable) {
  throw Error(ErrorCode::unsafe,
              "the pickle calls " + name_of(callable) + ", which could run code");
}

// The first value in a tree for which `is_sought` holds; null: none.
template <typename IsSought>
const Value* find_in(const Value& tree, IsSought is_sought) {
  std::unordered_set<const void*> seen;
  std::vector<const Value*> left = {&tree};
  while (!left.empty()) {
    const Value* const value = left.back();
    left.pop_back();
    if (is_sought(*value)) return value;
    if (!holds_others(*value) || !seen.insert(value->identity()).second) continue;
    for_each_child(*value, [&](const Value& child, const auto&) { left.push_back(&child); });
  }
  return nullptr;
}

bool is_dangerous_global(const Value& value) {
  return value.is(Kind::global) && is_dangerous(value.global_module(), value.global_name());
}

// functools.partial(exec, code)() is a call of exec. What is called is small: the search is made
// anew for each call, since the object may have changed.
void require_harmless_callable(const Value& callable) {
  if (is_nested_class(callable.as_object().callable, callable.as_object().arguments)) return;
  int left = 1000;
  const Value* found = find_in(
      callable, [&left](const Value& value) { return is_dangerous_global(value) || --left == 0; });
  if (found == nullptr) return;
  if (found->is(Kind::global)) refuse(*found);
  throw Error(ErrorCode::unsafe, "the pickle calls an object that holds more than 1000 values");
}

// A call that read() refuses, unless it keeps what torch.compile leaves.
bool could_run(const Value& value) {
  if (!value.is(Kind::object)) return false;
  const Object& object = value.as_object();
  if (is_global(object.callable, "builtins", "getattr"))
    return !is_nested_class(object.callable, object.arguments);
  return is_dangerous_global(object.callable);
}

[[noreturn]] void refuse_arguments(const Value& callable, const Value& arguments) {
  corrupt("arguments of " + name_of(callable) + " are " + render(arguments, 80));
}

bool is_list_or_tuple(const Value& value) {
  return is_one_of(value.kind(), Kind::list, Kind::tuple);
}

bool is_pair(const Value& value) {
  return is_list_or_tuple(value) && value.size() == 2;
}

std::optional<Value> make_default_dict(const Value&, const Value& arguments) {
  const auto& given = arguments.items();
  if (given.size() > 1) return std::nullopt;
  Value made = Value::dict({}, DictKind::default_dict);
  if (!given.empty() && !given[0].is(Kind::none)) made.set_default_factory(given[0]);
  return made;
}

std::optional<Value> make_encoded(const Value& callable, const Value& arguments) {
  const auto& given = arguments.items();
  if (!is_latin1_text(arguments)) refuse_arguments(callable, arguments);
  return Value::bytes(latin1_to_bytes(given[0].as_string()));
}

Value::List items_given(const Value& callable, const Value& arguments) {
  const auto& given = arguments.items();
  if (given.empty()) return {};
  if (given.size() > 1 || !is_list_or_tuple(given[0])) refuse_arguments(callable, arguments);
  return given[0].items();
}

std::optional<Value> make_set(const Value& callable, const Value& arguments) {
  return Value::set(items_given(callable, arguments));
}

std::optional<Value> make_frozenset(const Value& callable, const Value& arguments) {
  return Value::frozenset(items_given(callable, arguments));
}

std::optional<Value> make_complex(const Value& callable, const Value& arguments) {
  const auto& given = arguments.items();
  const bool numbers = std::ranges::all_of(
      given, [](const Value& part) { return is_one_of(part.kind(), Kind::real, Kind::integer); });
  if (given.size() != 2 || !numbers) refuse_arguments(callable, arguments);
  return Value::complex({given[0].as_real(), given[1].as_real()});
}

std::optional<Value> make_bytes(const Value&, const Value& arguments) {
  if (arguments.size() != 0) return std::nullopt;
  return Value::bytes({});
}

std::optional<Value> make_bytearray(const Value& callable, const Value& arguments) {
  const auto& given = arguments.items();
  if (given.empty()) return Value::bytearray({});
  if (given.size() == 1 && given[0].is(Kind::bytes)) return Value::bytearray(given[0].as_bytes());
  const bool encoded =
      given.size() == 2 && given[0].is(Kind::string) && is_text(given[1], "latin-1");
  if (!encoded) refuse_arguments(callable, arguments);
  return Value::bytearray(latin1_to_bytes(given[0].as_string()));
}

// What an object may be given as a state: names of attributes, and no others of Python's own.
void require_attributes(const Value& state) {
  if (!state.is(Kind::dict)) corrupt("the state of an OrderedDict is not a dict");
  for (const auto& [key, value] : state.pairs()) {
    if (!key.is(Kind::string) || key.as_string().starts_with("__")) {
      corrupt("the state of an OrderedDict sets " + render(key, 60));
    }
  }
}

// Names whose calls are values; nullopt: with these arguments the call stays an object.
struct KnownCall {
  std::string_view module;
  std::string_view name;
  std::optional<Value> (*make)(const Value& callable, const Value& arguments);
};

constexpr std::array<KnownCall, 7> kKnownCalls{{
    {"collections", "defaultdict", make_default_dict},
    {"_codecs", "encode", make_encoded},
    {"builtins", "set", make_set},
    {"builtins", "frozenset", make_frozenset},
    {"builtins", "complex", make_complex},
    {"builtins", "bytes", make_bytes},
    {"builtins", "bytearray", make_bytearray},
}};

}  // namespace

Parsed read(ByteView bytes, const ReadOptions& options) {
  return Machine(bytes, options).run();
}

void Machine::push_global() {
  std::string module(cursor_.line());
  std::string name(cursor_.line());
  require_utf8(module);
  require_utf8(name);
  push_name(Value(std::move(module)), Value(std::move(name)));
}

void Machine::push_name(Value module, Value name) {
  if (protocol_ < 3) {
    std::string home = module.as_string();
    std::string own = name.as_string();
    from_python2(home, own);
    push(Value::global(std::move(home), std::move(own)));
  } else {
    push(Value::global_of(std::move(module), std::move(name)));
  }
  tell(Watch::Use::named, top().value, {});
}

void Machine::push_stack_global() {
  Slot name = pop();
  Slot module = pop();
  for (const Slot* part : {&module, &name}) {
    if (!part->value.is(Kind::string))
      corrupt("a name is " + std::string(describe(part->value.kind())) + ", expected a string");
  }
  push_name(std::move(module.value), std::move(name.value));
}

// What a number stands for is known to the process that reads alone.
void Machine::push_extension(std::uint64_t number) {
  if (options_.watch == nullptr)
    throw Error(ErrorCode::unsupported, "the pickle uses a private extension number");
  push(Value::global("copyreg", "extension " + std::to_string(number)));
  tell(Watch::Use::named, top().value, {});
}

// INST has the name of the class behind it and the arguments above the mark, OBJ both above it.
void Machine::make_instance(bool class_follows) {
  if (options_.watch == nullptr) {
    throw Error(ErrorCode::unsafe,
                "the pickle makes an instance as Python 2 did, by calling a class");
  }
  const std::size_t first = pop_mark();
  if (class_follows) {
    push_global();
    std::rotate(stack_.begin() + static_cast<std::ptrdiff_t>(first), stack_.end() - 1,
                stack_.end());
  }
  if (first == stack_.size()) corrupt("an instance without a class");
  push_sequence(first + 1, Value::tuple);
  reduce();
}

void Machine::load_persistent(const Slot& id) {
  if (!options_.persistent_load) {
    throw Error(ErrorCode::unsupported, "the pickle refers to something outside of it");
  }
  Value loaded = options_.persistent_load(id.value);
  const std::uint32_t cell = new_cell();
  contain(cell, id);
  cells_[cell].callables = 0;
  cells_[cell].contained = true;  // the caller may hand out one node many times
  stack_.push_back({std::move(loaded), cell});
}

void Machine::load_persistent_text() {
  const std::string_view id = cursor_.line();
  require_utf8(id);
  load_persistent({Value(std::string(id)), 0});
}

void Machine::require_callable(const Value& callable) const {
  if (callable.is(Kind::global)) {
    const std::string& module = callable.global_module();
    const std::string& name = callable.global_name();
    const bool is_kept = options_.keeps_compiler && is_of_compiler(module, name);
    if (options_.watch == nullptr && !is_kept && is_dangerous(module, name)) refuse(callable);
  } else if (!callable.is(Kind::object)) {
    corrupt("the pickle calls " + std::string(describe(callable.kind())));
  } else if (options_.watch == nullptr) {
    require_harmless_callable(callable);
  }
}

void Machine::require_harmless_call(const Value& callable, const Value& arguments) const {
  if (!arguments.is(Kind::tuple)) {
    corrupt("arguments are " + std::string(describe(arguments.kind())) + ", expected a tuple");
  }
  if (options_.watch != nullptr) return require_callable(callable);
  if (protocol_ < 2 && is_global(callable, "copyreg", "_reconstructor")) {
    throw Error(ErrorCode::unsupported,
                "an object of pickle protocol 0 or 1; objects of protocols 2 to 5 are read");
  }
  if (!is_global(callable, "builtins", "getattr")) return require_callable(callable);
  const bool is_kept = options_.keeps_compiler && is_backends_method(arguments);
  if (!is_nested_class(callable, arguments) && !is_kept) refuse(callable);
}

void require_harmless(const Value& tree) {
  if (const Value* found = find_in(tree, could_run)) refuse(found->as_object().callable);
}

void Machine::reduce() {
  Slot arguments = pop();
  Slot callable = pop();
  tell(Watch::Use::called, callable.value, arguments);
  require_harmless_call(callable.value, arguments.value);
  Slot result;
  Value made;
  if (options_.reduce && options_.reduce(callable.value, arguments.value, made)) {
    result = {std::move(made), new_cell()};
    contain(result.cell, arguments);
  } else if (!reduce_known(callable, arguments, result)) {
    result.cell = new_cell();
    contain(result.cell, callable);
    contain(result.cell, arguments);
    result.value = Value::object(
        {.callable = std::move(callable.value), .arguments = std::move(arguments.value)});
  }
  cells_[result.cell].callables = 0;
  stack_.push_back(std::move(result));
}

void Machine::new_object(bool with_keywords) {
  Slot keywords;
  if (with_keywords) keywords = pop();
  Slot arguments = pop();
  Slot callable = pop();
  tell(Watch::Use::made, callable.value, arguments);
  if (with_keywords && holds_callable(keywords))
    tell(Watch::Use::given_state, callable.value, keywords);
  require_callable(callable.value);
  if (!arguments.value.is(Kind::tuple) || (with_keywords && !keywords.value.is(Kind::dict))) {
    corrupt("arguments of a new object are not a tuple and a dict");
  }
  const std::uint32_t cell = new_cell();
  contain(cell, callable);
  contain(cell, arguments);
  Object object{.callable = std::move(callable.value),
                .arguments = std::move(arguments.value),
                .by_new = true};
  if (with_keywords) {
    contain(cell, keywords);
    object.keywords = std::move(keywords.value);
  }
  cells_[cell].callables = 0;
  stack_.push_back({Value::object(std::move(object)), cell});
}

void Machine::build() {
  Slot state = pop();
  Slot& target = top();
  tell(Watch::Use::given_state, target.value, state);
  if (target.value.is(Kind::object)) return build_object(target, std::move(state));
  if (!target.value.is(Kind::dict) || target.value.dict_kind() != DictKind::ordered_dict) {
    corrupt("a state is given to " + std::string(describe(target.value.kind())) +
            ", expected an object");
  }
  require_changeable(target);
  require_attributes(state.value);
  contain(target.cell, state);
  target.value.set_container_state(std::move(state.value));
}

void Machine::build_object(Slot& target, Slot state) {
  require_changeable(target);
  Object& object = target.value.as_object();
  if (object.state) throw Error(ErrorCode::unsupported, "an object is given two states");
  contain(target.cell, state);
  cells_[target.cell].callables = 0;
  object.state = std::move(state.value);
}

bool Machine::reduce_known(const Slot& callable, const Slot& arguments, Slot& result) {
  if (is_global(callable.value, "collections", "OrderedDict")) {
    count_copy(arguments.value);
    result = ordered_dict_of(arguments);
    return true;
  }
  const auto* known = std::ranges::find_if(kKnownCalls, [&callable](const KnownCall& call) {
    return is_global(callable.value, call.module, call.name);
  });
  if (known == kKnownCalls.end()) return false;
  count_copy(arguments.value);
  std::optional<Value> made = known->make(callable.value, arguments.value);
  if (!made) return false;
  result = {std::move(*made), new_cell()};
  contain(result.cell, arguments);
  return true;
}

// OrderedDict() is filled by opcodes; Python 2 wrote OrderedDict([[key, value], ...]).
Machine::Slot Machine::ordered_dict_of(const Slot& arguments) {
  Slot result{Value::dict({}, DictKind::ordered_dict), new_cell()};
  contain(result.cell, arguments);
  const auto& given = arguments.value.items();
  if (given.empty()) return result;
  if (given.size() != 1 || !is_list_or_tuple(given[0]))
    corrupt("an OrderedDict is made from no list of pairs");
  for (const Value& pair : given[0].items()) {
    if (!is_pair(pair)) corrupt("an OrderedDict is made from no list of pairs");
    set_item(result, {pair.items()[0], 0}, {pair.items()[1], 0});
  }
  return result;
}

}  // namespace tessera::pickle
