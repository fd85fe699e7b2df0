// Zip archives as PyTorch's own writer makes them: all records in one folder, with a version and a
// byte order beside them. What wrote one is decided here, for all that read or look into it.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/zip/zip.h"
#include "tessera/io.h"

namespace tessera::torch_file {

enum class ArchiveKind : std::uint8_t {
  torch_save,    // or something that is no archive of PyTorch
  script,        // torch.jit.save, C++'s torch::save
  script_of_10,  // the same, before torch 1.4
  package,       // torch.package
  exported,      // torch.export.save
  exported_27,   // the same, before torch 2.8: its records are in no folder
};
[[nodiscard]] ArchiveKind kind_of(const zip::Archive& archive);
// As `kind_of`, by the names in the end of a file that is no archive that can be read.
[[nodiscard]] ArchiveKind kind_by_names(std::string_view end);
// "a TorchScript archive"; empty for `torch_save`.
[[nodiscard]] std::string_view describe(ArchiveKind kind) noexcept;

// What the archive's own loader runs of it, in words, a line for each sort: "a TorchScript archive,
// whose own program is not looked into: code/__torch__.py, which torch.jit.load compiles".
[[nodiscard]] std::vector<std::string> programs_in(const zip::Archive& archive);

// The archive, if the source is one of these kinds; its entries may be deflated.
[[nodiscard]] std::optional<zip::Archive> archive_of(
    const std::shared_ptr<const ByteSource>& source, std::initializer_list<ArchiveKind> kinds);

class Records {
 public:
  // Throws `corrupt` for records that are not all in one folder, and `limit` for names of more than
  // 4 KiB.
  explicit Records(zip::Archive archive);

  [[nodiscard]] ArchiveKind kind() const noexcept { return kind_; }
  [[nodiscard]] const zip::Archive& archive() const noexcept { return archive_; }
  [[nodiscard]] const std::string& name() const { return archive_.source()->name(); }
  // Of the folder, with the slash.
  [[nodiscard]] const std::string& root() const noexcept { return root_; }
  // `record`: without the folder. Null: absent.
  [[nodiscard]] const zip::Entry* find(std::string_view record) const {
    return archive_.find(root_ + std::string(record));
  }
  // A line; empty where it is absent. Throws `limit` for one of more than 64 bytes.
  [[nodiscard]] std::string text(std::string_view record) const;

  // Throws `unsupported` for a version of PyTorch's archives that is newer than those it reads, and
  // for big-endian ones.
  void require_readable() const;

 private:
  [[noreturn]] void fail(ErrorCode code, std::string what) const;
  void find_root();
  void require_entry(const zip::Entry& entry) const;
  void require_version() const;
  [[nodiscard]] std::uint64_t parse_version(const std::string& version) const;
  void require_byte_order() const;

  zip::Archive archive_;
  ArchiveKind kind_;
  std::string root_;
};

}  // namespace tessera::torch_file
