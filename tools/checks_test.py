#!/usr/bin/env python3
"""Proves that the checks of this folder can fail, and that they pass what they should."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import check_budgets
import check_docs
import check_hostile
import check_layers
import check_rows
import cpp_functions


def make_tree(files):
    folder = tempfile.TemporaryDirectory()
    for name, text in files.items():
        path = pathlib.Path(folder.name) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def layers(files):
    with make_tree(files) as root:
        return check_layers.violations(pathlib.Path(root))


def budgets(files):
    with make_tree(files) as root:
        return check_budgets.violations(pathlib.Path(root))


def hostile(page, files=None):
    tests = {"src/a_test.cpp": "TEST(A, Works) {\n}\nTEST_P(B, Works) {\n}\n",
             "tests/cli/c.py": "class C:\n    def test_works(self):\n"}
    with make_tree({"docs/hostile-cases.md": page, **(files or tests)}) as root:
        return check_hostile.violations(pathlib.Path(root))


def rows(page, names="F1 to F2, P1, P2"):
    files = {"src/a_test.cpp": "TEST(A, Works) {\n}\nTEST_P(B, Works) {\n}\nTEST(C, Skips) {\n}\n", "src/b.cpp": "TEST(C, Works) {\n}\n",
             "src/d_test.cpp": 'register_cases({{"test_a_name" + flag("wrap"), works}});\n',
             "tests/cli/c.py": "    def test_works(self):\n", "tests/e.h": "TYPED_TEST_P(Suite, Works) {\n}\n",
             "tests/crash/CMakeLists.txt": "add_test(NAME crash.kills COMMAND x)\nadd_test(NAME ${name})\n",
             "src/CMakeLists.txt": "add_test(NAME elsewhere COMMAND x)\n"}
    specs = {name: spec._replace(rows=names) for name, spec in check_rows.SPECS.items()}
    files.update({spec.page: page for spec in specs.values()})
    with make_tree(files) as root:
        found, states = check_rows.violations(pathlib.Path(root), specs)
    return len(found) // len(check_rows.SPECS), states


def page_of(name, text, ids):
    """The violations of one specification's page where A.Works is the only test."""
    spec = check_rows.SPECS[name]
    with make_tree({spec.page: text}) as root:
        return check_rows.check_page(pathlib.Path(root), spec, ids, {"A.Works"})[0]


def pages(files):
    with make_tree(files) as root:
        return check_docs.violations(pathlib.Path(root))


class Bindings(unittest.TestCase):
    def test_headers_with_templates_are_told(self):
        page = "# API\n\n## Headers for binding generators\n\n- `a.h`, `pytorch/b.h`: some `c.h`\n\n## More\n"
        tree = {"docs/api.md": page, "include/tessera/a.h": "template <typename T> T f();\n",
                "include/tessera/pytorch/b.h": "#define B 1\n", "include/tessera/c.h": "  template <class T>\n",
                "include/tessera/detail/d.h": "template <class T>\n", "include/tessera/e.h": "// a template\n"}
        self.assertEqual(pages(tree), [])
        self.assertEqual(len(pages(tree | {"include/tessera/e.h": "#define E 1\n", "include/tessera/a.h": "int f();\n"})), 2)


def lines(count):
    return "int x;\n" * count


