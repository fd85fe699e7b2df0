#include "checkpoint/dcp/metadata_file.h"

#include <algorithm>

#include "base/name_number.h"
#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "__";  // a rank follows

}  // namespace

dcp::Metadata read_dcp_metadata(const Store& store, std::string_view name) {
  return read_dcp_metadata(*store.open(name));
}

dcp::Metadata read_dcp_metadata(const ByteSource& file) {
  try {
    return dcp::decode(read_all(file, kMetadataLimit));
  } catch (Error& error) {
    throw error.at_path(file.name());
  }
}

std::string rank_metadata(int rank) {
  return std::string(kPrefix) + std::to_string(rank).append(kDcpMetadata);
}

bool is_rank_metadata(std::string_view name) {
  return number_between(kPrefix, name, kDcpMetadata).has_value();
}

std::optional<int> rank_of_data_file(std::string_view name) {
  const std::size_t end = name.find('_', std::min(kPrefix.size(), name.size()));
  return end == std::string_view::npos ? std::nullopt
                                       : number_between(kPrefix, name.substr(0, end), "");
}

std::set<std::string> named_files(const dcp::Metadata& metadata) {
  std::set<std::string> named;
  for (const dcp::Entry& entry : metadata.entries) {
    if (!entry.is_tensor) named.insert(entry.item.path);
    for (const dcp::Chunk& chunk : entry.chunks) named.insert(chunk.item.path);
  }
  return named;
}

bool is_attempt_name(std::string_view name) {
  return rank_of_data_file(name) && name.ends_with(".distcp") &&
         std::count(name.begin(), name.end(), '_') == 4;
}

}  // namespace tessera
