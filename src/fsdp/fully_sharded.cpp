// What FullyShardedDataParallel does with its units after they are made.
#include <string>

#include "fsdp/registry.h"
#include "fsdp/root.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace tessera::detail {

bool is_root(const torch::nn::Module& module) {
  const auto unit = find_unit(&module);
  if (!unit) throw Error(ErrorCode::invalid_argument, "the module is no unit any more");
  if (!unit->root) Root::make(*unit);
  return unit->root->units().front() == unit;
}

void require_root(const torch::nn::Module& module, const std::string& otherwise) {
  if (!is_root(module)) throw Error(ErrorCode::invalid_argument, otherwise);
  if (!find_unit(&module)->root->is_quiet())
    throw Error(ErrorCode::invalid_argument, "not possible in a forward or backward");
}

void register_comm_hook(const torch::nn::Module& module, const CommHook& hook) {
  require_root(module, "register_comm_hook can only be called on a root instance.");
  if (!hook) throw Error(ErrorCode::invalid_argument, "a communication hook must be callable");
  const auto units = units_below(module);
  for (const auto& [name, unit] : units) {
    if (unit->is_hybrid()) {
      throw Error(ErrorCode::invalid_argument,
                  "communication hooks are not supported for hybrid strategies")
          .at_key(name);
    }
  }
  for (const auto& [name, unit] : units) unit->set_comm_hook(hook);
}

}  // namespace tessera::detail
