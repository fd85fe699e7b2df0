// Saves of a TrainingState in the background, while the training goes on.
//
//   CheckpointWriter writer(mesh.writer_group(), {.process = true});  // once, beside the mesh
//   const TrainingState state(model, optimizer);
//   ...
//   const PendingSave pending = save(writer, state, "run/step400");  // copies the tensors
//   ...                                                              // the next steps
//   pending.result();  // waits, throws what failed
//
// docs/guide/saving.md says which way of saving is for whom.
#pragma once

#include "tessera/checkpoint_writer.h"
#include "tessera/training_state.h"

namespace [[gnu::visibility("default")]] tessera {

// Saves what save() of training_state.h would save at this moment, by CheckpointWriter::save():
// when it returns, parameters, optimizer and values may change. But for saves that are copied
// beside the next step (WriterOptions::overlap; by default where that costs less, every optimizer
// is a tessera::AdamW, and they have all parameters that train): parameters and moments may then
// change by steps of these optimizers and by what else Tessera does, which wait, and by others
// behind PendingSave::await_staged(). Who changes them before makes the save `conflict`. All of
// that is done by the thread that saves; an optimizer in backward on a device steps on another one,
// and has to be waited for. libtorch does not count writes through data_ptr(), through a tensor of
// data(), and by collectives in place, Mesh::all_reduce_sum() among them: for these, bytes of
// tensors in the host's memory are compared here and there. A write of all elements does not escape
// that, one of a few may. The step that follows a save compares, too: where parameters have changed
// by then, saves wait for their copy from then on, unless Overlap::always is asked for.
//
// The ranks agree on the tree first, over `group`, and throw here what save() throws for it;
// nothing is saved then. The group has the ranks of the writer's, and is another one:
// Mesh::checkpoint_group(). Without it, they are those that a model is sharded over, or this
// process alone; if the writer has others, that is `invalid_argument`. Collective.
PendingSave save(CheckpointWriter& writer, const TrainingState& state, const Location& where,
                 const SaveOptions& options, Group& group, SaveDone done = {});
PendingSave save(CheckpointWriter& writer, const TrainingState& state, const Location& where,
                 const SaveOptions& options = {}, SaveDone done = {});

}  // namespace tessera
