#include "checkpoint/write/safetensors_files.h"

#include <algorithm>
#include <cstdio>

#include "base/checked.h"
#include "checkpoint/write/targets.h"
#include "format/safetensors/index.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr int kMostFiles = 99'999;  // numbers have five digits

void require_storable(const std::string& name, const Tensor& tensor) {
  require_safetensors_type(tensor.dtype, name);
  if (name == "__metadata__") {
    throw Error(ErrorCode::unsupported, "a name that safetensors reserves").at_key(name);
  }
}

std::string stem_of(const std::string& name) {
  return name.substr(0, name.rfind('.'));
}

std::string numbered(const std::string& name, std::size_t number, std::size_t count) {
  char numbers[64];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu.safetensors", number, count);
  return stem_of(name) + numbers;
}

// Deals tensors out in their order.
class Dealer {
 public:
  Dealer(const SafetensorsSet& set, std::string name) : set_(set), name_(std::move(name)) {
    if (!by_map()) {
      files_.resize(1);
      return;
    }
    int count = 0;
    for (const auto& [tensor, number] : set_.file_of) {
      if (number < 1 || number > kMostFiles) {
        throw Error(ErrorCode::invalid_argument, "file number " + std::to_string(number) +
                                                     ", expected 1 to " +
                                                     std::to_string(kMostFiles))
            .at_key(tensor);
      }
      count = std::max(count, number);
    }
    files_.resize(static_cast<std::size_t>(count));
  }

  void add(const std::string& name, const Tensor& tensor) {
    require_storable(name, tensor);
    const std::uint64_t size = byte_size(tensor.dtype, tensor.shape);
    file_for(name, size).header.entries.push_back({name, tensor.dtype, tensor.shape, 0, 0});
    bytes_ += size;
  }

  std::vector<SafetensorsFile> take() {
    const bool numbers = by_map() || files_.size() > 1;
    for (std::size_t i = 0; i < files_.size(); ++i)
      files_[i].name = numbers ? numbered(name_, i + 1, files_.size()) : name_;
    if (by_map())
      std::erase_if(files_, [](const auto& file) { return file.header.entries.empty(); });
    return std::move(files_);
  }

 private:
  [[nodiscard]] bool by_map() const { return !set_.file_of.empty(); }

  SafetensorsFile& file_for(const std::string& name, std::uint64_t size) {
    if (by_map()) {
      const auto found = set_.file_of.find(name);
      if (found != set_.file_of.end()) return files_[static_cast<std::size_t>(found->second) - 1];
      throw Error(ErrorCode::invalid_argument, "the map of files has no number for this tensor")
          .at_key(name);
    }
    // A new file where one would become too large: huggingface's rule.
    if (set_.max_size > 0 && bytes_ > 0 && checked_add(bytes_, size) > set_.max_size) {
      files_.emplace_back();
      bytes_ = 0;
    }
    return files_.back();
  }

  const SafetensorsSet& set_;
  std::string name_;
  std::vector<SafetensorsFile> files_;
  std::uint64_t bytes_ = 0;  // in the last file
};

}  // namespace

std::vector<SafetensorsFile> safetensors_files(const std::vector<Leaf>& leaves,
                                               const SafetensorsSet& set, const std::string& name) {
  if (!set.file_of.empty() && set.max_size > 0) {
    throw Error(ErrorCode::invalid_argument,
                "either a map or a largest size says which tensor goes into which file");
  }
  Dealer dealer(set, name);
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) dealer.add(leaf.name, leaf.value.as_tensor());
  }
  return dealer.take();
}

bool has_index(const std::vector<SafetensorsFile>& files, const std::string& name) {
  return files.empty() || files.front().name != name;
}

std::string index_name(const std::string& name) {
  return stem_of(name) + std::string(safetensors::kIndexSuffix);
}

std::string index_text(const std::vector<SafetensorsFile>& files) {
  safetensors::Index index;
  std::uint64_t total = 0;
  for (const SafetensorsFile& file : files) {
    for (const safetensors::Entry& entry : file.header.entries) {
      index.files.emplace(entry.name, file.name);
      total = checked_add(total, byte_size(entry.dtype, entry.shape));
    }
  }
  index.total_size = total;
  return safetensors::encode_index(index);
}

}  // namespace tessera
