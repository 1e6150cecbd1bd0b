"""The drawings of the docs: `python docs/drawings/draw.py` writes every SVG of this folder anew.

Plain Python; schedules are those of `fourfold.schedule`. Every run writes the same bytes, and
`tests/docs/test_drawings.py` checks that the files are what this script writes. A colour stands for the same axis in
every drawing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product as every
from pathlib import Path
from xml.sax.saxutils import escape

from fourfold.schedule.find import find
from fourfold.schedule.named import named
from fourfold.schedule.play import Played, equal_seconds, play
from fourfold.schedule.stages import Stages

HERE = Path(__file__).parent
AXIS = {"x": "#0b62c4", "y": "#b84a00", "z": "#1b7a3d", "data": "#7a3fb0"}
PALE = {"x": "#dcebfb", "y": "#fde5d3", "z": "#d9f2e0", "data": "#ecdff7"}
INK, GREY, FAINT = "#1c2128", "#59636e", "#d0d7de"
ACTION = {"F": "#a9cdf5", "B": "#f7c9a3", "W": "#b5e3c2", "BW": "#d8d2a0"}
"""A colour for each kind of action of a pipeline."""

Point = tuple[float, float]


def number(value: float) -> str:
    """As short as it can be: `12`, `12.5`."""
    return f"{value:.1f}".removesuffix(".0")


class Drawing:
    """Shapes and words on white ground; `width` is the natural one, and no word is smaller than 12 there."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self.title, self.width, self.height = title, width, height
        self.parts: list[str] = []
        self.rect(0, 0, width, height, fill="#ffffff")

    def add(self, tag: str, body: str = "", **attributes: object) -> None:
        named = (
            (name.replace("_", "-"), number(value) if isinstance(value, (int, float)) else value)
            for name, value in attributes.items()
        )
        text = "".join(f' {name}="{value}"' for name, value in named)
        self.parts.append(f"<{tag}{text}>{body}</{tag}>" if body else f"<{tag}{text}/>")

    def rect(self, x: float, y: float, width: float, height: float, **look: object) -> None:
        self.add("rect", x=x, y=y, width=width, height=height, **look)

    def line(self, start: Point, end: Point, colour: str = GREY, thick: float = 2, **look: object) -> None:
        self.add("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=colour, stroke_width=thick, **look)

    def polygon(self, points: Sequence[Point], **look: object) -> None:
        self.add("polygon", points=" ".join(f"{number(x)},{number(y)}" for x, y in points), **look)

    def arrow(self, start: Point, end: Point, colour: str = GREY, thick: float = 2.5) -> None:
        """Along one of the two directions of the page."""
        (x, y), head = end, 9
        dx, dy = ((end[0] > start[0]) - (end[0] < start[0])), ((end[1] > start[1]) - (end[1] < start[1]))
        self.line(start, (x - dx * head, y - dy * head), colour, thick)
        back = (x - dx * head * 1.3, y - dy * head * 1.3)
        side = (dy * head * 0.6, dx * head * 0.6)
        wings = [(back[0] + side[0], back[1] + side[1]), (back[0] - side[0], back[1] - side[1])]
        self.polygon([(x, y), *wings], fill=colour)

    def text(self, x: float, y: float, words: str, size: float = 16, colour: str = INK, **look: object) -> None:
        """`y` is the line that the letters stand on; `anchor` is start, middle or end."""
        anchor = look.pop("anchor", "start")
        style = {"fill": colour, "font_size": size, "text_anchor": anchor, **look}
        self.add("text", escape(words), x=x, y=y, **style)

    def pill(self, middle: Point, words: str, axis: str, *, width: float, size: float = 15, height: float = 28) -> None:
        """A collective along an axis."""
        x, y = middle
        look = dict(rx=height / 2, fill=PALE[axis], stroke=AXIS[axis], stroke_width=1.5)
        self.rect(x - width / 2, y - height / 2, width, height, **look)
        self.text(x, y + size * 0.35, words, size, AXIS[axis], anchor="middle", font_weight="bold")

    def box(self, middle: Point, words: str, *, width: float, height: float = 34, size: float = 16) -> None:
        """Something that is computed."""
        x, y = middle
        look = dict(rx=4, fill="#f6f8fa", stroke=GREY, stroke_width=1.5)
        self.rect(x - width / 2, y - height / 2, width, height, **look)
        self.text(x, y + size * 0.35, words, size, anchor="middle")

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="sans-serif" role="img">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>"]) + "\n"


def walk(start: Point, ways: Sequence[Point], coords: Sequence[float]) -> Point:
    """From `start` so many times along each way."""
    steps = list(zip(ways, coords, strict=True))
    return start[0] + sum(way[0] * n for way, n in steps), start[1] + sum(way[1] * n for way, n in steps)


def device(drawing: Drawing, at: Point, words: str, radius: float = 21, size: float = 19) -> None:
    drawing.add("circle", cx=at[0], cy=at[1], r=radius, fill="#ffffff", stroke=INK, stroke_width=2)
    drawing.text(at[0], at[1] + size * 0.35, words, size, anchor="middle")


def twins(drawing: Drawing, left: Point, right: Point, bend: float) -> None:
    """Two devices that differ along data alone, joined above or below what lies between them."""
    ends = f"{number(right[0] - 60)} {number(right[1] + bend)} {number(right[0])} {number(right[1])}"
    path = f"M {number(left[0])} {number(left[1])} C {number(left[0] + 60)} {number(left[1] + bend)} {ends}"
    drawing.add("path", d=path, fill="none", stroke=AXIS["data"], stroke_width=3, stroke_dasharray="7 5")


def grid() -> Drawing:
    """Sixteen devices: a cube of x, y and z, twice along data."""
    drawing = Drawing("A grid of 16 devices: x=2, y=2, z=2, data=2", 760, 550)
    ways = ((150, 0), (0, 158), (72, -62), (408, 0))

    def place(*coords: int) -> Point:
        """Of the device at x, y, z, data."""
        return walk((62, 144), ways, coords)

    for a, (b, c, bend) in every((0, 1), ((0, 1, -1), (1, 0, 1))):  # above the cubes and below them
        twins(drawing, place(a, b, c, 0), place(a, b, c, 1), bend * (60 - 28 * a))
    for data in (0, 1):
        for a, b in every((1, 0), (0, 1)):  # what is behind first
            drawing.line(place(0, b, a, data), place(1, b, a, data), AXIS["x"], 5)
            drawing.line(place(b, 0, a, data), place(b, 1, a, data), AXIS["y"], 5)
            drawing.line(place(a, b, 0, data), place(a, b, 1, data), AXIS["z"], 5)
        for z, y, x in every((1, 0), (0, 1), (0, 1)):
            device(drawing, place(x, y, z, data), str(x + 2 * y + 4 * z + 8 * data))
    bold = dict(anchor="middle", font_weight="bold")
    x, y = place(0, 0, 0, 0)
    drawing.text(x + 42, y + 26, "x", 26, AXIS["x"], **bold)
    drawing.text(x - 22, y + 88, "y", 26, AXIS["y"], **bold)
    drawing.text(x + 20, y - 38, "z", 26, AXIS["z"], **bold)
    drawing.text(380, 27, "data", 26, AXIS["data"], **bold)
    meanings = {
        "x": "cuts the width inside a sublayer: heads, hidden units",
        "y": "cuts the width of the residual stream",
        "z": "cuts the batch, and the weights while they are stored",
        "data": "cuts the batch: replicas that sum their gradients",
    }
    for index, (axis, words) in enumerate(meanings.items()):
        y = 414 + 38 * index
        drawing.rect(30, y - 22, 70, 30, rx=6, fill=AXIS[axis])
        drawing.text(65, y, axis, 21, "#ffffff", **bold)
        drawing.text(116, y, words, 23)
    return drawing


def product() -> Drawing:
    """The three matrices of a product on three faces of the cube of devices."""
    drawing = Drawing("The 3D product: a, w and out on three faces of a cube of 2 x 2 x 2 devices", 560, 640)
    ways = ((0, 106), (96, -50), (96, 50))  # one device along x, y, z

    def at(*coords: float) -> Point:
        """The corner x, y, z of the cube."""
        return walk((70, 150), ways, coords)

    faces: dict[str, tuple[str, Callable[[int, int], Point]]] = {
        "a": ("#fff3c4", lambda z, y: at(0, y, z)),
        "w": ("#e4e9ee", lambda x, y: at(x, y, 2)),
        "out": ("#ffffff", lambda z, x: at(x, 0, z)),
    }
    for name, (fill, corner) in faces.items():
        for i, j in every((0, 1), repeat=2):
            part = [corner(i, j), corner(i + 1, j), corner(i + 1, j + 1), corner(i, j + 1)]
            drawing.polygon(part, fill=fill, stroke=INK, stroke_width=2, stroke_linejoin="round")
            x, y = (sum(point[k] for point in part) / 4 for k in (0, 1))
            drawing.text(x, y + 6, f"{name} {i},{j}", 18, anchor="middle")
    bold = dict(font_weight="bold")
    for axis, ends in (("x", ((0, 2, 2), (2, 2, 2))), ("y", ((0, 0, 0), (0, 2, 0))), ("z", ((2, 0, 0), (2, 0, 2)))):
        drawing.line(at(*ends[0]), at(*ends[1]), AXIS[axis], 6, stroke_linecap="round")
    drawing.text(464, 250, "x cuts n", 20, AXIS["x"], **bold)
    drawing.text(144, 82, "y cuts k", 20, AXIS["y"], anchor="end", **bold)
    drawing.text(140, 440, "z cuts m", 20, AXIS["z"], anchor="end", **bold)
    rows = (
        ("#fff3c4", "a[m/z, k/y]", "all-gather over x", "x"),
        ("#e4e9ee", "w[n/x, k/y]", "all-gather over z", "z"),
        ("#ffffff", "out[m/z, n/x] {sum y}", "reduce-scatter over y", "y"),
    )
    for index, (fill, words, how, axis) in enumerate(rows):
        y = 510 + 40 * index
        drawing.rect(30, y - 19, 26, 26, fill=fill, stroke=INK, stroke_width=2)
        drawing.text(68, y, words, 19)
        drawing.pill((415, y - 6), how, axis, width=230, size=18, height=32)
    drawing.text(30, 626, "Device (x, y, z) multiplies a z,y by w x,y: a part of out z,x.", 18, GREY)
    return drawing


def layouts() -> Drawing:
    """What a rank holds from rest to inner and back, and which operator leads on."""
    drawing = Drawing("From rest to inner by an Expand layer and back to rest by a Contract layer", 540, 870)
    left, right, top, row = 135, 405, 70, 186
    # the matrix of each row, m x k or m x n, and the part of it that rank (0, 0, 0) holds
    tiles = ((84, 1 / 4, 1 / 2), (84, 1 / 2, 1 / 2), (140, 1 / 2, 1 / 2), (140, 1 / 2, 1 / 4))
    names = ("[m/(zx), k/y]", "[m/z, k/y]", "[m/z, n/x]", "[m/z, n/(xy)]")
    for middle, owed in ((left, {2: " {sum y}"}), (right, {1: " {sum x}"})):
        for index, ((width, tokens, features), name) in enumerate(zip(tiles, names, strict=True)):
            x, y, height = middle - width / 2, top + row * index, 84
            drawing.rect(x, y, width, height, fill="#ffffff", stroke=GREY, stroke_width=1.5)
            part = dict(fill="#ffd33d", stroke=INK, stroke_width=2)
            if index in owed:
                part |= dict(fill="#fff3c4", stroke_dasharray="5 3")
            drawing.rect(x, y, width * features, height * tokens, **part)
            drawing.text(middle, y + height + 21, name + owed.get(index, ""), 18, anchor="middle")
    steps = (("enter: all-gather x", "x"), ("product; w: all-gather z", "z"), ("spread: reduce-scatter y", "y"))
    back = (("leave: reduce-scatter x", "x"), ("product; w: all-gather z", "z"), ("collect: all-gather y", "y"))
    for index in range(3):
        low, high = top + row * index + 114, top + row * (index + 1) - 4
        drawing.arrow((left, low), (left, high))
        drawing.arrow((right, high), (right, low))
        for middle, (words, axis) in ((left, steps[index]), (right, back[index])):
            drawing.pill((middle, (low + high) / 2), words, axis, width=236, size=17, height=31)
    drawing.arrow((left + 85, 670), (right - 85, 670))
    drawing.text((left + right) / 2, 656, "attention", 17, anchor="middle")
    drawing.text((left + right) / 2, 696, "GELU", 17, anchor="middle")
    drawing.arrow((right - 58, 112), (left + 58, 112))
    drawing.text((left + right) / 2, 98, "next sublayer:", 17, anchor="middle")
    drawing.text((left + right) / 2, 138, "+ stream, norm", 17, anchor="middle")
    bold = dict(anchor="middle", font_weight="bold")
    for middle, words in ((left, "Expand"), (right, "Contract")):
        drawing.text(middle, 30, words, 20, **bold)
    for y, words, aside in ((118, "rest", 76), (676, "inner", 102)):
        for middle in (left - aside, right + aside):
            drawing.text(middle, y, words, 19, **bold)
    drawing.rect(24, 777, 22, 22, fill="#ffd33d", stroke=INK, stroke_width=2)
    drawing.text(56, 795, "held by the first rank of x=2, y=2, z=2", 18)
    drawing.rect(24, 807, 22, 22, fill="#fff3c4", stroke=INK, stroke_width=2, stroke_dasharray="5 3")
    drawing.text(56, 825, "a partial sum, still owed", 18)
    drawing.text(24, 855, "Backward: every arrow turned, gather and scatter exchanged.", 18, GREY)
    return drawing


def transformer() -> Drawing:
    """One block: what is computed where, and what travels between."""
    drawing = Drawing("One transformer block on the grid: which collective runs where", 640, 800)
    columns = ((175, "attention", "q, k, v: product", "heads: attention", "out: product"),)
    columns += ((490, "MLP", "up: product", "units: GELU", "down: product"),)
    top, row = 120, 66
    for middle, title, first, inside, last in columns:
        drawing.text(middle, 32, title, 21, anchor="middle", font_weight="bold")
        side = middle - 142
        drawing.arrow((middle, 52), (middle, top - 29))
        drawing.line((middle, 66), (side, 66))
        drawing.line((side, 66), (side, top + 8 * row))
        drawing.arrow((side, top + 8 * row), (middle - 18, top + 8 * row))
        rows: list[tuple[str, str, str]] = [
            ("norm", "statistics over y", "y"),
            ("enter: all-gather x", "", "x"),
            (first, "w: all-gather z", "z"),
            ("spread: reduce-scatter y", "", "y"),
            (inside, "nothing travels", ""),
            ("collect: all-gather y", "", "y"),
            (last, "w: all-gather z", "z"),
            ("leave: reduce-scatter x", "", "x"),
        ]
        for index, (words, note, axis) in enumerate(rows):
            y = top + row * index
            below = top + row * (index + 1)
            drawing.arrow((middle, y + (26 if note else 16)), (middle, below - (16 if note or index == 7 else 27)))
            if note:
                look = dict(rx=4, fill="#f6f8fa", stroke=GREY, stroke_width=1.5)
                drawing.rect(middle - 110, y - 27, 220, 54, **look)
                drawing.text(middle, y - 5, words, 18, anchor="middle")
                drawing.text(middle, y + 18, note, 17, AXIS.get(axis, GREY), anchor="middle", font_weight="bold")
            else:
                drawing.pill((middle, y), words, axis, width=236, size=18, height=33)
        device(drawing, (middle, top + 8 * row), "+", 17, 22)
    (one, *_), (two, *_) = columns
    end = top + 8 * row
    drawing.line((one + 17, end), (321, end))
    drawing.line((321, end), (321, 52))
    drawing.line((321, 52), (two, 52))
    drawing.line((two, end + 17), (two, end + 36))
    drawing.text(two, end + 58, "next block", 18, anchor="middle")
    lines = (
        "Between sublayers the stream is at rest: tokens cut over data, z, x, features over y.",
        "Backward: partners in reverse; w again over z; dw: reduce-scatter z, sum over data.",
    )
    for index, words in enumerate(lines):
        drawing.text(14, 754 + 30 * index, words, 15.5, GREY)
    return drawing


def lattice(drawing: Drawing, start: Point, axes: Sequence[tuple[str, int, Point]], radius: int = 10) -> None:
    """Devices by `axes`: their sizes and ways."""
    ways = [way for *_, way in axes]
    places = list(every(*(range(size) for _, size, _ in axes)))
    for coords in places:
        for index, (axis, size, _) in enumerate(axes):
            if coords[index] + 1 < size:
                beyond = [n + (place == index) for place, n in enumerate(coords)]
                look = dict(stroke_dasharray="5 3") if axis == "data" else {}
                drawing.line(walk(start, ways, coords), walk(start, ways, beyond), AXIS[axis], 4, **look)
    for coords in places:
        x, y = walk(start, ways, coords)
        drawing.add("circle", cx=x, cy=y, r=radius, fill="#ffffff", stroke=INK, stroke_width=2)


def schemes() -> Drawing:
    """The classic schemes as grids."""
    drawing = Drawing("DDP, FSDP, tensor parallelism, HSDP, FSDP x TP and 4D as grids", 600, 650)
    line, flat, deep = (31, 0), (62, 0), (0, 46)
    cube = [("z", 2, (30, -22)), ("y", 2, (0, 40)), ("x", 2, (52, 0))]
    panels = (
        ("DDP", "data=8", "all of the weights", [("data", 8, line)]),
        ("FSDP", "z=8", "1/8 of the weights", [("z", 8, line)]),
        ("TP", "x=8", "1/8 of the weights", [("x", 8, line)]),
        ("HSDP", "z=4, data=2", "1/4 of the weights", [("z", 4, flat), ("data", 2, deep)]),
        ("FSDP x TP", "x=2, z=4", "1/8 of the weights", [("z", 4, flat), ("x", 2, deep)]),
        ("4D", "x=2, y=2, z=2, data=2", "1/8 of the weights", cube),
    )
    for index, (name, sizes, holds, axes) in enumerate(panels):
        x, y = 12 + 294 * (index % 2), 12 + 192 * (index // 2)
        drawing.rect(x, y, 282, 182, rx=8, fill="#ffffff", stroke=FAINT, stroke_width=1.5)
        drawing.text(x + 14, y + 29, name, 20, font_weight="bold")
        drawing.text(x + 268, y + 29, sizes, 17 if len(axes) < 3 else 15, GREY, anchor="end")
        drawing.text(x + 14, y + 168, f"each holds {holds}", 16)
        if len(axes) < 3:
            lattice(drawing, (x + (32 if len(axes) == 1 else 48), y + (98 if len(axes) == 1 else 76)), axes)
            continue
        for bend, start in ((-32, (x + 60, y + 62)), (30, (x + 82, y + 124))):
            twins(drawing, start, (start[0] + 142, start[1]), bend)
        for start in (x + 30, x + 172):
            lattice(drawing, (start, y + 84), axes, radius=8)
    legend = (("x y", "activations travel"), ("z", "weights travel"), ("data", "gradients travel"))
    for (axes, words), x in zip(legend, (14, 236, 412), strict=True):
        for place, axis in enumerate(axes.split()):
            drawing.rect(x + 18 * place, 609, 15, 15, fill=AXIS[axis])
        drawing.text(x + 4 + 18 * len(axes.split()), 623, words, 18)
    return drawing


def schedules() -> Drawing:
    """Four schedules of 4 pipe ranks, on one scale of time: what runs when, and where a rank waits."""
    pipe, micro_steps, top = 4, 8, 50
    wave = Stages.even(8, pipe, 2, "wave")
    one, two = (equal_seconds(1.0, 1.0, 1.0, pipe, chunks) for chunks in (1, 2))
    panels: tuple[tuple[str, Played], ...] = (
        ("1f1b", play(named("1f1b", pipe, 1, micro_steps), one)),
        ("interleaved, 2 chunks", play(named("interleaved", pipe, 2, micro_steps), two)),
        ("zb-h1", play(named("zb-h1", pipe, 1, micro_steps), one)),
        ("found on a wave of 2 chunks", find(wave.placement, micro_steps, two, memory=pipe).played),
    )
    drawing = Drawing("1F1B, interleaved, ZB-H1 and a found schedule on 4 pipe ranks", 860, top + len(panels) * 168)
    for index, (kind, words) in enumerate(zip(ACTION, ("forward", "input gradient", "weights", "both"), strict=True)):
        drawing.rect(64 + 190 * index, 16, 18, 18, fill=ACTION[kind], stroke=GREY, stroke_width=1)
        drawing.text(90 + 190 * index, 31, f"{kind}: {words}", 16)
    scale = 780 / max(played.makespan for _, played in panels)
    for index, (name, played) in enumerate(panels):
        y = top + 168 * index
        idle = f"idle {played.idle_share:.0%} of {played.makespan:g} s; keeps {max(played.peaks):g} micro-batches"
        drawing.text(64, y + 22, name, 18, font_weight="bold")
        drawing.text(844, y + 22, idle, 16, GREY, anchor="end")
        for rank, spans in enumerate(played.spans):
            line = y + 32 + 30 * rank
            drawing.text(14, line + 19, f"pipe {rank}", 14, GREY)
            drawing.rect(64, line, scale * played.makespan, 26, fill="#f6f8fa", stroke=FAINT, stroke_width=1)
            for (kind, stage, micro), start, end in spans:
                x, width = 64 + scale * start, scale * (end - start)
                later = dict(stroke_width=2.5) if stage >= pipe else dict(stroke_width=1)
                drawing.rect(x, line, width, 26, fill=ACTION[kind], stroke=GREY, **later)
                if width > 9:
                    drawing.text(x + width / 2, line + 18, f"{micro}", 12, anchor="middle")
    return drawing


def main() -> None:
    for name, text in drawings():
        (HERE / name).write_text(text, encoding="utf-8")


def drawings() -> Iterator[tuple[str, str]]:
    """Every file of this folder that is drawn: its name and its text."""
    for draw in (grid, product, layouts, transformer, schemes, schedules):
        yield f"{draw.__name__}.svg", draw().svg()


if __name__ == "__main__":
    main()
