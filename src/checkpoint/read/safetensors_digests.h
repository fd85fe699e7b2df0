// A store that keeps the digests of what is written into it.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/read/side_file.h"
#include "format/safetensors/safetensors.h"
#include "io/checked_source.h"
#include "storage/forwarding_store.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera {

// Passes everything on to a store, which must outlive it and its sinks. Used by several threads.
class DigestingStore final : public ForwardingStore {
 public:
  explicit DigestingStore(Store& store) : ForwardingStore(store) {}

  // The digests of an object that was committed here, or added.
  [[nodiscard]] FileDigests digests_of(const std::string& name);
  // An object that is there already has these digests.
  void add(const std::string& name, FileDigests digests);
  // Writes the side file of a directory: the digests of every object committed here or added, but
  // for `editable`, which people may change. Once, after the last commit.
  void write_side_file(const std::string& editable);

  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override;
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override;
  void remove(std::string_view name) override;

 private:
  class Sink;

  std::mutex mutex_;
  DigestsByName digests_;  // guarded by mutex_
};

// How the safetensors files that we write get their digests, and how readers find them.

// The digests of the data section travel in `__metadata__` (docs/formats/side-file.md).
//
[[nodiscard]] bool is_digest_key(std::string_view key) noexcept;
// Adds the entry to a header that encode_header has not seen yet, with room for all digests.
void reserve_digests(safetensors::Header& header);
// Puts the digests of the data section, which begins where `head` ends, in their place in `head`,
// what encode_header made of that header.
void fill_digests(std::vector<std::byte>& head, const Digests& digests);
// The source of a file with this header: checked when the header has digests. Throws `corrupt` when
// the header differs from its own checksum.
[[nodiscard]] std::shared_ptr<const ByteSource> guard_safetensors(
    std::shared_ptr<const ByteSource> source, const safetensors::Header& header);

}  // namespace tessera
