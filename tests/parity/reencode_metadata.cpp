// reencode_metadata IN OUT: decodes a `.metadata` file and writes it again, for PyTorch to read.
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/error.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  std::ifstream in(argv[1], std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(in), {});
  try {
    const auto metadata = tessera::dcp::decode(std::as_bytes(std::span(bytes)));
    const auto encoded = tessera::dcp::encode(metadata);
    std::ofstream out(argv[2], std::ios::binary);
    out.write(reinterpret_cast<const char*>(encoded.data()),
              static_cast<std::streamsize>(encoded.size()));
    return out.flush() ? 0 : 1;
  } catch (const tessera::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
