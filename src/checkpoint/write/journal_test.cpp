#include "checkpoint/write/journal.h"

#include <fcntl.h>

#include <utility>

#include <gtest/gtest.h>

#include "base/process.h"
#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using testing_support::text_of;
using testing_support::write_text;

constexpr std::uint64_t kFingerprint = 7;

class JournalTest : public testing::Test {
 protected:
  // What `use` makes of the journal as it is in the file.
  template <typename Use>
  auto with(Use use, std::uint64_t fingerprint = kFingerprint) {
    const Fd fd(::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND, 0666));
    Journal journal(fd.get(), path_, fingerprint, "0123456789ab");
    return use(journal);
  }
  void append(const std::string& file, std::uint64_t at, std::uint64_t size) {
    with([&](Journal& journal) {
      journal.append({file, 1, at, size, 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFF, {{3, {{4, 5, 6}}}}});
    });
  }
  // The sizes of the units at 0 of files "a" and "b"; 0: the journal knows none.
  std::pair<std::uint64_t, std::uint64_t> sizes() {
    return with([](Journal& journal) {
      const auto size = [&](const char* file) {
        const JournalUnit* unit = journal.find(file, 0);
        return unit == nullptr ? 0 : unit->size;
      };
      return std::pair(size("a"), size("b"));
    });
  }

  std::string path_ = testing_support::temporary_directory() + "/journal";
};

TEST_F(JournalTest, GivesBackWhatWasAppended) {
  EXPECT_FALSE(with([](Journal& journal) { return journal.goes_on(); }));
  append("a", 0, 10);
  append("a", 0, 20);  // made again
  append("a", 50, 30);
  with([](Journal& journal) {
    EXPECT_TRUE(journal.goes_on());
    EXPECT_FALSE(journal.was_foreign());
    EXPECT_EQ(journal.attempt(), "0123456789ab");
    const JournalUnit* unit = journal.find("a", 0);
    ASSERT_NE(unit, nullptr);
    EXPECT_EQ(unit->size, 20U);
    EXPECT_EQ(unit->digest, 0xFFFFFFFFFFFFFFFF);
    EXPECT_EQ(unit->crc, 0xFFFFFFFF);
    ASSERT_EQ(unit->open.size(), 1U);
    EXPECT_EQ(unit->open[0].storage, 3U);
    EXPECT_EQ(unit->open[0].runs.at(0).crc, 6U);
    EXPECT_EQ(journal.find("a", 1), nullptr);
    EXPECT_EQ(journal.find("b", 0), nullptr);
    EXPECT_FALSE(journal.published());
    journal.append_published(99);
  });
  EXPECT_EQ(with([](Journal& journal) { return journal.published(); }), 99U);
}

TEST_F(JournalTest, ATornLineIsNoneAndTheNextIsWhole) {
  append("a", 0, 10);
  const std::size_t before = text_of(path_).size();
  append("b", 0, 20);
  const std::string text = text_of(path_);
  for (std::size_t size = before; size < text.size() - 1; ++size) {
    write_text(path_, text.substr(0, size));
    EXPECT_EQ(sizes(), std::pair(std::uint64_t{10}, std::uint64_t{0})) << size;
    append("b", 0, 30);
    EXPECT_EQ(sizes(), std::pair(std::uint64_t{10}, std::uint64_t{30})) << size;
  }
}

// Whatever byte is damaged: a unit is as it was appended, or unknown.
TEST_F(JournalTest, ADamagedLineIsNone) {
  append("a", 0, 10);
  append("b", 0, 20);
  const std::string text = text_of(path_);
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const char bit : {1, 2, 64}) {
      std::string damaged = text;
      damaged[i] = static_cast<char>(damaged[i] ^ bit);
      write_text(path_, damaged);
      const auto [a, b] = sizes();
      EXPECT_TRUE(a == 0 || a == 10) << i;
      EXPECT_TRUE(b == 0 || b == 20) << i;
      EXPECT_FALSE(a == 10 && b == 20 && i + 1 < text.size()) << i;
    }
  }
}

TEST_F(JournalTest, AnotherConversionsBeginsAnew) {
  append("a", 0, 10);
  with(
      [](Journal& journal) {
        EXPECT_FALSE(journal.goes_on());
        EXPECT_TRUE(journal.was_foreign());
        EXPECT_EQ(journal.find("a", 0), nullptr);
      },
      kFingerprint + 1);
  EXPECT_EQ(sizes(), std::pair(std::uint64_t{0}, std::uint64_t{0}));
}

}  // namespace
}  // namespace tessera
