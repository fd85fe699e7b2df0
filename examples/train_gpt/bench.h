// --bench: the time of a step, to be set beside another framework's.
#pragma once

#include "options.h"
#include "tessera/mesh.h"

// Times options.bench steps of forward, backward, AdamW and zero_grad on random bytes, without
// clipping and schedule, and prints `ms/step X`, their median, on rank 0. Also proves that the
// blocks' parameters are freed after forward and the root's are not (`mismatch` otherwise).
// Collective.
void run_bench(const Options& options, const tessera::Mesh& mesh);
