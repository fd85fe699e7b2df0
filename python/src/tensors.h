// A tensor of a checkpoint, or one in memory, as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>

#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/mapped.h"

namespace tessera::python {

namespace nb = nanobind;

// An opened checkpoint, or a part of one, until it is closed. Tensors of it share it. A copy shares
// what is open, and is closed for itself.
class Opened {
 public:
  explicit Opened(Checkpoint checkpoint)
      : checkpoint_(std::make_shared<const Checkpoint>(std::move(checkpoint))),
        whole_(checkpoint_),
        files_(std::make_shared<MappedFiles>()) {}
  Opened(Checkpoint part, const Opened& of)
      : checkpoint_(std::make_shared<const Checkpoint>(std::move(part))),
        whole_(of.whole_),
        files_(of.files_) {}

  // Whoever works without the interpreter's lock keeps it open. Throws `invalid_argument` once it
  // is closed.
  [[nodiscard]] std::shared_ptr<const Checkpoint> checkpoint() const { return open(checkpoint_); }
  // That of which this is a part.
  [[nodiscard]] std::shared_ptr<const Checkpoint> whole() const { return open(whole_); }
  // Its files that are mapped; parts and copies have the same ones.
  [[nodiscard]] std::shared_ptr<MappedFiles> files() const { return open(files_); }
  [[nodiscard]] bool is_closed() const { return checkpoint_ == nullptr; }
  void close() {
    checkpoint_ = whole_ = nullptr;
    files_ = nullptr;
  }

 private:
  template <typename T>
  static std::shared_ptr<T> open(const std::shared_ptr<T>& one) {
    if (!one) throw Error(ErrorCode::invalid_argument, "the checkpoint is closed");
    return one;
  }

  std::shared_ptr<const Checkpoint> checkpoint_;  // all guarded by the interpreter's lock
  std::shared_ptr<const Checkpoint> whole_;
  std::shared_ptr<MappedFiles> files_;
};

class TensorHandle {
 public:
  explicit TensorHandle(Value tensor) : tensor_(std::move(tensor)) {}

  [[nodiscard]] const Tensor& tensor() const { return tensor_.as_tensor(); }
  // (offsets, sizes, rank, file, offset of its storage there) of each box; of each flat range begin
  // and end come first.
  [[nodiscard]] nb::list pieces() const;
  // The parts of a tensor in memory: the bytes of its storage, as a memoryview that keeps them, and
  // where they begin; the offset of the tensor's first element, in elements; its strides; whether
  // its elements are the conjugates or the negatives of these.
  [[nodiscard]] nb::tuple memory() const;

 private:
  Value tensor_;
};

[[nodiscard]] nb::tuple tuple_of(const Shape& shape);
[[nodiscard]] Shape shape_of(nb::handle sequence);
// The dtype by torch's name. Throws `unsupported`.
[[nodiscard]] nb::object name_of(DType dtype);

void bind_tensors(nb::module_& module);

}  // namespace tessera::python
