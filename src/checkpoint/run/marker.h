// What says that a directory holds a whole checkpoint, and the order in which one comes and goes.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// The object whose presence says that the checkpoint in `store` is whole: `.metadata` of a DCP
// checkpoint, `config.yaml` of an OLMo kind. Empty: there is none.
[[nodiscard]] std::string marker_in(const Store& store);

// Throws `already_exists` if there is one.
void require_no_marker(const Store& store);

// Whether it says that a checkpoint is whole, or in `olmo_torch_new` that its DCP part is.
[[nodiscard]] bool is_marker(std::string_view name);
// Whether a reader begins with it where there is no marker: it comes after all data.
[[nodiscard]] bool is_read_first(std::string_view name);
// Sorts the objects of a checkpoint so that it may come in this order, and go in the opposite one:
// markers last, and before them what a reader begins with. So at no moment a reader takes a part of
// a checkpoint for all of it, and one who opens it without asking for a marker finds nothing to
// begin with.
void sort_markers_last(std::vector<ObjectInfo>& objects);

// Removes all objects of the store in that order. `unmarked` is called after the markers.
void remove_markers_first(Store& store, const std::function<void()>& unmarked = {});

}  // namespace tessera
