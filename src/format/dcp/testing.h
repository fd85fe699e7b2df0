// For tests: a Metadata as lines of text, and chunks that change.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "format/dcp/dcp.h"

namespace tessera::dcp {

inline std::string text_or_dash(const std::string& text) {
  return text.empty() ? "-" : text;
}

inline std::string place(const Item& item) {
  std::string transforms;
  for (const auto& transform : item.transforms) {
    transforms += (transforms.empty() ? "" : ",") + transform;
  }
  return item.path + " " + std::to_string(item.offset) + " " + std::to_string(item.length) + " " +
         text_or_dash(transforms);
}

inline std::string path_text(const Entry& entry) {
  std::string text;
  for (const PathPart& part : entry.path.value_or(Path())) {
    if (!text.empty()) text += "/";
    if (const auto* key = std::get_if<std::string>(&part)) {
      text += *key;
    } else {
      text += "#" + std::to_string(std::get<std::int64_t>(part));
    }
  }
  return entry.path ? text : "-";
}

// The same lines that tests/golden/make/dcp_listing.py writes from PyTorch's objects.
inline std::string listing(const Metadata& metadata) {
  std::string text = "version " + text_or_dash(metadata.version) + "\n";
  text += "checkpoint " + text_or_dash(metadata.checkpoint_id) + " " +
          text_or_dash(metadata.save_id) + "\n";
  for (const Entry& entry : metadata.entries) {
    if (!entry.is_tensor) {
      text += "bytes " + entry.name + " " + path_text(entry) + " " + place(entry.item) + "\n";
      continue;
    }
    text += "tensor " + entry.name + " " + path_text(entry) + " " +
            std::string(to_string(entry.dtype)) + " " + to_string(entry.shape) + " " +
            (entry.requires_grad ? "1" : "0") + "\n";
    for (const Chunk& chunk : entry.chunks) {
      text += "chunk " + to_string(chunk.box.offsets) + " " + to_string(chunk.box.sizes) + " " +
              place(chunk.item) + "\n";
    }
  }
  return text;
}

template <class Change>
void change_chunk(Entry& entry, std::size_t number, const Change& change) {
  Chunk chunk = entry.chunks[number];
  change(chunk);
  entry.chunks.set(number, chunk);
}

}  // namespace tessera::dcp
