// Archives of libtorch, TorchScript and torch.export. Their checksums are made to say "not
// computed", so that what is changed in a record is parsed and not refused for its checksum.
#include <array>
#include <cstring>

#include "format/exported/exported.h"
#include "format/torch/records.h"
#include "format/torch/torch_file.h"
#include "target.h"

namespace {

struct Checksum {
  std::array<char, 4> signature;
  std::size_t at;  // of the checksum, behind the signature's begin
};
constexpr std::array<Checksum, 3> kChecksums = {
    {{{'P', 'K', 1, 2}, 16}, {{'P', 'K', 3, 4}, 14}, {{'P', 'K', 7, 8}, 4}}};

std::vector<std::byte> without_checksums(tessera::ByteView input) {
  std::vector<std::byte> bytes(input.begin(), input.end());
  for (std::size_t i = 0; i + 20 <= bytes.size(); ++i) {
    for (const auto& [signature, at] : kChecksums) {
      if (std::memcmp(&bytes[i], signature.data(), signature.size()) == 0)
        std::memset(&bytes[i + at], 0, 4);
    }
  }
  return bytes;
}

}  // namespace

void tessera::fuzz::parse(ByteView input) {
  const auto source = memory_source(without_checksums(input), "input");
  const zip::Archive archive(source, zip::Deflated::allow);
  (void)torch_file::programs_in(archive);
  if (torch_file::kind_of(archive) == torch_file::ArchiveKind::exported)
    (void)exported::pickled_entries(archive);
  if (torch_file::read_script(source) || exported::read(source)) return;
  (void)torch_file::read(source);
}
