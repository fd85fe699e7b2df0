// N ranks' trees of one state become one tree: pieces of sharded tensors are put together, other
// values must agree.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/sharded/sharded.h"
#include "storage/lazy_source.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

// Values below this name are each rank's own (its random numbers, its place in the data): rank 0's
// are kept (checkpoint-rows O-62).
inline constexpr std::string_view kTrainState = "train";

// What becomes of values that differ: an error, or the lowest rank's stays, as in a DCP save, and
// what is no part of a sharded tensor is not compared.
enum class Unlike : std::uint8_t { refused, first_rank };

// What N ranks' trees are together.
struct Merged {
  // The structure of rank 0's and what only other ranks have. Pieces are in the order of ranks; of
  // replicas the lowest rank's stays.
  Value tree;
  std::vector<Leaf> replicas;         // tensors with the pieces that did not stay
  std::vector<std::string> warnings;  // which of the train state's values differ
};

class RankMerge {
 public:
  explicit RankMerge(Unlike unlike = Unlike::refused) : unlike_(unlike) {}
  // Adds a rank's tree, whose sharded tensors carry that rank's pieces. Rank 0 comes first; the
  // others may come in any order and from several threads. Throws, naming both ranks and the leaf,
  // `corrupt` when shape, dtype or kind of a sharded tensor differ, and `mismatch` when another
  // value does.
  void add(int rank, Value tree);

  [[nodiscard]] Merged finish();  // once

 private:
  void begin(Value tree, std::vector<Leaf> leaves);  // with rank 0's
  void merge(int rank, const Leaf& leaf, const Leaf& known);
  void add_pieces(int rank, const Leaf& leaf, const Leaf& known);
  void insert(int rank, const Leaf& leaf);
  // The dict that holds what this path leads to; dicts that are missing on the way are made. None:
  // something else is on the way.
  [[nodiscard]] std::optional<Value> place_of(const Path& path);
  void add_late();

  const Unlike unlike_;
  std::mutex mutex_;
  Value tree_;
  std::map<std::string, Leaf, std::less<>> leaves_;  // of tree_; guarded by mutex_
  struct Late {
    int rank = 0;
    Leaf leaf;
  };
  std::vector<Late> late_;           // what rank 0 lacks; guarded by mutex_
  std::vector<std::string> differ_;  // of the train state; guarded by mutex_
};

// Directories of one torch.save file a rank.

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

// The store of the ranks' files, and those that are open.
struct RankStore {
  std::shared_ptr<Store> store;
  std::shared_ptr<OpenFiles> files = std::make_shared<OpenFiles>();
};

// The tree of one rank's file, without the shard lists that it does not need. `rebuild`: as in
// torch_file::ReadOptions.
using Rebuild = std::function<bool(const Value& callable, const Value& arguments, Value& result)>;
[[nodiscard]] Value read_rank_file(const RankStore& from, const ObjectInfo& file,
                                   const Rebuild& rebuild = {});

// The same with a tensor leaf for each sharded tensor, which has the rank's pieces.
[[nodiscard]] Value resolved_rank_file(const RankStore& from, const ObjectInfo& file,
                                       const sharded::Rank& rank);

// Merges what `tree_of` gives for every rank, several at a time, each dropped when its pieces are
// taken; then the tree becomes the checkpoint's, and its coverage is proved. `world` is 1 at least.
void merge_ranks(Checkpoint& checkpoint, int world, const std::function<Value(int rank)>& tree_of,
                 Unlike unlike = Unlike::refused);

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
