// A training of OLMo's model with Tessera's checkpointers: what olmo_fsdp.py is of OLMo's own.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "format/olmo/yaml.h"
#include "parity/olmo_model.h"
#include "tessera/checkpointer.h"
#include "tessera/error.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace tessera::testing {

using nlohmann::json;

inline constexpr const char* kCounts[] = {
    "epoch", "global_step", "global_train_examples_seen_this_epoch", "global_train_tokens_seen"};

inline std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorCode::not_found, "no such file").at_path(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A configuration of OLMo's, and its text.
struct Run {
  std::string text;
  Value config;

  explicit Run(const std::string& path)
      : text(text_of(path)), config(olmo::parse_yaml(std::as_bytes(std::span(text)))) {}

  [[nodiscard]] double number(const char* part, const char* key) const {
    return config.at(part).at(key).as_real();
  }
  // cosine_with_warmup, from and to a tenth.
  [[nodiscard]] double learning_rate(std::int64_t step) const {
    const double top = number("optimizer", "learning_rate"), low = top * 0.1;
    const double warmup = number("scheduler", "t_warmup");
    const double last = config.at("max_duration").as_real();
    const auto now = static_cast<double>(step);
    if (now < warmup) return low + (top - low) * now / warmup;
    if (now >= last) return low;
    const double part = (now - warmup) / (last - warmup);
    return low + (top - low) * (1 + std::cos(std::numbers::pi * part)) / 2;
  }
};

inline void wrap(Olmo& model, const Mesh& mesh, const json& job) {
  const auto way = job.value("wrap", "fsdp1");
  const int copies = job.value("copies", 1);
  auto& blocks = model->transformer->blocks;
  if (way == "ddp") {
    replicate(model, mesh);
  } else if (way == "fsdp2" && copies > 1) {
    const auto both = mesh.split(mesh.size() / copies);
    for (auto& block : blocks) fully_shard(block, both);
    fully_shard(model, both);
  } else if (way == "fsdp2") {
    for (auto& block : blocks) fully_shard(block, mesh);
    fully_shard(model, mesh);
  } else if (way != "none") {
    FullyShardedOptions options;
    options.auto_wrap_policy = module_wrap_policy<OlmoBlockImpl>();
    options.use_orig_params = way == "fsdp1";
    if (copies == 1) {
      const FullyShardedDataParallel<Olmo> wrapped(model, mesh, options);
      return;
    }
    options.sharding_strategy = ShardingStrategy::hybrid_shard;
    const FullyShardedDataParallel<Olmo> wrapped(model, mesh.split(mesh.size() / copies), options);
  }
}

// OLMo's groups: matrices decay, norms and embeddings do not. Flat parameters are one group.
inline AdamW make_optimizer(const Olmo& model, const Run& run) {
  AdamWOptions options;
  const auto& optimizer = run.config.at("optimizer");
  options.lr = optimizer.at("learning_rate").as_real();
  options.beta1 = optimizer.at("betas").at(0U).as_real();
  options.beta2 = optimizer.at("betas").at(1U).as_real();
  options.eps = 1e-5;
  options.weight_decay = optimizer.at("weight_decay").as_real();
  ParameterGroup decay{{}, options}, rest{{}, options};
  rest.options.weight_decay = 0;
  bool is_flat = false;
  for (auto& parameter : sharded_parameters(model)) {
    is_flat = is_flat || !parameter.members.empty();
    const auto& name = parameter.name();
    const bool decays =
        is_flat || name.find("att") != std::string::npos || name.find("ff_") != std::string::npos;
    const bool is_norm = !is_flat && name.find("norm") != std::string::npos;
    (decays && !is_norm ? decay : rest).parameters.push_back(std::move(parameter));
  }
  std::vector<ParameterGroup> groups{std::move(decay)};
  if (!is_flat) groups.push_back(std::move(rest));
  return AdamW(std::move(groups));
}

class Training {
 public:
  // `job`: "config" and, if given, "wrap", "copies", "load" and "batches" of checkpointer_tool.cpp.
  Training(const json& job, Mesh& mesh)
      : mesh_(mesh), run_(job.at("config")), model_(OlmoConfig::of(run_.config.at("model"))) {
    wrap(model_, mesh_, job);
    optimizer_.emplace(make_optimizer(model_, run_));
    for (const auto* key : kCounts) state_.set_item(key, 0);
    for (const auto* key : {"checkpoints", "unsharded_checkpoints", "ephemeral_checkpoints"})
      state_.set_item(key, Value::list());
    torch::manual_seed(static_cast<std::uint64_t>(run_.config.at("seed").as_int() + mesh_.rank()));
    if (job.contains("load")) restore(job["load"][0], job["load"][1]);
    state_.set_item("world_size", mesh_.size());
    if (job.contains("batches")) read_batches(job["batches"]);
    model_->train();
  }

  [[nodiscard]] std::int64_t step_count() const { return state_.at("global_step").as_int(); }

  void save(const std::string& kind, const std::string& directory) {
    state_.set_item("rng", random_state(random_));
    checkpointer(kind).save_checkpoint(directory, model_, *optimizer_, state_);
  }

  // A row of the file of losses.
  std::string step() {
    const auto done = step_count() + 1;
    const auto all = batches_.at(static_cast<std::size_t>(done - 1));
    const auto tokens = all.slice(0, mesh_.rank(), all.size(0), mesh_.size());
    optimizer_->zero_grad();
    const auto logits = model_(tokens).narrow(1, 0, tokens.size(1) - 1);
    const auto loss = torch::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}),
                                                tokens.narrow(1, 1, tokens.size(1) - 1).reshape(-1),
                                                {}, at::Reduction::Sum) /
                      tokens.numel();
    loss.backward();
    const double mean = mesh_.all_reduce_sum(loss.item<double>()) / mesh_.size();
    const double norm =
        clip_grad_norm(sharded_parameters(model_), run_.config.at("max_grad_norm").as_real());
    optimizer_->set_lr(run_.learning_rate(done));
    optimizer_->step();
    count("global_step", 1);
    count("global_train_examples_seen_this_epoch", all.size(0));
    count("global_train_tokens_seen", all.numel());
    char row[160];
    std::snprintf(row, sizeof row, "%lld,%.17g,%.17g,%.17g", static_cast<long long>(done), mean,
                  run_.learning_rate(done), norm);
    return row;
  }

  // Random numbers, too.
  void restore(const std::string& kind, const std::string& directory) {
    const auto found = checkpointer(kind).restore_checkpoint(directory, model_, *optimizer_);
    for (const auto* key : kCounts) state_.set_item(key, found.at(key));
    const auto* random = found.find("rng");
    if (random == nullptr) return;
    set_random_state(*random);
    random_ = *random;
  }

  // Draws the tokens of the next step.
  void draw_batch() {
    const auto rows = run_.config.at("global_train_batch_size").as_int();
    batches_.resize(static_cast<std::size_t>(step_count()) + 1);
    batches_.back() = torch::randint(100, {rows, model_->config.length}, torch::kInt64);
  }

 private:
  void count(const char* key, std::int64_t more) {
    state_.set_item(key, state_.at(key).as_int() + more);
  }

  Checkpointer& checkpointer(const std::string& kind) {
    CheckpointerOptions options;
    options.save_overwrite = true;
    options.thread_count = 2;
    options.config = with_kind(kind);
    options.group_options.set_item("max_grad_norm", run_.config.at("max_grad_norm").as_real());
    auto& group = mesh_.checkpoint_group();
    return checkpointer_.emplace(checkpointer_named(kind).value(), group, std::move(options));
  }

  // The configuration, naming this checkpointer.
  [[nodiscard]] std::string with_kind(const std::string& kind) const {
    if (kind == "full") return run_.text;
    constexpr std::string_view kKey = "sharded_checkpointer: ";
    auto text = run_.text;
    const auto at = text.find(kKey) + kKey.size();
    return text.replace(at, text.find('\n', at) - at, kind);
  }

  void read_batches(const std::string& path) {
    const auto bytes = text_of(path);
    const auto rows = run_.config.at("global_train_batch_size").as_int();
    const auto length = model_->config.length;
    const auto all = torch::from_blob(
        const_cast<char*>(bytes.data()),
        {static_cast<std::int64_t>(bytes.size()) / 8 / rows / length, rows, length}, torch::kInt64);
    batches_ = all.clone().unbind(0);
  }

  Mesh& mesh_;
  Run run_;
  Olmo model_;
  std::optional<AdamW> optimizer_;
  std::optional<Checkpointer> checkpointer_;
  Value state_ = Value::dict();
  Value random_ = Value::dict();
  std::vector<torch::Tensor> batches_;
};

}  // namespace tessera::testing
