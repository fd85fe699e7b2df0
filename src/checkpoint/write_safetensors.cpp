#include <map>

#include "base/parallel.h"
#include "checkpoint/seal.h"
#include "checkpoint/targets.h"
#include "checkpoint/value_json.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"

namespace tessera {

void write_safetensors(const ConvertJob& job) {
  safetensors::Header header;
  std::map<std::string_view, const Tensor*> tensors;
  for (const Leaf& leaf : job.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    if (info(tensor.dtype).safetensors.empty()) {
      throw Error(ErrorCode::unsupported,
                  "safetensors has no element type for " + std::string(to_string(tensor.dtype)))
          .at_key(leaf.name);
    }
    tensors.emplace(leaf.name, &tensor);
    header.entries.push_back({leaf.name, tensor.dtype, tensor.shape, 0, 0});
  }
  header.metadata["format"] = "pt";
  header.metadata[kTreeKey] = encode_tree(job.leaves, job.report.values_in_metadata);
  reserve_digests(header);
  std::vector<std::byte> head = safetensors::encode_header(header);
  const std::uint64_t size =
      header.data_offset + (header.entries.empty() ? 0 : header.entries.back().end);
  DigestSink sink(job.store.create(job.name, job.if_exists, size), header.data_offset);
  parallel_for(job.threads, header.entries.size(), [&](std::size_t i) {
    const safetensors::Entry& entry = header.entries[i];
    stream_tensor(job, entry.name, *tensors.at(entry.name), sink, header.data_offset + entry.begin);
  });
  fill_digests(head, sink.digests());
  sink.write_at(0, head);
  sink.commit();
  IoReport report;
  report.bytes_written = size;
  job.counters.add(report);
}

}  // namespace tessera
