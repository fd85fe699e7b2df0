#include "conformance/store_conformance.h"
#include "storage/s3/test_bucket.h"

namespace tessera {

struct S3Maker {
  static constexpr bool kIsBucket = true;
  std::shared_ptr<Store> make() { return s3_store(fresh_url(), test_client()); }
};
INSTANTIATE_TYPED_TEST_SUITE_P(S3, StoreConformance, S3Maker);

}  // namespace tessera
