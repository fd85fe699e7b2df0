#include "base/environment.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

namespace tessera {
namespace {

constexpr const char* kName = "TESSERA_OF_A_TEST";

void set(const std::string& name, const std::string& value) {
  ASSERT_EQ(::setenv(name.c_str(), value.c_str(), 1), 0);
}

TEST(Environment, TheLatestCopyIsWhatCounts) {
  set(kName, "first=1");
  copy_environment();
  EXPECT_EQ(environment_variable(kName), "first=1");
  set(kName, "second");
  EXPECT_EQ(environment_variable(kName), "first=1");
  copy_environment();
  EXPECT_EQ(environment_variable(kName), "second");
  ::unsetenv(kName);
  copy_environment();
  EXPECT_EQ(environment_variable(kName), std::nullopt);
}

TEST(Environment, ANameIsAllThatStandsBeforeTheSign) {
  const Variables all{"PATHS=a", "PATH", "PATH=", "PATH=second"};
  EXPECT_EQ(variable_of(all, "PATH"), "");
  EXPECT_EQ(variable_of(all, "PAT"), std::nullopt);
  EXPECT_EQ(variable_of({}, "PATH"), std::nullopt);
}

// Whose array moves each time.
void set_many() {
  for (int i = 0; i < 3000; ++i) set(kName + std::to_string(i), "some value");
  for (int i = 0; i < 3000; ++i) ::unsetenv((kName + std::to_string(i)).c_str());
}

TEST(Environment, ThreadsReadWhileItChanges) {
  set(kName, "kept");
  copy_environment();
  std::atomic<bool> is_over = false;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!is_over) wrong += environment_variable(kName) != "kept" ? 1 : 0;
    });
  }
  set_many();
  copy_environment();
  is_over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Environment, AChildThatIsForkedMeanwhileReadsIt) {
  set(kName, "kept");
  copy_environment();
  std::atomic<bool> is_over = false;
  std::thread reader([&] {
    while (!is_over) (void)environment_variable(kName);
  });
  int wrong = 0;
  for (int i = 0; i < 200; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // it ends where it waits for a thread that it does not have
      ::_exit(environment_variable(kName) == "kept" ? 0 : 1);
    }
    int status = 0;
    wrong += ::waitpid(child, &status, 0) != child || status != 0 ? 1 : 0;
  }
  is_over = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace tessera
