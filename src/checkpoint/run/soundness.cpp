#include "checkpoint/run/soundness.h"

#include <array>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "base/one_of.h"
#include "base/parallel.h"
#include "base/stop.h"
#include "checkpoint/check/sources.h"
#include "checkpoint/digests/guard.h"
#include "checkpoint/load/own_files.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/marker.h"
#include "tessera/checkpoint.h"
#include "tessera/verify.h"

namespace tessera {
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
  const auto& [code, text] = report.findings.front();
  throw Error(code, text.substr(to_string(code).size() + std::string_view(": ").size()));
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
