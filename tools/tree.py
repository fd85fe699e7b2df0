"""What the checks of this folder share: the files of the checkout and what they include."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)


def files(root=ROOT):
    """Paths relative to root that git tracks or would track, sorted; all files where there is no git."""
    # A clone may belong to another user than the one who runs the checks.
    git = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z", "--cached", "--others",
           "--exclude-standard"]
    try:
        listed = subprocess.run(git, check=True, capture_output=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(p.relative_to(root)) for p in root.rglob("*")]
    return sorted(name for name in set(listed) if name and (root / name).is_file())


def sources(root=ROOT):
    return [name for name in files(root) if name.endswith((".cpp", ".h"))]


def includes(text):
    """(line number, is it <angled>, name) of every #include."""
    return [(text.count("\n", 0, m.start()) + 1, m[1] == "<", m[2]) for m in INCLUDE.finditer(text)]


def read(root, name):
    return (root / name).read_text(encoding="utf-8", errors="replace")
