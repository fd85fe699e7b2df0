// The messages of a save: plain values, pickled.
#include "base/digest.h"
#include "checkpoint/save/save_plan.h"
#include "format/pickle/pickle.h"
#include "tessera/error.h"

namespace tessera {
namespace {

Value integers(const Shape& numbers) {
  Value::List items;
  for (const std::int64_t number : numbers) items.emplace_back(number);
  return Value::list(std::move(items));
}

Shape to_shape(const Value& list) {
  Shape shape;
  for (const Value& item : list.items()) shape.push_back(item.as_int());
  return shape;
}

Value path_value(const Path& path) {
  Value::List steps;
  for (const PathPart& part : path) {
    const auto* index = std::get_if<std::int64_t>(&part);
    steps.push_back(index != nullptr ? Value(*index) : Value(step_text(part)));
  }
  return Value::list(std::move(steps));
}

Path to_path(const Value& list) {
  Path path;
  for (const Value& step : list.items()) {
    if (step.is(Value::Kind::string)) {
      path.emplace_back(step.as_string());
    } else {
      path.emplace_back(step.as_int());
    }
  }
  return path;
}

Value read_message(const Bytes& message) {
  return pickle::read(message).value;
}

std::size_t to_index(const Value& value) {
  return static_cast<std::size_t>(value.as_int());
}

Value from_index(std::uint64_t index) {
  return Value(static_cast<std::int64_t>(index));
}

Value indices(const std::vector<std::size_t>& numbers) {
  Value::List list;
  for (const std::size_t index : numbers) list.push_back(from_index(index));
  return Value::list(std::move(list));
}

std::vector<std::size_t> to_indices(const Value& list) {
  std::vector<std::size_t> numbers;
  for (const Value& index : list.items()) numbers.push_back(to_index(index));
  return numbers;
}

}  // namespace

Bytes encode_proposal(const std::vector<WriteItem>& items) {
  Value::List list;
  for (const WriteItem& item : items) {
    list.push_back(Value::tuple({Value(item.name), path_value(item.path), Value(item.is_tensor),
                                 Value(static_cast<int>(item.dtype)), integers(item.shape),
                                 integers(item.box.offsets), integers(item.box.sizes),
                                 Value(item.requires_grad), Value(item.held)}));
  }
  return pickle::write(Value::list(std::move(list)));
}

std::vector<WriteItem> decode_proposal(const Bytes& message) {
  std::vector<WriteItem> items;
  const Value list = read_message(message);
  for (const Value& row : list.items()) {
    const Value::List& cells = row.items();
    WriteItem item;
    item.name = cells.at(0).as_string();
    item.path = to_path(cells.at(1));
    item.is_tensor = cells.at(2).as_bool();
    item.dtype = static_cast<DType>(cells.at(3).as_int());
    item.shape = to_shape(cells.at(4));
    item.box = Box{to_shape(cells.at(5)), to_shape(cells.at(6))};
    item.requires_grad = cells.at(7).as_bool();
    item.held = cells.at(8).as_bool();
    items.push_back(std::move(item));
  }
  return items;
}

Bytes encode_orders(const Orders& orders) {
  return pickle::write(
      Value::tuple({indices(orders.assigned), indices(orders.copied), Value(orders.equal_copies)}));
}

Orders decode_orders(const Bytes& message) {
  const Value row = read_message(message);
  const Value::List& cells = row.items();
  return {to_indices(cells.at(0)), to_indices(cells.at(1)), cells.at(2).as_bool()};
}

Bytes encode_written(const Written& written) {
  Value::List items;
  for (const WrittenItem& item : written.items) {
    items.push_back(Value::tuple({from_index(item.item), Value(item.where.path),
                                  from_index(item.where.offset), from_index(item.where.length)}));
  }
  Value::List samples;
  for (const std::uint64_t sample : written.samples) samples.emplace_back(digest_text(sample));
  return pickle::write(
      Value::tuple({Value::list(std::move(items)), Value::list(std::move(samples))}));
}

Written decode_written(const Bytes& message) {
  Written written;
  const Value both = read_message(message);
  for (const Value& row : both.items().at(0).items()) {
    const Value::List& cells = row.items();
    WrittenItem item;
    item.item = to_index(cells.at(0));
    item.where.path = cells.at(1).as_string();
    item.where.offset = static_cast<std::uint64_t>(cells.at(2).as_int());
    item.where.length = static_cast<std::uint64_t>(cells.at(3).as_int());
    written.items.push_back(std::move(item));
  }
  for (const Value& sample : both.items().at(1).items())
    written.samples.push_back(digest_of_text(sample.as_string()));
  return written;
}

}  // namespace tessera
