#include "checkpoint/write/write_olmo.h"

#include <filesystem>
#include <memory>
#include <unordered_map>

#include "base/parallel.h"
#include "base/text.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/rank_files.h"
#include "checkpoint/write/local_archives.h"
#include "format/olmo/keys.h"
#include "format/olmo/sharded_tensor.h"
#include "format/olmo/yaml.h"
#include "format/safetensors/safetensors.h"
#include "storage/forwarding_store.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

std::vector<std::byte> config_of(const ConvertJob& job) {
  const std::filesystem::path given(job.options.olmo.config);
  if (!given.empty()) {
    return read_all(*open_store(directory_of(given))->open(given.filename().string()),
                    olmo::kYamlLimit);
  }
  const Store& store = *job.source.store;
  if (!store.exists(olmo::kConfigFile)) return {};
  return read_all(*store.open(olmo::kConfigFile), olmo::kYamlLimit);
}

void note_other_checkpointer(const ConvertJob& job, const std::vector<std::byte>& config) {
  const std::string_view wanted = sharded_checkpointer_name(job.options.to);
  const auto named = olmo::sharded_checkpointer_of(config);
  if (!named || wanted.empty() || *named == wanted) return;
  job.report.notes.push_back("config.yaml says sharded_checkpointer: " + *named + ", this is " +
                             std::string(wanted));
}

// Copied byte for byte: it is the user's description of the run, and the last file to appear
// (checkpoint-rows O-31).
void copy_config(const ConvertJob& job) {
  const std::vector<std::byte> config = config_of(job);
  if (config.empty()) {
    job.report.notes.emplace_back("no config.yaml: the source has none, --config names one");
    return;
  }
  note_other_checkpointer(job, config);
  put(job.store, olmo::kConfigFile, config, job.if_exists);
}

using Replace = std::function<Value(const Tensor&)>;

Value list_with_tensors(const Value& list, const Replace& replace) {
  Value copy = Value::list();
  for (const Value& item : list.items()) copy.items().push_back(with_tensors(item, replace));
  return copy;
}

Value dict_with_tensors(const Value& dict, const Replace& replace) {
  std::vector<Value::Pair> pairs;
  for (const auto& [key, item] : dict.pairs()) pairs.emplace_back(key, with_tensors(item, replace));
  Value copy = Value::dict(std::move(pairs), dict.dict_kind());
  if (const Value* state = dict.container_state()) copy.set_container_state(*state);
  return copy;
}

// What stands for a tensor in the tree of a legacy file: an empty string. Torch's object of it is
// forty values, so it is made when it is pickled.
class RankTensors {
 public:
  explicit RankTensors(const LegacyRank& of) : of_(of), sharded_(of.rank, of.ranks) {
    if (of.mesh)
      dtensors_.emplace(of.rank, olmo::HybridMesh{of.mesh->copies, of.parts(), of.mesh->device});
  }

  // `local`: the leaf with the rank's rows; none: it has none.
  Value add(const Tensor& tensor, Value local) {
    Value stand_in{std::string()};
    by_stand_in_.emplace(stand_in.identity(), Entry{&tensor, std::move(local)});
    return stand_in;
  }

  bool expand(const Value& value, Value& expanded) const {
    if (!value.is(Kind::string)) return false;
    const auto found = by_stand_in_.find(value.identity());
    if (found == by_stand_in_.end()) return false;
    const auto& [tensor, local] = found->second;
    if (dtensors_) {
      expanded = dtensors_->make(tensor->dtype, tensor->shape, local);
    } else {
      expanded = sharded_.make(tensor->dtype, tensor->shape, row_chunks(tensor->shape, of_.ranks),
                               local.is(Kind::none) ? nullptr : &local);
    }
    return true;
  }

  [[nodiscard]] bool has_dtensors() const { return dtensors_.has_value(); }

 private:
  struct Entry {
    const Tensor* tensor;  // of the state
    Value local;
  };
  LegacyRank of_;
  olmo::ShardedTensorMaker sharded_;
  std::optional<olmo::DTensorMaker> dtensors_;  // of a hybrid mesh
  std::unordered_map<const void*, Entry> by_stand_in_;
};

