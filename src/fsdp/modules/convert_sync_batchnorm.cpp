#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "tessera/sync_batchnorm.h"

namespace tessera {
namespace {

namespace nn = torch::nn;

template <typename Use, typename... Impls>
bool use_as(nn::Module& module, const Use& use) {
  const auto use_one = [&](auto* norm) {
    if (norm != nullptr) use(*norm);
    return norm != nullptr;
  };
  return (use_one(dynamic_cast<Impls*>(&module)) || ...);
}

// Calls `use` with the BatchNorm that `module` is; false: it is none.
template <typename Use>
bool use_batch_norm(nn::Module& module, const Use& use) {
  return use_as<Use, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl>(module, use);
}

// A class derived from libtorch's may have a forward of its own.
bool is_just_batch_norm(nn::Module& module) {
  bool is_just = false;
  use_batch_norm(module, [&](const auto& norm) {
    is_just = typeid(module) == typeid(std::decay_t<decltype(norm)>);
  });
  return is_just;
}

// What is there is found first, and changed when all of it can be.
class Conversion {
 public:
  Conversion(nn::Module& top, const Mesh& mesh) : mesh_(mesh) {
    require_no_units(top);
    look_at(top, "", nullptr);
    if (!refused_.empty()) refuse();
  }

  void apply() {
    for (auto* sync : there_) sync->set_mesh(mesh_);
    for (const auto& entry : entries_) exchange(entry);
  }

 private:
  struct Entry {
    nn::SequentialImpl& parent;
    std::string key;
    std::shared_ptr<nn::Module> norm;
  };

  static void require_no_units(const nn::Module& top) {
    for (const auto& parameter : top.named_parameters()) {
      if (!detail::find_owner(parameter.value()).unit) continue;
      throw Error(ErrorCode::invalid_argument,
                  "convert_sync_batchnorm comes before fully_shard and replicate: this parameter "
                  "belongs to a unit")
          .at_key(parameter.key());
    }
  }

  void look_at(nn::Module& module, const std::string& name, const Entry* entry) {
    if (auto* sync = dynamic_cast<SyncBatchNormImpl*>(&module)) {
      there_.push_back(sync);
    } else if (use_batch_norm(module, [](const auto&) {})) {
      if (entry != nullptr && is_just_batch_norm(module)) {
        entries_.push_back(*entry);
      } else {
        refused_.push_back(name);
      }
    } else {
      look_below(module, name.empty() ? name : name + ".");
    }
  }

  void look_below(nn::Module& module, const std::string& prefix) {
    auto* parent = dynamic_cast<nn::SequentialImpl*>(&module);
    for (const auto& child : module.named_children()) {
      // A class of the program's own may have others beside what its slots call.
      const auto is_called = [&](const nn::AnyModule& slot) { return slot.ptr() == child.value(); };
      if (parent == nullptr || !std::ranges::any_of(*parent, is_called)) {
        look_at(*child.value(), prefix + child.key(), nullptr);
      } else {
        const Entry entry{*parent, child.key(), child.value()};
        look_at(*child.value(), prefix + child.key(), &entry);
      }
    }
  }

  [[noreturn]] void refuse() const {
    const auto others = refused_.size() - 1;
    throw Error(ErrorCode::unsupported,
                "a BatchNorm that is no entry of a torch::nn::Sequential, or of a class of its "
                "own, cannot be exchanged" +
                    (others == 0 ? "" : " (and " + std::to_string(others) + " more)") +
                    ": declare it as tessera::SyncBatchNorm")
        .at_key(refused_.front());
  }

  void exchange(const Entry& entry) {
    auto& made = made_[entry.norm.get()];
    if (!made) {
      use_batch_norm(*entry.norm, [&](const auto& norm) {
        made = std::make_shared<SyncBatchNormImpl>(norm, mesh_);
      });
    }
    entry.parent.replace_module(entry.key, made);
    for (auto& slot : entry.parent) {
      if (slot.ptr() == entry.norm) slot = nn::AnyModule(made);
    }
  }

  const Mesh& mesh_;
  std::vector<SyncBatchNormImpl*> there_;
  std::vector<Entry> entries_;
  std::vector<std::string> refused_;
  std::unordered_map<const nn::Module*, std::shared_ptr<SyncBatchNormImpl>> made_;
};

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const Mesh& mesh) {
  Conversion(module, mesh).apply();
}

}  // namespace tessera
