// Hostile checkpoints, each in a directory and in memory: what a row says holds on every path by
// which bytes are read (docs/hostile-cases.md).
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "base/numbers.h"
#include "checkpoint/test_support.h"
#include "conformance/temporary_directory.h"
#include "conformance/unprivileged.h"
#include "format/dcp/dcp.h"
#include "format/dcp/testing.h"
#include "format/torch/torch_file.h"
#include "tessera/verify.h"
#include "value/render.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using Files = std::map<std::string, std::string>;  // name -> content

ByteView view(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string text_in(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Files golden(const std::string& directory) {
  Files files;
  for (const auto& entry : fs::directory_iterator(kGolden + directory)) {
    if (entry.is_regular_file()) files[entry.path().filename()] = text_of(entry.path());
  }
  return files;
}

std::string on_disk(const Files& files) {
  const std::string directory = temporary_directory() + "/c";
  for (const auto& [name, text] : files)
    put(*posix_store(directory), name, view(text), IfExists::fail);
  return directory;
}

// The two stores that hold `files`.
std::vector<std::shared_ptr<Store>> stores_of(const Files& files) {
  const auto memory = memory_store();
  for (const auto& [name, text] : files) put(*memory, name, view(text), IfExists::fail);
  return {posix_store(on_disk(files)), memory};
}

// Opens and, when that works, reads all of it: the code of the failure, the same for every store.
void expect_refused(const Files& files, ErrorCode code, const char* what) {
  for (const auto& store : stores_of(files)) {
    try {
      (void)Checkpoint::open(store).load();
      ADD_FAILURE() << what << " was read from " << store->name();
    } catch (const Error& error) {
      EXPECT_EQ(to_string(error.code()), to_string(code)) << what << ": " << error.what();
      EXPECT_FALSE(error.path().empty()) << what;
    }
  }
}

void expect_read(const Files& files, const std::function<void(const Checkpoint&)>& look) {
  for (const auto& store : stores_of(files)) {
    const Checkpoint checkpoint = Checkpoint::open(store);
    EXPECT_NO_THROW((void)checkpoint.load());
    look(checkpoint);
  }
}

// DCP ---------------------------------------------------------------------------------------------

Files with_metadata(Files files, const std::function<void(dcp::Metadata&)>& change) {
  dcp::Metadata metadata = dcp::decode(view(files.at(".metadata")));
  change(metadata);
  files[".metadata"] = text_in(dcp::encode(metadata));
  return files;
}

Files mesh(const std::function<void(dcp::Metadata&)>& change) {
  return with_metadata(golden("variants/m2d"), change);
}

// The first chunk of "blocks" is a thing that lies at the end of its data file.
Files with_item(const std::string& bytes) {
  std::string path;
  Files files = golden("variants/m2d");
  files = with_metadata(files, [&](dcp::Metadata& metadata) {
    dcp::change_chunk(entry_of(metadata, "blocks"), 0, [&](dcp::Chunk& chunk) {
      path = chunk.item.path;
      chunk.item.offset = files.at(path).size();
      chunk.item.length = bytes.size();
    });
  });
  files.at(path) += bytes;
  return files;
}

TEST(HostileDcp, M04PlacesThatNoFileHas) {
  const auto with = [](std::uint64_t offset, std::uint64_t length) {
    return mesh([&](dcp::Metadata& metadata) {
      dcp::change_chunk(entry_of(metadata, "blocks"), 0, [&](dcp::Chunk& chunk) {
        chunk.item.offset = offset;
        chunk.item.length = length;
      });
    });
  };
  const std::uint64_t most = ~std::uint64_t{0} >> 1;
  expect_refused(with(1 << 30, 100), ErrorCode::incomplete, "past the end");
  expect_refused(with(0, 1 << 30), ErrorCode::incomplete, "longer than the file");
  expect_refused(with(most, most), ErrorCode::incomplete, "2^63 and 2^63");
  expect_refused(with(0, 0), ErrorCode::corrupt, "without bytes");
}

TEST(HostileDcp, M05OverlappingItems) {
  expect_refused(mesh([](dcp::Metadata& metadata) {
                   const dcp::Item item = entry_of(metadata, "blocks").chunks[0].item;
                   dcp::change_chunk(entry_of(metadata, "uneven"), 0,
                                     [&](dcp::Chunk& chunk) { chunk.item = item; });
                 }),
                 ErrorCode::corrupt, "two names for one item");
  expect_refused(mesh([](dcp::Metadata& metadata) {
                   dcp::change_chunk(entry_of(metadata, "blocks"), 0, [](dcp::Chunk& chunk) {
                     chunk.item.offset > 0 ? chunk.item.offset -= 1 : chunk.item.length += 1;
                   });
                 }),
                 ErrorCode::corrupt, "a byte of a neighbour");
}

TEST(HostileDcp, M06Chunks) {
  const auto blocks = [](const std::function<void(dcp::Entry&)>& change) {
    return mesh([&](dcp::Metadata& metadata) { change(entry_of(metadata, "blocks")); });
  };
  expect_refused(blocks([](dcp::Entry& entry) {
                   dcp::Chunks fewer;
                   for (std::size_t i = 0; i + 1 < entry.chunks.size(); ++i)
                     fewer.push_back(entry.chunks[i]);
                   entry.chunks = fewer;
                 }),
                 ErrorCode::incomplete, "a hole");
  expect_refused(blocks([](dcp::Entry& entry) { entry.chunks = {}; }), ErrorCode::incomplete,
                 "no chunks");
  expect_refused(blocks([](dcp::Entry& entry) { entry.shape[0] += 1; }), ErrorCode::incomplete,
                 "a row that nobody has");
  expect_refused(blocks([](dcp::Entry& entry) {
                   const auto move = [&entry](dcp::Chunk& chunk) {
                     chunk.box.offsets = whole(entry.shape).offsets;
                     chunk.box.offsets[0] += 1;
                   };
                   dcp::change_chunk(entry, entry.chunks.size() - 1, move);
                 }),
                 ErrorCode::conflict, "an overlap");
  expect_refused(blocks([](dcp::Entry& entry) {
                   const dcp::Item item = entry.chunks[0].item;
                   entry.chunks = {};
                   entry.chunks.push_back({{{0}, {1}}, item});
                 }),
                 ErrorCode::corrupt, "another number of dimensions");
}

TEST(HostileDcp, D02D03ItemsThatAreSomethingElse) {
  const auto file = [](const char* name) { return text_of(kGolden + name); };
  expect_refused(with_item(file("checkpoints/stream.pt")), ErrorCode::corrupt, "a stream");
  expect_refused(with_item(file("script.pt")), ErrorCode::unsupported, "TorchScript");
  expect_refused(with_item(file("kinds.pt")), ErrorCode::mismatch, "a dict");
  expect_refused(with_item(file("item.pt")), ErrorCode::corrupt, "a tensor of another shape");
  expect_refused(with_item(std::string(600, '\0')), ErrorCode::corrupt, "zeros");
  expect_refused(with_item("PK"), ErrorCode::incomplete, "two bytes");
}

// D03: a view of a larger storage is what the chunk says.
TEST(HostileDcp, D03AViewOfALargerStorage) {
  const dcp::Metadata metadata = dcp::decode(view(golden("variants/m2d").at(".metadata")));
  for (const dcp::Entry& entry : metadata.entries) {
    if (entry.name != "blocks") continue;
    const Shape shape = entry.chunks[0].box.sizes;
    Tensor tensor;
    tensor.dtype = entry.dtype;
    tensor.shape = shape;
    auto storage = memory(static_cast<std::size_t>(numel(shape) + 7) * size_of(entry.dtype));
    storage->dtype = entry.dtype;
    tensor.pieces = {
        {.slice = whole(shape), .storage = storage, .storage_offset = 5, .strides = {}}};
    expect_read(with_item(text_in(torch_file::write(Value(tensor), "archive"))),
                [](const Checkpoint& checkpoint) { EXPECT_EQ(checkpoint.leaves.size(), 5U); });
  }
}

Value call(const char* module, const char* name) {
  return Value::object(
      {.callable = Value::global(module, name), .arguments = Value::tuple({Value("id")})});
}

// D04: PyTorch reads these with weights_only=False.
TEST(HostileDcp, D04ObjectsInByteItems) {
  const auto with_object = [](const Value& value) {
    const std::string bytes = text_in(torch_file::write(value, "archive"));
    std::string path;
    Files files = golden("checkpoints/c1");
    files = with_metadata(files, [&](dcp::Metadata& metadata) {
      for (dcp::Entry& entry : metadata.entries) {
        if (entry.is_tensor || !path.empty()) continue;
        path = entry.item.path;
        entry.item.offset = files.at(path).size();
        entry.item.length = bytes.size();
      }
    });
    files.at(path) += bytes;
    return files;
  };
  expect_refused(with_object(call("os", "system")), ErrorCode::unsafe, "a call of os.system");
  expect_refused(with_object(call("builtins", "eval")), ErrorCode::unsafe, "a call of eval");
  expect_read(with_object(call("some.module", "Thing")), [](const Checkpoint& checkpoint) {
    bool found = false;
    for (const Leaf& leaf : checkpoint.leaves) {
      found = found || render(leaf.value) == "some.module.Thing('id')";
    }
    EXPECT_TRUE(found);
  });
}

// M14: two names never become one.
TEST(HostileDcp, M14PathsThatCollide) {
  const auto paths = [](const Path& a, const Path& b) {
    return mesh([&](dcp::Metadata& metadata) {
      entry_of(metadata, "blocks").path = a;
      entry_of(metadata, "uneven").path = b;
    });
  };
  expect_read(paths({"a.b"}, {"a", "b"}), [](const Checkpoint& checkpoint) {
    const Value tree = checkpoint.tree();
    EXPECT_NE(tree.find("a.b"), nullptr);
    EXPECT_NE(tree.at("a").find("b"), nullptr);
  });
  expect_refused(paths({"a"}, {"a"}), ErrorCode::conflict, "one place");
  expect_refused(paths({"a"}, {"a", "b"}), ErrorCode::conflict, "a place inside of a tensor");
  expect_refused(paths({"a", std::int64_t{0}}, {"a", "0"}), ErrorCode::conflict,
                 "a list and a dict");
}

// safetensors -------------------------------------------------------------------------------------

std::string safetensors(const std::string& header, const std::string& data) {
  std::vector<std::byte> bytes;
  append_le(bytes, static_cast<std::uint64_t>(header.size()));
  return text_in(bytes) + header + data;
}

// A header of one tensor of one byte.
std::string one_tensor(const std::string& name) {
  std::string header = "{\"";
  header += name;
  return header += R"(":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
}

Files one_file(const std::string& header, const std::string& data = "") {
  return {{"model.safetensors", safetensors(header, data)}};
}

TEST(HostileSafetensors, T14DeepMetadata) {
  const auto tree = [](const std::string& text) {
    return one_file(R"({"__metadata__":{"tessera.tree":")" + text + "\"}}");
  };
  const std::string deep(2'000'000, '[');
  expect_refused(tree(deep), ErrorCode::limit, "a tree of ours without end");
  const std::string leaf = R"({\"version\":1,\"leaves\":[{\"path\":[\"a\"],\"value\":)";
  expect_refused(tree(leaf + std::string(5000, '[') + std::string(5000, ']') + "}]}"),
                 ErrorCode::limit, "a deep value");
  expect_refused(tree(leaf + "{}}]}"), ErrorCode::corrupt, "no tag");
  expect_refused(tree(leaf + "18446744073709551615}]}"), ErrorCode::limit, "2^64-1");
  expect_refused(one_file(R"({"__metadata__":{"DCP_SHARDING_INFO":")" + deep + "\"}}"),
                 ErrorCode::corrupt, "shards without end");
}

