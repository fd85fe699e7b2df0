// Python's pickle as data (checkpoint-rows F-01, F-03): protocols 2 to 5 are read, 2 and 4 are
// written.
//
// Nothing is imported or called. Names of a closed table become values (dicts of every kind, sets,
// sizes, bytes...); any other name becomes a Value::object that is kept and can be written back.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/error.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::pickle {

// Lists that a reader has no use for: attributes of objects. Such a list is an empty one, wherever
// it is referred to, when it holds nothing but numbers, strings, containers and instances of
// `classes`; any other list is read as usual. What is skipped is checked for well-formed opcodes,
// and its items may be referred to from outside. Protocol 2 only, where Python numbers what it may
// refer to. Classes are "module name".
struct SkipRule {
  struct Attribute {
    std::string_view owner;  // the class
    std::string_view name;
  };
  std::span<const Attribute> lists;
  std::span<const std::string_view> classes;
};

// Told what a pickle would make Python do, while the machine reads it. With a watch nothing is
// refused for what it would do. What is refused otherwise, Python may take: the watch is told, and
// the machine goes on behind the opcode, with None for what it would have left. Only what ends
// Python's reading too ends such a one (the end of the bytes, a byte that is no opcode, a stack
// without what an opcode needs), and a limit.
class Watch {
 public:
  enum class Use : std::uint8_t {
    named,        // a global is imported; as a Value::global
    called,       // REDUCE, INST, OBJ: what(*arguments)
    made,         // NEWOBJ, NEWOBJ_EX: what.__new__(what, *arguments)
    given_state,  // BUILD: the arguments are the state
    given_items,  // APPEND, SETITEM and their kin, of what is no list, set or dict
  };
  virtual ~Watch() = default;
  // `what`: a global, an object node (the result of a call) or any other value. `arguments`: as the
  // pickle has them, perhaps no tuple; none for names and items. `callables`: whether a function or
  // class stands among them, at any depth of plain containers.
  virtual void use(Use use, const Value& what, const Value& arguments, bool callables) = 0;
  // Whether a global is a function or class, and not a value such as a dtype.
  [[nodiscard]] virtual bool is_callable(const Value& global) const = 0;
  virtual void refused(const Error& error) = 0;
};

struct ReadOptions {
  Watch* watch = nullptr;  // outlives the reading
  // Gives meaning to a persistent id (torch.save's storages). Unset: a persistent id is
  // `unsupported`.
  std::function<Value(const Value& id)> persistent_load;
  // Gives meaning to `callable(*arguments)` before the built-in table is asked; returns false to
  // decline. torch.save's tensor rebuilders are handled here by format/torch.
  std::function<bool(const Value& callable, const Value& arguments, Value& result)> reduce;
  // Keeps the settings that torch.compile leaves beside a module (is_of_compiler in names.h), which
  // are `unsafe` else. For trees that go through require_harmless() before anybody has them.
  bool keeps_compiler = false;
  std::optional<SkipRule> skip;          // unset: everything is read
  std::uint32_t max_depth = 1000;        // nesting of containers; deeper is `limit`
  std::uint64_t max_nodes = 50'000'000;  // values made by one pickle; more is `limit`
  // Values on the stack, that is in tuples, sets and batches under way; more is `limit`.
  std::size_t max_stack = 1'000'000;
};

struct Parsed {
  Value value;
  std::size_t consumed = 0;  // bytes up to and with the STOP opcode
};

// The first pickle in `bytes`. Every length is checked against what is left before it is used.
// Throws `incomplete` for a truncated stream, `corrupt` for anything a Python unpickler would
// refuse, `unsafe` for a name on the list of execution-capable globals that is reduced,
// `unsupported` for cycles, `limit` for values in so many places that each place by itself would be
// far more than the pickle (hostile case P23). Errors carry the offset.
[[nodiscard]] Parsed read(ByteView bytes, const ReadOptions& options = {});

// Throws `unsafe` for a tree with a call in it that read() refuses: a pickle that is written of it
// would run what it names.
void require_harmless(const Value& tree);

struct WriteOptions {
  int protocol = 2;  // 2 as torch.save, 4 as DCP's .metadata
  // The persistent id of a value that is written by reference; returns false for all others.
  std::function<bool(const Value& value, Value& id)> persistent_id;
  // Rewrites a value into the one that is pickled in its place (a tensor into its rebuild object);
  // returns false to keep it.
  std::function<bool(const Value& value, Value& replacement)> reduce;
};

// What Python's own pickler writes for this tree: the same opcodes and memo use for a tree whose
// identities are those of the Python objects.
[[nodiscard]] std::vector<std::byte> write(const Value& value, const WriteOptions& options = {});

}  // namespace tessera::pickle
