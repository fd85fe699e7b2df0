// Saving without a group: each rank for itself.
#pragma once

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

// Saves what this rank holds as its part of a DCP checkpoint, without a word to other ranks, as
// PyTorch does with use_collectives=False: data files and `__{rank}.metadata`, and no `.metadata`.
// Ranks from 0 up without a gap make a checkpoint, which every reader of this library opens.
// PyTorch's reader gives each rank its own part alone.
//
// What several ranks hold each of them writes; readers take that of the lowest one. Nobody compares
// values, proves that chunks fill their tensors before a reader does, or notices when the last
// ranks or some rank's newest part are missing: whoever calls this has to know that all ranks have
// succeeded. There is no side file: nothing but the archives' own checksums is found damaged.
//
// `options`: those of DCP saves, but for `replicas`, `writer`, `values`, `copies` and `same_keys`,
// which have no meaning here. An earlier part of this rank is `already_exists` or, with
// `overwrite`, replaced in one step. A directory with a `.metadata` is `already_exists` in any
// case, because readers would prefer that. `rank` below 0, or 2^20 and more, is `invalid_argument`;
// chunks of one tensor that overlap are `conflict`, as in save().
SaveResult save_part(const Value& tree, const Location& where, int rank,
                     const SaveOptions& options = {});

}  // namespace tessera