// T16: names are data.
TEST(HostileSafetensors, T16Names) {
  for (const std::string name : {"", "\\u0000", "../../etc/passwd", "/etc/passwd", "\\u001b[31m"}) {
    expect_read(one_file(one_tensor(name), "x"),
                [](const Checkpoint& checkpoint) { EXPECT_EQ(checkpoint.leaves.size(), 1U); });
  }
  const std::string long_name(1 << 20, 'n');
  expect_read(one_file(one_tensor(long_name), "x"), [&](const Checkpoint& checkpoint) {
    EXPECT_NE(checkpoint.find(long_name), nullptr);
  });
}

// T20: one parser decides what a file is: a length may begin with "PK", a header may hold anything.
TEST(HostileSafetensors, T20OtherFormatsInside) {
  std::string header = one_tensor("w");
  header.resize(0x4B50, ' ');
  const Files files = one_file(header, "x");
  ASSERT_TRUE(files.begin()->second.starts_with("PK"));
  expect_read(files, [](const Checkpoint& checkpoint) {
    EXPECT_EQ(checkpoint.kind, CheckpointKind::safetensors);
  });
  EXPECT_EQ(Checkpoint::open(on_disk(files) + "/model.safetensors").kind,
            CheckpointKind::safetensors);
  const std::string pickle = R"({"__metadata__":{"a":"cos\nsystem\n(Vid\ntR."},)";
  expect_read(one_file(pickle + one_tensor("w").substr(1), "x"), [](const Checkpoint& checkpoint) {
    EXPECT_EQ(checkpoint.leaves.size(), 1U);
    EXPECT_EQ(checkpoint.metadata.at("a"), "cos\nsystem\n(Vid\ntR.");
  });
}

// T13: a bool of another program is a byte, not a C++ bool.
TEST(HostileSafetensors, T13BoolsThatAreNeitherOfTwo) {
  const std::string target = temporary_directory() + "/a.safetensors";
  const std::string header = R"({"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}})";
  const std::string source = on_disk(one_file(header, std::string("\2\0\xff", 3)));
  const Value kept = Checkpoint::open(source).load();
  EXPECT_EQ(kept.at("b").as_tensor().pieces[0].storage->data[0], std::byte{2});
  Value tree = Value::dict({{"b", counting({3}, whole({3}), 0, false)}});
  const auto group = solo_group();
  load(tree, source, *group);
  EXPECT_EQ(floats(tree.at("b").as_tensor()), (std::vector<float>{1, 0, 1}));
}

