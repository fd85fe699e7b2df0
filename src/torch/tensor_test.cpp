#include "torch/tensor.h"

#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpoint.h"
#include "tessera/tensor_value.h"

namespace tessera {

// Tensors of libtorch as values: the same memory, through checkpoints, and what is refused.

namespace {

// 47, 4.6.
TEST(TensorValues, ShareMemoryBothWays) {
  const auto parameter = torch::ones({2, 3}).requires_grad_();
  const auto complex = torch::complex(torch::ones({3}), torch::full({3}, 2.0));
  const std::vector<torch::Tensor> all{torch::ones({2, 3}),
                                       torch::ones({3, 4}).t().narrow(0, 1, 2),
                                       torch::tensor(7),
                                       parameter,
                                       parameter * 2,
                                       complex.conj(),
                                       at::_neg_view(torch::ones({3}))};
  for (const auto& tensor : all) {
    auto tree = Value::dict();
    tree.set_item("ema", to_value(tensor));
    auto back = to_tensor(tree.at("ema"));
    EXPECT_EQ(back.scalar_type(), tensor.scalar_type());
    EXPECT_FALSE(back.requires_grad());
    EXPECT_TRUE(torch::equal(back, tensor));
    back.fill_(5);
    EXPECT_TRUE(torch::equal(back, tensor));
    EXPECT_TRUE(torch::all(tensor == 5).item<bool>());
  }
  EXPECT_EQ(to_tensor(to_value(torch::ones({0, 3}))).sizes(), (std::vector<std::int64_t>{0, 3}));
  auto kept = to_value(torch::full({3}, 4.0));  // the only owner of the memory
  EXPECT_TRUE(torch::equal(to_tensor(kept.as_tensor()), torch::full({3}, 4.0)));
}

TEST(TensorValues, GoThroughACheckpoint) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const auto complex = torch::complex(torch::ones({3}), torch::full({3}, 2.0));
  const auto tree = [](const torch::Tensor& rows, const torch::Tensor& numbers) {
    return Value::dict({{"rows", to_value(rows)}, {"numbers", to_value(numbers)}});
  };
  save(tree(torch::arange(6.0).reshape({2, 3}).t(), complex.conj()), path, *solo_group());
  // Memory of another dtype, other strides and other bits is filled all the same.
  const auto rows = torch::zeros({3, 2}, at::kDouble);
  const auto memory = torch::zeros_like(complex);
  auto into = tree(rows, memory.conj());
  load(into, path, *solo_group());
  EXPECT_TRUE(torch::equal(rows, torch::arange(6.0).reshape({2, 3}).t().to(at::kDouble)));
  EXPECT_TRUE(torch::equal(memory, complex));
  EXPECT_TRUE(torch::equal(to_tensor(into.at("numbers")), complex.conj()));

  const auto opened = Checkpoint::open(path);
  EXPECT_EQ(code_of([&] { static_cast<void>(to_tensor(opened.tensor("rows"))); }),
            ErrorCode::unsupported);
  EXPECT_TRUE(torch::equal(to_tensor(opened.load().at("rows")), rows.to(at::kFloat)));
}

TEST(TensorValues, RefuseWhatCannotBeOne) {
  const auto refused = [](const torch::Tensor& tensor) {
    return code_of([&] { static_cast<void>(to_value(tensor)); });
  };
  EXPECT_EQ(refused({}), ErrorCode::invalid_argument);
  EXPECT_EQ(refused(torch::ones({2, 2}).to_sparse()), ErrorCode::unsupported);
  EXPECT_EQ(refused(torch::ones({2}, at::kMeta)), ErrorCode::unsupported);
  EXPECT_EQ(refused(at::quantize_per_tensor(torch::ones({2}), 0.1, 0, at::kQInt8)),
            ErrorCode::unsupported);
  const auto none = [](const Value& value) {
    return code_of([&] { static_cast<void>(to_tensor(value)); });
  };
  EXPECT_EQ(none(Value()), ErrorCode::mismatch);
  EXPECT_EQ(none(3), ErrorCode::mismatch);
  EXPECT_EQ(none(Value::list({to_value(torch::ones({2}))})), ErrorCode::mismatch);
  EXPECT_EQ(none(sharded_leaf_of(torch::ones({2}), {4}, 2)), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
