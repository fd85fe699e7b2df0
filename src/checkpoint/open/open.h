// One opener a kind; open_checkpoint picks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera {

class LazySource;

// The place where a checkpoint is.
struct Place {
  std::shared_ptr<Store> store;
  std::optional<ObjectInfo> object = {};  // none: all of the store
  std::string path = {};                  // of the checkpoint; empty: by the store and the object
};
// Throws `not_found` for a path or an object that is not there.
[[nodiscard]] Place place_of(const Location& where);

// Each detects the kind, for Checkpoint::open: anywhere, of a store's root, of an object.
[[nodiscard]] Checkpoint open_checkpoint(const Place& place, const OpenOptions& options);
[[nodiscard]] Checkpoint open_checkpoint(std::shared_ptr<Store> store, const OpenOptions& options);
[[nodiscard]] Checkpoint open_checkpoint(std::shared_ptr<Store> store, const ObjectInfo& object,
                                         const OpenOptions& options);

// Whether open_checkpoint() of a store's root finds a kind by the names of files, if only one that
// is not whole.
[[nodiscard]] bool has_known_kind(const Store& store);

// The kind that a directory is opened as, by the names of its files; none: by these it is no
// checkpoint.
[[nodiscard]] std::optional<CheckpointKind> kind_by_names(const Store& store);

// Says them to whoever listens (tessera/library.h), each with the checkpoint's path.
void say_warnings(const Checkpoint& checkpoint);

// Lets find() look up names of one that did not come from Checkpoint::open.
void index_names(Checkpoint& checkpoint);

[[nodiscard]] Checkpoint open_dcp(std::shared_ptr<Store> store, const OpenOptions& options = {});
// Whether a place is a DCP directory with a `.metadata`.
[[nodiscard]] bool is_dcp_directory(const Place& place);
[[nodiscard]] Checkpoint open_torch(std::shared_ptr<Store> store, const ObjectInfo& file,
                                    const OpenOptions& options = {});
// Throws `incomplete` for the tree of a file that one of several ranks saved of its part.
void require_whole(const Value& tree, const std::string& path);
// What a file of torch.save holds as the options ask for it: all of it or what its rank has,
// modules as their state dicts or as they are. Adds to `warnings` what was done with modules.
[[nodiscard]] Value read_torch_tree(const std::shared_ptr<const ByteSource>& file,
                                    const std::string& path, const OpenOptions& options,
                                    std::vector<std::string>& warnings);
// The file as the options ask for it: without what follows its archive, on which there is a remark
// then.
[[nodiscard]] std::shared_ptr<const ByteSource> without_tail(std::shared_ptr<const LazySource> file,
                                                             const OpenOptions& options,
                                                             Checkpoint& checkpoint);
[[nodiscard]] Checkpoint open_gguf(std::shared_ptr<Store> store, const ObjectInfo& file,
                                   const OpenOptions& options = {});
// With modules as they were pickled, whose every tensor belongs to the files; as Checkpoint::open
// has them where that is `unsafe`.
#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
[[nodiscard]] Checkpoint open_as_pickled(const Location& where, OpenOptions options);
#pragma GCC visibility pop
// All of these files together.
[[nodiscard]] Checkpoint open_safetensors(const std::shared_ptr<Store>& store,
                                          const std::vector<ObjectInfo>& files,
                                          const OpenOptions& options = {});
// The files that an index names.
[[nodiscard]] Checkpoint open_safetensors_index(const std::shared_ptr<Store>& store,
                                                const std::string& index,
                                                const OpenOptions& options = {});
[[nodiscard]] bool has_safetensors(const std::vector<ObjectInfo>& files);
// What a directory with these files holds: its index's set, its one file, or all of them.
[[nodiscard]] Checkpoint open_safetensors_directory(const std::shared_ptr<Store>& store,
                                                    const std::vector<ObjectInfo>& decided,
                                                    const OpenOptions& options = {});
// The same for a set of files of torch.save. What is there twice is `corrupt`.
[[nodiscard]] Checkpoint open_torch_index(const std::shared_ptr<Store>& store,
                                          const std::string& index,
                                          const OpenOptions& options = {});
[[nodiscard]] bool has_torch_set(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_torch_directory(const std::shared_ptr<Store>& store,
                                              const std::vector<ObjectInfo>& decided,
                                              const OpenOptions& options = {});

// A snapshot that writer processes keep in memory.
[[nodiscard]] bool has_arena_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_arena(const std::shared_ptr<Store>& store,
                                    const std::vector<ObjectInfo>& files);

// DeepSpeed's ZeRO (docs/formats/deepspeed.md).
[[nodiscard]] bool has_deepspeed_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_deepspeed(const std::shared_ptr<Store>& store,
                                        const std::vector<ObjectInfo>& files);

// One level decides what a directory is, and that of the directories where the OLMo kinds and
// DeepSpeed have files: below a directory that is no checkpoint there may be anything.
[[nodiscard]] std::vector<ObjectInfo> deciding_files(const Store& store);
// The OLMo kind that a directory is opened as, by the names of its files, if any. Of files of ranks
// some may be elsewhere.
[[nodiscard]] std::optional<CheckpointKind> olmo_kind_of(const Store& store);
// `files`: those that decided.
[[nodiscard]] bool has_full_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_olmo_full(std::shared_ptr<Store> store,
                                        const std::vector<ObjectInfo>& files);
[[nodiscard]] bool has_torch_new_files(const std::vector<ObjectInfo>& files);
[[nodiscard]] Checkpoint open_olmo_torch_new(const std::shared_ptr<Store>& store,
                                             const OpenOptions& options);
// What `name`.safetensors or else `name`.pt holds (checkpoint-rows O-15), one of `files`, which is
// added to `used`; none when neither is there.
[[nodiscard]] std::optional<Value> read_olmo_part(const std::shared_ptr<Store>& store,
                                                  const std::vector<ObjectInfo>& files,
                                                  const std::string& name,
                                                  std::vector<ObjectInfo>& used);
// The state dict in a safetensors file with OLMo's names (checkpoint-rows F-06). Throws
// `unsupported` for other names.
[[nodiscard]] Value read_olmo_safetensors(const std::shared_ptr<const ByteSource>& source);

// Tells of what fill_holes has added.
void warn_of_holes(const std::vector<std::string>& names, std::vector<std::string>& warnings);

// Proves P-14 for every tensor of an opened checkpoint.
void require_coverage(const Checkpoint& checkpoint);

}  // namespace tessera
