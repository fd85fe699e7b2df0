#include "checkpoint/run/steps.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/digest.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/check/saved_state.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/open/dcp_parts.h"
#include "checkpoint/open/item_files.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/read/guard.h"
#include "checkpoint/run/kept_checkpoint.h"
#include "comm/long_work.h"
#include "format/olmo/yaml.h"
#include "format/safetensors/index.h"
#include "storage/forwarding_store.h"
#include "storage/storage.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

using Role = StepDirectory::Role;

std::optional<Role> role_of(std::string_view suffix) {
  if (suffix.empty()) return Role::current;
  const bool is_old = take_prefix(suffix, kOldMark);
  if ((is_old || take_prefix(suffix, kWorkMark)) && is_attempt(suffix))
    return is_old ? Role::replaced : Role::attempt;
  return std::nullopt;
}

std::optional<StepDirectory> parse(const std::string& name) {
  std::string_view rest = name;
  const auto step = take_step_name(rest);
  if (!step) return std::nullopt;
  const auto role = role_of(rest);
  if (!role) return std::nullopt;
  return StepDirectory{step->step, step->unsharded, *role, name};
}

bool is_same_name(const StepDirectory& a, const StepDirectory& b) {
  return a.step == b.step && a.unsharded == b.unsharded;
}

}  // namespace

std::vector<StepDirectory> step_directories(const Location& run) {
  std::vector<StepDirectory> found;
  for (const std::string& name : directory_store(run)->list_directories()) {
    if (auto directory = parse(name)) found.push_back(std::move(*directory));
  }
  std::ranges::stable_sort(found, {}, [](const StepDirectory& directory) {
    return std::tuple(-directory.step, directory.unsharded, directory.role);
  });
  return found;
}

std::vector<StepDirectory> standing(std::vector<StepDirectory> directories) {
  std::erase_if(directories, [](const StepDirectory& one) { return one.role == Role::attempt; });
  std::vector<StepDirectory> found;
  for (auto at = directories.begin(); at != directories.end();) {
    const auto next = std::find_if_not(
        at, directories.end(), [&](const StepDirectory& one) { return is_same_name(one, *at); });
    if (at->role == Role::current || next - at == 1) found.push_back(*at);
    at = next;
  }
  return found;
}

std::vector<StepDirectory> marked(const Location& run, std::vector<StepDirectory> directories) {
  constexpr int kAskedAtOnce = 16;
  std::vector<char> has_marker(directories.size(), 0);
  parallel_for(is_on_disk(run) ? 1 : kAskedAtOnce, directories.size(), [&](std::size_t i) {
    const auto store = directory_store(directory_in(run, directories[i].directory));
    has_marker[i] = marker_in(*store).empty() ? 0 : 1;
  });
  std::vector<StepDirectory> found;
  for (std::size_t i = 0; i < directories.size(); ++i)
    if (has_marker[i] != 0) found.push_back(std::move(directories[i]));
  return found;
}

std::string run_checkpoint_name(std::int64_t step, bool unsharded) {
  if (step < 0) {
    throw Error(ErrorCode::invalid_argument,
                "a step is a number from 0 up, not " + std::to_string(step));
  }
  return to_string(StepName{step, unsharded});
}

RunCheckpoint run_checkpoint(const Location& run, std::int64_t step, bool unsharded) {
  return {step, unsharded, directory_in(run, run_checkpoint_name(step, unsharded))};
}

namespace {

// The marker of olmo_torch_new.
constexpr std::string_view kInnerMarker = "model_and_optim/.metadata";
// Behind a DCP checkpoint's marker may come a config of its trainer's. So where both are, the
// config says no less than `.metadata`.
constexpr std::array kMarkers{kInnerMarker, kDcpMetadata, olmo::kConfigFile};
// Without them no opener finds the rest.
constexpr std::array<std::string_view, 5> kFirstRead{"model.pt", "model.safetensors", "rank0.pt",
                                                     "model/rank0.pt", kItemsMetadata};

// When an object comes: the higher, the later.
int turn_of(std::string_view name) {
  if (const auto* at = std::ranges::find(kMarkers, name); at != kMarkers.end())
    return 2 + static_cast<int>(at - kMarkers.begin());
  return is_read_first(name) ? 1 : 0;
}

}  // namespace

