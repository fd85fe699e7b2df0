// What the samples of the headers without libtorch take for granted.
#pragma once

#include <iostream>

#include "tessera/checkpoint.h"
#include "tessera/checkpoint_writer.h"
#include "tessera/data_files.h"
#include "tessera/grace.h"
#include "tessera/restore.h"
#include "tessera/run_lease.h"
#include "tessera/save_frequency.h"
#include "tessera/stateful.h"
#include "tessera/tensor_view.h"

namespace given {
using namespace tessera;  // NOLINT(google-build-using-namespace): samples are read inside of it

extern Group& group;

}  // namespace given
