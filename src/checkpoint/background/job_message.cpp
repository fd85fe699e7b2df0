#include "checkpoint/background/job_message.h"

#include "checkpoint/open/kinds.h"
#include "checkpoint/save/messages.h"
#include "checkpoint/save/save_plan.h"
#include "tessera/error.h"

namespace tessera {

constexpr CheckpointKind last_of(CheckpointKind) {
  return kKinds.back().kind;
}
auto fields(FieldsOf<FlatUnit> auto& unit) {
  return std::tie(unit.path, unit.names);
}
auto fields(FieldsOf<OlmoMesh> auto& mesh) {
  return std::tie(mesh.copies, mesh.device);
}
auto fields(FieldsOf<OlmoSave> auto& olmo) {
  return std::tie(olmo.config, olmo.safetensors, olmo.mesh, olmo.units, olmo.orig_params,
                  olmo.aligned_as);
}
auto fields(FieldsOf<SafetensorsSet> auto& set) {
  return std::tie(set.file_of, set.max_size);
}
// Of those that are data.
auto fields(FieldsOf<SaveOptions> auto& options) {
  return std::tie(options.kind, options.overwrite, options.single_writer, options.threads,
                  options.one_file_an_item, options.compression, options.compression_level,
                  options.replicas, options.values, options.copies, options.same_optimizer,
                  options.same_keys, options.olmo, options.safetensors, options.keep_duplicates);
}
auto fields(FieldsOf<SaveResult> auto& result) {
  return std::tie(result.bytes_needed, result.bytes_read, result.bytes_unchecked,
                  result.bytes_written, result.requests, result.retries, result.bytes_again,
                  result.save_id, result.files, result.total_bytes, result.values_in_metadata);
}

void require_sendable(const SaveOptions& options) {
  const char* given = options.name     ? "name"
                      : options.dtype  ? "dtype"
                      : options.writer ? "writer"
                                       : nullptr;
  if (given == nullptr) return;
  throw Error(ErrorCode::unsupported,
              std::string("SaveOptions::") + given +
                  " is a function, which a writer of another process cannot call");
}

bool may_be_kept(const SaveOptions& options) {
  return options.values != IfDiffers::keep && options.copies != IfDiffers::keep;
}

Bytes message_of_options(const SaveOptions& options) {
  return to_message(options);
}

SaveOptions options_from_message(ByteView message) {
  return from_message<SaveOptions>(message);
}

Bytes message_of_result(const SaveResult& result) {
  return to_message(result);
}

SaveResult result_from_message(ByteView message) {
  return from_message<SaveResult>(message);
}

}  // namespace tessera