class Layers(unittest.TestCase):
    def test_downward_includes_pass(self):
        self.assertEqual(layers({
            "src/io/a.cpp": '#include "base/b.h"\n#include "tessera/io.h"\n#include <vector>\n',
            "src/format/torch/a.cpp": '#include "format/zip/zip.h"\n#include "format/registry.h"\n',
            "src/torch/a.cpp": '#include <torch/torch.h>\n#include "checkpoint/c.h"\n'}), [])

    def test_upward_include_fails(self):
        found = layers({"src/base/a.cpp": '// why\n#include "layout/plan.h"\n'})
        self.assertEqual(len(found), 1)
        self.assertTrue(found[0].startswith("src/base/a.cpp:2:"), found)

    def test_public_headers_have_layers(self):
        self.assertEqual(len(layers({"src/base/a.cpp": '#include "tessera/checkpoint.h"\n'})), 1)
        self.assertEqual(len(layers({"include/tessera/error.h": '#include "tessera/io.h"\n'})), 1)
        self.assertEqual(len(layers({"include/tessera/io.h": '#include "base/process.h"\n'})), 1)
        self.assertEqual(len(layers({"include/tessera/unheard_of.h": "\n"})), 1)

    def test_unknown_folder_fails(self):
        self.assertEqual(len(layers({"src/misc/a.cpp": "\n"})), 1)

    def test_libtorch_stays_below_the_bar(self):
        for name in ("src/checkpoint/a.cpp", "src/cli/a.cpp", "include/tessera/io.h"):
            self.assertEqual(len(layers({name: "#include <torch/torch.h>\n"})), 1, name)
        for name in ("src/fsdp/a.cpp", "tests/a.cpp", "examples/a.cpp", "include/tessera/fsdp.h"):
            self.assertEqual(layers({name: "#  include <ATen/ATen.h>\n"}), [], name)

    def test_stores_and_formats_do_not_know_each_other(self):
        self.assertEqual(len(layers({"src/storage/a.cpp": '#include "format/zip/zip.h"\n'})), 1)
        self.assertEqual(len(layers({"src/format/a.cpp": '#include "tessera/storage.h"\n'})), 1)

    def test_formats_have_an_order(self):
        self.assertEqual(len(layers({"src/format/zip/a.cpp": '#include "format/torch/torch_file.h"\n'})), 1)

    def test_rooms_have_an_order(self):
        up = '#include "checkpoint/write/targets.h"\n'
        self.assertEqual(len(layers({"src/checkpoint/read/a.cpp": up})), 1)
        self.assertEqual(layers({"src/checkpoint/check/a.cpp": up, "src/checkpoint/write/b.cpp": up}), [])
        self.assertEqual(layers({"src/checkpoint/read/a_test.cpp": up}), [], "tests may use any room")
        self.assertEqual(len(layers({"src/fsdp/unit/a.cpp": '#include "fsdp/step/root.h"\n'})), 1)
        self.assertEqual(len(layers({"src/fsdp/state/a.h": '#include "fsdp/testing/test_model.h"\n'})), 1)
        self.assertEqual(len(layers({"src/checkpoint/attic/a.cpp": ""})), 1, "a room without a place")

    def test_nobody_includes_the_command(self):
        self.assertEqual(len(layers({"src/fsdp/a.cpp": '#include "cli/main.h"\n'})), 1)

    def test_examples_see_public_headers_alone(self):
        self.assertEqual(len(layers({"examples/a.cpp": '#include "base/process.h"\n'})), 1)
        self.assertEqual(layers({"examples/a.cpp": '#include "tessera/io.h"\n#include "model.h"\n'}), [])


