#include "checkpoint/staged/to_store.h"

#include "base/random_id.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/marker.h"
#include "checkpoint/run/upload_unmarked.h"
#include "checkpoint/save/probe.h"
#include "comm/long_work.h"

namespace tessera {

bool needs_staging(const Location& target) {
  return target.store && !target.store->has_directories();
}

void require_target(const Location& target, const UploadOptions& options) {
  const auto store = directory_store(target);
  if (!options.overwrite) require_no_marker(*store);
  store->require_writable(probe_name(random_attempt()), options.single_writer);
}

void upload_staged(const Location& staged, const Location& target, CheckpointKind kind,
                   const UploadOptions& options, Group& group) {
  if (is_olmo_kind(kind)) {
    (void)upload(staged, target, options, group);
    return;
  }
  // A set of safetensors is in rank 0's directory whole.
  agree_on_long_work(group, "uploading a checkpoint", options.stop,
                     [&](const std::stop_token& stop) {
                       if (group.rank() != 0) return;
                       UploadOptions how = options;
                       how.stop = stop;
                       (void)upload_unmarked(staged, target, how);
                     });
}

ProgressHook first_half(const ProgressHook& all) {
  if (!all) return {};
  return [all](const Progress& half) { all({half.done, half.total + half.total}); };
}

ProgressHook second_half(const ProgressHook& all) {
  if (!all) return {};
  return [all](const Progress& half) { all({half.total + half.done, half.total + half.total}); };
}

}  // namespace tessera
