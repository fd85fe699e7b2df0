#include <algorithm>
#include <mutex>

#include "base/parallel.h"
#include "base/random_id.h"
#include "checkpoint/item_writer.h"
#include "checkpoint/leftovers.h"
#include "checkpoint/open.h"
#include "checkpoint/save_plan.h"
#include "checkpoint/seal.h"
#include "checkpoint/targets.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The leaves as one rank's proposal: every tensor one chunk.
std::vector<WriteItem> whole_leaves(const std::vector<Leaf>& leaves) {
  std::vector<WriteItem> items;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    WriteItem item = item_of(leaves[i], i);
    if (item.is_tensor) item.box = whole(item.shape);
    items.push_back(std::move(item));
  }
  return items;
}

WrittenItem write_item(const ConvertJob& job, const WriteItem& item, std::size_t index,
                       ItemWriter& writer) {
  const Leaf& leaf = job.leaves[item.leaf];
  if (!item.is_tensor) return {index, writer.value(leaf.value)};
  const Tensor& tensor = leaf.value.as_tensor();
  TensorReader reader(tensor, leaf.name);
  const Slice all = item.box;
  WrittenItem written{
      index, writer.tensor(item.dtype, item.shape, item.requires_grad,
                           [&](std::int64_t begin, std::int64_t count, MutableByteView buffer) {
                             reader.read(all, begin, count, buffer.data());
                             const std::size_t bytes =
                                 static_cast<std::size_t>(count) * size_of(item.dtype);
                             job.meter.add(bytes);
                             return ByteView(buffer).first(bytes);
                           })};
  reader.check_rest(job.checked);
  job.counters.add(reader.report());
  return written;
}

}  // namespace

void write_dcp(const ConvertJob& job) {
  if (job.if_exists == IfExists::fail && job.store.exists(kDcpMetadata)) {
    throw Error(ErrorCode::already_exists, "a checkpoint is there already")
        .at_path(job.store.name());
  }
  remove_leftovers(job.store);
  const std::string attempt = random_attempt();
  const std::vector<std::vector<WriteItem>> proposals = {whole_leaves(job.leaves)};
  const std::vector<WriteItem>& items = proposals[0];
  // File f takes items f, f + files, f + 2 files...: the order of the leaves spreads large ones.
  const std::size_t files = std::min<std::size_t>(static_cast<std::size_t>(job.threads),
                                                  std::max<std::size_t>(items.size(), 1));
  std::vector<std::vector<WrittenItem>> by_file(files);
  DigestsByName digests;
  std::mutex mutex;  // guards digests
  parallel_for(job.threads, files, [&](std::size_t file) {
    const std::string name = "__0_" + std::to_string(file) + "_" + attempt + ".distcp";
    DigestSink sink(job.store.create(name, IfExists::fail));
    ItemWriter writer(sink, name, job.window);
    for (std::size_t i = file; i < items.size(); i += files) {
      by_file[file].push_back(write_item(job, items[i], i, writer));
    }
    sink.commit();
    IoReport report;
    report.bytes_written = writer.written();
    job.counters.add(report);
    const std::lock_guard lock(mutex);
    digests[name] = {writer.written(), sink.digests(), 0};
  });
  std::vector<std::vector<WrittenItem>> written(1);
  for (const auto& part : by_file) written[0].insert(written[0].end(), part.begin(), part.end());
  std::sort(written[0].begin(), written[0].end(),
            [](const WrittenItem& a, const WrittenItem& b) { return a.item < b.item; });
  dcp::Metadata metadata = metadata_of(proposals, written);
  metadata.version = "1.0.0";
  metadata.checkpoint_id = job.store.name();
  commit_dcp(job.store, metadata, std::move(digests), job.if_exists);
}

}  // namespace tessera
