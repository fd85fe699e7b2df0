#include "storage/s3/bucket.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <exception>
#include <thread>

#include "base/crc32.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "storage/http/pages.h"
#include "storage/http/pieces.h"
#include "storage/http/uri.h"
#include "storage/s3/s3_sink.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr const char* kAttempt = "x-amz-meta-tessera-attempt";
constexpr const char* kCopiedVersion = "x-amz-copy-source-if-match";
constexpr const char* kGoogleCondition = "x-goog-if-generation-match";
constexpr const char* kGet = "s3:GetObject";
constexpr const char* kPut = "s3:PutObject";

// What mark() sends. Data has numbers below: a server that compares checksums wants those of the
// parts which become the object without a gap from 1 on.
constexpr int kMarkNumber = kMostParts + 1;
constexpr std::string_view kMark =
    "Tessera multipart upload: this part is a mark, and no data of it";
constexpr std::string_view kMarkMd5 = "e275abe52bf70130c9669cbb3ca109e6";

std::string base64(const std::array<unsigned char, 4>& bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  const std::uint64_t bits = std::uint64_t{bytes[0]} << 40U | std::uint64_t{bytes[1]} << 32U |
                             std::uint64_t{bytes[2]} << 24U | std::uint64_t{bytes[3]} << 16U;
  std::string text;
  for (unsigned shift = 42; text.size() < 6; shift -= 6) text += kDigits[bits >> shift & 63U];
  return text + "==";
}

// As S3 writes it: base64 of the big-endian number.
std::string checksum_of(ByteView body) {
  const std::uint32_t crc = crc32(body);
  return base64({static_cast<unsigned char>(crc >> 24U), static_cast<unsigned char>(crc >> 16U),
                 static_cast<unsigned char>(crc >> 8U), static_cast<unsigned char>(crc)});
}

Fields of_part(const Upload& upload, int number) {
  return {{"partNumber", std::to_string(number)}, {"uploadId", upload.id}};
}

// A proxy may give the answer to another request: one without a key, and without the checksum or
// version of these bytes, looks like this one's.
bool is_about(const Call& call, const HttpResponse& response) {
  if (!call.brings) return !response.header(kChecksum).empty();
  if (call.brings == Document::completed) return true;
  const auto has_version = [etag = parse_copied_etag(response.text())](const auto& field) {
    return field.first == kCopiedVersion && field.second == etag;
  };
  return std::ranges::any_of(call.headers, has_version);
}

// What the answer to a write says.
Written told_by(const Call& call, const Answer& answer) {
  const bool is_absent = answer.response.status == 404 && answer.error.code == "NoSuchKey";
  if (answer.response.status == 412 || is_absent) return Written::refused;
  if (answer.error.code == "NoSuchUpload") return Written::gone;
  const bool is_done = answer.is_good() && is_about(call, answer.response);
  return is_done ? Written::done : Written::unsure;
}

// Then nothing was done.
bool is_first_and_refused(const HttpResponse& response) {
  return response.attempts == 1 && response.status >= 400 && response.status < 500;
}

// Both have a slash at their end, or are empty.
std::string directory_above(const std::string& directory) {
  if (directory.empty()) return {};
  const std::size_t slash = directory.rfind('/', directory.size() - 2);
  return slash == std::string::npos ? std::string() : directory.substr(0, slash + 1);
}

// It goes back into headers of requests.
void require_version(const std::string& etag, const std::string& path) {
  constexpr std::size_t kLongest = 1024;  // bytes; of AWS at most 40
  const auto is_of_header = [](char c) { return c >= 0x20 && c != 0x7f; };
  if (etag.size() <= kLongest && std::ranges::all_of(etag, is_of_header)) return;
  throw Error(ErrorCode::corrupt,
              "the server tells an ETag of " + std::to_string(etag.size()) + " bytes that is none")
      .at_path(path);
}

Fields& operator+=(Fields& fields, Fields more) {
  for (auto& field : more) fields.push_back(std::move(field));
  return fields;
}

