// Tensors whose elements are computed when they are read.
#include <algorithm>
#include <utility>

#include "io/range.h"
#include "tessera/convert.h"

namespace tessera {
namespace {

class ComputedSource final : public ByteSource {
 public:
  ComputedSource(std::size_t element, std::uint64_t size, ElementFunction elements)
      : element_(element), size_(size), elements_(std::move(elements)) {}

  [[nodiscard]] std::uint64_t size() const override { return size_; }
  [[nodiscard]] const std::string& name() const override { return name_; }

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    if (out.empty()) return;
    const std::uint64_t first = offset / element_;
    const std::uint64_t last = (offset + out.size() - 1) / element_;
    const FlatRange range{static_cast<std::int64_t>(first), static_cast<std::int64_t>(last + 1)};
    if (offset % element_ == 0 && out.size() % element_ == 0) {
      elements_(range, out);
      return;
    }
    std::vector<std::byte> whole(static_cast<std::size_t>(last + 1 - first) * element_);
    elements_(range, whole);
    std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(offset - first * element_), out.size(),
                out.begin());
  }

 private:
  std::size_t element_;
  std::uint64_t size_;
  ElementFunction elements_;
  const std::string name_ = "a computed tensor";
};

}  // namespace

Tensor computed_tensor(DType dtype, const Shape& shape, ElementFunction elements) {
  auto storage = std::make_shared<Storage>();
  storage->dtype = dtype;
  storage->size = byte_size(dtype, shape);
  storage->source =
      std::make_shared<ComputedSource>(size_of(dtype), storage->size, std::move(elements));
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = shape;
  tensor.pieces.push_back({whole(shape), std::move(storage), 0, {}, -1});
  return tensor;
}

}  // namespace tessera
