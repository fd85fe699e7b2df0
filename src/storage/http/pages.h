// The pages of a listing, which have to come to an end whatever the server says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "base/digest.h"
#include "tessera/error.h"

namespace tessera {

class Pages {
 public:
  static constexpr std::size_t kMostPages = 100'000, kMostEntries = 20'000'000;

  // `what` is listed, of the bucket or repository `of`.
  Pages(std::string what, std::string of) : what_(std::move(what)), of_(std::move(of)) {}

  // After a page that has so many entries and is not the last. `next`: what the server calls the
  // next one. Throws `corrupt` for one that was there already, and `limit` for too many.
  void turn(const std::string& next, std::size_t entries) {
    entries_ += entries;
    if (!seen_.insert(digest64(std::as_bytes(std::span(next)))).second)
      throw Error(ErrorCode::corrupt, "the server lists the same " + what_ + " again").at_path(of_);
    if (seen_.size() <= kMostPages && entries_ <= kMostEntries) return;
    throw Error(ErrorCode::limit, "the server lists " + what_ +
                                      " without end: " + std::to_string(entries_) + " in " +
                                      std::to_string(seen_.size()) + " pages")
        .at_path(of_);
  }

 private:
  const std::string what_, of_;
  std::size_t entries_ = 0;
  std::set<std::uint64_t> seen_;  // digests of what pages were called
};

}  // namespace tessera
