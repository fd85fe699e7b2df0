#include <sstream>

#include "generated/case.h"

namespace tessera::generated {
namespace {

constexpr const char* kBlocks[] = {"linear",
                                   "mlp",
                                   "sequential",
                                   "conv",
                                   "norm",
                                   "attention",
                                   "mha",
                                   "encoder",
                                   "gru",
                                   "cell",
                                   "experts by step",
                                   "experts by rank",
                                   "table",
                                   "own",
                                   "tied",
                                   "nested",
                                   "empty",
                                   "complex result",
                                   "complex parameters",
                                   "conjugates",
                                   "strided",
                                   "thrower",
                                   "in place"};
constexpr const char* kPrecisions[] = {"fp32", "fp64", "bf16", "bf16, gradients too"};
constexpr const char* kOptimizers[] = {"SGD",     "Adam",   "AdamW", "tessera::AdamW",
                                       "Adagrad", "RMSprop"};
constexpr const char* kStyles[] = {"fully_shard", "FSDP1 flat", "FSDP1 original parameters",
                                   "replicate", "DDP"};
constexpr const char* kActions[] = {"train",
                                    "train, two forwards",
                                    "train unsharded",
                                    "forward only",
                                    "no optimizer step",
                                    "evaluate",
                                    "freeze",
                                    "thaw",
                                    "save",
                                    "load",
                                    "change",
                                    "look",
                                    "all throw, reset",
                                    "all throw in backward, again",
                                    "leave unsynced",
                                    "set_data",
                                    "failed load",
                                    "save in FullParams",
                                    "load in FullParams",
                                    "fork",
                                    "another mesh"};
constexpr const char* kAccumulate[] = {"", " no_sync", " sync flag"};
constexpr const char* kZero[] = {"", " zero by optimizer", " zero in place", " no zero_grad"};
constexpr const char* kForms[] = {" whole", " checkpoint", " sharded checkpoint"};
constexpr const char* kFaults[] = {" forward", " backward", " other recomputing"};
constexpr const char* kExtras[] = {"", " adversarial", " penalty"};
constexpr const char* kFeatureNames[] = {"autocast",
                                         "a checkpoint around all",
                                         "nested checkpoints",
                                         "a checkpoint of complex numbers",
                                         "blocks by micro-batch",
                                         "adversarial",
                                         "gradient penalty",
                                         "complex parameters",
                                         "conjugates",
                                         "strided parameters",
                                         "set_data",
                                         "zero_grad by the optimizer",
                                         "zero_grad by the module",
                                         "frozen and thawed",
                                         "a divide factor",
                                         "hooks",
                                         "caught in forward",
                                         "caught in backward",
                                         "changed recomputing",
                                         "a failed load",
                                         "inputs changed in place",
                                         "loads and saves in FullParams",
                                         "values of ranks",
                                         "a second model",
                                         "forks",
                                         "other meshes"};
constexpr const char* kOdd[] = {"nothing",
                                "skips the call of",
                                "calls later",
                                "calls twice",
                                "skips forward",
                                "skips backward",
                                "freezes",
                                "throws in the forward of",
                                "throws in the backward of",
                                "gets more rows",
                                "is wider",
                                "makes no unit of",
                                "evaluates alone",
                                "saves alone",
                                "clips alone",
                                "accumulates alone",
                                "leaves"};

template <typename Enum, std::size_t N>
const char* text(const char* const (&names)[N], Enum value) {
  return names[static_cast<std::size_t>(value)];
}

void describe_block(std::ostream& out, const Block& block) {
  out << text(kBlocks, block.kind);
  if (block.kind == BlockKind::tied) out << " to block" << block.source;
  if (block.twice) out << " twice";
  if (block.checkpoint) out << " checkpointed";
  if (block.hook) out << " hooked";
  if (block.frozen == Frozen::all) out << " frozen";
  if (block.frozen == Frozen::first) out << " half frozen";
}

void describe_layout(std::ostream& out, const Layout& layout) {
  out << layout.world << " ranks, " << text(kStyles, layout.style);
  if (layout.hybrid == Hybrid::copies) out << ", hybrid of copies";
  if (layout.hybrid == Hybrid::halves) out << ", hybrid of halves";
  if (layout.whole_units) out << ", NO_SHARD";
  if (layout.keep_after_forward) out << ", kept after forward";
  if (layout.keep_after_backward) out << ", kept after backward";
  if (!layout.forward_prefetch) out << ", no forward prefetch";
  if (layout.backward_prefetch == 0) out << ", no backward prefetch";
  if (layout.backward_prefetch == 2) out << ", backward prefetch post";
  if (layout.keep_part) out << ", half kept after forward";
  if (layout.last_dimension) out << ", dimension 1";
  if (layout.end_to_end) out << ", end to end";
  if (layout.offload) out << ", offload";
  if (layout.keep_bytes != 0) out << ", " << layout.keep_bytes << " bytes kept";
  if (layout.divide_factor != 0) out << ", divided by " << layout.divide_factor;
  if (layout.bucket_bytes != 0) out << ", buckets of " << layout.bucket_bytes;
  out << "; units: root";
  for (std::size_t i = 0; i < layout.units.size(); ++i) {
    if (layout.units[i]) out << " block" << i;
  }
  if (layout.inner != 0) out << ", " << layout.inner << "% of inner modules";
}

void describe_step(std::ostream& out, const Step& step) {
  out << text(kActions, step.action);
  switch (step.action) {
    case Action::train:
    case Action::train_twice_forward:
    case Action::train_unsharded:
    case Action::no_step:
      if (step.micros > 1) out << " x" << step.micros << text(kAccumulate, step.accumulate);
      out << text(kZero, step.zero) << text(kExtras, step.extra);
      if (step.by_micro) out << " blocks by micro";
      if (step.caught) out << " caught";
      if (step.clip > 0 && step.action != Action::no_step)
        out << " clip " << step.clip << " norm " << step.norm;
      break;
    case Action::forward_only:
      out << text(kZero, step.zero);
      break;
    case Action::freeze:
    case Action::thaw:
      out << " block" << step.block;
      break;
    case Action::fail_and_go_on:
      out << " of block" << step.block;
      break;
    case Action::fail_and_abandon:
      out << text(kFaults, step.fault) << " of block" << step.block;
      break;
    case Action::save:
      out << text(kForms, step.form);
      break;
    default:
      break;
  }
}

}  // namespace

std::string describe(const Case& drawn) {
  std::ostringstream out;
  out << "seed " << drawn.seed << ": " << text(kPrecisions, drawn.precision) << ", "
      << text(kOptimizers, drawn.optimizer) << ", width " << drawn.width;
  if (drawn.gloo) out << ", Gloo";
  if (drawn.autocast) out << ", autocast";
  if (drawn.checkpoint_all) out << ", a checkpoint around all";
  if (!drawn.features.empty()) {
    out << " [" << text(kFeatureNames, drawn.features.front()) << " + "
        << text(kFeatureNames, drawn.features.back()) << "]";
  }
  out << "\n  blocks:";
  for (std::size_t i = 0; i < drawn.blocks.size(); ++i) {
    out << (i == 0 ? " " : ", ");
    describe_block(out, drawn.blocks[i]);
  }
  for (const auto& phase : drawn.phases) {
    out << "\n  ";
    describe_layout(out, phase.layout);
    out << "\n   ";
    for (std::size_t s = 0; s < phase.steps.size(); ++s) {
      out << " " << s << ": ";
      describe_step(out, phase.steps[s]);
      out << ";";
    }
  }
  if (drawn.odd != Odd::nothing) {
    out << "\n  rank " << drawn.odd_rank << " in step " << drawn.odd_step << " "
        << text(kOdd, drawn.odd) << " (block" << drawn.odd_block << ")";
  }
  return out.str();
}

}  // namespace tessera::generated
