// Uploads of kinds that have no marker.
#pragma once

#include "tessera/upload.h"

namespace tessera {

// upload() by one process of a directory whose kind has no marker: a set of safetensors files, or
// files of ranks. What a reader begins with comes after the rest. Without `overwrite` a file of
// another content is `already_exists`.
UploadReport upload_unmarked(const Location& from, const Location& to,
                             const UploadOptions& options);

}  // namespace tessera
