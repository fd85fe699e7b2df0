// Loads a checkpoint into random layouts, saves it from others, and writes down what arrived:
//
//   layouts CHECKPOINT SEED OUT SAVED
//
// OUT gets the elements of every piece, row-major, one after another; standard output says in a
// line of JSON each what they are. Memory around the pieces must stay as it was. SAVED becomes a
// distributed checkpoint of the same tensors, saved by as many ranks, each holding other pieces.
// Exit 3 when the library refuses (its message on stderr), 4 when memory outside of a piece
// changed.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <numeric>
#include <random>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::byte kUntouched{0xa5};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t below(std::int64_t limit) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(limit));
  }
  bool once_in(std::int64_t times) { return below(times) == 0; }

 private:
  std::mt19937_64 engine_;
};

// Memory for a piece: its dimensions in any order, with gaps between elements and around them.
Piece with_memory(Slice slice, DType dtype, Random& random) {
  Piece piece;
  piece.slice = std::move(slice);
  piece.storage = std::make_shared<Storage>();
  std::int64_t elements = numel(piece.slice);
  if (const auto* box = std::get_if<Box>(&piece.slice); box != nullptr && !random.once_in(3)) {
    std::vector<std::size_t> order(box->sizes.size());
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1],
                order[static_cast<std::size_t>(random.below(static_cast<std::int64_t>(i)))]);
    }
    piece.strides.resize(order.size());
    std::int64_t stride = 1 + random.below(2);
    for (const std::size_t d : order) {
      piece.strides[d] = stride;
      stride = stride * std::max<std::int64_t>(box->sizes[d], 1) + random.below(2);
    }
    elements = stride + 1;
  }
  piece.storage_offset = random.below(3);
  const auto bytes =
      static_cast<std::size_t>(piece.storage_offset + elements + random.below(3)) * size_of(dtype);
  const auto memory = std::make_shared<std::vector<std::byte>>(bytes, kUntouched);
  piece.storage->data = memory->data();
  piece.storage->size = bytes;
  piece.storage->owner = memory;
  piece.storage->dtype = dtype;
  return piece;
}

Slice random_slice(const Shape& shape, Random& random) {
  if (random.once_in(4)) {
    const std::int64_t count = numel(shape);
    const std::int64_t begin = random.below(count + 1);
    return FlatRange{begin, begin + random.below(count - begin + 1)};
  }
  Box box = whole(shape);
  if (random.once_in(3)) return box;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    box.offsets[d] = random.below(shape[d] + 1);
    box.sizes[d] = random.below(shape[d] - box.offsets[d] + 1);
  }
  return box;
}

// Boxes that cover the shape once: a cut in each dimension.
std::vector<Box> random_grid(const Shape& shape, Random& random) {
  std::vector<Box> boxes = {whole(shape)};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const std::int64_t cut = random.below(shape[d] + 1);
    if (cut == 0 || cut == shape[d]) continue;
    for (std::size_t i = 0, count = boxes.size(); i < count; ++i) {
      Box rest = boxes[i];
      boxes[i].sizes[d] = cut;
      rest.offsets[d] = cut;
      rest.sizes[d] = shape[d] - cut;
      boxes.push_back(std::move(rest));
    }
  }
  return boxes;
}

DType random_dtype(DType stored, Random& random) {
  constexpr DType kTypes[] = {DType::float32, DType::float64, DType::bfloat16, DType::float16};
  const bool floating = info(stored).floating && size_of(stored) > 1;
  if (!floating || random.once_in(2)) return stored;
  return kTypes[random.below(4)];
}

// Position in memory of each element of a piece, row-major.
std::vector<std::int64_t> positions(const Piece& piece) {
  const std::int64_t count = numel(piece.slice);
  const auto* box = std::get_if<Box>(&piece.slice);
  const Shape sizes = box != nullptr ? box->sizes : Shape{count};
  const Shape strides = piece.strides.empty() ? contiguous_strides(sizes) : piece.strides;
  std::vector<std::int64_t> at(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i;
    std::int64_t position = piece.storage_offset;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      position += rest % sizes[d] * strides[d];
      rest /= sizes[d];
    }
    at[static_cast<std::size_t>(i)] = position;
  }
  return at;
}

