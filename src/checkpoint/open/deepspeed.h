// The flat values of DeepSpeed's checkpoints: which files have them, and which elements of each
// parameter lie where (docs/formats/deepspeed.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/open/rank_files.h"
#include "tessera/error.h"
#include "tessera/value.h"

namespace tessera::deepspeed {

inline constexpr int kReaders = 8;  // threads, of a checkpoint's files

[[noreturn]] void refuse(ErrorCode code, const std::string& what, const std::string& path);

// "[bf16_][zero_pp_rank_R_]mp_rank_MM_model_states.pt", or of "_optim_states.pt".
[[nodiscard]] bool is_file(std::string_view name);

// Whether a file of this name has that of the step's directory.
[[nodiscard]] inline bool is_pointer(std::string_view name) {
  return name == "latest" || name == "latest_universal";
}
// The directory that the first of such files names; none: there is no such file, or it names none.
[[nodiscard]] std::optional<std::string> latest_of(const Store& store,
                                                   const std::vector<ObjectInfo>& files);

// A directory of a universal checkpoint has files for each parameter.
inline constexpr std::string_view kUniversalFolder = "zero";
inline constexpr std::string_view kUniversalState = "zero/optimizer_state.pt";

// By data rank; -1: of all.
struct Files {
  std::map<int, ObjectInfo> model;
  std::map<int, ObjectInfo> optim;
  std::optional<ObjectInfo> universal = {};  // its optimizer_state.pt
};
// Throws `unsupported` for files of tensor, pipeline or expert parallelism.
[[nodiscard]] Files files_of(const std::vector<ObjectInfo>& all, const std::string& where);

struct Parameter {
  std::string name;
  Shape shape;
  std::int64_t elements = 0;
};
using Group = std::vector<Parameter>;
// The parameters of a dict of names and sizes. Throws `corrupt` with `path`.
[[nodiscard]] Group group_of(const Value& shapes, const std::string& path);

// What a rank's file of the optimizer holds.
struct ZeroRank {
  std::string path;
  Value file = {};
  Value all = {};                         // its optimizer_state_dict
  bool cuts_each = false;                 // ZeRO 3 cuts each parameter, 1 and 2 all of a group
  std::vector<Tensor> arrays = {};        // flat fp32 values of groups, or of parts of one
  std::vector<const Value*> states = {};  // of each array: a dict; null: there is none
  const Value* param_groups = nullptr;
};
// Those of all ranks. Throws `incomplete` if one is missing, `conflict` if they are not of one
// save, `corrupt`, and `unsupported` for other optimizers.
[[nodiscard]] std::vector<ZeroRank> read_ranks(const RankStore& from, const Files& files);

// Elements of a parameter, in an array of a rank from element `at` on; there may be none.
struct Fragment {
  FlatRange range;
  std::size_t array = 0;
  std::int64_t at = 0;
};
// What each rank has of every parameter, in the order of the groups. Throws `corrupt` if the ranks'
// arrays are shorter or longer than the parameters with their padding.
using Fragments = std::vector<Fragment>;
[[nodiscard]] std::vector<Fragments> fragments_of(const std::vector<ZeroRank>& ranks,
                                                  const std::vector<Group>& groups);

// Whether a value of the optimizer's state has an element for each of an array, and no more than
// the padding that the rank says it has behind them: the arrays are saved without it.
[[nodiscard]] bool is_beside(const Value& state, const ZeroRank& rank, std::size_t array);
// One dimension, one element behind the other.
[[nodiscard]] bool is_flat(const Value& value);
[[nodiscard]] std::int64_t length_of(const Tensor& flat);

// A parameter that is cut for itself: the elements that each of `world` ranks stores, and those of
// them that are the parameter's.
[[nodiscard]] std::int64_t part_of_each(const Parameter& parameter, std::size_t world);
[[nodiscard]] FlatRange range_of_each(const Parameter& parameter, std::size_t world,
                                      std::size_t rank);

}  // namespace tessera::deepspeed