// torch.save --------------------------------------------------------------------------------------

// P01, Z03, Z17, Z18, P28: a file and the same bytes in memory are refused alike.
TEST(HostileTorch, TheSameOnEveryPath) {
  const std::string good = text_of(kGolden + "checkpoints/c1.pt");
  const Checkpoint checkpoint = Checkpoint::open(kGolden + "checkpoints/c1.pt");
  std::uint64_t payload = 0;
  for (const Leaf& leaf : checkpoint.leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Storage& storage = *leaf.value.as_tensor().pieces.at(0).storage;
    if (storage.size > 0) payload = storage.offset;
  }
  std::string flipped = good;
  flipped.at(payload) ^= 1;
  std::string tar(1024, '\0');
  tar.replace(257, 5, "ustar");
  const std::vector<std::tuple<const char*, std::string, ErrorCode>> rows = {
      {"bytes after the end", good + "x", ErrorCode::corrupt},
      {"bytes before the start", "x" + good, ErrorCode::corrupt},
      {"cut", good.substr(0, good.size() - 1), ErrorCode::incomplete},
      {"a flipped bit of a tensor", flipped, ErrorCode::corrupt},
      {"tar", tar, ErrorCode::unsupported},
      {"a call", text_in(torch_file::write(call("os", "system"), "a")), ErrorCode::unsafe},
      {"nothing", "", ErrorCode::incomplete},
  };
  for (const auto& row : rows) {
    const char* const what = std::get<0>(row);
    const std::string& text = std::get<1>(row);
    const ErrorCode code = std::get<2>(row);
    const std::string root = on_disk({{"a.pt", text}});
    const auto read = [](const Checkpoint& opened) { (void)opened.load(); };
    EXPECT_EQ(code_of([&] { read(Checkpoint::open(root + "/a.pt")); }), code) << what;
    EXPECT_EQ(code_of([&] {
                Checkpoint opened;
                opened.path = "memory";
                const auto bytes = std::as_bytes(std::span(text));
                opened.root = torch_file::read(memory_source({bytes.begin(), bytes.end()}, "a.pt"));
                opened.leaves = flatten(*opened.root);
                read(opened);
              }),
              code)
        << what;
  }
}

