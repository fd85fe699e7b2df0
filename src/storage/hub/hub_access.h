// Which Hub, and whose token: from where huggingface_hub looks.
#pragma once

#include <string>

#include "storage/http/uri.h"

namespace tessera::hub {

struct HubAccess {
  Uri endpoint;                 // without a slash at its end
  std::string token = {};       // never in a message; empty: there is none
  std::string token_from = {};  // "HF_TOKEN", or the file's path

  // Whether `url` is of the endpoint's own scheme, host and port. Nobody else gets the token.
  [[nodiscard]] bool is_own(const std::string& url) const;
};

// The endpoint is that of HF_ENDPOINT, else the public one. The token is that of HF_TOKEN, else of
// HUGGING_FACE_HUB_TOKEN, else of the file HF_TOKEN_PATH, else of the file `token` in HF_HOME, in
// XDG_CACHE_HOME/huggingface or in ~/.cache/huggingface; these may name variables as $NAME. With
// HF_HUB_DISABLE_IMPLICIT_TOKEN there is none. Throws `invalid_argument` for an endpoint that is no
// address of a web server, `io` for a token file that cannot be read, and `unsupported` with
// HF_HUB_OFFLINE or, where that is not set, TRANSFORMERS_OFFLINE.
[[nodiscard]] HubAccess hub_access();

}  // namespace tessera::hub