Call call_of_copy(const std::string& key, const CopiedObject& from) {
  const std::string source = "/" + from.bucket + "/" + percent_encoded(from.key, true);
  return {.method = "PUT",
          .key = key,
          .headers = {{"x-amz-copy-source", source}, {kCopiedVersion, from.etag}},
          .permission = "s3:PutObject, and s3:GetObject of what is copied",
          .brings = Document::copied,
          .is_work = true};
}

[[noreturn]] void refuse_replaced(const CopiedObject& from) {
  throw Error(ErrorCode::conflict, "the object was replaced while it was copied")
      .at_path(from.bucket + "/" + from.key);
}

}  // namespace

Fields Bucket::fields_of(const Condition& condition) const {
  if (!sends_conditions_) return {};
  const bool is_google = endpoint_.settings().is_google;
  if (!condition.version.empty())
    return {{is_google ? kGoogleCondition : "If-Match", condition.version}};
  if (!condition.is_absent) return {};
  if (is_google) return {{kGoogleCondition, "0"}};
  return {{"If-None-Match", "*"}};
}

void Bucket::require_absent(const std::string& key) {
  if (!head(key)) return;
  throw Error(ErrorCode::already_exists, "the object is there already").at_path(path_of(key));
}

std::optional<ObjectState> Bucket::head(const std::string& key) {
  const Call call{.method = "HEAD", .key = key, .permission = kGet};
  Answer answer = endpoint_.send(call);
  if (answer.response.status == 404) return std::nullopt;
  const HttpResponse response = endpoint_.require_good(call, std::move(answer)).response;
  const std::string length = response.header("content-length");
  const std::string etag = quoted_etag(response.header("etag"));
  require_version(etag, path_of(key));
  const bool is_google = endpoint_.settings().is_google;
  ObjectState state{.size = 0,
                    .etag = etag,
                    .attempt = endpoint_.told(response, kAttempt),
                    .version = is_google ? response.header("x-goog-generation") : etag};
  const char* end = length.data() + length.size();
  const auto parsed = std::from_chars(length.data(), end, state.size);
  if (length.empty() || parsed.ec != std::errc() || parsed.ptr != end) {
    throw Error(ErrorCode::corrupt, "the server tells the size as '" + length + "'")
        .at_path(path_of(key));
  }
  if (state.etag.empty()) {
    throw Error(ErrorCode::unsupported,
                "the server tells no ETag, by which a replaced object is told")
        .at_path(path_of(key));
  }
  return state;
}

void Bucket::read(const std::string& key, const ObjectState& version, std::uint64_t offset,
                  const Scattered& out) {
  const Call call{
      .method = "GET",
      .key = key,
      .headers = {{"Range", range_text(offset, out.size())}, {"If-Match", version.etag}},
      .into = out,
      .permission = kGet};
  Answer answer = endpoint_.send(call);
  // A server may know no If-Match, and give what is there now.
  const std::string etag = quoted_etag(answer.response.header("etag"));
  const bool is_other = answer.is_good() && !etag.empty() && etag != version.etag;
  if (is_other || is_one_of(answer.response.status, 404, 412, 416)) {
    throw Error(ErrorCode::conflict, "the object was replaced or removed while it was open")
        .at_path(path_of(key))
        .at_offset(offset);
  }
  const HttpResponse response = endpoint_.require_good(call, std::move(answer)).response;
  // Nothing but its version tells a whole object from a page of that length.
  const bool is_whole_object = response.status == 200 && !etag.empty();
  if (is_whole_object && offset == 0 && out.size() == version.size) return;
  const std::string told = response.header("content-range");
  if (response.status == 206 && is_range_of(told, offset, out.size(), version.size)) return;
  throw Error(ErrorCode::corrupt,
              "asked for " + std::to_string(out.size()) + " of " + std::to_string(version.size) +
                  " bytes, the server answered " + std::to_string(response.status) +
                  " with the range '" + told.substr(0, 100) + "'")
      .at_path(path_of(key))
      .at_offset(offset);
}

