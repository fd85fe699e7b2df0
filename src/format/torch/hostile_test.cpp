#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/crc32.h"
#include "format/test_support.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"

namespace tessera::torch_file {
namespace {

using Records = std::vector<std::pair<std::string, std::string>>;

std::vector<std::byte> archive(const Records& records) {
  zip::Writer writer;
  std::vector<std::byte> file;
  const auto append = [&](const auto& bytes) {
    file.insert(file.end(), bytes.begin(), bytes.end());
  };
  for (const auto& [name, data] : records) {
    const std::size_t index = writer.count();
    const auto bytes = std::as_bytes(std::span(data));
    writer.add(name, data.size());
    append(writer.header(index));
    append(bytes);
    append(writer.descriptor(index, crc32(bytes)));
  }
  append(writer.tail());
  return file;
}

ErrorCode code_of(std::vector<std::byte> file) {
  const auto [code, threw] = test::thrown([&] { (void)read(test::source(std::move(file))); });
  EXPECT_TRUE(threw);
  return code;
}

ErrorCode code_of(const Records& records) {
  return code_of(archive(records));
}

// A pickle of _rebuild_tensor_v2 over a storage of 4 floats; the parts that differ are given as
// opcodes.
std::string pickle(const std::string& offset, const std::string& size, const std::string& stride,
                   const std::string& count = "K\4",
                   const std::string& storage = "ctorch\nFloatStorage\n") {
  return "\x80\2ctorch._utils\n_rebuild_tensor_v2\n((X\7" + std::string(3, '\0') + "storage" +
         storage + "X\1" + std::string(3, '\0') + "0X\3" + std::string(3, '\0') + "cpu" + count +
         "tQ" + offset + size + stride +
         "\x89"
         "ccollections\nOrderedDict\n)RtR.";
}

Records with(const std::string& data, std::size_t bytes = 16) {
  return {{"a/data.pkl", data}, {"a/data/0", std::string(bytes, '\0')}, {"a/version", "3\n"}};
}

std::string number(int value) {
  return std::string("K") + static_cast<char>(value);
}
std::string tuple1(const std::string& item) {
  return item + "\x85";
}
std::string huge() {
  return std::string("\x8a\x08\0\0\0\0\0\0\0\x40", 10);
}  // 2^62

// Rows P10-P14, Z17: geometry and storages that do not fit.
TEST(TorchHostile, Geometry) {
  const std::string zero = std::string("K\0", 2);
  const auto good = pickle(zero, tuple1(number(4)), tuple1(number(1)));
  const Value tensor = read(test::source(archive(with(good))));
  EXPECT_EQ(tensor.as_tensor().shape, Shape{4});

  const auto minus = std::string("J\xff\xff\xff\xff");
  const auto corrupt = ErrorCode::corrupt;
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(5)), tuple1(number(1))))), corrupt);
  EXPECT_EQ(code_of(with(pickle(number(1), tuple1(number(4)), tuple1(number(1))))), corrupt);
  EXPECT_EQ(code_of(with(pickle(minus, tuple1(number(4)), tuple1(number(1))))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(minus), tuple1(number(1))))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(4)), tuple1(minus)))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(4)), ")"))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1("N"), tuple1(number(1))))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(huge()), tuple1(huge())))), ErrorCode::limit);
  EXPECT_EQ(code_of(with(pickle(zero, huge() + huge() + "\x86", number(1) + number(1) + "\x86"))),
            ErrorCode::limit);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(4)), tuple1(number(1)), number(5)))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(4)), tuple1(number(1)), minus))), corrupt);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(4)), tuple1(number(1)), huge()))), corrupt);
  EXPECT_EQ(code_of(with(good, 20)), corrupt);
  EXPECT_EQ(code_of(with(good, 0)), corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", good}, {"a/version", "3\n"}}), corrupt);
  std::string ones = "(";
  for (int i = 0; i < 65; ++i) ones += number(1);
  EXPECT_EQ(code_of(with(pickle(zero, ones + "t", ones + "t"))), ErrorCode::limit);
  // P14: a huge view of few bytes is only described.
  const auto wide = read(test::source(archive(with(pickle(zero, tuple1(huge()), tuple1(zero))))));
  EXPECT_EQ(wide.as_tensor().shape, Shape{std::int64_t{1} << 62});
}

