#include "checkpoint/load/patient_store.h"

#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/look_again.h"
#include "storage/forwarding_store.h"
#include "tessera/error.h"

namespace tessera {
namespace {

class PatientStore final : public ForwardingStore {
 public:
  PatientStore(std::shared_ptr<Store> store, std::stop_token stop,
               std::function<bool()> is_replaced)
      : ForwardingStore(std::move(store)),
        stop_(std::move(stop)),
        is_replaced_(std::move(is_replaced)) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view object) const override {
    std::shared_ptr<ByteSource> source = open_if_there(object);
    if (source) return source;
    const bool is_there = look_until(end(), stop_, [&] {
      if (is_replaced_()) return true;
      source = open_if_there(object);
      return source != nullptr;
    });
    if (source) return source;
    if (is_there) return ForwardingStore::open(object);  // as it is
    throw Error(ErrorCode::incomplete, "rank 0 has opened this file, and it does not appear here")
        .at_path(name() + "/" + std::string(object));
  }

 private:
  [[nodiscard]] std::shared_ptr<ByteSource> open_if_there(std::string_view object) const {
    try {
      return ForwardingStore::open(object);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_found) throw;
      return nullptr;
    }
  }

  // One time for all objects: ranks without a shared disk miss many.
  [[nodiscard]] std::chrono::steady_clock::time_point end() const {
    const std::lock_guard lock(mutex_);
    if (!end_) end_ = std::chrono::steady_clock::now() + visible_within.load();
    return *end_;
  }

  const std::stop_token stop_;
  const std::function<bool()> is_replaced_;
  mutable std::mutex mutex_;
  mutable std::optional<std::chrono::steady_clock::time_point> end_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> patient_store(std::shared_ptr<Store> store, std::stop_token stop,
                                     std::function<bool()> is_replaced) {
  return std::make_shared<PatientStore>(std::move(store), std::move(stop), std::move(is_replaced));
}

}  // namespace tessera