Written Bucket::put(const std::string& key, ByteView body, const Condition& condition,
                    const std::string& attempt) {
  Call call{.method = "PUT",
            .key = key,
            .headers = {{kChecksum, checksum_of(body)}, {kAttempt, attempt}},
            .body = body,
            .permission = kPut};
  call.headers += fields_of(condition);
  return settled(call, {key, attempt, body.size()});
}

bool Bucket::is_it(const ObjectState& state, const Made& made) const {
  if (state.attempt != made.attempt) return false;
  if (state.size == made.size) return true;
  throw Error(ErrorCode::corrupt, "the server made an object of " + std::to_string(state.size) +
                                      " bytes, " + std::to_string(made.size) + " were written")
      .at_path(path_of(made.key));
}

bool Bucket::holds(const Made& made) {
  const auto state = head(made.key);
  return state && is_it(*state, made);
}

// An earlier attempt at it, whose answer was lost, may still be at work.
bool Bucket::appears(const Made& made, int attempts) {
  if (attempts == 1) return false;
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLongestPause{5'000};
  const auto end = Clock::now() + endpoint_.patience();
  for (std::chrono::milliseconds pause{50};; pause = std::min(pause * 2, kLongestPause)) {
    const auto state = head(made.key);
    if (state && is_it(*state, made)) return true;
    if ((state && made.is_new) || HeedStop::is_requested() || Clock::now() + pause > end)
      return false;
    std::this_thread::sleep_for(pause);
  }
}

// When a failure is on its way that says more than that nothing is known.
bool Bucket::is_known_to_hold(const Made& made) {
  try {
    return holds(made);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::corrupt) throw;
    return false;
  }
}

Written Bucket::settled(const Call& call, const Made& made) {
  const Settling settling;
  std::optional<Answer> answer;
  std::exception_ptr failure;  // no answer came
  try {
    answer = endpoint_.send(call);
  } catch (const Error&) {
    failure = std::current_exception();
  }
  const Written told = answer ? told_by(call, *answer) : Written::unsure;
  if (told == Written::done) return told;
  const bool is_error = told == Written::unsure && answer && !answer->is_good();
  if (is_error && is_first_and_refused(answer->response))
    (void)endpoint_.require_good(call, std::move(*answer));
  if (failure || is_error ? is_known_to_hold(made) : holds(made)) return Written::done;
  if (failure) std::rethrow_exception(failure);
  if (told == Written::gone && appears(made, answer->response.attempts)) return Written::done;
  if (told != Written::unsure) return told;
  (void)endpoint_.require_good(call, std::move(*answer));
  throw Error(ErrorCode::corrupt,
              "the server said that the object was written, and it is not there: a proxy may have"
              " given the answer to another request")
      .at_path(path_of(made.key));
}

std::optional<std::string> Bucket::unheeded_condition(const std::string& key) {
  // Google's generation 0 is that of no object.
  const std::string no_version = endpoint_.settings().is_google ? "0" : "\"0\"";
  if (auto answer = answer_of_ignorant(key, {.is_absent = true})) return answer;
  return answer_of_ignorant(key, {.version = no_version});
}

std::optional<std::string> Bucket::answer_of_ignorant(const std::string& key,
                                                      const Condition& unmet) {
  const Call call{.method = "PUT", .key = key, .headers = fields_of(unmet), .permission = kPut};
  Answer answer = endpoint_.send(call);
  if (is_one_of(answer.response.status, 404, 409, 412)) return std::nullopt;
  // 304 and 200 are of servers that misunderstand or ignore it; 400 and 501 of those that tell so.
  // Google knows conditions: its 400 is about something else.
  const bool is_told = answer.response.status == 400 && !endpoint_.settings().is_google;
  if (!answer.is_good() && !is_told && !is_one_of(answer.response.status, 304, 501))
    (void)endpoint_.require_good(call, answer);  // throws
  return endpoint_.describe_answer(call, answer);
}

void Bucket::remove(const std::string& key) {
  const Settling settling;
  const Call call{.method = "DELETE", .key = key, .permission = "s3:DeleteObject"};
  Answer answer = endpoint_.send(call);
  if (answer.response.status != 404) (void)endpoint_.require_good(call, std::move(answer));
}

