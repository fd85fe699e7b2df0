#include "checkpoint/write/write_item.h"

#include <memory>
#include <unordered_map>

namespace tessera {
namespace {

dcp::Entry entry_of(const WriteItem& item, const std::shared_ptr<dcp::ItemTexts>& texts) {
  dcp::Entry entry;
  entry.name = item.name;
  entry.path = item.path;
  entry.is_tensor = item.is_tensor;
  entry.dtype = item.dtype;
  entry.shape = item.shape;
  entry.requires_grad = item.requires_grad;
  entry.chunks = dcp::Chunks(texts);
  return entry;
}

// Adds an entry for every name of an item; returns where each is.
std::unordered_map<std::string, std::size_t> add_entries(
    const std::vector<std::vector<WriteItem>>& proposals, dcp::Metadata& metadata) {
  std::unordered_map<std::string, std::size_t> index;
  const auto texts = std::make_shared<dcp::ItemTexts>();
  for (const auto& items : proposals) {
    for (const WriteItem& item : items) {
      if (!index.emplace(item.name, metadata.entries.size()).second) continue;
      metadata.entries.push_back(entry_of(item, texts));
    }
  }
  return index;
}

}  // namespace

WriteItem item_of(const Leaf& leaf, std::size_t index) {
  WriteItem item;
  item.name = leaf.name;
  item.path = leaf.path;
  item.leaf = index;
  item.is_tensor = leaf.value.is(Value::Kind::tensor);
  if (!item.is_tensor) return item;
  const Tensor& tensor = leaf.value.as_tensor();
  item.dtype = tensor.dtype;
  item.shape = tensor.shape;
  item.requires_grad = tensor.requires_grad;
  return item;
}

dcp::Metadata metadata_of(const std::vector<std::vector<WriteItem>>& proposals,
                          const std::vector<std::vector<WrittenItem>>& written) {
  dcp::Metadata metadata;
  const std::unordered_map<std::string, std::size_t> index = add_entries(proposals, metadata);
  for (std::size_t rank = 0; rank < proposals.size(); ++rank) {
    for (const WrittenItem& done : written[rank]) {
      const WriteItem& item = proposals[rank].at(done.item);
      dcp::Entry& entry = metadata.entries[index.at(item.name)];
      if (item.is_tensor) {
        entry.chunks.push_back({item.box, done.where});
      } else {
        entry.item = done.where;
      }
    }
  }
  return metadata;
}

}  // namespace tessera
