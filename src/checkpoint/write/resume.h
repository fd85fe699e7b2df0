// Conversions that go on where an earlier run was interrupted: whole files of the target are kept
// (docs/design/resume.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "checkpoint/read/safetensors_digests.h"
#include "checkpoint/write/destination.h"
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
  // What was left belongs to another conversion, or is damaged.
  [[nodiscard]] bool was_foreign() const noexcept { return was_foreign_; }
  [[nodiscard]] DigestingStore& store() noexcept { return store_; }
  // The random part of data files' names, drawn when the conversion first began.
  [[nodiscard]] const std::string& attempt() const noexcept { return attempt_; }
  // Bytes of files that were there and right.
  [[nodiscard]] std::uint64_t bytes_kept() const noexcept { return bytes_kept_; }

  // make_file for a job with a resumption.
  FileNotes make_file(const ConvertJob& job, const std::string& name, const FileMaker& make);
  // Makes the target visible, which all files of the store are durable for, and removes the rest.
  void publish();
  // After a failure: removes what nothing can be made of. When the source turned out to be damaged
  // no file is trusted: it was read from there.
  void failed(bool source_is_damaged);

 private:
  // The place where a storage of the source is found.
  struct StorageAt {
    const Leaf* leaf = nullptr;
    std::size_t piece = 0;
  };
  void number_storages(const std::vector<Leaf>& leaves);
  void begin();
  void require_room() const;
  void bring_back();
  void remove_unrecorded();
  void remove_unrecorded(const std::string& directory, const std::string& below);
  [[nodiscard]] std::string path_of(const std::string& file) const;
  [[nodiscard]] std::string identity_in(const std::string& directory) const;
  // What an earlier run has recorded under this name; empty: nothing, or not of this conversion.
  [[nodiscard]] std::string record(const std::string& name) const;
  void write_record(const std::string& name, const std::string& text);
  [[nodiscard]] std::string stamp(const std::string& name, std::string_view text) const;
  std::optional<FileNotes> keep(const ConvertJob& job, const std::string& file);
  void record_file(const std::string& file, const FileNotes& notes,
                   const std::vector<OpenCheck>& open);
  void publish_file(const std::string& name, IfExists if_exists);
  void publish_marked();

  Destination destination_;
  IfExists if_exists_;
  bool keeps_files_;  // what is read for a file is checked when the file is finished
  std::uint64_t fingerprint_;
  WorkDirectory work_;
  std::shared_ptr<Store> records_;
  std::shared_ptr<Store> files_;
  DigestingStore store_;  // of files_
  std::optional<ReplacedDirectory> whole_;
  std::string attempt_;
  std::vector<StorageAt> storages_;                            // by number
  std::unordered_map<const Storage*, std::uint64_t> numbers_;  // of storages_
  bool finished_ = false;
  bool was_foreign_ = false;
  std::atomic<std::uint64_t> bytes_kept_{0};
  std::atomic<bool> has_files_{false};  // one was finished, now or earlier
};

}  // namespace tessera
