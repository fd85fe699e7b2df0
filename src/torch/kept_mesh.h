// A mesh among what a forward keeps for its backward.
#pragma once

#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <utility>

#include "tessera/mesh.h"

namespace tessera {

struct KeptMesh : torch::CustomClassHolder {
  explicit KeptMesh(Mesh kept) : mesh(std::move(kept)) {}
  Mesh mesh;
};

inline void keep_mesh(torch::autograd::AutogradContext& context, const Mesh& mesh) {
  context.saved_data["mesh"] = c10::IValue::make_capsule(c10::make_intrusive<KeptMesh>(mesh));
}

inline Mesh kept_mesh(torch::autograd::AutogradContext& context) {
  const auto kept = context.saved_data["mesh"].toCapsule();
  return static_cast<const KeptMesh&>(*kept).mesh;
}

}  // namespace tessera
