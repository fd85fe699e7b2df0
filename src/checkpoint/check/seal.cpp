#include <algorithm>
#include <filesystem>
#include <mutex>
#include <system_error>

#include "base/parallel.h"
#include "base/stop.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/guard.h"
#include "checkpoint/digests/side_file.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/meter.h"
#include "tessera/error.h"
#include "tessera/verify.h"
#include "value/inner_tensors.h"

namespace tessera {
namespace {

// One part of a file to digest: whole blocks, and the end.
constexpr std::uint64_t kPart = 64 * kDigestBlock;

bool is_read_checked(const Piece& piece) {
  return piece.storage && piece.storage->source && piece.storage->source->checked();
}

bool has_digests(const NamedTensor& named) {
  return std::ranges::all_of(named.tensor.as_tensor().pieces, is_read_checked);
}

bool is_checked(const Checkpoint& checkpoint) {
  const auto is_guarded = [&](const ObjectInfo& file) {
    return checkpoint.store->open(file.name)->checked();
  };
  if (std::ranges::all_of(checkpoint.files, is_guarded)) return true;
  return checkpoint.kind == CheckpointKind::safetensors && !checkpoint.leaves.empty() &&
         std::ranges::all_of(all_tensors(checkpoint.leaves), has_digests);
}

FileDigests digest_file(const ByteSource& source, int threads, Meter& meter) {
  BlockDigests blocks;
  const std::uint64_t size = source.size();
  parallel_for(threads, static_cast<std::size_t>((size + kPart - 1) / kPart), [&](std::size_t i) {
    std::vector<std::byte> window(static_cast<std::size_t>(kDigestBlock));
    const std::uint64_t begin = i * kPart;
    for (std::uint64_t at = begin; at < std::min(begin + kPart, size); at += kDigestBlock) {
      const auto bytes = MutableByteView(window).first(
          static_cast<std::size_t>(std::min(kDigestBlock, size - at)));
      source.read_at(at, bytes);
      blocks.add(at, bytes);
      meter.add(bytes.size());
    }
  });
  return {size, blocks.finish(size), 0};
}

bool is_directory(const std::string& path) {
  const Location where = located_source(path);
  std::error_code none;
  return where.store ? where.name.empty() : std::filesystem::is_directory(where.path, none);
}

// The name of the side file that readers of this checkpoint look for.
std::string side_file_of(const Checkpoint& checkpoint, const std::string& path, std::string& id) {
  // Saves without collectives have no `.metadata` and no id of the whole: the directory's file.
  if (checkpoint.kind == CheckpointKind::dcp && checkpoint.store->exists(kDcpMetadata)) {
    id = save_id_of(*checkpoint.store, read_dcp_metadata(*checkpoint.store));
    return side_file_name(id);
  }
  if (is_directory(path)) return std::string(kDirectorySideFile);
  return checkpoint.files.at(0).name + std::string(kSideFileSuffix);
}

void require_undamaged(const Checkpoint& checkpoint, const SealOptions& options) {
  const VerifyReport found = verify(
      checkpoint, {.threads = options.threads, .progress = options.progress, .stop = options.stop});
  if (!found.findings.empty())
    throw Error(found.findings[0].code, "damage is not sealed: " + found.findings[0].text);
}

std::uint64_t bytes_of(const std::vector<ObjectInfo>& files) {
  std::uint64_t bytes = 0;
  for (const ObjectInfo& file : files) bytes += file.size;
  return bytes;
}

}  // namespace

SealReport seal(const std::string& path, const SealOptions& options) {
  const Checkpoint checkpoint = open_as_pickled(path, {.part = true});  // of bytes
  SealReport report;
  report.was_sealed = is_checked(checkpoint);
  if (!report.was_sealed) {
    for (const ObjectInfo& file : checkpoint.files) require_side_file_can_name(file.name);
  }
  require_undamaged(checkpoint, options);
  report.files = checkpoint.files.size();
  report.bytes = bytes_of(checkpoint.files);
  SideFile side_file;
  const std::string name = side_file_of(checkpoint, path, side_file.save_id);
  if (!report.was_sealed || checkpoint.store->exists(name))
    report.side_file = checkpoint.store->name() + "/" + name;
  if (report.was_sealed) return report;
  side_file.producer = own_producer();
  // A side file that lacks a file's digests may know the types of the tree, which nobody else does.
  if (checkpoint.has_types && is_side_file_name(name) && checkpoint.store->exists(name))
    side_file.types = read_side_file(*checkpoint.store, name).types;
  Meter meter(options.progress, report.bytes, options.stop);
  for (const ObjectInfo& file : checkpoint.files) {
    side_file.files[file.name] =
        digest_file(*checkpoint.store->open(file.name), options.threads, meter);
  }
  require_going_on(options.stop);
  const std::string text = encode_side_file(side_file);
  put(*checkpoint.store, name, std::as_bytes(std::span(text.data(), text.size())),
      IfExists::replace);
  meter.finish();
  return report;
}

}  // namespace tessera
