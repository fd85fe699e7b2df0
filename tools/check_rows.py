#!/usr/bin/env python3
"""Every row of a specification has its line in a page of docs/, and every test that a line names exists.

A line is `| F1 | what | state | test or reason |`. The states are

  test    the tests named in backquotes, as `Suite.Name`, `file.py::function` or `ctest NAME`, assert the row
  device  it is built; the named tests assert what can be seen without a second device, and the rest where there is one
  none    C++ cannot have it, or the project excludes it; the line gives the reason
  open    the line says what is missing

Comments in src/, those of tests apart, cite a row with its page, as in (fsdp-rows K9) or (checkpoint-rows P-10, P-11):
different specifications use the same names.

The specifications are not in the repository. SPECS has the names of their rows, as
`check_rows.py --extract SPEC.md` prints them. Prints one line per violation; the exit code is then 1.
"""

import collections
import pathlib
import re
import sys

import check_hostile
import tree

# sections: of the specification, those that count. errors: the section in which each message is a row, X1, X2, ...
# tables: for a table whose rows have no names, by its first header, what their names begin with. rows: all names. others:
# what the names of rows begin with that the page has in tables of another form, because comments cite them. renamed: what
# names begin with there and here, where another specification has the same. found: rows that were found since.
Spec = collections.namedtuple("Spec", "page sections errors tables rows others renamed found", defaults=["", (), {}, ()])
SPECS = {
    "fsdp-runtime": Spec(
        "docs/fsdp-rows.md", ["1", "2", "3", "4", "5", "6", "7", "9"], "7", {"Type": "SDT", "API": "OSA"},
        rows=("E1 to E9, K1 to K12, O1 to O19, C1 to C16, M1 to M29, L1 to L21, L30 to L36, L40 to L48, "
              "L50 to L60, L70 to L75, PF1 to PF8, RL1 to RL5, NS1 to NS8, MP1 to MP10, CO1 to CO10, "
              "HY1 to HY9, GD1 to GD4, CH1 to CH5, EO1 to EO6, SF1 to SF10, SDT-full-save, "
              "SDT-full-load, SDT-local-save, SDT-local-load, SDT-sharded-save, SDT-sharded-load, "
              "SDT-no-shard, SD1 to SD9, OSA-full-optim-state-dict, OSA-sharded-optim-state-dict, "
              "OSA-shard-full-optim-state-dict, OSA-flatten-sharded-optim-state-dict, "
              "OSA-scatter-full-optim-state-dict, OSA-rekey-optim-state-dict, OSA-optim-state-dict, OS1 "
              "to OS9, CG1 to CG9, IG1 to IG6, NM1 to NM5, 6.16, UO1 to UO11, FH1 to FH8, WP1 to WP8, "
              "6.20, 6.21, X1 to X74, F1 to F8, F20 to F43, P1 to P11, R1 to R9, 9.4, 9.5")),
    "optimizer-state": Spec(
        "docs/optimizer-rows.md", ["1", "4", "7", "8", "11"], "", {},
        rows=("R-01 to R-07, 1.2, 1.3, R-10 to R-17, R-39, R-19 to R-22, R-24 to R-29, R-40, R-30 to "
              "R-32, R-18, R-33 to R-36, R-23, R-37 to R-38, E-01 to E-05, E-05b, E-06, E-08 to E-09, "
              "E-10a, E-10b, E-10c, E-10d, E-10e, E-11, E-14 to E-18, E-20, E-22 to E-33, Q-01 to Q-27, "
              "T-01 to T-24")),
    "checkpoints": Spec(
        "docs/checkpoint-rows.md", ["1", "3", "6"], "", {},
        rows=("O-01 to O-23, O-30 to O-33, O-40 to O-43, O-50 to O-51, O-60 to O-64, O-70 to O-77, O-80 "
              "to O-81, P-01 to P-06, P-10 to P-36, OQ-01 to OQ-16"),
        others=("F-",), renamed={"Q-": "OQ-"}, found=("OQ-15", "OQ-16")),
    "reliability": Spec(
        "docs/fault-rows.md", ["4"], "", {},
        rows="F01 to F34, R01 to R20, O01 to O30, C01 to C14, Q01 to Q08"),
}

