#include "checkpoint/save/leftovers.h"

#include <algorithm>
#include <set>
#include <string>

#include "base/one_of.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/side_file.h"
#include "checkpoint/save/data_file.h"
#include "checkpoint/save/probe.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_data_file_name(const std::string& name) {
  return name.starts_with("__") && name.ends_with(".distcp");
}

// `own`: the files of the checkpoint that is there; empty: none is.
bool is_leftover(const std::string& name, const std::set<std::string>& own) {
  if (is_probe_name(name)) return true;
  if (own.contains(name)) return false;
  if (is_side_file_name(name)) return true;
  return is_data_file_name(name) && (!own.empty() || is_attempt_name(name));
}

}  // namespace

std::vector<std::string> leftovers_in(const Store& store) {
  // First of all: what is listed later may be of a checkpoint that has replaced this one.
  const std::vector<ObjectInfo> objects = store.list_level();
  const std::set<std::string> own = own_files(store, objects);
  std::vector<std::string> leftovers;
  for (const ObjectInfo& object : objects) {
    if (is_leftover(object.name, own)) leftovers.push_back(object.name);
  }
  return leftovers;
}

// Beside a checkpoint that this library cannot read nothing is known to be left over: a later torch
// may have written it, with other dtypes. It may be replaced all the same.
std::vector<std::string> known_leftovers(const Store& store) {
  try {
    return leftovers_in(store);
  } catch (const Error& error) {
    if (!is_one_of(error.code(), ErrorCode::unsupported, ErrorCode::unsafe, ErrorCode::corrupt,
                   ErrorCode::incomplete))
      throw;
    return {};
  }
}

void remove_leftovers(Store& store) {
  store.remove_unfinished();
  for (const std::string& name : known_leftovers(store)) store.remove(name);
}

void Leftovers::find(Store& store, bool is_alone) {
  if (is_alone) return remove_leftovers(store);
  waiting_ = known_leftovers(store);
  // A rival puts its probe there before it looks which checkpoint is there.
  std::erase_if(waiting_, [](const std::string& name) { return is_probe_name(name); });
}

void Leftovers::after_commit(Store& store) const noexcept {
  for (const std::string& name : waiting_) remove_quietly(store, name);
}

}  // namespace tessera
