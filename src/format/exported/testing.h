// Archives of torch.export that tests make by hand.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/crc32.h"
#include "format/zip/zip.h"

namespace tessera::exported::test {

using Text = std::vector<std::pair<std::string, std::string>>;  // records and what they hold

// The records, all in the folder "m/".
inline std::vector<std::byte> archive_of(const Text& records) {
  zip::Writer writer;
  std::vector<std::byte> made;
  const auto append = [&made](const auto& bytes) {
    const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
    made.insert(made.end(), first, first + bytes.size());
  };
  for (std::size_t i = 0; i < records.size(); ++i) {
    const std::string& content = records[i].second;
    writer.add("m/" + records[i].first, content.size());
    append(writer.header(i));
    append(content);
    append(writer.descriptor(i, crc32(std::as_bytes(std::span(content)))));
  }
  append(writer.tail());
  return made;
}

// An entry of a table for a float32 tensor of shape (2,), with a change: `from` by `to`.
inline std::string entry(const std::string& from = "", const std::string& to = "") {
  std::string text =
      R"({"path_name": "weight_0", "is_param": true, "use_pickle": false, "tensor_meta": {"dtype": 7,)"
      R"( "sizes": [{"as_int": 2}], "requires_grad": true, "device": {"type": "cpu", "index": null},)"
      R"( "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0}, "layout": 7}})";
  if (const std::size_t at = text.find(from); !from.empty() && at != std::string::npos)
    text.replace(at, from.size(), to);
  return text;
}

inline std::string table(const std::string& entries) {
  return R"({"config": {)" + entries + "}}";
}

// An archive of one model with such tables.
inline Text records(const std::string& weights, const std::string& constants = "") {
  return {{"archive_format", "pt2"},
          {"archive_version", "0"},
          {"byteorder", "little"},
          {".data/version", "6\n"},
          {"models/model.json", "{}"},
          {"data/weights/model_weights_config.json", table(weights)},
          {"data/weights/weight_0", std::string(8, '\1')},
          {"data/constants/model_constants_config.json", table(constants)},
          {"data/constants/tensor_0", std::string(8, '\2')}};
}

}  // namespace tessera::exported::test
