#include "storage/s3/preflight.h"

#include "base/random_id.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

class ProbeObject {
 public:
  ProbeObject(Bucket& bucket, const std::string& key) : bucket_(bucket), key_(key) {}
  ~ProbeObject() {
    if (!is_there_) return;
    try {
      bucket_.remove(key_);
    } catch (...) {  // the error on its way says more
    }
  }
  ProbeObject(const ProbeObject&) = delete;
  ProbeObject& operator=(const ProbeObject&) = delete;

  void write() {
    is_there_ = true;
    (void)bucket_.put(key_, {}, {}, random_uuid());
  }
  void remove() {
    bucket_.remove(key_);
    is_there_ = false;
  }

 private:
  Bucket& bucket_;
  const std::string& key_;
  bool is_there_ = false;
};

void require_conditions(Bucket& bucket, const std::string& key, bool is_only_writer) {
  const auto answer = bucket.unheeded_condition(key);
  if (!answer) return;
  if (is_only_writer) return bucket.send_no_conditions();
  const std::string why =
      "this server does not heed conditional writes (If-None-Match, If-Match): two savers could "
      "both "
      "be told that they have won. If nobody else writes here, say so: --single-writer, or "
      "single_writer of the options. It says: ";
  throw Error(ErrorCode::unsupported, why + *answer).at_path(bucket.name());
}

}  // namespace

void require_writable(Bucket& bucket, const std::string& key, bool is_only_writer) {
  ProbeObject probe(bucket, key);
  probe.write();
  require_conditions(bucket, key, is_only_writer);
  if (!bucket.head(key)) {
    throw Error(ErrorCode::io, "an object that was just written is not there")
        .at_path(bucket.path_of(key));
  }
  bucket.list(key, false, [](const Listing&) {});
  bucket.abort(bucket.create_upload(key, random_uuid(), PartsAre::sent));
  probe.remove();
}

}  // namespace tessera::s3
