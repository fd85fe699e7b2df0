// One safetensors file, or a set with an index. Of a file every tensor is written at its place by
// whichever thread is free, and then the header, which holds their digests.
#include <algorithm>
#include <cstdio>
#include <map>

#include "base/checked.h"
#include "base/parallel.h"
#include "checkpoint/digests/safetensors_digests.h"
#include "checkpoint/tree/tree_json.h"
#include "checkpoint/write/targets.h"
#include "format/safetensors/index.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// A file that will be written: its tensors, not yet laid out, and its metadata.
struct File {
  std::string name;
  safetensors::Header header;
};

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

void require_storable(const std::string& name, const Tensor& tensor) {
  require_safetensors_type(tensor.dtype, name);
  if (name == "__metadata__") {
    throw Error(ErrorCode::unsupported, "a name that safetensors reserves").at_key(name);
  }
}

// Tensors in their order, a new file where one would become too large: huggingface's rule.
std::vector<File> dealt_tensors(const ConvertJob& job) {
  const std::uint64_t limit = job.options.max_shard_size;
  std::vector<File> files(1);
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : job.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    require_storable(leaf.name, tensor);
    const std::uint64_t size = byte_size(tensor.dtype, tensor.shape);
    if (limit > 0 && bytes > 0 && checked_add(bytes, size) > limit) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += size;
    files.back().header.entries.push_back({leaf.name, tensor.dtype, tensor.shape, 0, 0});
  }
  return files;
}

void name_files(const ConvertJob& job, std::vector<File>& files) {
  const std::string stem = job.name.substr(0, job.name.rfind('.'));
  for (std::size_t i = 0; i < files.size(); ++i) {
    char numbers[64];
    std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.safetensors", i + 1, files.size());
    files[i].name = files.size() == 1 ? job.name : stem + numbers;
  }
}

std::vector<File> plan_files(const ConvertJob& job) {
  std::vector<File> files = dealt_tensors(job);
  for (File& file : files) {
    file.header.metadata = job.source.metadata;
    file.header.metadata.emplace("format", "pt");
  }
  if (!is_flat(job)) {
    files[0].header.metadata[kTreeKey] = encode_tree(job.leaves, job.report.values_in_metadata);
  }
  name_files(job, files);
  return files;
}

using Tensors = std::map<std::string_view, const Tensor*>;

void write_file(const ConvertJob& job, File& file, const Tensors& tensors) {
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

safetensors::Index index_of(const std::vector<File>& files, const Tensors& tensors) {
  safetensors::Index index;
  std::uint64_t total = 0;
  for (const File& file : files) {
    for (const safetensors::Entry& entry : file.header.entries) {
      index.files.emplace(entry.name, file.name);
      total = checked_add(total, byte_size(entry.dtype, entry.shape));
    }
  }
  index.total_size = total;
  return index;
}

void write_set(const ConvertJob& job, std::vector<File>& files, const Tensors& tensors) {
  for (File& file : files) write_file(job, file, tensors);
  const std::string index =
      job.name.substr(0, job.name.rfind('.')) + std::string(safetensors::kIndexSuffix);
  const std::string text = safetensors::encode_index(index_of(files, tensors));
  put(job.store, index, {reinterpret_cast<const std::byte*>(text.data()), text.size()},
      IfExists::fail);
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
  std::vector<File> files = plan_files(job);
  if (files.size() == 1) {
    write_file(job, files[0], tensors);
  } else {
    write_set(job, files, tensors);
  }
}

}  // namespace tessera
