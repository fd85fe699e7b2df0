// What do the plan and the `.metadata` of a large job cost rank 0?
//   bench_plan --ranks R --tensors T [--irregular] [--out FILE]
// Every rank has a slice of every tensor. Ranks are simulated in this process by the functions that
// a fold calls. As a rule every rank computes the plan; with --irregular no tensor has a placement,
// and all tell what they hold. Then `.metadata` goes to FILE while its chunks are computed, and is
// decoded again. Prints one line of JSON: the seconds of the plan, of the proof that it fits, of
// encoding and decoding; the peak of memory before decoding and after it; chunks; the file's bytes;
// what one rank sends, in bytes. Then what a load costs: the seconds in which rank 0 opens the
// checkpoint, its peak, the catalog that it spreads, and the seconds and memory in which another
// rank finds its own slices in that. Without --out the file is a temporary one.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <ios>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/opened_dcp.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/data_files.h"
#include "checkpoint/save/messages.h"
#include "comm/confer.h"
#include "comm/tree_links.h"
#include "measure.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)
using tessera::bench::now;

constexpr std::int64_t kRows = 4;  // of a rank's slice
constexpr std::int64_t kColumns = 1024;
constexpr const char* kAttempt = "0123456789ab";

struct Job {
  int ranks = 1024;
  std::int64_t tensors = 500;
  bool irregular = false;
  std::string out;
};

struct Seconds {
  double plan = 0;
  double validate = 0;
};

std::vector<PlannedLeaf> leaves_of(const Job& job) {
  std::vector<PlannedLeaf> leaves;
  for (std::int64_t i = 0; i < job.tensors; ++i) {
    PlannedLeaf leaf;
    leaf.name = "model.layers." + std::to_string(i) + ".weight";
    leaf.path = Path{"model", "layers", i, "weight"};
    leaf.is_tensor = true;
    leaf.shape = {job.ranks * kRows, kColumns};
    if (!job.irregular) leaf.placement = Placement{.parts = job.ranks};
    leaves.push_back(std::move(leaf));
  }
  return leaves;
}

// What the ranks fold first: that they are about to save the same.
std::size_t fold_intents(const Job& job, const std::vector<PlannedLeaf>& leaves) {
  Intents mine;
  mine.first.leaves = digest_of(leaves);
  const Bytes message = to_message(mine);
  const std::vector<Bytes> messages(static_cast<std::size_t>(job.ranks), message);
  (void)fold_along_tree(messages, combine_by<Intents>(join_intents));
  return message.size();
}

// The work of each rank, which they do at once.
std::vector<Bytes> proposals_of(const Job& job, const std::vector<PlannedLeaf>& leaves) {
  std::vector<Bytes> messages;
  std::vector<std::vector<HeldChunk>> held(leaves.size());
  for (int rank = 0; rank < job.ranks; ++rank) {
    for (auto& chunks : held) chunks = {{Box{{rank * kRows, 0}, {kRows, kColumns}}, 0}};
    messages.push_back(encode_proposal({rank, false, leaves, held, {}}));
  }
  return messages;
}

SavePlan plan_of(const Job& job, std::size_t& sent, Seconds& seconds) {
  const PlanRules rules{job.ranks};
  const std::vector<PlannedLeaf> leaves = leaves_of(job);
  std::vector<Bytes> messages;
  if (job.irregular) messages = proposals_of(job, leaves);
  const double begin = now();
  sent = fold_intents(job, leaves);
  ToldLeaves told(leaves, false);
  if (job.irregular) {
    sent += messages.front().size();
    told.add(fold_along_tree(std::move(messages), [](Bytes left, const Bytes& right) {
      return side_by_side(std::move(left), right);
    }));
  }
  const double folded = now();
  told.finish();
  const double proved = now();
  SavePlan plan(rules, std::move(told), [](std::size_t) { return std::uint64_t{0}; });
  seconds = {folded - begin + now() - proved, proved - folded};
  return plan;
}

void write(const SavePlan& plan, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  const PlanSource source(plan, {"1.0.0", "/checkpoints/step1000", "an-id", true}, kAttempt);
  dcp::encode(source, [&out](ByteView piece) {
    out.write(reinterpret_cast<const char*>(piece.data()),
              static_cast<std::streamsize>(piece.size()));
  });
  if (!out.flush()) throw std::runtime_error("cannot write " + path);
}

std::vector<std::byte> read(const std::string& path) {
  std::vector<std::byte> bytes(std::filesystem::file_size(path));
  std::ifstream in(path, std::ios::binary);
  in.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!in) throw std::runtime_error("cannot read " + path);
  return bytes;
}

