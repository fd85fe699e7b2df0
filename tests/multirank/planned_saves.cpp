// Saves over Gloo put everything where the plan that one process computes says.
//   planned_saves DIRECTORY
// 2, 3 and 4 ranks are processes, 8 to 64 are threads. Each count of ranks saves few and many
// tensors, with placements and without. Then this process plans for all ranks by the functions that
// a fold calls, and compares: chunks, files, offsets and lengths in `.metadata`, and sizes of
// files. With placements, what ranks send may not depend on the number of tensors. Prints a line
// for each save that goes wrong and a summary; exits with 1 when one went wrong.
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "checkpoint/save/data_files.h"
#include "checkpoint/save/save_plan.h"
#include "comm/tree_links.h"
#include "conformance/forwarding_group.h"
#include "forked_ranks.h"
#include "format/dcp/dcp.h"
#include "layout/boxes.h"
#include "tessera/checkpoint.h"
#include "tessera/mesh.h"
#include "torch/torch_group.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)
constexpr auto kLimit = std::chrono::seconds(60);
constexpr int kFiles = 2;             // of a rank
constexpr int kFew = 8, kMany = 120;  // of each kind: with few, too, every rank has all its files

struct Job {
  int world = 2;
  int tensors = kFew;
  bool placed = true;
  std::string directory;
};

// Counts of one rank, in memory that processes share.
struct Sent {
  std::uint64_t folds, spreads, others, bytes;
  bool operator==(const Sent&) const = default;
};

class Counting final : public testing_support::ForwardingGroup {
 public:
  Counting(Group& inner, Sent& sent) : ForwardingGroup(inner), sent_(sent) {}
  void barrier() override {
    ++sent_.others;
    ForwardingGroup::barrier();
  }
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    ++sent_.others;
    return ForwardingGroup::gather(mine, root);
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override {
    ++sent_.others;
    return ForwardingGroup::all_gather(mine);
  }
  Bytes broadcast(const Bytes& message, int root) override {
    ++sent_.others;
    return ForwardingGroup::broadcast(message, root);
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    ++sent_.others;
    return ForwardingGroup::scatter(messages, root);
  }
  Bytes fold(Bytes mine, const Combine& combine) override {
    ++sent_.folds;
    sent_.bytes += mine.size();
    return ForwardingGroup::fold(std::move(mine), combine);
  }
  Bytes spread(Bytes message) override {
    ++sent_.spreads;
    return ForwardingGroup::spread(std::move(message));
  }

 private:
  Sent& sent_;
};

Tensor part_of(const Shape& shape, const Placement& placement, int rank, bool placed) {
  Tensor tensor;
  tensor.shape = shape;
  tensor.sharded = true;
  if (placed) tensor.placement = placement;
  const int part = part_of_rank(placement, rank);
  for (Box& box : boxes_of_part(placement, shape, part)) {
    const auto memory = std::make_shared<std::vector<float>>(numel(box), 1.5F);
    auto storage = std::make_shared<Storage>();
    storage->data = reinterpret_cast<std::byte*>(memory->data());
    storage->size = memory->size() * sizeof(float);
    storage->owner = memory;
    tensor.pieces.push_back({std::move(box), std::move(storage), 0, {}, -1});
  }
  return tensor;
}

// What rank `rank` saves: rows, hybrid shards if there can be any, members of a flat parameter, and
// what all ranks hold.
Value tree_of(const Job& job, int rank) {
  Value tree = Value::dict({{"step", 7}, {"name", "run"}});
  const int shards = job.world % 2 == 0 ? job.world / 2 : job.world;
  for (int i = 0; i < job.tensors; ++i) {
    const auto add = [&](const char* kind, const Shape& shape, const Placement& placement) {
      tree.set_item(kind + std::to_string(i), part_of(shape, placement, rank, job.placed));
    };
    add("rows", {2 * job.world, 3}, {.parts = job.world});
    add("hybrid", {4, shards + 2}, {.parts = shards, .dim = 1});
    add("flat", {5, 7}, {.parts = job.world, .shard = 36 / job.world + 1, .begin = 0});
    add("whole", {3 + i % 5}, {});
  }
  return tree;
}

