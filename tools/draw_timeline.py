#!/usr/bin/env python3
"""Draws one step of a trace that train_gpt --trace wrote.

  tools/draw_timeline.py step.json docs/images/timeline.svg [--step 2] [--rank 0]

Three lanes of one rank: computing (forward and backward of each unit, and where it waits), gathers and
reductions. A step goes from the first forward of the root to the end of its last reduction.
"""

import argparse
import json

WIDTH, LEFT, LANE, GAP, TOP = 1100, 90, 26, 14, 34
COLORS = {"forward": "#7fb2e5", "backward": "#f0a868", "wait for gather": "#d9534f", "wait for reduction": "#d9534f",
          "gather": "#8cc58c", "reduce": "#c79bd2"}
LANES = ["compute", "gather", "reduce"]


def spans(events, rank):
    """(kind, unit, begin, end) in microseconds, by begin."""
    found, open_spans = [], {}
    for event in events:
        if event.get("pid") != rank or "cat" not in event:
            continue
        unit = event["name"].removeprefix(event["cat"] + " ")
        if event["ph"] == "X":
            found.append((event["cat"], unit, event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            open_spans[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            found.append((event["cat"], unit, open_spans.pop(event["id"]), event["ts"]))
    return sorted(found, key=lambda span: span[2])


def one_step(all_spans, number):
    """The spans of step `number` of the recording, from 1."""
    begins = [begin for kind, unit, begin, _ in all_spans if kind == "forward" and unit == "(root)"]
    # A root's gather comes before its forward.
    roots = [begin for kind, unit, begin, _ in all_spans if kind == "gather" and unit == "(root)"]
    first = max((begin for begin in roots if begin < begins[number - 1]), default=begins[number - 1])
    last = min((begin for begin in roots if begin > begins[number - 1]), default=float("inf"))
    return [span for span in all_spans if first <= span[2] < last]


def rows(step):
    """Each span with the row in its lane: spans that overlap in a communication lane get rows of their own."""
    ends = {"gather": [], "reduce": []}
    for kind, unit, begin, end in step:
        if kind not in ends:
            # What nests is drawn over what holds it.
            yield "compute", 0, kind, unit, begin, end
            continue
        row = next((i for i, busy in enumerate(ends[kind]) if busy <= begin), len(ends[kind]))
        ends[kind][row:row + 1] = [end]
        yield kind, row, kind, unit, begin, end


def short(unit):
    return "root" if unit == "(root)" else unit.rsplit(".", 1)[-1].replace("block", "")


def draw(step, rank):
    placed = list(rows(step))
    first, last = min(span[4] for span in placed), max(span[5] for span in placed)
    heights = {lane: 1 + max((row for name, row, *_ in placed if name == lane), default=0) for lane in LANES}
    tops, y = {}, TOP
    for lane in LANES:
        tops[lane] = y
        y += heights[lane] * LANE + GAP
    scale = (WIDTH - LEFT - 10) / (last - first)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 24}" font-family="sans-serif" font-size="11">',
           f'<rect width="{WIDTH}" height="{y + 24}" fill="white"/>',
           f'<text x="{LEFT}" y="20" font-size="13">One training step of rank {rank}: {(last - first) / 1000:.1f} ms</text>']
    for lane in LANES:
        out.append(f'<text x="8" y="{tops[lane] + LANE * 0.65:.0f}">{lane}</text>')
    for lane, row, kind, unit, begin, end in placed:
        x, width = LEFT + (begin - first) * scale, max((end - begin) * scale, 0.7)
        top = tops[lane] + row * LANE
        inset = 0 if unit == "(root)" or lane != "compute" else 3
        if kind.startswith("wait"):
            inset = 8
        out.append(f'<rect x="{x:.1f}" y="{top + inset}" width="{width:.1f}" height="{LANE - 4 - 2 * inset}" fill="{COLORS[kind]}" '
                   f'stroke="#555" stroke-width="0.4"><title>{kind} {unit}, {(end - begin) / 1000:.2f} ms</title></rect>')
        if width > 16 and unit != "(root)" and not kind.startswith("wait"):
            out.append(f'<text x="{x + 3:.1f}" y="{top + LANE * 0.55:.1f}">{short(unit)}</text>')
    x = LEFT
    for kind in ["forward", "backward", "wait for gather", "gather", "reduce"]:
        label = "waiting" if kind.startswith("wait") else kind
        out.append(f'<rect x="{x}" y="{y + 4}" width="12" height="12" fill="{COLORS[kind]}"/><text x="{x + 16}" y="{y + 14}">{label}</text>')
        x += 100
    return "\n".join(out + ["</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace")
    parser.add_argument("svg")
    parser.add_argument("--step", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0)
    args = parser.parse_args()
    with open(args.trace) as file:
        events = json.load(file)["traceEvents"]
    with open(args.svg, "w") as file:
        file.write(draw(one_step(spans(events, args.rank), args.step), args.rank))


if __name__ == "__main__":
    main()
