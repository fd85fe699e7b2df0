#include "checkpoint/together/directories.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <set>
#include <thread>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/save/place.h"
#include "checkpoint/write/destination.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "comm/segment.h"
#include "storage/forwarding_store.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr const char* kPlanning = "planning a checkpoint";

}  // namespace

Directories::Directories(const Location& given, bool overwrite, Group& group)
    : group_(group), overwrite_(overwrite) {
  const Location where = located_directory(given);
  if (where.store) {
    if (where.name.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "such a checkpoint is a directory in a store: name it")
          .at_path(to_string(where));
    }
    parent_ = where.store;
    name_ = where.name;
  } else {
    const std::string path = end_of_links(without_slashes(where.path));
    parent_ = posix_store(directory_of(path));
    name_ = std::filesystem::path(path).filename().string();
  }
}

// Who looked for rank 0's sibling on a disk of its own has made a directory of that name there
// (ProbeLook). Making a new one removes what others have left.
Directories::~Directories() {
  if (look_.sees() || publishes()) return;
  try {
    (void)parent_->new_directory(name_, IfExists::replace);
  } catch (const Error&) {
    return;  // it stays for the next save
  }
}

// Only a checkpoint is replaced: whatever else has the name stays.
void Directories::require_replaceable() const {
  const std::vector<ObjectInfo> files = SubStore(*parent_, name_).list("");
  if (files.empty() || holds_checkpoint(files)) return;
  throw Error(ErrorCode::already_exists, "a directory that holds no checkpoint is there already")
      .at_path(path());
}

Directories::Sibling Directories::make() {
  if (overwrite_) require_replaceable();
  directory_ = parent_->new_directory(name_, overwrite_ ? IfExists::replace : IfExists::fail);
  Sibling made{group_.rank(), directory_->working(), probe_name(random_attempt())};
  probe_.emplace(std::make_shared<SubStore>(parent_, made.working), made.probe);
  return made;
}

void Directories::enter(const Sibling& sibling) {
  working_ = std::make_shared<SubStore>(parent_, sibling.working);
  publisher_ = sibling.publisher;
}

void Directories::begin() {
  const auto conclude = [this](const Bytes&) {
    const Sibling made = make();
    return to_message(std::pair(random_uuid(), made));
  };
  std::tie(save_id_, siblings_.emplace_back()) = from_message<std::pair<std::string, Sibling>>(
      confer(group_, kPlanning, {[] { return Bytes(); }, combine_nothing, conclude}));
  enter(siblings_.front());
}

void Directories::require_same_name() const {
  const std::string& told = siblings_.front().working;
  if (told.starts_with(name_ + std::string(kWorkMark))) return;
  throw Error(ErrorCode::mismatch, "rank 0 saves into " + told.substr(0, told.rfind(kWorkMark)))
      .at_path(path());
}

void Directories::require_room(std::uint64_t bytes) const {
  require_free(*parent_, bytes);
}

void Directories::look_for_first(Unseeing& unseeing) {
  if (group_.rank() > 0) look_.look(working_, siblings_.front().probe);
  look_.tell(unseeing, group_.rank());
}

bool Directories::is_first_seen_late(const Unseeing& unseeing) const {
  return see_late(unseeing, *working_, siblings_.front().probe);
}

void Directories::await_first(const std::stop_token& stop) {
  await_probe(group_, *working_, siblings_.front().probe, stop);
}

void Directories::share() {
  drop_probe();
  look_.drop_own();
}

void Directories::keep_first() {
  drop_probe();
  look_.drop_own();
  if (!look_.sees()) working_.reset();
}

bool Directories::shows(const Sibling& sibling) const {
  return shows_probe(SubStore(*parent_, sibling.working), sibling.probe);
}

bool Directories::enter_lowest_seen() {
  const auto seen = std::ranges::find_if(siblings_, [this](const Sibling& sibling) {
    return sibling.publisher == group_.rank() || shows(sibling);
  });
  if (seen == siblings_.end()) return false;
  enter(*seen);
  return true;
}

