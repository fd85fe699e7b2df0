// model.pt, optim.pt, train.pt, or the first two as safetensors with OLMo's names (checkpoint-rows
// F-00, F-06).
#include "base/one_of.h"
#include "base/parallel.h"
#include "checkpoint/write/write_olmo.h"
#include "format/olmo/keys.h"
#include "format/safetensors/safetensors.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
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

void write_encoded(const ConvertJob& job, const std::string& file, const EncodedPart& encoded) {
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
}

// `name` without extension, holding `dict`.
void write_part(const ConvertJob& job, const SourceTensors& sources, const std::string& name,
                const Value& dict) {
  if (job.options.olmo.safetensors) {
    write_encoded(job, name + ".safetensors", encoded_part(sources, dict));
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

}  // namespace tessera
