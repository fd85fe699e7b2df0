#include "format/pickle/scan.h"

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "format/pickle/cursor.h"
#include "format/pickle/names.h"
#include "format/pickle/pickle.h"
#include "format/pickle/vetted.h"
#include "tessera/error.h"
#include "value/equality.h"

namespace tessera::pickle {
namespace {

using Kind = Value::Kind;
using Use = Watch::Use;

constexpr std::size_t kProblems = 20;  // that are told of one pickle

struct ScannedName {
  std::string_view module;
  std::string_view name;
};

std::string_view text_of(Use use) {
  constexpr std::array<std::string_view, 5> kTexts{
      "mentioned", "called with more than data", "made with more than data",
      "its state is more than data", "given more than data"};
  return kTexts[static_cast<std::size_t>(use)];
}

std::string text_of(const ScannedName& name) {
  std::string text;
  text.reserve(name.module.size() + 1 + name.name.size());
  return text.append(name.module).append(".").append(name.name);
}

// getattr(CLASS, 'NAME') of a known member, which is a class or a value like any other name.
bool is_member(const Object& object) {
  return is_global(object.callable, "builtins", "getattr") &&
         is_vetted_use("builtins", "getattr", Use::called, object.arguments, true);
}

// Its name; `kept` gets the text.
ScannedName member_of(const Value& arguments, std::string& kept) {
  const Value& owner = arguments.items()[0];
  kept = owner.global_name() + "." + arguments.items()[1].as_string();
  return {owner.global_module(), kept};
}

// The bytes of an argument that is one, or of text that protocols below 3 write instead.
std::string_view bytes_in(const Value& argument) {
  if (argument.is(Kind::string)) return argument.as_string();
  if (!argument.is(Kind::bytes)) return {};
  return {reinterpret_cast<const char*>(argument.as_bytes().data()), argument.as_bytes().size()};
}

class Collector : public Watch {
 public:
  Collector(Found& found,
            const std::function<bool(const std::string&, const std::string&)>& is_value)
      : found_(found), is_value_(is_value) {}

  void use(Use use, const Value& what, const Value& arguments, bool callables) override {
    found_.calls |= use != Use::named;
    if (what.is(Kind::global)) {
      if (use == Use::named && is_told(what)) return;
      use_of_name(use, {what.global_module(), what.global_name()}, arguments, callables);
    } else if (what.is(Kind::object)) {
      use_of_object(use, what.as_object(), arguments, callables);
    } else if (what.is(Kind::dict) && callables) {
      note({"collections", "OrderedDict"}, Verdict::unknown, text_of(use));
    }
  }

  [[nodiscard]] bool is_callable(const Value& global) const override {
    const Known* known = known_of(global);
    return known == nullptr ? is_callable_name(global) : known->callable;
  }

  void refused(const Error& error) override { add_problem(error); }

  // What torch.load makes of a persistent id: a storage. Whoever else reads the pickle makes of it
  // what they like, and torch looks for the source of a class that came with its own.
  Value load_persistent(const Value& id) {
    const bool storage = id.is(Kind::tuple) && id.size() >= 5 &&
                         is_text(id.items()[0], "storage") && id.items()[1].is(Kind::global) &&
                         !is_callable(id.items()[1]);
    if (!storage)
      add_problem(Error(ErrorCode::unsupported, "a persistent id that is no storage of torch"));
    return {};
  }

  void add_problem(const Error& error) {
    if (found_.problems.size() < kProblems) found_.problems.push_back(error);
  }

  // A getattr is harmless where a known member is what it gives. One that went anywhere else
  // counts.
  void finish() {
    if (getattrs_ > members_) note({"builtins", "getattr"}, Verdict::dangerous, {});
  }

 private:
  // A name by the places of its two texts: a pickle takes what stands for it out of its memo again
  // and again.
  using Place = std::pair<const std::string*, const std::string*>;
  struct Known {
    Value kept;  // so that nothing else comes to these places
    bool callable = false;
    bool told = false;  // that it is mentioned
  };
  static constexpr std::size_t kMostKnown = 256;  // one pickle may make millions of objects

  // Null: as many are known as may be.
  Known* known_of(const Value& global) const {
    const Place place{&global.global_module(), &global.global_name()};
    const auto found = known_.find(place);
    if (found != known_.end()) return &found->second;
    if (known_.size() == kMostKnown) return nullptr;
    return &known_.emplace(place, Known{global, is_callable_name(global)}).first->second;
  }

  // Whether the same was told of this object. Mentions of getattr are counted.
  [[nodiscard]] bool is_told(const Value& global) const {
    if (is_global(global, "builtins", "getattr")) return false;
    Known* known = known_of(global);
    return known != nullptr && std::exchange(known->told, true);
  }

  [[nodiscard]] bool is_callable_name(const Value& global) const {
    const ScannedName name{global.global_module(), global.global_name()};
    return !is_vetted_value(name.module, name.name) && !is_plain_value(name);
  }

  void use_of_name(Use use, const ScannedName& name, const Value& arguments, bool callables) {
    if (name.module == "builtins" && name.name == "getattr") return use_of_getattr(use, arguments);
    if (use == Use::named) return note(name, judged(name), {});
    if (use == Use::given_state || use == Use::given_items)
      return note(name, Verdict::dangerous, "its own attributes or items are set");
    if (use == Use::called && arguments.is(Kind::tuple)) look_into(name, arguments);
    // Anybody may call what nobody has looked at: it is told already.
    if (!is_vetted(name.module, name.name) && !is_plain_value(name)) return;
    if (!is_vetted_use(name.module, name.name, use, arguments, callables))
      note(name, concern(name), text_of(use));
  }

