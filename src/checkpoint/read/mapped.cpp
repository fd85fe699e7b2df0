#include "tessera/mapped.h"

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/process.h"
#include "checkpoint/read/memory.h"
#include "checkpoint/read/reader.h"
#include "io/source.h"
#include "tessera/error.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

// Where a byte of a source is in the source that is no part of another one.
struct PlaceInFile {
  const ByteSource* file = nullptr;
  std::uint64_t offset = 0;
};

PlaceInFile place_in_file(const ByteSource& source, std::uint64_t offset) {
  const ByteSource& whole = source.original();
  const SourcePart part = part_of(whole);
  if (&part.of == &whole) return {&whole, offset};
  return place_in_file(part.of, offset + part.offset);
}

struct MappedFile {
  std::shared_ptr<const ByteSource> known;   // keeps the address by which the file is known
  std::shared_ptr<std::byte[]> pages;        // null: it cannot be mapped
  std::shared_ptr<const ByteSource> source;  // of the pages
};

// Whether it may lie in a file as it is wanted.
bool is_plain(const Tensor& tensor) {
  if (tensor.stored || tensor.pieces.size() != 1 || numel(tensor.shape) == 0) return false;
  const Piece& piece = tensor.pieces.front();
  return piece.slice == Slice(whole(tensor.shape)) && piece.storage && piece.storage->source &&
         !is_in_memory(*piece.storage) && piece.storage->encoding != Encoding::torch_item_zstd;
}

// As C++ and numpy align it: a complex number as its parts.
std::size_t alignment_of(DType dtype) {
  const bool is_complex =
      dtype == DType::complex32 || dtype == DType::complex64 || dtype == DType::complex128;
  return size_of(dtype) / (is_complex ? 2 : 1);
}

bool is_aligned(const void* address, DType dtype) {
  return reinterpret_cast<std::uintptr_t>(address) % alignment_of(dtype) == 0;
}

// Whether each element has a place of its own in the storage. What does not fit is left to the
// reader, which says what is wrong; it reads an expanded tensor into as many elements as that has.
bool is_array(const Tensor& tensor, const std::string& key) try {
  require_writable(tensor, key);
  return true;
} catch (const Error&) {
  return false;
}

// `tensor` over the mapped file, in which its piece begins at `offset`. An item is looked into
// where it is mapped: reading through its digests would read most of it.
std::optional<Tensor> view_of(const Tensor& tensor, const MappedFile& file, std::uint64_t offset,
                              const std::string& key) {
  Piece piece = tensor.pieces.front();
  piece.storage = std::make_shared<Storage>(*piece.storage);
  piece.storage->source = file.source;
  piece.storage->offset = offset;
  piece = decoded_piece(tensor, piece, key);
  const Storage& found = *piece.storage;
  if (!found.source || found.encoding != Encoding::raw) return std::nullopt;
  const PlaceInFile place = place_in_file(*found.source, found.offset);
  const std::uint64_t size = file.source->size();
  if (place.file != file.source.get() || place.offset > size || found.size > size - place.offset)
    return std::nullopt;
  auto storage = std::make_shared<Storage>();
  storage->size = found.size;
  storage->data = file.pages.get() + place.offset;
  storage->owner = file.pages;
  storage->dtype = tensor.dtype;
  piece.storage = std::move(storage);
  if (!is_aligned(piece.storage->data, tensor.dtype)) return std::nullopt;
  Tensor view = tensor;
  view.pieces = {std::move(piece)};
  return is_array(view, key) ? std::optional(std::move(view)) : std::nullopt;
}

}  // namespace

struct MappedFiles::State {
  // Maps it if that was not done yet.
  MappedFile file(const ByteSource& named, std::shared_ptr<const ByteSource> source) {
    const std::lock_guard lock(mapping);
    if (const auto found = files.find(&named); found != files.end()) return found->second;
    MappedFile made{std::move(source), named.map(), nullptr};
    if (made.pages) {
      const ByteView bytes(made.pages.get(), static_cast<std::size_t>(named.size()));
      made.source = borrowed_source(bytes, named.name());
    }
    const NoFork moment;
    return files.emplace(&named, std::move(made)).first->second;
  }

  SlowMutex mapping;
  std::unordered_map<const ByteSource*, MappedFile> files;  // guarded by mapping
};

MappedFiles::MappedFiles() : state_(std::make_unique<State>()) {}
MappedFiles::~MappedFiles() = default;

std::optional<Tensor> MappedFiles::view(const Tensor& tensor, const std::string& key) {
  if (!is_plain(tensor)) return std::nullopt;
  const Storage& storage = *tensor.pieces.front().storage;
  const PlaceInFile place = place_in_file(*storage.source, storage.offset);
  const MappedFile file = state_->file(*place.file, storage.source);
  return file.pages ? view_of(tensor, file, place.offset, key) : std::nullopt;
}

}  // namespace tessera
