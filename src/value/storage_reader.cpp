#include "value/storage_reader.h"

#include <cstring>

#include "tessera/error.h"

namespace tessera {

bool is_in_memory(const Storage& storage) {
  return storage.data != nullptr || storage.device != nullptr;
}

StorageReader::StorageReader(const Storage& storage, std::uint64_t begin, std::uint64_t end)
    : storage_(storage) {
  if (storage.size > 0 && !is_in_memory(storage) && !storage.source)
    throw Error(ErrorCode::invalid_argument, "a tensor whose bytes are not here");
  if (storage.device) device_.emplace(storage.device, begin, end);
}

void StorageReader::read(std::uint64_t at, MutableByteView out) {
  if (out.empty()) return;
  if (device_) {
    device_->read(at, out);
  } else if (storage_.data != nullptr) {
    std::memcpy(out.data(), storage_.data + at, out.size());
  } else {
    storage_.source->read_at(storage_.offset + at, out);
  }
}

ByteView StorageReader::view(std::uint64_t at, MutableByteView scratch) {
  if (device_) return device_->view(at, scratch.size());
  if (storage_.data != nullptr) return {storage_.data + at, scratch.size()};
  read(at, scratch);
  return scratch;
}

}  // namespace tessera
