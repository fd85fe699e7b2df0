#include "checkpoint/open/olmo_units.h"

#include <map>

#include "base/expression.h"
#include "checkpoint/open/olmo_state.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kFirstRank = "model/rank0.pt";
// Bytes: each module around a name is matched, which may take the square of this.
constexpr std::size_t kLongestName = 1024;

// The paths of the modules around `name`, outermost first: "a", "a.b" for "a.b.weight".
std::vector<std::string> modules_around(const std::string& name) {
  std::vector<std::string> paths;
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    paths.push_back(name.substr(0, dot));
  }
  return paths;
}

bool has_alignment(const Value& handle) {
  const Value* padded = handle.find("flat_param._numels_with_padding");
  return padded != nullptr && padded->size() > handle.at("flat_param._numels").size();
}

// What the source's flat parameters have besides their elements.
struct Padding {
  bool longer = false;  // one is aligned
  bool zeros = false;   // one was filled up to a multiple of the ranks

  void add(const Value& handle) {
    longer = longer || has_alignment(handle);
    zeros = zeros || handle.at("flat_param._shard_numel_padded").as_int() > 0;
  }
  // Where nothing needed padding nothing speaks against alignment.
  [[nodiscard]] bool aligned() const { return longer || !zeros; }
};

// Of a module in a rank's file, without wrappers.
std::string path_of(const Value& module) {
  std::string path = sharded::clean_name(module.at("name").as_string() + ".");
  if (!path.empty()) path.pop_back();
  return path;
}

void require_matchable(const std::string& name) {
  if (name.size() <= kLongestName) return;
  throw Error(ErrorCode::limit, "a parameter's name of " + std::to_string(name.size()) +
                                    " bytes, expected at most " + std::to_string(kLongestName));
}

// The parameters of a flat one, which are `missing` until then.
void add_names(const Value& handle, FlatUnit& unit, std::set<std::string>& missing) {
  for (const Value& fqn : handle.at("flat_param._fqns").items()) {
    const std::string inner = sharded::clean_name(fqn.as_string());
    unit.names.push_back(unit.path.empty() ? inner : unit.path + "." + inner);
    if (missing.erase(unit.names.back()) == 0) {
      throw Error(ErrorCode::mismatch,
                  "the source's flat parameters hold a parameter that is "
                  "not converted, or twice")
          .at_key(unit.names.back());
    }
  }
}

}  // namespace

UnitPlan UnitPlan::by_expression(const std::vector<std::string>& names, const std::string& unit) {
  const Expression expression(unit);
  UnitPlan plan;
  plan.units_.push_back({});
  std::map<std::string, std::size_t> index;  // path -> units_
  for (const std::string& name : names) {
    require_matchable(name);
    std::size_t owner = 0;
    for (const std::string& path : modules_around(name)) {
      if (!expression.matches(path)) continue;
      const auto [found, added] = index.emplace(path, plan.units_.size());
      if (added) plan.units_.push_back({path, {}});
      plan.modules_.insert(path);
      owner = found->second;
    }
    plan.units_[owner].names.push_back(name);
  }
  return plan;
}

UnitPlan UnitPlan::of_local(const Store& store, const std::vector<std::string>& names) {
  const Value file = torch_file::read(store.open(kFirstRank));
  UnitPlan plan;
  std::set<std::string> missing(names.begin(), names.end());
  Padding padding;
  for (const Value& module : file.at("modules").items()) {
    FlatUnit unit{path_of(module), {}};
    for (const Value& handle : module.at("handles").items()) {
      add_names(handle, unit, missing);
      padding.add(handle);
    }
    if (!unit.path.empty()) plan.modules_.insert(unit.path);
    plan.units_.push_back(std::move(unit));
  }
  if (!missing.empty()) {
    throw Error(ErrorCode::mismatch, "no flat parameter of the source holds this parameter")
        .at_key(*missing.begin());
  }
  plan.aligned_ = padding.aligned();
  return plan;
}

UnitPlan UnitPlan::of_units(std::vector<FlatUnit> units, bool aligned,
                            const std::vector<std::string>& names) {
  UnitPlan plan;
  std::set<std::string> missing(names.begin(), names.end());
  for (const FlatUnit& unit : units) {
    if (!unit.path.empty()) plan.modules_.insert(unit.path);
    for (const std::string& name : unit.names) {
      if (!unit.path.empty() && !name.starts_with(unit.path + ".")) {
        throw Error(ErrorCode::invalid_argument,
                    "a parameter that is not below its module " + unit.path)
            .at_key("model." + name);
      }
      if (missing.erase(name) == 1) continue;
      throw Error(ErrorCode::mismatch,
                  "the flat parameters hold a parameter that the model lacks, or twice")
          .at_key("model." + name);
    }
  }
  if (!missing.empty()) {
    throw Error(ErrorCode::mismatch, "no flat parameter holds this parameter")
        .at_key("model." + *missing.begin());
  }
  plan.units_ = std::move(units);
  plan.aligned_ = aligned;
  return plan;
}

std::string UnitPlan::wrapped(const std::string& path) const {
  if (path.empty()) return "";
  return sharded::wrapped_name(path, [this](const std::string& module) {
    return module.empty() || modules_.contains(module);
  });
}

}  // namespace tessera
