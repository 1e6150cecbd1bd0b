"""Ways to call torch functions on tensors that are cut: `CALLS` by a function's name, `FALLBACK` where no rule is.

A call gets its function and `Operands`, which give it the same numbers plain and on the grid, and returns what is to be
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fourfold.layout import FEATURES, inner
from fourfold.nn.embedding import Head
from fourfold.wrap.grid_tensor import ModelContext, TensorPlacement, distribute
from fourfold.wrap.placements import ChunkPlacement, LogitsPlacement, RestPlacement, SharedHeadsPlacement, fuse

SHAPE = (3, 5, 6)
"""Divides by y=2 where it must (the last dim) and by nothing where it need not."""

KINDS = ("rest", "blocks 0", "blocks 1", "blocks 2", "columns", "columns 0", "shared 1", "shared 2", "fused")


def placement_of(kind: str, context: ModelContext) -> TensorPlacement:
    over = inner(context.policy.activations).over(FEATURES)
    name, _, dim = kind.partition(" ")
    if name == "rest":
        return RestPlacement(context)
    if name == "blocks":
        return ChunkPlacement(context, int(dim), over)
    if name == "columns":
        at = int(dim or 2)
        return LogitsPlacement(context, at, over, Head(context.grid, context.policy, 4, SHAPE[at]))
    size = {1: 1, 2: 2}[int(dim)]
    heads = SHAPE[int(dim)] // size
    parts = math.prod(context.grid.size(axis) for axis in over)
    block = 0
    for axis in over:
        block = block * context.grid.size(axis) + context.grid.coords[axis]
    group = parts
    queries = range(block * heads, (block + 1) * heads)
    held = range(queries.start // group, (queries.stop - 1) // group + 1)
    return SharedHeadsPlacement(context, int(dim), over, heads, size, held, queries, group)


class Operands:
    """The same numbers for both sides: plain, and on the grid cut as `kind` says."""

    shape = SHAPE

    def __init__(self, seed: int, kind: str, context: ModelContext | None) -> None:
        self.kind, self.context = kind, context
        self.generator = torch.Generator().manual_seed(seed)
        self.leaves: list[Tensor] = []

    def plain(self, *shape: int, low: float = 0.2) -> Tensor:
        """A leaf whose gradient is compared."""
        leaf = torch.rand(shape, generator=self.generator, dtype=torch.float64) + low
        self.leaves.append(leaf.requires_grad_())
        return leaf

    def a(self, *shape: int, kind: str = "", low: float = 0.2) -> Tensor:
        """The operand that is cut."""
        return self._cut(self.plain(*(shape or SHAPE), low=low), kind or self.kind)

    def flags(self, *shape: int) -> Tensor:
        return torch.rand(shape or SHAPE, generator=self.generator) > 0.5

    def cut_flags(self) -> Tensor:
        return self._cut(self.flags(), self.kind)

    def ids(self, most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=self.generator)

    def _cut(self, plain: Tensor, kind: str) -> Tensor:
        if self.context is None:
            return plain
        if kind == "fused":
            over = inner(self.context.policy.activations).over(FEATURES)
            parts = [
                distribute(part, ChunkPlacement(self.context, plain.dim() - 1, over))
                for part in plain.split([2, 4], dim=-1)
            ]
            return fuse(parts)
        return distribute(plain, placement_of(kind, self.context))


Call = Callable[[Callable, Operands], Any]


def others(m: Operands) -> list[Tensor]:
    """Plain operands that broadcast in all ways."""
    a, b, c = SHAPE
    shapes = [(), (1,), (c,), (1, c), (b, 1), (b, c), (1, 1, 1), (a, 1, 1), (a, 1, c), (1, b, 1), (a, b, 1), (a, b, c)]
    return [m.plain(*shape) for shape in shapes]


def unary(func: Callable, m: Operands) -> Any:
    return func(m.a())


def unary_inside(func: Callable, m: Operands) -> Any:
    """On numbers inside (-1, 1) and between those that the function treats apart."""
    return func(m.a(low=-0.5))


def in_place(func: Callable, m: Operands) -> Any:
    a = m.a()
    b = a * 1
    out = func(b)
    return out, b


def binary(func: Callable, m: Operands) -> Any:
    return [func(m.a(), other) for other in others(m)]


def reflected(func: Callable, m: Operands) -> Any:
    return [func(other, m.a()) for other in (m.plain(6), m.plain(3, 5, 6), m.plain(4, 3, 5, 6), m.plain())]


def with_numbers(func: Callable, m: Operands) -> Any:
    return func(m.a(), 2.5), func(m.a(), 2)


def with_cut(func: Callable, m: Operands) -> Any:
    """Operands in other layouts, and smaller ones."""
    found = [func(m.a(), m.a(kind=kind)) for kind in KINDS]
    return *found, func(m.a(), m.a(1, 5, 6, kind="blocks 1")), func(m.a(1, 5, 6, kind="blocks 2"), m.a())


def binary_in_place(func: Callable, m: Operands) -> Any:
    found = []
    for other in (*others(m), m.a(), m.a(kind="rest"), 3.0):
        b = m.a() * 1
        found += [func(b, other), b]
    return found


def without_gradient(func: Callable, m: Operands) -> Any:
    return func(m.a().detach(), m.plain(6).detach()), func(m.a().detach(), 0.3)


def comparison(func: Callable, m: Operands) -> Any:
    return func(m.a(), m.plain(6)), func(m.a(), 0.7), func(m.a(), m.a(kind="rest"))


def logical(func: Callable, m: Operands) -> Any:
    return func(m.cut_flags(), m.flags(6)), func(m.cut_flags(), m.flags(3, 5, 6)), func(m.cut_flags(), m.cut_flags())


def reduction(func: Callable, m: Operands) -> Any:
    a = m.a()
    found = [func(a, 0), func(a, dim=-1), func(a, dim=1), func(a, 1, keepdim=True), func(a, -1, True)]
    if func.__name__ not in ("argmax", "argmin"):
        found += [func(a, (0, 2)), func(a, dim=[-1, 0], keepdim=True)]
    if func.__name__ in ("sum", "mean"):
        found += [func(a), func(a, axis=1), func(a, dim=1, dtype=torch.float32), func(a, dim=())]
    if func.__name__ in ("amax", "amin"):
        found += [func(a), func(a, dim=())]
    if func.__name__ in ("var", "std"):
        found += [func(a), func(a, 1, unbiased=False), func(a, dim=2, correction=0, keepdim=True)]
    return found


def split(func: Callable, m: Operands) -> Any:
    a, name = m.a(), func.__name__
    if name == "split_with_sizes":
        return func(a, [2, 4], -1), func(a, [1, 2], 0), func(a, split_sizes=[1, 4], dim=1)
    found = [func(a, 2), func(a, 2, -1), func(a, 3, dim=1), func(a, 2, dim=-2)]
    if name == "split":
        word = "split_size_or_sections" if func is torch.split else "split_size"
        found += [func(a, [2, 4], dim=2), func(a, **{word: [1, 2]}, dim=0), func(a, dim=1, **{word: 2})]
    if name == "chunk":
        found += [func(a, chunks=2, dim=2), func(a, dim=1, chunks=3)]
    if name == "tensor_split":
        found += [func(a, (2, 4), 2), func(a, indices=(1,), dim=1), func(a, sections=2, dim=0)]
    return found


def reshape(func: Callable, m: Operands) -> Any:
    a = m.a()
    found = []
    for shape in (
        (15, 6),
        (3, 5, 2, 3),
        (3, 30),
        (90,),
        (5, 3, 6),
        (1, 3, 5, 6),
        (3, 5, 1, 6),
        (-1, 6),
        (3, -1),
        (45, 2),
    ):
        found += [func(a, shape), *([] if func is torch.reshape else [func(a, *shape)])]
    word = "shape" if func in (torch.reshape, Tensor.reshape) else "size"
    return *found, func(a, **{word: (15, 6)}), func(func(a, (3, 5, 2, 3)), (3, 5, 6))


def as_other(func: Callable, m: Operands) -> Any:
    return func(m.a(), torch.empty(15, 6)), func(m.plain(15, 6), m.a())


def padded(func: Callable, m: Operands) -> Any:
    a = m.a()
    return func(a, (1, 2)), func(a, (1, 0, 2, 1), value=3.0), func(a, (1, 1), mode="reflect"), func(a, ())


def with_dims(*calls: tuple[tuple, dict]) -> Call:
    def call(func: Callable, m: Operands) -> Any:
        a = m.a()
        return [func(a, *args, **kwargs) for args, kwargs in calls]

    return call


def permutation(func: Callable, m: Operands) -> Any:
    a, name = m.a(), func.__name__
    if name == "permute":
        return func(a, (2, 0, 1)), func(a, dims=(1, 2, 0)), *([func(a, 0, -1, 1)] if func is Tensor.permute else [])
    if name in ("movedim", "moveaxis"):
        return func(a, 0, -1), func(a, (0, 1), (2, 0))
    names = {"transpose": ("dim0", "dim1"), "swapaxes": ("axis0", "axis1"), "swapdims": ("dim0", "dim1")}[name]
    return func(a, 0, 1), func(a, -1, -2), func(a, 1, 1), func(a, **dict(zip(names, (2, 0), strict=True)))


def turned(func: Callable, m: Operands) -> Any:
    a = m.a()
    return func(a.reshape(15, 6)), func(a.reshape(3, 30))


def expand(func: Callable, m: Operands) -> Any:
    a, b = m.a(), m.a(1, 5, 6, kind="blocks 2")
    if func.__name__ == "broadcast_to":
        return func(a, (2, 3, 5, 6)), func(b, (3, 5, 6)), func(b, size=(3, -1, 6))
    if func.__name__ == "expand_as":
        return func(a, torch.empty(2, 3, 5, 6)), func(b, a), func(m.plain(6), a)
    return func(a, 2, 3, 5, 6), func(a, (2, -1, 5, -1)), func(b, 3, -1, 6), func(b, size=(3, 5, 6))


def index(func: Callable, m: Operands) -> Any:
    a = m.a()
    keys: list[Any] = [0, -1, slice(None), slice(1, 3), None, Ellipsis, (Ellipsis, 0), (slice(None), 1)]
    keys += [
        (Ellipsis, slice(0, 2)),
        (slice(None), slice(None), slice(2, None)),
        (None, 1, Ellipsis, None),
        (0, None, 1),
    ]
    keys += [torch.tensor([2, 0]), (slice(None), torch.tensor([1, 1])), torch.tensor([True, False, True]), [0, 2]]
    keys += [[1], (slice(None), [-1]), (Ellipsis, [2], slice(None)), (slice(None), slice(1, 3), [-2]), (0, [1])]
    keys += [(slice(None), slice(None, None, 2)), (Ellipsis, slice(None, -2)), (slice(0, 3), 2, slice(1, 5))]
    return [func(a, key) for key in keys]


def joined(func: Callable, m: Operands) -> Any:
    a, b, plain = m.a(), m.a(kind="rest"), m.plain(3, 5, 6)
    empty = torch.empty(0, dtype=torch.float64)
    found = [func([a, other], dim) for other in (m.a(), b, plain) for dim in (0, 1, -1)]
    return (
        *found,
        func((plain, a)),
        func(tensors=[a, a], dim=1),
        func(dim=2, tensors=[b, a]),
        func([empty, a, plain], 1),
    )


def einsum(func: Callable, m: Operands) -> Any:
    a = m.a()
    by_head = m.a(3, 4, 5, 6, kind="blocks 1")
    return [
        func("bsk,khd->bshd", a, m.plain(6, 4, 2)),
        func("bsk,khd->hdbs", a, m.plain(6, 6, 2)),
        func("bsk,sn,bn->bkn", a, m.plain(5, 4), m.plain(3, 4)),
        func("bsk,bsk->bk", a, m.a()),
        func("bsk,btk->bst", a, m.plain(3, 2, 6)),
        func("bhsk,bhtk->bhst", by_head, m.a(3, 4, 2, 6, kind="blocks 1")),
        func("bhsk,hkn,bm->bsnm", by_head, m.plain(4, 6, 3), m.plain(3, 2)),
        func("bhsk,bsk->bhs", by_head, a),
        func("bhsk -> bs", by_head),
        func("bsk,...k->bs...", a, m.plain(2, 6)),
        func("bsk,bst", a, m.plain(3, 5, 2)),
        func("bsk,bok->bs", a, m.plain(3, 1, 6)),
        func("bss->bs", m.a(3, 6, 6, kind="blocks 1")),
        func("bsk,nk->bsn", m.plain(3, 2, 6), m.a(4, 6, kind="blocks 0")),
    ]


def matmul(func: Callable, m: Operands) -> Any:
    a, plain = m.a(), m.plain(3, 6, 4)
    found = [
        func(a, plain),
        func(m.plain(3, 2, 5), a),
        func(a, a.transpose(1, 2)),
        func(a, m.a(3, 6, 4, kind="blocks 0")),
    ]
    if func.__name__ != "bmm":
        found += [func(a, m.plain(6, 2)), func(a, m.plain(6)), func(m.plain(5), a), func(m.plain(7, 1, 2, 5), a)]
        wide = m.a(5, 3, 6, 3, kind="blocks 1")
        found += [func(a, wide), func(wide, m.a(3, 3, 2, kind="blocks 1"))]
    return found


def repeated(func: Callable, m: Operands) -> Any:
    a = m.a()
    counts = torch.tensor([1, 0, 2])
    found = [func(a, 2, 0), func(a, 2, dim=1), func(a, repeats=3, dim=-1), func(a, 2), func(a, counts, 0)]
    return *found, func(a, counts, dim=0, output_size=3)


def chosen(func: Callable, m: Operands) -> Any:
    a, ids = m.a(), m.ids(3, 4)
    return func(a, 0, ids), func(a, dim=-1, index=ids), func(a, 1, index=ids)


def soft(func: Callable, m: Operands) -> Any:
    a = m.a()
    return (
        func(a, 0),
        func(a, dim=-1),
        func(a, dim=1, dtype=torch.float32),
        *([] if func is _method(func) else [func(input=a, dim=1)]),
    )


def _method(func: Callable) -> Any:
    return getattr(Tensor, func.__name__, None)


def like(func: Callable, m: Operands) -> Any:
    return func(m.a()), func(m.a(), dtype=torch.float32)


def casts(func: Callable, m: Operands) -> Any:
    a, vector, cut = m.a(), m.plain(6), m.a(3, 5, 6, kind="blocks 2")
    if func.__name__ == "type_as":
        return func(a, torch.zeros(4, 7, dtype=torch.float32)), func(vector, cut), func(a, cut)
    return (
        *(func(a, torch.float32), func(a, "cpu"), func(a, torch.zeros(4, 7, dtype=torch.float32)), func(vector, cut)),
        *(func(a, cut), func(a, dtype=torch.float32, copy=True)),
    )


def where(func: Callable, m: Operands) -> Any:
    a, plain = m.a(), m.plain(3, 5, 6)
    if func is Tensor.where:
        return func(a, m.flags(), plain), func(a, m.flags(5, 1), m.plain(6)), func(a, m.cut_flags(), 0.0)
    found = [func(m.flags(), a, plain), func(m.flags(5, 1), m.plain(6), a), func(m.cut_flags(), a, 0.0)]
    return *found, func(m.cut_flags(), m.plain(1), m.plain(6)), func(m.cut_flags())


def mask(func: Callable, m: Operands) -> Any:
    a = m.a() * 1
    found = [func(a, m.flags(), 0.5), func(a, m.flags(5, 1), -math.inf), func(a, m.cut_flags(), m.plain())]
    return *found, a


def three(func: Callable, m: Operands) -> Any:
    found = [func(m.a(), m.a(), m.plain(6)), func(m.a(), m.plain(5, 1), m.a(kind="rest"))]
    if func.__name__ in ("addcmul", "addcdiv"):
        return *found, func(m.plain(6), m.a(), m.a(), value=0.5)
    return *found, func(m.a(), m.plain(6), 0.25)


def bounds(func: Callable, m: Operands) -> Any:
    a = m.a() * 1
    if func.__name__ in ("clamp_min", "clamp_max"):
        return func(a, 0.6), func(a, m.plain(6))
    return func(a, 0.4, 0.8), func(a, min=0.5), func(a, max=m.plain(5, 1)), func(a, m.plain(6), m.plain(3, 1, 6)), a


def shape_of(func: Callable, m: Operands) -> Any:
    a, name = m.a(), func.__name__
    return func(a), *([func(a, 1), func(a, -1), func(a, dim=0)] if name == "size" else [])


def attention(func: Callable, m: Operands) -> Any:
    """[rows, heads, seq, head_dim], heads cut."""
    q, k, v = m.a(2, 12, 4, 2, kind="blocks 1"), m.a(2, 12, 3, 2, kind="blocks 1"), m.plain(2, 12, 3, 2)
    few = m.plain(2, 4, 3, 2)
    cut_mask = m.a(2, 12, 4, 3, kind="blocks 1")
    one = m.a(2, 1, 4, 3, kind="blocks 1")
    return (
        *(func(q, k, v), func(q, k, v, is_causal=True), func(q, k, v, scale=0.3), func(query=q, key=k, value=v)),
        *(func(q, k, v, m.plain(4, 3)), func(q, k, v, m.flags(2, 1, 4, 3) | torch.eye(4, 3, dtype=torch.bool))),
        *(func(q, k, v, attn_mask=cut_mask), func(q, k, v, attn_mask=one), func(m.plain(2, 12, 4, 2), k, v)),
        *(func(q, few, few, enable_gqa=True), func(q, m.a(2, 1, 3, 2, kind="blocks 2"), v)),
        func(q, m.a(2, 4, 3, 2, kind="blocks 1"), few, enable_gqa=True),
    )


def over_space(dims: int) -> Call:
    """Pooling of images, with as many dims of space."""

    def call(func: Callable, m: Operands) -> Any:
        a = m.a()[(..., *[None] * (dims - 1))]
        size = 2 if dims == 1 else (2, 1, 1)[:dims]
        name = func.__name__
        if name.startswith("lp_"):
            return func(a, 2.0, size)
        if not name.startswith("max_unpool"):
            return func(a, size)
        out, indices = getattr(functional, f"max_pool{dims}d")(a, size, return_indices=True)
        return func(out, indices, size, output_size=a.shape[-dims:])

    return call


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


UNARY = words("""
square neg negative abs exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sign sin cos tanh sigmoid erf relu
relu6 gelu silu elu celu selu leaky_relu softplus softsign mish hardtanh hardswish hardsigmoid logsigmoid
nan_to_num round floor ceil isnan isinf isfinite float double half bfloat16 clone contiguous detach cpu type
__neg__ __abs__
""")
BINARY = words("""
add sub subtract mul multiply div divide true_divide floor_divide remainder pow __add__ __radd__ __sub__
__rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __mod__ __floordiv__ maximum minimum rsub
""")
COMPARE = words("""
eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__
""")
CALLS: dict[str, list[Call]] = {
    **{name: [unary, unary_inside] for name in UNARY},
    **{name: [binary, with_cut] for name in BINARY},
    **{name: [without_gradient] for name in ("floor_divide", "__floordiv__")},
    **{name: [comparison] for name in COMPARE},
    **{name: [logical] for name in ("logical_and", "logical_or", "logical_xor", "__and__", "__or__")},
    **{name: [lambda f, m: f(m.cut_flags())] for name in ("logical_not", "__invert__")},
    **{
        name: [binary_in_place]
        for name in ("__iadd__", "__isub__", "__imul__", "__itruediv__", "add_", "sub_", "mul_", "div_")
    },
    **{name: [in_place] for name in ("relu_", "tanh_", "sigmoid_", "silu_", "detach_")},
    **{name: [like] for name in ("zeros_like", "ones_like")},
    **{name: [reduction] for name in ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "argmax", "argmin")},
    **{name: [split] for name in ("split", "chunk", "split_with_sizes", "tensor_split")},
    **{name: [reshape] for name in ("view", "reshape")},
    **{name: [as_other] for name in ("view_as", "reshape_as")},
    **{name: [permutation] for name in ("transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis")},
    **{name: [joined] for name in ("cat", "concat", "concatenate")},
    "einsum": [einsum],
    **{name: [matmul] for name in ("matmul", "bmm", "__matmul__")},
    **{name: [soft] for name in ("softmax", "log_softmax")},
    "layer_norm": [lambda f, m: f(m.a(), (6,), m.plain(6), m.plain(6)), lambda f, m: f(m.a(), (6,), eps=1e-3)],
    "rms_norm": [lambda f, m: f(m.a(), (6,), m.plain(6)), lambda f, m: f(m.a(), (6,), eps=1e-3)],
    **{name: [expand] for name in ("expand", "expand_as", "broadcast_to")},
    **{name: [three] for name in ("lerp", "addcmul", "addcdiv")},
    **{name: [bounds] for name in ("clamp", "clip", "clamp_min", "clamp_max", "clamp_")},
    **{name: [mask] for name in ("masked_fill", "masked_fill_")},
    **{name: [shape_of] for name in ("size", "dim", "numel", "nelement", "ndimension", "__len__")},
    **{name: [casts] for name in ("to", "type_as")},
    "threshold": [lambda f, m: f(m.a(), 0.5, 0.1)],
    "where": [where],
    "full_like": [lambda f, m: f(m.a(), 2.5)],
    "cumsum": [with_dims(((0,), {}), ((-1,), {}), ((), {"dim": 1}))],
    "flip": [
        with_dims((((0,),), {}), (([1, 2],), {}), ((), {"dims": (-1,)})),
        lambda f, m: [f(m.a(), 0, 2)] if f is Tensor.flip else [],
    ],
    "roll": [with_dims(((1, 0), {}), ((2,), {}), (((1, -1), (1, 2)), {}), ((), {"shifts": 1, "dims": -1}))],
    "unbind": [with_dims(((), {}), ((-1,), {}), ((), {"dim": 1}))],
    "flatten": [with_dims(((), {}), ((1,), {}), ((), {"start_dim": 0, "end_dim": 1}), ((-2,), {}))],
    "unflatten": [with_dims(((2, (2, 3)), {}), ((1, (1, 5)), {}), ((), {"dim": -1, "sizes": (3, -1)}))],
    "unsqueeze": [with_dims(((0,), {}), ((-1,), {}), ((2,), {}), ((), {"dim": 1}))],
    "squeeze": [lambda f, m: [f(m.a()[:, None]), f(m.a()[:, None], 1), f(m.a()[..., None], dim=-1), f(m.a(), 0)]],
    "repeat_interleave": [repeated],
    "index_select": [chosen],
    "__getitem__": [index],
    "t": [turned],
    "scaled_dot_product_attention": [attention],
    "interpolate": [lambda f, m: [f(m.a(), scale_factor=2.0), f(m.a()[None], size=(4, 3), mode="bilinear")]],
    "pad": [padded],
}
CALLS |= {f"special_{name}": CALLS[name] for name in words("erf exp2 expm1 log1p round softmax log_softmax logsumexp")}
CALLS |= {"__rdiv__": CALLS["__rtruediv__"], "__idiv__": CALLS["__itruediv__"], "log_sigmoid": CALLS["logsigmoid"]}
CALLS["_threshold"] = CALLS["threshold"]  # torch's own names of some
for _dims in (1, 2, 3):
    for _name in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool", "lp_pool", "max_unpool"):
        CALLS[f"{_name}{_dims}d"] = CALLS[f"{_name}{_dims}d_with_indices"] = [over_space(_dims)]
PROPERTIES = words("""
T mT data is_floating_point is_complex element_size is_inference get_device is_contiguous empty_like fill_ zero_
requires_grad_ cuda new_zeros new_ones new_full new_empty new_tensor
""")
"""What is asked of every tensor alike, and has a test of its own; so have those of META."""
DRAWN = ("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout")
DRAWN += ("uniform_", "normal_", "bernoulli_", "exponential_")
"""What draws numbers: its laws are others."""
HOOKS = ("backward", "retain_grad", "register_hook", "grad", "whole_batch")
"""What is no operation on numbers: tests of their own hold these."""


FALLBACK: list[Callable[[Operands], Any]] = [
    lambda m: torch.einsum("abc,cd->abd", m.a(), m.plain(6, 4)),
    lambda m: functional.linear(m.a(), m.plain(4, 6), m.plain(4)),
    lambda m: m.a().sort(dim=1).values,
    lambda m: m.a().max(dim=-1),
    lambda m: m.a().topk(2, dim=1),
    lambda m: torch.stack([m.a(), m.plain(3, 5, 6)], 1),
    lambda m: torch.linalg.vector_norm(m.a(), dim=-1),
    lambda m: functional.pad(m.a(), (1, 2)),
    lambda m: torch.cumprod(m.a(), 1),
    lambda m: m.a().prod(),
    lambda m: functional.embedding(m.ids(15, 4), m.a().reshape(15, 6)),
    lambda m: torch.addmm(m.plain(4), m.a().reshape(15, 6), m.plain(6, 4)),
    lambda m: m.a().diagonal(0, 0, 1),
    lambda m: m.a().norm(),
    lambda m: m.a().norm(dim=-1),
    lambda m: functional.normalize(m.a(), dim=-1),
    lambda m: functional.cosine_similarity(m.a(), m.a(), dim=-1),
    lambda m: functional.scaled_dot_product_attention(m.a(), m.a(), m.plain(3, 5, 6)),
    lambda m: list(m.a()),
    lambda m: m.a().gather(1, m.ids(5, 3, 2, 6)),
    lambda m: m.a() @ m.plain(6, 6) + m.plain(6),
    lambda m: m.plain(5, 5) @ m.a(),
    lambda m: functional.glu(m.a(), -1),
    lambda m: functional.prelu(m.a(low=-0.5), m.plain(5)),
    lambda m: torch.outer(m.a().reshape(90), m.plain(3)),
    lambda m: functional.conv1d(m.a(), m.plain(2, 5, 3)),
    lambda m: functional.group_norm(m.a(), 5),
    lambda m: torch.tril(m.a()),
    lambda m: m.a().unfold(1, 2, 1),
    lambda m: m.plain(3, 5, 6).masked_scatter(m.flags(), m.a()),
    lambda m: torch.zeros(3, 5, 6, dtype=torch.float64).copy_(m.a()),
    lambda m: torch.zeros(2, 3, 5, 6, dtype=torch.float64).index_copy(0, torch.tensor([1]), m.a()[None]),
    lambda m: m.plain(3, 5, 6).mul(2).add_(m.a()),
    lambda m: torch.add(m.plain(6), m.a(), alpha=0.3),
    lambda m: m.a() * m.a().sum().item(),
    lambda m: m.a() if bool((m.a() > 0).all()) else m.a() * 2,
    lambda m: m.a().movedim((0, 1, 2), (2, 0, 1)).contiguous().view(-1),
    lambda m: (m.a().log() * m.plain(6)).sum(),
    lambda m: (m.a().rsqrt() * m.plain()).sum(),
    lambda m: ((m.a() / m.plain(3, 5, 1)).sqrt() * m.plain(1, 1, 6)).pow(0.3) * m.plain(5, 1),
    lambda m: (1 / m.a()).pow(-1.5) * m.plain(6),
]
"""Ways that no rule knows, or only a part of which one does."""
