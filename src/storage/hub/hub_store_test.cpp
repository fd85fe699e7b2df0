#include "storage/hub/hub_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "conformance/aws_environment.h"
#include "conformance/errors.h"
#include "conformance/loopback_server.h"

namespace tessera::hub {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kToken = "hf_secret";
const std::string kCommit(40, 'c');

std::string target_of(const std::string& request) {
  const std::size_t from = request.find(' ') + 1;
  return request.substr(from, request.find(' ', from) - from);
}

std::string field_of(const std::string& request, const std::string& name) {
  const std::string begin = "\r\n" + name + ": ";
  const std::size_t at = request.find(begin);
  if (at == std::string::npos) return {};
  const std::size_t from = at + begin.size();
  return request.substr(from, request.find("\r\n", from) - from);
}

std::string answer_to_head(int status, const std::string& headers) {
  return http_answer(status, "", headers);
}

std::string ranged_answer(const std::string& request, const std::string& bytes) {
  const std::string range = field_of(request, "Range").substr(6);
  const std::size_t from = std::stoul(range);
  const std::size_t last = std::stoul(range.substr(range.find('-') + 1));
  return http_answer(206, bytes.substr(from, last + 1 - from),
                     "Content-Range: bytes " + range + "/" + std::to_string(bytes.size()) + "\r\n");
}

// A Hub with the model org/m, whose file `w.bin` lies on another server, for a signed address.
class Hub : public testing::Test {
 protected:
  void SetUp() override {
    environment_.set("HF_ENDPOINT", hub_.url(""));
    environment_.set("HF_TOKEN", kToken);
  }

  [[nodiscard]] static std::shared_ptr<Store> store(const std::string& url = "hf://org/m") {
    HttpOptions options;
    options.operation_within = 5s;
    options.first_pause = 2ms;
    return hub_store(parse_hub_url(url), std::make_shared<HttpClient>(options));
  }

  static std::string text_of(const ByteSource& source) {
    std::string text(source.size(), '\0');
    source.read_at(0, std::as_writable_bytes(std::span(text)));
    return text;
  }

  [[nodiscard]] std::string cdn_url(const std::string& path) const { return cdn_.url(path); }
  int asked(const std::string& what) {
    const std::lock_guard lock(mutex_);
    return asked_[what];
  }

  std::string bytes_ = "0123456789";
  std::string tag_ = "sha-of-w";
  std::string tree_ = R"([{"type": "file", "path": "config.json", "oid": "g", "size": 2},
                          {"type": "file", "path": "w.bin", "oid": "p", "size": 10,
                           "lfs": {"oid": "sha-of-w", "size": 10}},
                          {"type": "directory", "path": "sub", "oid": "d"}])";
  std::atomic<int> signature_{1};                                  // which is good now
  std::function<std::string(const std::string& request)> before_;  // an answer; empty: the usual

 private:
  std::string hub_answer(const std::string& request) {
    const std::string target = target_of(request);
    {
      const std::lock_guard lock(mutex_);
      ++asked_[target.substr(0, target.find('?'))];
      if (field_of(request, "Authorization") != std::string("Bearer ") + kToken)
        return http_answer(401, "", "X-Error-Code: RepoNotFound\r\n");
    }
    if (before_)
      if (std::string answer = before_(request); !answer.empty()) return answer;
    if (target == "/api/models/org/m/revision/main?expand=sha")
      return http_answer(200, R"({"sha": ")" + kCommit + "\"}");
    if (target == "/api/models/org/m/tree/" + kCommit + "?recursive=false")
      return http_answer(200, tree_);
    if (target == "/org/m/resolve/" + kCommit + "/w.bin") {
      return answer_to_head(302, "Location: " + cdn_.url("/w?signature=") +
                                     std::to_string(signature_) + "\r\nX-Linked-Size: 10\r\n" +
                                     "X-Linked-ETag: \"" + tag_ +
                                     "\"\r\nX-Repo-Commit: " + kCommit + "\r\n");
    }
    if (target == "/org/m/resolve/" + kCommit + "/config.json")
      return answer_to_head(307, "Location: /cached/config.json\r\n");
    if (target == "/cached/config.json" && request.starts_with("HEAD"))
      return "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";
    if (target == "/cached/config.json") return ranged_answer(request, "{}");
    return http_answer(404, "", "X-Error-Code: EntryNotFound\r\n");
  }

  std::string cdn_answer(const std::string& request) {
    const std::lock_guard lock(mutex_);
    ++asked_["cdn"];
    if (!field_of(request, "Authorization").empty()) ++asked_["token at the cdn"];
    if (target_of(request) != "/w?signature=" + std::to_string(signature_))
      return http_answer(403, "expired");
    return ranged_answer(request, bytes_);
  }

  AwsEnvironment environment_;
  std::mutex mutex_;
  std::map<std::string, int> asked_;  // guarded by mutex_
  LoopbackServer cdn_{
      [this](int, const std::string& request) { return Scripted{cdn_answer(request)}; }};
  LoopbackServer hub_{
      [this](int, const std::string& request) { return Scripted{hub_answer(request)}; }};
};

