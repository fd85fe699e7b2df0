// What Tessera has after three steps on two ranks, for PyTorch to go on from.
//   optim_state_steps GOLDEN OUT [PEER]
// GOLDEN/NAME.pt are the files of tests/golden/make/optim_state.py. For each and for KIND flat and
// original: OUT/NAME.KIND, a distributed checkpoint of the sharded model and optimizer state;
// OUT/NAME.KIND.pt, a torch.save file of the whole ones; OUT/NAME.KIND.losses, of two more steps.
// For models that are the same in Python, and also for KIND rows (fully_shard) and plain:
// OUT/NAME.KIND.FORM, what get_state_dict gives in each form. With PEER it sets what it loads from
// PEER/NAME.KIND.FORM, and writes that.
#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "fsdp/state/model_state.h"
#include "optim_state/test_models.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/distributed_state_dict.h"
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

struct Form {
  const char* name;
  tessera::DistributedStateDictOptions options;
};
std::vector<Form> forms() {
  return {{"sharded", {}},
          {"sharded_flat", {.flatten_optimizer_state_dict = true}},
          {"full", {.full_state_dict = true}},
          {"full_flat", {.full_state_dict = true, .flatten_optimizer_state_dict = true}}};
}

Value state_of(Peer& peer, const Form& form) {
  const auto [model, optim] = tessera::get_state_dict(peer.module, *peer.optim, form.options);
  return Value::dict({{"model", model}, {"optim", optim}});
}

void save_forms(Peer& peer, const std::string& path, const Mesh& mesh) {
  for (const auto& form : forms())
    tessera::save(state_of(peer, form), path + "." + form.name, mesh.checkpoint_group());
}

// Into a peer that has made no step, and out of it again.
void take_forms(const std::function<Peer()>& make, const std::string& from, const std::string& to,
                const Mesh& mesh) {
  for (const auto& form : forms()) {
    auto peer = make();
    auto state = state_of(peer, form);
    tessera::load(state, from + "." + form.name, mesh.checkpoint_group());
    tessera::set_state_dict(peer.module, *peer.optim, state.at("model"), state.at("optim"),
                            form.options);
    tessera::save(state_of(peer, form), to + "." + form.name, mesh.checkpoint_group());
  }
}

Peer make(const std::string& name, const std::string& kind, const Value& weights,
          const Mesh& mesh) {
  if (kind == "flat" || kind == "original")
    return tessera::testing::make_peer(name, weights, mesh, kind == "original");
  tessera::testing::DummyModel model;
  tessera::set_model_state_dict(model, weights, {.full_state_dict = true});
  if (kind == "rows") tessera::fully_shard(model, mesh);
  return {model.ptr(), [model](const auto& batch) mutable { return model(batch).sum(); },
          tessera::testing::make_adam(model, 0.01)};
}

void save_for_fsdp(Peer& peer, const std::string& path, const Mesh& mesh) {
  tessera::save(
      Value::dict({{"model", tessera::model_state(peer.module)},
                   {"optim", tessera::sharded_optim_state_dict(peer.module, *peer.optim)}}),
      path, mesh.checkpoint_group());
  const auto model = tessera::state_dict(peer.module);
  const auto optim = tessera::full_optim_state_dict(peer.module, *peer.optim);
  if (mesh.rank() == 0) write_file(Value::dict({{"model", model}, {"optim", optim}}), path + ".pt");
}

void write_losses(Peer& peer, const Value::List& batches, const std::string& path,
                  const Mesh& mesh) {
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

struct Case {
  std::string name, kind;
  // PyTorch's model of this name has the same names.
  [[nodiscard]] bool is_same_in_python() const { return name != "transformer"; }
  [[nodiscard]] bool is_fsdp() const { return kind == "flat" || kind == "original"; }
};

void train(const Value& golden, const Case& one, const std::string& path, const Mesh& mesh) {
  auto peer = make(one.name, one.kind, golden.at("weights"), mesh);
  const auto& batches = golden.at("batches").items();
  for (const auto& batch : batches) step(peer, batch);
  if (one.is_same_in_python()) save_forms(peer, path, mesh);
  if (!one.is_fsdp()) return;
  save_for_fsdp(peer, path, mesh);
  write_losses(peer, batches, path, mesh);
}

void run(const Value& golden, const Case& one, const std::string& out, const char* peer,
         const Mesh& mesh) {
  const auto file = "/" + one.name + "." + one.kind;
  if (peer == nullptr) return train(golden, one, out + file, mesh);
  if (!one.is_same_in_python()) return;
  take_forms([&] { return make(one.name, one.kind, golden.at("weights"), mesh); }, peer + file,
             out + file, mesh);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) return 2;
  const char* peer = argc == 4 ? argv[3] : nullptr;
  try {
    for (const std::string name : {"nested", "dummy", "transformer"}) {
      const auto golden =
          tessera::Checkpoint::open(std::string(argv[1]) + "/" + name + ".pt").load();
      for (const std::string kind : {"flat", "original", "rows", "plain"}) {
        const Case one{name, kind};
        if (!one.is_fsdp() && name != "dummy") continue;
        tessera::testing::run_mesh(2, [&](Mesh& mesh) { run(golden, one, argv[2], peer, mesh); });
      }
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