class Budgets(unittest.TestCase):
    def test_file_lines(self):
        self.assertEqual(budgets({"a.cpp": lines(600), "a.h": lines(300), "a.txt": lines(5000)}), [])
        self.assertEqual(len(budgets({"a.cpp": lines(601), "a.h": lines(301), "a.py": "x = 1\n" * 601})), 3)

    def test_function_lines(self):
        def body(count):
            return "namespace n {\nvoid f(int a) {\n" + "  g();\n" * count + "}\n}\n"
        self.assertEqual(budgets({"a.cpp": body(78)}), [])
        self.assertEqual(len(budgets({"a.cpp": body(79)})), 1)

    def test_parameters(self):
        self.assertEqual(budgets({"a.h": "void f(int a, B<C, D> b, int c, int d, int e, int g = h(1, 2));\n"}), [])
        self.assertEqual(len(budgets({"a.h": "void f(int a, int b, int c, int d, int e, int g, int h);\n"})), 1)

    def test_branches_of_a_function(self):
        def tree(count, name="src/a.cpp"):
            body = "void f(int a) {\n" + "  if (a) g();\n" * count + "}\n"
            return {name: body + "\n" * check_budgets.SHORT_LINES, "src/b.cpp": "void g() {\n}\n" * 40}
        self.assertEqual(budgets(tree(check_budgets.BRANCHES - 1)), [])
        found = budgets(tree(check_budgets.BRANCHES))
        self.assertEqual([line.split(" has ")[0] for line in found], ["src/a.cpp:1: f"])
        for elsewhere in ("src/a_test.cpp", "src/test_values.h", "tests/a.cpp"):
            self.assertEqual(budgets(tree(check_budgets.BRANCHES, elsewhere)), [])

    def test_short_sources(self):
        short, long = "// a\n" * 40, "// a\n" * 80
        self.assertEqual([line.split(":")[0] for line in budgets({"src/a.cpp": short, "src/b.h": short})],
                         ["src/a.cpp", "src/b.h"])
        for fine in ({"src/a.cpp": long, "src/a.h": short}, {"src/a.cpp": short, "src/a.h": short}, {"src/a_test.cpp": short},
                     {"src/testing.h": short}, {"include/a.h": short}, {"tests/a.cpp": short}, {"src/cli/a.cpp": short}):
            self.assertEqual(budgets(fine), [], fine)

    def test_unfinished_work(self):
        for word in ("TO" "DO", "FIX" "ME", "XX" "X"):
            self.assertEqual(len(budgets({"a.md": f"{word}: later\n"})), 1, word)

    def test_public_pages(self):
        headers = {f"include/tessera/{name}.h": lines(200) for name in ("error", "value", "storage", "comm", "fsdp")}
        self.assertEqual(budgets({**headers, "include/tessera/optim.h": lines(200), "include/tessera/ddp.h": lines(200)}), [])
        self.assertEqual(len(budgets({**headers, "include/tessera/optim.h": lines(201)})), 1)

    def test_public_headers_name_no_rows(self):
        for text in ("// Agrees (P-03).", "// As there (spec F5).", "// Both (F26, F27) hold."):
            self.assertEqual(len(budgets({"include/tessera/a.h": text + "\n"})), 1, text)
            self.assertEqual(budgets({"src/base/a.h": text + "\n" * check_budgets.SHORT_LINES}), [], text)
        self.assertEqual(budgets({"include/tessera/a.h": "// FSDP1 (UTF-8, bf16) is specified.\n"}), [])

    def test_objects_that_are_made_at_their_first_use(self):
        for text in ("  static Used used;\n", "  static const auto a = b();\n", "  static std::list<A> kept{1};\n"):
            text += "\n" * check_budgets.SHORT_LINES
            self.assertEqual(len(budgets({"src/io/a.cpp": text})), 1, text)
            self.assertEqual(budgets({"src/io/a_test.cpp": text, "src/cli/a.cpp": text}), [], text)
            self.assertEqual(budgets({"src/io/a.cpp": "  const NoFork moment;\n" + text}), [], text)
        for text in ("  static bool is(int a = 1) {\n", "  static constexpr int k = 1;\n", "  static std::atomic<int> n{0};\n"):
            self.assertEqual(budgets({"src/io/a.cpp": "\n" * check_budgets.SHORT_LINES + text}), [], text)

    def test_machine_paths(self):
        for folder in ("home", "root", "work"):
            self.assertEqual(len(budgets({"a.md": f"see /{folder}/me/x\n"})), 1, folder)
        self.assertEqual(budgets({"a.md": "see ../work/x and src/root/y\n"}), [])