TEST_F(Hub, ListsAndReads) {
  const auto model = store();
  std::vector<std::string> names;
  for (const ObjectInfo& object : model->list_level()) names.push_back(object.name);
  EXPECT_THAT(names, ElementsAre("config.json", "w.bin"));
  EXPECT_THAT(model->list_directories(), ElementsAre("sub"));
  EXPECT_FALSE(model->exists("none"));
  EXPECT_FALSE(model->exists("sub"));
  EXPECT_TRUE(model->list_level("none").empty());  // which the root has told already
  EXPECT_EQ(asked("/api/models/org/m/tree/" + kCommit + "/none"), 0);

  const auto weights = model->open("w.bin");
  EXPECT_EQ(weights->name(), "hf://org/m/w.bin");
  EXPECT_EQ(weights->version(), "sha-of-w");
  EXPECT_THAT(weights->identity(), HasSubstr("sha-of-w"));
  EXPECT_EQ(text_of(*weights), "0123456789");
  EXPECT_EQ(text_of(*model->open("config.json")), "{}");
  EXPECT_EQ(asked("token at the cdn"), 0);
  EXPECT_EQ(asked("/api/models/org/m/revision/main"), 1);
  EXPECT_EQ(asked("/api/models/org/m/tree/" + kCommit), 1);
}

TEST_F(Hub, ASignedAddressIsKeptUntilItIsRefused) {
  const auto weights = store()->open("w.bin");
  const std::string resolve = "/org/m/resolve/" + kCommit + "/w.bin";
  EXPECT_EQ(text_of(*weights), "0123456789");
  EXPECT_EQ(text_of(*weights), "0123456789");
  EXPECT_EQ(asked(resolve), 1);
  ++signature_;
  EXPECT_EQ(text_of(*weights), "0123456789");
  EXPECT_EQ(text_of(*weights), "0123456789");
  EXPECT_EQ(asked(resolve), 2);
}

TEST_F(Hub, ThreadsShareAnAddress) {
  const auto weights = store()->open("w.bin");
  std::string text(5, '\0');
  std::vector<ReadRange> ranges;
  for (std::size_t i = 0; i < text.size(); ++i)
    ranges.push_back({2 * i, std::as_writable_bytes(std::span(text)).subspan(i, 1)});
  for (int asked_for = 1; asked_for <= 3; ++asked_for) {
    text.assign(5, '?');
    weights->read_ranges(ranges);
    EXPECT_EQ(text, "02468");
    EXPECT_EQ(asked("/org/m/resolve/" + kCommit + "/w.bin"), asked_for);
    ++signature_;
  }
}