// The pickle of an item that equals the one before is not run again: what it says is still compared
// with the archive that it is in, and the storage is that archive's own.
TEST(TorchHostile, ItemsWithTheSamePickle) {
  const std::string zero = std::string("K\0", 2);
  const std::string good = pickle(zero, tuple1(number(4)), tuple1(number(1)));
  const auto item = [](const Records& records) {
    return read_tensor_item(test::source(archive(records)));
  };
  const auto code_of_item = [&](const Records& records) {
    return test::thrown([&] { (void)item(records); }).first;
  };
  const Records first = with(good);
  const Records other = {{"b/version", "3\n"},
                         {"b/byteorder", "little"},
                         {"b/data.pkl", good},
                         {"b/data/0", std::string(16, 'x')}};
  for (const Records& records : {first, other, first, other}) {
    const auto file = test::source(archive(records));
    const Tensor again = read_tensor_item(file);
    const Value fresh = read(file);
    const Storage& found = *again.pieces.at(0).storage;
    const Storage& expected = *fresh.as_tensor().pieces.at(0).storage;
    EXPECT_EQ(again.shape, Shape{4});
    EXPECT_EQ(again.dtype, DType::float32);
    EXPECT_EQ(found.source, file);
    EXPECT_EQ(found.offset, expected.offset);
    EXPECT_EQ(found.size, expected.size);
    EXPECT_EQ(found.crc32, expected.crc32);
  }
  EXPECT_EQ(code_of_item(with(good, 12)), ErrorCode::corrupt);
  EXPECT_EQ(code_of_item(with(good, 20)), ErrorCode::corrupt);
  EXPECT_EQ(code_of_item({{"a/data.pkl", good}, {"a/version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of_item({{"a/data.pkl", good}, {"a/data/0", std::string(16, '\0')}}),
            ErrorCode::corrupt);
  EXPECT_EQ(item(first).shape, Shape{4});
  // Without an item before.
  std::thread([&] { EXPECT_EQ(code_of_item(with("")), ErrorCode::incomplete); }).join();
}

TEST(TorchHostile, StorageIds) {
  const std::string zero = std::string("K\0", 2);
  const auto code = [&](const std::string& storage) {
    return code_of(with(pickle(zero, tuple1(number(4)), tuple1(number(1)), "K\4", storage)));
  };
  EXPECT_EQ(code("ctorch\nNoStorage\n"), ErrorCode::unsupported);
  EXPECT_EQ(code("cother\nFloatStorage\n"), ErrorCode::corrupt);
  EXPECT_EQ(code("K\1"), ErrorCode::corrupt);
  EXPECT_EQ(code_of(with("\x80\2K\1Q.")), ErrorCode::corrupt);
  EXPECT_EQ(code_of(with("\x80\2K\1K\2\x86Q.")), ErrorCode::corrupt);
}

// P11, P13: counts and dimensions that no storage has.
TEST(TorchHostile, CountsAndDimensions) {
  const std::string zero = std::string("K\0", 2);
  const auto with_count = [&](const std::string& count, std::size_t bytes) {
    return code_of(with(pickle(zero, tuple1(zero), tuple1(number(1)), count), bytes));
  };
  EXPECT_EQ(with_count(zero, 16), ErrorCode::corrupt);
  EXPECT_EQ(with_count(std::string("\x8a\x09\0\0\0\0\0\0\0\x80\0", 11), 16), ErrorCode::limit);
  EXPECT_EQ(with_count("N", 16), ErrorCode::corrupt);
  std::string many = "(";
  for (int i = 0; i < 900'000; ++i) many += 'I' + std::string("1\n");
  EXPECT_EQ(code_of(with(pickle(zero, many + "t", many + "t"))), ErrorCode::limit);
  EXPECT_EQ(code_of(with(pickle(zero, tuple1(number(4)), number(1) + number(1) + "\x86"))),
            ErrorCode::corrupt);
  EXPECT_EQ(code_of(with(pickle(huge(), tuple1(number(4)), tuple1(number(1))))),
            ErrorCode::corrupt);
}

// P15, P16: sparse and quantized tensors are object nodes. Their indices, scales and axes are never
// used to reach anything, so whatever they say is kept and no element is read by them.
TEST(TorchHostile, SparseAndQuantizedTensorsAreNodes) {
  const std::string zero = std::string("K\0", 2);
  const std::string inner = pickle(zero, tuple1(number(4)), tuple1(number(1)));
  const std::string tensor = inner.substr(2, inner.size() - 3);  // without PROTO and STOP
  for (const std::string name : {"_rebuild_sparse_tensor", "_rebuild_qtensor"}) {
    std::string call = "\x80\2ctorch._utils\n";
    call.append(name).append("\n(").append(tensor).append(huge()).append("tR.");
    const Value tree = read(test::source(archive(with(call))));
    ASSERT_TRUE(tree.is(Value::Kind::object));
    EXPECT_EQ(tree.as_object().name(), "torch._utils." + name);
  }
}

// Rows Z11, Z19, Z21: the archive around the pickle.
TEST(TorchHostile, Records) {
  const std::string none = "\x80\2N.";
  EXPECT_TRUE(read(test::source(archive({{"a/data.pkl", none}, {"a/version", "3\n"}})))
                  .is(Value::Kind::none));
  EXPECT_TRUE(read(test::source(archive({{"a/data.pkl", none}, {"a/.data/version", "6\n"}})))
                  .is(Value::Kind::none));
  EXPECT_EQ(code_of(Records{}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/other", "x"}, {"a/version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"data.pkl", none}, {"version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", none}, {"b/version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"../data.pkl", none}, {"../version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"/data.pkl", none}, {"/version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", none}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", none}, {"a/version", "abc"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", none}, {"a/version", "999999"}}), ErrorCode::unsupported);
  const auto order = [&](const char* text) {
    return code_of({{"a/data.pkl", none}, {"a/byteorder", text}, {"a/version", "3\n"}});
  };
  EXPECT_EQ(order("big"), ErrorCode::unsupported);
  EXPECT_EQ(order("pdp"), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", none + "x"}, {"a/version", "3\n"}}), ErrorCode::corrupt);
  EXPECT_EQ(code_of({{"a/data.pkl", "\x80\2cos\nsystem\nX\1" + std::string(3, '\0') + "x\x85R."},
                     {"a/version", "3\n"}}),
            ErrorCode::unsafe);
}

TEST(TorchHostile, Z11NamesOfTheFolder) {
  const std::string none = "\x80\2N.";
  const auto code = [&](const std::string& root) {
    return code_of({{root + "/data.pkl", none}, {root + "/version", "3\n"}});
  };
  EXPECT_EQ(code("a\\b"), ErrorCode::corrupt);
  EXPECT_EQ(code(std::string("a\0b", 3)), ErrorCode::corrupt);
  EXPECT_EQ(code("."), ErrorCode::corrupt);
  EXPECT_EQ(code("a\xff"), ErrorCode::corrupt);
  EXPECT_EQ(code(std::string(60'000, 'a')), ErrorCode::limit);
  EXPECT_EQ(code_of({{"a/data.pkl", none}, {"a/\xc0\x80", ""}, {"a/version", "3\n"}}),
            ErrorCode::corrupt);
}

TEST(TorchHostile, OtherFormats) {
  EXPECT_EQ(code_of(test::golden("script.pt")), ErrorCode::unsupported);
  EXPECT_EQ(code_of(test::golden("olmo.safetensors")), ErrorCode::corrupt);
  std::vector<std::byte> tar(1024);
  const auto magic = std::as_bytes(std::span("ustar", 5));
  std::copy(magic.begin(), magic.end(), tar.begin() + 257);
  EXPECT_EQ(code_of(tar), ErrorCode::unsupported);
  EXPECT_EQ(code_of(std::vector<std::byte>{}), ErrorCode::incomplete);
  // Z21: 7z, gzip, a plain pickle, a pickle of protocol 0.
  for (const std::string start : {"7z\xbc\xaf\x27\x1c", "\x1f\x8b\x08", "\x80\2}.", "(dp0\n."}) {
    const std::string text = start + std::string(600, '\0');
    const auto bytes = std::as_bytes(std::span(text));
    EXPECT_EQ(code_of(std::vector<std::byte>(bytes.begin(), bytes.end())), ErrorCode::corrupt)
        << start;
  }
}

TEST(TorchHostile, ErrorsSayWhere) {
  try {
    (void)read(test::source(archive(with("\x80\2K\1Q."))));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.path(), "bytes under test:a/data.pkl");
    EXPECT_TRUE(error.offset().has_value());
  }
}

TEST(TorchHostile, SurvivesDamage) {
  const auto parse = [](std::vector<std::byte> bytes) {
    (void)read(test::source(std::move(bytes)));
  };
  for (const char* name : {"fsdp1_uop0_ws2/optim.pt", "item.pt"}) {
    EXPECT_THAT(test::damage(test::golden(name), 5000, parse), testing::IsEmpty()) << name;
  }
}

// Damage that the zip's CRC would hide is done to the pickle before the archive is made.
TEST(TorchHostile, SurvivesDamagedPickles) {
  const zip::Archive kinds(test::source(test::golden("kinds.pt")));
  Records records;
  for (const zip::Entry& entry : kinds.entries()) {
    const auto bytes = kinds.read(entry, 1 << 20);
    records.emplace_back(entry.name,
                         std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  }
  const auto bytes = std::as_bytes(std::span(records[0].second));
  const std::vector<std::byte> original(bytes.begin(), bytes.end());
  const auto parse = [&](const std::vector<std::byte>& damaged) {
    records[0].second.assign(reinterpret_cast<const char*>(damaged.data()), damaged.size());
    const Value tree = read(test::source(archive(records)));
    (void)Writer(tree, "kinds");
  };
  EXPECT_THAT(test::damage(original, 3000, parse), testing::IsEmpty());
}

}  // namespace
}  // namespace tessera::torch_file
