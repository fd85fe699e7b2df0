// For tests whose store is different in what they say.
#pragma once

#include "storage/forwarding_store.h"

namespace tessera::testing_support {

using tessera::ForwardingStore;

// Whether it may show late what others make is what it was told.
class ToldLateStore final : public ForwardingStore {
 public:
  ToldLateStore(std::shared_ptr<Store> inner, bool may_show_late)
      : ForwardingStore(std::move(inner)), may_show_late_(may_show_late) {}
  [[nodiscard]] bool may_show_late() const override { return may_show_late_; }

 private:
  const bool may_show_late_;
};

}  // namespace tessera::testing_support
