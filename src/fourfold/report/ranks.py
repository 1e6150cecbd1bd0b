"""The grid drawn: every rank a box at its coordinates, x to the right, y downwards, in blocks of z inside data.

Boxes and not a picture, so that the blocks wrap on a narrow screen. The page's script colours, for the rank
under the pointer, the ranks that it shares an axis with: those it communicates with.
"""

from __future__ import annotations

from html import escape

from fourfold.axes import AXES
from fourfold.grid import Shape

DRAWN = 64
"""Ranks drawn one by one at most; above that only the sizes of the axes."""

CUTS = {
    "x": "heads, hidden units, vocabulary; tokens at rest",
    "y": "features of the residual stream",
    "z": "rows of the batch; storage of the weights",
    "data": "rows of the batch; whole replicas",
}
"""What each axis cuts, in a few words."""


def draw_grid(shape: Shape) -> str:
    """HTML of the grid: the axes and, where they are few enough, the ranks."""
    if shape.world > DRAWN:
        return f'{_axes(shape)}<p class="hint">{shape.world} ranks: too many to draw one by one.</p>'
    blocks = "".join(_replica(shape, data) for data in range(shape.data))
    hint = (
        "Point at a rank to see the ranks it shares an axis with." if shape.world > 1 else "One rank: no communication."
    )
    return f'{_axes(shape)}<div class="ranks" data-axes="{" ".join(AXES)}">{blocks}</div><p class="hint">{hint}</p>'


def _axes(shape: Shape) -> str:
    rows = "".join(
        f'<li style="--axis:var(--axis-{axis})"><b>{axis} = {size}</b> <span>{escape(CUTS[axis])}</span></li>'
        for axis, size in shape.sizes.items()
    )
    order = ", ".join(shape.order)
    return f'<ul class="axes">{rows}</ul><p class="hint">Rank order, fastest axis first: {order}.</p>'


def _replica(shape: Shape, data: int) -> str:
    blocks = "".join(_block(shape, z, data) for z in range(shape.z))
    return f'<div class="replica" style="--axis:var(--axis-data)"><h3>data {data}</h3><div>{blocks}</div></div>'


def _block(shape: Shape, z: int, data: int) -> str:
    cells = "".join(
        _rank(shape, {"x": x, "y": y, "z": z, "data": data}) for y in range(shape.y) for x in range(shape.x)
    )
    return (
        f'<div class="block" style="--axis:var(--axis-z)"><h3>z {z}</h3>'
        f'<div class="cells" style="--columns:{shape.x}">{cells}</div></div>'
    )


def _rank(shape: Shape, coords: dict[str, int]) -> str:
    places = " ".join(str(coords[axis]) for axis in AXES)
    named = ", ".join(f"{axis}={coords[axis]}" for axis in AXES)
    return (
        f'<div class="rank" tabindex="0" data-coords="{places}" title="rank {shape.rank(coords)}: {named}">'
        f"<b>{shape.rank(coords)}</b><small>x{coords['x']} y{coords['y']}</small></div>"
    )
