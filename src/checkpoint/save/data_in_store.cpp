#include "checkpoint/save/data_in_store.h"

#include <optional>
#include <unordered_map>

#include "base/host.h"
#include "base/look_again.h"
#include "base/named.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::unordered_map<std::string, std::uint64_t> sizes_in(const Store& store) {
  std::unordered_map<std::string, std::uint64_t> sizes;
  for (const ObjectInfo& object : store.list_level()) sizes.emplace(object.name, object.size);
  return sizes;
}

void require_size(const Sought& file, std::uint64_t size, const Store& store) {
  if (size == file.size) return;
  throw Error(ErrorCode::corrupt, file.writer + " wrote " + std::to_string(file.size) +
                                      " bytes into " + file.name + ", here it has " +
                                      std::to_string(size))
      .at_path(store.name());
}

bool opens(const Store& store, const Sought& file) {
  std::optional<std::uint64_t> size;
  try {
    size = store.open(file.name)->size();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::not_found) throw;
  }
  if (size) require_size(file, *size, store);
  return size.has_value();
}

// What is found is no longer `missing`.
void look_for(const Store& store, std::vector<Sought>& missing, const Looking& looking) {
  std::size_t found = 0;
  const bool all_found = look_until_visible(looking.stop, [&] {
    while (found < missing.size() && opens(store, missing[found])) ++found;
    if (found == missing.size()) return true;
    if (looking.require_writers) looking.require_writers();
    return false;
  });
  if (all_found) return missing.clear();
  std::vector<Sought> rest{missing[found]};
  for (std::size_t i = found + 1; i < missing.size(); ++i)
    if (!opens(store, missing[i])) rest.push_back(missing[i]);
  missing.swap(rest);
}

}  // namespace

void require_in_store(const std::vector<Sought>& files, const Store& store,
                      const Looking& looking) {
  const auto sizes = sizes_in(store);
  std::vector<Sought> missing;
  for (const Sought& file : files) {
    const auto found = sizes.find(file.name);
    if (found == sizes.end()) {
      missing.push_back(file);
    } else {
      require_size(file, found->second, store);
    }
  }
  look_for(store, missing, looking);
  if (missing.empty()) return;
  Named named;
  for (const Sought& file : missing) named.add(file.name + " of " + file.writer);
  throw Error(ErrorCode::incomplete,
              "rank 0 on " + host_name() + " does not see " + std::to_string(named.count()) +
                  " of the data files that were written (" + named.text() +
                  "): do the ranks write into different directories, or to disks of their own?")
      .at_path(store.name());
}

}  // namespace tessera