// Makes the archive of one rank, with its rows of every tensor.
class LegacyFile {
 public:
  LegacyFile(const SourceTensors& sources, const LegacyRank& of)
      : sources_(sources),
        of_(of),
        tensors_(std::make_shared<RankTensors>(of)),
        archive_{own_file("", of.rank), Value::dict(), {}} {
    archive_.expand = [tensors = tensors_](const Value& value, Value& expanded) {
      return tensors->expand(value, expanded);
    };
  }

  Archive make(const OlmoState& state) {
    const auto shard = [this](const Tensor& tensor) { return shard_of(tensor); };
    archive_.tree.set_item("model", with_tensors(state.model, shard));
    if (state.optim) archive_.tree.set_item("optim", with_tensors(*state.optim, shard));
    if (state.train) {
      for (const auto& [key, value] : state.train->pairs()) archive_.tree.set_item(key, value);
    }
    return std::move(archive_);
  }

 private:
  // What has no rows is each rank's whole.
  Value shard_of(const Tensor& tensor) {
    if (tensor.shape.empty() || numel(tensor.shape) == 0)
      return whole_tensor(sources_, tensor, archive_);
    if (const std::optional<Box> mine = legacy_rows(tensor.shape, of_))
      return tensors_->add(tensor, rows_of(tensor, *mine));
    if (!tensors_->has_dtensors()) return tensors_->add(tensor, Value());
    // Every rank of a mesh has a local tensor, one without rows as well.
    Shape none = tensor.shape;
    none[0] = 0;
    Value local = planned_tensor(tensor.dtype, std::move(none));
    archive_.parts.try_emplace(&local.as_tensor());
    return tensors_->add(tensor, std::move(local));
  }

  Value rows_of(const Tensor& tensor, const Box& rows) {
    Value local = planned_tensor(tensor.dtype, rows.sizes);
    archive_.parts.emplace(&local.as_tensor(),
                           std::vector{ArchivePart{&sources_.of(tensor), rows, 0, numel(rows)}});
    return local;
  }

  const SourceTensors& sources_;
  LegacyRank of_;
  std::shared_ptr<RankTensors> tensors_;  // the archive's, too
  Archive archive_;
};

}  // namespace

// Empty: no checkpointer of OLMo's.
std::string_view sharded_checkpointer_name(CheckpointKind kind) {
  switch (kind) {
    case CheckpointKind::olmo_torch_new:
      return "torch_new";
    case CheckpointKind::olmo_legacy:
      return "torch_legacy";
    case CheckpointKind::olmo_local:
      return "local";
    default:
      return "";
  }
}

SourceTensors::SourceTensors(const OlmoState& state) {
  add("model", state.model);
  if (state.optim) add("optim", *state.optim);
}

SourceTensors::SourceTensors(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves) add(leaf.name, leaf.value);
}

std::vector<const Leaf*> SourceTensors::all() const {
  std::vector<const Leaf*> all;
  for (const Leaf& leaf : leaves_) all.push_back(&leaf);
  return all;
}

void SourceTensors::add(const std::string& name, const Value& value) {
  if (value.is(Kind::tensor)) {
    leaves_.push_back({name, {}, value});
    by_tensor_.emplace(&value.as_tensor(), &leaves_.back());
  } else if (value.is(Kind::dict)) {
    for (const auto& [key, item] : value.pairs()) {
      add(name + "." + key_text(key), item);
    }
  } else if (value.is(Kind::list)) {
    std::size_t index = 0;
    for (const Value& item : value.items()) add(name + "." + std::to_string(index++), item);
  }
}

Value with_tensors(const Value& tree, const std::function<Value(const Tensor&)>& replace) {
  if (tree.is(Kind::tensor)) return replace(tree.as_tensor());
  if (tree.is(Kind::list)) return list_with_tensors(tree, replace);
  if (!tree.is(Kind::dict) || tree.dict_kind() == DictKind::default_dict) return tree;
  return dict_with_tensors(tree, replace);
}

Value whole_tensor(const SourceTensors& sources, const Tensor& tensor, Archive& archive) {
  Value leaf = planned_tensor(tensor.dtype, tensor.shape);
  archive.parts.emplace(&leaf.as_tensor(), std::vector{whole_part(sources.of(tensor))});
  return leaf;
}

