#include "checkpoint/run/left_line.h"

#include <algorithm>
#include <span>
#include <string_view>

#include "base/digest.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/open/located.h"
#include "checkpoint/run/marker.h"
#include "checkpoint/run/step_names.h"
#include "comm/long_work.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kRecord = "tessera-left.txt";
constexpr std::uint64_t kRecordLimit = 16 << 20;  // bytes

std::uint64_t digest_of_marker(const Store& checkpoint, const std::string& marker) {
  return digest64(read_all(*checkpoint.open(marker), kMetadataLimit));
}

void add_line(std::string_view line, LeftLine& left) {
  const std::size_t space = line.find(' ');
  if (space == 0 || space == std::string_view::npos)
    throw Error(ErrorCode::corrupt, "a line has no name and digest");
  left[std::string(line.substr(0, space))] = digest_of_text(line.substr(space + 1));
}

}  // namespace

LeftLine read_left(const Store& run) {
  LeftLine left;
  if (!run.exists(kRecord)) return left;
  const auto source = run.open(kRecord);
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
    if (run.exists(kRecord)) run.remove(kRecord);
    return;
  }
  std::string text;
  for (const auto& [name, digest] : left) text += name + " " + digest_text(digest) + "\n";
  put(run, kRecord, std::as_bytes(std::span(text)), IfExists::replace);
  run.sync();
}

bool is_left(const LeftLine& left, const Location& run, const std::string& directory) {
  const auto found = left.find(directory);
  if (found == left.end()) return false;
  const auto store = directory_store(directory_in(run, directory));
  const std::string marker = marker_in(*store);
  return !marker.empty() && digest_of_marker(*store, marker) == found->second;
}

void go_on_from(const Location& run, std::int64_t step) {
  LeftLine left;
  for (const StepDirectory& one : standing(step_directories(run))) {
    if (one.step <= step) continue;
    const auto store = directory_store(directory_in(run, one.directory));
    const std::string marker = marker_in(*store);
    if (!marker.empty()) left[one.directory] = digest_of_marker(*store, marker);
  }
  write_left(*directory_store(run), left);
}

void go_on_from(const Location& run, std::int64_t step, Group& group) {
  agree_on_long_work(group, "going on from a step", {}, [&](const std::stop_token&) {
    if (group.rank() == 0) go_on_from(run, step);
  });
}

}  // namespace tessera
