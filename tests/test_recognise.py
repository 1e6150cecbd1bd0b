"""Linear layers and attention are recognised under any name, and cut instead of gathered."""

from __future__ import annotations

import pytest

import fourfold as ff
from fourfold.grid import Shape
from fourfold.layout import Policy
from harness import grid_of
from linears import LINEARS
from share import share
from test_parallelize import differences, train

GRIDS = [
    Shape(x=2), Shape(y=2), Shape(z=2), Shape(data=2), Shape(x=2, y=2), Shape(x=2, z=2), Shape(y=2, data=2)
]  # fmt: skip
MODES = ("sharded", "replicated")


def compared(name: str, shape: Shape, mode: str) -> list[str]:
    grid, strange, rows = grid_of(shape), LINEARS[name], 2 * shape.data * shape.z
    one = train(strange, strange.build(), None, rows)
    model = ff.parallelize(strange.build(), grid, policy=Policy(activations=mode))  # type: ignore[arg-type]
    return differences(one, train(strange, model, grid, rows), grid)


CASES = sorted(
    ((name, shape, mode) for name in LINEARS for shape in GRIDS for mode in MODES), key=lambda case: case[1].world
)


@pytest.mark.parametrize(("name", "shape", "mode"), share(CASES, 9), ids=str)
def test_recognised_modules_train_as_on_one_process(ranks, name: str, shape: Shape, mode: str) -> None:
    assert ranks(shape.world).run(compared, name, shape, mode) == [[]] * shape.world
