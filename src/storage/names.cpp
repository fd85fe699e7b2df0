#include "storage/names.h"

#include <algorithm>

#include "base/one_of.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

bool is_plain(std::string_view part) {
  return !is_one_of(part, "", ".", "..") && part.find('\0') == std::string_view::npos;
}

bool is_safe_name(std::string_view name) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (!is_plain(name.substr(begin, end - begin))) return false;
    begin = end + 1;
  }
  return true;
}

}  // namespace

void require_safe_name(std::string_view name, const std::string& store) {
  if (!is_safe_name(name)) {
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

std::string_view scheme_of(std::string_view path) {
  constexpr std::string_view kCharacters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-";
  const std::size_t end = path.find_first_not_of(kCharacters);
  if (end == 0 || end == std::string_view::npos || path.substr(end, 3) != "://") return {};
  return path.substr(0, end);
}

bool is_web(std::string_view path) {
  return is_one_of(scheme_of(path), "http", "https");
}

}  // namespace tessera
