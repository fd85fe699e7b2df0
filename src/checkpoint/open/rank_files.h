// Directories of one torch.save file a rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/open/rank_merge.h"
#include "format/sharded/sharded.h"
#include "storage/lazy_source.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"

namespace tessera {

// The files named `prefix`, a rank, ".pt", in the order of ranks. Throws `incomplete`, naming the
// first file that is missing, when the ranks are not 0 to their number less one. Empty: none.
[[nodiscard]] std::vector<ObjectInfo> rank_files(const std::vector<ObjectInfo>& files,
                                                 const std::string& prefix,
                                                 const std::string& where);

// Throws `error`, and where that is `incomplete` with the names of the files that are not there, of
// those of `world` ranks; 0: it is not known.
[[noreturn]] void rethrow_with_missing(const Error& error, const std::vector<ObjectInfo>& files,
                                       const std::string& prefix, int world);

// "FOLDER/rank{r}.pt", or without a folder "rank{r}.pt", and what comes before its number.
[[nodiscard]] std::string own_file(const std::string& folder, int rank);
[[nodiscard]] std::string own_prefix(const std::string& folder);
// Whose such file `name` is; none: no rank's. Whatever asks for ranks' files asks this.
[[nodiscard]] std::optional<int> rank_of_own(std::string_view name, const std::string& folder);
[[nodiscard]] bool has_own_files(const std::vector<ObjectInfo>& files, const std::string& folder);
// One more than the largest rank among them; 0: there are none.
[[nodiscard]] int ranks_of_own(const std::vector<ObjectInfo>& files, const std::string& folder);

// Where the ranks' files are.
struct RankStore {
  std::shared_ptr<Store> store;
  std::shared_ptr<OpenFiles> files = std::make_shared<OpenFiles>();
};

// The tree of one rank's file, without the shard lists that it does not need. `rebuild`: as in
// torch_file::ReadOptions.
using Rebuild = std::function<bool(const Value& callable, const Value& arguments, Value& result)>;
[[nodiscard]] Value read_rank_file(const RankStore& from, const ObjectInfo& file,
                                   const Rebuild& rebuild = {});

// Merges what `tree_of` gives for every rank, several at a time, each dropped when its pieces are
// taken; then the tree becomes the checkpoint's, and its coverage is proved. `world` is 1 at least.
void merge_ranks(Checkpoint& checkpoint, int world, const std::function<Value(int rank)>& tree_of);

// rank{r}.pt: sharded state dicts, as OLMo's torch_legacy checkpointer writes them (checkpoint-rows
// O-60). An opener gets the files that decided (deciding_files), in which has_... found some.
[[nodiscard]] bool has_rank_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_rank_files(const std::shared_ptr<Store>& store,
                                         const std::vector<ObjectInfo>& files);
// The "model" and "optim" that one rank's file has, whose sharded tensors have that rank's pieces
// alone. None: the file has no model, or says that it is of other numbers of ranks or none.
[[nodiscard]] std::optional<Value> read_legacy_part(const RankStore& from,
                                                    const sharded::Rank& rank);
// {model,optim,extra_state}_world_size_{N}_rank_{r}.pt.
[[nodiscard]] bool is_world_size_file(std::string_view name);
[[nodiscard]] bool has_world_size_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_world_size_files(const std::shared_ptr<Store>& store,
                                               const std::vector<ObjectInfo>& files);
// {model,optim,train}/rank{r}.pt: flat parameters (checkpoint-rows O-70).
[[nodiscard]] bool has_local_files(const std::vector<ObjectInfo>& files);
// The number of ranks by its `metadata.yaml`, or else one more than the largest of its files has.
[[nodiscard]] int world_of_local(const Store& store);
// The "model" and "optim" that one rank's files have, whose tensors have that rank's pieces alone,
// and under "layout" how its flat parameters are laid out.
[[nodiscard]] Value read_local_part(const RankStore& from, int rank);
[[nodiscard]] Checkpoint open_local(const std::shared_ptr<Store>& store,
                                    const std::vector<ObjectInfo>& files);

}  // namespace tessera