std::string marker_in(const Store& store) {
  for (const std::string_view name : {kDcpMetadata, olmo::kConfigFile}) {
    if (store.exists(name)) return std::string(name);
  }
  return {};
}

void require_no_marker(const Store& store) {
  const std::string marker = marker_in(store);
  if (marker.empty()) return;
  throw Error(ErrorCode::already_exists, "a checkpoint is there already: it has " + marker)
      .at_path(store.name());
}

bool is_marker(std::string_view name) {
  return std::ranges::find(kMarkers, name) != kMarkers.end();
}

bool is_read_first(std::string_view name) {
  return std::ranges::find(kFirstRead, name) != kFirstRead.end() || safetensors::is_index(name) ||
         is_part_metadata(name);
}

void sort_markers_last(std::vector<ObjectInfo>& objects) {
  std::ranges::stable_sort(objects, {},
                           [](const ObjectInfo& object) { return turn_of(object.name); });
}

void remove_markers_first(Store& store, const std::function<void()>& unmarked) {
  require_own_open(store);
  std::vector<ObjectInfo> objects = store.list();
  sort_markers_last(objects);
  bool told = false;
  for (auto object = objects.rbegin(); object != objects.rend(); ++object) {
    if (!told && !is_marker(object->name)) {
      if (unmarked) unmarked();
      told = true;
    }
    store.remove(object->name);
  }
  store.sync();
}

// In a URL it is a URL, so that whoever is told where a checkpoint is can use that.
Location directory_in(const Location& where, const std::string& name) {
  if (is_on_disk(where))
    return (std::filesystem::path(located_directory(where).path) / name).string();
  if (!where.store) return where.path + (where.path.ends_with('/') ? "" : "/") + name;
  const std::shared_ptr<Store> above = directory_store(where);
  require_safe_name(name, above->name());
  return std::make_shared<SubStore>(above, name);
}

namespace {

constexpr std::uint64_t kRecordLimit = 16 << 20;  // bytes

void add_line(std::string_view line, LeftLine& left) {
  const std::size_t space = line.find(' ');
  if (space == 0 || space == std::string_view::npos)
    throw Error(ErrorCode::corrupt, "a line has no name and digest");
  left[std::string(line.substr(0, space))] = digest_of_text(line.substr(space + 1));
}

}  // namespace

std::uint64_t marker_digest(const Store& store) {
  const std::string marker = marker_in(store);
  return marker.empty() ? 0 : digest64(read_all(*store.open(marker), kMetadataLimit));
}

LeftLine read_left(const Store& run) {
  LeftLine left;
  if (!run.exists(kLeftRecord)) return left;
  const auto source = run.open(kLeftRecord);
  const std::vector<std::byte> bytes = read_all(*source, kRecordLimit);
  std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  try {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find('\n'), text.size());
      add_line(text.substr(0, end), left);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  } catch (Error& error) {
    throw error.at_path(source->name());
  }
  return left;
}

void write_left(Store& run, const LeftLine& left) {
  if (left.empty()) {
    if (run.exists(kLeftRecord)) run.remove(kLeftRecord);
    return;
  }
  std::string text;
  for (const auto& [name, digest] : left) text += name + " " + digest_text(digest) + "\n";
  put(run, kLeftRecord, std::as_bytes(std::span(text)), IfExists::replace);
  run.sync();
}

bool is_left(const LeftLine& left, const Location& run, const std::string& directory) {
  const auto found = left.find(directory);
  if (found == left.end()) return false;
  const std::uint64_t digest = marker_digest(*directory_store(directory_in(run, directory)));
  return digest != 0 && digest == found->second;
}