std::optional<Box> legacy_rows(const Shape& shape, const LegacyRank& of) {
  std::vector<Box> chunks = row_chunks(shape, of.parts());
  const auto part = static_cast<std::size_t>(of.part());
  if (part >= chunks.size()) return std::nullopt;
  return std::move(chunks[part]);
}

Archive legacy_archive(const OlmoState& state, const SourceTensors& sources, const LegacyRank& of) {
  return LegacyFile(sources, of).make(state);
}

Archive part_archive(const SourceTensors& sources, const std::string& name, const Value& dict) {
  Archive archive{name, dict, {}};
  archive.tree = with_tensors(
      dict, [&](const Tensor& tensor) { return whole_tensor(sources, tensor, archive); });
  return archive;
}

void write_train(const ConvertJob& job, const OlmoState& state, const std::string& name) {
  if (state.train) write_archive(job, {name, *state.train, {}}, 1);
}

void write_olmo_torch_new(ConvertJob& job, const OlmoState& state) {
  OlmoState part{state.model, state.optim, {}};
  const std::vector<Leaf> leaves = leaves_of(part.tree());
  const std::string folder(olmo::kDcpFolder);
  SubStore store(job.store, folder);
  ConvertJob inner = job.with(leaves, store, folder);
  write_dcp(inner);
  for (int rank = 0; rank < job.options.ranks; ++rank) {
    write_train(job, state, own_file("train", rank));
  }
}

void write_olmo_legacy(ConvertJob& job, const OlmoState& state) {
  const SourceTensors sources(state);
  const int ranks = job.options.ranks;
  parallel_for(job.threads, static_cast<std::size_t>(ranks), [&](std::size_t index) {
    write_archive(job, legacy_archive(state, sources, {static_cast<int>(index), ranks, {}}), 1);
  });
}

void write_olmo(ConvertJob& job) {
  if (job.options.ranks < 1) throw Error(ErrorCode::invalid_argument, "a target for no ranks");
  // What is not written need not have OLMo's form.
  const OlmoParts parts = job.options.olmo.model_only ? OlmoParts::model : OlmoParts::all;
  const OlmoState state =
      olmo_state_of(keeps_tree(job) ? *job.source.root : unflatten(job.leaves), parts);
  switch (job.options.to) {
    case CheckpointKind::olmo_full:
      write_olmo_full(job, state);
      break;
    case CheckpointKind::olmo_torch_new:
      write_olmo_torch_new(job, state);
      break;
    case CheckpointKind::olmo_legacy:
      write_olmo_legacy(job, state);
      break;
    case CheckpointKind::olmo_local:
      write_olmo_local(job, state);
      break;
    default:
      break;  // is no kind of OLMo's
  }
  copy_config(job);
}

// model.pt, optim.pt, train.pt, or the first two as safetensors with OLMo's names (checkpoint-rows
// F-00, F-06).

