// Hostile pickles: every row is refused with its code, or kept as data; nothing is executed,
// nothing crashes, no claimed size is allocated.
#include <gtest/gtest.h>

#include <cctype>
#include <ostream>

#include "format/pickle/pickle.h"
#include "format/pickle/scan.h"
#include "format/test_support.h"
#include "value/render.h"

namespace tessera::pickle {
namespace {

using namespace std::string_literals;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}

Value parse(const std::string& text) {
  return read(bytes_of(text)).value;
}

std::string repeat(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

struct Row {
  const char* what;
  std::string pickle;
  ErrorCode code;
};

void PrintTo(const Row& row, std::ostream* out) {  // NOLINT: gtest's name
  *out << row.what;
}

class Hostile : public ::testing::TestWithParam<Row> {};

TEST_P(Hostile, IsRefused) {
  try {
    const Value value = parse(GetParam().pickle);
    FAIL() << "was read as " << render(value);
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(GetParam().code)) << error.what();
    EXPECT_TRUE(error.offset().has_value());
  }
}

// The text has 100 KB; a thousand keys make 100 MB of it.
std::string one_text_under_many_keys() {
  std::string text = "\x80\x02X\xa0\x86\1\0"s + repeat("x", 100'000) + "q"s + '\0' + "0}(";
  for (int i = 0; i < 1'000; ++i) text += "I" + std::to_string(i) + "\nh"s + '\0';
  return text + "u.";
}

constexpr auto kUnsafe = ErrorCode::unsafe;
constexpr auto kCorrupt = ErrorCode::corrupt;
constexpr auto kLimit = ErrorCode::limit;
constexpr auto kIncomplete = ErrorCode::incomplete;
constexpr auto kUnsupported = ErrorCode::unsupported;

const Row kRows[] = {
    {"P01 system", "cos\nsystem\n(Vid\ntR.", kUnsafe},
    {"P01 posix", "cposix\nsystem\n(Vid\ntR.", kUnsafe},
    {"P01 new object",
     "\x80\x02"
     "csubprocess\nPopen\n(Vid\nt\x81.",
     kUnsafe},
    {"P02 names by memo",
     "\x80\x04\x8c\x02os\x94\x8c\x06system\x94"
     "00h\0h\1\x93\x8c\x02id\x85R."s,
     kUnsafe},
    {"P03 inst", "(Vid\nios\nsystem\n.", kUnsafe},
    {"P03 inst of any class", "(icollections\nOrderedDict\n.", kUnsafe},
    {"P03 obj", "(cos\nsystem\nVid\no.", kUnsafe},
    {"P04 attribute walk",
     "\x80\x04\x8c\x0ctorch._utils\x8c\x1e_rebuild_tensor_v2.__globals__\x93)R."s, kUnsafe},
    {"P04 walk to a module", "\x80\x04\x8c\x05torch\x8c\x09os.system\x93)R.", kUnsafe},
    {"P05 python 2 eval",
     "\x80\x02"
     "c__builtin__\neval\n(V1\ntR.",
     kUnsafe},
    {"P05 reconstructor",
     "\x80\x02"
     "ccopy_reg\n_reconstructor\n(ca\nb\nc__builtin__\nobject\nNtR.",
     kUnsafe},
    {"P05 getattr",
     "\x80\x02"
     "c__builtin__\ngetattr\n(cos\nsystem\nVpopen\ntR.",
     kUnsafe},
    {"P05 getattr of a dunder",
     "\x80\x02"
     "c__builtin__\ngetattr\n(ctorch\nSize\nV__class__\ntR.",
     kUnsafe},
    {"P06 rot13", "c_codecs\nencode\n(Vx\nVrot13\ntR.", kCorrupt},
    {"P06 ordered dict of text", "ccollections\nOrderedDict\n(Vx\ntR.", kCorrupt},
    {"P07 items of a list", "\x80\x02](K\1K\2u.", kCorrupt},
    {"P07 item of a tuple", "\x80\x02)K\1K\2s.", kCorrupt},
    {"P08 append to a dict", "\x80\x02}K\1a.", kCorrupt},
    {"P08 add to a list", "\x80\x04](K\1\x90.", kCorrupt},
    {"P08 class of an ordered dict", "ccollections\nOrderedDict\n)R}V__class__\nNsb.", kCorrupt},
    {"P08 dict of an ordered dict", "ccollections\nOrderedDict\n)R}V__dict__\n}sb.", kCorrupt},
    {"P08 state of a list", "\x80\x02]}b.", kCorrupt},
    {"P08 call of a string", "\x80\x02U\x01x)R.", kCorrupt},
    {"P08 arguments that are no tuple", "ca\nb\n]R.", kCorrupt},
    {"P09 new object with keywords", "\x80\x04\x8c\x0asubprocess\x8c\x05Popen\x93)}\x92.", kUnsafe},
    {"P09 keywords that are no dict", "\x80\x04\x8c\1a\x8c\1b\x93)]\x92.", kCorrupt},
    {"P10 storage outside of an archive",
     "\x80\x02("
     "X\7\0\0\0storagetQ."s,
     kUnsupported},
    {"P17 unset memo", "\x80\x02h\x05.", kCorrupt},
    {"P17 negative put", "Np-1\n.", kCorrupt},
    {"P18 long text",
     "\x80\x02X\xff\xff\xff\xff"
     "abc.",
     kIncomplete},
    {"P18 long bytes",
     "\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"
     "abc.",
     kIncomplete},
    {"P18 long bytearray",
     "\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\xff"
     "abc.",
     kIncomplete},
    {"P18 long integer",
     "\x80\x02\x8b\xff\xff\xff\x7f"
     "abc.",
     kIncomplete},
    {"P18 negative length",
     "\x80\x02\x8b\xff\xff\xff\xff"
     "abc.",
     kCorrupt},
    {"P19 frame too long", "\x80\x04\x95\x63\0\0\0\0\0\0\0N."s, kIncomplete},
    {"P19 frame crossed", "\x80\x04\x95\2\0\0\0\0\0\0\0\x8c\3abc."s, kCorrupt},
    {"P19 nested frame", "\x80\x04\x95\x0c\0\0\0\0\0\0\0\x95\2\0\0\0\0\0\0\0NN0."s, kCorrupt},
    {"P20 marks", repeat("(", 5'000'000) + ".", kLimit},
    {"P20 copies of one value", "N" + repeat("2", 1'500'000) + ".", kLimit},
    {"P20 values", repeat("N", 1'500'000) + ".", kLimit},
    {"P20 one value memoized often", "\x80\x04N" + repeat("\x94", 1'500'000) + ".", kLimit},
    {"P20 pop to no mark", "N1.", kCorrupt},
    {"P20 pop of nothing", "0.", kCorrupt},
    {"P20 mark of nothing", "t.", kCorrupt},
    {"P21 deep lists", repeat("]", 200'000) + repeat("a", 199'999) + ".", kLimit},
    {"P21 deep tuples", "N" + repeat("\x85", 200'000) + ".", kLimit},
    {"P21 deep dicts", repeat("}N", 200'000) + "N" + repeat("s", 200'000) + ".", kLimit},
    {"P22 list in itself", "\x80\x02]q\0h\0a."s, kUnsupported},
    {"P22 list in its tuple",
     "\x80\x02]q\0h\0\x85"
     "a."s,
     kUnsupported},
    {"P22 dict in itself", "\x80\x02}q\0K\1h\0s."s, kUnsupported},
    {"P22 object in its state",
     "\x80\x02"
     "ca\nb\n)\x81q\0}K\1h\0sb."s,
     kUnsupported},
    {"P23 shared doubling", "]" + repeat("2\x86", 60) + ".", kLimit},
    {"P23 a million places", "]" + repeat("2\x86", 20) + ".", kLimit},
    {"P23 one list in many places",
     "\x80\x02](" + repeat("N", 2'000) + "eq"s + '\0' + "0](" + repeat("h\0"s, 2'000) + "e.",
     kLimit},
    {"P23 one text under many keys", one_text_under_many_keys(), kLimit},
    {"P23 sets of one list",
     "\x80\x02](" + repeat("N", 50'000) + "eq"s + '\0' + "0c__builtin__\nset\nq\1" + "0(" +
         repeat("h\1h\0\x85R"s, 1'000) + "t.",
     kLimit},
    {"P23 bytes of one text",
     "\x80\x02X\x50\xc3\0\0"s + repeat("x", 50'000) + "q"s + '\0' + "0c_codecs\nencode\nq\1" +
         "0X\6\0\0\0latin1q\2"s + "0(" + repeat("h\1h\0h\2\x86R"s, 1'000) + "t.",
     kLimit},
    {"P24 no stop", "\x80\x02N", kIncomplete},
    {"P24 empty", "", kIncomplete},
    {"P24 two left", "\x80\x02NN.", kCorrupt},
    {"P24 none left", "\x80\x02.", kCorrupt},
    {"P24 open mark", "\x80\x02(N.", kCorrupt},
    {"P24 protocol 9", "\x80\x09N.", kUnsupported},
    {"P24 protocol 255", "\x80\xffN.", kUnsupported},
    {"P24 protocol in the middle", "N\x80\x02.", kCorrupt},
    {"P24 buffer", "\x80\x05\x97.", kUnsupported},
    {"P24 extension", "\x80\x02\x82\1.", kUnsupported},
    {"P24 read-only buffer", "\x80\x05N\x98.", kUnsupported},
    {"P24 extension of two bytes", "\x80\x02\x83\1\0."s, kUnsupported},
    {"P24 extension of four bytes", "\x80\x02\x84\1\0\0\0."s, kUnsupported},
    {"P24 unknown opcode", "\x80\x02\xf0.", kCorrupt},
    {"P25 key twice", "\x80\x02}(K\1NK\1Nu.", kCorrupt},
    {"P25 NaN key", "\x80\x02}G\x7f\xf8\0\0\0\0\0\0Ns."s, kUnsupported},
    {"P25 list as key", "\x80\x02}]Ns.", kCorrupt},
    {"P25 key without value", "\x80\x02}(K\1u.", kCorrupt},
    {"P26 not utf-8", "\x80\x02X\2\0\0\0\xc0\x80."s, kCorrupt},
    {"P26 name not utf-8",
     "\x80\x02"
     "c\xff\nb\n.",
     kCorrupt},
    {"P27 long decimal", "L" + std::string(1'000'000, '9') + "L\n.", kLimit},
    {"P27 large float", "F1e999999\n.", kCorrupt},
    {"P27 hexadecimal", "I0x10\n.", kCorrupt},
    {"state twice", "ca\nb\n)R}b}b.", kUnsupported},
    {"persistent id", "Pxyz\n.", kUnsupported},
    {"persistent id not utf-8", "P\xff\n.", kCorrupt},
};

std::string test_name(const ::testing::TestParamInfo<Row>& row) {
  std::string name = row.param.what;
  for (char& c : name) {
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  return name;
}

INSTANTIATE_TEST_SUITE_P(Pickle, Hostile, ::testing::ValuesIn(kRows), test_name);

TEST(HostilePickle, HarmlessFormsAreData) {
  EXPECT_EQ(render(parse("\x80\x02"
                         "c__builtin__\ngetattr\n(ctorch\nSize\nVInner\ntR.")),
            "builtins.getattr(torch.Size, 'Inner')");
  // A dangerous name that nothing calls is only a name.
  EXPECT_EQ(parse("cos\nsystem\n."), Value::global("os", "system"));
  // A lone surrogate is what Python's "surrogatepass" lets through: kept as it is.
  EXPECT_EQ(parse("\x80\x02X\3\0\0\0\xed\xa0\x80."s).as_string(), "\xed\xa0\x80");
  EXPECT_EQ(parse("\x80\x02Nr\xff\xff\xff\xff"
                  "0j\xff\xff\xff\xff."),
            Value());
}

// P06, P09, P17, P24, P25, P26: odd, and harmless as data.
TEST(HostilePickle, OddFormsAreKept) {
  EXPECT_EQ(render(parse("ctorch\ndevice\n(Vcuda:999999\ntR.")), "torch.device('cuda:999999')");
  EXPECT_EQ(parse("\x80\x02"
                  "ca\nb\n)\x81.")
                .as_object()
                .name(),
            "a.b");
  EXPECT_EQ(parse("Np99999999999\n0g99999999999\n."), Value());
  EXPECT_EQ(parse("N."), Value());
  EXPECT_EQ(render(parse("\x80\x02}(K\1NNNK\1K\2\x86Nu.")), "{1: None, None: None, (1, 2): None}");
  const std::string odd = "a\0\x1b[31mb"s;
  EXPECT_EQ(parse("\x80\x02X\x08\0\0\0"s + odd + ".").as_string(), odd);
  EXPECT_EQ(render(Value(odd)), "'a\\x00\\x1b[31mb'");
  // Escapes that Python reads and does not write.
  EXPECT_EQ(parse(R"(S'a\,8\x41\101\8\0\\b')"s + "\n.").as_string(), "a\\,8AA\\8\0\\b"s);
  const std::string long_key(1 << 20, 'k');
  const Value long_dict = parse("\x80\x02}X\0\0\x10\0"s + long_key + "Ns.");
  EXPECT_NE(long_dict.find(long_key), nullptr);
}

TEST(HostilePickle, NamesAreListedWithoutReading) {
  EXPECT_EQ(globals(bytes_of("cos\nsystem\n(Vid\ntR.")), std::vector<std::string>{"os.system"});
  EXPECT_EQ(globals(bytes_of("\x80\x04\x8c\x02os\x94\x8c\x06system\x94"
                             "00h\0h\1\x93."s)),
            std::vector<std::string>{"os.system"});
  EXPECT_EQ(globals(bytes_of("(Vid\nios\nsystem\n.")), std::vector<std::string>{"os.system"});
}

TEST(HostilePickle, NamesBehindOddNumbersAreTold) {
  for (const std::string& number : {"I0x1f\n"s, "I1_0\n"s, "I0\v\n"s, "I\0\n"s, "L0b1\n"s})
    EXPECT_EQ(globals(bytes_of(number + "0cos\nsystem\n.")), std::vector<std::string>{"os.system"})
        << number;
  // Python ends there.
  for (const char* number : {"Ia b\n", "Ino\n", "g7\n", "Sx\n"})
    EXPECT_TRUE(globals(bytes_of(number + "0cos\nsystem\n."s)).empty()) << number;
}

TEST(HostilePickle, NothingAndHalfAPickleAreProblems) {
  EXPECT_EQ(scan(bytes_of("i\xff\na\n.")).problems.size(), 1U);  // no mark, and a name that is none
  for (const char* text : {"", "\x80", "\x80\x04", "N", "ca\n"}) {
    const Found found = scan(bytes_of(text));
    EXPECT_TRUE(found.cut) << text;
    EXPECT_EQ(found.problems.size(), 1U) << text;
  }
}

// getattr of a class and a member that are known is the member's name; everything else is getattr.
TEST(HostilePickle, P05OnlyKnownMembersAreNoGetattr) {
  const std::string get = "c__builtin__\ngetattr\n";
  const std::string cls = "ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n";
  const std::string member = "VTORCH_CHANNELS_LAST\n";
  const auto says_getattr = [](const std::string& text) {
    const std::vector<std::string> names = globals(bytes_of("\x80\x02" + text + "."));
    return std::find(names.begin(), names.end(), "builtins.getattr") != names.end();
  };
  const std::string name = "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING";
  EXPECT_EQ(globals(bytes_of("\x80\x02" + get + cls + member + "\x86R.")),
            (std::vector<std::string>{name, name + ".TORCH_CHANNELS_LAST"}));
  EXPECT_FALSE(says_getattr(get + "(" + cls + member + "tR"));
  EXPECT_FALSE(
      says_getattr("(" + get + "q\1" + cls + "q\2" + member + "\x86Rh\1h\2" + member + "\x86Rt"));
  EXPECT_FALSE(says_getattr(get + "ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\n" +
                            "VProcessGroupState\n\x86R"));
  EXPECT_FALSE(says_getattr("(" + cls + member + "i__builtin__\ngetattr\n"));
  const std::string hostile[] = {
      get + cls + "V__class__\n\x86R",
      get + cls + "Vmro\n\x86R",
      get + "ctorch\nSize\n" + member + "\x86R",
      get + "cos\n_MEM_FORMAT_ENCODING\n" + member + "\x86R",
      get + get + cls + member + "\x86R" + "V__class__\n\x86R",          // of the result
      get + cls + "ca\nb\n)R\x86R",                                      // a name that is computed
      get + cls + member + "N\x87R",                                     // with a default
      get + "(" + cls + member + "lR",                                   // no tuple
      get + cls + member + "\x86\x81",                                   // as a class
      get + "2" + cls + member + "\x86R\x86",                            // one is left over
      get + "q\1" + cls + member + "\x86Rh\1\x86",                       // one from the memo
      "cfunctools\npartial\n" + get + "\x85R" + cls + member + "\x86R",  // hidden in a call
      get + "0N",                                                        // not used at all
  };
  for (const std::string& text : hostile) EXPECT_TRUE(says_getattr(text)) << text;
}

TEST(HostilePickle, M15EveryPrefixAndManyFlipsAreSurvived) {
  for (const char* name : {"dcp/c1.metadata", "dcp/hand.metadata", "pickle/objects.p2",
                           "pickle/blobs.p0", "pickle/defaults.p4"}) {
    SCOPED_TRACE(name);
    const auto accepted = test::damage(test::golden(name), 2000, [](std::vector<std::byte> bytes) {
      (void)read(bytes);
      (void)globals(bytes);
    });
    EXPECT_TRUE(accepted.empty());
  }
}

}  // namespace
}  // namespace tessera::pickle
