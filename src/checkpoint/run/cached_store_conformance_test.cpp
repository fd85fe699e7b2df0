// A store with a cache is a store: what is in the cache changes nothing.
#include "conformance/store_conformance.h"
#include "tessera/copy.h"

namespace tessera {
namespace {

struct EmptyCache {
  static std::shared_ptr<Store> make() { return cached_store(memory_store(), memory_store()); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(EmptyCache, StoreConformance, EmptyCache);

// With objects that no test has put there.
struct OtherCache {
  static std::shared_ptr<Store> make() {
    const auto cache = memory_store();
    for (const char* name : {"x", "a/b.bin", "a", "b", ".metadata", "empty", "d/x"})
      put(*cache, name, bytes_of("wrong"), IfExists::fail);
    return cached_store(memory_store(), cache);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(OtherCache, StoreConformance, OtherCache);

}  // namespace
}  // namespace tessera
