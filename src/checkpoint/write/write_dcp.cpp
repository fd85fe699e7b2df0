#include <algorithm>
#include <mutex>

#include "base/parallel.h"
#include "base/random_id.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/tail.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/leftovers.h"
#include "checkpoint/tree/tree_json.h"
#include "checkpoint/write/resume.h"
#include "checkpoint/write/targets.h"
#include "checkpoint/write/write_archive.h"
#include "checkpoint/write/write_item.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

// PyTorch's loader fills a dict; it fails on a leaf that has no key or begins with an index.
void check_root(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) {
    if (!leaf.path.empty() && !std::holds_alternative<std::int64_t>(leaf.path.front())) continue;
    throw Error(ErrorCode::mismatch, leaf.path.empty()
                                         ? "the checkpoint is " +
                                               std::string(describe(leaf.value.kind())) +
                                               ", expected a dict of names"
                                         : "the checkpoint is a list, expected a dict of names");
  }
}

bool loses_attributes(const Leaf& leaf) {
  return leaf.value.is(Value::Kind::tensor) && leaf.value.as_tensor().attributes &&
         !inner_tensors(leaf.value).empty();
}

// A chunk has no room for what a Python object has besides its elements.
void note_attributes(const ConvertJob& job) {
  const auto lost = std::ranges::count_if(job.leaves, loses_attributes);
  if (lost == 0) return;
  job.report.notes.push_back("attributes that hold tensors are left out, as PyTorch does: of " +
                             std::to_string(lost) + " tensors");
}

using Proposals = std::vector<std::vector<WriteItem>>;  // by rank

bool has_rows(const WriteItem& item) {
  return item.is_tensor && !item.shape.empty() && numel(item.shape) > 0;
}

void share_rows(WriteItem item, Proposals& proposals) {
  const std::vector<Box> chunks = row_chunks(item.shape, static_cast<int>(proposals.size()));
  for (std::size_t rank = 0; rank < chunks.size(); ++rank) {
    item.box = chunks[rank];
    proposals[rank].push_back(item);
  }
}

// The leaves as one proposal a rank: rows are shared, what has none is the first rank's.
Proposals proposals_of(const std::vector<Leaf>& leaves, int ranks) {
  Proposals proposals(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (is_empty_dict(leaves[i])) continue;  // the side file has it
    WriteItem item = item_of(leaves[i], i);
    if (has_rows(item)) {
      share_rows(std::move(item), proposals);
      continue;
    }
    if (item.is_tensor) item.box = whole(item.shape);
    proposals[0].push_back(std::move(item));
  }
  return proposals;
}

WrittenItem write_item(const ConvertJob& job, const WriteItem& item, std::size_t index,
                       ItemWriter& writer) {
  const Leaf& leaf = job.leaves[item.leaf];
  if (!item.is_tensor) return {index, writer.value(leaf.value)};
  const auto elements = [&](ByteSink& sink, std::uint64_t at) {
    return stream_slice(job, leaf.name, leaf.value.as_tensor(), item.box, sink, at);
  };
  return {index, writer.tensor(item.dtype, item.box.sizes, elements)};
}

// The items of one file: of a rank's proposal, every `step`-th from `first` on. One rank's are
// dealt to all files, which spreads large ones.
struct Share {
  std::size_t rank = 0;
  std::size_t first = 0;
  std::size_t step = 1;
};

Share share_of(std::size_t file, std::size_t files, std::size_t ranks) {
  return ranks > 1 ? Share{file, 0, 1} : Share{0, file, files};
}

