// The objects of one bucket: S3's verbs, without names of a store above them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/process.h"
#include "storage/s3/endpoint.h"

namespace tessera::s3 {

struct ObjectState {
  std::uint64_t size = 0;
  std::string etag;          // with its quotes
  std::string attempt = {};  // of whoever wrote it with this library, see Written; else empty
  std::string version;       // for Condition: the ETag, or Google's generation
};

// What a write demands of the object that has the name by now. Empty: nothing.
struct Condition {
  bool is_absent = false;    // there is none
  std::string version = {};  // or it is this one
  // Whether the request that makes it is the first to ask: one PUT, or before many parts a HEAD.
  bool is_asked_first = false;
};

enum class Written : std::uint8_t {
  done,
  refused,  // the condition does not hold. A first attempt whose answer was lost may be the reason.
            // Servers also say that an object is absent which had the version and is gone
  gone,     // there is no such upload: it was completed already, or aborted
  unsure,   // the answer does not say. put(), copy() and complete() never return it
};

struct Upload {
  std::string key, id;
};

// What a write makes, by which it is known again.
struct Made {
  std::string key, attempt;
  std::uint64_t size = 0;
  bool is_new = false;  // with another object at the key it cannot be made any more
};

// The source of the parts of an upload. Parts that are sent have checksums, which the server wants
// for either all or none.
enum class PartsAre : std::uint8_t { sent, copied };

// An object of a bucket of the same server, of which the server makes a copy if it is of this
// version still: else `conflict`.
struct CopiedObject {
  std::string bucket, key, etag;
};

[[nodiscard]] bool is_mark(const ListedPart& part);

// All throw an Error that names URL, verb, status, request id and the server's code. Threads may
// call members at once. An `attempt` is a header of the object that head() tells, so that who lost
// an answer knows what became of the request.
class Bucket {
 public:
  Bucket(std::string name, Settings settings, std::shared_ptr<HttpClient> client)
      : endpoint_(std::move(name), std::move(settings), std::move(client)) {}

  [[nodiscard]] std::string path_of(const std::string& key) const { return endpoint_.path_of(key); }
  [[nodiscard]] const std::string& name() const { return endpoint_.name(); }
  [[nodiscard]] const std::string& endpoint() const { return endpoint_.settings().endpoint; }

  [[nodiscard]] std::optional<ObjectState> head(const std::string& key);
  // Fills `out`, which is not empty, from `offset` on, if the object is `version` still: else
  // `conflict`.
  void read(const std::string& key, const ObjectState& version, std::uint64_t offset,
            const Scattered& out);
  // put(), copy() and complete() ask for the object itself where the answer does not say that it
  // was written: what was lost on the way is done if it is there, with this attempt and size. Of
  // another size, or absent although a good answer came, it is `corrupt`.
  Written put(const std::string& key, ByteView body, const Condition& condition,
              const std::string& attempt);
  // What a server says that does not refuse to write `key`, at which there is an object, under
  // conditions that do not hold: some ignore them, or know none. None: it heeds them.
  [[nodiscard]] std::optional<std::string> unheeded_condition(const std::string& key);
  // From now on no request has one. Rivals are then kept out by whoever decided that.
  void send_no_conditions() { sends_conditions_ = false; }
  [[nodiscard]] bool sends_conditions() const { return sends_conditions_; }
  // Whether one request can be about objects of both: they have one server and credentials.
  [[nodiscard]] bool is_beside(const Bucket& other) const;
  [[nodiscard]] CopiedObject copied_object(const std::string& key,
                                           const ObjectState& version) const {
    return {endpoint_.settings().bucket, key, version.etag};
  }
  // Asks for it: `already_exists` if it is there.
  void require_absent(const std::string& key);
  // No error if there is none.
  void remove(const std::string& key);
  // Up to 5 GiB.
  void copy(const CopiedObject& from, const Made& made);

  // If the request was sent again, the server may have begun another upload, too, of which nobody
  // knows the id. Such ones of the key, without any part, get a mark, so that `gc` finds them.
  [[nodiscard]] Upload create_upload(const std::string& key, const std::string& attempt,
                                     PartsAre parts);
  // Sends a small part of the highest number, which no complete() lists, so that the server drops
  // it in the end. Until then is_mark() tells by it that the upload is this library's. No error if
  // the server refuses it: the object does not need it.
  void mark(const Upload& upload, PartsAre parts);
  // None if there is no such upload.
  [[nodiscard]] std::vector<ListedPart> list_parts(const Upload& upload);
  [[nodiscard]] CompletedPart upload_part(const Upload& upload, int number, ByteView body);
  // Its bytes [begin, end).
  [[nodiscard]] CompletedPart copy_part(const Upload& upload, int number, const CopiedObject& from,
                                        std::uint64_t begin, std::uint64_t end);
  // `parts` by number, which become `made`. Nothing is visible before it. `gone` after an attempt
  // whose answer was lost may be that one's doing: the server may work on it for minutes, so long
  // the object is looked for.
  Written complete(const Upload& upload, const std::vector<CompletedPart>& parts,
                   const Condition& condition, const Made& made);
  void abort(const Upload& upload);  // no error if there is none

  // Calls `take` for each page of keys that begin with `prefix`, in the server's order. With
  // `is_level` what has a further '/' behind the prefix is told as Listing::prefixes.
  void list(const std::string& prefix, bool is_level,
            const std::function<void(const Listing&)>& take);
  // ObjectState::version of a listed object; empty where listings do not tell it.
  [[nodiscard]] std::string listed_version(const ListedObject& object) const {
    return endpoint_.settings().is_google ? std::string() : object.etag;
  }
  // Unfinished ones of keys that begin with `prefix`, of whoever began them.
  [[nodiscard]] std::vector<ListedUpload> list_uploads(const std::string& prefix);

  // Calls `work` unless such a call of this name has returned before: for the directory (empty, or
  // a slash at its end), for one beside it that is not at the top of the bucket, or for one above.
  void once_around(const std::string& directory, const std::string& name,
                   const std::function<void()>& work);
  // Whether such a call has.
  [[nodiscard]] bool has_done_around(const std::string& directory, const std::string& name);

 private:
  [[nodiscard]] bool has_done(const std::string& directory, const std::string& name) const;
  [[nodiscard]] Fields fields_of(const Condition& condition) const;
  void mark_others(const Upload& upload, PartsAre parts);
  [[nodiscard]] bool is_it(const ObjectState& state, const Made& made) const;
  [[nodiscard]] bool holds(const Made& made);
  [[nodiscard]] bool appears(const Made& made, int attempts);
  [[nodiscard]] bool is_known_to_hold(const Made& made);
  // The write that `call` is, and what became of it.
  [[nodiscard]] Written settled(const Call& call, const Made& made);
  [[nodiscard]] std::optional<std::string> answer_of_ignorant(const std::string& key,
                                                              const Condition& unmet);

  Endpoint endpoint_;
  std::atomic<bool> sends_conditions_{true};
  SlowMutex once_;
  std::set<std::pair<std::string, std::string>> done_;  // names, directories; guarded by once_
};

}  // namespace tessera::s3
