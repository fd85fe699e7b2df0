// For the tests of optimizer state: cases by PyTorch's names at several world sizes, training, and
// comparing states (spec H-11 to H-17).
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/value.h"

namespace tessera::testing {

// The values of an option that is on or off.
inline constexpr bool kBoth[] = {false, true};

// The threads of one run meet here.
struct Lobby;

// One rank of a run.
class Rank {
 public:
  Rank(Mesh& all, Lobby& lobby) : mesh(all), lobby_(lobby) {}
  Mesh& mesh;
  // The even ranks as a mesh of their own; unset on odd ones. Each call makes another one.
  [[nodiscard]] std::optional<Mesh> halved();
  // Rank 0's tree, a copy for each rank of `group`. What saving and loading a file would do.
  [[nodiscard]] Value broadcast(const Value& tree, const Mesh& group);

 private:
  Lobby& lobby_;
  int halves_ = 0;
};

using CaseBody = std::function<void(Rank&)>;
// On 2, 3 and 4 ranks. Says which world size failed.
void run_worlds(const CaseBody& body, const std::vector<int>& worlds = {2, 3, 4});

// A test of the suite FsdpOptimState for each of them.
struct Case {
  std::string name;
  CaseBody body;
};
bool register_cases(const std::vector<Case>& cases);
// "_name_True": how PyTorch's names say what a case is.
[[nodiscard]] std::string flag(const char* name, bool value);

// Trees ---------------------------------------------------------------------------------------

// How far tensors may differ.
struct Tolerance {
  double relative = 0;
  double absolute = 0;
};
inline constexpr Tolerance kExact{};
inline constexpr Tolerance kAssertEqual{1.3e-6, 1e-5};  // unittest's for float32
inline constexpr Tolerance kIsClose{1e-5, 1e-8};        // torch.isclose's

// Kinds, dtypes, shapes, keys and values; the order of keys does not count.
[[nodiscard]] ::testing::AssertionResult same(const Value& a, const Value& b,
                                              Tolerance tolerance = kExact);
// With tensors of its own.
[[nodiscard]] Value copy_of(const Value& tree);
// The tensor of a leaf that is here whole, or of what is here of it; also without elements.
[[nodiscard]] at::Tensor tensor_in(const Value& leaf);
// The value of a key of any kind; null: absent.
[[nodiscard]] const Value* find_key(const Value& dict, const Value& key);
// As text, in their order.
[[nodiscard]] std::vector<std::string> keys_of(const Value& dict);
[[nodiscard]] std::vector<std::string> texts_of(const Value& list);
[[nodiscard]] Value without(const Value& dict, std::string_view key);

// Keys are of one sort in both (names, or numbers of this rank's optimizer), or they are not
// compared.
enum class Keys : std::uint8_t { same, differ };
void check_same_state(const Value& state_dict, const Value& reference, Keys keys);
void check_same_param_groups(const Value& state_dict, const Value& reference, Keys keys);
void check_same(const Value& state_dict, const Value& reference, Keys keys);

// Training ------------------------------------------------------------------------------------

struct TrainedOptions {
  const Mesh* mesh = nullptr;  // null: not wrapped
  bool alternative = false;
  bool multiple_groups = false;
  bool reversed = false;  // the optimizer's parameters
  bool use_orig_params = false;
};
struct Trained {
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(at::Generator&)> loss;
  std::unique_ptr<torch::optim::Adam> optim;
  std::optional<OptimInput> input;
};
// Not stepped yet; Adam with a learning rate of 0.01.
[[nodiscard]] Trained init_nested(const TrainedOptions& options);
[[nodiscard]] Trained init_transformer(const TrainedOptions& options);
// The losses. The batches are the same each time.
std::vector<double> step_model(Trained& trained, int steps);

// Zeros as gradients of what is trained: the next step makes states without changing anything much.
void give_zero_gradients(ModuleRef module);

}  // namespace tessera::testing
