#include "checkpoint/save/place.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/read/side_file.h"
#include "checkpoint/save/data_files.h"
#include "comm/long_work.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// A client of a network file system may remember that there is no such directory, until it makes
// one itself and hears that it is there.
void make_directory(Store& store, const std::string& name) {
  try {
    (void)store.create(name, IfExists::replace);
  } catch (const Error&) {
    return;  // what cannot be written here, the save itself will say
  }
}

}  // namespace

Probe::Probe(std::shared_ptr<Store> store, std::string name)
    : store_(std::move(store)), name_(std::move(name)) {
  try {
    put(*store_, name_, std::as_bytes(std::span(name_)), IfExists::fail);
  } catch (...) {
    remove_quietly(*store_, name_);  // it may have its name, and fail behind that
    throw;
  }
}

Probe::~Probe() {
  if (made_here_) remove_quietly(*store_, name_);
}

bool shows_probe(const Store& store, const std::string& name) {
  return open_if_there(store, name) != nullptr;
}

void ProbeLook::look(const std::shared_ptr<Store>& store, const std::string& name) {
  sees_ = shows_probe(*store, name);
  if (sees_ || !store->may_show_late()) return;
  sees_ = look_again([&] {
    make_directory(*store, name);
    return shows_probe(*store, name);
  });
  if (sees_) return;
  try {
    own_.emplace(store, probe_name(random_attempt()));
  } catch (const Error&) {
    return;  // rank 0 looks for none
  }
}

void ProbeLook::tell(Unseeing& unseeing, int rank) const {
  if (!sees_) unseeing.ranks.push_back({rank, host_name(), own_ ? own_->name() : std::string()});
}

void Unseeing::add(const Unseeing& higher) {
  more += higher.more;
  for (const Rank& rank : higher.ranks) {
    if (ranks.size() < Named::kMost) {
      ranks.push_back(rank);
    } else {
      ++more;
    }
  }
}

// Nobody has asked for these names here before, so no cache says that they are not there.
bool see_late(const Unseeing& unseeing, const Store& store, const std::string& own) {
  return !unseeing.ranks.empty() && shows_probe(store, own) &&
         std::ranges::all_of(unseeing.ranks, [&](const Unseeing::Rank& rank) {
           return !rank.probe.empty() && shows_probe(store, rank.probe);
         });
}

void await_probe(Group& group, const Store& store, const std::string& name,
                 const std::stop_token& stop) {
  bool sees = true;
  const auto work = [&](const std::stop_token& stopped) {
    sees = look_until_visible(stopped, [&] { return shows_probe(store, name); });
  };
  const auto contribute = [&] {
    Unseeing mine;
    if (!sees) mine.ranks.push_back({group.rank(), host_name()});
    return mine;
  };
  const auto conclude = [&](const Unseeing& all) { require_seen_by_all(all, group.size(), store); };
  (void)confer_after_long_work(group, stop, work, "waiting for a directory to appear",
                               conference_of(contribute, std::mem_fn(&Unseeing::add), conclude));
}

void require_seen_by_all(const Unseeing& unseeing, int ranks, const Store& store) {
  if (unseeing.ranks.empty()) return;
  Named named;
  for (const auto& [rank, host, probe] : unseeing.ranks) named.add(rank_on_host(rank, host));
  named.add_unnamed(unseeing.more);
  throw Error(ErrorCode::incomplete,
              std::to_string(named.count()) + " of " + std::to_string(ranks) +
                  " ranks do not see what rank 0 on " + host_name() + " has put there (" +
                  named.text() +
                  "): do the ranks write into different directories, or to disks of their own?")
      .at_path(store.name());
}

bool Present::has_metadata() const {
  return metadata || has_object(objects, kDcpMetadata);
}

Present present_in(const Store& store) {
  Present present;
  parallel_for(2, 2, [&](std::size_t question) {
    if (question == 0) {
      present.objects = store.list_level();
    } else if (const auto metadata = open_if_there(store, kDcpMetadata)) {
      present.metadata = metadata->version();
    }
  });
  return present;
}

namespace {

[[noreturn]] void refuse_checkpoint(const std::string& path) {
  throw Error(ErrorCode::already_exists, "a checkpoint is there already").at_path(path);
}

}  // namespace

void require_no_metadata(const Store& store, const std::string& path) {
  if (store.exists(kDcpMetadata)) refuse_checkpoint(path);
}

void require_no_checkpoint(const Present& present, const std::string& path) {
  if (present.has_metadata()) refuse_checkpoint(path);
  for (const ObjectInfo& object : present.objects) {
    if (is_rank_metadata(object.name)) {
      throw Error(ErrorCode::already_exists,
                  "a part of a checkpoint, which a rank saved, is there already: " + object.name)
          .at_path(path);
    }
  }
}

void require_free(const Store& store, std::uint64_t bytes) {
  const std::optional<std::uint64_t> free = store.free_bytes();
  if (!free || *free >= bytes) return;
  throw Error(ErrorCode::out_of_space,
              "the tensors have " + std::to_string(bytes) + " bytes, " + std::to_string(*free) +
                  " are free, and nothing is removed before the new checkpoint is there")
      .at_path(store.name());
}

namespace {

void require_size(const Sought& file, std::uint64_t size, const Store& store) {
  if (size == file.size) return;
  throw Error(ErrorCode::corrupt, file.writer + " wrote " + std::to_string(file.size) +
                                      " bytes into " + file.name + ", here it has " +
                                      std::to_string(size))
      .at_path(store.name());
}

bool opens(const Store& store, const Sought& file) {
  const auto found = open_if_there(store, file.name);
  if (found) require_size(file, found->size(), store);
  return found != nullptr;
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
                      const std::vector<ObjectInfo>& listed, const Looking& looking) {
  std::unordered_map<std::string, std::uint64_t> sizes;
  for (const ObjectInfo& object : listed) sizes.emplace(object.name, object.size);
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

std::vector<std::string> leftovers_in(const Store& store, const Present& present) {
  // Behind the listing: what is listed later may be of a checkpoint that has replaced this one.
  const std::set<std::string> own = own_files(store, present.objects, present.has_metadata());
  std::vector<std::string> leftovers;
  for (const ObjectInfo& object : present.objects) {
    if (is_leftover(object.name, own)) leftovers.push_back(object.name);
  }
  return leftovers;
}

bool is_unreadable(ErrorCode code) {
  return is_one_of(code, ErrorCode::unsupported, ErrorCode::unsafe, ErrorCode::corrupt,
                   ErrorCode::incomplete);
}

// Beside a checkpoint that this library cannot read nothing is known to be left over: a later torch
// may have written it, with other dtypes. It may be replaced all the same.
std::vector<std::string> known_leftovers(const Store& store, const Present& present) {
  try {
    return leftovers_in(store, present);
  } catch (const Error& error) {
    if (!is_unreadable(error.code())) throw;
    return {};
  }
}

void remove_leftovers(Store& store, const Present& present) {
  store.remove_unfinished();
  for (const std::string& name : known_leftovers(store, present)) store.remove(name);
}

void Leftovers::find(Store& store, const Present& present, bool is_alone) {
  if (is_alone) return remove_leftovers(store, present);
  waiting_ = known_leftovers(store, present);
  // A rival puts its probe there before it looks which checkpoint is there.
  std::erase_if(waiting_, [](const std::string& name) { return is_probe_name(name); });
}

void Leftovers::after_commit(Store& store) const noexcept {
  for (const std::string& name : waiting_) remove_quietly(store, name);
}

}  // namespace tessera
