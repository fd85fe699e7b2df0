#include "storage/hub/hub_repo.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/text.h"
#include "storage/http/pages.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera::hub {
namespace {

// "model" of "models", as errors call it.
std::string noun_of(const HubUrl& url) {
  return url.type.substr(0, url.type.size() - 1);
}

// Of a repository's own page, and of its files: models are at the top of the Hub.
std::string page_of(const HubUrl& url) {
  return (url.type == "models" ? "" : url.type + "/") + url.repo;
}

// An ETag without its quotes and its weakness.
std::string plain_tag(std::string tag) {
  if (tag.starts_with("W/")) tag.erase(0, 2);
  std::erase(tag, '"');
  return tag;
}

void sort_by_path(std::vector<HubEntry>& entries) {
  std::ranges::sort(entries, {}, &HubEntry::path);
  const auto same = [](const HubEntry& a, const HubEntry& b) { return a.path == b.path; };
  entries.erase(std::unique(entries.begin(), entries.end(), same), entries.end());
}

// Of one behind the first, whatever the Hub calls its absence: the directory is there.
void require_page(const HttpResponse& response, const std::string& path) {
  if (response.status == 200) return;
  throw Error(ErrorCode::io, "the Hugging Face Hub answers with " +
                                 std::to_string(response.status) +
                                 " for a further page of its list of files")
      .at_path(path);
}

void require_below(const std::string& below, const std::vector<HubEntry>& page) {
  if (std::ranges::all_of(page, [&](const HubEntry& e) { return e.path.starts_with(below); }))
    return;
  throw Error(ErrorCode::corrupt,
              "the Hugging Face Hub lists a file that is not in the directory asked for");
}

bool is_absent_entry(const HttpResponse& response) {
  return response.status == 404 && response.header("x-error-code") == "EntryNotFound";
}

}  // namespace

void throw_of_place(const Error& error, const std::string& path) {
  Error told(error.code(), error.message());
  if (!error.path().empty()) told.while_doing("asking " + std::string(server_of(error.path())));
  throw told.at_path(path);
}

HubRepo::HubRepo(HubUrl url, HubAccess access, std::shared_ptr<HttpClient> client)
    : url_(std::move(url)), access_(std::move(access)), client_(std::move(client)) {}

HttpRequest HubRepo::request(const std::string& method, const std::string& url) const {
  HttpRequest request{.method = method, .url = url};
  if (!access_.token.empty() && access_.is_own(url))
    request.headers.emplace_back("Authorization", "Bearer " + access_.token);
  return request;
}

std::string HubRepo::api(const std::string& rest) const {
  return to_string(access_.endpoint) + "/api/" + url_.type + "/" + url_.repo + rest;
}

HttpResponse HubRepo::ask(const std::string& url, std::string_view query,
                          const std::string& path) const {
  return asked_for(path, [&] {
    return send_following(*client_, url + "?" + std::string(query),
                          [this](const std::string& at) { return request("GET", at); });
  });
}

std::string HubRepo::commit() const {
  const std::lock_guard lock(asking_commit_);
  if (!commit_.empty()) return commit_;
  // Of all that the Hub knows of a model only its commit: its list of files may be long.
  const std::string url = api("/revision/" + percent_encoded(url_.revision, false));
  const HttpResponse response = ask(url, "expand=sha", url_.root);
  if (response.status != 200) refuse(response, url_.root);
  std::string found;
  try {
    found = commit_in(response.text());
  } catch (Error& error) {
    throw error.at_path(url_.root);
  }
  const NoFork moment;
  commit_ = std::move(found);
  return commit_;
}

std::vector<HubEntry> HubRepo::listed(const std::string& directory, bool is_recursive) const {
  const std::string below = directory.empty() ? "" : directory + "/";
  const std::string path = url_.root + (directory.empty() ? "" : "/" + directory);
  const std::string url =
      api("/tree/" + commit() + (directory.empty() ? "" : "/" + percent_encoded(directory, true)));
  std::vector<HubEntry> found;
  Pages pages("files", path);
  // The next page is asked of the same address: a mirror tells links to the Hub that it mirrors.
  bool is_first = true;
  for (std::string query = is_recursive ? "recursive=true" : "recursive=false"; !query.empty();) {
    const HttpResponse response = ask(url, query, path);
    if (is_first && is_absent_entry(response)) return {};
    if (!is_first) require_page(response, path);
    if (response.status != 200) refuse(response, path);
    is_first = false;
    try {
      std::vector<HubEntry> page = entries_in(response.text());
      query = next_query(response.header("link"));
      if (!query.empty()) pages.turn(query, page.size());
      // A file is told where a directory was asked for.
      std::erase_if(page, [&](const HubEntry& entry) { return entry.path == directory; });
      require_below(below, page);
      found.insert(found.end(), page.begin(), page.end());
    } catch (Error& error) {
      throw error.at_path(path);
    }
  }
  sort_by_path(found);
  return found;
}

std::vector<HubEntry> HubRepo::tree(const std::string& directory) const {
  return listed(directory, true);
}

// What the directory above has told already saves asking.
bool HubRepo::is_known_absent(const std::string& directory) const {
  if (directory.empty()) return false;
  const std::size_t slash = directory.rfind('/');
  const std::string parent = directory.substr(0, slash == std::string::npos ? 0 : slash);
  const auto known = levels_.find(parent);
  if (known == levels_.end()) return is_known_absent(parent);
  const auto found = std::ranges::lower_bound(known->second, directory, {}, &HubEntry::path);
  return found == known->second.end() || found->path != directory || !found->is_directory;
}

