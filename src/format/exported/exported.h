// Archives of torch.export.save (docs/formats/torchscript.md): the weights and constants of models,
// by the names that JSON beside them gives.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "format/zip/zip.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::exported {

struct Models {
  // A dict of the weights and constants by their names in the model; of several models a dict of
  // such dicts, by the models' names.
  Value tree;
  std::vector<std::string> notes;  // what is left out
};

// None: `source` is no such archive. The models themselves are not read, and no code is run. Tensor
// leaves are as torch_file::read makes them. Each failure names the tensor: `corrupt` for JSON that
// contradicts itself or the records, `incomplete` for tensors all of which were exported
// without their values (some are left out), `unsafe` for a record's name that leaves its folder,
// `limit` for more than 100 MB of JSON, `unsupported` for sizes that are symbols, for layouts that
// are not strided and for archives without tables of weights, `conflict` for a weight and a
// constant of one name.
[[nodiscard]] std::optional<Models> read(const std::shared_ptr<const ByteSource>& source);

// The names of the entries that torch.export.load hands to an unpickler, whatever these say of
// themselves: pickled tensors and other objects. Throws as `read` for tables that are not.
[[nodiscard]] std::set<std::string> pickled_entries(const zip::Archive& archive);

}  // namespace tessera::exported