// The sibling of the lowest rank is the one that all take, of several on one disk; the others' go.
// Who has made one does not wait for a lower one to appear: require_apart() looks again.
void Directories::look_for_one() {
  if (!enter_lowest_seen() && parent_->may_show_late())
    (void)look_again([this] { return enter_lowest_seen(); });
  if (directory_ == nullptr || publishes()) return;
  drop_probe();
  directory_.reset();
}

// Returns the ranks that have to make one, in ascending order; none: every rank has one.
std::vector<int> Directories::elect() {
  const auto contribute = [this] {
    if (publisher_ < 0 && siblings_.size() > 1) look_for_one();
    return to_message(std::pair(publisher_, same_host::host_digest()));
  };
  const auto conclude = [](const Bytes& all) {
    std::set<std::uint64_t> hosts;
    std::vector<int> publishers;
    std::vector<int> elected;
    for (const auto& [publisher, host] : all_from_message<std::pair<int, std::uint64_t>>(all)) {
      if (publisher < 0 && hosts.insert(host).second)
        elected.push_back(static_cast<int>(publishers.size()));
      publishers.push_back(publisher);
    }
    if (!hosts.empty()) return to_message(std::pair(true, elected));
    for (const int publisher : publishers) {
      if (publishers[static_cast<std::size_t>(publisher)] == publisher) continue;
      throw Error(ErrorCode::incomplete, "a rank sees the directory of rank " +
                                             std::to_string(publisher) +
                                             ", which writes into that of another rank");
    }
    return to_message(std::pair(false, publishers));
  };
  auto [is_election, ranks] = from_message<std::pair<bool, std::vector<int>>>(
      confer(group_, kPlanning, {contribute, side_by_side, conclude}));
  if (is_election) return std::move(ranks);
  publishers_ = std::move(ranks);
  return {};
}

void Directories::make_more(const std::vector<int>& makers) {
  const bool is_maker = std::ranges::binary_search(makers, group_.rank());
  const auto contribute = [&] { return is_maker ? to_message(make()) : Bytes(); };
  const Bytes all = confer(group_, kPlanning, {contribute, side_by_side, std::identity()});
  for (Sibling& made : all_from_message<Sibling>(all)) siblings_.push_back(std::move(made));
}

void Directories::find_others() {
  look_.drop_own();
  if (!look_.sees()) {
    working_.reset();
    publisher_ = -1;
  }
  for (std::vector<int> makers = elect(); !makers.empty(); makers = elect()) make_more(makers);
}

bool Directories::reaches(int maker) const {
  const int theirs = are_several() ? publishers_.at(static_cast<std::size_t>(maker)) : 0;
  return working_ != nullptr && publisher_ == theirs;
}

void Directories::require_apart() const {
  if (!publishes()) return;
  for (const Sibling& sibling : siblings_) {
    if (sibling.publisher == publisher_ || !shows(sibling)) continue;
    throw Error(ErrorCode::conflict, "the directory of rank " + std::to_string(sibling.publisher) +
                                         " was not seen here when the save began, and is now: "
                                         "both ranks would publish it")
        .at_path(path());
  }
}

void Directories::publish() {
  group_.require_peers();
  directory_->commit(Belonging(SubStore(*parent_, name_)));
  is_published_ = true;
}

void Directories::wait_until_visible(const std::string& file, const std::stop_token& stop) const {
  if (!working_) return;
  const std::string object = name_ + "/" + file;
  const bool is_visible = look_until_visible(stop, [&] {
    if (parent_->exists(object)) return true;
    if (!publishes()) return false;
    throw Error(ErrorCode::not_found, "the checkpoint was committed, and is there no more")
        .at_path(path());
  });
  if (!is_visible) {
    throw Error(ErrorCode::timeout, "the checkpoint is committed, and not visible here")
        .at_path(path());
  }
}

}  // namespace tessera
