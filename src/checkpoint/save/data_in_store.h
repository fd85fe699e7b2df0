// Whether the data files that ranks have written are where rank 0 commits.
#pragma once

#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// A data file that rank 0 looks for.
struct Sought {
  std::string name;
  std::string writer;      // "rank 3 on host7"
  std::uint64_t size = 0;  // bytes
};

// What ends the looking, each by a throw.
struct Looking {
  std::stop_token stop;
  // A rank that fails takes its files away, and who deletes the directory takes all.
  std::function<void()> require_writers;
};

// Throws `incomplete` for files that the store does not show here, with who wrote them where, and
// `corrupt` for those of another size: ranks that write into different directories, or to disks of
// their own, would get a checkpoint of which a part is missing. What is not listed is opened, and
// looked for again for 90 seconds.
void require_in_store(const std::vector<Sought>& files, const Store& store, const Looking& looking);

}  // namespace tessera
