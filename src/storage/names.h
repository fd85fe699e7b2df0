// Rules that the names of objects obey in every store.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// Throws `unsafe` for a name that is empty, absolute, has an empty, "." or ".." part, or a NUL
// byte.
void require_safe_name(std::string_view name, const std::string& store);

// "s3" of s3://...; empty: a path. "./s3://b" is one.
[[nodiscard]] std::string_view scheme_of(std::string_view path);
// An address of http or https, which may have a query with a signature in it.
[[nodiscard]] bool is_web(std::string_view path);

// What is put behind a directory's name, with an attempt (base/random_id.h) after it, for what
// takes its place and for what had it.
inline constexpr std::string_view kWorkMark = "-tmp-", kOldMark = ".old-";

}  // namespace tessera