// A directory whose data files are as long as they have to be, without being there.
class MetadataAlone final : public Store {
 public:
  MetadataAlone(const Job& job, std::string path) : path_(std::move(path)) {
    for (int rank = 0; rank < job.ranks; ++rank) {
      for (int file = 0; file < FileRules().most; ++file)
        files_.push_back({data_file_name(rank, file, kAttempt), std::uint64_t{1} << 50});
    }
    std::ranges::sort(files_, {}, &ObjectInfo::name);
  }
  [[nodiscard]] const std::string& name() const override { return path_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view) const override { return files_; }
  [[nodiscard]] bool exists(std::string_view name) const override { return name == kDcpMetadata; }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view) const override {
    const std::filesystem::path file = path_;
    return posix_store(file.parent_path())->open(file.filename().string());
  }
  std::unique_ptr<ByteSink> create(std::string_view, IfExists, std::uint64_t) override {
    throw std::logic_error("nothing is written");
  }
  void remove(std::string_view) override {}

 private:
  std::string path_;  // of `.metadata`
  std::vector<ObjectInfo> files_;
};

std::size_t heap_bytes() {
  const struct mallinfo2 heap = ::mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

struct OpenCost {
  double open_s = 0, rank_s = 0;
  std::size_t catalog_bytes = 0, rank_bytes = 0;
};

// Rank 0 opens, and the last rank looks for its slices.
OpenCost open(const Job& job, const std::string& path) {
  OpenCost cost;
  const auto store = std::make_shared<MetadataAlone>(job, path);
  const double opening = now();
  const Bytes catalog = read_catalog(store);
  const double opened = now();
  const std::size_t before = heap_bytes();
  OpenedDcp rank(catalog, store, false);
  const std::vector<Slice> mine = {Box{{(job.ranks - 1) * kRows, 0}, {kRows, kColumns}}};
  for (std::size_t leaf = 0; leaf < rank.checkpoint().leaves.size(); ++leaf)
    rank.give_pieces(leaf, mine);
  cost = {opened - opening, now() - opened, catalog.size(), heap_bytes() - before};
  return cost;
}

std::size_t decode(const std::string& path) {
  std::size_t chunks = 0;
  for (const dcp::Entry& entry : dcp::decode(read(path)).entries) chunks += entry.chunks.size();
  return chunks;
}

void measure(const Job& job) {
  const std::string path = job.out.empty()
                               ? std::filesystem::temp_directory_path() /
                                     ("bench_plan." + std::to_string(::getpid()) + ".metadata")
                               : std::filesystem::path(job.out);
  Seconds seconds;
  std::size_t sent = 0;
  double begin = 0, written = 0;
  {
    const SavePlan plan = plan_of(job, sent, seconds);
    begin = now();
    write(plan, path);
    written = now();
  }
  const long plan_peak = bench::peak_memory();
  const double decoding = now();
  const std::size_t chunks = decode(path);
  const double decoded = now();
  const long decode_peak = bench::peak_memory();
  const OpenCost cost = open(job, path);
  std::printf(
      "{\"plan_s\": %.4f, \"validate_s\": %.4f, \"encode_s\": %.4f, \"decode_s\": %.4f, "
      "\"plan_peak_mib\": %ld, \"peak_mib\": %ld, \"chunks\": %zu, \"bytes\": %ju, \"sent\": "
      "%zu, \"open_s\": %.4f, \"open_peak_mib\": %ld, \"catalog_bytes\": %zu, \"rank_s\": %.4f, "
      "\"rank_bytes\": %zu}\n",
      seconds.plan, seconds.validate, written - begin, decoded - decoding, plan_peak, decode_peak,
      chunks, std::filesystem::file_size(path), sent, cost.open_s, bench::peak_memory(),
      cost.catalog_bytes, cost.rank_s, cost.rank_bytes);
  if (job.out.empty()) std::filesystem::remove(path);
}

bool parse(std::span<char*> arguments, Job& job) {
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view option = arguments[i];
    if (option == "--irregular") {
      job.irregular = true;
      continue;
    }
    if (++i == arguments.size()) return false;
    const char* value = arguments[i];
    if (option == "--ranks") {
      job.ranks = std::atoi(value);
    } else if (option == "--tensors") {
      job.tensors = std::atoll(value);
    } else if (option == "--out") {
      job.out = value;
    } else {
      return false;
    }
  }
  return job.ranks > 0 && job.tensors > 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Job job;
    if (!parse(std::span(argv, static_cast<std::size_t>(argc)).subspan(1), job)) {
      std::fprintf(stderr, "usage: bench_plan --ranks R --tensors T [--irregular] [--out FILE]\n");
      return 2;
    }
    measure(job);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_plan: %s\n", error.what());
    return 3;
  }
}
