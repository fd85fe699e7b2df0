// hf://[TYPE/]ORG/NAME[@REVISION][/PATH], as fsspec and huggingface_hub write places on the Hugging
// Face Hub.
#pragma once

#include <string>
#include <string_view>

namespace tessera::hub {

struct HubUrl {
  std::string root;             // the URL up to its path, as it was written: "hf://org/model@v1"
  std::string type = "models";  // as the Hub's API spells it: "models", "datasets" or "spaces"
  std::string repo;             // "org/model"
  std::string revision =
      "main";  // a branch, a tag or a commit, decoded; "main" where none was written
  // As it is, without a slash at its end: '?', '#' and '%' are characters of names. Empty: all of
  // the repository.
  std::string path;
  bool names_directory = false;  // by a slash at its end, or by having no path
};

// TYPE is one of HubUrl's, and models need none. A slash in REVISION is written %2F, but for
// refs/pr/N and refs/convert/NAME. Throws `invalid_argument` that says how such a URL is written,
// and `unsupported` for buckets and kernels of the Hub.
[[nodiscard]] HubUrl parse_hub_url(std::string_view url);
// The directory that the path is in; a repository's is itself.
[[nodiscard]] HubUrl above(const HubUrl& url);
[[nodiscard]] std::string to_string(const HubUrl& url);

}  // namespace tessera::hub
