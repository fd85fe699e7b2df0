// Shapes and paths in messages between ranks.
#pragma once

#include "comm/message.h"
#include "tessera/leaf.h"

namespace tessera {

void write_shape(MessageWriter& message, const Shape& shape);
[[nodiscard]] Shape read_shape(MessageReader& message);

void write_path(MessageWriter& message, const Path& path);
[[nodiscard]] Path read_path(MessageReader& message);

}  // namespace tessera
