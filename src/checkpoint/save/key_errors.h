// What is wrong with several keys, as one error.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/error.h"

namespace tessera {

class KeyErrors {
 public:
  // `error` is about its key.
  void add(const Error& error);
  // One alone is thrown as it is. Of several the first 100 are told and all are counted; the code
  // is the one that they share, else `mismatch`.
  void require_none() const;

 private:
  std::vector<Error> told_;
  std::size_t count_ = 0;
  bool one_code_ = true;
};

}  // namespace tessera
