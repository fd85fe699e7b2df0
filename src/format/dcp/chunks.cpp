#include "format/dcp/chunks.h"

#include <algorithm>
#include <utility>

#include "base/numbers.h"
#include "tessera/error.h"

namespace tessera::dcp {

ItemTexts::ItemTexts() {
  (void)path_number({});
  (void)transforms_number({});
}

std::uint32_t ItemTexts::path_number(std::string_view path) {
  // Items of one file follow each other, or those of one tensor, whose files follow each other.
  for (std::size_t guess = last_path_; guess < std::min(last_path_ + 2, paths_.size()); ++guess) {
    if (paths_[guess] != path) continue;
    last_path_ = guess;
    return static_cast<std::uint32_t>(guess);
  }
  const auto number = narrow<std::uint32_t>(paths_.size());
  const auto found = path_numbers_.find(path);
  if (found != path_numbers_.end()) {
    last_path_ = found->second;
  } else {
    path_numbers_.emplace(paths_.emplace_back(path), number);
    last_path_ = number;
  }
  return static_cast<std::uint32_t>(last_path_);
}

std::uint32_t ItemTexts::transforms_number(std::span<const std::string> transforms) {
  if (transforms.empty() && !transforms_.empty()) return 0;
  const auto [found, fresh] =
      transforms_numbers_.try_emplace({transforms.begin(), transforms.end()}, 0);
  if (fresh) {
    found->second = narrow<std::uint32_t>(transforms_.size());
    transforms_.push_back(&found->first);
  }
  return found->second;
}

Chunk Chunks::operator[](std::size_t number) const {
  const auto offsets = box_offsets(number);
  const auto sizes = box_sizes(number);
  const ItemView from = item(number);
  return {{{offsets.begin(), offsets.end()}, {sizes.begin(), sizes.end()}},
          {std::string(from.path),
           from.offset,
           from.length,
           {from.transforms.begin(), from.transforms.end()}}};
}

ItemView Chunks::item(std::size_t number) const {
  if (!has_item(number)) return {};
  const std::uint32_t transforms = transforms_.empty() ? 0 : transforms_[number];
  return {texts_->path(paths_[number]), offsets_[number], lengths_[number],
          texts_->transforms(transforms)};
}

void Chunks::require_dims(std::size_t offsets, std::size_t sizes) const {
  if (offsets == sizes && (empty() || offsets == dims_)) return;
  throw Error(ErrorCode::invalid_argument, "a chunk of " + std::to_string(offsets) + " and " +
                                               std::to_string(sizes) + " dimensions, expected " +
                                               std::to_string(empty() ? offsets : dims_));
}

void Chunks::push_back(std::span<const std::int64_t> offsets, std::span<const std::int64_t> sizes) {
  require_dims(offsets.size(), sizes.size());
  dims_ = offsets.size();
  boxes_.insert(boxes_.end(), offsets.begin(), offsets.end());
  boxes_.insert(boxes_.end(), sizes.begin(), sizes.end());
  paths_.push_back(0);
  offsets_.push_back(0);
  lengths_.push_back(0);
  if (!transforms_.empty()) transforms_.push_back(0);
}

void Chunks::push_back(const Chunk& chunk) {
  push_back(chunk.box.offsets, chunk.box.sizes);
  const Item& item = chunk.item;
  set_item(size() - 1, {item.path, item.offset, item.length, item.transforms});
}

void Chunks::set(std::size_t number, const Chunk& chunk) {
  const auto& [offsets, sizes] = chunk.box;
  require_dims(offsets.size(), sizes.size());
  const auto at = boxes_.begin() + static_cast<std::ptrdiff_t>(2 * dims_ * number);
  std::ranges::copy(sizes, std::ranges::copy(offsets, at).out);
  const Item& item = chunk.item;
  set_item(number, {item.path, item.offset, item.length, item.transforms});
}

void Chunks::set_item(std::size_t number, const ItemView& item) {
  if (!texts_) texts_ = std::make_shared<ItemTexts>();
  paths_[number] = texts_->path_number(item.path);
  offsets_[number] = item.offset;
  lengths_[number] = item.length;
  const std::uint32_t transforms = texts_->transforms_number(item.transforms);
  if (transforms != 0 && transforms_.empty()) transforms_.resize(size());
  if (!transforms_.empty()) transforms_[number] = transforms;
}

}  // namespace tessera::dcp
