// How long do reading a torch.save file into memory and writing it from memory take? Beside
// bench/peers/torch_file.py. Prints one line; reading checks every CRC-32 that the file has.
//   bench_torch_file IN OUT
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "base/crc32.h"
#include "base/parallel.h"
#include "format/torch/torch_file.h"
#include "measure.h"
#include "tessera/checkpoint.h"

namespace {

using tessera::bench::now;

constexpr int kThreads = 2;

// As torch.save does it from a tree in memory; durable when it returns.
void write(const tessera::Value& tree, const std::filesystem::path& out) {
  tessera::torch_file::Writer writer(tree, out.stem().string());
  const auto store = tessera::posix_store(out.parent_path().string());
  const auto sink =
      store->create(out.filename().string(), tessera::IfExists::replace, writer.size());
  for (const auto& segment : writer.fixed()) sink->write_at(segment.offset, segment.bytes);
  std::vector<std::uint32_t> crcs(writer.slots().size());
  tessera::parallel_for(kThreads, crcs.size(), [&](std::size_t i) {
    const auto& slot = writer.slots()[i];
    const tessera::ByteView bytes(slot.storage->data, slot.size);
    crcs[i] = tessera::crc32(bytes);
    sink->write_at(slot.offset, bytes);
  });
  writer.finish(
      crcs, [&](std::uint64_t offset, tessera::ByteView bytes) { sink->write_at(offset, bytes); });
  sink->commit();
  store->sync();
}

void measure(const std::string& in, const std::string& out) {
  const double begin = now();
  const tessera::Value tree = tessera::Checkpoint::open(in).load();
  const double loaded = now();
  write(tree, out);
  const double saved = now();
  std::printf("read %.4f write %.4f write_durable %.4f\n", loaded - begin, saved - loaded,
              saved - loaded);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: bench_torch_file IN OUT\n");
    return 2;
  }
  try {
    measure(argv[1], argv[2]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_torch_file: %s\n", error.what());
    return 3;
  }
}
