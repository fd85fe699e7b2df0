// What Tessera has after three steps on two ranks, for PyTorch to go on from.
//   optim_state_steps GOLDEN OUT
// GOLDEN/NAME.pt are the files of tests/golden/make/optim_state.py. For each and for KIND flat and
// original: OUT/NAME.KIND, a distributed checkpoint of the sharded model and optimizer state;
// OUT/NAME.KIND.pt, a torch.save file of the whole ones; OUT/NAME.KIND.losses, of two more steps.
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>

#include "fsdp/state/model_state.h"
#include "optim_state/test_models.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace {

using tessera::Mesh;
using tessera::Value;
using tessera::testing::Peer;

constexpr std::size_t kMoreSteps = 2;

double step(Peer& peer, const Value& batch) {
  peer.optim->zero_grad();
  const auto loss = peer.loss(tessera::tensor_of(batch.as_tensor()));
  loss.backward();
  peer.optim->step();
  return loss.item<double>();
}

// Only rank 0 writes.
void write_file(Value tree, const std::string& path) {
  const auto group = tessera::solo_group();
  tessera::save(tree, path + ".dcp", *group);
  tessera::ConvertOptions options;
  options.to = tessera::CheckpointKind::torch_file;
  tessera::convert(path + ".dcp", path, options);
}

void train(const Value& golden, const std::string& name, bool original, const std::string& out,
           const Mesh& mesh) {
  auto peer = tessera::testing::make_peer(name, golden.at("weights"), mesh, original);
  const auto& batches = golden.at("batches").items();
  for (const auto& batch : batches) step(peer, batch);
  const auto path = out + "/" + name + (original ? ".original" : ".flat");
  tessera::save(
      Value::dict({{"model", tessera::model_state(peer.module)},
                   {"optim", tessera::sharded_optim_state_dict(peer.module, *peer.optim)}}),
      path, mesh.checkpoint_group());
  const auto model = tessera::state_dict(peer.module);
  const auto optim = tessera::full_optim_state_dict(peer.module, *peer.optim);
  if (mesh.rank() == 0) write_file(Value::dict({{"model", model}, {"optim", optim}}), path + ".pt");
  std::string losses;
  for (std::size_t i = 0; i < kMoreSteps; ++i) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g ", step(peer, batches.at(i)));
    losses += text;
  }
  if (mesh.rank() != 0) return;
  std::FILE* file = std::fopen((path + ".losses").c_str(), "w");
  if (file == nullptr) throw tessera::Error(tessera::ErrorCode::io, "cannot write the losses");
  std::fputs(losses.c_str(), file);
  std::fclose(file);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  try {
    for (const std::string name : {"nested", "dummy", "transformer"}) {
      const auto golden =
          tessera::Checkpoint::open(std::string(argv[1]) + "/" + name + ".pt").load();
      for (const bool original : {false, true}) {
        tessera::testing::run_mesh(
            2, [&](Mesh& mesh) { train(golden, name, original, argv[2], mesh); });
      }
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