void go_on_from(const Location& run, std::int64_t step) {
  LeftLine left;
  for (const StepDirectory& one : standing(step_directories(run))) {
    if (one.step <= step) continue;
    const auto store = directory_store(directory_in(run, one.directory));
    if (const std::uint64_t digest = marker_digest(*store); digest != 0)
      left[one.directory] = digest;
  }
  write_left(*directory_store(run), left);
  forget_later(run, step);
}

void go_on_from(const Location& run, std::int64_t step, Group& group) {
  agree_on_long_work(group, "going on from a step", {}, [&](const std::stop_token&) {
    if (group.rank() == 0) return go_on_from(run, step);
    forget_later(run, step);  // on this rank's host
  });
}

namespace {

// These say that the checkpoint is damaged; all others, that it could not be seen, or not by us.
bool is_damage(ErrorCode code) {
  return is_one_of(code, ErrorCode::corrupt, ErrorCode::incomplete, ErrorCode::not_found,
                   ErrorCode::unsafe, ErrorCode::conflict, ErrorCode::mismatch, ErrorCode::limit);
}

// The last byte of a file with digests: it is not given out before the list of digests behind the
// file's data, or else the file's last block, is found good.
void check_end(const ByteSource& source) {
  if (source.size() == 0 || !source.checked()) return;
  std::array<std::byte, 1> last{};
  source.read_at(source.size() - 1, last);
}

void check_ends(const Location& where, const RunCheck& check, bool part) {
  const Checkpoint checkpoint = Checkpoint::open(where, {.part = part});
  checkpoint.require_files();
  std::vector<std::shared_ptr<const ByteSource>> sources;
  for (const auto& [name, source] : sources_of(checkpoint)) sources.push_back(source);
  parallel_for(check.threads, sources.size(), [&](std::size_t i) {
    require_going_on(check.stop);
    check_end(*sources[i]);
  });
}

void check_all(const Location& where, const RunCheck& check, bool part) {
  const VerifyOptions how{.threads = check.threads, .stop = check.stop};
  const VerifyReport report =
      part ? verify(Checkpoint::open(where, {.part = true}), how) : verify(where, how);
  if (report.findings.empty()) return;
  throw Error(report.findings.front().error);
}

// `part`: one rank's file, of which no more is looked at.
void check_by(const Location& where, const RunCheck& check, bool part = false) {
  if (check.read_data) {
    check_all(where, check, part);
  } else {
    check_ends(where, check, part);
  }
}

// Each by itself: all of it is this rank's.
void check_own(const Location& where, const RunCheck& check, const sharded::Rank& rank) {
  const std::shared_ptr<Store> directory = directory_store(where);
  if (marker_in(*directory).empty())
    throw Error(ErrorCode::incomplete, "there is no such checkpoint").at_path(directory->name());
  const std::optional<Checkpoint> own = read_own_files(guard_present(directory), rank);
  if (!own) {
    throw Error(ErrorCode::incomplete, "there are no files of this rank")
        .at_path(directory->name());
  }
  for (const std::string& name : names_of_own(own->kind, rank.rank)) {
    if (own->store->exists(name)) check_by({own->store, name}, check, true);
  }
}

// What is wrong, if `work` finds that.
std::optional<Error> damage_found_by(const RunCheck& check, const std::function<void()>& work) {
  require_threads(check.threads);
  require_going_on(check.stop);
  try {
    work();
  } catch (const Error& error) {
    if (!is_damage(error.code())) throw;
    return error;
  }
  return std::nullopt;
}

}  // namespace

std::optional<Error> fault_of(const Location& where, const RunCheck& check) {
  return damage_found_by(check, [&] { check_by(where, check); });
}

std::optional<Error> own_fault_of(const Location& where, const RunCheck& check,
                                  const sharded::Rank& rank) {
  return damage_found_by(check, [&] { check_own(where, check, rank); });
}

}  // namespace tessera
