#include "checkpoint/dcp/metadata_file.h"

#include <algorithm>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {

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

bool is_rank_metadata(std::string_view name) {
  return name.starts_with("__") && name.ends_with(kDcpMetadata);
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
  return name.starts_with("__") && name.ends_with(".distcp") &&
         std::count(name.begin(), name.end(), '_') == 4;
}

}  // namespace tessera
