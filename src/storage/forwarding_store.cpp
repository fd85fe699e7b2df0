#include "storage/forwarding_store.h"

#include <utility>

#include "base/parallel.h"

namespace tessera {
namespace {

class StoppingStore final : public ForwardingStore {
 public:
  StoppingStore(std::shared_ptr<Store> store, std::stop_token stop)
      : ForwardingStore(std::move(store)), stop_(std::move(stop)) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open_listed(const ObjectInfo& object) const override {
    before_look();
    return inner().open_listed(object);
  }

 private:
  void before_look() const override { require_going_on(stop_); }

  std::stop_token stop_;
};

}  // namespace

std::shared_ptr<Store> stopping_store(std::shared_ptr<Store> store, std::stop_token stop) {
  if (!stop.stop_possible()) return store;
  return std::make_shared<StoppingStore>(std::move(store), std::move(stop));
}

}  // namespace tessera
