#include "checkpoint/write/safetensors_files.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <set>
#include <span>
#include <string_view>

#include "base/numbers.h"
#include "base/parallel.h"
#include "checkpoint/open/tree.h"
#include "checkpoint/open/tree_json.h"
#include "checkpoint/read/safetensors_digests.h"
#include "checkpoint/write/targets.h"
#include "format/safetensors/index.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

constexpr int kMostFiles = 99'999;  // numbers have five digits

void require_storable(const std::string& name, const Tensor& tensor) {
  require_safetensors_type(tensor.dtype, name);
  if (name == "__metadata__") {
    throw Error(ErrorCode::unsupported, "a name that safetensors reserves").at_key(name);
  }
}

std::string stem_of(const std::string& name) {
  return name.substr(0, name.rfind('.'));
}

std::string numbered(const std::string& name, std::size_t number, std::size_t count) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.safetensors", number, count);
  return stem_of(name) + numbers;
}

// Deals tensors out in their order.
class Dealer {
 public:
  Dealer(const SafetensorsSet& set, std::string name) : set_(set), name_(std::move(name)) {
    if (!by_map()) {
      files_.resize(1);
      return;
    }
    int count = 0;
    for (const auto& [tensor, number] : set_.file_of) {
      if (number < 1 || number > kMostFiles) {
        throw Error(ErrorCode::invalid_argument, "file number " + std::to_string(number) +
                                                     ", expected 1 to " +
                                                     std::to_string(kMostFiles))
            .at_key(tensor);
      }
      count = std::max(count, number);
    }
    files_.resize(static_cast<std::size_t>(count));
  }

  void add(const std::string& name, const Tensor& tensor) {
    require_storable(name, tensor);
    const std::uint64_t size = byte_size(tensor.dtype, tensor.shape);
    file_for(name, size).header.entries.push_back({name, tensor.dtype, tensor.shape, 0, 0});
    bytes_ += size;
  }

  std::vector<SafetensorsFile> take() {
    const bool numbers = by_map() || files_.size() > 1;
    for (std::size_t i = 0; i < files_.size(); ++i)
      files_[i].name = numbers ? numbered(name_, i + 1, files_.size()) : name_;
    if (by_map())
      std::erase_if(files_, [](const auto& file) { return file.header.entries.empty(); });
    return std::move(files_);
  }

 private:
  [[nodiscard]] bool by_map() const { return !set_.file_of.empty(); }

  SafetensorsFile& file_for(const std::string& name, std::uint64_t size) {
    if (by_map()) {
      const auto found = set_.file_of.find(name);
      if (found != set_.file_of.end()) return files_[static_cast<std::size_t>(found->second) - 1];
      throw Error(ErrorCode::invalid_argument, "the map of files has no number for this tensor")
          .at_key(name);
    }
    // A new file where one would become too large: huggingface's rule.
    if (set_.max_size > 0 && bytes_ > 0 && checked_add(bytes_, size) > set_.max_size) {
      files_.emplace_back();
      bytes_ = 0;
    }
    return files_.back();
  }

  const SafetensorsSet& set_;
  std::string name_;
  std::vector<SafetensorsFile> files_;
  std::uint64_t bytes_ = 0;  // in the last file
};

}  // namespace

std::vector<SafetensorsFile> safetensors_files(const std::vector<Leaf>& leaves,
                                               const SafetensorsSet& set, const std::string& name) {
  if (!set.file_of.empty() && set.max_size > 0) {
    throw Error(ErrorCode::invalid_argument,
                "either a map or a largest size says which tensor goes into which file");
  }
  Dealer dealer(set, name);
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) dealer.add(leaf.name, leaf.value.as_tensor());
  }
  return dealer.take();
}

bool has_index(const std::vector<SafetensorsFile>& files, const std::string& name) {
  return files.empty() || files.front().name != name;
}

std::string index_name(const std::string& name) {
  return stem_of(name) + std::string(safetensors::kIndexSuffix);
}

std::string index_text(const std::vector<SafetensorsFile>& files) {
  safetensors::Index index;
  std::uint64_t total = 0;
  for (const SafetensorsFile& file : files) {
    for (const safetensors::Entry& entry : file.header.entries) {
      index.files.emplace(entry.name, file.name);
      total = checked_add(total, byte_size(entry.dtype, entry.shape));
    }
  }
  index.total_size = total;
  return safetensors::encode_index(index);
}

// One safetensors file, or a set with an index. Of a file every tensor is written at its place by
// whichever thread is free, and then the header, which holds their digests.

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

// What of the leaves is written once, and noted.
struct Ties {
  std::vector<Leaf> written;                 // all others, if there are any notes
  std::map<std::string, std::string> notes;  // for each that is left out, the name of what it is
};

bool are_tied(const Leaf* one, const Leaf* other) {
  if (one == nullptr || other == nullptr) return false;
  const std::vector<std::size_t> kept = ties_of({*one, *other});
  return kept[0] == kept[1];
}

