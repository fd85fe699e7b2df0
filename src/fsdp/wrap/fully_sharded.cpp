#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "base/process.h"
#include "comm/message.h"
#include "fsdp/step/root.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/wrap_scope.h"

namespace tessera::detail {

// FullyShardedDataParallel's work with its units after they are made.

bool is_root(const torch::nn::Module& module) {
  const auto unit = find_unit(&module);
  if (!unit) throw Error(ErrorCode::invalid_argument, "the module is no unit any more");
  if (!entry_of(*unit).root) Root::make(*unit);
  return entry_of(*unit).root->units().front() == unit;
}

void require_root(const torch::nn::Module& module, const std::string& otherwise) {
  if (!is_root(module)) throw Error(ErrorCode::invalid_argument, otherwise);
  if (!find_unit(&module)->schedule().is_quiet()) {
    throw Error(ErrorCode::invalid_argument,
                "call it between steps: the model is in a forward or a backward");
  }
}

namespace {

using Units = std::vector<std::pair<std::string, std::shared_ptr<Unit>>>;

void require_not_hybrid(const Units& units) {
  for (const auto& [name, unit] : units) {
    if (unit->is_hybrid()) {
      throw Error(ErrorCode::invalid_argument,
                  "communication hooks are not supported for hybrid strategies")
          .at_key(name);
    }
  }
}

}  // namespace

void register_comm_hook(const torch::nn::Module& module, const CommHook& hook) {
  require_root(module, "register_comm_hook can only be called on a root instance.");
  if (!hook) throw Error(ErrorCode::invalid_argument, "a communication hook must be callable");
  const auto units = units_below(module);
  require_not_hybrid(units);
  for (const auto& [name, unit] : units) unit->set_comm_hook(hook);
}

}  // namespace tessera::detail

namespace tessera {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

// Parameters that `replicate` left whole are no unit of FSDP's.
bool is_replicated(const torch::nn::Module& module) {
  const auto unit = detail::find_unit(&module);
  return unit && !unit->is_sharded() && !unit->is_fsdp1();
}

void append_units(const torch::nn::Module& parent,
                  std::unordered_set<const torch::nn::Module*>& seen, Modules& into) {
  for (const auto& module : parent.children()) {
    if (!seen.insert(module.get()).second || is_replicated(*module)) continue;
    if (detail::find_unit(module.get())) into.push_back(module);
    append_units(*module, seen, into);
  }
}

void append_if_unit(const torch::nn::Module& module, Modules& into) {
  const auto unit = detail::find_unit(&module);
  if (!unit) return;
  for (auto& own : unit->modules()) {
    if (own.get() == &module) into.push_back(std::move(own));
  }
}

}  // namespace

Modules fsdp_modules(ModuleRef module, bool root_only) {
  Modules found;
  if (is_replicated(module.get())) return found;
  std::unordered_set<const torch::nn::Module*> seen{&module.get()};
  append_if_unit(module.get(), found);
  append_units(module.get(), seen, found);
  if (root_only) std::erase_if(found, [](const auto& one) { return !detail::is_root(*one); });
  return found;
}

namespace {

struct Scope {
  HybridMesh mesh;
  bool is_hybrid;
  FullyShardedOptions options;
};

// The scope of this thread: a rank builds its modules on one.
std::optional<Scope>& current_scope() {
  thread_local std::optional<Scope> scope;
  return scope;
}

// Every `count` neighbours are of one host, and the next ones of another.
bool are_blocks(const std::vector<Bytes>& hosts, std::size_t count) {
  if (hosts.size() % count != 0) return false;
  for (std::size_t rank = 1; rank < hosts.size(); ++rank) {
    const bool begins_block = rank % count == 0;
    if ((hosts[rank] != hosts[rank - 1]) != begins_block) return false;
  }
  return true;
}

// The same on all of them, or it would split the ranks wrongly.
int counted_ranks(const std::vector<Bytes>& hosts) {
  const auto next = std::ranges::find_if(hosts, [&](const Bytes& h) { return h != hosts[0]; });
  const auto count = static_cast<std::size_t>(next - hosts.begin());
  if (are_blocks(hosts, count)) return static_cast<int>(count);
  throw Error(ErrorCode::invalid_argument,
              "the ranks of a host are not neighbours, or hosts have different numbers of them: "
              "pass the HybridMesh of Mesh::split");
}

// The text that a rank sends the others: what its launcher told it, or where it is.
constexpr std::string_view kTold = "LOCAL_WORLD_SIZE=";
constexpr std::string_view kUntold = "no LOCAL_WORLD_SIZE on ";

// A launcher tells each rank of its own host alone.
void require_told_alike(const std::vector<Bytes>& all) {
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw Error(ErrorCode::invalid_argument,
                "rank 0 has " + to_text(all[0]) + ", rank " + std::to_string(rank) + " has " +
                    to_text(all[rank]) + ": pass the HybridMesh of Mesh::split");
  }
}

int ranks_in(std::string_view text, const Mesh& mesh) {
  const auto* const last = text.data() + text.size();
  int ranks = 0;
  const auto [end, error] = std::from_chars(text.data(), last, ranks);
  if (error == std::errc() && end == last && ranks > 0 && mesh.size() % ranks == 0) return ranks;
  throw Error(ErrorCode::invalid_argument, "LOCAL_WORLD_SIZE=" + std::string(text) +
                                               ", expected a factor of the " +
                                               std::to_string(mesh.size()) + " ranks");
}

}  // namespace

EnableWrap::EnableWrap(const HybridMesh& mesh, bool is_hybrid, const FullyShardedOptions& options) {
  auto& scope = current_scope();
  if (scope) {
    throw Error(ErrorCode::unsupported,
                "You are already within an autowrap context and we currently do not supported "
                "nested autowrap");
  }
  scope = Scope{mesh, is_hybrid, options};
}

EnableWrap::EnableWrap(const Mesh& mesh, const FullyShardedOptions& options)
    : EnableWrap({mesh, mesh, mesh}, false, options) {}

EnableWrap::EnableWrap(const HybridMesh& mesh, const FullyShardedOptions& options)
    : EnableWrap(mesh, true, options) {}

EnableWrap::~EnableWrap() {
  current_scope().reset();
}

void detail::wrap_in_scope(const std::shared_ptr<torch::nn::Module>& module, SlotMaker slot_maker,
                           const std::function<void(FullyShardedOptions&)>& override_options) {
  const auto& scope = current_scope();
  if (!scope) return;
  auto options = scope->options;
  if (override_options) override_options(options);
  wrap_module(module, scope->mesh, scope->is_hybrid, options, std::move(slot_maker));
}

int ranks_of_host(const Mesh& mesh) {
  const char* text = std::getenv("LOCAL_WORLD_SIZE");
  const auto all = mesh.group().all_gather(
      to_bytes(text != nullptr ? std::string(kTold) + text : std::string(kUntold) + host_name()));
  const bool nobody =
      std::ranges::none_of(all, [](const auto& one) { return to_text(one).starts_with(kTold); });
  if (nobody) return counted_ranks(all);
  require_told_alike(all);
  return ranks_in(text, mesh);
}

}  // namespace tessera