// The elements of a piece; ends the program when anything else in its memory has changed.
std::vector<std::byte> elements_of(const Piece& piece, DType dtype) {
  const std::size_t size = size_of(dtype);
  std::vector<std::byte> elements;
  std::vector<bool> inside(piece.storage->size, false);
  for (const std::int64_t position : positions(piece)) {
    const auto first = static_cast<std::size_t>(position) * size;
    for (std::size_t i = first; i < first + size; ++i) inside[i] = true;
    elements.insert(elements.end(), piece.storage->data + first,
                    piece.storage->data + first + size);
  }
  for (std::size_t i = 0; i < inside.size(); ++i) {
    if (inside[i] || piece.storage->data[i] == kUntouched) continue;
    std::fprintf(stderr, "byte %zu outside of a piece was written\n", i);
    std::exit(4);
  }
  return elements;
}

nlohmann::json described(const std::string& name, const Tensor& tensor, const Piece& piece) {
  nlohmann::json line = {{"name", name}, {"dtype", to_string(tensor.dtype)}};
  if (const auto* box = std::get_if<Box>(&piece.slice)) {
    line["offsets"] = box->offsets;
    line["sizes"] = box->sizes;
  } else {
    const auto& range = std::get<FlatRange>(piece.slice);
    line["range"] = {range.begin, range.end};
  }
  return line;
}

class Job {
 public:
  Job(char** arguments)
      : source_(arguments[1]),
        seed_(std::stoull(arguments[2])),
        out_(arguments[3], std::ios::binary),
        saved_(arguments[4]),
        checkpoint_(Checkpoint::open(source_)) {}

  void run() {
    Random random(seed_);
    const auto ranks = static_cast<int>(1 + random.below(4));
    run_ranks(ranks, [this](Group& group) { load_pieces(group); });
    run_ranks(ranks, [this](Group& group) { save_pieces(group); });
  }

 private:
  // All tensors by name, with pieces that `pieces_of` makes.
  template <typename PiecesOf>
  Value tree_of(PiecesOf pieces_of) const {
    Value tree = Value::dict();
    for (const Leaf& leaf : checkpoint_.leaves) {
      if (!leaf.value.is(Value::Kind::tensor)) continue;
      Tensor tensor;
      tensor.dtype = leaf.value.as_tensor().dtype;
      tensor.shape = leaf.value.as_tensor().shape;
      pieces_of(tensor);
      tree.set_item(Value(leaf.name), Value(std::move(tensor)));
    }
    return tree;
  }

  void load_pieces(Group& group) {
    Random random(seed_ * 31 + static_cast<std::uint64_t>(group.rank()));
    Value tree = tree_of([&random](Tensor& tensor) {
      tensor.dtype = random_dtype(tensor.dtype, random);
      for (std::int64_t count = random.below(4); count > 0; --count) {
        tensor.pieces.push_back(
            with_memory(random_slice(tensor.shape, random), tensor.dtype, random));
      }
    });
    load(tree, source_, group);
    const std::lock_guard lock(mutex_);
    for (const auto& [name, value] : tree.pairs()) {
      const Tensor& tensor = value.as_tensor();
      for (const Piece& piece : tensor.pieces) {
        const std::vector<std::byte> elements = elements_of(piece, tensor.dtype);
        out_.write(reinterpret_cast<const char*>(elements.data()),
                   static_cast<std::streamsize>(elements.size()));
        std::printf("%s\n", described(name.as_string(), tensor, piece).dump().c_str());
      }
    }
  }

  // Every rank draws the same grids and takes the boxes that fall to it.
  void save_pieces(Group& group) {
    Random shared(seed_ * 17);
    Random mine(seed_ * 37 + static_cast<std::uint64_t>(group.rank()));
    Value tree = tree_of([&](Tensor& tensor) {
      tensor.sharded = !tensor.shape.empty() && numel(tensor.shape) > 0 && !shared.once_in(4);
      if (!tensor.sharded) {
        tensor.pieces.push_back(with_memory(whole(tensor.shape), tensor.dtype, mine));
        return;
      }
      for (const Box& box : random_grid(tensor.shape, shared)) {
        if (shared.below(group.size()) != group.rank()) continue;
        tensor.pieces.push_back(with_memory(box, tensor.dtype, mine));
      }
    });
    load(tree, source_, group);
    save(tree, saved_, group);
  }

  std::string source_;
  std::uint64_t seed_;
  std::ofstream out_;
  std::string saved_;
  Checkpoint checkpoint_;
  std::mutex mutex_;
};

}  // namespace
}  // namespace tessera

int main(int count, char** arguments) {
  if (count != 5) {
    std::fprintf(stderr, "usage: layouts CHECKPOINT SEED OUT SAVED\n");
    return 2;
  }
  try {
    tessera::Job(arguments).run();
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
  return 0;
}
