#include "tessera/pytorch/wrap_scope.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/host.h"
#include "comm/text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

struct Scope {
  HybridMesh mesh;
  bool is_hybrid;
  FullyShardedOptions options;
};

// Of this thread: a rank builds its modules on one.
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

// What a rank says to the others: what its launcher told it, or where it is.
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
