// What every store must do. A store's own test includes this suite and says how one is made, empty:
//   struct MyMaker { std::shared_ptr<Store> make(); };   // lives as long as one test
//   INSTANTIATE_TYPED_TEST_SUITE_P(My, StoreConformance, MyMaker);
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "conformance/errors.h"
#include "conformance/store_maker.h"
#include "tessera/storage.h"

namespace tessera {

TYPED_TEST_SUITE_P(StoreConformance);

TYPED_TEST_P(StoreConformance, WhatWasPutIsReadBack) {
  put(*this->store_, "a/b.bin", bytes_of("hello"), IfExists::fail);
  const auto source = this->store_->open("a/b.bin");
  EXPECT_EQ(source->size(), 5U);
  EXPECT_EQ(text_of(*source), "hello");
  std::byte two[2];
  source->read_at(3, two);
  EXPECT_EQ(std::memcmp(two, "lo", 2), 0);
}

TYPED_TEST_P(StoreConformance, NothingIsVisibleBeforeCommit) {
  {
    const auto sink = this->store_->create("x", IfExists::fail);
    sink->write_at(0, bytes_of("half"));
    EXPECT_FALSE(this->store_->exists("x"));
    EXPECT_TRUE(this->store_->list().empty());
  }
  EXPECT_FALSE(this->store_->exists("x"));
  EXPECT_TRUE(this->store_->list().empty());
}

TYPED_TEST_P(StoreConformance, WritesInAnyOrderMakeOneObject) {
  const auto sink = this->store_->create("x", IfExists::fail, 100);
  sink->write_at(3, bytes_of("def"));
  sink->write_at(0, bytes_of("abc"));
  sink->commit();
  EXPECT_EQ(text_of(*this->store_->open("x")), "abcdef");
}

TYPED_TEST_P(StoreConformance, AnExistingObjectIsKeptOrReplaced) {
  put(*this->store_, "x", bytes_of("old"), IfExists::fail);
  EXPECT_EQ(code_of([&] { put(*this->store_, "x", bytes_of("new"), IfExists::fail); }),
            ErrorCode::already_exists);
  EXPECT_EQ(text_of(*this->store_->open("x")), "old");
  put(*this->store_, "x", bytes_of("new"), IfExists::replace);
  EXPECT_EQ(text_of(*this->store_->open("x")), "new");
}

TYPED_TEST_P(StoreConformance, ALevelIsListedWithoutWhatIsBelow) {
  for (const char* name : {"b", "a", "d/x", "d/e/y", "f/z"}) {
    put(*this->store_, name, bytes_of(name), IfExists::fail);
  }
  const auto names = [this](std::string_view prefix) {
    std::string text;
    for (const ObjectInfo& object : this->store_->list_level(prefix))
      text += object.name + ":" + std::to_string(object.size) + " ";
    return text;
  };
  EXPECT_EQ(names(""), "a:1 b:1 ");
  EXPECT_EQ(names("d"), "d/x:3 ");
  EXPECT_EQ(names("a"), "");
  EXPECT_EQ(names("none"), "");
}

TYPED_TEST_P(StoreConformance, ALateRivalIsNoticedAtCommit) {
  const auto sink = this->store_->create("x", IfExists::fail);
  sink->write_at(0, bytes_of("late"));
  put(*this->store_, "x", bytes_of("first"), IfExists::fail);
  EXPECT_EQ(code_of([&] { sink->commit(); }), ErrorCode::already_exists);
  EXPECT_EQ(text_of(*this->store_->open("x")), "first");
}

TYPED_TEST_P(StoreConformance, AReplacementIsAnotherVersion) {
  put(*this->store_, "x", bytes_of("old"), IfExists::fail);
  const std::string old = this->store_->open("x")->version();
  EXPECT_TRUE(!old.empty() && this->store_->list().at(0).version == old);
  put(*this->store_, "x", bytes_of("new"), IfExists::replace);
  EXPECT_NE(this->store_->open("x")->version(), old);
}

TYPED_TEST_P(StoreConformance, AVersionThatWasReplacedIsAConflict) {
  put(*this->store_, "x", bytes_of("1"), IfExists::fail);
  const std::string first = this->store_->open("x")->version();
  const auto late = replacing(*this->store_, first, "late");
  replacing(*this->store_, first, "second")->commit();
  EXPECT_EQ(text_of(*this->store_->open("x")), "second");
  EXPECT_EQ(code_of([&] { late->commit(); }), ErrorCode::conflict);
  EXPECT_EQ(text_of(*this->store_->open("x")), "second");
  const auto orphan = replacing(*this->store_, this->store_->open("x")->version(), "orphan");
  this->store_->remove("x");
  EXPECT_EQ(code_of([&] { orphan->commit(); }), ErrorCode::conflict);
  EXPECT_FALSE(this->store_->exists("x"));
}

TYPED_TEST_P(StoreConformance, AnOpenSourceOutlivesAReplacement) {
  put(*this->store_, "x", bytes_of("old"), IfExists::fail);
  const auto source = this->store_->open("x");
  put(*this->store_, "x", bytes_of("newer"), IfExists::replace);
  if constexpr (is_bucket<TypeParam>()) {
    EXPECT_EQ(source->size(), 3U);
    EXPECT_EQ(code_of([&] { (void)text_of(*source); }), ErrorCode::conflict);
    EXPECT_EQ(text_of(*this->store_->open("x")), "newer");
  } else {
    EXPECT_EQ(text_of(*source), "old");
  }
}

TYPED_TEST_P(StoreConformance, ListIsSortedAndBelowAPrefix) {
  for (const char* name : {"b", "a/2", "a/1", "ab"})
    put(*this->store_, name, bytes_of("."), IfExists::fail);
  std::string all;
  for (const ObjectInfo& object : this->store_->list()) all += object.name + " ";
  EXPECT_EQ(all, "a/1 a/2 ab b ");
  EXPECT_EQ(this->store_->list("a").size(), 2U);
  EXPECT_TRUE(this->store_->list("none").empty());
}

TYPED_TEST_P(StoreConformance, AbsentAndShortObjectsAreErrors) {
  EXPECT_EQ(code_of([&] { (void)this->store_->open("x"); }), ErrorCode::not_found);
  this->store_->remove("x");
  put(*this->store_, "x", bytes_of("abc"), IfExists::fail);
  std::byte four[4];
  EXPECT_EQ(code_of([&] { this->store_->open("x")->read_at(0, four); }), ErrorCode::incomplete);
  this->store_->remove("x");
  EXPECT_FALSE(this->store_->exists("x"));
}

TYPED_TEST_P(StoreConformance, AnObjectMayBeEmptyAndMayHaveGaps) {
  put(*this->store_, "empty", {}, IfExists::fail);
  EXPECT_EQ(this->store_->open("empty")->size(), 0U);
  const auto sink = this->store_->create("gap", IfExists::fail, 1000);
  sink->write_at(2, bytes_of("x"));
  sink->commit();
  EXPECT_EQ(text_of(*this->store_->open("gap")), std::string("\0\0x", 3));
}

TYPED_TEST_P(StoreConformance, SeveralWritersFillAnObjectTogether) {
  if constexpr (is_bucket<TypeParam>()) {
    EXPECT_EQ(code_of([&] { (void)this->store_->share("d/x"); }), ErrorCode::unsupported);
    return;
  }
  const auto first = this->store_->share("d/x");
  const auto second = this->store_->share("d/x");
  second->write_at(3, bytes_of("def"));
  second->commit();
  first->write_at(0, bytes_of("abc"));
  first->commit();
  EXPECT_EQ(text_of(*this->store_->open("d/x")), "abcdef");
  EXPECT_EQ(code_of([&] { first->write_at(0, bytes_of("x")); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { first->commit(); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { (void)this->store_->share("../x"); }), ErrorCode::unsafe);
}

TYPED_TEST_P(StoreConformance, ADirectoryAppearsWholeOrNotAtAll) {
  if constexpr (is_bucket<TypeParam>()) {
    for (const IfExists if_exists : {IfExists::fail, IfExists::replace}) {
      EXPECT_EQ(code_of([&] { (void)this->store_->new_directory("run/step4", if_exists); }),
                ErrorCode::unsupported);
    }
    return;
  }
  const auto save = [this](const std::string& text, IfExists if_exists, bool commits) {
    const auto directory = this->store_->new_directory("run/step4", if_exists);
    put(*this->store_, directory->working() + "/a/x", bytes_of(text), IfExists::fail);
    EXPECT_FALSE(this->store_->exists("run/step4/a/" + text));
    if (commits) directory->commit([](std::string_view name) { return name != "notes"; });
  };
  save("one", IfExists::fail, false);
  EXPECT_TRUE(this->store_->list().empty());
  save("one", IfExists::fail, true);
  EXPECT_EQ(text_of(*this->store_->open("run/step4/a/x")), "one");
  EXPECT_EQ(code_of([&] { save("two", IfExists::fail, true); }), ErrorCode::already_exists);
  for (const char* name : {"run/step4/b", "run/step4/notes", "run/step42/b"})
    put(*this->store_, name, bytes_of("old"), IfExists::fail);
  save("two", IfExists::replace, true);
  EXPECT_EQ(text_of(*this->store_->open("run/step4/a/x")), "two");
  EXPECT_TRUE(this->store_->exists("run/step4/notes") && !this->store_->exists("run/step4/b"));
  EXPECT_EQ(this->store_->list().size(), 3U);
  EXPECT_EQ(code_of([&] { (void)this->store_->new_directory("../x", IfExists::fail); }),
            ErrorCode::unsafe);
}

TYPED_TEST_P(StoreConformance, ASinkIsUsedOnce) {
  const auto sink = this->store_->create("x", IfExists::replace);
  sink->write_at(0, bytes_of("abc"));
  sink->commit();
  EXPECT_EQ(code_of([&] { sink->write_at(0, bytes_of("d")); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { sink->commit(); }), ErrorCode::invalid_argument);
  EXPECT_EQ(text_of(*this->store_->open("x")), "abc");
}

TYPED_TEST_P(StoreConformance, ThreadsWriteOneObjectTogether) {
  constexpr std::size_t kPart = 200'000;
  const auto sink = this->store_->create("x", IfExists::fail, 4 * kPart);
  {
    std::vector<std::jthread> threads;
    for (std::size_t part = 0; part < 4; ++part) {
      threads.emplace_back([&sink, part] {
        const std::string text(kPart / 10, static_cast<char>('a' + part));
        for (std::size_t i = 0; i < 10; ++i) {
          sink->write_at(part * kPart + i * text.size(), bytes_of(text));
        }
      });
    }
  }
  sink->commit();
  std::string expected;
  for (const char c : {'a', 'b', 'c', 'd'}) expected += std::string(kPart, c);
  EXPECT_EQ(text_of(*this->store_->open("x")), expected);
}

TYPED_TEST_P(StoreConformance, OfRivalsExactlyOneWins) {
  std::atomic<int> won{0};
  std::atomic<int> lost{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, text = std::string(1000, static_cast<char>('a' + i))] {
        try {
          put(*this->store_, "d/x", bytes_of(text), IfExists::fail);
          ++won;
        } catch (const Error& error) {
          if (error.code() == ErrorCode::already_exists) ++lost;
        }
      });
    }
  }
  EXPECT_EQ(won, 1);
  EXPECT_EQ(lost, 3);
  const std::string text = text_of(*this->store_->open("d/x"));
  EXPECT_EQ(text, std::string(1000, text[0]));
  EXPECT_EQ(this->store_->list().size(), 1U);
}

TYPED_TEST_P(StoreConformance, OddNamesAreNames) {
  for (const char* name :
       {".metadata", ".metadata.tmp", "..a", "a b", "\xc3\xa9", "x.tmp-0123456789ab"}) {
    put(*this->store_, name, bytes_of(name), IfExists::fail);
    EXPECT_EQ(text_of(*this->store_->open(name)), name);
  }
  EXPECT_EQ(this->store_->list().size(), 6U);
  this->store_->remove_unfinished();
  EXPECT_EQ(this->store_->list().size(), 6U);
}

TYPED_TEST_P(StoreConformance, ADirectoryIsNoObject) {
  put(*this->store_, "a/b", bytes_of("x"), IfExists::fail);
  EXPECT_FALSE(this->store_->exists("a"));
  EXPECT_FALSE(this->store_->exists("a/b/c"));
  EXPECT_TRUE(this->store_->list("a/b").empty());
  this->store_->remove("a/b/c");
  EXPECT_TRUE(this->store_->exists("a/b"));
  if constexpr (is_bucket<TypeParam>()) {
    // IfExists::fail would ask more than servers that keep directories can tell: SeaweedFS counts
    // what lies below.
    put(*this->store_, "a", bytes_of("y"), IfExists::replace);
    EXPECT_EQ(text_of(*this->store_->open("a")), "y");
    EXPECT_EQ(text_of(*this->store_->open("a/b")), "x");
    this->store_->remove("a");
    EXPECT_TRUE(this->store_->exists("a/b"));
  }
}

TYPED_TEST_P(StoreConformance, NamesThatLeaveTheRootAreUnsafe) {
  for (const char* name : {"", "/etc/x", "../x", "a/../../x", "a//b", "./a", "a/."}) {
    EXPECT_EQ(code_of([&] { (void)this->store_->open(name); }), ErrorCode::unsafe) << name;
    EXPECT_EQ(code_of([&] { (void)this->store_->create(name, IfExists::replace); }),
              ErrorCode::unsafe)
        << name;
    EXPECT_EQ(code_of([&] { this->store_->remove(name); }), ErrorCode::unsafe) << name;
    EXPECT_EQ(code_of([&] { (void)this->store_->exists(name); }), ErrorCode::unsafe) << name;
  }
  EXPECT_EQ(code_of([&] { (void)this->store_->list("../x"); }), ErrorCode::unsafe);
  EXPECT_EQ(code_of([&] { (void)this->store_->open(std::string_view("a\0b", 3)); }),
            ErrorCode::unsafe);
}

REGISTER_TYPED_TEST_SUITE_P(StoreConformance, WhatWasPutIsReadBack, NothingIsVisibleBeforeCommit,
                            WritesInAnyOrderMakeOneObject, AnExistingObjectIsKeptOrReplaced,
                            ALevelIsListedWithoutWhatIsBelow, ALateRivalIsNoticedAtCommit,
                            AReplacementIsAnotherVersion, AVersionThatWasReplacedIsAConflict,
                            AnOpenSourceOutlivesAReplacement, ListIsSortedAndBelowAPrefix,
                            AbsentAndShortObjectsAreErrors, AnObjectMayBeEmptyAndMayHaveGaps,
                            SeveralWritersFillAnObjectTogether, ADirectoryAppearsWholeOrNotAtAll,
                            ASinkIsUsedOnce, ThreadsWriteOneObjectTogether, OfRivalsExactlyOneWins,
                            OddNamesAreNames, ADirectoryIsNoObject, NamesThatLeaveTheRootAreUnsafe);

}  // namespace tessera
