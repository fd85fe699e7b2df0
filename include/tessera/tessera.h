// Includes everything that a first program needs. docs/api.md is the index: it says what each
// header is for, with examples.
//
// Programs that link Tessera::Torch also get the training runtime. Tessera::Core is the library
// without libtorch.
#pragma once

#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/library.h"
#include "tessera/storage.h"
#include "tessera/value.h"

#ifdef TESSERA_WITH_TORCH
#include "tessera/fsdp.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"
#include "tessera/training_state.h"
#endif
