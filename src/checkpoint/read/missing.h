// Files that a checkpoint names and that are not there: what its leaves have in their place.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "storage/lazy_source.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// A value of which no more is known than the file that it lies in, and maybe that it is a tensor:
// whoever reads all that belongs to it gets that file's error.
[[nodiscard]] Value missing_value(std::shared_ptr<const LazySource> file, bool is_tensor = true);
// Whether missing_value() made it.
[[nodiscard]] bool is_missing_value(const Value& value);
// Whether it made it of a tensor.
[[nodiscard]] bool is_missing_tensor(const Value& value);

// What stands for a tensor without elements, of which no file has anything.
[[nodiscard]] Piece empty_piece(const Tensor& tensor);

// Whether the piece lies in a missing file.
[[nodiscard]] bool is_missing(const Piece& piece);
// A missing file that bytes of the value lie in; null: all are there.
[[nodiscard]] const LazySource* missing_file(const Value& value);
// The names of all of them, sorted, as they are in the directory, such as a checkpoint's store's
// name: the checkpoint may be made of the stores of its folders.
[[nodiscard]] std::vector<std::string> missing_files(const Value& value,
                                                     const std::string& directory);
// Throws `incomplete` with the leaf's name for one that lies in a missing file.
void require_here(const Leaf& leaf);
// Throws `incomplete` where a piece of `have` that lies in a missing file has any of the elements
// that the pieces of `want` are for.
void require_here(const Tensor& want, const Tensor& have);

// What opening a checkpoint says of missing files, and of the leaves that were left out for them;
// none: no file is missing.
[[nodiscard]] std::optional<std::string> warning_of_missing(const std::vector<std::string>& files,
                                                            const std::vector<std::string>& left);

}  // namespace tessera
#pragma GCC visibility pop
