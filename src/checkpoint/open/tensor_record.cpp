#include "checkpoint/open/tensor_record.h"

#include <optional>
#include <utility>
#include <variant>

#include "checkpoint/dcp/catalog.h"

namespace tessera {

namespace {

void write_slice(MessageWriter& message, const Slice& slice) {
  const auto* box = std::get_if<Box>(&slice);
  message.count(box != nullptr ? 1 : 0);
  if (box != nullptr) {
    write_shape(message, box->offsets);
    write_shape(message, box->sizes);
  } else {
    const auto& range = std::get<FlatRange>(slice);
    write_shape(message, {range.begin, range.end});
  }
}

Slice read_slice(MessageReader& message) {
  const bool is_box = message.count() == 1;
  Shape first = read_shape(message);
  if (is_box) return Box{std::move(first), read_shape(message)};
  return FlatRange{first.at(0), first.at(1)};
}

}  // namespace

Value list_of(const std::optional<Value>& value) {
  return value ? Value::list({*value}) : Value::list();
}

std::optional<Value> only_of(const Value& list) {
  return list.size() == 0 ? std::nullopt : std::optional(list.at(0));
}

Value TensorEncoder::id_of(const Value& node, bool pieces) {
  const Tensor& tensor = node.as_tensor();
  MessageWriter record;
  record.value(tensor.dtype);
  for (const bool flag :
       {tensor.requires_grad, tensor.parameter, tensor.sharded, tensor.bare_storage})
    record.count(flag ? 1 : 0);
  write_shape(record, tensor.shape);
  record.value(tensor.placement);
  record.count(pieces ? tensor.pieces.size() : 0);
  if (pieces) {
    for (const Piece& piece : tensor.pieces) {
      write_slice(record, piece.slice);
      record.count(static_cast<std::uint64_t>(piece.storage_offset));
      write_shape(record, piece.strides);
      record.number(static_cast<std::int32_t>(piece.rank));
      record.count(piece.conj ? 1 : 0).count(piece.neg ? 1 : 0).count(piece.storage ? 1 : 0);
      if (piece.storage) write_storage_(*piece.storage, record);
    }
  }
  const auto number = numbers_.try_emplace(node.identity(), numbers_.size()).first->second;
  const auto attributes = tensor.attributes ? std::optional(*tensor.attributes) : std::nullopt;
  return Value::tuple({number, list_of(attributes), Value::bytes(record.take())});
}

Value TensorDecoder::tensor_of(const Value& id, bool once) {
  Value& known = known_[id.at(0).as_int()];
  if (known.is(Value::Kind::tensor)) return known;
  MessageReader record(id.at(2).as_bytes());
  Tensor tensor;
  tensor.dtype = record.value<DType>();
  for (bool* flag :
       {&tensor.requires_grad, &tensor.parameter, &tensor.sharded, &tensor.bare_storage})
    *flag = record.count() == 1;
  tensor.shape = read_shape(record);
  tensor.placement = record.value<std::optional<Placement>>();
  for (auto count = record.count(); count > 0; --count) tensor.pieces.push_back(read_piece(record));
  if (const auto attributes = only_of(id.at(1)))
    tensor.attributes = std::make_shared<const Value>(*attributes);
  Value made(std::move(tensor));
  if (once) known = made;
  return made;
}

Piece TensorDecoder::read_piece(MessageReader& message) const {
  Piece piece;
  piece.slice = read_slice(message);
  piece.storage_offset = static_cast<std::int64_t>(message.count());
  piece.strides = read_shape(message);
  piece.rank = message.number<std::int32_t>();
  piece.conj = message.count() == 1;
  piece.neg = message.count() == 1;
  if (message.count() == 1) piece.storage = read_storage_(message);
  return piece;
}

}  // namespace tessera
