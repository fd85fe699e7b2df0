#include "storage/names.h"

#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {

void require_safe_name(std::string_view name, const std::string& store) {
  bool safe = !name.empty() && name.find('\0') == std::string_view::npos;
  std::size_t begin = 0;
  while (safe && begin <= name.size()) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    safe = !part.empty() && part != "." && part != "..";
    begin = end + 1;
  }
  if (!safe) {
    throw Error(ErrorCode::unsafe,
                "the object name '" + std::string(name) + "' is not a plain relative name")
        .at_path(store);
  }
}

void put(Store& store, std::string_view name, ByteView bytes, IfExists if_exists) {
  const auto sink = store.create(name, if_exists, bytes.size());
  sink->write_at(0, bytes);
  sink->commit();
}

}  // namespace tessera
