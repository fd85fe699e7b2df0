#include "checkpoint/write/convert.h"
#include "base/parallel.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/to_store.h"
#include "checkpoint/write/destination.h"
#include "tessera/convert.h"

namespace tessera {

// A conversion into a place, or on a disk and from there into a store.

namespace {

bool is_staged(const Location& target, const ConvertOptions& options) {
  const bool appears_whole = single_file(options).empty() && options.to != CheckpointKind::dcp;
  return appears_whole && !options.resume && needs_staging(target);
}

ConvertReport convert_staged(const Checkpoint& source, const Location& target,
                             const ConvertOptions& options) {
  const UploadOptions uploading = options_to_upload(options);
  require_target(target, uploading);
  const auto alone = solo_group();
  const Staging staging(*alone);
  const std::string place = staging.place_for(to_string(target));
  ConvertOptions on_disk = options;
  on_disk.overwrite = false;
  on_disk.progress = first_half(options.progress);
  ConvertReport report = convert_in_place(source, place, on_disk);
  upload_staged(place, target, options.to, uploading, *alone);
  report.target = to_string(target);
  return report;
}

}  // namespace

ConvertReport convert(const Location& source, const Location& target,
                      const ConvertOptions& options) {
  require_convertible(options);
  const HeedStop heeding(options.stop);
  const Checkpoint opened = Checkpoint::open(source, options.open);
  require_used(options.open, opened);
  return convert(opened, target, options);
}

ConvertReport convert(const Checkpoint& source, const Location& target,
                      const ConvertOptions& options) {
  require_convertible(options);
  const HeedStop heeding(options.stop);
  const Location located = located_target(target, single_file(options));
  return is_staged(located, options) ? convert_staged(source, located, options)
                                     : convert_in_place(source, located, options);
}

}  // namespace tessera
