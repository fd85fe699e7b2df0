// Writes to an object store whose answers are cut, empty, those to other requests, or late.
//   strange_answers PATH COUNT SEED
// s3://PATH is behind a proxy that gives such answers (faulty_proxy.py strange), weka://PATH is the
// same place without. Every write ends in one of two ways: it is reported as done, and what was
// written is there, whole; or it is one Error, and what is there is what was before, nothing, or
// what was to be written. Reads give what is there, or an Error. Prints a line for each that ends
// otherwise and a summary; exits with 1 when one did, or when hardly any was done. Objects that are
// read have bytes: of one that a HEAD calls empty nothing is asked for.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/storage.h"
#include "tessera/tensor_view.h"

namespace {

using namespace tessera;
using Bytes = std::vector<std::byte>;

constexpr std::size_t kInParts = 9U << 20U;  // bytes of an object that one request does not take

class Round {
 public:
  Round(const std::string& path, unsigned seed)
      : random_(seed),
        proxied_(open_store("s3://" + path)),
        direct_(open_store("weka://" + path)),
        name_("x" + std::to_string(seed)) {}

  // Empty: all is as it is promised.
  std::string run(bool& is_done) {
    const unsigned what = random_() % 16;
    if (what == 0) return written(kInParts + random_() % 1000, IfExists::fail, is_done);
    if (what < 4) return written(random_() % 3000, IfExists::fail, is_done);
    if (what < 7) return replaced(is_done);
    if (what == 7) return copied(kInParts, IfExists::fail, is_done);
    if (what < 10) return copied(random_() % 3000, IfExists::replace, is_done);
    if (what < 13) return saved(is_done);
    if (what < 15) return removed(is_done);
    return read(is_done);
  }

 private:
  Bytes drawn(std::size_t size) {
    Bytes bytes(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }
  [[nodiscard]] std::optional<Bytes> there() const {
    if (!direct_->exists(name_)) return std::nullopt;
    return read_all(*direct_->open(name_), 1U << 30U);
  }
  static bool goes_well(const std::function<void()>& work) {
    try {
      work();
      return true;
    } catch (const Error&) {
      return false;
    }
  }
  // `before`: what was there.
  std::string checked(bool is_done, const Bytes& wanted, const std::optional<Bytes>& before) const {
    const std::optional<Bytes> found = there();
    if (found == wanted) return {};
    if (is_done) return found ? "done, and other bytes are there" : "done, and nothing is there";
    if (found == before || !found) return {};
    return "not done, and what is there is neither the old object nor the new one";
  }

  std::string written(std::size_t size, IfExists if_exists, bool& is_done) {
    const std::optional<Bytes> before = there();
    const Bytes bytes = drawn(size);
    is_done = goes_well([&] {
      const auto sink = proxied_->create(name_, if_exists, size);
      sink->write_at(0, bytes);
      sink->commit();
    });
    return checked(is_done, bytes, before);
  }
  std::string replaced(bool& is_done) {
    put(*direct_, name_, drawn(random_() % 3000), IfExists::replace);
    return written(random_() % 3000, IfExists::replace, is_done);
  }
  std::string copied(std::size_t size, IfExists if_exists, bool& is_done) {
    const Bytes bytes = drawn(size);
    put(*direct_, name_ + "-from", bytes, IfExists::replace);
    StoreCopied how = StoreCopied::cannot;
    is_done = goes_well([&] {
      const auto from = proxied_->open(name_ + "-from");
      how = proxied_->copy({*from, name_, if_exists, [](std::uint64_t) {}});
    });
    is_done = is_done && how != StoreCopied::cannot;  // a HEAD has told a smaller size
    return checked(is_done, bytes, std::nullopt);
  }
  std::string saved(bool& is_done) {
    std::vector<float> values(500 + random_() % 500);
    for (float& value : values) value = static_cast<float>(random_() % 1000);
    const std::int64_t count = static_cast<std::int64_t>(values.size());
    const Value tree = Value::dict(
        {{"w", TensorView::of(values.data(), DType::float32, {count}).tensor()}, {"n", count}});
    is_done = goes_well([&] { save(tree, {proxied_, name_}); });
    if (!is_done && !direct_->exists(name_ + "/.metadata")) return {};
    std::vector<float> loaded(values.size());
    Value memory = Value::dict(
        {{"w", TensorView::of(loaded.data(), DType::float32, {count}).tensor()}, {"n", 0}});
    load(memory, {direct_, name_});
    return loaded == values && memory.at("n").as_int() == count ? ""
                                                                : "another checkpoint is there";
  }
  std::string removed(bool& is_done) {
    put(*direct_, name_, drawn(10), IfExists::replace);
    is_done = goes_well([&] { proxied_->remove(name_); });
    // The server may be at it still if the answer to another request came instead of its own.
    for (int look = 0; is_done && direct_->exists(name_); ++look) {
      if (look == 30) return "removed, and it is there";
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    return {};
  }
  std::string read(bool& is_done) {
    const Bytes bytes = drawn(1 + random_() % 5000);
    put(*direct_, name_, bytes, IfExists::replace);
    Bytes found;
    is_done = goes_well([&] { found = read_all(*proxied_->open(name_), 1U << 30U); });
    if (!is_done || found == bytes) return {};
    return std::to_string(found.size()) + " bytes were read of " + std::to_string(bytes.size());
  }

  std::mt19937 random_;
  std::shared_ptr<Store> proxied_, direct_;
  std::string name_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int count = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  int wrong = 0, done = 0;
  for (int i = 0; i < count; ++i) {
    const int round = seed * 1'000'000 + i;
    bool is_done = false;
    std::string why;
    try {
      why = Round(argv[1], static_cast<unsigned>(round)).run(is_done);
    } catch (const std::exception& error) {
      why = std::string("the place itself: ") + error.what();
    }
    done += is_done ? 1 : 0;
    if (why.empty()) continue;
    ++wrong;
    std::printf("round %d: %s\n", round, why.c_str());
    std::fflush(stdout);
  }
  std::printf("%d rounds, %d done, %d wrong\n", count, done, wrong);
  return wrong > 0 || done * 4 < count ? 1 : 0;
}