class HostileCases(unittest.TestCase):
    rows = [f"| {case} | what | corrupt | `A.Works` `C.test_works` | |\n" for case in check_hostile.case_ids()]

    def test_a_full_list_passes(self):
        self.assertEqual(len(self.rows), 206)
        self.assertEqual(hostile("".join(self.rows)), [])
        self.assertEqual(hostile("".join(self.rows[:-1]) + "| H15 | what | | not yet: there is none | |\n"), [])

    def test_a_missing_or_double_case_fails(self):
        for i in (0, 50, 117):
            self.assertEqual(len(hostile("".join(self.rows[:i] + self.rows[i + 1:]))), 1)
        self.assertEqual(len(hostile("".join(self.rows) + self.rows[3])), 1)
        self.assertEqual(len(hostile("".join(self.rows) + self.rows[3].replace("P04", "P29"))), 1)
        self.assertEqual(len(hostile("", {"a": ""})), 206)

    def test_a_test_that_is_not_there_fails(self):
        for wrong in ("`A.Fails`", "`B.works`", "`C.Works`", "", "A.Works"):
            row = self.rows[5].replace("`A.Works` `C.test_works`", wrong)
            self.assertEqual(len(hostile("".join(self.rows[:5] + [row] + self.rows[6:]))), 1, wrong)


