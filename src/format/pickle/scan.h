// What a pickle would import and call in Python, judged by the names that were looked at
// (vetted.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera::pickle {

enum class Verdict : std::uint8_t { vetted, unknown, dangerous };  // in the order of concern

struct Finding {
  std::string name;  // "module.name"; protocols below 3 give it as Python 3 does
  Verdict verdict = Verdict::vetted;
  std::string how;  // why a vetted name counts as another; empty otherwise
};

// A pickle inside of one: an argument of what takes pickles.
struct Nested {
  std::vector<std::byte> bytes;
  std::string taker;      // "module.name" of what is called with it
  bool of_torch = false;  // as torch.load takes it; else a bare pickle
  bool must = true;       // what is called takes nothing else
};

struct Found {
  std::vector<Finding> names;  // each once, in order of first use
  std::vector<Nested> nested;
  // What the reader refuses although Python may go on with it: everything behind it was looked at
  // all the same. The last one may be what ended the scan: the end of the bytes, a limit.
  std::vector<Error> problems;
  std::size_t consumed = 0;  // bytes up to and with the STOP opcode; 0: there was none
  bool cut = false;          // there was none because the bytes end
  bool limited = false;      // there was none because of a limit
  bool calls = false;        // something was called, made or changed
};

// Reads the first pickle in `bytes` by the machine that opens files, and tells what it uses. A
// getattr(CLASS, 'NAME') of a known member (names.h) is the name CLASS.NAME. `is_value`: names of
// `module` that are only mentioned, which the caller knows (dtypes). Never throws for what the
// bytes are: that is a problem.
[[nodiscard]] Found scan(
    ByteView bytes,
    const std::function<bool(const std::string& module, const std::string& name)>& is_value = {});

// Whether the bytes end before the first pickle in them does, by the lengths of its opcodes alone:
// where it does, scan() says so, or refuses the pickle before.
[[nodiscard]] bool is_cut(ByteView bytes);

// The names alone.
[[nodiscard]] std::vector<std::string> globals(ByteView bytes);

}  // namespace tessera::pickle
