// Memory that was freed and does not come again.
//
// glibc keeps freed blocks below 32 MiB for later, and when a later block is aligned, as tensors
// are, it often cannot take the place of one of the same size: what a model's construction frees
// could stay with the process for good, several times the model. malloc_trim gives the pages of all
// free blocks back, wherever they lie; it changes no setting, and costs about what the freed bytes
// cost when they were first touched.
#pragma once

#include <cstdint>

namespace tessera {

// Says that this thread has freed `bytes`. Once that is 16 MiB in the process since the last time,
// they go back to the system. Any thread. Does nothing where there is no glibc.
void note_freed(std::uint64_t bytes);

}  // namespace tessera
