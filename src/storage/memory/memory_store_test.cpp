#include "conformance/store_conformance.h"

namespace tessera {

struct MemoryMaker {
  std::shared_ptr<Store> make() { return memory_store(); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Memory, StoreConformance, MemoryMaker);

}  // namespace tessera