TEST_F(Hub, AddressesThatNeverWorkAreAnError) {
  const auto weights = store()->open("w.bin");
  before_ = [this](const std::string& request) {
    if (!request.starts_with("HEAD")) return std::string();
    return answer_to_head(302, "Location: " + cdn_url("/w?signature=0") + "\r\n");
  };
  const Error error = error_of([&] { (void)text_of(*weights); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_THAT(error.what(), Not(HasSubstr("signature=")));
}

// The caller has made no mistake, and knows the file by another name.
TEST_F(Hub, RedirectsThatLeadNowhereAreTheServersFault) {
  std::string location, from;
  before_ = [&](const std::string& request) {
    if (!request.starts_with(from) || location.empty()) return std::string();
    return answer_to_head(302, "Location: " + location + "\r\n");
  };
  for (const char* where :
       {"https://u:5ecret@h/w", "/5ecret w", "https://h\\@o/5ecret", "ftp://h/w"}) {
    for (const char* first : {"HEAD /org/m/resolve", "GET /cached", "GET /api"}) {
      location.clear();
      from = first;
      const auto model = store();
      if (from != "GET /api") (void)model->exists("config.json");
      location = where;
      const Error error = error_of([&] { (void)text_of(*model->open("config.json")); });
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << where;
      EXPECT_THAT(error.path(), testing::StartsWith("hf://org/m")) << where;
      EXPECT_THAT(error.what(), HasSubstr("asking http://127.0.0.1:"));
      EXPECT_THAT(error.what(), Not(HasSubstr("5ecret")));
    }
  }
}

TEST_F(Hub, OtherBytesThanThoseThatWereListedAreRefused) {
  const auto weights = store()->open("w.bin");
  tag_ = "sha-of-x";
  EXPECT_EQ(code_of([&] { (void)text_of(*weights); }), ErrorCode::conflict);
  tag_ = "sha-of-w";
  bytes_ = "01234567890";
  EXPECT_EQ(code_of([&] { (void)text_of(*weights); }), ErrorCode::corrupt);
}

// Whatever its form, a link to the next page is one.
TEST_F(Hub, EveryLinkToANextPageIsFollowed) {
  const std::string next = "<https://mirrored.example/api?cursor=1>; ";
  for (const std::string& headers :
       {"Link: " + next + "rel=\"next\"\r\n", "Link: " + next + "rel=next\r\n",
        "Link: " + next + "title=\"a, b\"; Rel=\"Next\"\r\n",
        "Link: " + next + "rel=\"last next\", </a>; rel=prev\r\n",
        "Link: " + next + "rel=\"next\"\r\nLink: </style.css>; rel=\"preload\"\r\n",
        "Link: </style.css>; rel=preload\r\nlink: " + next + "rel=next\r\n"}) {
    before_ = [&](const std::string& request) {
      const std::string target = target_of(request);
      if (target.find("/tree/") == std::string::npos) return std::string();
      const bool is_first = target.find("cursor=1") == std::string::npos;
      return http_answer(200,
                         is_first ? R"([{"type": "file", "path": "a", "oid": "g", "size": 2}])"
                                  : R"([{"type": "file", "path": "b", "oid": "g", "size": 2}])",
                         is_first ? headers : "");
    };
    EXPECT_EQ(store()->list().size(), 2U) << headers;
  }
}

TEST_F(Hub, ALinkThatCannotBeReadIsNotTheEnd) {
  before_ = [&](const std::string& request) {
    if (request.find("/tree/") == std::string::npos) return std::string();
    return http_answer(200, "[]", "Link: <http://elsewhere.example/?cursor=1; rel=next\r\n");
  };
  const Error error = error_of([&] { (void)store()->list(); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_EQ(error.path(), "hf://org/m");
}

TEST_F(Hub, APageThatIsNotThereIsNoEnd) {
  for (const char* header : {"X-Error-Code: EntryNotFound", "X-Error-Code: RepoNotFound", "X: y"}) {
    before_ = [&](const std::string& request) {
      const std::string target = target_of(request);
      if (target.find("cursor=1") != std::string::npos)
        return http_answer(404, "", std::string(header) + "\r\n");
      if (target.find("/tree/") == std::string::npos) return std::string();
      return http_answer(200, tree_, "Link: <?cursor=1>; rel=next\r\n");
    };
    const Error error = error_of([&] { (void)store()->list(); });
    EXPECT_EQ(error.code(), ErrorCode::io) << header;
    EXPECT_EQ(error.path(), "hf://org/m");
    EXPECT_EQ(code_of([&] { (void)store()->exists("w.bin"); }), ErrorCode::io) << header;
  }
}

TEST_F(Hub, ListsOfOtherDirectoriesAreRefused) {
  std::string found = "sub/x";
  before_ = [&](const std::string& request) {
    if (request.find("/tree/") == std::string::npos) return std::string();
    return http_answer(200,
                       R"([{"type": "file", "oid": "g", "size": 2, "path": ")" + found + "\"}]");
  };
  EXPECT_EQ(store()->list("sub").size(), 1U);
  found = "sub";
  EXPECT_TRUE(store()->list("sub").empty());
  found = "other/x";
  EXPECT_EQ(code_of([&] { (void)store()->list("sub"); }), ErrorCode::corrupt);
}

TEST_F(Hub, PagesCannotHaveNoEnd) {
  before_ = [&](const std::string& request) {
    if (request.find("/tree/") == std::string::npos) return std::string();
    return http_answer(200, "[]", "Link: <http://elsewhere.example/?cursor=1>; rel=\"next\"\r\n");
  };
  EXPECT_EQ(code_of([&] { (void)store()->list_level(); }), ErrorCode::corrupt);
}

TEST_F(Hub, ErrorsSayWhatToDoAndNeverTheToken) {
  const std::map<std::string, std::pair<ErrorCode, std::string>> told = {
      {"X-Error-Code: RepoNotFound", {ErrorCode::not_found, "token of HF_TOKEN may not read it"}},
      {"X-Error-Code: RevisionNotFound", {ErrorCode::not_found, "has no revision 'main'"}},
      {"X-Error-Code: GatedRepo", {ErrorCode::io, "/org/m; the account of the token of HF_TOKEN"}},
      {"X-Error-Code: hf_secret", {ErrorCode::io, "refuses the token of HF_TOKEN"}},
      {"X-Error-Message: hf_secret", {ErrorCode::io, "refuses the token of HF_TOKEN"}}};
  for (const auto& [header, expected] : told) {
    before_ = [line = header + "\r\n"](const std::string&) {
      return http_answer(401, "hf_secret", line);
    };
    const Error error = error_of([&] { (void)store()->list_level(); });
    EXPECT_THAT(error.message(), HasSubstr(expected.second)) << header;
    EXPECT_EQ(error.code(), expected.first) << header;
    EXPECT_EQ(error.path(), "hf://org/m");
    EXPECT_THAT(error.what(), Not(HasSubstr(kToken)));
  }
}

// Whatever a server repeats of a request, and wherever.
TEST_F(Hub, NoErrorRepeatsWhatAServerSays) {
  const std::string secret = std::string(kToken) + "5ignature";
  const auto echo = [&](int status) {
    return "HTTP/1.1 " + std::to_string(status) + " " + secret + "\r\nContent-Length: 0\r\n" +
           "X-Request-Id: " + secret + "\r\nX-Error-Code: " + secret + "\r\n\r\n";
  };
  const std::string body = "<Error><Code>" + secret + "</Code><Message>" + secret + "</Message>";
  for (const char* first : {"GET /api/models/org/m/rev", "GET /api/models/org/m/tree",
                            "HEAD /org/m/resolve", "HEAD /cached", "GET /cached"}) {
    for (const std::string& answer :
         {echo(418), echo(404), http_answer(403, body), http_answer(418, body),
          http_answer(418, "", "X-Error-Code: secretsecret\r\n"),
          http_answer(206, "{}", "Content-Encoding: " + secret + "\r\n"),
          answer_to_head(302, "Location: http://127.0.0.1:1/" + secret + "\r\n")}) {
      before_ = [&](const std::string& request) {
        if (!request.starts_with(first)) return std::string();
        const bool is_head = request.starts_with("HEAD");
        return is_head ? answer.substr(0, answer.find("\r\n\r\n") + 4) : answer;
      };
      const Error error = error_of([&] { (void)text_of(*store()->open("config.json")); });
      EXPECT_THAT(error.path(), testing::StartsWith("hf://org/m")) << first << answer;
      EXPECT_THAT(error.what(), Not(HasSubstr("secret"))) << first << answer;
      EXPECT_THAT(error.what(), Not(HasSubstr("5ignature"))) << first << answer;
    }
  }
}

TEST_F(Hub, NobodyWritesThere) {
  const auto model = store();
  for (const auto& write : std::vector<std::function<void()>>{
           [&] { put(*model, "x", {}, IfExists::replace); }, [&] { model->remove("x"); },
           [&] { model->require_writable("x", true); }, [&] { (void)model->share("x"); },
           [&] { (void)model->new_directory("x", IfExists::fail); }}) {
    EXPECT_EQ(code_of(write), ErrorCode::unsupported);
  }
  EXPECT_TRUE(model->is_read_only());
  EXPECT_EQ(code_of([&] { (void)model->open("../x"); }), ErrorCode::unsafe);
  EXPECT_EQ(code_of([&] { (void)store("hf://org/m/a//b"); }), ErrorCode::unsafe);
  EXPECT_EQ(asked("/api/models/org/m/revision/main"), 0);
}

}  // namespace
}  // namespace tessera::hub
