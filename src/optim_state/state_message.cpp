#include "optim_state/state_message.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "comm/confer.h"
#include "comm/whereabouts.h"
#include "format/pickle/pickle.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera::detail {
namespace {

// A tensor travels as a call of a name that nothing else has.
constexpr const char* kModule = "tessera";
constexpr const char* kName = "tensor";

Value shape_value(const Shape& shape) {
  Value::List sizes;
  for (const auto size : shape) sizes.emplace_back(size);
  return Value::tuple(std::move(sizes));
}

Shape shape_of(const Value& value) {
  Shape shape;
  for (const auto& size : value.items()) shape.push_back(size.as_int());
  return shape;
}

bool is_one_piece_in_memory(const Tensor& tensor) {
  if (tensor.pieces.size() != 1) return false;
  const auto& piece = tensor.pieces.front();
  return piece.storage && is_in_memory(*piece.storage) && piece.strides.empty();
}

// The bytes of a tensor in one piece in memory, row by row.
Bytes bytes_of(const Tensor& tensor) {
  const auto size = byte_size(tensor.dtype, tensor.shape);
  if (size == 0) return {};
  if (!is_one_piece_in_memory(tensor))
    throw Error(ErrorCode::unsupported, "a tensor that is not one contiguous piece in memory");
  const auto& piece = tensor.pieces.front();
  const auto from = static_cast<std::uint64_t>(piece.storage_offset) * size_of(tensor.dtype);
  Bytes bytes(size);
  StorageReader(*piece.storage, from, from + size).read(from, bytes);
  return bytes;
}

Value packed_tensor(const Tensor& tensor, bool with_data) {
  Value data;
  Value::List boxes;
  if (with_data) {
    data = Value::bytes(bytes_of(tensor));
  } else {
    for (const auto& piece : tensor.pieces) {
      const auto& box = std::get<Box>(piece.slice);
      boxes.push_back(Value::tuple({shape_value(box.offsets), shape_value(box.sizes)}));
    }
  }
  Object object;
  object.callable = Value::global(kModule, kName);
  object.arguments = Value::tuple({std::string(to_string(tensor.dtype)), shape_value(tensor.shape),
                                   tensor.sharded, std::move(data), Value::list(std::move(boxes))});
  return Value::object(std::move(object));
}

// `inside`: in a list or tuple, where tensors are plain values.
Value packed(const Value& tree, bool inside) {
  if (tree.is(Value::Kind::tensor)) {
    const auto& tensor = tree.as_tensor();
    return packed_tensor(tensor, inside || tensor.shape.empty());
  }
  const bool below = inside || !tree.is(Value::Kind::dict);
  return map_children(tree, [below](const Value& child) { return packed(child, below); });
}

Bytes pickled(const Value& tree) {
  pickle::WriteOptions options;
  options.protocol = 4;
  return pickle::write(tree, options);
}

// `boxes`: as pairs of offsets and sizes.
std::vector<Piece> described_pieces(const Value& boxes, const Shape& shape) {
  std::vector<Piece> pieces;
  for (const auto& box : boxes.items()) {
    const auto& pair = box.items();
    auto& piece = pieces.emplace_back();
    piece.slice = Box{shape_of(pair.at(0)), shape_of(pair.at(1))};
    require_inside(piece.slice, shape);
  }
  return pieces;
}

// All of a tensor, in memory of its own.
Piece piece_of_bytes(const Bytes& bytes, DType dtype, const Shape& shape) {
  if (bytes.size() != byte_size(dtype, shape))
    throw Error(ErrorCode::corrupt, "a tensor's bytes do not fit its shape");
  auto data = std::make_shared<Bytes>(bytes);
  auto storage = std::make_shared<Storage>();
  storage->size = data->size();
  storage->data = data->data();
  storage->owner = data;
  storage->dtype = dtype;
  Piece piece;
  piece.slice = whole(shape);
  piece.storage = std::move(storage);
  return piece;
}

Value unpacked_tensor(const Value::List& fields) {
  if (fields.size() != 5)
    throw Error(ErrorCode::corrupt, "a tensor's description is not five fields");
  Tensor tensor;
  tensor.dtype = dtype_from_torch(fields[0].as_string());
  tensor.shape = shape_of(fields[1]);
  tensor.sharded = fields[2].as_bool();
  if (fields[3].is(Value::Kind::none)) {
    tensor.pieces = described_pieces(fields[4], tensor.shape);
  } else {
    tensor.pieces.push_back(piece_of_bytes(fields[3].as_bytes(), tensor.dtype, tensor.shape));
  }
  return tensor;
}

bool is_tensor_call(const Value& callable) {
  return callable.is(Value::Kind::global) && callable.global_module() == kModule &&
         callable.global_name() == kName;
}

// One byte that says which, then a tree or an Error.
constexpr std::byte kTree{0}, kFailure{1};

Bytes report_of(const std::function<Value()>& describe) {
  Bytes report{kTree};
  const auto append = [&](const Bytes& bytes) {
    report.insert(report.end(), bytes.begin(), bytes.end());
  };
  if (const auto failure = failure_of([&] { append(pack_tree(describe())); })) {
    report = {kFailure};
    append(encode_error(*failure));
  }
  return report;
}

std::vector<Value> trees_of(const std::vector<Bytes>& reports, const char* operation) {
  std::vector<Value> trees;
  std::map<int, Error> failures;
  for (std::size_t rank = 0; rank < reports.size(); ++rank) {
    const auto& report = reports[rank];
    if (report.empty()) throw Error(ErrorCode::corrupt, "an empty message").while_doing(operation);
    const Bytes rest(report.begin() + 1, report.end());
    if (report.front() == kFailure) {
      add_failure(failures, static_cast<int>(rank), decode_error(rest));
    } else if (failures.empty()) {
      trees.push_back(unpack_tree(rest));
    }
  }
  if (!failures.empty()) {
    throw Error::from_peers(std::move(failures), static_cast<int>(reports.size()))
        .while_doing(operation);
  }
  return trees;
}

bool same_tensor(const Tensor& a, const Tensor& b) {
  return a.dtype == b.dtype && a.shape == b.shape && bytes_of(a) == bytes_of(b);
}

}  // namespace

bool same_value(const Value& a, const Value& b) {
  if (a.identity() == b.identity()) return true;
  if (a.kind() != b.kind()) return false;
  if (a.is(Value::Kind::tensor)) return same_tensor(a.as_tensor(), b.as_tensor());
  return pickled(packed(Value::list({a}), true)) == pickled(packed(Value::list({b}), true));
}

Bytes pack_tree(const Value& tree) {
  return pickled(packed(tree, false));
}

Value unpack_tree(const Bytes& message) {
  pickle::ReadOptions options;
  options.reduce = [](const Value& callable, const Value& arguments, Value& result) {
    if (!is_tensor_call(callable)) return false;
    result = unpacked_tensor(arguments.items());
    return true;
  };
  auto parsed = pickle::read(message, options);
  if (parsed.consumed != message.size())
    throw Error(ErrorCode::corrupt, "bytes after the tree").at_offset(parsed.consumed);
  return std::move(parsed.value);
}

std::vector<Value> all_trees(Group& group, const char* operation,
                             const std::function<Value()>& describe) {
  const Purpose purpose(operation);
  return trees_of(group.all_gather(report_of(describe)), operation);
}

Value first_tree(Group& group, const char* operation, const std::function<Value()>& describe) {
  const Purpose purpose(operation);
  const auto mine = group.rank() == 0 ? report_of(describe) : Bytes{};
  return trees_of({group.broadcast(mine)}, operation).front();
}

}  // namespace tessera::detail