class Rows(unittest.TestCase):
    good = ["| F1 | what | test | `A.Works` and in C++ `B.Works` |\n",
            "| F2 | what | open | half: `c.py::test_works`, `FsdpOptimState.test_a_name` |\n",
            "| P1 | what | none | no kwargs |\n",
            "| P2 | what | device | skipped without one `C.Skips` |\n"]
    page = "| row | what | state | test or reason |\n|---|---|---|---|\n"

    def test_a_full_page_passes(self):
        found, states = rows(self.page + "".join(self.good))
        self.assertEqual((found, set(states)), (0, set(check_rows.STATES)))

    def test_a_missing_double_or_unknown_row_fails(self):
        for i in range(4):
            self.assertEqual(rows(self.page + "".join(self.good[:i] + self.good[i + 1:]))[0], 1)
        self.assertEqual(rows(self.page + "".join(self.good) + self.good[1])[0], 1)
        self.assertEqual(rows(self.page + "".join(self.good) + self.good[2].replace("P1", "P3"))[0], 1)
        self.assertEqual(rows("", "")[0], 0)
        self.assertEqual(rows("")[0], 4)

    def test_a_wrong_state_test_or_reason_fails(self):
        page = self.page + "".join(self.good)
        for right, wrong in (("`A.Works`", "`A.Fails`"), ("`B.Works`", "`C.Works`"), ("::test_works", "::test_fails"),
                             (".test_a_name", ".test_a_nam"),
                             ("`A.Works` and in C++ `B.Works`", "A.Works"),
                             ("half: `c.py::test_works`, `FsdpOptimState.test_a_name`", ""),
                             ("no kwargs", ""), ("`C.Skips`", ""), ("| none |", "| never |"), ("| open |", "| |"),
                             ("| what | open", "| open")):
            self.assertIn(right, page)
            self.assertEqual(rows(page.replace(right, wrong))[0], 1, wrong)

    def test_every_row_of_checkpoints_and_every_fault_is_asked_for(self):
        for name, count, first, last in (("checkpoints", 97, "O-01", "OQ-16"), ("reliability", 106, "F01", "Q08")):
            ids = check_rows.spelled_out(check_rows.SPECS[name].rows)
            self.assertEqual((len(set(ids)), ids[0], ids[-1]), (count, first, last))
            page = self.page + "".join(f"| {row} | what | open | why |\n" for row in ids)
            self.assertEqual(page_of(name, page, ids), [])
            self.assertEqual(len(page_of(name, page.replace(f"| {last} ", "| Z99 "), ids)), 2)

    def test_rows_that_comments_cite_may_stand_beside(self):
        page = self.page + "| P-01 | what | test | `A.Works` |\n"
        cited = "| row | what | where |\n|---|---|---|\n| F-00 | what | there |\n| F-03 to F-05 | what | |\n"
        self.assertEqual(page_of("checkpoints", page + cited, ["P-01"]), [])
        self.assertEqual(len(page_of("optimizer-state", page + cited, ["P-01"])), 4, "no other page has such rows")
        for wrong, count in (("| P-02 | what | there |\n", 2), ("| P-02 to P-04 | what | open | why |\n", 1)):
            self.assertEqual(len(page_of("checkpoints", page + cited + wrong, ["P-01"])), count, wrong)
        self.assertEqual(len(page_of("checkpoints", self.page + cited + "| P-01 | what | there |\n", ["P-01"])), 1)
        self.assertEqual(len(page_of("checkpoints", self.page + cited, ["P-01", "P-02"])), 2)

    def test_suites_and_programs_below_tests_are_tests(self):
        page = self.page + "".join(self.good)
        for name, count in (("Suite.Works", 0), ("Suite.Fails", 1), ("ctest crash.kills", 0), ("ctest crash.kill", 1),
                            ("ctest name", 1), ("ctest elsewhere", 1), ("crash.kills", 1)):
            self.assertEqual(rows(page.replace("`C.Skips`", f"`{name}`"))[0], count, name)

    def test_a_file_that_is_not_there_fails(self):
        with make_tree({}) as root:
            self.assertEqual(len(check_rows.violations(pathlib.Path(root))[0]), len(check_rows.SPECS))

    def test_a_row_is_cited_with_a_page_that_has_it(self):
        page = "| row | what |\n|---|---|\n| P-10, P-12 to P-14 | plans |\n| F-03b | items |\n"
        for comment, count in (("(checkpoint-rows P-10)", 0), ("(checkpoint-rows F-03b, P-12 to P-14): all", 0),
                               ("(checkpoint-rows P-13, P-14)", 0), ("16 (B-2) of the 3", 1), ("(P-10)", 1), ("spec P-10", 1),
                               ("(checkpoint-rows P-11)", 1), ("(fsdp-rows P-10)", 1), ("(checkpoint-rows P-10 to P-12)", 1)):
            with make_tree({"docs/checkpoint-rows.md": page, "src/io/a.cpp": f"int a;  // {comment}\n",
                            "src/io/a_test.cpp": "// (P-99)\n"}) as root:
                self.assertEqual(len(check_rows.citation_violations(pathlib.Path(root))), count, comment)

    def test_a_fault_is_not_a_row_of_another_page_with_its_letter(self):
        table = "| row | what |\n|---|---|\n"
        pages = {"docs/fault-rows.md": table + "| R16 | device |\n", "docs/checkpoint-rows.md": table + "| F-03 | items |\n"}
        for comment, count in (("(fault-rows R16)", 0), ("(checkpoint-rows F-03)", 0), ("(fault-rows R17)", 1),
                               ("(fault-rows F-03)", 1), ("(checkpoint-rows R16)", 1), ("(R16)", 1)):
            with make_tree({**pages, "src/io/a.cpp": f"int a;  // {comment}\n"}) as root:
                self.assertEqual(len(check_rows.citation_violations(pathlib.Path(root))), count, comment)

    def test_ranges_are_spelled_out(self):
        names = ["E1", "E2", "E-01", "E-02", "E-10a", "E9", "E10", "E11", "E13", "9.4", "9.5", "SDT-no-shard"]
        self.assertEqual(check_rows.ranges_of(names), "E1 to E2, E-01 to E-02, E-10a, E9 to E11, E13, 9.4, 9.5, SDT-no-shard")
        for ranges in [check_rows.ranges_of(names), *(spec.rows for spec in check_rows.SPECS.values()), ""]:
            self.assertEqual(check_rows.ranges_of(check_rows.spelled_out(ranges)), ranges)

    def test_names_of_rows(self):
        spec = check_rows.Spec("a.md", ["1", "6", "7", "9"], "7", {"Type": "SDT"})
        self.assertEqual(check_rows.extract(spec, """# 0 Title
E9  before the first section
## 1. Values
| ID | Name |
|---|---|
| E1 | one (as E7) |
| | goes on |
| R-02b | two |
## 2. Not asked for
L1  this
## 6. Topics
### 6.1 Lines
L1  first; see L2 and L3. L2 second. L4 is elsewhere
L30 third (L31)
NS1 one. NS2 two, as M6. NS4 is out of turn. NS3 three.
### 6.2 Nothing named
Only words.
### 6.3 Table
| Type | What |
|---|---|
| FULL save | x |
| NO_SHARD (2.13) | x |
## 7. Errors
Construction
- ValueError "one; of (two" (a; b); warn "two"
- three
Limits: four; five.
## Reading
E8  no section
## 9. More
### 9.3 Order
1 first
2 second, then P1
- W-01 of a list
  W-02 in the middle of it
- **W3 bold** in a list
106 rows.
""".strip()), """E1 R-02b L1 L2 L30 NS1 NS2 NS3 6.2 SDT-full-save SDT-no-shard X1 X2 X3 X4 X5 R1 R2 W-01""".split())

    def test_names_that_another_specification_has_get_another_beginning(self):
        spec = check_rows.Spec("a.md", ["6"], "", {}, renamed={"Q-": "OQ-"}, found=("OQ-03",))
        self.assertEqual(check_rows.extract(spec, "## 6. Quirks\n- Q-01 one\n- P-02 two"), ["OQ-01", "P-02", "OQ-03"])