void Bucket::copy(const CopiedObject& from, const Made& made) {
  Call call = call_of_copy(made.key, from);
  call.headers += {{"x-amz-metadata-directive", "REPLACE"}, {kAttempt, made.attempt}};
  if (settled(call, made) != Written::done) refuse_replaced(from);
}

Upload Bucket::create_upload(const std::string& key, const std::string& attempt, PartsAre parts) {
  Call call{.method = "POST",
            .key = key,
            .query = {{"uploads", ""}},
            .headers = {{kAttempt, attempt}},
            .permission = kPut,
            .brings = Document::upload};
  if (parts == PartsAre::sent) call.headers += {{"x-amz-checksum-algorithm", "CRC32"}};
  const HttpResponse response = endpoint_.send_good(call).response;
  Upload upload{key, parse_upload_id(response.text())};
  if (response.attempts > 1) mark_others(upload, parts);
  return upload;
}

// A mark on the upload of a rival who has sent nothing yet changes nothing but what `gc` may do one
// day.
void Bucket::mark_others(const Upload& upload, PartsAre parts) {
  try {
    for (const ListedUpload& other : list_uploads(upload.key)) {
      if (other.key != upload.key || other.id == upload.id) continue;
      const Upload unknown{other.key, other.id};
      if (list_parts(unknown).empty()) mark(unknown, parts);
    }
  } catch (const Error&) {  // the object does not need it
  }
}

bool Bucket::is_beside(const Bucket& other) const {
  const auto server_of = [](const Bucket& bucket) {
    Settings settings = bucket.endpoint_.settings();
    settings.bucket.clear();
    return settings;
  };
  return this == &other || server_of(*this) == server_of(other);
}

void Bucket::mark(const Upload& upload, PartsAre parts) {
  const ByteView body = std::as_bytes(std::span(kMark));
  Call call{.method = "PUT",
            .key = upload.key,
            .query = of_part(upload, kMarkNumber),
            .body = body,
            .permission = kPut};
  if (parts == PartsAre::sent) call.headers = {{kChecksum, checksum_of(body)}};
  try {
    (void)endpoint_.send_good(call);
  } catch (const Error&) {  // who cleans up later has to know the upload by its key
  }
}

bool is_mark(const ListedPart& part) {
  if (part.number != kMarkNumber || part.size != kMark.size()) return false;
  // The ETag is no MD5 where the server encrypts.
  return part.etag.find(kMarkMd5) != std::string::npos ||
         part.crc32 == checksum_of(std::as_bytes(std::span(kMark)));
}

std::vector<ListedPart> Bucket::list_parts(const Upload& upload) {
  Call call{.method = "GET",
            .key = upload.key,
            .permission = "s3:ListMultipartUploadParts",
            .brings = Document::parts};
  std::vector<ListedPart> found;
  int behind = 0;
  do {
    call.query = {{"uploadId", upload.id}};
    if (behind > 0) call.query.emplace_back("part-number-marker", std::to_string(behind));
    Answer answer = endpoint_.send(call);
    if (answer.response.status == 404) return {};
    const PartListing page =
        parse_parts(endpoint_.require_good(call, std::move(answer)).response.text());
    if (page.next != 0 && page.next <= behind)
      throw Error(ErrorCode::corrupt, "the server lists the same parts again").at_path(name());
    found.insert(found.end(), page.parts.begin(), page.parts.end());
    behind = page.next;
  } while (behind > 0);
  return found;
}

CompletedPart Bucket::upload_part(const Upload& upload, int number, ByteView body) {
  CompletedPart part{.number = number, .etag = {}, .crc32 = checksum_of(body)};
  const Call call{.method = "PUT",
                  .key = upload.key,
                  .query = of_part(upload, number),
                  .headers = {{kChecksum, part.crc32}},
                  .body = body,
                  .permission = kPut};
  part.etag = endpoint_.send_good(call).response.header("etag");
  return part;
}

