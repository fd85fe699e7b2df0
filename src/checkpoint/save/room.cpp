#include "checkpoint/save/room.h"

#include <optional>
#include <string>

#include "tessera/error.h"

namespace tessera {

void require_free(const Store& store, std::uint64_t bytes) {
  const std::optional<std::uint64_t> free = store.free_bytes();
  if (!free || *free >= bytes) return;
  throw Error(ErrorCode::out_of_space,
              "the tensors have " + std::to_string(bytes) + " bytes, " + std::to_string(*free) +
                  " are free, and nothing is removed before the new checkpoint is there")
      .at_path(store.name());
}

}  // namespace tessera
