// The fixture of store_conformance.h, and what a maker of stores may say of them.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tessera/storage.h"

namespace tessera {

inline ByteView bytes_of(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// A new version of "x" with that text, before its commit.
inline std::unique_ptr<ByteSink> replacing(Store& store, const std::string& version,
                                           const std::string& text) {
  auto sink = store.replace("x", version);
  sink->write_at(0, bytes_of(text));
  return sink;
}

inline std::string text_of(const ByteSource& source) {
  const auto bytes = read_all(source, 1 << 20);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Besides make() a maker may have
//   static constexpr bool kIsBucket = true;
// for a store that keeps no old versions, whose objects have one writer, and which has no
// directories: the suite asks for the other outcome there; and, to skip a test, a reason:
//   std::string lacks(const std::string& test);  // empty: it is not skipped
template <typename Maker>
constexpr bool is_bucket() {
  if constexpr (requires { Maker::kIsBucket; }) {
    return Maker::kIsBucket;
  } else {
    return false;
  }
}

template <typename Maker>
class StoreConformance : public testing::Test {
 protected:
  void SetUp() override {
    if constexpr (requires { maker_.lacks(std::string()); }) {
      const auto* test = testing::UnitTest::GetInstance()->current_test_info();
      const std::string reason = maker_.lacks(test->name());
      if (!reason.empty()) GTEST_SKIP() << reason;
    }
  }

  Maker maker_;
  std::shared_ptr<Store> store_ = maker_.make();
};

}  // namespace tessera
