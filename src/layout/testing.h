// What the tests of this folder share.
#pragma once

#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {

inline std::vector<Run> runs_of(const Slice& slice, const Shape& shape) {
  const RunSequence sequence(slice, shape);
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < sequence.size(); ++i) runs.push_back(sequence[i]);
  return runs;
}

inline std::ostream& operator<<(std::ostream& out, const Run& run) {
  return out << "{" << run.global << ", " << run.local << ", " << run.count << "}";
}

inline std::ostream& operator<<(std::ostream& out, const Copy& copy) {
  return out << "{" << copy.from << " -> " << copy.to << ", " << copy.from_local << " -> "
             << copy.to_local << ", " << copy.count << "}";
}

}  // namespace tessera
