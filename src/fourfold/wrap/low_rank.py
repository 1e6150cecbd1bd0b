"""Low-rank pairs beside a linear layer: LoRA, as peft has it, on parts.

A module of peft's holds a linear layer as `base_layer` and, per adapter, a pair A [r, k] and B [n, r] whose product is
added to what the layer gives. r is small, so what lies between the two is whole on every rank, and it alone travels:
A multiplies the features that a rank holds, B finds the part of the layer's output that it holds.

    beside Expand     a [m/(zx), k/y] A^T -> {sum y} -> u [m/z, r];   u B^T -> [m/z, n/(xy)]
    beside Contract   a [m/z, n/(xy)] A^T -> {sum x, y} -> u [m/z, r];   u B^T -> [m/(zx), k/y]

In backward du is summed over the axes that cut B's output. A is w[r, k/y] or w[r, n/(xy)], B is w[n/(xy), r] or
w[k/y, r], each stored cut over z.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm
from fourfold.layout import FEATURES, GATHERED, Layout, Spec, chunk, inner, rest
from fourfold.nn.embedding import Head
from fourfold.nn.layer import Layer
from fourfold.operators import Conjugate
from fourfold.wrap.gathered import GatherParameters
from fourfold.wrap.layers import Adapter, Closer, Reader, Stored
from fourfold.wrap.layouts import Columns, fused
from fourfold.wrap.placed import Blocks, Parted, Placed, Rest, conjugate, laid, whole
from fourfold.wrap.run import Run
from fourfold.wrap.together import at_rest


class Thin(Adapter):
    """One of a pair: parameters gathered over z, and a product with what this rank holds of the side that is wide."""

    def __init__(self, name: str, run: Run, why: str, base: Reader | Closer, *, wide: str) -> None:
        super().__init__(name, run, why)
        self.base, self.layer = base, Layer(run.grid, run.policy)
        self.cut = {"rest": rest, "inner": inner}[wide](run.policy.activations)

    def declare(self, own: str, shape: tuple[int, ...], dim: int, over: Sequence[str]) -> None:
        """A parameter of which the wide side is `dim`."""
        self.layer.declare(own, Spec(shape, Layout((*((axis, dim) for axis in over), (GATHERED, 0))), self.cut))

    @property
    def layers(self) -> Sequence[Layer]:
        return (self.layer,)

    def gathered(self) -> dict[str, Tensor]:
        names = list(self.layer.specs)
        parameters = [getattr(self.layer, name) for name in names]
        return dict(zip(names, GatherParameters.apply(self.layer.unit(*names), *parameters), strict=True))


class Narrower(Thin):
    """A: from what its base reads to few features, whole on every rank."""

    def __init__(self, name: str, run: Run, why: str, base: Reader | Closer, module: nn.Linear) -> None:
        super().__init__(name, run, why, base, wide="inner" if isinstance(base, Closer) else "rest")
        self.declare("weight", tuple(module.weight.shape), 1, self.cut.over(FEATURES))

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        return {"weight": (self.layer, "weight", Stored("weight"))}

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Tensor:  # noqa: ARG002
        self.run.where = self.name
        w = self.gathered()["weight"]
        shape = (*input.shape[:-1], w.shape[0])
        if isinstance(self.base, Closer):
            layout = Blocks(self.run, input.dim() - 1, self.cut.over(FEATURES))
            a = input.laid(layout) if isinstance(input, Placed) else laid(input, layout)
            owed = functional.linear(a.local.to(w.dtype), w)
            return Conjugate.apply(owed, lambda part: layout.sum(part, layout.over).view(shape), _same)
        a, resting = at_rest(input, self.run), Rest(self.run)
        owed = functional.linear(a.local.to(w.dtype), w)
        return Conjugate.apply(
            owed,
            lambda part: _all_tokens(resting.sum(part, ("y",)), resting, prod(shape[:-1])).view(shape),
            lambda gradient: _own_tokens(gradient.reshape(-1, shape[-1]), resting),
        )

    def describe(self) -> tuple[str, str]:
        if isinstance(self.base, Closer):
            return "w[r, n/(xy)]/z: inner -> whole", "w over z, the result summed over x and y"
        return "w[r, k/y]/z: rest -> whole", "w over z, the result summed over y and gathered over x"


class Widener(Thin):
    """B: from few features to the layout of what its base gives."""

    def __init__(self, name: str, run: Run, why: str, base: Reader | Closer, module: nn.Linear) -> None:
        super().__init__(name, run, why, base, wide="rest" if isinstance(base, Closer) else "inner")
        outputs, r = (int(size) for size in module.weight.shape)
        self.outputs, self.pieces = outputs, [outputs]
        if len(base.layers) > 1:
            self.pieces = [layer.out_features for layer in base.layers]
        # a head pads what it gives on each rank of y, so that the rows of B for it lie apart only over x
        over = ("x",) if isinstance(base.layers[0], Head) else self.cut.over(FEATURES)
        for index, size in enumerate(self.pieces):
            self.declare(self._own("weight", index), (size, r), 0, over)
            if module.bias is not None:
                self.declare(self._own("bias", index), (size,), 0, over)

    def _own(self, name: str, index: int) -> str:
        return name if len(self.pieces) == 1 else f"{name}_{index}"

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        found: dict[str, tuple[Layer, str, Stored]] = {}
        first = 0
        for index, size in enumerate(self.pieces):
            rows = None if len(self.pieces) == 1 else range(first, first + size)
            first += size
            for name in ("weight", "bias"):
                if (own := self._own(name, index)) in self.layer.specs:
                    found[own] = self.layer, own, Stored(name, rows)
        return found

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        u, held = whole(input), self.gathered()
        leading = u.shape[:-1]
        if isinstance(self.base, Closer):
            out = functional.linear(_cut_tokens(u, self.run), held["weight"], held.get("bias"))
            return Placed(out, Rest(self.run), (*leading, self.outputs))
        layout = self._layout(len(leading))
        u = conjugate(u, _same, lambda gradient: layout.sum(gradient, layout.axes))
        outs = []
        for index, size in enumerate(self.pieces):
            weight, bias = held[self._own("weight", index)], held.get(self._own("bias", index))
            outs.append(Placed(self._product(u, weight, bias), layout, (*leading, size)))
        return outs[0] if len(outs) == 1 else fused(outs)

    def _layout(self, dim: int) -> Parted:
        head = self.base.layers[0]
        if isinstance(head, Head):
            return Columns(self.run, dim, self.cut.over(FEATURES), head)
        return Blocks(self.run, dim, self.cut.over(FEATURES))

    def _product(self, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        head = self.base.layers[0]
        if not isinstance(head, Head):
            return functional.linear(u, weight, bias)
        columns, first = head.columns(), chunk(head.vocab, self.run.grid.size("x"), self.run.grid.coords["x"]).start
        rows = slice(columns.start - first, columns.stop - first)
        out = functional.linear(u, weight[rows], None if bias is None else bias[rows])
        return functional.pad(out, (0, head.columns_held - len(columns)))

    def describe(self) -> tuple[str, str]:
        if isinstance(self.base, Closer):
            return "w[k/y, r]/z: whole -> rest", "w over z; in backward its input's gradient over x and y"
        return "w[n/(xy), r]/z: whole -> inner", "w over z; in backward its input's gradient over x and y"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _cut_tokens(u: Tensor, run: Run) -> Tensor:
    """A whole tensor's tokens as they lie at rest; each rank of y finds a part of the gradient."""
    resting, tokens = Rest(run), prod(u.shape[:-1])
    return conjugate(
        u.reshape(tokens, -1),
        lambda flat: _own_tokens(flat, resting),
        lambda gradient: _all_tokens(resting.sum(gradient, ("y",)), resting, tokens),
    )


def _own_tokens(flat: Tensor, resting: Rest) -> Tensor:
    return resting.take_part(flat, tokens=True, features=False)


def _all_tokens(local: Tensor, resting: Rest, tokens: int) -> Tensor:
    if resting.tokens_cut == 1:
        return local
    return comm.all_gather(local.contiguous(), resting.run.grid, "x", label=resting.run.label).wait()[:tokens]
