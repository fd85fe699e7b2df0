#include "checkpoint/write/write_dcp.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/dcp/item_writer.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/tail.h"
#include "checkpoint/save/commit_dcp.h"
#include "checkpoint/save/place.h"
#include "checkpoint/write/resume.h"
#include "checkpoint/write/targets.h"
#include "checkpoint/write/write_archive.h"
#include "layout/boxes.h"
#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

bool has_rows(const Tensor& tensor) {
  return !tensor.shape.empty() && numel(tensor.shape) > 0;
}

dcp::EntryHead head_of(const Leaf& leaf) {
  dcp::EntryHead head;
  head.name = leaf.name;
  head.path = leaf.path;
  head.is_tensor = leaf.value.is(Value::Kind::tensor);
  if (!head.is_tensor) return head;
  const Tensor& tensor = leaf.value.as_tensor();
  head.dtype = tensor.dtype;
  head.shape = tensor.shape;
  head.requires_grad = tensor.requires_grad;
  return head;
}

}  // namespace

Shares::Shares(const std::vector<Leaf>& leaves, int ranks)
    : leaves_(leaves), of_ranks_(static_cast<std::size_t>(ranks)) {
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (is_empty_dict(leaves[i])) continue;  // the side file has it
    of_ranks_[0].push_back(i);
    if (!leaves[i].value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaves[i].value.as_tensor();
    if (!has_rows(tensor)) continue;
    const std::int64_t rows = tensor.shape[0];
    for (int rank = 1; rank < ranks && chunk_begin(rows, ranks, rank) < rows; ++rank)
      of_ranks_[static_cast<std::size_t>(rank)].push_back(i);
  }
}

Box Shares::part(const Tensor& tensor, std::size_t rank) const {
  if (!has_rows(tensor)) return whole(tensor.shape);
  return chunk_of(whole(tensor.shape), 0, static_cast<std::int64_t>(ranks()),
                  static_cast<std::int64_t>(rank));
}

WrittenSource::WrittenSource(const Shares& shares, const WrittenItems& written,
                             const std::vector<std::string>& files, dcp::Origin origin)
    : shares_(shares), written_(written), files_(files), origin_(std::move(origin)) {
  heads_.reserve(shares.of(0).size());
  for (const std::size_t leaf : shares.of(0)) heads_.push_back(head_of(shares.leaves()[leaf]));
}

const Tensor& WrittenSource::tensor(std::size_t entry) const {
  return shares_.leaves()[shares_.of(0)[entry]].value.as_tensor();
}

void WrittenSource::for_each_chunk(std::size_t entry, const ChunkVisitor& visit) const {
  for_each_item(entry, [&, rank = std::size_t{0}](Numbers, const dcp::ItemView&) mutable {
    const Box box = shares_.part(tensor(entry), rank++);
    visit(box.offsets, box.sizes);
  });
}

// The ranks that have a part of one tensor follow one another from the first on.
void WrittenSource::for_each_item(std::size_t entry, const ItemVisitor& visit) const {
  const std::size_t leaf = shares_.of(0)[entry];
  for (std::size_t rank = 0; rank < shares_.ranks(); ++rank) {
    const std::vector<std::size_t>& leaves = shares_.of(rank);
    const auto found = std::ranges::lower_bound(leaves, leaf);
    if (found == leaves.end() || *found != leaf) break;
    const WrittenItem& item = written_[rank][static_cast<std::size_t>(found - leaves.begin())];
    const Box box = heads_[entry].is_tensor ? shares_.part(tensor(entry), rank) : Box();
    visit(box.offsets, {files_[item.file], item.offset, item.length});
  }
}

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

void write_item(const ConvertJob& job, const Leaf& leaf, const Box& box, ItemWriter& writer) {
  if (!leaf.value.is(Value::Kind::tensor)) {
    writer.value(leaf.value);
    return;
  }
  const Tensor& tensor = leaf.value.as_tensor();
  writer.tensor(tensor.dtype, box.sizes, [&](ByteSink& sink, std::uint64_t at) {
    return stream_slice(job, leaf.name, tensor, box, sink, at);
  });
}

// The items of one file: of a rank's leaves, every `step`-th from `first` on. One rank's are dealt
// to all files, which spreads large ones.
struct Share {
  std::size_t rank = 0;
  std::size_t first = 0;
  std::size_t step = 1;
};

