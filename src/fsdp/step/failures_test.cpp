// What a failure leaves: a model that can be used again after abandon_step, an outer module that
// goes on where it catches, and a module that was not touched where it was refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/testing/test_values.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/full_params.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/trace.h"
#include "tessera/unit_controls.h"
#include "torch/compat.h"
#include "torch/testing.h"
#include "torch/transport.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::with_values;

// What is under way -------------------------------------------------------------------------------

// One rank leaves out its backward (`continue` where the loss is NaN), so that the other's
// reduction cannot even begin.
TEST(Abandon, AReductionThatNeverBegan) {
  for (const bool same_host : {true, false}) {
    std::promise<void> gathers;
    const auto is_gathering = gathers.get_future().share();
    run_mesh(
        2,
        [&](Mesh& mesh) {
          auto linear = with_values(nn::Linear(4, 4), 3);
          fully_shard(linear, mesh);
          auto loss = call_module(linear, torch::ones({2, 4})).sum();
          const auto text = error_of([&] {
            if (mesh.rank() == 1) {
              abandon_step(linear);
              auto next = start_unshard(linear);
              gathers.set_value();
              next.wait();
            } else {
              is_gathering.wait();
              loss.backward();
            }
          });
          EXPECT_THAT(text, HasSubstr("mismatch"));
          EXPECT_NO_THROW(abandon_step(linear));
          EXPECT_NO_THROW(abandon_step(linear));
        },
        std::chrono::seconds(10), same_host);
  }
}

}  // namespace
}  // namespace tessera
