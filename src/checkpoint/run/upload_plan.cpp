#include "checkpoint/run/upload_plan.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <utility>

#include "base/digest.h"
#include "checkpoint/run/marker.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// A file, and who sees it.
struct Seen {
  std::uint64_t size = 0;
  std::uint64_t holders = 0;
  // The holder that copies it unless all hold it: the one with the highest draw.
  std::uint64_t draw = 0;
  int rank = 0;
};
using SeenByName = std::map<std::string, Seen>;

// Another one for each file and rank, so that a node's ranks share what they alone see.
std::uint64_t draw_of(const std::string& name, int rank) {
  const std::string text = name + '\0' + std::to_string(rank);
  return digest64(std::as_bytes(std::span(text)));
}

Bytes encode(const SeenByName& files) {
  MessageWriter message;
  message.count(files.size());
  for (const auto& [name, seen] : files) {
    message.text(name).count(seen.size).count(seen.holders).number(seen.draw);
    message.count(static_cast<std::uint64_t>(seen.rank));
  }
  return message.take();
}

SeenByName decode(ByteView bytes) {
  MessageReader message(bytes);
  SeenByName files;
  for (auto count = message.count(); count > 0; --count) {
    Seen& seen = files[message.text()];
    seen.size = message.count();
    seen.holders = message.count();
    seen.draw = message.number<std::uint64_t>();
    seen.rank = static_cast<int>(message.count());
  }
  return files;
}

void join(const std::string& name, Seen& mine, const Seen& other) {
  if (mine.size != other.size) {
    throw Error(ErrorCode::conflict, "ranks see " + std::to_string(mine.size) + " and " +
                                         std::to_string(other.size) + " bytes of one file")
        .at_path(name);
  }
  mine.holders += other.holders;
  if (other.draw <= mine.draw) return;
  mine.draw = other.draw;
  mine.rank = other.rank;
}

// The largest first, each to the rank that has the least to do.
void balance(UploadPlan& plan, const SeenByName& files, int ranks) {
  std::vector<std::uint64_t> load(static_cast<std::size_t>(ranks), 0);
  std::vector<UploadFile*> shared;
  for (UploadFile& file : plan) {
    const bool is_shared = files.at(file.object.name).holders == static_cast<std::uint64_t>(ranks);
    if (is_shared && !is_marker(file.object.name)) {
      shared.push_back(&file);
    } else {
      load[static_cast<std::size_t>(file.rank)] += file.object.size;
    }
  }
  std::ranges::stable_sort(shared, std::ranges::greater(),
                           [](const UploadFile* file) { return file->object.size; });
  for (UploadFile* file : shared) {
    const auto least = std::ranges::min_element(load);
    *least += file->object.size;
    file->rank = static_cast<int>(least - load.begin());
  }
}

// How a file's digests come: there are none, they are its blocks', or stand in its tail.
enum class Given : std::uint8_t { nothing, blocks, tail };

void write_digests(MessageWriter& message, const std::optional<FileDigests>& digests) {
  if (!digests) {
    message.number(static_cast<std::uint8_t>(Given::nothing));
    return;
  }
  message.number(static_cast<std::uint8_t>(digests->tail ? Given::tail : Given::blocks))
      .count(digests->size);
  if (digests->tail) {
    message.number(*digests->tail);
  } else {
    message.count(digests->origin).text(digests_text(digests->blocks));
  }
}

std::optional<FileDigests> read_digests(MessageReader& message) {
  const auto given = static_cast<Given>(message.number<std::uint8_t>());
  if (given == Given::nothing) return std::nullopt;
  FileDigests digests;
  digests.size = message.count();
  if (given == Given::tail) {
    digests.tail = message.number<std::uint64_t>();
  } else {
    digests.origin = message.count();
    digests.blocks = digests_of_text(message.text());
  }
  return digests;
}

}  // namespace

Bytes encode_seen(const std::vector<ObjectInfo>& files, int rank) {
  SeenByName seen;
  for (const ObjectInfo& file : files)
    seen[file.name] = {file.size, 1, draw_of(file.name, rank), rank};
  return encode(seen);
}

Bytes join_seen(ByteView left, ByteView right) {
  SeenByName files = decode(left);
  for (auto& [name, seen] : decode(right)) {
    const auto [at, is_new] = files.emplace(name, seen);
    if (!is_new) join(name, at->second, seen);
  }
  return encode(files);
}

UploadPlan share_out(ByteView seen, const KnownFiles& known, int ranks) {
  const SeenByName files = decode(seen);
  std::vector<ObjectInfo> objects;
  for (const auto& [name, file] : files) {
    if (!known.leftovers.contains(name)) objects.push_back({name, file.size});
  }
  sort_markers_last(objects);
  UploadPlan plan;
  for (const ObjectInfo& object : objects) {
    plan.push_back({object, is_marker(object.name) ? 0 : files.at(object.name).rank});
    const auto digests = known.digests.find(object.name);
    if (digests != known.digests.end()) plan.back().digests = digests->second;
  }
  balance(plan, files, ranks);
  return plan;
}

Bytes encode_plan(const UploadPlan& plan) {
  MessageWriter message;
  message.count(plan.size());
  for (const auto& [object, rank, digests] : plan) {
    message.text(object.name).count(object.size).count(static_cast<std::uint64_t>(rank));
    write_digests(message, digests);
  }
  return message.take();
}

UploadPlan decode_plan(ByteView bytes) {
  MessageReader message(bytes);
  UploadPlan plan(message.count());
  for (auto& [object, rank, digests] : plan) {
    object.name = message.text();
    object.size = message.count();
    rank = static_cast<int>(message.count());
    digests = read_digests(message);
  }
  return plan;
}

std::uint64_t bytes_of(const UploadPlan& plan) {
  std::uint64_t bytes = 0;
  for (const UploadFile& file : plan) bytes += file.object.size;
  return bytes;
}

}  // namespace tessera
