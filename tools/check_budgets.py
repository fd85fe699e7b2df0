#!/usr/bin/env python3
"""Checks sizes that keep the code readable, and words and paths that must not be in it.

A source file has at most 600 lines, a header 300. A function has at most 80 lines and 6 parameters; with more
it takes an options struct. Prints one line per violation; the exit code is then 1.
"""

import pathlib
import re
import sys

import cpp_functions
import tree

FILE_LINES = {".cpp": 600, ".h": 300, ".py": 600}
FUNCTION_LINES = 80
PARAMETERS = 6

# Put together here, so that this file does not hold what it looks for.
UNFINISHED = re.compile(r"\b(" + "|".join(["TO" "DO", "FIX" "ME", "XX" "X"]) + r")\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|work)/")
# Rows of the specification, which users of the headers do not have: (P-14), (spec K9), L50.
ROW_CODE = re.compile(r"\bspec [A-Z0-9]|\(([A-Z]{1,3}-?\d+[a-z]?)((-|, | to | and )[A-Z]{1,3}-?\d+[a-z]?)*[):;]")
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


def violations(root):
    found = []
    for name in tree.files(root):
        text = tree.read(root, name)
        found += size_violations(name, text) + word_violations(name, text)
    return found


def main():
    found = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"budgets: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
