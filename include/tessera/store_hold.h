// A store whose directory one writer has for itself.
#pragma once

namespace [[gnu::visibility("default")]] tessera {

// Made by Store::hold, and ends with the process that has it, however that ends. Nobody else holds
// the store meanwhile; writers that do not ask are not kept out.
class StoreHold {
 public:
  StoreHold() = default;
  StoreHold(const StoreHold&) = delete;
  StoreHold& operator=(const StoreHold&) = delete;
  virtual ~StoreHold() = default;

  // Throws `conflict` if somebody has deleted the directory, whether or not it was made again.
  virtual void require_there() const = 0;
};

}  // namespace tessera