STATES = ["test", "device", "none", "open"]
NAMES_A_TEST = ["test", "device"]
LINE = re.compile(r"^\|(.*)\| *$", re.MULTILINE)
NAMED = re.compile(r"`([A-Z]\w*\.(?:[A-Z]\w*|test_\w+)|\w+\.py::\w+|ctest [\w.]+)`")
# Cases that keep PyTorch's names, without what says which parameters one is for.
REGISTERED = re.compile(r'"(test_\w+)"')
REGISTERED_SUITE = "FsdpOptimState"
PYTHON_TEST = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
PROGRAM = re.compile(r"\badd_test\(NAME ([\w.]+)\s")

ROW = r"[A-Z]{1,3}-?\d+[a-z]?"
ROWS = rf"{ROW}(?:(?:, | to | and ){ROW})*"
PAGES_OF_ROWS = ["checkpoint", "fault", "fsdp", "optimizer"]
CITED = re.compile(rf"\b([a-z]+)-rows ({ROWS})")
CITED_BARE = re.compile(rf"\bspec {ROW}|\({ROWS}[):;,.]")

HEADING = re.compile(r"##+ ((\d+)(?:\.\d+)?)")
IN_CELL = re.compile(r"\| *([A-Z]{1,3}-?\d+[a-z]?)\b")
IN_PROSE = re.compile(r"(?:\*\*|- )?(([A-Z]{1,3}-?)(\d+)[a-z]?)[ .]")
NUMBERED = re.compile(r"([A-Z]{1,3}-?)(\d+)")
STEP = re.compile(r"(\d) \w")


def spelled_out(ranges):
    """All rows of "E1 to E9, 6.16"."""
    found = []
    for part in ranges.split(", ") if ranges else []:
        first, _, last = part.partition(" to ")
        letters, digits = re.fullmatch(r"(.*?)(\d*)", first).groups()
        numbers = range(int(digits), int(last[len(letters):]) + 1) if last else []
        found += [f"{letters}{number:0{len(digits)}}" for number in numbers] or [first]
    return found


def ranges_of(rows):
    """What spelled_out spells out."""
    runs = []
    for row in rows:
        if runs and NUMBERED.fullmatch(row) and NUMBERED.fullmatch(runs[-1][0]) and row == following(runs[-1][-1]):
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def following(row):
    letters, digits = NUMBERED.fullmatch(row).groups()
    return f"{letters}{int(digits) + 1:0{len(digits)}}"


def rows_in_table(line, header, tables):
    if IN_CELL.match(line):
        return [IN_CELL.match(line)[1]]
    name = line.split("|")[1].strip()
    if header not in tables or name == header or not name.strip("-"):
        return []
    return [tables[header] + "-" + re.sub(r"\W+|_", "-", re.split(r"[(/]", name.lower())[0]).strip("-")]


def rows_in_prose(line):
    """Of a line that begins with a row's name: it, and inside the line those that count on from it."""
    if STEP.match(line):
        return [f"R{STEP.match(line)[1]}"]
    first = at = IN_PROSE.match(line)
    found = []
    while at:
        found.append(f"{first[2]}{int(first[3]) + len(found)}" if found else first[1])
        at = re.compile(rf"[.;] {first[2]}{int(first[3]) + len(found)} ").search(line, at.end())
    return found


def messages_in(line):
    """How many messages, separated by semicolons, a line lists; a heading, without a full stop, lists none."""
    is_list = line.startswith("- ") or line.endswith(".")
    return re.sub(r'"[^"]*"|\([^()]*\)', "", line).count(";") + 1 if is_list else 0


def extract(spec, text):
    """The names of the rows, in their order. A subsection without any is a row itself, named by its number."""
    found, section, header, messages = {}, "", "", 0
    for line in text.splitlines():
        if line.startswith("##"):
            number, section = HEADING.match(line).groups() if HEADING.match(line) else ("", "")
            rows = [number] if "." in number else []
        elif line.startswith("|"):
            header = header or line.split("|")[1].strip()
            rows = rows_in_table(line, header, spec.tables)
        elif section == spec.errors:
            rows = [f"X{messages + i + 1}" for i in range(messages_in(line))]
            messages += len(rows)
        else:
            rows = rows_in_prose(line)
        header = header if line.startswith("|") else ""
        if section in spec.sections:
            found.update((row, number) for row in rows)
    named = {number for row, number in found.items() if row != number}
    rows = [row for row in found if row not in named]
    for there, here in spec.renamed.items():
        rows = [here + row[len(there):] if row.startswith(there) else row for row in rows]
    return [*rows, *spec.found]


