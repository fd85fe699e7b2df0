#include "checkpoint/dcp/leaf_message.h"

namespace tessera {

void write_shape(MessageWriter& message, const Shape& shape) {
  message.count(shape.size());
  for (const std::int64_t size : shape) message.count(static_cast<std::uint64_t>(size));
}

Shape read_shape(MessageReader& message) {
  Shape shape;
  for (auto count = message.count(); count > 0; --count)
    shape.push_back(static_cast<std::int64_t>(message.count()));
  return shape;
}

void write_path(MessageWriter& message, const Path& path) {
  message.count(path.size());
  for (const PathPart& part : path) {
    const auto* index = std::get_if<std::int64_t>(&part);
    message.count(index != nullptr ? 1 : 0);
    if (index != nullptr) {
      message.number(*index);
    } else {
      message.text(step_text(part));
    }
  }
}

Path read_path(MessageReader& message) {
  Path path;
  for (auto count = message.count(); count > 0; --count) {
    if (message.count() == 1) {
      path.emplace_back(message.number<std::int64_t>());
    } else {
      path.emplace_back(message.text());
    }
  }
  return path;
}

}  // namespace tessera
