#!/usr/bin/env python3
"""Every hostile case has its line in docs/hostile-cases.md, and every test that a line names exists.

A line is `| P01 | input | result | tests | why |`; tests are `Suite.Name` in backquotes. A case that
cannot be tested yet has "not yet: " and the reason in their place. Prints one line per violation; the
exit code is then 1.
"""

import re
import sys

import tree

PAGE = "docs/hostile-cases.md"
CASES = {"P": 29, "Z": 22, "T": 22, "A": 32, "M": 16, "D": 9, "Y": 8, "J": 8, "L": 6, "E": 8, "G": 22, "K": 9, "H": 15}

LINE = re.compile(r"^\| *([A-Z]\d\d) *\|(.*)\| *$", re.MULTILINE)
NAMED = re.compile(r"`([A-Za-z_0-9]+\.[A-Za-z_0-9]+)`")
GTEST = re.compile(r"^(?:TYPED_)?TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
PYTHON_CLASS = re.compile(r"^class (\w+)|^    def (test_\w+)", re.MULTILINE)


def case_ids():
    return [f"{letter}{number:02}" for letter, count in CASES.items() for number in range(1, count + 1)]


def tests_of(root):
    """The names of all tests, as Suite.Name and Class.test_name."""
    found = set()
    for name in tree.files(root):
        if name.endswith((".cpp", ".h")):
            found.update(f"{suite}.{test}" for suite, test in GTEST.findall(tree.read(root, name)))
        elif name.startswith("tests/") and name.endswith(".py"):
            suite = ""
            for new_suite, test in PYTHON_CLASS.findall(tree.read(root, name)):
                suite = new_suite or suite
                if test:
                    found.add(f"{suite}.{test}")
    return found


def violations(root):
    if not (root / PAGE).is_file():
        return [f"{PAGE}: there is no such page"]
    text = tree.read(root, PAGE)
    tests = tests_of(root)
    found, seen = [], []
    for line in LINE.finditer(text):
        place = f"{PAGE}:{text.count(chr(10), 0, line.start()) + 1}"
        case, cells = line[1], line[2].split("|")
        seen.append(case)
        if len(cells) != 4:
            found.append(f"{place}: {case} has {len(cells) + 1} cells, expected 5")
            continue
        named = NAMED.findall(cells[2])
        if not named and "not yet: " not in cells[2]:
            found.append(f"{place}: {case} names no test")
        found += [f"{place}: {case} names {test}, which is not in the tree" for test in named if test not in tests]
    found += [f"{PAGE}: {case} is missing" for case in case_ids() if case not in seen]
    found += [f"{PAGE}: {case} is there {seen.count(case)} times" for case in sorted(set(seen)) if seen.count(case) > 1]
    found += [f"{PAGE}: there is no case {case}" for case in sorted(set(seen)) if case not in case_ids()]
    return found


def main():
    found = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"hostile cases: {len(found)} violations in {len(case_ids())} cases")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
