// A repository of the Hugging Face Hub at one commit: what is in it, and where the bytes are.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "storage/http/client.h"
#include "storage/hub/hub_access.h"
#include "storage/hub/hub_answers.h"
#include "storage/hub/hub_url.h"
#include "tessera/error.h"

namespace tessera::hub {

// What `ask` gives, which asks a server. Its error is told of `path` and of the server alone: the
// rest of an address that a server has named may be secret.
[[noreturn]] void throw_of_place(const Error& error, const std::string& path);
template <typename Ask>
auto asked_for(const std::string& path, const Ask& ask) -> decltype(ask()) {
  try {
    return ask();
  } catch (const Error& error) {
    throw_of_place(error, path);
  }
}

// Threads may call all members at once. The first that needs the commit asks for it, and it stays:
// a push changes nothing that a repository tells. Throws `not_found` for what is absent or hidden,
// `io` for what the Hub refuses, each with what to do; the token is in no message.
class HubRepo {
 public:
  HubRepo(HubUrl url, HubAccess access, std::shared_ptr<HttpClient> client);

  [[nodiscard]] HttpClient& client() const { return *client_; }
  // What is directly in a directory, by path; "" is the root. Asked for once. Empty: there is no
  // such directory.
  [[nodiscard]] const std::vector<HubEntry>& level(const std::string& directory) const;
  // All that is in a directory and below, by path.
  [[nodiscard]] std::vector<HubEntry> tree(const std::string& directory) const;
  // The address of a file's bytes: of the Hub itself, or of a server to which it sends readers,
  // often signed for some minutes. Throws `conflict` if the Hub means another file by now.
  [[nodiscard]] std::string address_of(const HubEntry& file) const;
  // A request for `url`, with the token if that is the Hub's own.
  [[nodiscard]] HttpRequest request(const std::string& method, const std::string& url) const;
  // What tells a content of this repository from all others, anywhere.
  [[nodiscard]] std::string identity_of(const HubEntry& file) const;

 private:
  struct Refusal {
    ErrorCode code;
    std::string what;  // and what to do
  };

  [[nodiscard]] std::string commit() const;
  [[nodiscard]] std::string api(const std::string& rest) const;
  // `path`: how errors call what is asked for.
  [[nodiscard]] HttpResponse ask(const std::string& url, std::string_view query,
                                 const std::string& path) const;
  [[nodiscard]] std::vector<HubEntry> listed(const std::string& directory, bool is_recursive) const;
  [[nodiscard]] bool is_known_absent(const std::string& directory) const;
  void require_same_file(const HubEntry& file, const HttpResponse& response) const;
  [[noreturn]] void refuse(const HttpResponse& response, const std::string& path) const;
  [[nodiscard]] Refusal refusal_of(const HttpResponse& response) const;
  [[nodiscard]] std::string advice_for_hidden() const;

  const HubUrl url_;
  const HubAccess access_;
  const std::shared_ptr<HttpClient> client_;
  mutable SlowMutex asking_commit_;
  mutable std::string commit_;  // guarded by asking_commit_; empty: not asked for yet
  mutable SlowMutex asking_level_;
  mutable std::map<std::string, std::vector<HubEntry>> levels_;  // guarded by asking_level_, grows
};

}  // namespace tessera::hub
