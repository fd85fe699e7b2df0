// What does the `.metadata` of a large job cost? Every rank has a slice of every tensor.
//   bench_plan --ranks R --tensors T [--out FILE]
// Encodes to FILE while the chunks are computed, decodes it, and prints one line of JSON: seconds,
// the peak of memory after either, chunks, and the file's bytes. Without --out the file is a
// temporary one.
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <ios>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "format/dcp/dcp.h"
#include "measure.h"

namespace {

namespace dcp = tessera::dcp;
using tessera::bench::now;

constexpr std::int64_t kRows = 4;  // of a rank's slice
constexpr std::int64_t kColumns = 1024;
constexpr std::uint64_t kItemBytes = 4 * kRows * kColumns + 1577;  // an archive of one slice

struct Job {
  std::int64_t ranks = 1024;
  std::int64_t tensors = 500;
  std::string out;
};

// Keeps the tensors' names and shapes alone.
class Slices final : public dcp::MetadataSource {
 public:
  explicit Slices(const Job& job) : ranks_(job.ranks) {
    origin_.version = "1.0.0";
    for (std::int64_t i = 0; i < job.tensors; ++i) {
      dcp::EntryHead head;
      head.name = "model.layers." + std::to_string(i) + ".weight";
      head.path = tessera::Path{"model", "layers", i, "weight"};
      head.is_tensor = true;
      head.shape = {ranks_ * kRows, kColumns};
      heads_.push_back(std::move(head));
    }
  }

  [[nodiscard]] const dcp::Origin& origin() const override { return origin_; }
  [[nodiscard]] std::size_t entry_count() const override { return heads_.size(); }
  [[nodiscard]] const dcp::EntryHead& head(std::size_t entry) const override {
    return heads_[entry];
  }
  void for_each_chunk(std::size_t /*entry*/, const ChunkVisitor& visit) const override {
    const std::array sizes{kRows, kColumns};
    for (std::int64_t rank = 0; rank < ranks_; ++rank) visit(offsets_of(rank), sizes);
  }
  void for_each_item(std::size_t entry, const ItemVisitor& visit) const override {
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      const std::string path = "__" + std::to_string(rank) + "_0.distcp";
      visit(offsets_of(rank), {path, entry * kItemBytes, kItemBytes});
    }
  }

 private:
  static std::array<std::int64_t, 2> offsets_of(std::int64_t rank) { return {rank * kRows, 0}; }

  std::int64_t ranks_;
  dcp::Origin origin_;
  std::vector<dcp::EntryHead> heads_;
};

void write(const Job& job, const std::string& path) {
  std::ofstream out(path, std::ios::binary);
  dcp::encode(Slices(job), [&out](tessera::ByteView piece) {
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
  const double begin = now();
  write(job, path);
  const double written = now();
  const long encode_peak = tessera::bench::peak_memory();
  const std::size_t chunks = decode(path);
  const double decoded = now();
  std::printf(
      "{\"encode_s\": %.4f, \"decode_s\": %.4f, \"encode_peak_mib\": %ld, \"peak_mib\": %ld, "
      "\"chunks\": %zu, \"bytes\": %ju}\n",
      written - begin, decoded - written, encode_peak, tessera::bench::peak_memory(), chunks,
      std::filesystem::file_size(path));
  if (job.out.empty()) std::filesystem::remove(path);
}

bool parse(std::span<char*> arguments, Job& job) {
  if (arguments.size() % 2 != 0) return false;
  for (std::size_t i = 0; i < arguments.size(); i += 2) {
    const std::string_view option = arguments[i];
    const char* value = arguments[i + 1];
    if (option == "--ranks") {
      job.ranks = std::atoll(value);
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
      std::fprintf(stderr, "usage: bench_plan --ranks R --tensors T [--out FILE]\n");
      return 2;
    }
    measure(job);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_plan: %s\n", error.what());
    return 3;
  }
}
