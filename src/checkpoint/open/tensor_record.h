// Tensors in pickles that go from one process to another: each stands there by a persistent id.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "comm/message.h"
#include "tessera/value.h"

namespace tessera {

// The persistent id of a tensor is a tuple of its number, its attributes, and a record of the rest.
// What a storage is follows from where the bytes are, and is said by others. One node that stands
// in several places has one number.
class TensorEncoder {
 public:
  using WriteStorage = std::function<void(const Storage& storage, MessageWriter& message)>;

  explicit TensorEncoder(WriteStorage write_storage) : write_storage_(std::move(write_storage)) {}

  // As pickle::WriteOptions::persistent_id has it. `pieces`: whether the record has them.
  [[nodiscard]] Value id_of(const Value& node, bool pieces);

 private:
  const WriteStorage write_storage_;
  std::map<const void*, std::uint64_t> numbers_;  // by node
};

class TensorDecoder {
 public:
  using ReadStorage = std::function<std::shared_ptr<Storage>(MessageReader& message)>;

  explicit TensorDecoder(ReadStorage read_storage) : read_storage_(std::move(read_storage)) {}

  // As pickle::ReadOptions::persistent_load has it. `once`: the tensors of one number are one node.
  [[nodiscard]] Value tensor_of(const Value& id, bool once);

 private:
  [[nodiscard]] Piece read_piece(MessageReader& message) const;

  const ReadStorage read_storage_;
  std::map<std::int64_t, Value> known_;  // by number
};

// A list of one value, or of none.
[[nodiscard]] Value list_of(const std::optional<Value>& value);
[[nodiscard]] std::optional<Value> only_of(const Value& list);

}  // namespace tessera
