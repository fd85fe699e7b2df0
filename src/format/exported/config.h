// The tables of an archive of torch.export: data/weights/NAME_weights_config.json and
// data/constants/NAME_constants_config.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/io.h"
#include "tessera/layout.h"

namespace tessera::exported {

struct TensorMeta {
  DType dtype = DType::float32;
  Shape sizes;
  Shape strides;
  std::int64_t offset = 0;  // in elements, of the storage
};

struct Entry {
  std::string name;    // in the model
  std::string record;  // in the table's folder; a plain name
  bool is_pickled = false;
  std::optional<TensorMeta> meta;  // none: the record is pickled
};

// In the order of the JSON. Numbers are as they stand there: nobody has compared them with a record
// yet. Members that it does not know are skipped.
[[nodiscard]] std::vector<Entry> read_config(ByteView text);

}  // namespace tessera::exported
