#include "subjects.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "base/digest.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/reader.h"
#include "tessera/convert.h"
#include "value/render.h"

namespace tessera::corruption {
namespace {

namespace fs = std::filesystem;

Bytes read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  Bytes bytes(text.size());
  std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

Files read_files(const fs::path& path) {
  Files files;
  if (!fs::is_directory(path)) {
    files[path.filename().string()] = std::make_shared<Bytes>(read_file(path));
    return files;
  }
  for (const auto& entry : fs::directory_iterator(path))
    files[entry.path().filename().string()] = std::make_shared<Bytes>(read_file(entry.path()));
  return files;
}

// The places of the bytes of every tensor, in whichever file.
std::vector<Extent> tensor_extents(const Checkpoint& checkpoint) {
  std::vector<Extent> extents;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    for (const Piece& piece : tensor.pieces) {
      const Piece raw = decoded_piece(tensor, piece, leaf.name);
      // A decoded item counts from the item's own first byte.
      const std::uint64_t item =
          piece.storage->encoding == Encoding::raw ? 0 : piece.storage->offset;
      const std::uint64_t begin = item + raw.storage->offset;
      if (raw.storage->size == 0) continue;
      extents.push_back({fs::path(piece.storage->source->name()).filename().string(), begin,
                         begin + raw.storage->size});
    }
  }
  return extents;
}

std::vector<Extent> whole_files(const Files& files) {
  std::vector<Extent> extents;
  for (const auto& [name, bytes] : files) extents.push_back({name, 0, bytes->size()});
  return extents;
}

Subject subject_of(const fs::path& path, bool ours) {
  Subject subject;
  subject.name = path.filename().string();
  subject.ours = ours;
  subject.single_file = !fs::is_directory(path);
  subject.files = read_files(path);
  const Checkpoint checkpoint = open(subject, subject.files);
  const bool digests = ours && checkpoint.kind != CheckpointKind::torch_file;
  subject.extents = digests ? whole_files(subject.files) : tensor_extents(checkpoint);
  if (subject.extents.empty()) throw std::runtime_error(subject.name + " has no tensors");
  subject.content = content_of(checkpoint);
  return subject;
}

// Two ranks' rows of two tensors, larger than a block; elements depend on `generation`.
void save_ours(const std::string& directory, int generation) {
  run_ranks(2, [&](Group& group) {
    const auto tensor = [&](std::int64_t rows, std::int64_t columns) {
      Tensor result;
      result.shape = {rows, columns};
      result.sharded = true;
      const Box box{{rows / 2 * group.rank(), 0}, {rows / 2, columns}};
      auto storage = std::make_shared<Storage>();
      storage->size = static_cast<std::uint64_t>(numel(box.sizes)) * 4;
      const auto owner = std::make_shared<std::vector<float>>(storage->size / 4);
      for (std::size_t i = 0; i < owner->size(); ++i)
        (*owner)[i] = static_cast<float>(i * (7 + static_cast<std::size_t>(group.rank()))) +
                      static_cast<float>(generation);
      storage->data = reinterpret_cast<std::byte*>(owner->data());
      storage->owner = owner;
      result.pieces.push_back({box, std::move(storage), 0, {}, -1});
      return Value(std::move(result));
    };
    const Value tree = Value::dict({{Value("w"), tensor(500, 1100)},
                                    {Value("b"), tensor(6, 10)},
                                    {Value("step"), Value(generation)}});
    SaveOptions options;
    options.threads = 1;
    save(tree, directory, options, group);
  });
}

// The files of `older` under the names that the same rank's file has in `newer`.
Files under_names_of(const Files& newer, const Files& older) {
  Files renamed;
  for (const auto& [name, bytes] : newer) {
    for (const auto& [other, content] : older) {
      if (name.ends_with(".distcp") && other.substr(0, 6) == name.substr(0, 6))
        renamed[name] = content;
    }
  }
  return renamed;
}

}  // namespace

std::uint64_t content_of(const Checkpoint& checkpoint) {
  RunningDigest digest;
  const auto add = [&digest](const std::string& text) {
    digest.add(std::as_bytes(std::span(text.data(), text.size() + 1)));
  };
  const std::vector<Leaf> leaves = flatten(checkpoint.load());
  for (const Leaf& leaf : leaves) {
    add(leaf.name);
    if (!leaf.value.is(Value::Kind::tensor)) {
      add(render(leaf.value, 100000));
      continue;
    }
    const Tensor& tensor = leaf.value.as_tensor();
    add(std::string(to_string(tensor.dtype)) + to_string(tensor.shape));
    const Storage& storage = *tensor.pieces.at(0).storage;
    digest.add({storage.data, static_cast<std::size_t>(storage.size)});
  }
  return digest.value();
}

Checkpoint open(const Subject& subject, const Files& files) {
  auto store = memory_store();
  for (const auto& [name, bytes] : files) put(*store, name, *bytes, IfExists::fail);
  if (!subject.single_file) return Checkpoint::open(store);
  const auto& [name, bytes] = *files.begin();
  const ObjectInfo object{name, bytes->size()};
  return name.ends_with(".safetensors") ? open_safetensors(store, {object})
                                        : open_torch(store, object);
}

std::vector<Subject> pytorch_subjects(const std::string& golden,
                                      const std::vector<std::string>& more) {
  std::vector<Subject> subjects;
  for (const char* name : {"train.pt", "many.pt", "checkpoints/w2.pt", "checkpoints/c1.pt",
                           "checkpoints/fsdp1_uop1_ws2_model.pt"}) {
    subjects.push_back(subject_of(fs::path(golden) / name, false));
  }
  for (const char* name : {"g4_ws2", "c2", "c2_thr", "fsdp1_uop0_ws2", "fsdp1_uop1_ws4", "hand"})
    subjects.push_back(subject_of(fs::path(golden) / "checkpoints" / name, false));
  for (const std::string& path : more) subjects.push_back(subject_of(path, false));
  return subjects;
}

std::vector<Subject> our_subjects(const std::string& scratch) {
  save_ours(scratch + "/older", 1);
  save_ours(scratch + "/dcp", 2);
  ConvertOptions options;
  convert(scratch + "/dcp", scratch + "/file.safetensors", options);
  options.to = CheckpointKind::torch_file;
  convert(scratch + "/dcp", scratch + "/file.pt", options);
  std::vector<Subject> subjects;
  for (const char* name : {"dcp", "file.safetensors", "file.pt"})
    subjects.push_back(subject_of(fs::path(scratch) / name, true));
  subjects[0].older = under_names_of(subjects[0].files, read_files(scratch + "/older"));
  return subjects;
}

}  // namespace tessera::corruption
