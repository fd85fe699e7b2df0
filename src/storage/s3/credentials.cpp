#include "storage/s3/credentials.h"

#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/wait.h"
#include "storage/s3/profile_files.h"
#include "storage/s3/providers.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

using std::chrono::system_clock;

constexpr std::chrono::minutes kBefore{5};
// What is not new enough, or fails, is not asked for at each request.
constexpr std::chrono::seconds kBetweenLooks{30};

bool is_anonymous(const std::string& profile) {
  const std::string unsigned_requests = variable("AWS_NO_SIGN_REQUEST");
  return profile == "anonymous" || unsigned_requests == "1" || unsigned_requests == "true";
}

}  // namespace

class CredentialSource::Impl {
 public:
  Impl(Find find, Now now) : find_(std::move(find)), now_(std::move(now)) {}

  std::optional<Credentials> get() {
    std::unique_lock lock(mutex_);
    while (true) {
      if (holds_until(now_() + kBefore)) return found_;
      // One asks; the others go on with what still holds, or wait for it.
      if (holds_until(now_()) && (is_asking_ || now_() < next_look_)) return found_;
      if (!is_asking_) return asked(lock);
      wait_for_change(answered_, lock);
    }
  }

  void drop() {
    const std::lock_guard lock(mutex_);
    found_.reset();
  }

 private:
  [[nodiscard]] bool holds_until(system_clock::time_point time) const {
    return found_ && (!found_->expires || time < *found_->expires);
  }

  std::optional<Credentials> asked(std::unique_lock<std::mutex>& lock) {
    is_asking_ = true;
    lock.unlock();
    std::optional<Credentials> fresh;
    std::exception_ptr failure;
    try {
      fresh = find_();
      if (fresh->expires && *fresh->expires <= now_())
        throw Error(ErrorCode::io, "the credentials that were found have expired");
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    is_asking_ = false;
    answered_.notify_all();
    next_look_ = now_() + kBetweenLooks;
    if (!failure) return found_ = std::move(fresh);
    if (holds_until(now_())) return found_;
    std::rethrow_exception(failure);
  }

  const Find find_;
  const Now now_;
  std::mutex mutex_;
  std::condition_variable answered_;
  std::optional<Credentials> found_;    // guarded by mutex_, as are the following
  bool is_asking_ = false;              // a thread is in find_()
  system_clock::time_point next_look_;  // while what there is holds
};

CredentialSource::CredentialSource(std::string profile, std::shared_ptr<HttpClient> client) {
  if (profile.empty()) profile = variable("AWS_PROFILE");
  if (is_anonymous(profile)) return;
  find_ = [profile = std::move(profile), client = std::move(client)] {
    return find_credentials(profile, *client);
  };
  now_ = [] { return system_clock::now(); };
}
CredentialSource::CredentialSource(Find find, Now now)
    : find_(std::move(find)), now_(std::move(now)) {}
CredentialSource::~CredentialSource() = default;

CredentialSource::Impl& CredentialSource::impl() const {
  return impl_.get([this] { return std::make_unique<Impl>(find_, now_); });
}

std::optional<Credentials> CredentialSource::get() {
  return find_ ? impl().get() : std::nullopt;
}

void CredentialSource::drop() {
  if (find_) impl().drop();
}

}  // namespace tessera::s3
