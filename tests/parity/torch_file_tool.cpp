// Files for PyTorch and safetensors to read.
//   torch_file_tool write DIRECTORY     all.pt and all.safetensors: every dtype, made by hand
//   torch_file_tool rewrite IN OUT      reads a torch.save file and writes it again
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "format/safetensors/safetensors.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"
#include "tessera/error.h"

namespace {

using namespace tessera;

void save(const std::string& path, const std::vector<std::byte>& bytes) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()),
            static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) throw Error(ErrorCode::io, "cannot write").at_path(path);
}

std::vector<std::byte> load(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::vector<char> chars(std::istreambuf_iterator<char>(in), {});
  const auto bytes = std::as_bytes(std::span(chars));
  return {bytes.begin(), bytes.end()};
}

// Bytes 0, 1, 2, ... as a 3 x 2 tensor; of bool: 0 and 1.
Tensor numbered(DType dtype) {
  auto owner = std::make_shared<std::vector<std::byte>>(6 * size_of(dtype));
  for (std::size_t i = 0; i < owner->size(); ++i) {
    (*owner)[i] = static_cast<std::byte>(dtype == DType::bool8 ? i % 2 : i);
  }
  auto storage = std::make_shared<Storage>();
  storage->data = owner->data();
  storage->size = owner->size();
  storage->owner = owner;
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = {3, 2};
  tensor.pieces = {{.slice = whole(tensor.shape), .storage = storage, .strides = {}}};
  return tensor;
}

Value tree() {
  std::vector<Value::Pair> dtypes;
  for (const DTypeInfo& row : dtype_table()) {
    dtypes.emplace_back(std::string(row.torch), numbered(row.dtype));
  }
  Tensor base = numbered(DType::float32);
  Tensor column = base;
  column.shape = {3};
  column.pieces[0].slice = whole(column.shape);
  column.pieces[0].storage_offset = 1;
  column.pieces[0].strides = {2};
  Tensor parameter = numbered(DType::float64);
  parameter.parameter = parameter.requires_grad = true;
  Tensor halves;  // two pieces of one tensor, gathered when it is written
  halves.shape = {6, 2};
  for (const std::int64_t row : {0, 3}) {
    halves.pieces.push_back({.slice = Box{{row, 0}, {3, 2}},
                             .storage = numbered(DType::float32).pieces[0].storage,
                             .strides = {}});
  }
  const Value group = Value::dict({{"lr", 0.1}, {"betas", Value::tuple({0.9, 0.99})}});
  return Value::dict({
      {"dtypes", Value::dict(std::move(dtypes), DictKind::ordered_dict)},
      {"views", Value::list({base, column})},
      {"parameter", parameter},
      {"halves", halves},
      {"groups", Value::list({group, group})},
      {"plain", Value::list({Value(), true, -1, std::int64_t{1} << 40, 1.5, "text", Value::tuple(),
                             Value::bytes({std::byte{0}, std::byte{255}})})},
      {"dtype", Value::global("torch", "bfloat16")},
      {7, "int key"},
  });
}

void write_safetensors(const std::string& path) {
  safetensors::Header header;
  for (const DTypeInfo& row : dtype_table()) {
    if (!row.safetensors.empty()) {
      header.entries.push_back({std::string(row.torch), row.dtype, {3, 2}, 0, 0});
    }
  }
  header.metadata["format"] = "pt";
  std::vector<std::byte> bytes = safetensors::encode_header(header);
  for (const safetensors::Entry& entry : header.entries) {
    const std::shared_ptr<Storage> storage = numbered(entry.dtype).pieces[0].storage;
    bytes.insert(bytes.end(), storage->data, storage->data + storage->size);
  }
  save(path, bytes);
}

void rewrite(const std::string& in, const std::string& out) {
  const auto source = memory_source(load(in), in);
  const std::string first = zip::Archive(source).entries().at(0).name;
  save(out, torch_file::write(torch_file::read(source), first.substr(0, first.find('/'))));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 2 && words[0] == "write") {
      save(words[1] + "/all.pt", torch_file::write(tree(), "all"));
      write_safetensors(words[1] + "/all.safetensors");
    } else if (words.size() == 3 && words[0] == "rewrite") {
      rewrite(words[1], words[2]);
    } else {
      return 2;
    }
    return 0;
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
