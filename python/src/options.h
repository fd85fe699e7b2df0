// The options of a call, which Python gives as a dict of what is not the default.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/layout.h"
#include "tessera/open_options.h"
#include "text.h"

namespace tessera::python {

class Options {
 public:
  explicit Options(nb::dict given) : given_(std::move(given)) {}

  void get(const char* name, bool& value) const {
    if (const auto found = find(name)) value = nb::cast<bool>(*found);
  }
  void get(const char* name, int& value) const {
    if (const auto found = find(name)) value = number_of(name, *found);
  }
  void get(const char* name, std::uint64_t& value) const {
    if (const auto found = find(name)) value = nb::cast<std::uint64_t>(*found);
  }
  void get(const char* name, std::string& value) const {
    if (const auto found = find(name)) value = text_of(*found);
  }
  void get(const char* name, std::vector<std::string>& value) const {
    const auto found = find(name);
    if (!found) return;
    for (const nb::handle text : *found) value.push_back(text_of(text));
  }
  void get(const char* name, std::optional<bool>& value) const {
    if (const auto found = find(name)) value = nb::cast<bool>(*found);
  }
  void get(const char* name, std::optional<int>& value) const {
    if (const auto found = find(name)) value = number_of(name, *found);
  }
  void get(const char* name, std::optional<DType>& value) const {
    if (const auto found = find(name)) value = dtype_from_torch(text_of(*found));
  }

 private:
  static int number_of(const char* name, const nb::object& given) {
    int number = 0;
    if (nb::try_cast<int>(given, number)) return number;
    throw Error(ErrorCode::invalid_argument,
                std::string(name) + " is " + text_of(nb::repr(given)) + ", which is no int");
  }

  // None: not given.
  [[nodiscard]] std::optional<nb::object> find(const char* name) const {
    if (!given_.contains(name)) return std::nullopt;
    const nb::object found = given_[name];
    return found.is_none() ? std::nullopt : std::optional(found);
  }

  nb::dict given_;
};

// How a checkpoint is opened, by the names of `tessera.open`; what else is given is not looked at.
[[nodiscard]] inline OpenOptions open_options(const Options& given) {
  OpenOptions options;
  given.get("header_limit", options.header_limit);
  given.get("part", options.part);
  given.get("raw", options.raw);
  given.get("partial", options.partial);
  given.get("ignore_index", options.ignore_index);
  given.get("rank", options.rank);
  if (options.rank && *options.rank < 0)
    throw Error(ErrorCode::invalid_argument, "rank is " + std::to_string(*options.rank));
  given.get("accept", options.accept);
  return options;
}

}  // namespace tessera::python
