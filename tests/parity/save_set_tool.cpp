// Saves the tensors of a checkpoint as a set of safetensors, as N ranks that each hold some rows.
//   save_set_tool SOURCE TARGET RANKS MAX_SIZE [NAME=NUMBER ...]
// With numbers they say which tensor goes into which file, and MAX_SIZE is 0. The ranks are
// threads.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>

#include "layout/boxes.h"
#include "tessera/checkpoint.h"

namespace {

using namespace tessera;  // NOLINT(google-build-using-namespace)

// The rank's rows of a whole tensor: a part of its memory. A scalar is everybody's.
Value rows_of(Tensor tensor, int rank, int ranks) {
  const Placement placement{.parts = tensor.shape.empty() ? 1 : ranks};
  const Piece all = tensor.pieces.at(0);
  const Shape strides = contiguous_strides(tensor.shape);
  tensor.pieces.clear();
  for (Box& box : boxes_of_part(placement, tensor.shape, part_of_rank(placement, rank))) {
    Piece piece = all;
    if (!tensor.shape.empty()) piece.storage_offset += box.offsets[0] * strides[0];
    piece.strides = strides;
    piece.slice = std::move(box);
    tensor.pieces.push_back(std::move(piece));
  }
  tensor.sharded = placement.parts > 1;
  tensor.placement = placement;
  return Value(std::move(tensor));
}

void save_rows(const std::string& source, const std::string& target, const SafetensorsSet& set,
               Group& group) {
  Value tree = Value::dict();
  for (const auto& [name, tensor] : Checkpoint::open(source).load().pairs())
    tree.set_item(name, rows_of(tensor.as_tensor(), group.rank(), group.size()));
  SaveOptions options;
  options.kind = CheckpointKind::safetensors;
  options.safetensors = set;
  save(tree, target, options, group);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "usage: save_set_tool SOURCE TARGET RANKS MAX_SIZE [NAME=NUMBER ...]\n");
    return 2;
  }
  try {
    SafetensorsSet set;
    set.max_size = std::strtoull(argv[4], nullptr, 10);
    for (int i = 5; i < argc; ++i) {
      const std::string word = argv[i];
      const std::size_t equals = word.rfind('=');
      set.file_of[word.substr(0, equals)] = std::atoi(word.c_str() + equals + 1);
    }
    run_ranks(std::atoi(argv[3]), [&](Group& group) { save_rows(argv[1], argv[2], set, group); });
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "save_set_tool: %s\n", error.what());
    return 1;
  }
}
