// What a store of a server knows of work that nobody finished, beside what every Store says.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace tessera {

using Time = std::chrono::system_clock::time_point;

// The parts of an object that is not complete. They cost money, and no listing shows them.
struct UnfinishedUpload {
  std::string path;         // of the object, for errors
  std::string key, id;      // how the server knows it
  bool is_ours = false;     // it was begun by this library, which marks its uploads
  std::uint64_t bytes = 0;  // of the parts that are there
  Time last;                // its begin or its last part: what came later
};

// Stores that have uploads are this, too.
class Housekeeping {
 public:
  Housekeeping() = default;
  Housekeeping(const Housekeeping&) = delete;
  Housekeeping& operator=(const Housekeeping&) = delete;
  virtual ~Housekeeping() = default;

  // Of the object that has the store's own name, and of those below, whoever began them, if they
  // were begun before that time. An upload of which the server does not say when it began is never
  // among them. One that was killed before its mark arrived has none.
  [[nodiscard]] virtual std::vector<UnfinishedUpload> uploads_begun_before(Time before) = 0;
  virtual void abort(const UnfinishedUpload& upload) = 0;  // no error if there is none
  // When each object was written, by the server's clock; those of which it does not say are absent.
  [[nodiscard]] virtual std::map<std::string, Time> times_of_objects() = 0;
};

}  // namespace tessera
