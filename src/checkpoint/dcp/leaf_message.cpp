#include "checkpoint/dcp/leaf_message.h"

#include "format/pickle/pickle.h"

namespace tessera {
namespace {

enum class Step : std::uint8_t { text, index, key };  // as PathPart has them

}  // namespace

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
    if (const auto* index = std::get_if<std::int64_t>(&part)) {
      message.number(Step::index).number(*index);
    } else if (const auto* key = std::get_if<DictKey>(&part)) {
      message.number(Step::key).text(key->text).block(pickle::write(key->key));
    } else {
      message.number(Step::text).text(std::get<std::string>(part));
    }
  }
}

Path read_path(MessageReader& message) {
  Path path;
  for (auto count = message.count(); count > 0; --count) {
    const auto step = message.number<Step>();
    if (step == Step::index) {
      path.emplace_back(message.number<std::int64_t>());
      continue;
    }
    std::string text = message.text();
    if (step == Step::key) {
      Value key = pickle::read(message.block()).value;
      path.emplace_back(DictKey{std::move(text), std::move(key)});
    } else {
      path.emplace_back(std::move(text));
    }
  }
  return path;
}

}  // namespace tessera
