#include <algorithm>
#include <mutex>

#include "base/parallel.h"
#include "checkpoint/meter.h"
#include "checkpoint/reader.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Reads one tensor's storages whole, less those that another tensor's check has read; returns bytes
// with and without a checksum.
std::pair<std::uint64_t, std::uint64_t> check_tensor(const Leaf& leaf, CheckedStorages& done) {
  const Tensor& tensor = leaf.value.as_tensor();
  std::pair<std::uint64_t, std::uint64_t> bytes{0, 0};
  for (const Piece& piece : tensor.pieces) {
    if (!done.claim(*piece.storage)) continue;
    const Piece raw = decoded_piece(tensor, piece, leaf.name);
    const bool checked = check_storage(*raw.storage, leaf.name);
    (checked ? bytes.first : bytes.second) += raw.storage->size;
  }
  return bytes;
}

}  // namespace

VerifyReport verify(const std::string& path, bool read_data, int threads,
                    const ProgressHook& progress) {
  VerifyReport report;
  Checkpoint checkpoint;
  try {
    checkpoint = open_checkpoint(path);
  } catch (const Error& error) {
    report.findings.push_back({error.code(), error.what()});
    return report;
  }
  std::vector<const Leaf*> tensors;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (leaf.value.is(Value::Kind::tensor)) tensors.push_back(&leaf);
  }
  report.tensors = tensors.size();
  if (!read_data) return report;
  Meter meter(progress, tensor_bytes(checkpoint.leaves));
  CheckedStorages done;
  std::mutex mutex;
  std::vector<std::pair<std::string, Finding>> found;  // guarded by mutex
  parallel_for(threads, tensors.size(), [&](std::size_t i) {
    std::pair<std::uint64_t, std::uint64_t> bytes{0, 0};
    std::optional<Finding> finding;
    try {
      bytes = check_tensor(*tensors[i], done);
    } catch (const Error& error) {
      finding = Finding{error.code(), error.what()};
    }
    meter.add(bytes.first + bytes.second);
    const std::lock_guard lock(mutex);
    report.bytes += bytes.first;
    report.bytes_unchecked += bytes.second;
    if (finding) found.emplace_back(tensors[i]->name, *finding);
  });
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [name, finding] : found) report.findings.push_back(std::move(finding));
  meter.finish();
  return report;
}

}  // namespace tessera
