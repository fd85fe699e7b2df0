#include "checkpoint/read/missing.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/text.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "tessera/io.h"
#include "value/equality.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr const char* kModule = "tessera";
constexpr const char* kName = "missing";

const LazySource* missing_file_of(const Piece& piece) {
  if (!piece.storage) return nullptr;
  const auto* file = dynamic_cast<const LazySource*>(piece.storage->source.get());
  return file != nullptr && file->is_missing() ? file : nullptr;
}

// Calls `visit` with each, until it answers true.
template <typename Visit>
void visit_missing(const Value& value, const Visit& visit) {
  const auto visit_pieces = [&visit](const Tensor& tensor) {
    for (const Piece& piece : tensor.pieces) {
      const LazySource* const file = missing_file_of(piece);
      if (file != nullptr && visit(*file)) return true;
    }
    return false;
  };
  if (value.is(Value::Kind::tensor) && visit_pieces(value.as_tensor())) return;
  for (const InnerTensor& inner : inner_tensors(value)) {
    if (visit_pieces(inner.tensor->as_tensor())) return;
  }
}

}  // namespace

// One byte that nobody can read, in an object: it is in the way of all that reads or writes values.
Value missing_value(std::shared_ptr<const LazySource> file, bool is_tensor) {
  auto storage = std::make_shared<Storage>();
  storage->source = std::move(file);
  storage->size = 1;
  storage->dtype = DType::uint8;
  Tensor byte;
  byte.dtype = DType::uint8;
  byte.shape = {1};
  byte.pieces.push_back(Piece{whole(byte.shape), std::move(storage), 0, {}, -1});
  return Value::object({.callable = Value::global(kModule, kName),
                        .arguments = Value::tuple({Value(std::move(byte)), Value(is_tensor)})});
}

Piece empty_piece(const Tensor& tensor) {
  auto nothing = std::make_shared<Storage>();
  nothing->dtype = tensor.dtype;
  nothing->source = memory_source({}, "no elements");
  return Piece{whole(tensor.shape), std::move(nothing), 0, {}, -1};
}

bool is_missing(const Piece& piece) {
  return missing_file_of(piece) != nullptr;
}

bool is_missing_value(const Value& value) {
  return value.is(Value::Kind::object) && is_global(value.as_object().callable, kModule, kName) &&
         missing_file(value) != nullptr;
}

bool is_missing_tensor(const Value& value) {
  return is_missing_value(value) && value.as_object().arguments.at(1).as_bool();
}

const LazySource* missing_file(const Value& value) {
  const LazySource* found = nullptr;
  visit_missing(value, [&found](const LazySource& file) {
    found = &file;
    return true;
  });
  return found;
}

std::vector<std::string> missing_files(const Value& value, const std::string& directory) {
  std::set<std::string> names;
  visit_missing(value, [&](const LazySource& file) {
    const bool is_below = file.name().starts_with(directory + "/");
    names.insert(is_below ? file.name().substr(directory.size() + 1) : file.name());
    return false;
  });
  return {names.begin(), names.end()};
}

void require_here(const Leaf& leaf) {
  if (const LazySource* file = missing_file(leaf.value)) throw file->missing().at_key(leaf.name);
}

void require_here(const Tensor& want, const Tensor& have) {
  if (std::ranges::none_of(have.pieces, is_missing)) return;
  const auto slices_of = [](const Tensor& tensor) {
    std::vector<Slice> slices;
    slices.reserve(tensor.pieces.size());
    for (const Piece& piece : tensor.pieces) slices.push_back(piece.slice);
    return slices;
  };
  const std::vector<Slice> from = slices_of(have), to = slices_of(want);
  for (const Copy& copy : plan_copies(have.shape, from, to)) {
    if (const LazySource* const file = missing_file_of(have.pieces[copy.from]))
      throw file->missing();
  }
}

std::optional<std::string> warning_of_missing(const std::vector<std::string>& files,
                                              const std::vector<std::string>& left) {
  if (files.empty()) return std::nullopt;
  Named names, leaves;
  for (const std::string& file : files) names.add(printable(file, 200));
  for (const std::string& leaf : left) leaves.add(printable(leaf, 200));
  const bool is_one = files.size() == 1;
  const std::string text =
      (is_one ? "a file is missing: " : std::to_string(files.size()) + " files are missing: ") +
      names.text();
  if (left.empty()) return text + "; what lies there cannot be read, the rest can";
  return text + "; left out: " + leaves.text();
}

}  // namespace tessera
