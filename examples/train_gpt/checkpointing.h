// The checkpoints of a training: SAVE/step{N}, each a PyTorch distributed checkpoint of
// {"model": ..., "optim": ..., "trainer": ...}, or what one of OLMo's checkpointers makes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "options.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/comm.h"
#include "tessera/grace.h"
#include "tessera/mesh.h"
#include "tessera/run_directory.h"
#include "tessera/run_lease.h"
#include "tessera/save_frequency.h"
#include "training.h"

// What a training has behind it; with the seed it also says where in the data it is.
struct Progress {
  std::int64_t step = 0;
  std::int64_t tokens = 0;
  std::string checkpoint;                  // the one resumed from; empty: none
  std::vector<std::string> warnings = {};  // about the other checkpoints, of that resume
};

// SAVE/step{N}
[[nodiscard]] std::string checkpoint_path(const Options& options, std::int64_t step);

// Tries whether --save can be written to, so that a training does not learn it at its first
// checkpoint: of an object store the error names the right that is lacking. Collective.
void require_place(const Options& options, tessera::Group& group);

// Loads model and optimizer in place from the checkpoint that --resume means: a directory, or for
// "latest" the newest one of --save that is whole (tessera/run_directory.h). Before the first
// checkpoint the answer is no progress, so that one command line serves the first start and every
// restart; it is `corrupt` when all that are there are damaged. That it is of another model is an
// error (`mismatch`) before any memory is written. Progress is what the optimizer's own steps say
// if a foreign program saved it. The optimizer's options are those of the checkpoint, and of a
// distributed checkpoint its groups, too, as in PyTorch. The kind is told by the files. Collective.
Progress resume_training(Training& training, const Options& options, tessera::Group& group);

// Saves a training: at once, or with --async in the background. Every member is collective.
class Saver {
 public:
  // What it is given outlives it. `grace` hears how long saves take; `lease` is that of the run.
  Saver(const Options& options, const tessera::Mesh& mesh, tessera::Grace& grace,
        tessera::RunLease* lease);

  // Asked once behind each step: whether it is to be saved (--save-every).
  [[nodiscard]] bool is_due(std::int64_t step);
  // Writes the checkpoint of `progress`, or begins to, when the one before is done. Returns what
  // there is to say of both.
  std::vector<std::string> save(Training& training, const Progress& progress);
  // Waits for the one that is under way.
  std::vector<std::string> finish();
  // The last one that was begun; empty: none.
  [[nodiscard]] const std::string& last() const noexcept { return last_; }

 private:
  struct UnderWay {
    tessera::PendingSave pending;
    tessera::RunCheckpoint saved;
  };

  std::vector<std::string> note(const tessera::RunCheckpoint& saved) const;
  // `work` saves. Whose run is another's fails for that.
  template <typename Work>
  void hold_run(const Work& work);

  const Options& options_;
  tessera::Grace& grace_;
  tessera::Group& group_;
  tessera::RunLease* const lease_;  // null: nothing is saved
  std::stop_source stop_;           // of saves: the time is over, or the run another's
  std::optional<std::stop_callback<std::function<void()>>> when_over_, when_lost_;
  std::optional<tessera::SaveFrequency> frequency_;  // none: by number
  std::optional<tessera::CheckpointWriter> writer_;  // none: at once
  std::optional<UnderWay> under_way_;
  std::string last_;
};
