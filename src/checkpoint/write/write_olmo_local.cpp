// model/, optim/ and train/rank{r}.pt of a local checkpoint, and metadata.yaml (checkpoint-rows
// O-72, O-77).
#include "base/parallel.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/write/local_archives.h"
#include "format/olmo/config.h"

namespace tessera {
namespace {

constexpr const char* kDefaultUnit = "(.*\\.)?blocks\\.[0-9]+";

UnitPlan plan_of(const ConvertJob& job, const std::vector<std::string>& names) {
  const std::string& unit = job.options.olmo.unit;
  if (unit.empty() && job.source.kind == CheckpointKind::olmo_local) {
    return UnitPlan::of_local(*job.source.store, names);
  }
  return UnitPlan::by_expression(names, unit.empty() ? kDefaultUnit : unit);
}

void put_text(const ConvertJob& job, std::string_view name, const std::string& text) {
  put(job.store, name, {reinterpret_cast<const std::byte*>(text.data()), text.size()},
      job.if_exists);
}

}  // namespace

std::string world_file_text(int ranks) {
  return "world_size: " + std::to_string(ranks) + "\n";
}

void write_olmo_local(ConvertJob& job, const OlmoState& state) {
  const SourceTensors sources(state);
  UnitPlan plan = plan_of(job, names_in_flat_model(state.model));
  const int ranks = job.options.ranks;
  const FlatRules rules{ranks, job.options.olmo.orig_params.value_or(plan.aligned()), {}};
  const LocalArchives archives(state, sources, std::move(plan), rules);
  parallel_for(job.threads, static_cast<std::size_t>(ranks), [&](std::size_t index) {
    const auto rank = static_cast<int>(index);
    write_archive(job, archives.model(own_file("model", rank), rank), 1);
    if (state.optim) write_archive(job, archives.optim(own_file("optim", rank), rank), 1);
    write_train(job, state, own_file("train", rank));
  });
  put_text(job, olmo::kWorldFile, world_file_text(ranks));
}

}  // namespace tessera