class Pages(unittest.TestCase):
    tree = {"src/load/fill.h": "", "include/tessera/io.h": "", "tests/crash/killed.cpp": "", "tools/lint": "", "LICENSE": "",
            "docs/b.md": "# One `thing`\n## In a [link](b.md): x, y\n```\n# none\n```\n"}

    def found(self, text, page="docs/design/a.md"):
        return pages({**self.tree, page: text})

    def test_links_lead_to_files_and_headings(self):
        for link in ("../b.md", "../b.md#one-thing", "../b.md#in-a-link-x-y", "#here", "..", "../../LICENSE", "../../tests/crash",
                     "https://example.org/a", "mailto:a@b"):
            self.assertEqual(self.found(f"# Here\n[a `b`]({link})\n"), [], link)
        for link in ("b.md", "../c.md", "../b.md#two", "#one-thing", "../b.md#none", "../../tests/crash/x", "/LICENSE"):
            self.assertEqual([line.split(": ")[0] for line in self.found(f"# Here\n[a]({link})\n")], ["docs/design/a.md:2"], link)
            self.assertEqual(len(self.found(f"[a]({link})\n", "CHANGELOG.md")), 1, link)
            self.assertEqual(self.found(f"`[a]({link})`\n```\n[a]({link})\n```\n"), [], link)

    def test_paths_in_backquotes_are_in_the_tree(self):
        for path in ("src/load/fill.h", "load/fill.h", "fill.h", "src/load/", "crash/", "src/", "tessera/io.h", "tests/crash/killed",
                     "tools/lint --all", "tests/crash/NAME.cpp", "src/*/x.h", ".cpp", "<nccl.h>", "a/b", "there/", "1/2"):
            self.assertEqual(self.found(f"`{path}`\n"), [], path)
        for path in ("src/load/full.h", "src/fill.h", "ill.h", "read/fill.h", "src/read/", "load/crash/", "tessera/none",
                     "tools/lont --all", "python3 tools/lint.py", "lint.py", "tests/crash/killed.h"):
            self.assertEqual(len(self.found(f"`{path}`\n")), 1, path)
            self.assertEqual(len(self.found(f"`{path}`\n", "HACKING.md")), 1, path)
            self.assertEqual(self.found(f"`{path}`\n", "docs/history/a.md"), [], path)
            self.assertEqual(self.found(path), [], path)


