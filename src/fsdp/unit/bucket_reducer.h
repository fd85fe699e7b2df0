// BucketReducer: gradients of parameters that every rank holds whole, as DistributedDataParallel
// reduces them. Parameters are put into buckets from the last to the first, the order in which
// backward tends to finish them; a bucket is summed as one message as soon as its gradients and
// those of all buckets before it are there, while backward goes on.
//
// A sparse gradient has a bucket of its own. First the ranks add up how many rows each of them has,
// as one message at the same time as another bucket's; then each gets the rows of all.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "fsdp/unit/grad_reducer.h"
#include "tessera/mesh.h"
#include "tessera/shard_options.h"
#include "torch/transport.h"

namespace tessera::detail {

struct BucketReducerOptions {
  int ranks = 1;
  Mesh mesh;                       // of those ranks
  Transport* transport = nullptr;  // the mesh's
  ReplicateOptions buckets;
  std::vector<bool> sparse;           // [parameter] its gradients are
  at::ScalarType dtype = at::kFloat;  // gradients travel in
  double divisor = 1;
};

class BucketReducer final : public GradReducer {
 public:
  // `params` outlives it.
  BucketReducer(std::vector<UnitParam>& params, const BucketReducerOptions& options);

  // Buckets may leave before `start`. Only where no other unit communicates: ranks whose graphs
  // differ would send the buckets of two units in different orders.
  void allow_early(bool early) { early_ = early; }

  // No others, where they would divide averages again.
  [[nodiscard]] bool may_set(const AverageRules& rules) const override;
  void begin(const BackwardPlan& plan) override;
  bool arrived(std::size_t param) override;
  bool start() override;
  void advance() override {}
  void finish() override;
  void keep() override;
  void forget() override;
  // They are in grad(), where whoever zeroes it takes them away.
  [[nodiscard]] bool keeps(std::size_t) const override { return false; }
  void drop_kept(std::size_t) override {}

 private:
  struct Bucket {
    std::vector<std::size_t> params;
    std::int64_t elements = 0;
    bool sparse = false;      // one parameter, whose gradients are
    bool has_all = false;     // gradients, in what is under way
    bool averages = false;    // the transport divides what is under way
    std::size_t missing = 0;  // of those that may get a gradient, in this backward
    // Gradients and trailer in one array while they are under way, or where they are.
    at::Tensor values;
    std::vector<at::Tensor> gradients;
    at::Tensor trailer;
    at::Tensor rows;  // of a sparse gradient, while `values` has the counts
    std::unique_ptr<PendingSum> sum;
  };
  // The content of a parameter's grad() besides gradients of the backward under way.
  struct Past {
    at::Tensor average;         // set aside: of earlier backwards, which is not reduced again
    bool has_kept = false;      // grad() has what no reduction has taken along
    bool is_mixed = false;      // and an average with it
    std::uint32_t version = 0;  // of grad(), when that was kept
  };
  [[nodiscard]] bool may_average_again() const;
  [[nodiscard]] bool mixes_averages() const;
  void set_aside(std::size_t param);
  void put_back(std::size_t param);
  [[nodiscard]] bool needs_bucket(std::size_t param) const;
  void add_to_bucket(std::size_t param);
  void launch_complete();
  void launch(std::size_t bucket);
  [[nodiscard]] bool may_sum_in_place() const;
  [[nodiscard]] bool launch_in_place(Bucket& bucket);
  [[nodiscard]] std::vector<at::Tensor> fill_values(Bucket& bucket);
  void sum_values(Bucket& bucket, const std::vector<at::Tensor>& gradients);
  void take_back(Bucket& bucket);
  void take_back_in_place(Bucket& bucket);
  void launch_rows(Bucket& bucket);
  void take_back_rows(Bucket& bucket);
  // The rows of all ranks, of which rank r has `counts[r]`.
  [[nodiscard]] at::Tensor rows_of_all(const at::Tensor& mine,
                                       const std::vector<std::int64_t>& counts) const;
  void forget(Bucket& bucket);
  [[nodiscard]] Reduced reduced_of(const Bucket& bucket) const;

  std::vector<UnitParam>& params_;
  BucketReducerOptions options_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;   // [parameter]
  std::vector<bool> has_arrived_;        // [parameter] in this backward
  std::vector<Past> past_;               // [parameter]
  std::optional<std::size_t> arriving_;  // parameter, while `arrived` runs
  std::size_t launched_ = 0;             // buckets, in this backward
  std::uint32_t id_ = 0;                 // of the unit
  std::uint32_t pass_ = 0;               // this backward's
  std::uint32_t trained_ = 0;            // which of its parameters, when this backward began
  bool early_ = false;
  bool sync_ = false;
  bool begun_ = false;  // a backward, and not finished
};

}  // namespace tessera::detail
