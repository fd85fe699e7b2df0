// Values of classes that everybody knows, as Python and numpy have pickled them.
#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "format/pickle/pickle.h"
#include "format/test_support.h"
#include "tessera/numpy_array.h"
#include "value/render.h"

namespace tessera::pickle {
namespace {

std::vector<std::string> lines_of(const std::string& name) {
  const auto bytes = test::golden("known/" + name);
  std::istringstream text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  return lines;
}

Value golden_list(const std::string& name) {
  return read(test::golden("known/" + name)).value;
}

// The values of tests/golden/make/known.py, and Python's repr of each.
TEST(KnownGoldens, AreRenderedAsPythonDoes) {
  const std::vector<std::string> expected = lines_of("values.txt");
  for (const char* name : {"values.p2", "values.p5"}) {
    const Value values = golden_list(name);
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_EQ(render(values[i], 1000), expected[i]) << name;
  }
}

// The numbers alone, row by row: "array([[0, 1], [2, 3]], dtype=int16)" as "[0, 1, 2, 3]".
std::string numbers_of(const Value& array) {
  std::string text = render(array, 1000);
  text = text.substr(text.find('['), text.rfind(']') + 1 - text.find('['));
  std::erase_if(text, [](char c) { return c == '[' || c == ']'; });
  return '[' + text + ']';
}

TEST(KnownGoldens, ArraysHaveNumpysNumbers) {
  const std::vector<std::string> expected = lines_of("arrays.txt");
  for (const char* name : {"arrays.p2", "arrays.p5"}) {
    const Value values = golden_list(name);
    ASSERT_EQ(values.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const bool is_array = numpy_array(values[i]).has_value();
      EXPECT_EQ(is_array ? numbers_of(values[i]) : "None", expected[i]) << name << ' ' << i;
    }
  }
}

}  // namespace
}  // namespace tessera::pickle
