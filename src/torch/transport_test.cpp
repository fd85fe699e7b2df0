#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "torch/mesh_state.h"
#include "torch/testing.h"
#include "torch/transport.h"

namespace tessera {
namespace {

using testing::run_mesh;

// Ranks of one host, and Gloo.
void on_both_transports(int ranks, const std::function<void(Mesh&)>& body,
                        std::chrono::milliseconds deadline = std::chrono::seconds(30)) {
  for (const bool same_host : {true, false}) run_mesh(ranks, body, deadline, same_host);
}

// Values that every order of adding them up gives the same sum of, in every type.
at::Tensor whole_numbers(std::int64_t elements, at::ScalarType type, int rank) {
  return (torch::arange(elements) % 7 + rank).to(type);
}

// Sums at and past the size up to which Gloo's go as messages between pairs, all under way at once.
TEST(Transport, SumsOfEverySizeAndType) {
  for (const int ranks : {2, 3}) {
    on_both_transports(ranks, [&](Mesh& mesh) {
      const std::int64_t most = (std::int64_t{4} << 20) / 4 / (ranks - 1);
      for (const auto type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong}) {
        std::vector<at::Tensor> values, expected;
        std::vector<std::unique_ptr<PendingSum>> sums;
        for (const std::int64_t elements : {std::int64_t{1}, most, std::int64_t{1000}, most + 1,
                                            std::int64_t{1000}, std::int64_t{3}}) {
          values.push_back(whole_numbers(elements, type, mesh.rank()));
          expected.push_back(torch::zeros_like(values.back()));
          for (int r = 0; r < ranks; ++r) expected.back() += whole_numbers(elements, type, r);
          sums.push_back(detail::state_of(mesh)->transport->start_sum(values.back()));
        }
        for (const auto& sum : sums) sum->finish();
        for (std::size_t i = 0; i < values.size(); ++i)
          EXPECT_TRUE(torch::equal(values[i], expected[i])) << i << ", " << type;
      }
    });
  }
}

TEST(Transport, ASumHasTheSameBitsOnAllRanks) {
  on_both_transports(3, [](Mesh& mesh) {
    for (const auto type : {at::kFloat, at::kBFloat16}) {
      auto random = torch::make_generator<at::CPUGeneratorImpl>(mesh.rank());
      auto values = torch::randn({50'000}, random).to(type);
      detail::state_of(mesh)->transport->start_sum(values)->finish();
      const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
      const auto all = mesh.group().all_gather(Bytes(bytes, bytes + values.nbytes()));
      EXPECT_EQ(all[0], all[1]);
      EXPECT_EQ(all[0], all[2]);
    }
  });
}

// The shards of all ranks arrive where they are wanted, if a channel can do that.
TEST(Transport, GathersIntoTheMemoryAskedFor) {
  for (const std::string kind : {"same host", "pairs", "group"}) {
    run_mesh(
        3,
        [&](Mesh& mesh) {
          auto& state = *detail::state_of(mesh);
          const auto of_group = make_c10d_transport(state.process_group);
          auto& transport = kind == "group" ? *of_group : *state.transport;
          for (const auto type : {at::kFloat, at::kBFloat16}) {
            const auto channel = transport.open(5, at::kFloat, at::TensorOptions().dtype(type));
            channel->shard().copy_(torch::arange(5) + 10 * mesh.rank());
            at::Tensor all;
            const bool is_into = channel->start_gather_into(
                [&] { return all = torch::full({15}, -1, type); }, /*may_change=*/true);
            ASSERT_EQ(is_into, kind != "same host");
            if (!is_into) return;
            channel->shard().zero_();
            channel->finish_gather();
            for (int r = 0; r < 3; ++r) {
              EXPECT_TRUE(
                  torch::equal(all.narrow(0, 5 * r, 5), (torch::arange(5) + 10 * r).to(type)))
                  << kind << " " << r;
            }
            channel->finish_gather();  // does nothing
          }
        },
        std::chrono::seconds(30), /*same_host=*/kind == "same host");
  }
}

// Gloo ends the process when a message has another length than the one that is waited for.
TEST(Transport, RanksThatSumDifferentLengthsAreTold) {
  for (const std::int64_t length : {2'000, 5'000'000}) {
    run_mesh(
        2,
        [length](Mesh& mesh) {
          auto values = torch::ones({mesh.rank() == 0 ? 1'000 : length});
          try {
            detail::state_of(mesh)->transport->start_sum(values)->finish();
            ADD_FAILURE() << "no Error";
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::mismatch) << error.what();
          }
        },
        std::chrono::seconds(30), /*same_host=*/false);
  }
}

}  // namespace
}  // namespace tessera
