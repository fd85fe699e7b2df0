#include "torch/deadline_store.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/process.h"
#include "tessera/error.h"
#include "torch/c10_error.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Served = c10::intrusive_ptr<c10d::Store>;

std::vector<std::uint8_t> value_of(const std::string& text) {
  return {text.begin(), text.end()};
}

Served with(const Served& inner, milliseconds timeout) {
  return open_with_deadline("somewhere:1", timeout, [inner] { return inner; });
}

// A call's error as ranks get it.
Error failure(const std::function<void()>& call) {
  try {
    communicate("asking it", call);
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return {ErrorCode::io, "none"};
}

// A call that the store does not answer.
void give_up_a_call(c10d::Store& store) {
  const Error error = failure([&] { store.queuePop("queue", true); });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_THAT(error.what(), HasSubstr("(somewhere:1) timed out: it has not answered within"));
  EXPECT_THAT(error.what(), HasSubstr("asking it"));
}

TEST(DeadlineStore, AnswersAsTheStoreInItDoes) {
  c10d::TCPStoreOptions options;
  options.port = 0;  // the system's choice
  options.isServer = true;
  options.waitWorkers = false;
  const Served inner = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto store = with(inner, std::chrono::minutes(5));
  EXPECT_TRUE(store->hasExtendedApi());
  EXPECT_EQ(store->getTimeout(), std::chrono::minutes(5));
  store->set("a", "1");
  EXPECT_EQ(inner->get_to_str("a"), "1");
  EXPECT_EQ(store->get_to_str("a"), "1");
  EXPECT_EQ(store->compareSet("a", "1", "2"), "2");
  EXPECT_EQ(store->add("n", 3), 3);
  EXPECT_EQ(store->add("n", 4), 7);
  store->append("a", value_of("3"));
  store->multiSet({"b", "c"}, {value_of("b"), value_of("c")});
  store->wait({"a", "b"});
  store->wait({"c"}, milliseconds(1));
  EXPECT_EQ(store->multiGet({"a", "c"}), (std::vector{value_of("23"), value_of("c")}));
  EXPECT_THAT(store->listKeys(), UnorderedElementsAre("a", "b", "c", "n"));
  EXPECT_EQ(store->getNumKeys(), inner->getNumKeys());
  EXPECT_TRUE(store->deleteKey("b"));
  EXPECT_FALSE(store->check({"b"}));
  EXPECT_TRUE(store->clone()->check({"a"}));
  store->queuePush("q", value_of("x"));
  EXPECT_EQ(store->queueLen("q"), 1);
  EXPECT_EQ(store->queuePop("q", false), value_of("x"));
}

TEST(DeadlineStore, AWaitThatEndsIsTheStoresOwnErrorAndTheNextCallWorks) {
  const auto store = with(c10::make_intrusive<c10d::HashStore>(), milliseconds(20));
  EXPECT_THROW(store->wait({"absent"}, milliseconds(10)), std::exception);
  EXPECT_THROW(store->get("absent"), std::exception);
  store->setTimeout(std::chrono::minutes(5));
  EXPECT_EQ(store->add("n", 1), 1);
}

TEST(DeadlineStore, ACallThatHangsIsATimeoutAndSoAreLaterOnesUntilItEnds) {
  const auto inner = c10::make_intrusive<c10d::HashStore>();
  const auto store = with(inner, milliseconds(20));
  give_up_a_call(*store);
  EXPECT_EQ(failure([&] { store->add("n", 1); }).code(), ErrorCode::timeout);
  EXPECT_FALSE(inner->check({"n"}));  // was not begun
  inner->queuePush("queue", value_of("x"));
  while (inner->queueLen("queue") > 0) std::this_thread::sleep_for(milliseconds(1));
  store->setTimeout(std::chrono::minutes(5));
  // The thread takes a moment from the end of the call to the next.
  for (bool works = false; !works;) {
    try {
      works = store->add("m", 1) == 1;
    } catch (const c10::DistNetworkError&) {
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

TEST(DeadlineStore, ItsEndLeavesACallThatHangs) {
  const auto inner = c10::make_intrusive<c10d::HashStore>();
  give_up_a_call(*with(inner, milliseconds(20)));
  inner->queuePush("queue", value_of("x"));
  while (inner->queueLen("queue") > 0) std::this_thread::sleep_for(milliseconds(1));
}

TEST(DeadlineStore, AServerThatNeverAnswersIsATimeout) {
  const Fd silent(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(silent.get(), any, size), 0);
  ASSERT_EQ(::listen(silent.get(), 8), 0);
  ASSERT_EQ(::getsockname(silent.get(), any, &size), 0);
  c10d::TCPStoreOptions options;
  options.port = ntohs(address.sin_port);
  options.timeout = std::chrono::seconds(1);
  options.waitWorkers = false;
  const Error error = failure([&] {
    (void)open_with_deadline("127.0.0.1:2", options.timeout, [options] {
      return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
  EXPECT_THAT(error.what(), HasSubstr("127.0.0.1:2"));
}

TEST(DeadlineStore, OnlyStoresOfAServerGetADeadline) {
  const Served hash = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(with_deadline(hash, std::chrono::minutes(5)), hash);
  c10d::TCPStoreOptions options;
  options.port = 0;  // the system's choice
  options.isServer = true;
  options.waitWorkers = false;
  const Served tcp = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const Served part = c10::make_intrusive<c10d::PrefixStore>("part", tcp);
  const auto bounded = with_deadline(part, std::chrono::minutes(5));
  EXPECT_NE(bounded, part);
  bounded->set("a", "1");
  EXPECT_EQ(tcp->get_to_str("part/a"), "1");
  const Served inside = c10::make_intrusive<c10d::PrefixStore>("inside", bounded);
  EXPECT_EQ(with_deadline(inside, std::chrono::minutes(5)), inside);
}

TEST(DeadlineStore, IsNotForChildrenOfFork) {
  auto store = with(c10::make_intrusive<c10d::HashStore>(), std::chrono::minutes(5));
  const pid_t child = ::fork();
  if (child == 0) {
    ErrorCode code = ErrorCode::io;
    try {
      store->add("n", 1);
    } catch (const Error& error) {
      code = error.code();
    }
    store.reset();
    ::_exit(code == ErrorCode::invalid_argument ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(store->add("n", 1), 1);
}

}  // namespace
}  // namespace tessera