const std::vector<HubEntry>& HubRepo::level(const std::string& directory) const {
  const std::lock_guard lock(asking_level_);
  const auto known = levels_.find(directory);
  if (known != levels_.end()) return known->second;
  std::vector<HubEntry> entries;
  if (!is_known_absent(directory)) entries = listed(directory, false);
  const NoFork moment;
  return levels_.emplace(directory, std::move(entries)).first->second;
}

std::string HubRepo::identity_of(const HubEntry& file) const {
  if (file.content.empty()) return {};
  return api("") + '\0' + file.content;
}

// Whether the Hub means the file that it has listed, as far as it says. Of another kind of digest
// than the tree's a tag tells nothing.
void HubRepo::require_same_file(const HubEntry& file, const HttpResponse& response) const {
  const std::string size = response.header("x-linked-size");
  const std::string tag = plain_tag(response.header("x-linked-etag"));
  const std::string commit = response.header("x-repo-commit");
  const bool is_same = (size.empty() || size == std::to_string(file.size)) &&
                       (tag.size() != file.content.size() || tag == file.content) &&
                       (commit.empty() || commit == this->commit());
  if (is_same) return;
  throw Error(ErrorCode::conflict,
              "the Hugging Face Hub gives another file than the one that it has listed")
      .at_path(url_.root + "/" + file.path);
}

std::string HubRepo::address_of(const HubEntry& file) const {
  const std::string path = url_.root + "/" + file.path;
  std::string url = to_string(access_.endpoint) + "/" + page_of(url_) + "/resolve/" + commit() +
                    "/" + percent_encoded(file.path, true);
  for (int redirects = 0; redirects <= kMostRedirects; ++redirects) {
    const HttpRequest asked = request("HEAD", url);
    const HttpResponse response =
        asked_for(path, [&] { return client_->send([&](int) { return asked; }); });
    require_same_file(file, response);
    const auto target = asked_for(path, [&] { return redirect_of(url, response); });
    if (!target) {
      if (response.status != 200) refuse(response, path);
      return url;
    }
    // What is signed is signed for reading, and nobody else need be asked.
    if (!access_.is_own(*target)) return *target;
    url = *target;
  }
  throw Error(ErrorCode::io, "the Hugging Face Hub sends the request on more than " +
                                 std::to_string(kMostRedirects) + " times")
      .at_path(path);
}

// What somebody can do who is told that there is nothing.
std::string HubRepo::advice_for_hidden() const {
  if (access_.token.empty()) {
    return "or it is private and needs a token: set HF_TOKEN, or log in with hf auth login";
  }
  return "or the token of " + access_.token_from + " may not read it";
}

// What the Hub says is compared and never repeated: it may be the token.
HubRepo::Refusal HubRepo::refusal_of(const HttpResponse& response) const {
  const std::string noun = noun_of(url_), word = response.header("x-error-code");
  if (word == "GatedRepo") {
    const std::string token =
        access_.token.empty()
            ? "set HF_TOKEN to a token of the account that has it"
            : "the account of the token of " + access_.token_from + " does not have it";
    return {ErrorCode::io, "the " + noun + " is gated: ask for access on its page " +
                               to_string(access_.endpoint) + "/" + page_of(url_) + "; " + token};
  }
  if (word == "RevisionNotFound")
    return {ErrorCode::not_found, "the " + noun + " has no revision '" + url_.revision + "'"};
  if (word == "EntryNotFound")
    return {ErrorCode::not_found, "the " + noun + " has no such file at this revision"};
  if (word == "RepoNotFound" || (response.status == 401 && access_.token.empty())) {
    return {ErrorCode::not_found,
            "there is no such " + noun + " on the Hugging Face Hub, " + advice_for_hidden()};
  }
  if (response.status == 401) {
    return {ErrorCode::io, "the Hugging Face Hub refuses the token of " + access_.token_from +
                               ": it may have expired, or is of another Hub"};
  }
  // The one refusal that has no word of its own.
  if (response.header("x-error-message") == "Access to this resource is disabled.")
    return {ErrorCode::io, "the Hugging Face Hub has disabled the " + noun};
  if (response.status == 403) {
    return {ErrorCode::io,
            "the Hugging Face Hub forbids it" +
                (access_.token.empty() ? ": set HF_TOKEN, or log in with hf auth login"
                                       : ": the token of " + access_.token_from +
                                             " lacks the permission to read the " + noun)};
  }
  if (response.status == 429) {
    return {ErrorCode::io, std::string("the Hugging Face Hub answers with 429: it has had too many "
                                       "requests, which it counts for some minutes") +
                               (access_.token.empty() ? "; with a token it allows more" : "")};
  }
  const bool is_absent = is_one_of(response.status, 404, 410);
  return {is_absent ? ErrorCode::not_found : ErrorCode::io,
          "the Hugging Face Hub answers with " + std::to_string(response.status)};
}

void HubRepo::refuse(const HttpResponse& response, const std::string& path) const {
  Refusal refusal = refusal_of(response);
  throw Error(refusal.code, std::move(refusal.what)).at_path(path);
}

}  // namespace tessera::hub
