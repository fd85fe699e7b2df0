"""Draws loss curves as a standalone SVG, with the standard library only."""

from html import escape

WIDTH, HEIGHT = 960, 540
LEFT, RIGHT, TOP, BOTTOM = 76, 28, 84, 64
INK, MUTED, GRID = "#1f2937", "#6b7280", "#e5e7eb"


def nice_step(span, count):
    """The smallest of 1, 2, 5 x 10^k that cuts `span` into at most `count` parts."""
    step = 10.0 ** len(str(int(span)))
    while span / step < 1e9:
        for smaller in (step / 2, step / 5, step / 10):
            if span / smaller > count:
                return step
            step = smaller
    return step


def ticks(low, high, count):
    step = nice_step(high - low, count)
    first = -(-low // step)
    values = []
    while first * step <= high + step * 1e-9:
        values.append(first * step + 0.0)  # not -0
        first += 1
    return values


class Axes:
    def __init__(self, x_range, y_range):
        self.x0, self.x1 = x_range
        self.y0, self.y1 = y_range

    def x(self, value):
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value):
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)


def text(x, y, words, size=13, color=MUTED, anchor="start", extra=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def grid(axes, x_label, y_label):
    parts = []
    for value in ticks(axes.y0, axes.y1, 8):
        y = axes.y(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="{GRID}"/>')
        parts.append(text(LEFT - 10, y + 4, f"{value:g}", anchor="end"))
    base = HEIGHT - BOTTOM
    for value in ticks(axes.x0, axes.x1, 10):
        x = axes.x(value)
        parts.append(f'<line x1="{x:.1f}" y1="{base}" x2="{x:.1f}" y2="{base + 5}" stroke="{MUTED}"/>')
        parts.append(text(x, base + 22, f"{value:g}", anchor="middle"))
    parts.append(f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}" stroke="{MUTED}"/>')
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_label, anchor="middle"))
    middle = (TOP + base) / 2
    parts.append(text(22, middle, y_label, anchor="middle", extra=f'transform="rotate(-90 22 {middle:.1f})"'))
    return parts


def curve(axes, series):
    points = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in series["points"])
    dash = f' stroke-dasharray="{series["dash"]}"' if series.get("dash") else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{series["color"]}" stroke-width="{series["width"]}"'
        f' stroke-opacity="{series.get("opacity", 1)}" stroke-linejoin="round"{dash}/>'
    )


def legend(all_series):
    parts = []
    y = TOP + 18
    for series in all_series:
        left = WIDTH - RIGHT - 330
        dash = f' stroke-dasharray="{series["dash"]}"' if series.get("dash") else ""
        parts.append(
            f'<line x1="{left}" y1="{y - 4}" x2="{left + 32}" y2="{y - 4}" stroke="{series["color"]}"'
            f' stroke-width="{min(series["width"], 6)}" stroke-opacity="{series.get("opacity", 1)}"{dash}/>'
        )
        parts.append(text(left + 42, y, series["label"], color=INK))
        y += 22
    return parts


def marker(axes, x, label, row):
    """A vertical line at step `x`, with its label below the legend where curves have long come down."""
    at, y = axes.x(x), TOP + 110 + 20 * row
    anchor, shift = ("start", 6) if at < WIDTH / 2 else ("end", -6)
    return [
        f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#b91c1c" stroke-dasharray="3 3"/>',
        text(at + shift, y, label, size=12, color="#b91c1c", anchor=anchor),
    ]


def draw(path, title, subtitle, all_series, markers):
    """`all_series`: dicts of label, points, color, width and maybe dash, opacity; `markers`: (step, label)."""
    xs = [x for series in all_series for x, _ in series["points"]]
    ys = [y for series in all_series for _, y in series["points"]]
    margin = (max(ys) - min(ys)) * 0.04
    axes = Axes((0, max(xs)), (min(ys) - margin, max(ys) + margin))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 36, title, size=20, color=INK, extra='font-weight="600"'),
        text(LEFT, 60, subtitle),
        *grid(axes, "step", "loss (nats a byte)"),
        *(curve(axes, series) for series in all_series),
        *(part for row, (x, label) in enumerate(markers) for part in marker(axes, x, label, row)),
        *legend(all_series),
        "</svg>",
    ]
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(parts) + "\n")
