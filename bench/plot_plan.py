#!/usr/bin/env python3
"""Draws what the plan and `.metadata` of 100 tensors cost rank 0, from 1,024 to 65,536 ranks: docs/design/plan.svg.

    bench/plot_plan.py [BUILD]     medians of three runs of bench_plan each; prints them, too
"""
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
RANKS = [1024, 4096, 16384, 65536]
TENSORS, RUNS = 100, 3
WIDTH, HEIGHT, MARGIN = 380, 300, 55
COLORS = ["#1b6ca8", "#c0392b", "#2e7d32", "#8e44ad"]
SECONDS = [("plan and proof", ("plan_s", "validate_s")), ("encode", ("encode_s",)), ("decode", ("decode_s",)),
           ("opened by a rank for all", ("open_s",))]
MEMORY = [("plan and encode", ("plan_peak_mib",)), ("with decode", ("peak_mib",)), ("with opening", ("open_peak_mib",)),
          ("catalog, once a host", ("catalog_mib",))]


def measure(program, ranks, told, work):
    lines = []
    for _ in range(RUNS):
        command = [program, "--ranks", ranks, "--tensors", TENSORS, "--out", work / "metadata", *(["--irregular"] if told else [])]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        lines.append(json.loads(done.stdout))
        lines[-1]["catalog_mib"] = lines[-1]["catalog_bytes"] / 2**20
    return {key: statistics.median(line[key] for line in lines) for key in lines[0]}


class Panel:
    """Both axes are logarithmic."""

    def __init__(self, left, title, low, high):
        self.left, self.low, self.high = left, math.log10(low), math.log10(high)
        self.parts = [f'<text x="{left + MARGIN}" y="22" font-weight="bold">{title}</text>']
        for power in range(math.ceil(self.low), math.floor(self.high) + 1):
            self.tick(10.0 ** power)
        for ranks in RANKS:
            x = self.x(ranks)
            self.parts.append(f'<text x="{x:.0f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{ranks:,}</text>')
        self.parts.append(f'<text x="{left + MARGIN + WIDTH / 2 - 55:.0f}" y="{HEIGHT - 12}" text-anchor="middle">ranks</text>')

    def tick(self, value):
        y = self.y(value)
        self.parts.append(f'<line x1="{self.left + MARGIN}" x2="{self.left + WIDTH - 20}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>')
        self.parts.append(f'<text x="{self.left + MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end">{value:g}</text>')

    def x(self, ranks):
        share = math.log(ranks / RANKS[0]) / math.log(RANKS[-1] / RANKS[0])
        return self.left + MARGIN + 12 + share * (WIDTH - MARGIN - 60)

    def y(self, value):
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return HEIGHT - MARGIN - share * (HEIGHT - MARGIN - 40)

    def line(self, values, color, told):
        points = " ".join(f"{self.x(ranks):.1f},{self.y(value):.1f}" for ranks, value in zip(RANKS, values))
        dash = ' stroke-dasharray="5 4"' if told else ""
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')

    def legend(self, names):
        for i, name in enumerate(names):
            self.parts.append(f'<text x="{self.left + MARGIN + 8}" y="{42 + 15 * i}" fill="{COLORS[i]}">{name}</text>')


def draw(found):
    seconds = Panel(0, "seconds on rank 0", 0.001, 30)
    memory = Panel(WIDTH, "peak of memory, MiB", 0.1, 3000)
    for panel, sorts in ((seconds, SECONDS), (memory, MEMORY)):
        panel.legend([name for name, _ in sorts])
        for color, (_, keys) in zip(COLORS, sorts):
            for told in (False, True):
                values = [sum(found[told, ranks][key] for key in keys) for ranks in RANKS]
                panel.line([max(value, 0.001) for value in values], color, told)
    note = f'<text x="{MARGIN}" y="{HEIGHT + 8}">{TENSORS} tensors, a slice of each on every rank. Solid: placed; dashed: told.</text>'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT + 20}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>', *seconds.parts, *memory.parts, note, "</svg>", ""])


def main():
    build = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build/release"
    found = {}
    with tempfile.TemporaryDirectory(dir=build) as work:
        for told in (False, True):
            for ranks in RANKS:
                found[told, ranks] = measure(build / "bench/bench_plan", ranks, told, pathlib.Path(work))
                print("told  " if told else "placed", ranks, found[told, ranks], flush=True)
    (ROOT / "docs/design/plan.svg").write_text(draw(found), encoding="utf-8")


main()