def tests_of(root):
    """All tests: Suite.Name of the C++ ones, file.py::function of those in tests/ and python/tests/, `ctest NAME` of its programs."""
    found = set()
    for name in tree.files(root):
        if name.startswith("src/") and name.endswith("_test.cpp"):
            text = tree.read(root, name)
            found.update(f"{suite}.{test}" for suite, test in check_hostile.GTEST.findall(text))
            if "register_cases(" in text:
                found.update(f"{REGISTERED_SUITE}.{test}" for test in REGISTERED.findall(text))
        elif name.startswith(("tests/", "python/tests/")):
            found.update(tests_in_tests(pathlib.PurePosixPath(name).name, tree.read(root, name)))
    return found


def tests_in_tests(file, text):
    """Those of one file of tests/: of Python, of a program with gtest or of a suite in a header, or of ctest."""
    if file.endswith(".py"):
        return [f"{file}::{test}" for test in PYTHON_TEST.findall(text)]
    if file.endswith((".cpp", ".h")):
        return [f"{suite}.{test}" for suite, test in check_hostile.GTEST.findall(text)]
    return [f"ctest {name}" for name in PROGRAM.findall(text)] if file == "CMakeLists.txt" else []


def check_page(root, spec, ids, tests):
    """(violations, how many lines have each state)."""
    page = spec.page
    text = tree.read(root, page)
    found, seen, states = [], collections.Counter(), collections.Counter()
    for line in LINE.finditer(text):
        cells = [cell.strip() for cell in line[1].split("|")]
        if cells[0] == "row" or not cells[0].strip("-") or cells[0].startswith(spec.others):
            continue
        place = f"{page}:{text.count(chr(10), 0, line.start()) + 1}: {cells[0]}"
        seen[cells[0]] += 1
        if len(cells) != 4 or cells[2] not in STATES:
            found.append(f"{place} needs four cells, the third one of {', '.join(STATES)}")
            continue
        states[cells[2]] += 1
        named = NAMED.findall(cells[3])
        is_tested = cells[2] in NAMES_A_TEST
        if not (named if is_tested else cells[3]):
            found.append(f"{place} names no {'test' if is_tested else 'reason'}")
        found += [f"{place} names {test}, which is not in the tree" for test in named if test not in tests]
    found += [f"{page}: {row} is missing" for row in ids if row not in seen]
    found += [f"{page}: {row} is there {count} times" for row, count in seen.items() if count > 1]
    found += [f"{page}: there is no row {row}" for row in seen if row not in ids]
    return found, states


def rows_named_in(text):
    """All rows of "P-10, P-11" or "O-70 to O-72", those between the two ends included."""
    between = [spelled_out(ends)[1:-1] for ends in re.findall(rf"{ROW} to {ROW}", text)]
    return re.findall(ROW, text) + sum(between, [])


def citation_violations(root):
    """Rows that comments of src/ cite without their page, or that their page does not have."""
    known = {}
    for page in PAGES_OF_ROWS:
        path = root / "docs" / f"{page}-rows.md"
        cells = [line[1].split("|")[0] for line in LINE.finditer(path.read_text(encoding="utf-8"))] if path.is_file() else []
        known[page] = {row for cell in cells for row in rows_named_in(cell)}
    found = []
    for name in tree.sources(root):
        if not name.startswith("src/") or "test" in pathlib.PurePosixPath(name).stem:
            continue
        for number, line in enumerate(tree.read(root, name).splitlines(), 1):
            comment = line.partition("//")[2]
            if CITED_BARE.search(comment):
                found.append(f"{name}:{number}: a row without the page that has it: {comment.strip()}")
            found += [f"{name}:{number}: docs/{page}-rows.md has no row {row}"
                      for page, rows in CITED.findall(comment) for row in rows_named_in(rows)
                      if row not in known.get(page, ())]
    return found


def violations(root, specs=SPECS):
    tests, found, states = tests_of(root), [], collections.Counter()
    for spec in specs.values():
        if not (root / spec.page).is_file():
            found.append(f"{spec.page}: there is no such file")
            continue
        wrong, counts = check_page(root, spec, spelled_out(spec.rows), tests)
        found += wrong
        states.update(counts)
    return found + citation_violations(root), states


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--extract":
        path = pathlib.Path(sys.argv[2])
        print(ranges_of(extract(SPECS[path.stem], path.read_text(encoding="utf-8"))))
        return 0
    found, n = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"rows: {n.total()} rows, {n['test']} with a test, {n['device']} that need a device, "
          f"{n['none']} not in C++, {n['open']} open")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