  void use_of_getattr(Use use, const Value& arguments) {
    if (use == Use::named) {
      ++getattrs_;
    } else if (is_vetted_use("builtins", "getattr", use, arguments, true)) {
      ++members_;
      std::string kept;
      const ScannedName member = member_of(arguments, kept);
      note(member, judged(member), {});
    }
  }

  // What was made by a call, or, where that was a getattr, the member.
  void use_of_object(Use use, const Object& object, const Value& arguments, bool callables) {
    std::string kept;
    if (is_member(object))
      return use_of_name(use, member_of(object.arguments, kept), arguments, callables);
    const Value* root = &object.callable;
    while (root->is(Kind::object)) root = &root->as_object().callable;
    if (!root->is(Kind::global)) return;
    const ScannedName name = made_by(object, *root, kept);
    const bool known = is_vetted(name.module, name.name);
    if (use == Use::called || use == Use::made) {
      note(name, concern(name), "its result is called");
    } else if (known && !is_vetted_use(name.module, name.name, use, arguments, callables,
                                       object.arguments)) {
      note(name, concern(name), text_of(use));
    }
  }

  // What an object is an instance of: what was called, or the class that it was told to make.
  static ScannedName made_by(const Object& object, const Value& root, std::string& kept) {
    const Value& callable = object.callable;
    if (callable.is(Kind::object) && is_member(callable.as_object()))
      return member_of(callable.as_object().arguments, kept);
    const bool told = is_global(callable, "copyreg", "_reconstructor") ||
                      is_global(callable, "copyreg", "__newobj__");
    if (!told ||
        !is_vetted_use("copyreg", callable.global_name(), Use::called, object.arguments, true))
      return {root.global_module(), root.global_name()};
    const Value& made = object.arguments.items()[0];
    return {made.global_module(), made.global_name()};
  }

  // Pickles among the arguments.
  void look_into(const ScannedName& name, const Value& arguments) {
    const bool takes = takes_pickle(name.module, name.name);
    if (!takes && is_vetted(name.module, name.name)) return;
    const std::string taker = text_of(name);
    for (const Value& argument : arguments.items()) {
      const std::string_view bytes = bytes_in(argument);
      const bool looks = bytes.size() > 1 && bytes[0] == '\x80';
      if (bytes.empty() || !(takes || looks) || nested_.contains({taker, bytes})) continue;
      nested_.emplace(taker, bytes_in(kept_.emplace_back(argument)));
      const auto* begin = reinterpret_cast<const std::byte*>(bytes.data());
      found_.nested.push_back(
          {{begin, begin + bytes.size()}, taker, name.module == "torch.storage", takes});
    }
  }

  [[nodiscard]] bool is_plain_value(const ScannedName& name) const {
    return is_value_ && is_value_(std::string(name.module), std::string(name.name));
  }

  [[nodiscard]] Verdict judged(const ScannedName& name) const {
    if (is_vetted(name.module, name.name) || is_plain_value(name)) return Verdict::vetted;
    return concern(name);
  }

  static Verdict concern(const ScannedName& name) {
    return is_dangerous(name.module, name.name) ? Verdict::dangerous : Verdict::unknown;
  }

  void note(const ScannedName& name, Verdict verdict, std::string_view how) {
    const std::string full = text_of(name);
    const auto [at, added] = rows_.try_emplace(full, found_.names.size());
    if (added) found_.names.push_back({full, verdict, std::string(how)});
    Finding& row = found_.names[at->second];
    if (verdict > row.verdict) row = {full, verdict, std::string(how)};
  }

  Found& found_;
  const std::function<bool(const std::string&, const std::string&)>& is_value_;
  std::unordered_map<std::string, std::size_t> rows_;  // of found_.names
  // Takers and bytes of found_.nested: the same bytes may be handed over again and again.
  std::set<std::pair<std::string, std::string_view>> nested_;
  mutable std::map<Place, Known> known_;
  std::deque<Value> kept_;      // whose bytes nested_ looks at
  std::uint64_t getattrs_ = 0;  // mentioned
  std::uint64_t members_ = 0;   // getattrs that known members came from
};

}  // namespace

Found scan(ByteView bytes,
           const std::function<bool(const std::string&, const std::string&)>& is_value) {
  Found found;
  Collector collector(found, is_value);
  ReadOptions options;
  options.watch = &collector;
  options.persistent_load = [&collector](const Value& id) { return collector.load_persistent(id); };
  try {
    found.consumed = read(bytes, options).consumed;
  } catch (const Error& error) {
    found.cut = error.code() == ErrorCode::incomplete;
    found.limited = error.code() == ErrorCode::limit;
    collector.add_problem(error);
  }
  collector.finish();
  return found;
}

bool is_cut(ByteView bytes) {
  return Survey(bytes).is_cut();
}

std::vector<std::string> globals(ByteView bytes) {
  std::vector<std::string> names;
  for (Finding& finding : scan(bytes).names) names.push_back(std::move(finding.name));
  return names;
}

}  // namespace tessera::pickle
