#include "storage/s3/server_copy.h"

#include <algorithm>
#include <span>
#include <vector>

#include "base/digest.h"
#include "base/parallel.h"
#include "storage/s3/parts.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr std::uint64_t kPart = 256 * kMiB;
constexpr int kCopiedAtOnce = 4;  // parts

std::string attempt_of(const CopiedObject& from) {
  const std::string text = from.bucket + '/' + from.key + '\n' + from.etag;
  return "copy-" + digest_text(digest64(std::as_bytes(std::span(text))));
}

bool is_there(Bucket& bucket, const ServerCopy& copy, const std::string& attempt) {
  const auto state = bucket.head(copy.to);
  return state && state->attempt == attempt && state->size == copy.size;
}

// An upload that is aborted unless it is completed.
class PartsCopy {
 public:
  PartsCopy(Bucket& bucket, const ServerCopy& copy, const std::string& attempt)
      : bucket_(bucket),
        copy_(copy),
        made_{copy.to, attempt, copy.size, copy.if_exists == IfExists::fail},
        upload_(bucket.create_upload(copy.to, attempt, PartsAre::copied)) {
    bucket.mark(upload_, PartsAre::copied);
  }
  ~PartsCopy() {
    if (is_over_) return;
    try {
      bucket_.abort(upload_);
    } catch (...) {  // found later among the unfinished uploads
    }
  }
  PartsCopy(const PartsCopy&) = delete;
  PartsCopy& operator=(const PartsCopy&) = delete;

  Written complete() {
    const std::uint64_t needed = (copy_.size + kMostParts - 1) / kMostParts;
    const std::uint64_t part = std::max(kPart, (needed + kMiB - 1) / kMiB * kMiB);
    std::vector<CompletedPart> parts((copy_.size + part - 1) / part);
    parallel_for(kCopiedAtOnce, parts.size(), [&](std::size_t i) {
      const std::uint64_t begin = i * part, end = std::min(begin + part, copy_.size);
      copy_.copied(0);  // hears a request to stop before the part is asked for
      parts[i] = bucket_.copy_part(upload_, static_cast<int>(i) + 1, copy_.from, begin, end);
      copy_.copied(end - begin);
    });
    const Condition condition{.is_absent = made_.is_new};
    const Written written = bucket_.complete(upload_, parts, condition, made_);
    is_over_ = written == Written::done || written == Written::gone;
    return written;
  }

 private:
  Bucket& bucket_;
  const ServerCopy& copy_;
  const Made made_;
  const Upload upload_;
  bool is_over_ = false;  // nothing is left to abort
};

}  // namespace

StoreCopied copy_by_server(Bucket& bucket, const ServerCopy& copy) {
  const bool is_conditional = copy.if_exists == IfExists::fail;
  if (is_conditional && copy.size <= kSmallestPart) return StoreCopied::cannot;
  const std::string attempt = attempt_of(copy.from);
  if (is_there(bucket, copy, attempt)) {
    copy.copied(copy.size);
    return StoreCopied::was_there;
  }
  copy.copied(0);
  if (!is_conditional && copy.size <= kPart) {
    bucket.copy(copy.from, {copy.to, attempt, copy.size});
    copy.copied(copy.size);
    return StoreCopied::done;
  }
  const Written written = PartsCopy(bucket, copy, attempt).complete();
  if (written == Written::done) return StoreCopied::done;
  if (written == Written::gone) {
    throw Error(ErrorCode::conflict, "somebody aborted the upload of this object")
        .at_path(bucket.path_of(copy.to));
  }
  throw Error(ErrorCode::already_exists, "the object is there already")
      .at_path(bucket.path_of(copy.to));
}

}  // namespace tessera::s3
