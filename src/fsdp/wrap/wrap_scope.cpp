#include "tessera/pytorch/wrap_scope.h"

#include <unistd.h>

#include <array>
#include <charconv>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

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

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "";
  return name.data();
}

// The same on all of them, or it would split the ranks wrongly.
int counted_ranks(const std::vector<Bytes>& hosts) {
  std::size_t first = 1;
  while (first < hosts.size() && hosts[first] == hosts[0]) ++first;
  bool regular = hosts.size() % first == 0;
  for (std::size_t rank = 0; regular && rank < hosts.size(); ++rank) {
    regular = hosts[rank] == hosts[rank / first * first];
    if (rank % first == 0 && rank > 0) regular = regular && hosts[rank] != hosts[rank - 1];
  }
  if (regular) return static_cast<int>(first);
  throw Error(ErrorCode::invalid_argument,
              "the ranks of a host are not neighbours, or hosts have different numbers of them: "
              "pass the HybridMesh of Mesh::split");
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
  if (const char* text = std::getenv("LOCAL_WORLD_SIZE")) {
    const std::string_view view(text);
    int ranks = 0;
    const auto [end, error] = std::from_chars(view.data(), view.data() + view.size(), ranks);
    if (error == std::errc() && end == view.data() + view.size() && ranks > 0 &&
        mesh.size() % ranks == 0) {
      return ranks;
    }
    throw Error(ErrorCode::invalid_argument, "LOCAL_WORLD_SIZE=" + std::string(text) +
                                                 ", expected a factor of the " +
                                                 std::to_string(mesh.size()) + " ranks");
  }
  return counted_ranks(mesh.group().all_gather(to_bytes(host_name())));
}

}  // namespace tessera
