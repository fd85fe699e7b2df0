#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_set>

#include "base/parallel.h"
#include "base/stop.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/meter.h"
#include "checkpoint/read/reader.h"
#include "checkpoint/read/storage_checks.h"
#include "io/block_digests.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "tessera/verify.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

constexpr std::uint64_t kPart = 64 * kDigestBlock;  // bytes of a file that one thread takes at once

// Part of a file with digests.
struct FilePart {
  std::shared_ptr<const ByteSource> source;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

// The files whose bytes are checked by digests as they are read: those of the store, and those
// whose digests only the tensors' sources know (safetensors).
std::vector<FilePart> checked_parts(const Checkpoint& checkpoint) {
  std::map<std::string, std::shared_ptr<const ByteSource>> sources;
  for (const auto& [name, tensor] : all_tensors(checkpoint.leaves)) {
    for (const Piece& piece : tensor.as_tensor().pieces) {
      if (piece.storage && piece.storage->source)
        sources.emplace(piece.storage->source->name(), piece.storage->source);
    }
  }
  for (const ObjectInfo& file : checkpoint.files) {
    auto source = std::make_shared<LazySource>(checkpoint.store, file);
    const std::string& name = source->name();
    sources.emplace(name, std::move(source));
  }
  std::vector<FilePart> parts;
  for (const auto& [name, source] : sources) {
    if (!source->checked()) continue;
    for (std::uint64_t at = 0; at < source->size(); at += kPart)
      parts.push_back({source, at, std::min(at + kPart, source->size())});
  }
  return parts;
}

// What one piece of work found.
struct Checked {
  std::uint64_t bytes = 0;
  std::uint64_t bytes_unchecked = 0;
};

Checked check_part(const FilePart& part) {
  Checked checked;
  std::vector<std::byte> window(static_cast<std::size_t>(kDigestBlock));
  for (std::uint64_t at = part.begin; at < part.end; at += window.size()) {
    const auto bytes = MutableByteView(window).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), part.end - at)));
    part.source->read_at(at, bytes);
    checked.bytes += bytes.size();
  }
  return checked;
}

// Storages that some thread has taken upon itself: several tensors may be views of one.
class Claims {
 public:
  [[nodiscard]] bool is_first(const Storage& storage) {
    const std::lock_guard lock(mutex_);
    return claimed_.insert(&storage).second;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const Storage*> claimed_;  // guarded by mutex_
};

// Reads one tensor's storages whole, less those that another tensor's check has read and those
// whose files are checked as files.
Checked check_tensor(const Leaf& leaf, Claims& claims) {
  const Tensor& tensor = leaf.value.as_tensor();
  Checked checked;
  for (const Piece& piece : tensor.pieces) {
    if (!claims.is_first(*piece.storage)) continue;
    const Piece raw = decoded_piece(tensor, piece, leaf.name);
    if (raw.storage->source && raw.storage->source->checked()) continue;
    const bool has_checksum = check_storage(*raw.storage, leaf.name);
    (has_checksum ? checked.bytes : checked.bytes_unchecked) += raw.storage->size;
  }
  return checked;
}

// The tensors inside tuples and objects, and those that are attributes of tensors.
std::vector<Leaf> inner_tensors_of(const Checkpoint& checkpoint) {
  std::vector<Leaf> tensors;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (leaf.value.is(Value::Kind::tensor) && !leaf.value.as_tensor().attributes) continue;
    for (const InnerTensor& inner : inner_tensors(leaf.value)) {
      const auto& pieces = inner.tensor->as_tensor().pieces;
      const bool here = std::all_of(pieces.begin(), pieces.end(),
                                    [](const Piece& piece) { return piece.storage != nullptr; });
      if (here) tensors.push_back({leaf.name + inner.path, {}, *inner.tensor});
    }
  }
  return tensors;
}

// Indices of safetensors whose total is not that of their tensors.
std::vector<Finding> faults_of_indices(const Checkpoint& checkpoint) {
  std::vector<Finding> faults;
  for (const ObjectInfo& file : checkpoint.files) {
    if (!file.name.ends_with(safetensors::kIndexSuffix)) continue;
    const safetensors::Index index = read_safetensors_index(*checkpoint.store, file.name);
    if (auto fault = index_total_fault(index, checkpoint.leaves))
      faults.push_back({ErrorCode::corrupt, std::move(*fault)});
  }
  return faults;
}

// The checkpoint's tensors, and those inside of its values.
std::vector<const Leaf*> tensors_of(const Checkpoint& checkpoint, const std::vector<Leaf>& inner) {
  std::vector<const Leaf*> tensors;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (leaf.value.is(Value::Kind::tensor)) tensors.push_back(&leaf);
  }
  for (const Leaf& leaf : inner) tensors.push_back(&leaf);
  return tensors;
}

}  // namespace

VerifyReport verify(const Location& where, const VerifyOptions& options) {
  require_threads(options.threads);
  try {
    return verify(Checkpoint::open(where), options);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::cancelled) throw;
    VerifyReport report;
    report.findings.push_back({error.code(), error.what()});
    return report;
  }
}

VerifyReport verify(const Checkpoint& checkpoint, const VerifyOptions& options) {
  require_going_on(options.stop);
  require_threads(options.threads);
  VerifyReport report;
  report.findings = faults_of_indices(checkpoint);
  const std::vector<Leaf> inner = inner_tensors_of(checkpoint);
  const std::vector<const Leaf*> tensors = tensors_of(checkpoint, inner);
  report.tensors = tensors.size();
  if (!options.read_data) return report;
  const std::vector<FilePart> parts = checked_parts(checkpoint);
  std::uint64_t total = parts.empty() ? tensor_bytes(checkpoint.leaves) : 0;
  for (const FilePart& part : parts) total += part.end - part.begin;
  Meter meter(options.progress, total, options.stop);
  Claims claims;
  std::mutex mutex;
  std::vector<std::optional<Finding>> found(parts.size() + tensors.size());  // by piece of work
  parallel_for(options.threads, found.size(), [&](std::size_t i) {
    Checked checked;
    try {
      checked = i < parts.size() ? check_part(parts[i])
                                 : check_tensor(*tensors[i - parts.size()], claims);
    } catch (const Error& error) {
      found[i] = Finding{error.code(), error.what()};
    }
    meter.add(checked.bytes + checked.bytes_unchecked);
    const std::lock_guard lock(mutex);
    report.bytes += checked.bytes;
    report.bytes_unchecked += checked.bytes_unchecked;
  });
  for (auto& finding : found) {
    if (finding) report.findings.push_back(std::move(*finding));
  }
  meter.finish();
  return report;
}

}  // namespace tessera
