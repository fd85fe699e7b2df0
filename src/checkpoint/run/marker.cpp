#include "checkpoint/run/marker.h"

#include <algorithm>
#include <array>

#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/open/belonging.h"
#include "format/olmo/config.h"
#include "format/safetensors/index.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Of olmo_torch_new.
constexpr std::string_view kInnerMarker = "model_and_optim/.metadata";
// Behind a DCP checkpoint's marker may come a config of its trainer's. So where both are, the
// config says no less than `.metadata`.
constexpr std::array kMarkers{kInnerMarker, kDcpMetadata, olmo::kConfigFile};
// Without them no opener finds the rest.
constexpr std::array<std::string_view, 4> kFirstRead{"model.pt", "model.safetensors", "rank0.pt",
                                                     "model/rank0.pt"};

// When an object comes: the higher, the later.
int turn_of(std::string_view name) {
  if (const auto* at = std::ranges::find(kMarkers, name); at != kMarkers.end())
    return 2 + static_cast<int>(at - kMarkers.begin());
  return is_read_first(name) ? 1 : 0;
}

}  // namespace

std::string marker_in(const Store& store) {
  for (const std::string_view name : {kDcpMetadata, olmo::kConfigFile}) {
    if (store.exists(name)) return std::string(name);
  }
  return {};
}

void require_no_marker(const Store& store) {
  const std::string marker = marker_in(store);
  if (marker.empty()) return;
  throw Error(ErrorCode::already_exists, "a checkpoint is there already: it has " + marker)
      .at_path(store.name());
}

bool is_marker(std::string_view name) {
  return std::ranges::find(kMarkers, name) != kMarkers.end();
}

bool is_read_first(std::string_view name) {
  return std::ranges::find(kFirstRead, name) != kFirstRead.end() || safetensors::is_index(name);
}

void sort_markers_last(std::vector<ObjectInfo>& objects) {
  std::ranges::stable_sort(objects, {},
                           [](const ObjectInfo& object) { return turn_of(object.name); });
}

void remove_markers_first(Store& store, const std::function<void()>& unmarked) {
  require_own_open(store);
  std::vector<ObjectInfo> objects = store.list();
  sort_markers_last(objects);
  bool told = false;
  for (auto object = objects.rbegin(); object != objects.rend(); ++object) {
    if (!told && !is_marker(object->name)) {
      if (unmarked) unmarked();
      told = true;
    }
    store.remove(object->name);
  }
  store.sync();
}

}  // namespace tessera
