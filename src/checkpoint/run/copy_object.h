// Copies one object from a store to another one.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "checkpoint/digests/side_file.h"
#include "checkpoint/read/meter.h"
#include "tessera/storage.h"

namespace tessera {

// An object that is written and not yet visible.
struct WrittenObject {
  std::string name;
  std::unique_ptr<ByteSink> sink;
  std::uint64_t size = 0;    // bytes
  std::uint64_t digest = 0;  // of all of them
};

// Writes all bytes of `source` into a new object of `to`, in windows of 8 MiB, which S3 takes as
// they are. `meter` hears of them and may end it.
[[nodiscard]] WrittenObject write_copy(const ByteSource& source, Store& to, const std::string& name,
                                       IfExists if_exists, Meter& meter);
// Whether the object `name` of `to` is a copy of `source`. What has digests is compared with these,
// and `source` not read. `meter` may end it.
[[nodiscard]] bool has_copy(const Store& to, const std::string& name, const ByteSource& source,
                            const std::optional<FileDigests>& digests, const Meter& meter);
// Makes it visible. Throws `incomplete` if the store then has it with another size and, with
// `read_back`, `corrupt` if it gives other bytes.
void commit_copy(WrittenObject& written, Store& to, bool read_back);

}  // namespace tessera
