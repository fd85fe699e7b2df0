// Writing a DCP directory step by step, and what its `.metadata` says, for whoever plans saves and
// loads elsewhere, as torch.distributed.checkpoint does. save() and load() of checkpoint.h plan for
// themselves.
//
// Ranks talk on their own. Rank 0 makes a DcpDirectory before anybody writes. Every rank fills its
// files and sends the receipts to rank 0, which commits:
//
//   const float data[12] = {};
//   DataFileWriter file("run/step400", data_file_name(group.rank(), 0, new_attempt()));
//   const ConstTensorView view = ConstTensorView::of(data, DType::float32, {4, 3});
//   const ItemExtent extent = file.tensor(view.tensor());
//   const DataFileReceipt receipt = file.finish();
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/leaf.h"
#include "tessera/location.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// A part of file names, drawn at random: names with it belong to one attempt at one save.
[[nodiscard]] std::string new_attempt();
// "__3_0_1a2b3c4d5e6f.distcp": the first file of rank 3.
[[nodiscard]] std::string data_file_name(int rank, int file, const std::string& attempt);

// The place of an item in its data file, in bytes.
struct ItemExtent {
  std::uint64_t offset = 0;
  std::uint64_t length = 0;
};

// What the commit has to know of a data file.
struct DataFileReceipt {
  std::string name;
  std::uint64_t size = 0;  // bytes
  std::uint64_t tail = 0;  // the digest that stands for the whole file
  std::string writer;      // for errors, such as "rank 3 on host7"
};

// A data file of items one after another. It appears when it is finished; one that is destroyed
// before leaves nothing. For one thread at a time.
class DataFileWriter {
 public:
  // The directory is made if it is not there. Throws `already_exists` for a name that is taken.
  DataFileWriter(const Location& where, const std::string& name);
  DataFileWriter(DataFileWriter&&) noexcept;
  DataFileWriter& operator=(DataFileWriter&&) noexcept;
  ~DataFileWriter();

  // The bytes that torch.save writes for the tensor's elements in row-major order, as one that
  // needs no gradient. All of it has to be in memory: anything else is `unsupported`. Throws
  // `cancelled` when `stop` is requested; the file is of no use then, as after any other error.
  ItemExtent tensor(const Tensor& tensor, const std::stop_token& stop = {});
  // The bytes that torch.save writes for a value.
  ItemExtent value(const Value& value);
  // An item that somebody else has made.
  ItemExtent archive(ByteView bytes);
  // Makes the file durable and lets it appear. Once, and nothing may be added after it.
  [[nodiscard]] DataFileReceipt finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

struct DcpDirectoryOptions {
  bool overwrite = true;       // false: a checkpoint that is there is `already_exists`
  bool single_writer = false;  // as in SaveOptions
};

// The directory while a save goes on, for rank 0 alone. Nobody else saves there meanwhile
// (`conflict`), where the store can tell.
class DcpDirectory {
 public:
  // Removes what killed saves have left. The checkpoint that is there stays until the commit, and
  // its files until the next save.
  explicit DcpDirectory(const Location& where, const DcpDirectoryOptions& options = {});
  DcpDirectory(DcpDirectory&&) noexcept;
  DcpDirectory& operator=(DcpDirectory&&) noexcept;
  ~DcpDirectory();

  // Writes the side file with the digests of all files, and then `.metadata` in one rename.
  // `metadata` is the pickle of torch's Metadata with this `save_id`: letters, digits and hyphens
  // (else `invalid_argument`) that no other save has. Looks for every file first: one that is not
  // there is `incomplete`, and one of another size `corrupt`, after up to 90 seconds. If it throws,
  // nothing has become visible, and the files that `receipts` name are removed.
  void commit(ByteView metadata, const std::string& save_id,
              const std::vector<DataFileReceipt>& receipts, const std::stop_token& stop = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The place of an item, and how it is encoded.
struct DcpItem {
  std::string file;  // in the checkpoint's directory, which it does not leave
  ItemExtent extent;
  std::vector<std::string> transforms;  // torch's stream extensions, outermost first
};

// A tensor or a value.
struct DcpEntry {
  std::string name;
  std::optional<Path> path;    // where it belongs in the tree, if the planner has kept that
  std::optional<DType> dtype;  // none: a value
  Shape shape;
  bool requires_grad = false;
  std::vector<Box> chunks;     // of a tensor
  std::vector<DcpItem> items;  // of each chunk; of a value its only one
};

struct DcpMetadata {
  std::string version;  // of torch's format; empty: not said
  std::string checkpoint_id;
  std::string save_id;
  bool has_paths = true;  // false: the planner has kept nothing that is known
  std::vector<DcpEntry> entries;
};

// What the bytes of a `.metadata` say. Only the classes of such a file are known, and none is
// imported or called. Throws `corrupt`, `incomplete`, `unsafe`, `unsupported` or `limit` for
// anything else. Whether the files are there, and whether chunks cover their tensors, is not looked
// at.
[[nodiscard]] DcpMetadata decode_dcp_metadata(ByteView metadata);

// Saving without a group: each rank for itself.

// Saves what this rank holds as its part of a DCP checkpoint, without a word to other ranks, as
// PyTorch does with use_collectives=False: data files and `__{rank}.metadata`, and no `.metadata`.
// Ranks from 0 up without a gap make a checkpoint, which every reader of this library opens.
// PyTorch's reader gives each rank its own part alone.
//
// What several ranks hold each of them writes; readers take that of the lowest one. Nobody compares
// values, proves that chunks fill their tensors before a reader does, or notices when the last
// ranks or some rank's newest part are missing: whoever calls this has to know that all ranks have
// succeeded. There is no side file: nothing but the archives' own checksums is found damaged.
//
// `options`: those of DCP saves, but for `replicas`, `writer`, `values`, `copies` and `same_keys`,
// which have no meaning here. An earlier part of this rank is `already_exists` or, with
// `overwrite`, replaced in one step. A directory with a `.metadata` is `already_exists` in any
// case, because readers would prefer that. `rank` below 0, or 2^20 and more, is `invalid_argument`;
// chunks of one tensor that overlap are `conflict`, as in save().
SaveResult save_part(const Value& tree, const Location& where, int rank,
                     const SaveOptions& options = {});

}  // namespace tessera
