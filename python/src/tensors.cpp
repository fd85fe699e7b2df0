#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>

#include "tessera/error.h"
#include "text.h"

namespace tessera::python {
namespace {

nb::tuple described(const Piece& piece) {
  const nb::object file = piece.storage && piece.storage->source
                              ? string_of_path(piece.storage->source->name())
                              : nb::object(nb::none());
  const nb::object rank =
      piece.rank < 0 ? nb::object(nb::none()) : nb::object(nb::int_(piece.rank));
  const std::uint64_t offset = piece.storage ? piece.storage->offset : 0;
  if (const auto* box = std::get_if<Box>(&piece.slice))
    return nb::make_tuple(tuple_of(box->offsets), tuple_of(box->sizes), rank, file, offset);
  const auto& range = std::get<FlatRange>(piece.slice);
  return nb::make_tuple(range.begin, range.end, rank, file, offset);
}

}  // namespace

nb::list TensorHandle::pieces() const {
  nb::list pieces;
  for (const Piece& piece : tensor().pieces) pieces.append(described(piece));
  return pieces;
}

nb::tuple TensorHandle::memory() const {
  const Piece* piece = tensor().pieces.size() == 1 ? &tensor().pieces.front() : nullptr;
  if (piece == nullptr || !piece->storage || piece->storage->data == nullptr)
    throw Error(ErrorCode::unsupported, "the tensor is not in memory");
  using Bytes = nb::ndarray<nb::memview, std::uint8_t, nb::ndim<1>>;
  auto keeps = std::make_unique<std::shared_ptr<Storage>>(piece->storage);
  const nb::capsule owner(keeps.get(), [](void* kept) noexcept {
    delete static_cast<std::shared_ptr<Storage>*>(kept);
  });
  const Storage& storage = **keeps.release();
  const Bytes bytes(storage.data, {static_cast<std::size_t>(storage.size)}, owner);
  const Shape strides = piece->strides.empty() && !tensor().shape.empty()
                            ? contiguous_strides(tensor().shape)
                            : piece->strides;
  return nb::make_tuple(bytes, reinterpret_cast<std::uintptr_t>(storage.data),
                        piece->storage_offset, tuple_of(strides), piece->conj, piece->neg);
}

nb::tuple tuple_of(const Shape& shape) {
  nb::list sizes;
  for (const std::int64_t size : shape) sizes.append(size);
  return nb::tuple(sizes);
}

Shape shape_of(nb::handle sequence) {
  Shape shape;
  for (const nb::handle size : sequence) shape.push_back(nb::cast<std::int64_t>(size));
  return shape;
}

nb::object name_of(DType dtype) {
  return string_of(to_string(dtype));
}

void bind_tensors(nb::module_& module) {
  nb::class_<TensorHandle>(module, "Tensor")
      .def_prop_ro("dtype", [](const TensorHandle& self) { return name_of(self.tensor().dtype); })
      .def_prop_ro("shape", [](const TensorHandle& self) { return tuple_of(self.tensor().shape); })
      .def_prop_ro("requires_grad",
                   [](const TensorHandle& self) { return self.tensor().requires_grad; })
      .def_prop_ro("parameter", [](const TensorHandle& self) { return self.tensor().parameter; })
      .def("pieces", &TensorHandle::pieces)
      .def("memory", &TensorHandle::memory);
  nb::list dtypes;
  for (const DTypeInfo& row : dtype_table())
    dtypes.append(nb::make_tuple(name_of(row.dtype), row.size, string_of(row.safetensors)));
  module.attr("DTYPES") = nb::tuple(dtypes);
}

}  // namespace tessera::python