CompletedPart Bucket::copy_part(const Upload& upload, int number, const CopiedObject& from,
                                std::uint64_t begin, std::uint64_t end) {
  Call call = call_of_copy(upload.key, from);
  call.query = of_part(upload, number);
  call.headers += {{"x-amz-copy-source-range", range_text(begin, end - begin)}};
  Answer answer = endpoint_.send(call);
  if (answer.response.status == 412) refuse_replaced(from);
  const HttpResponse response = endpoint_.require_good(call, std::move(answer)).response;
  return {.number = number, .etag = parse_copied_etag(response.text()), .crc32 = {}};
}

Written Bucket::complete(const Upload& upload, const std::vector<CompletedPart>& parts,
                         const Condition& condition, const Made& made) {
  const std::string body = complete_request(parts);
  const Call call{.method = "POST",
                  .key = upload.key,
                  .query = {{"uploadId", upload.id}},
                  .headers = fields_of(condition),
                  .body = std::as_bytes(std::span(body)),
                  .permission = kPut,
                  .brings = Document::completed,
                  .is_work = true};
  return settled(call, made);
}

void Bucket::abort(const Upload& upload) {
  const Settling settling;
  const Call call{.method = "DELETE",
                  .key = upload.key,
                  .query = {{"uploadId", upload.id}},
                  .permission = "s3:AbortMultipartUpload"};
  Answer answer = endpoint_.send(call);
  if (answer.response.status != 404) (void)endpoint_.require_good(call, std::move(answer));
}

void Bucket::once_around(const std::string& directory, const std::string& name,
                         const std::function<void()>& work) {
  const std::lock_guard lock(once_);
  if (has_done(directory, name)) return;
  work();
  const std::string parent = directory_above(directory);
  const NoFork moment;
  done_.emplace(name, parent.empty() ? directory : parent);
}

bool Bucket::has_done_around(const std::string& directory, const std::string& name) {
  const std::lock_guard lock(once_);
  return has_done(directory, name);
}

bool Bucket::has_done(const std::string& directory, const std::string& name) const {
  for (std::string above = directory;; above = directory_above(above)) {
    if (done_.contains({name, above})) return true;
    if (above.empty()) return false;
  }
}

void Bucket::list(const std::string& prefix, bool is_level,
                  const std::function<void(const Listing&)>& take) {
  Call call{.method = "GET", .permission = "s3:ListBucket", .brings = Document::listing};
  std::string token;
  Pages pages("objects", name());
  do {
    call.query = {{"list-type", "2"}, {"encoding-type", "url"}, {"prefix", prefix}};
    if (is_level) call.query.emplace_back("delimiter", "/");
    if (!token.empty()) call.query.emplace_back("continuation-token", token);
    const Listing page = parse_listing(endpoint_.send_good(call).response.text());
    for (const ListedObject& object : page.objects)
      require_version(object.etag, path_of(object.key));
    take(page);
    if (!page.next.empty()) pages.turn(page.next, page.objects.size() + page.prefixes.size());
    token = page.next;
  } while (!token.empty());
}

std::vector<ListedUpload> Bucket::list_uploads(const std::string& prefix) {
  Call call{
      .method = "GET", .permission = "s3:ListBucketMultipartUploads", .brings = Document::uploads};
  std::vector<ListedUpload> found;
  UploadListing page;
  Pages pages("uploads", name());
  do {
    // Not encoded: SeaweedFS says that it encodes these keys, and does not.
    call.query = {{"uploads", ""}, {"prefix", prefix}};
    if (!page.next_key.empty()) {
      call.query.emplace_back("key-marker", page.next_key);
      call.query.emplace_back("upload-id-marker", page.next_id);
    }
    UploadListing next = parse_uploads(endpoint_.send_good(call).response.text());
    if (!next.next_key.empty())
      pages.turn(next.next_key + '\0' + next.next_id, next.uploads.size());
    found.insert(found.end(), next.uploads.begin(), next.uploads.end());
    page = std::move(next);
  } while (!page.next_key.empty());
  return found;
}

}  // namespace tessera::s3
