#!/usr/bin/env python3
"""Sizes that keep the code readable, and words and paths that must not be in it.

A source file has at most 600 lines, a header 300; a function 80 lines and 6 parameters (beyond that an
options struct); at most 100 translation units include libtorch, directly or through our headers: each
costs half a minute of build. Exit code 1 and one line per violation.
"""

import pathlib
import re
import sys

import check_layers
import cpp_functions
import tree

FILE_LINES = {".cpp": 600, ".h": 300, ".py": 600}
FUNCTION_LINES = 80
PARAMETERS = 6
LIBTORCH_UNITS = 100

# Put together here, so that this file does not hold what it looks for.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" "DO", "FIX" "ME", "XX" "X"]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work)/")
# Data that others wrote, and the license's text, are as they are.
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


def word_violations(name, text):
    if name.startswith(NOT_OURS) and not name.endswith(".py") or name.endswith(BINARY):
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            found.append(f"{name}:{number}: unfinished work belongs in an issue: {line.strip()}")
        if MACHINE_PATH.search(line):
            found.append(f"{name}:{number}: a path of one machine: {line.strip()}")
    return found


def libtorch_units(texts):
    """The .cpp files that reach a libtorch header through any chain of our own headers."""
    reaches = {}

    def visit(name):
        if name not in reaches:
            reaches[name] = False  # a cycle ends here
            included = tree.includes(texts[name])
            reaches[name] = any(check_layers.is_libtorch(angled, inc) for _, angled, inc in included) or any(
                visit(path) for _, angled, inc in included if not angled
                for path in candidates(name, inc) if path in texts)
        return reaches[name]

    def candidates(name, included):
        return check_layers.target_of(included), str(pathlib.PurePosixPath(name).parent / included)

    return [name for name in texts if name.endswith(".cpp") and visit(name)]


def violations(root):
    found, texts = [], {}
    for name in tree.files(root):
        text = tree.read(root, name)
        if name.endswith((".cpp", ".h")):
            texts[name] = text
        found += size_violations(name, text) + word_violations(name, text)
    units = libtorch_units(texts)
    if len(units) > LIBTORCH_UNITS:
        found.append(f"{len(units)} translation units include libtorch, the ceiling is {LIBTORCH_UNITS}")
    return found, len(units)


def main():
    found, units = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"budgets: {len(found)} violations; {units} of {LIBTORCH_UNITS} libtorch units")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