// The source's own, without its notes of tied tensors: the target's have the target's names.
std::map<std::string, std::string> kept_metadata(const Checkpoint& source) {
  std::map<std::string, std::string> metadata = source.metadata;
  std::erase_if(metadata, [&source](const auto& entry) {
    return are_tied(source.find(entry.first), source.find(entry.second));
  });
  return metadata;
}

Ties ties_in(const ConvertJob& job, const std::map<std::string, std::string>& metadata) {
  Ties ties;
  if (job.options.keep_duplicates) return ties;
  const std::vector<std::size_t> kept = ties_of(job.leaves);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const std::string& name = job.leaves[i].name;
    // A tensor is written twice if the metadata says something else under its name.
    if (kept[i] != i && can_be_noted(name) && !metadata.contains(name))
      ties.notes[name] = job.leaves[kept[i]].name;
  }
  if (ties.notes.empty()) return ties;
  std::ranges::copy_if(job.leaves, std::back_inserter(ties.written),
                       [&ties](const Leaf& leaf) { return !ties.notes.contains(leaf.name); });
  return ties;
}

void note(const Ties& ties, SafetensorsFile& file) {
  if (ties.notes.empty()) return;
  std::set<std::string_view> names;
  for (const safetensors::Entry& entry : file.header.entries) names.insert(entry.name);
  for (const auto& [name, kept] : ties.notes) {
    if (!names.contains(kept)) continue;
    file.header.metadata.emplace(name, kept);
    file.header.metadata.emplace(kTiesKey, "1");
  }
}

// What the source says under a name that no tensor of the target has would be a note, if it happens
// to be the name of one that the target has.
void drop_false_notes(const ConvertJob& job, bool has_notes,
                      std::map<std::string, std::string>& metadata) {
  std::set<std::string_view> names;
  for (const Leaf& leaf : job.leaves) names.insert(leaf.name);
  for (auto entry = metadata.begin(); entry != metadata.end();) {
    const auto& [key, value] = *entry;
    const bool is_false =
        is_note(key, value, has_notes) && !names.contains(key) && names.contains(value);
    if (is_false) {
      job.report.notes.push_back("the metadata '" + printable(key, 200) + "' is left out: '" +
                                 printable(value, 200) +
                                 "' is the name of a tensor, and it would be taken for tied to it");
    }
    entry = is_false ? metadata.erase(entry) : std::next(entry);
  }
}

// They count as done.
void report_ties(const ConvertJob& job, const Ties& ties) {
  if (ties.notes.empty()) return;
  for (const Leaf& leaf : job.leaves) {
    if (!ties.notes.contains(leaf.name)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    job.meter.add(byte_size(tensor.dtype, tensor.shape));
  }
  const auto& [name, kept] = *ties.notes.begin();
  std::string text = printable(name, 200) + " is " + printable(kept, 200);
  if (ties.notes.size() > 1)
    text += ", and " + std::to_string(ties.notes.size() - 1) + " more have a second name";
  job.report.notes.push_back(text + ": tied tensors are written once (--keep-duplicates)");
}

std::vector<SafetensorsFile> plan_files(const ConvertJob& job) {
  std::map<std::string, std::string> metadata = kept_metadata(job.source);
  const Ties ties = ties_in(job, metadata);
  drop_false_notes(job, !ties.notes.empty(), metadata);
  const SafetensorsSet set{job.options.file_of, job.options.max_shard_size};
  std::vector<SafetensorsFile> files =
      safetensors_files(ties.notes.empty() ? job.leaves : ties.written, set, job.name);
  for (SafetensorsFile& file : files) {
    file.header.metadata = metadata;
    file.header.metadata.emplace("format", "pt");
    note(ties, file);
  }
  if (!files.empty() && !is_flat(job)) {
    files[0].header.metadata[kTreeKey] = encode_tree(job.leaves, job.report.values_in_metadata);
  }
  report_ties(job, ties);
  return files;
}

using Tensors = std::map<std::string_view, const Tensor*>;

// A tensor is not cut, and what is not cut has a header in front of it.
void note_large_file(const ConvertJob& job, const std::string& name, std::uint64_t size,
                     std::size_t tensors) {
  const std::uint64_t most = job.options.max_shard_size;
  if (most == 0 || size <= most) return;
  job.report.notes.push_back(
      name + " has " + std::to_string(size) + " bytes, more than the " + std::to_string(most) +
      " of --max-shard-size: " +
      (tensors == 1 ? "its only tensor is not cut" : "the header is on top of the tensors"));
}

FileNotes write_file(const ConvertJob& job, SafetensorsFile& file, const Tensors& tensors) {
  reserve_digests(file.header);
  std::vector<std::byte> head = safetensors::encode_header(file.header);
  const auto& entries = file.header.entries;
  const std::uint64_t size = file.header.data_offset + (entries.empty() ? 0 : entries.back().end);
  note_large_file(job, file.name, size, entries.size());
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
  return {};
}

void write_index(const ConvertJob& job, const std::vector<SafetensorsFile>& files) {
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
  for (SafetensorsFile& file : files) {
    make_file(job, file.name,
              [&](const ConvertJob& own) { return write_file(own, file, tensors); });
  }
  if (has_index(files, job.name)) write_index(job, files);
}

}  // namespace tessera
