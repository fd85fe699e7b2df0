// Tensors of a checkpoint as views of mapped files: nothing is read before somebody looks.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// The files of a job, each of which is mapped once, as a whole, when a tensor in it is first asked
// for. All members may be called from several threads at once. Views outlive it.
class MappedFiles {
 public:
  MappedFiles();
  ~MappedFiles();
  MappedFiles(const MappedFiles&) = delete;
  MappedFiles& operator=(const MappedFiles&) = delete;

  // `tensor` of an opened checkpoint with its bytes in memory, where a local file has them as they
  // are wanted: plain elements of one piece, aligned as the dtype asks, each in a place of its own
  // (an expanded tensor's are not). Strides and lazy bits are those of the file. Views of one
  // storage share it, so an element that is written through one is seen through all; the file stays
  // as it is. None: the elements have to be read. ByteSource::map says what is not checked, and
  // what happens when a file gets shorter. `key` is for errors: what reading the ends of a DCP item
  // meets.
  [[nodiscard]] std::optional<Tensor> view(const Tensor& tensor, const std::string& key);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
