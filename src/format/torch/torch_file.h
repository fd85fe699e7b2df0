// torch.save files (checkpoint-rows F-01, F-02): a pickled tree whose tensors are views of
// storages, in a zip archive or, before torch 1.6, in a stream (docs/formats/torch-stream.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "format/zip/zip.h"
#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera::torch_file {

struct ReadOptions {
  // The lists of all ranks' shards in ShardedTensors (checkpoint-rows F-04) are read as empty ones
  // where they hold nothing unusual: each rank's file repeats them, and they are most of it.
  bool skip_shard_lists = false;
  bool keeps_compiler = false;  // as pickle::ReadOptions
  // Asked for what `callable(*arguments)` makes where it is no tensor of torch's own; returns false
  // to keep the call. What it replaces needs no memory while the rest is read.
  std::function<bool(const Value& callable, const Value& arguments, Value& result)> rebuild = {};
};

// The tree of a torch.save file. Tensor leaves have one piece, the whole tensor, whose storage
// lies in `source` (raw, with its recorded CRC-32 where there is one); nothing of a storage is
// read. Views of one storage share the Storage. Checks every tensor's extent against its storage
// and every storage against its record.
//
// Tensors and parameters (with or without attributes of their own) become tensor leaves. Everything
// else that mentions a storage - quantized tensors, unknown rebuilders, a storage saved by itself -
// keeps the storage as a tensor leaf with `bare_storage`, where the persistent id was: inside the
// object node, or as the tree itself. Sparse tensors, DTensors and ShardedTensors are object nodes
// that hold tensor leaves.
//
// Throws `unsupported` for tars of torch before 0.1.10, TorchScript and big-endian files.
[[nodiscard]] Value read(std::shared_ptr<const ByteSource> source, const ReadOptions& options = {});

// Whether a record of an archive is a storage, or a line of text of torch's own: nobody unpickles
// these.
[[nodiscard]] bool is_raw(std::string_view record);

// An archive that torch.jit.save or C++'s torch::save wrote (docs/formats/torchscript.md).
struct Script {
  // A module is a dict of its parameters, buffers and other attributes, by the names that
  // named_parameters() and named_buffers() give; an optimizer is its state_dict(); what C++ saved
  // without a module is a tensor or a list of them.
  Value tree;
  std::vector<std::string> notes;  // what is neither a parameter nor a buffer, what is left out
};
// None: `source` is no such archive. Code is never run, and read only for the lists of parameters
// and buffers that it begins with. Throws as `read`, and `corrupt` for modules that hold
// themselves.
[[nodiscard]] std::optional<Script> read_script(const std::shared_ptr<const ByteSource>& source);

// The tensor of a DCP item (checkpoint-rows F-03b), an archive of one tensor that may be a slice of
// a large file, in two reads where the item was written by torch.save. Throws `mismatch` when the
// item is something else.
[[nodiscard]] Tensor read_tensor_item(std::shared_ptr<const ByteSource> item);

// Makes the value that is pickled in the place of one in the tree, where that only stands for it;
// returns false for all others. What it makes is gone when it is pickled. Tensor leaves inside of
// it must outlive the writer.
using Expand = std::function<bool(const Value& value, Value& expanded)>;

// A torch.save archive laid out for writing: `fixed` bytes at their offsets, storages to be filled
// by the caller, and `finish`, which needs the CRC-32 of each storage's bytes. For a tree that was
// read from a file of torch.save the result is that file, byte for byte.
class Writer {
 public:
  struct Segment {
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
  };
  struct Slot {
    std::uint64_t offset = 0;        // from the archive's start
    std::uint64_t size = 0;          // bytes
    const Tensor* tensor = nullptr;  // the first leaf of the tree that is a view of it
    // The storage that the leaves share; null: one fresh, contiguous tensor gathered from its
    // pieces.
    std::shared_ptr<Storage> storage;
  };
  // `root`: the archive's root folder: the file's stem up to its last dot; "archive" for DCP items
  // and for names that are not ASCII. Leaves with a single piece over the whole tensor keep their
  // storage, strides and sharing; all others become contiguous. `tree` must outlive the writer.
  // Throws `invalid_argument` when tensors of two element types share a storage.
  Writer(const Value& tree, const std::string& root, const Expand& expand = {});
  [[nodiscard]] const std::vector<Segment>& fixed() const noexcept { return fixed_; }
  [[nodiscard]] const std::vector<Slot>& slots() const noexcept { return slots_; }
  // Hands all bytes that are neither `fixed` nor a slot's to `put`, in ascending order: they depend
  // on data. Once.
  using Put = std::function<void(std::uint64_t offset, ByteView bytes)>;
  void finish(const std::vector<std::uint32_t>& slot_crcs, const Put& put);
  // The same for a stream: `crc_of` may write a slot's bytes, since it is called for each, in
  // order, between what `put` gets before and behind them.
  using SlotCrc = std::function<std::uint32_t(const Slot& slot)>;
  void stream(const SlotCrc& crc_of, const Put& put);
  // Total size of the archive.
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  // Size of the pickled tree.
  [[nodiscard]] std::uint64_t pickle_size() const noexcept { return pickle_size_; }

 private:
  zip::Writer zip_;
  std::vector<Segment> fixed_;
  std::vector<Slot> slots_;
  std::vector<std::uint32_t> fixed_crcs_;  // of the records before the slots
  std::uint64_t size_ = 0;
  std::uint64_t pickle_size_ = 0;
};

// The slots of an archive whose tree has the same tensors as `tree` in the same order, and others
// perhaps behind them, and whose pickle has this size: of one that another process writes.
[[nodiscard]] std::vector<Writer::Slot> slots_of(const Value& tree, const std::string& root,
                                                 std::uint64_t pickle_size,
                                                 const Expand& expand = {});

// A whole archive in memory, for trees whose data is in memory and small.
[[nodiscard]] std::vector<std::byte> write(const Value& tree, const std::string& root);

}  // namespace tessera::torch_file