// Files -------------------------------------------------------------------------------------------

TEST(HostilePath, T21WhatIsNoFile) {
  const std::string root = temporary_directory();
  ASSERT_EQ(::mkfifo((root + "/fifo").c_str(), 0600), 0);
  fs::create_symlink("loop", root + "/loop");
  fs::create_symlink("/dev/zero", root + "/zero.safetensors");
  EXPECT_EQ(open_code(root + "/fifo"), ErrorCode::io);
  EXPECT_EQ(open_code(root + "/loop"), ErrorCode::io);
  EXPECT_EQ(open_code("/dev/zero"), ErrorCode::io);
  EXPECT_EQ(open_code(root + "/zero.safetensors"), ErrorCode::io);
  EXPECT_EQ(open_code(root + "/" + std::string(300, 'n')), ErrorCode::io);
}

// L04: nobody picks a step out of a run: a run's directory is no checkpoint.
TEST(HostilePath, L04TheStepsOfARun) {
  const std::string run = temporary_directory();
  EXPECT_EQ(open_code(run), ErrorCode::not_found);
  for (const char* step : {"step9", "step10", "step010", "step10-unsharded", "step10-tmp",
                           "step99999999999999999999"}) {
    fs::create_directories(run + "/" + step);
    fs::copy_file(kGolden + "checkpoints/c1.pt", run + "/" + step + "/model.pt");
    fs::copy_file(kGolden + "c2_hf_cons/model-00001-of-00002.safetensors",
                  run + "/" + step + "/model.safetensors");
  }
  EXPECT_EQ(open_code(run), ErrorCode::not_found);
  EXPECT_EQ(open_code(run + "/step1"), ErrorCode::not_found);
  EXPECT_EQ(open_code(run + "/step10-tmp2"), ErrorCode::not_found);
}