namespace {

using Kind = Value::Kind;

void require_encodable(const Value& key) {
  if (is_one_of(key.kind(), Kind::string, Kind::integer)) return;
  throw Error(ErrorCode::unsupported, "a key that is neither a string nor a number")
      .at_key(render(key, 60));
}

void encode(const Value& dict, const SourceTensors& sources, Value::List& keys, EncodedPart& out) {
  for (const auto& [key, value] : dict.pairs()) {
    require_encodable(key);
    keys.push_back(key);
    if (value.is(Kind::dict)) {
      encode(value, sources, keys, out);
    } else if (value.is(Kind::tensor)) {
      out.tensors.emplace(olmo::encode_key({keys, false}), &sources.of(value.as_tensor()));
    } else {
      out.values.emplace(olmo::encode_key({keys, true}), olmo::encode_value(value));
    }
    keys.pop_back();
  }
}

safetensors::Header header_of(const EncodedPart& encoded) {
  safetensors::Header header;
  for (const auto& [name, leaf] : encoded.tensors) {
    const Tensor& tensor = leaf->value.as_tensor();
    require_safetensors_type(tensor.dtype, leaf->name);
    header.entries.push_back({name, tensor.dtype, tensor.shape, 0, 0});
  }
  for (const auto& [name, bytes] : encoded.values) {
    header.entries.push_back(
        {name, DType::uint8, Shape{static_cast<std::int64_t>(bytes.size())}, 0, 0});
  }
  return header;
}

FileNotes write_encoded(const ConvertJob& job, const std::string& file,
                        const EncodedPart& encoded) {
  const safetensors::Header& header = encoded.header;
  IoReport report;
  report.bytes_written = encoded.size();
  const auto sink = job.store.create(file, job.if_exists, report.bytes_written);
  sink->write_at(0, encoded.head);
  parallel_for(job.threads, header.entries.size(), [&](std::size_t i) {
    const safetensors::Entry& entry = header.entries[i];
    const std::uint64_t at = header.data_offset + entry.begin;
    if (const auto value = encoded.values.find(entry.name); value != encoded.values.end()) {
      sink->write_at(at, value->second);
    } else {
      const Leaf& leaf = *encoded.tensors.at(entry.name);
      stream_tensor(job, leaf.name, leaf.value.as_tensor(), *sink, at);
    }
  });
  sink->commit();
  job.counters.add(report);
  return {};
}

// `name` without extension, holding `dict`.
void write_part(const ConvertJob& job, const SourceTensors& sources, const std::string& name,
                const Value& dict) {
  if (job.options.olmo.safetensors) {
    const EncodedPart encoded = encoded_part(sources, dict);
    make_file(job, name + ".safetensors", [&](const ConvertJob& own) {
      return write_encoded(own, name + ".safetensors", encoded);
    });
    return;
  }
  const std::string file = name + ".pt";
  write_archive(job, keeps_tree(job) ? Archive{file, dict, {}} : part_archive(sources, file, dict),
                job.threads);
}

}  // namespace

EncodedPart encoded_part(const SourceTensors& sources, const Value& dict) {
  EncodedPart encoded;
  Value::List keys;
  encode(dict, sources, keys, encoded);
  encoded.header = header_of(encoded);
  encoded.head = safetensors::encode_header(encoded.header);
  return encoded;
}

void write_olmo_full(ConvertJob& job, const OlmoState& state) {
  const SourceTensors sources(state);
  write_part(job, sources, "model", state.model);
  if (job.options.olmo.model_only) return;
  if (state.optim) write_part(job, sources, "optim", *state.optim);
  write_train(job, state, "train.pt");
}

// model/, optim/ and train/rank{r}.pt of a local checkpoint, and metadata.yaml (checkpoint-rows
// O-72, O-77).

namespace {

constexpr const char* kDefaultUnit = "(.*\\.)?blocks\\.[0-9]+";

UnitPlan plan_of(const ConvertJob& job, const std::vector<std::string>& names) {
  const std::string& unit = job.options.olmo.unit;
  if (unit.empty() && job.source.kind == CheckpointKind::olmo_local) {
    return UnitPlan::of_local(*job.source.store, names);
  }
  return UnitPlan::by_expression(names, unit.empty() ? kDefaultUnit : unit);
}

void put_text(const ConvertJob& job, std::string_view name, const std::string& text) {
  put(job.store, name, {reinterpret_cast<const std::byte*>(text.data()), text.size()},
      job.if_exists);
}

}  // namespace

std::string world_file_text(int ranks) {
  return "world_size: " + std::to_string(ranks) + "\n";
}

void write_olmo_local(ConvertJob& job, const OlmoState& state) {
  const SourceTensors sources(state);
  UnitPlan plan = plan_of(job, names_in_flat_model(state.model));
  const int ranks = job.options.ranks;
  const FlatRules rules{ranks, job.options.olmo.orig_params.value_or(plan.aligned()), {}};
  const LocalArchives archives(state, sources, std::move(plan), rules);
  parallel_for(job.threads, static_cast<std::size_t>(ranks), [&](std::size_t index) {
    const auto rank = static_cast<int>(index);
    write_archive(job, archives.model(own_file("model", rank), rank), 1);
    if (state.optim) write_archive(job, archives.optim(own_file("optim", rank), rank), 1);
    write_train(job, state, own_file("train", rank));
  });
  put_text(job, olmo::kWorldFile, world_file_text(ranks));
}

}  // namespace tessera
