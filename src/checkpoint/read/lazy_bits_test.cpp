// torch's conjugate and negative bits in every executor: save, load, a file's values (issue
// 15, 3.1).
#include <complex>

#include "checkpoint/test_support.h"
#include "format/torch/torch_file.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using C = std::complex<float>;

// One dimension of complex numbers in memory, with the bits that are given.
Value numbers(std::vector<C> values, bool conj, bool neg) {
  Tensor tensor;
  tensor.dtype = DType::complex64;
  tensor.shape = {static_cast<std::int64_t>(values.size())};
  Piece piece{whole(tensor.shape), memory(values.size() * sizeof(C)), 0, {}, -1, conj, neg};
  std::memcpy(piece.storage->data, values.data(), values.size() * sizeof(C));
  tensor.pieces.push_back(std::move(piece));
  return Value(std::move(tensor));
}

std::vector<C> stored(const Value& value) {
  const Tensor& tensor = value.as_tensor();
  std::vector<C> values(static_cast<std::size_t>(tensor.shape.at(0)));
  std::memcpy(values.data(), tensor.pieces.at(0).storage->data, values.size() * sizeof(C));
  return values;
}

const std::vector<C> kGiven = {{1, 2}, {-3, 4}};
const std::vector<C> kConj = {{1, -2}, {-3, -4}};
const std::vector<C> kNeg = {{-1, -2}, {3, -4}};

TEST(LazyBitsInCheckpoints, SaveResolvesThem) {
  const std::string directory = temporary_directory() + "/dcp";
  const auto group = solo_group();
  save(Value::dict({{"conj", numbers(kGiven, true, false)},
                    {"neg", numbers(kGiven, false, true)},
                    {"inside", Value::tuple({numbers(kGiven, true, false)})}}),
       directory, *group);
  const Value tree = Checkpoint::open(directory).load();
  EXPECT_EQ(stored(tree.at("conj")), kConj);
  EXPECT_EQ(stored(tree.at("neg")), kNeg);
  EXPECT_EQ(stored(tree.at("inside").items().at(0)), kConj);
}

TEST(LazyBitsInCheckpoints, LoadFillsWhatTheTargetStandsFor) {
  const std::string directory = temporary_directory() + "/dcp";
  const auto group = solo_group();
  save(Value::dict({{"w", numbers(kGiven, false, false)}}), directory, *group);
  Value tree = Value::dict({{"w", numbers({{0, 0}, {0, 0}}, true, false)}});
  load(tree, directory, *group);
  EXPECT_EQ(stored(tree.at("w")), kConj);  // whose conjugates are what was saved
}

TEST(LazyBitsInCheckpoints, APieceOfSeveralIsResolvedWhenTheyAreGathered) {
  Value whole_tensor = numbers(kGiven, true, false);
  Tensor tensor = whole_tensor.as_tensor();
  Piece second = tensor.pieces[0];
  tensor.pieces[0].slice = Box{{0}, {1}};
  second.slice = Box{{1}, {1}};
  second.storage_offset = 1;
  second.conj = false;
  tensor.pieces.push_back(std::move(second));
  const auto bytes = torch_file::write(Value(std::move(tensor)), "archive");
  const Value read = torch_file::read(memory_source(bytes, "archive"));
  const Piece& piece = read.as_tensor().pieces.at(0);
  std::vector<C> values(2);
  piece.storage->source->read_at(piece.storage->offset,
                                 {reinterpret_cast<std::byte*>(values.data()), 16});
  EXPECT_EQ(values, (std::vector<C>{{1, -2}, {-3, 4}}));
  EXPECT_FALSE(piece.conj);
}

}  // namespace
}  // namespace tessera
