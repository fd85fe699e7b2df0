#!/usr/bin/env python3
"""Checks sizes that keep the code readable, and words and paths that must not be in it.

A source file has at most 600 lines, a header 300. A function has at most 80 lines and 6 parameters; with more
it takes an options struct. Prints one line per violation; the exit code is then 1.

Branches of a function are one, plus each if, for, while, case, catch, ?:, && and ||, lambdas inside it included. They are
counted in src/ and include/ without tests and what tests share, wherever a function has a body. `--branches` lists the
functions with the most.

A source of src/ below 80 lines has a reason, which SHORT says: what a reader opens together stands in one file. A header
counts with the source of its name.

No function of the checkpoint library keeps an object that is made at its first use.

The headers that a first program needs have at most 20 pages of 60 lines together: their lines are counted, blank ones and
comments too.
"""

import pathlib
import re
import sys

import cpp_functions
import tree

FILE_LINES = {".cpp": 600, ".h": 300, ".py": 600}
FUNCTION_LINES = 80
PARAMETERS = 6
BRANCHES = 15
SHORT_LINES = 80
SHORT = {
    "src/base/sort_runs.h": "an algorithm, which nothing else here is",
    "src/checkpoint/convert.cpp": "convert() itself: one looks for it there",
    "src/cli/": "a file a command",
    "src/format/exported/exported.h": "what the format offers",
    "src/format/safetensors/safetensors.h": "what the format offers",
    "src/format/zip/last_end.cpp": "asked of files that are no archives as they are",
    "src/fsdp/step/call.cpp": "what every call of a wrapped module does: one looks for it there",
    "src/fsdp/step/profiler_range.h": "libtorch's profiler, in no other header",
    "src/fsdp/unit/unit_schedule.h": "what a unit knows of its schedule, which stands in a room above",
    "src/io/testing.h": "for tests and benches",
    "src/storage/http/pages.h": "stores of several rooms list by pages",
    "src/storage/posix/spawn": "how any program is started, for several rooms",
    "src/torch/compat.h": "the one place that tells versions of libtorch apart",
    "src/torch/pch": "the precompiled header",
    "src/torch/test_device/whole_program.cpp": "linked by programs alone that compute on the test device",
}
FIRST_HEADERS = ["error", "value", "storage", "comm", "checkpoint", "mesh", "fsdp", "optim", "training_state"]
PAGES = 20
LINES_OF_A_PAGE = 60
LISTED = 40  # functions that --branches shows

# Put together here, so that this file does not hold what it looks for.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" "DO", "FIX" "ME", "XX" "X"]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work)/")
# Rows of the specification, which users of the headers do not have: (P-14), (spec K9), L50.
ROW_CODE = re.compile(r"\bspec [A-Z0-9]|\(([A-Z]{1,3}-?\d+[a-z]?)((-|, | to | and )[A-Z]{1,3}-?\d+[a-z]?)*[):;]")
# An object of a function that is made at its first use: a child of fork() may find it half made (docs/design/forks.md).
FIRST_USE = re.compile(r" +static (?!constexpr |constinit |thread_local |std::atomic)[^(]*[=;{]")
GUARDED = re.compile(r"NoFork|made while the library is loaded", re.IGNORECASE)
FORKED = tuple(f"src/{folder}/" for folder in ("base", "layout", "io", "value", "format", "storage", "comm", "checkpoint"))
# Data that others wrote, and the license's text, are not checked.
NOT_OURS = ("LICENSE", "tests/golden/")
BINARY = (".pt", ".pth", ".distcp", ".metadata", ".safetensors", ".npy", ".bin", ".pkl", ".png", ".svg")


def size_violations(name, text):
    found = []
    ceiling = FILE_LINES.get(pathlib.PurePosixPath(name).suffix)
    lines = text.count("\n")
    if ceiling and lines > ceiling:
        found.append(f"{name}: {lines} lines, the ceiling is {ceiling}")
    if not name.endswith((".cpp", ".h")):
        return found
    for f in cpp_functions.functions(text):
        if f.lines > FUNCTION_LINES:
            found.append(f"{name}:{f.line}: {f.name} has {f.lines} lines, the ceiling is {FUNCTION_LINES}")
        if f.parameters > PARAMETERS:
            found.append(f"{name}:{f.line}: {f.name} has {f.parameters} parameters, the ceiling is {PARAMETERS}:"
                         " take an options struct")
    return found


def counted_functions(root):
    """(branches, "path:line: name") of every function whose branches count, most first."""
    counted = []
    for name in tree.sources(root):
        if name.startswith(("src/", "include/")) and "test" not in pathlib.PurePosixPath(name).stem:
            counted += [(f.branches, f"{name}:{f.line}: {f.name}")
                        for f in cpp_functions.functions(tree.read(root, name)) if f.lines]
    return sorted(counted, key=lambda f: (-f[0], f[1]))


def branch_violations(counted):
    return [f"{where} has {branches} branches, the ceiling is {BRANCHES}"
            for branches, where in counted if branches > BRANCHES]


def short_violations(lines):
    """`lines`: path -> number of lines. Tests and what they share are as short as they like."""
    found = []
    for name, count in lines.items():
        stem, dot, suffix = name.rpartition(".")
        if not name.startswith("src/") or suffix not in ("cpp", "h") or "test" in stem or name.startswith(tuple(SHORT)):
            continue
        count += lines.get(f"{stem}.{'cpp' if suffix == 'h' else 'h'}", 0)
        if count < SHORT_LINES:
            found.append(f"{name}: {count} lines; below {SHORT_LINES} it needs a reason (SHORT in tools/check_budgets.py)")
    return found


def word_violations(name, text):
    if name.startswith(NOT_OURS) and not name.endswith(".py") or name.endswith(BINARY):
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            found.append(f"{name}:{number}: unfinished work belongs in an issue: {line.strip()}")
        if name.startswith("include/") and ROW_CODE.search(line):
            found.append(f"{name}:{number}: a public header names a row of the specification: {line.strip()}")
        if MACHINE_PATH.search(line):
            found.append(f"{name}:{number}: a path of one machine: {line.strip()}")
    return found


def first_use_violations(name, text):
    if not name.startswith(FORKED) or not name.endswith(".cpp") or name.endswith("_test.cpp"):
        return []
    before, found = "", []
    for number, line in enumerate(text.splitlines(), 1):
        if FIRST_USE.match(line) and not GUARDED.search(before):
            found.append(f"{name}:{number}: made at its first use, without NoFork: a child may find it half made: {line.strip()}")
        before = line
    return found


def page_violations(root):
    lines = 0
    for name in FIRST_HEADERS:
        path = root / "include" / "tessera" / f"{name}.h"
        lines += path.read_text(encoding="utf-8").count("\n") if path.exists() else 0
    if lines <= PAGES * LINES_OF_A_PAGE:
        return []
    return [f"include/tessera: the first headers ({', '.join(FIRST_HEADERS)}) have {lines} lines,"
            f" the ceiling is {PAGES} pages of {LINES_OF_A_PAGE}"]


def violations(root):
    found, lines = page_violations(root), {}
    for name in tree.files(root):
        text = tree.read(root, name)
        lines[name] = text.count("\n")
        found += size_violations(name, text) + word_violations(name, text) + first_use_violations(name, text)
    return found + short_violations(lines) + branch_violations(counted_functions(root))


def main():
    counted = counted_functions(tree.ROOT)
    print(f"branches: at most {counted[0][0]} in {len(counted)} functions")
    if "--branches" in sys.argv[1:]:
        for branches, where in counted[:LISTED]:
            print(f"{branches:4} {where}")
    found = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"budgets: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