class Functions(unittest.TestCase):
    def found(self, text):
        return [(f.name, f.line, f.lines, f.parameters) for f in cpp_functions.functions(text)]

    def test_shapes_of_functions(self):
        self.assertEqual(self.found("int f();\n"), [("f", 1, 0, 0)])
        self.assertEqual(self.found("class A {\n public:\n  A(int x, int y) : x_{x}, y_(y) {\n  }\n};\n"),
                         [("A", 3, 2, 2)])
        self.assertEqual(self.found("struct A { bool operator()(int a, int b) const { return a < b; } };\n"),
                         [("operator()", 1, 1, 2)])
        self.assertEqual(self.found("bool A::operator==(const A& o) const\n{\n}\n"), [("operator==", 1, 3, 1)])
        self.assertEqual(self.found("TEST(A, B) {\n  auto f = [](int x) { return x; };\n}\n"), [("TEST", 1, 3, 2)])

    def test_templates_and_decorated_classes(self):
        self.assertEqual(self.found("template <class T, int N = f(1)>\nvoid g(T a) {\n}\n"), [("g", 1, 3, 1)])
        self.assertEqual(self.found("template <typename T = int>\nclass A {\n  void f(T a, T b);\n};\n"), [("f", 3, 0, 2)])
        self.assertEqual(self.found("struct alignas(16) A {\n  int f() {\n  }\n};\n"), [("f", 2, 2, 0)])
        self.assertEqual(self.found("class [[nodiscard]] A : B<int> {\n  int f(int x);\n};\n"), [("f", 2, 0, 1)])

    def test_branches(self):
        def branches(body, head="int f(T&& a)"):
            return [f.branches for f in cpp_functions.functions(f"{head} {{\n{body}\n}}\n")]
        self.assertEqual(branches(""), [1])
        self.assertEqual(branches("if (a && b || c) return d ? e : g;"), [5])
        self.assertEqual(branches("for (;;) while (a) switch (b) { case 1: default: break; }"), [4])
        self.assertEqual(branches("try { } catch (const E&) { } catch (...) { }"), [3])
        self.assertEqual(branches('// if (a)\n/* a || b */ s = "a ? b : c";\n#if A && B\n#endif\nc = \'?\';'), [1])
        self.assertEqual(branches("auto g = [](auto&& x) { if (x) h(); };"), [2])
        self.assertEqual([f.branches for f in cpp_functions.functions("int f(int a);\n")], [0])

    def test_what_is_no_function(self):
        self.assertEqual(self.found("constexpr std::array kTable = {\n  Row{f(1), 2},\n};\n"), [])
        self.assertEqual(self.found("enum class E : std::uint8_t { a, b };\nstatic_assert(f(1));\n"), [])
        self.assertEqual(self.found('const char* s = "void f(int a) {";  // g(int x) {\n'), [])


class CompilerCache(unittest.TestCase):
    @unittest.skipUnless(shutil.which("ccache"), "ccache is not installed")
    def test_a_comment_in_a_header_makes_its_precompiled_header_anew(self):
        settings = pathlib.Path(__file__).resolve().parent / "compiler-cache"
        compile_both = f"""set -e; . {settings}; export CCACHE_DIR=$PWD/cache; rm -f *.gch
            ccache g++ -x c++-header pch.hxx -MD -MF pch.d -o pch.hxx.gch
            ccache g++ -include pch.hxx -Winvalid-pch -MD -MF a.d -c a.cpp -o a.o"""
        with make_tree({"pch.hxx": '#include "s.h"\n'}) as root:
            for comment in ("one", "two, and longer"):
                (pathlib.Path(root) / "s.h").write_text(f"#pragma once\n// {comment}\nstruct S {{}};\n")
                (pathlib.Path(root) / "a.cpp").write_text(f'#include "s.h"\n// {comment}\nS s;\n')
                ended = subprocess.run(["bash", "-c", compile_both], cwd=root, capture_output=True, text=True)
                self.assertEqual((ended.returncode, ended.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
