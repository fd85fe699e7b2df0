// Where a tree and a checkpoint do not fit: all of it, in one list.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {

class Differences {
 public:
  // `sought`: the checkpoint's key for it, the same unless it was renamed.
  void add_missing(std::string key, std::string sought);
  // `why` is what a load of this key alone would throw.
  void add_unfit(std::string key, const Error& why);
  void set_extra(std::vector<std::string> keys) { extra_ = std::move(keys); }
  // Keys that this tree leaves: one that ends as a missing one does is named beside it.
  void set_left(std::vector<std::string> keys) { left_ = std::move(keys); }
  [[nodiscard]] bool has_missing() const noexcept { return !missing_.empty(); }

  // The error that names all differences that `options` refuses, and what differs in each; none
  // when there are none. After the first hundred they are counted and not named. The code is the
  // one that all of them have (`not_found` for missing keys), else `mismatch`; the key is the first
  // one.
  [[nodiscard]] std::optional<Error> refusal(const LoadOptions& options) const;

  // Puts them into `report`, sorted.
  void fill(LoadReport& report) const;

 private:
  struct Missing {
    std::string key, sought;
  };
  struct Unfit {
    std::string key;
    ErrorCode code;
    std::string reason;
  };

  std::vector<Missing> missing_;
  std::vector<Unfit> unfit_;
  std::vector<std::string> extra_, left_;
};

}  // namespace tessera
