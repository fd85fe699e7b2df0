// Scans pickles from its input and says what it found, for fuzz_pickles.py: a number of four bytes
// and a pickle, again and again. Answers each with the number of bytes that follow and: a byte of
// flags (1: problems, 2: an unknown name or a dangerous one, 4: the pickle ended, 8: problems with
// frames), and each name behind its length of two bytes.
#include <cstdio>
#include <string>
#include <vector>

#include "format/pickle/scan.h"

namespace {

using tessera::pickle::Found;
using tessera::pickle::Verdict;

std::string answer(const Found& found) {
  int flags = (found.problems.empty() ? 0 : 1) | (found.consumed == 0 ? 0 : 4);
  for (const auto& problem : found.problems)
    if (std::string(problem.what()).find("frame") != std::string::npos) flags |= 8;
  std::string names;
  for (const auto& finding : found.names) {
    if (finding.verdict != Verdict::vetted) flags |= 2;
    const std::string name = finding.name.substr(0, 0xffff);
    names += static_cast<char>(name.size() & 0xff);
    names += static_cast<char>(name.size() >> 8);
    names += name;
  }
  return static_cast<char>(flags) + names;
}

bool read_exactly(void* to, std::size_t size) {
  return std::fread(to, 1, size, stdin) == size;
}

}  // namespace

int main() {
  std::uint32_t size = 0;
  std::vector<std::byte> bytes;
  while (read_exactly(&size, sizeof size)) {
    bytes.resize(size);
    if (!read_exactly(bytes.data(), size)) return 1;
    if (size == 0) {  // an answer to all so far is wanted
      std::fflush(stdout);
      continue;
    }
    const std::string text = answer(tessera::pickle::scan(bytes));
    const auto length = static_cast<std::uint32_t>(text.size());
    std::fwrite(&length, sizeof length, 1, stdout);
    std::fwrite(text.data(), 1, text.size(), stdout);
  }
  return 0;
}
