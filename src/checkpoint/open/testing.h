// Directories as people have them, and what they are opened as, for the tests of this folder.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/test_support.h"

namespace tessera::testing_support {

using Numbers = std::map<std::string, std::vector<float>>;

inline ConvertOptions to_torch() {
  ConvertOptions options;
  options.to = CheckpointKind::torch_file;
  return options;
}

// A safetensors file of vectors.
inline void write_vectors(const std::string& path, const Numbers& vectors) {
  std::vector<Value::Pair> tree;
  for (const auto& [name, numbers] : vectors) {
    Tensor tensor = counting({static_cast<std::int64_t>(numbers.size())},
                             whole({static_cast<std::int64_t>(numbers.size())}), 0);
    std::memcpy(tensor.pieces[0].storage->data, numbers.data(), numbers.size() * sizeof(float));
    tree.emplace_back(name, Value(std::move(tensor)));
  }
  save(Value::dict(std::move(tree)), path, {.overwrite = true});
}

inline void write_map(const std::string& path, const std::map<std::string, std::string>& files) {
  std::string text;
  for (const auto& [name, file] : files)
    text.append(text.empty() ? "\"" : ", \"")
        .append(name)
        .append("\": \"")
        .append(file)
        .append("\"");
  write_text(path, R"({"metadata": {}, "weight_map": {)" + text + "}}");
}

inline constexpr const char* kIndexFile = "/model.safetensors.index.json";

// a and b in A, c in B.
inline std::string two_shards() {
  const std::string directory = temporary_directory();
  write_vectors(directory + "/A.safetensors", {{"a", {1, 2}}, {"b", {3}}});
  write_vectors(directory + "/B.safetensors", {{"c", {4, 5, 6}}});
  write_map(directory + kIndexFile,
            {{"a", "A.safetensors"}, {"b", "A.safetensors"}, {"c", "B.safetensors"}});
  return directory;
}

inline std::vector<float> numbers_of(const Checkpoint& checkpoint, const std::string& name) {
  return floats(checkpoint.only({name}).load().at(name).as_tensor());
}

inline std::string state_of(const Checkpoint& checkpoint, const std::string& file) {
  for (const FileRow& row : checkpoint.directory()) {
    if (row.name == file) return std::string(to_string(row.state));
  }
  return "not there";
}

// A safetensors file of one vector, with metadata.
inline void write_one(const std::string& path, const std::string& metadata, const std::string& name,
                      const std::vector<float>& numbers) {
  const std::size_t bytes = numbers.size() * sizeof(float);
  const std::string header = R"({"__metadata__": )" + metadata + R"(, ")" + name +
                             R"(": {"dtype": "F32", "shape": [)" + std::to_string(numbers.size()) +
                             R"(], "data_offsets": [0, )" + std::to_string(bytes) + "]}}";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());  // below 256
  file += header;
  file.append(reinterpret_cast<const char*>(numbers.data()), bytes);
  write_text(path, file);
}

}  // namespace tessera::testing_support
