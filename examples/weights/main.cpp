// The weights of one rank of an inference engine, from a checkpoint of any kind.
//
//   weights CHECKPOINT PREFIX RANK RANKS [TIMES]
//
// Takes the tensors whose names begin with PREFIX. Rank RANK of RANKS has its share of a matrix's
// rows; a vector is everybody's. All become bfloat16 in one block of memory, each tensor aligned
// for wide loads. No other bytes are read than these rows need. Prints a line a tensor: its name,
// the rank's shape and the sum of its elements. Ctrl-C ends the reading at once.
//
// With TIMES it stays, and has the weights of the next checkpoints of that place read into the same
// memory, TIMES in all. As CHECKPOINT, arena://RUN is what a training on this host that keeps its
// snapshots in memory (WriterOptions::keep) saved last in RUN: the training goes on meanwhile, and
// what is read is one save, whole.
#include <bit>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/tensor_view.h"

namespace {

using tessera::Box;
using tessera::Checkpoint;
using tessera::DType;
using tessera::TensorView;

constexpr std::size_t kAlignment = 64;  // bytes: a cache line, and the widest register

volatile std::sig_atomic_t interrupted = 0;

struct Rank {
  int rank = 0;
  int ranks = 1;
};

// One block of memory, handed out in aligned parts.
class Arena {
 public:
  explicit Arena(std::size_t bytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(kAlignment, bytes)), std::free),
        next_(memory_.get()) {
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  static std::size_t rounded(std::size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  std::byte* take(std::size_t bytes) { return std::exchange(next_, next_ + rounded(bytes)); }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> memory_;
  std::byte* next_;
};

// What this rank has of a tensor.
Box share_of(const tessera::Shape& shape, const Rank& rank) {
  Box box = tessera::whole(shape);
  if (shape.size() < 2) return box;
  box.offsets[0] = shape[0] * rank.rank / rank.ranks;
  box.sizes[0] = shape[0] * (rank.rank + 1) / rank.ranks - box.offsets[0];
  return box;
}

std::size_t bytes_of(const Box& box) {
  return static_cast<std::size_t>(tessera::byte_size(DType::bfloat16, box.sizes));
}

// The places of all tensors; `arena` is made as large as they need.
std::vector<tessera::ReadRequest> requests_for(const Checkpoint& checkpoint,
                                               const std::string& prefix, const Rank& rank,
                                               std::unique_ptr<Arena>& arena) {
  const std::vector<std::string> names = checkpoint.names(prefix + "*");
  std::size_t bytes = kAlignment;
  for (const std::string& name : names)
    bytes += Arena::rounded(bytes_of(share_of(checkpoint.tensor(name).shape, rank)));
  arena = std::make_unique<Arena>(bytes);
  std::vector<tessera::ReadRequest> requests;
  for (const std::string& name : names) {
    const Box box = share_of(checkpoint.tensor(name).shape, rank);
    std::byte* const memory = arena->take(bytes_of(box));
    requests.push_back({name, TensorView::of(memory, DType::bfloat16, box.sizes), box});
  }
  return requests;
}

// Four threads, which share 256 MiB for their buffers.
tessera::IoReport read(const Checkpoint& checkpoint,
                       const std::vector<tessera::ReadRequest>& requests) {
  std::stop_source stop;
  std::signal(SIGINT, [](int) { interrupted = 1; });
  const auto progress = [&stop](const tessera::Progress& now) {
    if (interrupted != 0) stop.request_stop();
    std::fprintf(stderr, "\r%llu of %llu MB", static_cast<unsigned long long>(now.done / 1'000'000),
                 static_cast<unsigned long long>(now.total / 1'000'000));
  };
  const tessera::IoReport report = checkpoint.read_many(
      requests,
      {.threads = 4, .memory = 256 << 20, .progress = progress, .stop = stop.get_token()});
  std::fputc('\n', stderr);
  return report;
}

double sum(const TensorView& view) {
  const auto* elements = reinterpret_cast<const std::uint16_t*>(view.data());
  double total = 0;
  for (std::int64_t i = 0; i < tessera::numel(view.shape()); ++i)
    total += std::bit_cast<float>(std::uint32_t{elements[i]} << 16);
  return total;
}

// The next one at that place. A snapshot in memory has a path of its own; of other checkpoints
// there is one.
Checkpoint next(const std::string& path, const std::string& last) {
  constexpr std::chrono::milliseconds kBetweenLooks{20};
  while (true) {
    Checkpoint checkpoint = Checkpoint::open(path);
    if (checkpoint.path != last) return checkpoint;
    if (interrupted != 0) throw std::runtime_error("interrupted");
    std::this_thread::sleep_for(kBetweenLooks);
  }
}

// Returns where they are from.
std::string show(const Checkpoint& checkpoint, const std::vector<tessera::ReadRequest>& requests) {
  const tessera::IoReport report = read(checkpoint, requests);
  for (const tessera::ReadRequest& request : requests) {
    std::printf("%s %s %.9g\n", request.name.c_str(),
                tessera::to_string(request.to.shape()).c_str(), sum(request.to));
  }
  std::fprintf(stderr, "%zu tensors, %llu bytes read for %llu\n", requests.size(),
               static_cast<unsigned long long>(report.bytes_read),
               static_cast<unsigned long long>(report.bytes_needed));
  std::fflush(stdout);
  return checkpoint.path;
}

void run(const std::string& path, const std::string& prefix, const Rank& rank, int times) {
  std::unique_ptr<Arena> arena;
  std::vector<tessera::ReadRequest> requests;
  std::string last;
  for (int i = 0; i < times; ++i) {
    const Checkpoint checkpoint = next(path, last);
    if (i == 0) requests = requests_for(checkpoint, prefix, rank, arena);
    last = show(checkpoint, requests);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_used = argc == 5 || argc == 6;
  const Rank rank = is_used ? Rank{std::atoi(argv[3]), std::atoi(argv[4])} : Rank{0, 0};
  const int times = argc == 6 ? std::atoi(argv[5]) : 1;
  if (rank.rank < 0 || rank.rank >= rank.ranks || times < 1) {
    std::fputs("usage: weights CHECKPOINT PREFIX RANK RANKS [TIMES]\n", stderr);
    return 2;
  }
  try {
    run(argv[1], argv[2], rank, times);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "weights: %s\n", error.what());
    return 3;
  }
}
