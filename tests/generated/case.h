// A training drawn from a seed: the model, how it is sharded, what its steps do, and what one rank
// does differently. Plain values: they are described, made smaller and compared without libtorch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera::generated {

enum class BlockKind : std::uint8_t {
  linear,
  mlp,
  sequential,  // a torch::nn::Sequential with slots
  conv,
  norm,
  attention,
  multihead,  // torch's own
  encoder,    // torch's TransformerEncoderLayer
  gru,
  cell,             // a GRUCell that is called for every position
  experts_by_step,  // one of three, the same on all ranks
  experts_by_rank,  // one of three, another one on other ranks
  table,            // an embedding of positions
  own,              // parameters of odd shapes and a buffer
  tied,             // shares its weight with an earlier linear one
  nested,           // two blocks inside
  empty,            // no parameters
  // From here on in pairs of features alone.
  complex_result,      // two parts, the first of which gives complex numbers
  complex_parameters,  // of complex numbers
  conjugates,          // used by their conjugates and parts, so that gradients come as views
  strided,             // parameters that are no contiguous memory
  thrower,             // two parts, between which it may throw
  in_place,            // a part of it changes what it is given
};
enum class Frozen : std::uint8_t { no, all, first };  // first: its first parameter

struct Block {
  BlockKind kind = BlockKind::linear;
  bool twice = false;       // a forward calls it twice
  bool checkpoint = false;  // computed again in backward
  bool hook = false;        // on its result, which halves the gradient
  Frozen frozen = Frozen::no;
  int source = -1;  // tied: the linear block
};

enum class Precision : std::uint8_t { fp32, fp64, bf16, bf16_reduce };  // the last: also gradients
enum class OptimizerKind : std::uint8_t { sgd, adam, adamw, own_adamw, adagrad, rmsprop };

enum class Style : std::uint8_t { rows, flat, flat_original, replicate, ddp };
enum class Hybrid : std::uint8_t { no, copies, halves };  // ranks that share: one, half of them

// Until the number of ranks or the way of sharding changes.
struct Layout {
  int world = 2;
  Style style = Style::rows;
  Hybrid hybrid = Hybrid::no;
  bool whole_units = false;         // FSDP1's NO_SHARD
  bool keep_after_forward = false;  // SHARD_GRAD_OP
  bool keep_after_backward = false;
  bool forward_prefetch = true;
  int backward_prefetch = 1;    // 0: none, 1: pre, 2: post
  bool keep_part = false;       // reshard_after_forward_ranks
  bool last_dimension = false;  // shard_placement where sizes allow
  bool end_to_end = false;      // rows: ShardLayout::flat
  bool offload = false;
  int keep_bytes = 0;        // set_keep_gathered; 0: nothing stays
  double divide_factor = 0;  // 0: none
  int bucket_bytes = 0;      // of replicate; 0: one bucket
  std::vector<bool> units;   // which blocks are units of their own
  int inner = 0;             // percent of modules inside of blocks that are units
  std::uint64_t inner_seed = 0;
};

enum class Action : std::uint8_t {
  train,
  train_twice_forward,  // two forwards, one backward
  train_unsharded,      // between unshard and reshard
  forward_only,         // the backward is skipped
  no_step,              // gradients stay, no optimizer step
  evaluate,
  freeze,
  thaw,
  save,
  load,
  change,            // all parameters, within FullParams
  look,              // at the whole parameters
  fail_and_abandon,  // every rank throws, then abandon_step()
  fail_and_go_on,    // the same in backward, and the next step just begins
  leave_unsynced,    // a micro-batch whose gradients are kept for a later step
  set_data,          // parameters get other memory, with other values
  failed_load,       // of what is not there, or not whole
  save_inside,       // of changed parameters, within FullParams
  load_inside,       // over changed parameters, within FullParams
  fork,              // a child that asks for the mesh
  other_mesh,        // made, used and gone
};
enum class Accumulate : std::uint8_t { synced, no_sync, flag };
enum class Zero : std::uint8_t { model, optimizer, to_zero, none };
enum class Form : std::uint8_t { whole, checkpoint, sharded_checkpoint };
enum class Fault : std::uint8_t {
  before_call,  // of a block
  in_backward,
  other_recomputing,  // an activation checkpoint gives another shape the second time
};
// What is made of the gradient of the batch before the step itself.
enum class Extra : std::uint8_t {
  nothing,
  adversarial,  // the batch is moved along it
  penalty,      // its size is added to the loss
};

