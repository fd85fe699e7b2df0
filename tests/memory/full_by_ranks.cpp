// Four ranks save a `full` checkpoint and restore it, each in less memory than the model has.
//   full_by_ranks DIRECTORY
// Each rank is a process that may have, beside what it has at rest, its shards and 128 MiB more
// (RLIMIT_DATA): less than the whole. Prints what the ranks took at most; exits with 1 if one
// failed.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "crash/socket_wire.h"
#include "layout/boxes.h"
#include "limit.h"
#include "multirank/forked_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace {

using namespace tessera;

constexpr int kRanks = 4;
constexpr int kTensors = 8;
constexpr std::int64_t kElements = 16 << 20;               // of each: 64 MiB
constexpr std::uint64_t kMore = std::uint64_t{128} << 20;  // bytes
constexpr std::uint64_t kShards = std::uint64_t{kTensors} * kElements * 4 / kRanks;
static_assert(kShards + kMore < kShards * kRanks);

// Element i of tensor t.
float element(int t, std::int64_t i) {
  return static_cast<float>((i * 7 + t) % 8191);
}

// Half of the tensors are cut as flat parameters, the others into rows.
Tensor tensor_of(int t, int rank, bool fill) {
  Tensor tensor;
  tensor.shape = {kElements / 1024, 1024};
  tensor.sharded = true;
  tensor.placement = t % 2 == 0 ? Placement{.parts = kRanks}
                                : Placement{kRanks, 1, 0, kElements / kRanks + 1000, 3000};
  for (Box& box : boxes_of_part(*tensor.placement, tensor.shape, rank)) {
    const auto count = static_cast<std::size_t>(numel(box));
    std::shared_ptr<float[]> numbers(new float[count]);
    const std::int64_t first = box.offsets[0] * 1024 + box.offsets[1];
    for (std::size_t i = 0; i < count; ++i)
      numbers[i] = fill ? element(t, first + static_cast<std::int64_t>(i)) : -1.0F;
    auto storage = std::make_shared<Storage>();
    storage->data = reinterpret_cast<std::byte*>(numbers.get());
    storage->size = count * sizeof(float);
    storage->owner = numbers;
    tensor.pieces.push_back({std::move(box), std::move(storage), 0, {}, rank});
  }
  return tensor;
}

Value tree_of(int rank, bool fill) {
  Value model = Value::dict({}, DictKind::ordered_dict);
  for (int t = 0; t < kTensors; ++t)
    model.set_item("w" + std::to_string(t), tensor_of(t, rank, fill));
  return Value::dict({{"model", model}});
}

void require_elements(const Value& tree) {
  int t = 0;
  for (const auto& [name, value] : tree.at("model").pairs()) {
    for (const Piece& piece : value.as_tensor().pieces) {
      const Box& box = std::get<Box>(piece.slice);
      const auto* numbers = reinterpret_cast<const float*>(piece.storage->data);
      const std::int64_t first = box.offsets[0] * 1024 + box.offsets[1];
      for (std::int64_t i = 0; i < numel(box); ++i) {
        if (numbers[i] != element(t, first + i))
          throw Error(ErrorCode::corrupt, "another element").at_key(name.as_string());
      }
    }
    ++t;
  }
}

int take_part(Group& group, const std::string& directory, int rank) {
  try {
    testing::limit_memory(kShards + kMore);
    SaveOptions options;
    options.kind = CheckpointKind::olmo_full;
    save(tree_of(rank, true), directory + "/step1", options, group);
    Value tree = tree_of(rank, false);
    load(tree, directory + "/step1", group);
    require_elements(tree);
  } catch (const std::exception& error) {
    std::printf("rank %d: %s\n", rank, error.what());
    std::fflush(stdout);
    return 1;
  }
  const double mib = static_cast<double>(testing::status_kib("VmHWM")) / 1024;
  std::printf("rank %d: at most %.0f MiB, its shards are %.0f, the model %.0f\n", rank, mib,
              static_cast<double>(kShards >> 20), static_cast<double>(kShards * kRanks >> 20));
  std::fflush(stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::string directory = argv[1];
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  auto children = testing::fork_group(
      kRanks, {}, std::chrono::seconds(60),
      [&](Group& group, int rank) { return take_part(group, directory, rank); });
  testing::wait_for(children, {.end = testing::Clock::now() + std::chrono::seconds(200)});
  const std::string wrong = testing::end_all(children, [](int, int status) { return status == 0; });
  std::filesystem::remove_all(directory);
  if (!wrong.empty()) std::printf("%s\n", wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