Share share_of(std::size_t file, std::size_t files, std::size_t ranks) {
  return ranks > 1 ? Share{file, 0, 1} : Share{0, file, files};
}

// Writes the data file of the share. Notes where its items end, then its size and its tail's
// digest.
FileNotes write_file(const ConvertJob& job, const Shares& shares, const Share& share,
                     const std::string& name) {
  TailedSink sink(job.store.create(name, IfExists::fail));
  ItemWriter writer(sink, name, job.window);
  FileNotes notes;
  const std::vector<std::size_t>& leaves = shares.of(share.rank);
  for (std::size_t i = share.first; i < leaves.size(); i += share.step) {
    const Leaf& leaf = shares.leaves()[leaves[i]];
    const bool is_tensor = leaf.value.is(Value::Kind::tensor);
    write_item(job, leaf, is_tensor ? shares.part(leaf.value.as_tensor(), share.rank) : Box(),
               writer);
    sink.end_item(writer.written());
    notes.push_back(writer.written());
  }
  const DataDigest digest = sink.finish();
  sink.commit();
  IoReport report;
  report.bytes_written = digest.size;
  job.counters.add(report);
  notes.insert(notes.end(), {digest.size, digest.tail});
  return notes;
}

// Writes all items into the data files `names`.
WrittenItems write_files(const ConvertJob& job, const Shares& shares,
                         const std::vector<std::string>& names, DigestsByName& digests) {
  WrittenItems written(shares.ranks());
  for (std::size_t rank = 0; rank < written.size(); ++rank)
    written[rank].resize(shares.of(rank).size());
  std::mutex mutex;  // guards digests
  parallel_for(job.threads, names.size(), [&](std::size_t file) {
    const std::string& name = names[file];
    const Share share = share_of(file, names.size(), shares.ranks());
    const std::vector<std::size_t>& leaves = shares.of(share.rank);
    if (share.first >= leaves.size()) return;  // `.metadata` would not name it
    const FileNotes notes = make_file(
        job, name, [&](const ConvertJob& own) { return write_file(own, shares, share, name); });
    auto end = notes.begin();
    std::uint64_t begin = 0;
    for (std::size_t i = share.first; i < leaves.size(); i += share.step) {
      written[share.rank][i] = {file, begin, *end - begin};
      begin = *end++;
    }
    const std::lock_guard lock(mutex);
    digests[name] = {*end, {}, 0, *(end + 1)};
  });
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
std::vector<std::string> data_files(const Shares& shares, int threads, const std::string& attempt) {
  if (shares.ranks() > 1) return file_names(shares.ranks(), true, attempt);
  const auto most = static_cast<std::size_t>(threads);
  return file_names(std::clamp<std::size_t>(shares.of(0).size(), 1, most), false, attempt);
}

}  // namespace

std::vector<Box> row_chunks(const Shape& shape, int ranks) {
  std::vector<Box> chunks;
  for (int rank = 0; chunk_begin(shape.at(0), ranks, rank) < shape[0]; ++rank)
    chunks.push_back(chunk_of(whole(shape), 0, ranks, rank));
  return chunks;
}

void write_dcp(ConvertJob& job) {
  const Present present = present_in(job.store);
  if (job.if_exists == IfExists::fail) require_no_checkpoint(present, job.store.name());
  check_root(job.leaves);
  note_attributes(job);
  Leftovers leftovers;
  // A work directory holds what is kept, and nothing else.
  if (job.resumption == nullptr) leftovers.find(job.store, present, job.is_alone);
  const std::string attempt = job.resumption ? job.resumption->attempt() : random_attempt();
  const Shares shares(job.leaves, job.options.ranks);
  const std::vector<std::string> names = data_files(shares, job.threads, attempt);
  std::string save_id;
  try {
    DigestsByName digests;
    const WrittenItems written = write_files(job, shares, names, digests);
    job.before_visible();
    save_id = random_uuid();
    const WrittenSource metadata(shares, written, names, {"1.0.0", job.final_name, save_id, true});
    commit_dcp(job.store, metadata,
               {{}, std::move(digests), encode_types(job.leaves), present.metadata, {}});
  } catch (...) {
    if (job.resumption == nullptr) remove_own(job.store, names, save_id);
    throw;
  }
  leftovers.after_commit(job.store);
}

}  // namespace tessera