void save_on(Group& group, const Job& job, Sent& sent) {
  Counting counting(group, sent);
  save(tree_of(job, group.rank()), job.directory, {.threads = kFiles}, counting);
}

SavePlan simulated(const Job& job) {
  std::vector<Leaf> leaves;
  std::vector<PlannedLeaf> planned_leaves;
  std::vector<Bytes> messages;
  for (int rank = job.world - 1; rank >= 0; --rank) {
    leaves = flatten(tree_of(job, rank));
    planned_leaves.clear();
    std::vector<std::vector<HeldChunk>> held(leaves.size());
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      planned_leaves.push_back(planned(leaves[i], rank, job.world));
      if (planned_leaves[i].is_tensor) held[i] = held_chunks(leaves[i].value.as_tensor());
    }
    messages.insert(messages.begin(), encode_proposal({rank, false, planned_leaves, held, {}}));
  }
  ToldLeaves told(planned_leaves, false);
  if (!job.placed) {
    told.add(fold_along_tree(std::move(messages), [](Bytes left, const Bytes& right) {
      left.insert(left.end(), right.begin(), right.end());
      return left;
    }));
  }
  told.finish();
  return {{job.world, {kFiles}}, std::move(told), [&](std::size_t leaf) {
            return item_length(leaves[leaf].value);
          }};
}

// Sizes, file, offset and length of each chunk, by its name and offsets.
using Places = std::map<std::pair<std::string, Shape>,
                        std::tuple<Shape, std::string, std::uint64_t, std::uint64_t>>;

Places places_of(const SavePlan& plan, const std::string& attempt) {
  Places places;
  SavePlan::Items items(plan);
  for (const PlannedLeaf& leaf : plan.leaves()) {
    items.leaf([&](const Box* box, int rank, const ItemPlace& place) {
      places[{leaf.name, box ? box->offsets : Shape()}] = {
          box ? box->sizes : Shape(), data_file_name(rank, place.file, attempt), place.offset,
          place.length};
    });
  }
  return places;
}

Places places_in(const std::string& directory) {
  std::ifstream in(directory + "/.metadata", std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  const auto bytes = std::as_bytes(std::span(text));
  Places places;
  for (const dcp::Entry& entry : dcp::decode(Bytes(bytes.begin(), bytes.end())).entries) {
    if (!entry.is_tensor)
      places[{entry.name, {}}] = {{}, entry.item.path, entry.item.offset, entry.item.length};
    for (const dcp::Chunk& chunk : entry.chunks) {
      places[{entry.name, chunk.box.offsets}] = {chunk.box.sizes, chunk.item.path,
                                                 chunk.item.offset, chunk.item.length};
    }
  }
  return places;
}

// What is wrong with what a job left; empty: nothing.
std::string compare(const Job& job) {
  const Places found = places_in(job.directory);
  const std::string name = std::get<1>(found.begin()->second);
  const auto dash = name.rfind('_');
  const std::string attempt = name.substr(dash + 1, name.rfind('.') - dash - 1);
  const SavePlan plan = simulated(job);
  if (found != places_of(plan, attempt)) return " .metadata is not the plan's;";
  std::size_t files = 0, expected = 0;
  for (const auto& entry : std::filesystem::directory_iterator(job.directory))
    files += entry.path().extension() == ".distcp" ? 1 : 0;
  for (int rank = 0; rank < job.world; ++rank) {
    for (int file = 0; file < kFiles; ++file) {
      const auto path = job.directory + "/" + data_file_name(rank, file, attempt);
      const std::uint64_t size = plan.size_of(rank, file);
      if (size == 0) continue;
      ++expected;
      if (!std::filesystem::exists(path) || std::filesystem::file_size(path) != size)
        return " " + path + " has not the plan's size;";
    }
  }
  return files == expected ? "" : " there are files beside the plan's;";
}

std::string run_processes(const Job& job, std::span<Sent> sent) {
  const int port = testing::free_port();
  auto children = testing::fork_ranks(job.world, [&](int rank) {
    try {
      testing::set_environment(rank, job.world, port);
      torch::set_num_threads(1);
      MeshOptions options;
      options.device = torch::kCPU;
      const Mesh mesh = Mesh::from_environment(options);
      save_on(mesh.checkpoint_group(), job, sent[static_cast<std::size_t>(rank)]);
      return 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      return 1;
    }
  });
  testing::wait_for(children, {testing::Clock::now() + kLimit});
  return testing::end_all(children, [](int, int status) { return status == 0; });
}

// Without a mesh, which would connect all with all.
std::string run_threads(const Job& job, std::span<Sent> sent) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> wrong(static_cast<std::size_t>(job.world));
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < job.world; ++rank) {
    threads.emplace_back([&, rank] {
      const auto number = static_cast<std::size_t>(rank);
      try {
        const auto group = make_tree_group(rank, job.world, {}, kLimit,
                                           connect_by_gloo(store, rank, job.world, kLimit));
        save_on(*group, job, sent[number]);
      } catch (const std::exception& error) {
        wrong[number] = " rank " + std::to_string(rank) + ": " + error.what() + ";";
      }
    });
  }
  threads.clear();
  std::string all;
  for (const std::string& one : wrong) all += one;
  return all;
}

