// One safetensors file, or a set with an index. Of a file every tensor is written at its place by
// whichever thread is free, and then the header, which holds their digests.
#include <algorithm>
#include <map>
#include <span>

#include "base/parallel.h"
#include "checkpoint/digests/safetensors_digests.h"
#include "checkpoint/tree/tree_json.h"
#include "checkpoint/write/safetensors_files.h"
#include "checkpoint/write/targets.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_only_its_name(const Leaf& leaf) {
  if (!leaf.value.is(Value::Kind::tensor) || leaf.path != Path{leaf.name}) return false;
  const Tensor& tensor = leaf.value.as_tensor();
  return !leaf.containers && !tensor.parameter && !tensor.requires_grad;
}

// Whether the tree says no more than the names do: then a file of the reference library stays as it
// is.
bool is_flat(const ConvertJob& job) {
  return job.source.kind == CheckpointKind::safetensors &&
         std::ranges::all_of(job.leaves, is_only_its_name);
}

std::vector<SafetensorsFile> plan_files(const ConvertJob& job) {
  const SafetensorsSet set{job.options.file_of, job.options.max_shard_size};
  std::vector<SafetensorsFile> files = safetensors_files(job.leaves, set, job.name);
  for (SafetensorsFile& file : files) {
    file.header.metadata = job.source.metadata;
    file.header.metadata.emplace("format", "pt");
  }
  if (!files.empty() && !is_flat(job)) {
    files[0].header.metadata[kTreeKey] = encode_tree(job.leaves, job.report.values_in_metadata);
  }
  return files;
}

using Tensors = std::map<std::string_view, const Tensor*>;

void write_file(const ConvertJob& job, SafetensorsFile& file, const Tensors& tensors) {
  reserve_digests(file.header);
  std::vector<std::byte> head = safetensors::encode_header(file.header);
  const auto& entries = file.header.entries;
  const std::uint64_t size = file.header.data_offset + (entries.empty() ? 0 : entries.back().end);
  DigestSink sink(job.store.create(file.name, job.if_exists, size), file.header.data_offset);
  parallel_for(job.threads, entries.size(), [&](std::size_t i) {
    stream_tensor(job, entries[i].name, *tensors.at(entries[i].name), sink,
                  file.header.data_offset + entries[i].begin);
  });
  fill_digests(head, sink.digests());
  sink.write_at(0, head);
  job.before_visible();
  sink.commit();
  IoReport report;
  report.bytes_written = size;
  job.counters.add(report);
}

void write_set(const ConvertJob& job, std::vector<SafetensorsFile>& files, const Tensors& tensors) {
  for (SafetensorsFile& file : files) write_file(job, file, tensors);
  const std::string text = index_text(files);
  put(job.store, index_name(job.name), std::as_bytes(std::span(text)), IfExists::fail);
  IoReport report;
  report.bytes_written = text.size();
  job.counters.add(report);
}

}  // namespace

void require_safetensors_type(DType dtype, const std::string& key) {
  if (!info(dtype).safetensors.empty()) return;
  throw Error(ErrorCode::unsupported,
              "safetensors has no element type for " + std::string(to_string(dtype)))
      .at_key(key);
}

void write_safetensors(const ConvertJob& job) {
  Tensors tensors;
  for (const Leaf& leaf : job.leaves) {
    if (leaf.value.is(Value::Kind::tensor)) tensors.emplace(leaf.name, &leaf.value.as_tensor());
  }
  std::vector<SafetensorsFile> files = plan_files(job);
  if (has_index(files, job.name)) {
    write_set(job, files, tensors);
  } else {
    write_file(job, files[0], tensors);
  }
}

}  // namespace tessera
