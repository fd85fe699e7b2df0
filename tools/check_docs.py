#!/usr/bin/env python3
"""What pages point to is in the tree.

A link of a page to another file of the tree, or to a heading, leads there. A path in backquotes that begins with a folder of
the tree is one. A path that ends in .h, .cpp or .py, begins with tessera/, or is a folder in another one (`fsdp/unit/`) may
leave out its beginning: some path of the tree ends so. A program stands for its source. NAME and * stand for anything.
Pages that tell what was are not asked for paths. docs/api.md lists the public headers that have templates or macros. Prints one line per violation; the exit code is then 1.
"""

import posixpath
import re
import sys

import tree

NOT_OURS = ("tests/golden/",)
OF_THE_PAST = ("CHANGELOG.md", "docs/history/")
FOLDERS = ("src/", "include/", "tools/", "tests/", "docs/", "python/", "bench/", "examples/", "fuzz/", "cmake/")
SOURCES = (".h", ".cpp", ".py")

FENCE = re.compile(r"^( *```).*?^\1", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)
PATH = re.compile(r"[\w./-]+")


def blanked(text, pattern):
    """The text with as many blanks, and the same lines, where the pattern matches."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def anchors(text):
    """The names that GitHub gives to the headings of a page."""
    titles = (re.sub(r"[^\w\- ]", "", LINK.sub("]", title).lower()) for title in HEADING.findall(blanked(text, FENCE)))
    return {title.replace(" ", "-") for title in titles}


def link_violation(root, page, target, known):
    """What is wrong with a link; known are the files and folders of the tree."""
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", path):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    if path not in known:
        return f"links to {target}, which is not in the tree"
    if anchor and path.endswith(".md") and anchor not in anchors(tree.read(root, path)):
        return f"links to {target}, a heading that is not there"
    return None


def path_violation(word, known):
    """What is wrong with one word of a text in backquotes."""
    path = word.rstrip("/")
    if not PATH.fullmatch(path) or "NAME" in path or path in SOURCES:
        return None
    if word.startswith(FOLDERS):
        there = path in known or f"{path}.cpp" in known
    elif path.endswith(SOURCES) or word.startswith("tessera/") or (word != path and "/" in path):
        there = any(f"/{name}".endswith(f"/{path}") for name in known)
    else:
        return None
    return None if there else f"names {path}, which is not in the tree"


def binding_violations(root, files):
    """Public headers that docs/api.md lists as having templates or macros of their own, and have none, or the reverse."""
    folder, page = "include/tessera/", "docs/api.md"
    if page not in files:
        return []
    section = re.search(r"^## Headers for binding generators\n(.*?)^## ", tree.read(root, page), re.MULTILINE | re.DOTALL)
    told = {name for line in section[1].splitlines() if line.startswith("- ") for name in re.findall(r"`([\w/]+\.h)`", line)}
    there = {name.removeprefix(folder) for name in files
             if name.startswith(folder) and "/detail/" not in name and
             re.search(r"^\s*(#define|template\b)", tree.read(root, name), re.MULTILINE)}
    return [f"{page}: {name} has {'no ' if name in told else ''}templates or macros of its own" for name in sorted(told ^ there)]


def violations(root):
    files = tree.files(root)
    known = {"."}.union(files)
    for name in files:
        known.update(name[:i] for i, letter in enumerate(name) if letter == "/")
    found = []
    for page in files:
        if not page.endswith(".md") or page.startswith(NOT_OURS):
            continue
        text = blanked(tree.read(root, page), FENCE)
        # What looks like a link within backquotes is none.
        told = [(m.start(), link_violation(root, page, m[1], known)) for m in LINK.finditer(blanked(text, SPAN))]
        if not page.startswith(OF_THE_PAST):
            told += [(m.start(), path_violation(word, known)) for m in SPAN.finditer(text) for word in m[1].split()]
        found += [f"{page}:{text.count(chr(10), 0, at) + 1}: {what}" for at, what in sorted(told, key=lambda t: t[0]) if what]
    return found + binding_violations(root, files)


def main():
    found = violations(tree.ROOT)
    for line in found:
        print(line)
    print(f"pages: {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
