// Which tensors go into which safetensors file, and what the index says of them: for a conversion,
// and for ranks that fill the files together.
#pragma once

#include <string>
#include <vector>

#include "format/safetensors/safetensors.h"
#include "tessera/leaf.h"
#include "tessera/save_options.h"

namespace tessera {

// A file that will be written: its tensors, not yet laid out, and its metadata.
struct SafetensorsFile {
  std::string name;
  safetensors::Header header;
};

// The files of the tensors among `leaves`, without metadata. One file is called `name`, a file of a
// set after it. Throws `unsupported` for what safetensors cannot hold, and `invalid_argument` for
// a tensor to which `set` gives no file.
[[nodiscard]] std::vector<SafetensorsFile> safetensors_files(const std::vector<Leaf>& leaves,
                                                             const SafetensorsSet& set,
                                                             const std::string& name);
// Whether these files have an index.
[[nodiscard]] bool has_index(const std::vector<SafetensorsFile>& files, const std::string& name);
// What it is called, and its text.
[[nodiscard]] std::string index_name(const std::string& name);
[[nodiscard]] std::string index_text(const std::vector<SafetensorsFile>& files);

}  // namespace tessera
