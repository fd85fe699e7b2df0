// Conversions that go on where an earlier run was interrupted (docs/design/resume.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "checkpoint/write/destination.h"
#include "checkpoint/write/journal.h"
#include "checkpoint/write/targets.h"
#include "storage/posix/replaced_directory.h"

namespace tessera {

class Resumption {
 public:
  // Takes over what an earlier run left of the same conversion; begins anew otherwise. `source` and
  // `leaves` must outlive it. Throws `conflict` while another process converts to the target, and
  // `already_exists` as a conversion without it does.
  Resumption(const Checkpoint& source, const std::vector<Leaf>& leaves, Destination destination,
             const ConvertOptions& options);

  // The earlier run was done but for saying so.
  [[nodiscard]] bool is_finished() const noexcept { return finished_; }
  [[nodiscard]] bool was_foreign() const noexcept { return journal_.was_foreign(); }
  [[nodiscard]] Store& store() noexcept { return store_; }
  [[nodiscard]] const std::string& attempt() const noexcept { return journal_.attempt(); }
  // Bytes of units that were there and right.
  [[nodiscard]] std::uint64_t bytes_kept() const noexcept { return bytes_kept_; }

  // write_unit for a job with a resumption.
  std::uint32_t write(const ConvertJob& job, ByteSink& sink, const FileUnit& unit,
                      const UnitMaker& make);
  // Makes the target visible, which all files of the store are durable for, and removes the rest.
  void publish();
  // After a failure: removes what nothing can be made of. When the source turned out to be damaged
  // no unit is trusted: it was read from there.
  void failed(bool source_is_damaged);

 private:
  // Where a storage of the source is found.
  struct StorageAt {
    const Leaf* leaf = nullptr;
    std::size_t piece = 0;
  };
  void number_storages(const std::vector<Leaf>& leaves);
  void begin();
  void require_room() const;
  void bring_back();
  [[nodiscard]] bool is_of_attempt(const std::string& name) const;
  // The files that tell whether a finished target is this one.
  [[nodiscard]] std::vector<std::string> names_in(const std::string& directory) const;
  [[nodiscard]] std::optional<std::uint64_t> identity_in(const std::string& directory) const;
  [[nodiscard]] std::string file_of(const ByteSink& sink) const;
  static bool is_unharmed(const ConvertJob& job, const ByteSink& sink, const JournalUnit& left,
                          MutableByteView window);
  bool go_on_with_checks(const ConvertJob& job, const JournalUnit& left);
  bool keep(const ConvertJob& job, ByteSink& sink, const JournalUnit& left);
  void note(JournalUnit unit, const std::vector<HandedOver>& open);
  void publish_file(const std::string& name, IfExists if_exists);
  void publish_marked();

  Destination destination_;
  IfExists if_exists_;
  WorkDirectory work_;
  Journal journal_;
  KeptStore store_;
  std::optional<ReplacedDirectory> whole_;
  std::vector<StorageAt> storages_;                            // by number
  std::unordered_map<const Storage*, std::uint64_t> numbers_;  // of storages_
  bool finished_ = false;
  std::atomic<std::uint64_t> bytes_kept_{0};
  std::atomic<bool> has_units_{false};  // something was journalled, now or earlier
};

}  // namespace tessera
