// The stream that torch.save wrote before 1.6: pickles one after another, then the storages' bytes.
#pragma once

#include <memory>

#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::torch_file {

// Whether the file begins as a pickle does.
[[nodiscard]] bool is_stream(const ByteSource& source);

// Whether it begins with the format's number as pickle protocols 0 and 1 write it, in digits. Such
// streams are not read.
[[nodiscard]] bool is_text_stream(const ByteSource& source);

// Whether the first pickle is the format's number, however it is written: four more follow, and
// then raw storages.
[[nodiscard]] bool has_magic(const ByteSource& source);

// The tree, as read() of torch_file.h gives it; storages have no checksum. The pickles are read in
// growing windows, nothing of a storage is. Throws `corrupt` when the first pickle is not the
// format's number, `unsupported` for another version or byte order and for what follows the last
// storage.
[[nodiscard]] Value read_stream(std::shared_ptr<const ByteSource> source,
                                bool keeps_compiler = false);  // as pickle::ReadOptions

}  // namespace tessera::torch_file