std::string carry_out(const Job& job, std::span<Sent> sent) {
  std::filesystem::remove_all(job.directory);
  std::fill(sent.begin(), sent.end(), Sent{});
  const std::string wrong = job.world <= 4 ? run_processes(job, sent) : run_threads(job, sent);
  return wrong.empty() ? compare(job) : wrong;
}

// A save with placements takes few folds and bytes, and as many as with fewer tensors.
std::string check_outcome(std::span<const Sent> few, std::span<const Sent> many) {
  for (std::size_t rank = 0; rank < many.size(); ++rank) {
    const Sent& sent = many[rank];
    if (sent == few[rank] && sent.folds == 4 && sent.spreads == sent.folds && sent.others == 0 &&
        sent.bytes <= 1024 + 32 * kFiles)
      continue;
    return " rank " + std::to_string(rank) + " has folded " + std::to_string(sent.folds) +
           " times and sent " + std::to_string(sent.bytes) + " bytes, with few tensors " +
           std::to_string(few[rank].folds) + " times and " + std::to_string(few[rank].bytes) + ";";
  }
  return "";
}

std::string compare_saves(int world, bool placed, const std::string& directory,
                          std::span<Sent> sent) {
  std::string wrong = carry_out({world, kFew, placed, directory}, sent);
  const std::vector<Sent> few(sent.begin(), sent.end());
  if (wrong.empty()) wrong = carry_out({world, kMany, placed, directory}, sent);
  if (wrong.empty() && placed) wrong = check_outcome(few, sent);
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: planned_saves DIRECTORY\n");
    return 2;
  }
  constexpr std::size_t kMost = 64;
  const std::span<Sent> sent(testing::shared_by_processes<Sent>(kMost), kMost);
  int saves = 0, wrong = 0;
  std::uint64_t most = 0;
  for (const int world : {2, 3, 4, 8, 33, 64}) {
    for (const bool placed : {true, false}) {
      const auto ranks = sent.first(static_cast<std::size_t>(world));
      const auto text = compare_saves(world, placed, argv[1], ranks);
      saves += 2;
      for (const Sent& one : ranks) most = std::max(most, placed ? one.bytes : 0);
      if (text.empty()) continue;
      ++wrong;
      std::printf("%d ranks, %s:%s\n", world, placed ? "placed" : "told", text.c_str());
    }
  }
  std::printf("%d saves, %d wrong; with placements a rank sent %ju bytes at most\n", saves, wrong,
              static_cast<std::uintmax_t>(most));
  return wrong == 0 ? 0 : 1;
}