// Writes all items into the data files `names`; returns what was written by each rank.
std::vector<std::vector<WrittenItem>> write_files(const ConvertJob& job, const Proposals& proposals,
                                                  const std::vector<std::string>& names,
                                                  DigestsByName& digests) {
  const std::size_t ranks = proposals.size();
  std::vector<std::vector<WrittenItem>> by_file(names.size());
  std::mutex mutex;  // guards digests
  parallel_for(job.threads, names.size(), [&](std::size_t file) {
    const std::string& name = names[file];
    TailedSink sink(job.store.create(name, IfExists::fail));
    ItemWriter writer(sink, name, job.window);
    const Share share = share_of(file, names.size(), ranks);
    const std::vector<WriteItem>& items = proposals[share.rank];
    for (std::size_t i = share.first; i < items.size(); i += share.step) {
      by_file[file].push_back(write_item(job, items[i], i, writer));
      sink.end_item(writer.written());
    }
    const DataDigest digest = sink.finish();
    sink.commit();
    IoReport report;
    report.bytes_written = digest.size;
    job.counters.add(report);
    const std::lock_guard lock(mutex);
    digests[name] = {digest.size, {}, 0, digest.tail};
  });
  std::vector<std::vector<WrittenItem>> written(ranks);
  for (std::size_t file = 0; file < names.size(); ++file) {
    auto& items = written[share_of(file, names.size(), ranks).rank];
    items.insert(items.end(), by_file[file].begin(), by_file[file].end());
  }
  std::sort(written[0].begin(), written[0].end(),
            [](const WrittenItem& a, const WrittenItem& b) { return a.item < b.item; });
  return written;
}

// The files of a conversion that failed, unless its checkpoint had become visible before.
void remove_own(Store& store, const std::vector<std::string>& names, const std::string& save_id) {
  try {
    if (is_visible(store, save_id) && !save_id.empty()) return;
    for (const std::string& name : names) store.remove(name);
    if (!save_id.empty()) store.remove(side_file_name(save_id));
  } catch (const Error&) {
    // What is left is removed by the next conversion; the failure before this one is what counts.
  }
}

// __{rank}_{number}_{attempt}.distcp: one a rank, or all of rank 0.
std::vector<std::string> file_names(std::size_t count, bool of_ranks, const std::string& attempt) {
  std::vector<std::string> names;
  for (std::size_t file = 0; file < count; ++file) {
    const std::string numbers =
        of_ranks ? std::to_string(file) + "_0" : "0_" + std::to_string(file);
    names.push_back(
        std::string("__").append(numbers).append("_").append(attempt).append(".distcp"));
  }
  return names;
}

// A file a rank. One rank has a file a thread.
std::vector<std::string> data_files(const Proposals& proposals, int threads,
                                    const std::string& attempt) {
  if (proposals.size() > 1) return file_names(proposals.size(), true, attempt);
  const auto most = static_cast<std::size_t>(threads);
  return file_names(std::clamp<std::size_t>(proposals[0].size(), 1, most), false, attempt);
}

}  // namespace

std::vector<Box> row_chunks(const Shape& shape, int ranks) {
  std::vector<Box> chunks;
  for (int rank = 0; chunk_begin(shape.at(0), ranks, rank) < shape[0]; ++rank)
    chunks.push_back(chunk_of(whole(shape), 0, ranks, rank));
  return chunks;
}

void write_dcp(ConvertJob& job) {
  if (job.if_exists == IfExists::fail) require_no_checkpoint(job.store, job.store.name());
  check_root(job.leaves);
  note_attributes(job);
  remove_leftovers(job.store);
  const std::string attempt = job.resumption ? job.resumption->attempt() : random_attempt();
  const Proposals proposals = proposals_of(job.leaves, job.options.ranks);
  const std::vector<std::string> names = data_files(proposals, job.threads, attempt);
  dcp::Metadata metadata;
  try {
    DigestsByName digests;
    metadata = metadata_of(proposals, write_files(job, proposals, names, digests));
    metadata.version = "1.0.0";
    metadata.checkpoint_id = job.final_name;
    job.before_visible();
    metadata.save_id = random_uuid();
    commit_dcp(job.store, *dcp::source_of(metadata), std::move(digests), encode_types(job.leaves),
               job.if_exists);
  } catch (...) {
    if (job.resumption == nullptr) remove_own(job.store, names, metadata.save_id);
    throw;
  }
}

}  // namespace tessera