// L05: who names a link means what it leads to; nothing is tried in its place.
TEST(HostilePath, L05TheLinkToTheLatest) {
  const std::string run = temporary_directory();
  fs::copy(kGolden + "checkpoints/c1", run + "/step9");
  fs::create_symlink("step10", run + "/latest");
  EXPECT_EQ(open_code(run + "/latest"), ErrorCode::not_found);
  fs::remove(run + "/latest");
  fs::create_symlink("latest", run + "/latest");
  EXPECT_EQ(open_code(run + "/latest"), ErrorCode::io);
  fs::remove(run + "/latest");
  fs::create_symlink("step9", run + "/latest");
  EXPECT_FALSE(Checkpoint::open(run + "/latest").leaves.empty());
  // A save that was killed: data, and a commit that never came.
  fs::rename(run + "/step9/.metadata", run + "/step9/.metadata.tmp");
  EXPECT_EQ(open_code(run + "/latest"), ErrorCode::incomplete);
}

// A closed directory neither stops a scan nor is it passed over in silence.
TEST(HostilePath, AScanTellsWhatIsClosed) {
  const TemporaryDirectory temporary;
  const std::string& root = temporary.path();
  fs::permissions(root, fs::perms(0755));
  fs::copy(kGolden + "checkpoints/c1", root + "/step");
  fs::create_directory_symlink("step", root + "/link");
  const ClosedDirectory closed(root + "/lost+found");
  const Unprivileged unprivileged;
  const ScanReport report = scan(root);
  EXPECT_GT(report.pickles, 0U);
  EXPECT_FALSE(report.clean());
  std::vector<std::string> told;
  for (const Finding& problem : report.problems) told.push_back(problem.text);
  EXPECT_THAT(told, UnorderedElementsAre(
                        HasSubstr("a link to a directory is not followed [" + root + "/link"),
                        AllOf(HasSubstr("Permission denied"), HasSubstr(root + "/lost+found"))));
}

// P14: a view of stride 0 costs nothing to describe and for ever to write.
TEST(HostilePath, P14ViewsOfAFewBytes) {
  const std::string root = temporary_directory();
  Tensor tensor;
  tensor.shape = {1'000'000'000'000};
  tensor.pieces = {{.slice = whole(tensor.shape), .storage = memory(64), .strides = {0}}};
  const Value tree = Value::dict({{"wide", Value(tensor)}});
  put(*posix_store(root), "a.pt", torch_file::write(tree, "a"), IfExists::fail);
  const std::string source = root + "/a.pt";
  const Checkpoint checkpoint = Checkpoint::open(source);
  EXPECT_EQ(checkpoint.leaves.at(0).value.as_tensor().shape, tensor.shape);
  EXPECT_EQ(code_of([&] { (void)checkpoint.load(); }), ErrorCode::limit);
  EXPECT_EQ(code_of([&] { (void)diff(checkpoint, Checkpoint::open(source)); }), ErrorCode::limit);
  for (const auto& [name, kind] : {std::pair("/dcp", CheckpointKind::dcp),
                                   std::pair("/b.safetensors", CheckpointKind::safetensors)}) {
    const std::string target = root + name;
    ConvertOptions options;
    options.to = kind;
    EXPECT_EQ(code_of([&] { (void)convert(source, target, options); }), ErrorCode::limit);
    EXPECT_FALSE(fs::exists(target)) << target;
  }
  EXPECT_TRUE(verify(source).findings.empty());
  ConvertOptions same;
  same.to = CheckpointKind::torch_file;
  (void)convert(source, root + "/c.pt", same);
  EXPECT_LT(fs::file_size(root + "/c.pt"), 4096U);
  same.only = {"wide"};
  same.rename = {"wide=>w"};
  EXPECT_EQ(code_of([&] { (void)convert(source, root + "/d.pt", same); }), ErrorCode::limit);
}

}  // namespace
}  // namespace tessera
