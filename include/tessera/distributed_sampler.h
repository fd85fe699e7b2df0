// DistributedSampler: which samples of a data set each rank sees, in the order of PyTorch's sampler
// of that name, and where it goes on after a restart, also with another number of ranks.
//
//   DistributedSampler sampler(batches.size(), mesh.size(), mesh.rank(), {.seed = 7});
//   TrainingState state(model, optimizer);
//   state.values["sampler"] = Value::dict();
//   load(state, "run/latest", mesh.checkpoint_group());  // a run that goes on
//   sampler.load_state_dict(state.values["sampler"]);
//   while (const auto numbers = sampler.next(1)) {
//     const auto& [tokens, next_tokens] = batches.at(numbers->front());
//     cross_entropy(model(tokens), next_tokens).backward();
//   }
//   sampler.set_epoch(sampler.epoch() + 1);
//   state.values["sampler"] = sampler.state_dict();  // before each save
//
// It is a sampler of libtorch too, for torch::data::make_data_loader. Workers of a loader ask for
// batches before they are trained on: take the state where no loader is ahead, or set it back.
#pragma once

#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

struct DistributedSamplerOptions {
  bool shuffle = true;
  std::uint64_t seed = 0;  // the same on all ranks; the epoch is added to it
  // false: samples from the front of the order fill up the last round, so that all ranks get the
  // same number. true: what does not fill a round is left out.
  bool drop_last = false;
};

class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  // The sampler of `size` samples, for rank `rank` of `num_replicas`. Throws `invalid_argument` for
  // a rank that is none of them.
  DistributedSampler(std::size_t size, int num_replicas, int rank,
                     const DistributedSamplerOptions& options = {});

  // The next samples of this rank in this epoch, at most `batch_size`; none when it is over.
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override;
  // How many of them are left.
  [[nodiscard]] std::size_t left() const;

  // Begins an epoch, which has an order of its own. As PyTorch's loops call it in every epoch, also
  // in the one that a restart goes on with, it changes nothing from load_state_dict() of that epoch
  // on until samples are asked for, or reset() was called. Later the same number begins the same
  // epoch anew.
  void set_epoch(std::uint64_t epoch);
  [[nodiscard]] std::uint64_t epoch() const noexcept { return epoch_; }
  // Begins the epoch anew, of another number of samples if `size` is given. A loader calls it when
  // it begins: the first call after load_state_dict() changes nothing.
  void reset(std::optional<std::size_t> size = std::nullopt) override;

  // Epoch, seed and how many samples all ranks together have taken of the epoch: the same on every
  // rank that took as many. Loaded by another number of ranks, these share what is left of the
  // epoch's order. Throws `mismatch` for another seed, number of samples or `shuffle`, and what
  // Value::at throws.
  [[nodiscard]] Value state_dict() const;
  void load_state_dict(const Value& state);
  // The same, for torch::save and torch::load.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  void make_order();

  std::size_t size_, replicas_, rank_;
  DistributedSamplerOptions options_;
  std::uint64_t epoch_ = 0;
  std::size_t begin_ = 0;           // samples of the epoch that other ranks took before
  std::size_t taken_ = 0;           // of this rank, since then
  bool is_loaded_ = false;          // and nothing was begun or asked for since
  std::vector<std::size_t> order_;  // of all ranks, from begin_ on, filled up or cut
};

}  // namespace tessera