struct Step {
  Action action = Action::train;
  int micros = 1;
  Accumulate accumulate = Accumulate::synced;
  Zero zero = Zero::model;
  double clip = 0;  // 0: not
  double norm = 2;
  int block = 0;
  Fault fault = Fault::before_call;  // fail_and_abandon
  Form form = Form::whole;
  Extra extra = Extra::nothing;
  bool by_micro = false;  // each micro-batch leaves out another block
  bool caught = false;    // the root catches what `block` throws inside, and goes on without it
};

struct Phase {
  Layout layout;
  std::vector<Step> steps;
};

// What one rank does differently.
enum class Odd : std::uint8_t {
  nothing,
  skips_call,
  swaps_calls,
  calls_again,
  skips_forward,
  skips_backward,
  freezes,
  throws_in_forward,
  throws_in_backward,
  more_rows,
  other_width,
  other_units,
  evaluates_alone,
  saves_alone,
  clips_alone,
  accumulates_alone,
  leaves,
};

// Each is right by itself; what is wrong lies where two of them meet.
enum class Feature : std::uint8_t {
  autocast,
  checkpoint_around_all,
  nested_checkpoints,
  checkpoint_of_complex,
  blocks_by_micro,  // within NoSync
  adversarial,
  gradient_penalty,
  complex_parameters,
  conjugates,
  strided,
  set_data,
  zero_by_optimizer,  // of gradients that NoSync keeps
  zero_by_module,
  frozen_and_thawed,
  divide_factor,
  hooks,
  caught_in_forward,
  caught_in_backward,
  changed_recomputing,
  failed_load,
  in_place_inputs,
  inside_full_params,
  values_of_ranks,
  second_model,  // trained between forward and backward of the first
  forks,
  other_meshes,
};
inline constexpr int kFeatures = 26;

struct Case {
  std::uint64_t seed = 0;
  int width = 6;
  Precision precision = Precision::fp32;
  bool rough = false;   // compared up to what many steps make of a rounding
  bool nudged = false;  // all first values are larger by some last digits
  bool gloo = false;    // else ranks talk through memory that they share
  bool autocast = false;
  bool checkpoint_all = false;  // one activation checkpoint around all blocks
  std::vector<Feature> features;
  OptimizerKind optimizer = OptimizerKind::sgd;
  std::vector<Block> blocks;
  std::vector<Phase> phases;
  Odd odd = Odd::nothing;
  int odd_rank = 0;
  int odd_step = 0;
  int odd_block = 0;
};

// The same for the same seed. Every third one has a rank that differs.
[[nodiscard]] Case draw(std::uint64_t seed);
// The same training with more in it: changes inside FullParams, layers that are frozen and thawed,
// a second model, values of ranks, forks, other meshes, each in one case of four. Not beside a rank
// that differs.
[[nodiscard]] Case draw_with_more(std::uint64_t seed);
// With two features, the next pair of them for the next seed, and the next style once all pairs are
// through; no rank differs.
[[nodiscard]] Case draw_pair(std::uint64_t seed);
// Takes out of a case what the headers forbid.
void settle(Case& drawn);
// A few readable lines.
[[nodiscard]] std::string describe(const Case& drawn);
// The same with one thing less, in the order in which they are worth trying.
[[nodiscard]] std::vector<Case> smaller(const Case& drawn);

// What follows from a layout -------------------------------------------------------------------

// How many ranks share the parameters.
[[nodiscard]] int sharing_ranks(const Layout& layout);
// Parameters stay whole: there is nothing to gather.
[[nodiscard]] bool stays_whole(const Layout& layout, Precision precision);
[[nodiscard]] inline bool is_low(Precision precision) {
  return precision == Precision::bf16 || precision == Precision::bf16_reduce;
}
[[nodiscard]] bool has_complex(const Block& block);  // among its parameters
[[nodiscard]] inline bool has(const Case& drawn, Feature feature) {
  return std::ranges::find(drawn.features, feature) != drawn.features.end();
}
// The block is one of two that share a weight, which can be in one unit only.
[[nodiscard]] bool shares_weight(const Case& drawn, int block);

}  // namespace tessera::generated
