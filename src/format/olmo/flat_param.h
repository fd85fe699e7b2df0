// Flat parameters as FSDP1 lays them out, and the handles of a `model/rank*.pt` (checkpoint-rows
// F-05, O-70).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::olmo {

// How the parameters of one unit lie one after another in its flat parameter, and how ranks share
// it.
//
// With `aligned` (use_orig_params=True) every parameter begins at a multiple of 16 bytes and the
// whole is a multiple of the world size; what lies between holds the value 42. Without, parameters
// follow each other directly and the last ranks' shards are filled up with zeros at the end.
class FlatGeometry {
 public:
  // `dtype`: the element type whose size the alignment counts in. Throws `limit` on overflow,
  // `invalid_argument` on a world size below 1.
  FlatGeometry(const std::vector<Shape>& shapes, DType dtype, int world, bool aligned);

  // `count` elements of a shard: from element `begin` of parameter `param`, or padding (kPadding).
  static constexpr std::size_t kPadding = static_cast<std::size_t>(-1);
  struct Segment {
    std::size_t param = kPadding;
    std::int64_t begin = 0;
    std::int64_t count = 0;
    std::int64_t offset = 0;  // in the shard
    bool operator==(const Segment&) const = default;
  };
  // The segments that rank `rank` holds, in order; together `shard_size` elements. The zeros at the
  // end of a shard are padding too: `shard_padding` says how many.
  [[nodiscard]] std::vector<Segment> shard(int rank) const;
  [[nodiscard]] std::int64_t shard_size() const noexcept { return shard_size_; }
  [[nodiscard]] std::int64_t shard_padding(int rank) const;  // zeros at the end
  [[nodiscard]] const std::vector<std::int64_t>& numels() const noexcept { return numels_; }
  // With the padding between parameters and at the end as entries of their own.
  [[nodiscard]] std::vector<std::int64_t> numels_with_padding() const;

 private:
  struct Extent {
    std::size_t param = kPadding;
    std::int64_t count = 0;
  };
  void pad_to(std::int64_t multiple);
  std::vector<std::int64_t> numels_;
  std::vector<Extent> extents_;  // parameters and padding, in order
  std::int64_t total_ = 0;       // of extents_
  std::int64_t shard_size_ = 0;  // the same on every rank
};

// Makes the values of one `model/rank*.pt`: strings that are single objects in Python are shared.
class HandleMaker {
 public:
  // One entry of "modules": the FSDP module `name` (as named_modules says) and its flat parameter.
  // `data`: the tensor leaf with the shard. `fqns`: names within the module.
  [[nodiscard]] Value module(const std::string& name, const std::vector<std::string>& fqns,
                             const std::vector<Shape>& shapes, const FlatGeometry& geometry,
                             int rank, const Value& data);
  // The entry of a module without parameters of its own.
  [[nodiscard]] Value empty_module(const std::string& name);

 private:
  [[nodiscard]] static Value param_infos(const FlatGeometry& geometry, int rank);
  Value name_of(const std::string& fqn);

  std::map<std::string, Value> names_;  // of parameters: attribute names in Python
  Value handles_ = "handles", name_ = "name", data_ = "flat_param.data";
};

}  // namespace tessera::olmo
