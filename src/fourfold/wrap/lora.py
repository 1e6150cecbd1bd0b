"""LoRA pairs as peft puts them around linear layers: found, made to size, computed on parts, merged on shards.

peft holds a layer as `base_layer` of a module of its own, which takes the layer's name, and beside it, per adapter, a
pair A [r, k] and B [n, r]. The product of the pair is added to the layer's output. peft is never imported: its modules
are recognised by what they hold.

r is small, so the tensor between A and B is whole on every rank, and only this tensor travels. A multiplies the
features that a rank holds, and B computes the part of the layer's output that the rank holds:

    beside Expand     a [m/(zx), k/y] A^T -> {sum y} -> u [m/z, r];   u B^T -> [m/z, n/(xy)]
    beside Contract   a [m/z, n/(xy)] A^T -> {sum x, y} -> u [m/z, r];   u B^T -> [m/(zx), k/y]

In backward du is summed over the axes that cut B's output. A is w[r, k/y] or w[r, n/(xy)], B is w[n/(xy), r] or
w[k/y, r], each stored cut over z.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.grid import Grid
from fourfold.layout import FEATURES, GATHERED, Layout, Spec, inner, rest
from fourfold.nn.embedding import Head
from fourfold.nn.layer import PLAIN_SLICES, SPECS, Layer, gather_parameters
from fourfold.operators import Conjugate
from fourfold.params import local_of
from fourfold.wrap.adapters import Adapter, LayerParameter, PlainSlice
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, distribute, to_whole
from fourfold.wrap.linear_adapters import ContractAdapter, ExpandAdapter, inner_placement
from fourfold.wrap.parameters import join_slices, plain_parameter, stored_names
from fourfold.wrap.placements import (
    ChunkPlacement,
    RestPlacement,
    conjugate,
    fuse,
    same,
    to_rest,
)
from fourfold.wrap.plan import LoraParallel, StyleChoice

BASE = "base_layer"
"""peft's name of the layer inside its module."""
FACTORS = ("lora_A", "lora_B")
"""peft's names of the two factors."""
SHAPES = "_fourfold_shapes"
"""The attribute of a module with a `ShapeOnly` for each parameter that is stored in parts or transposed."""


# finding


def is_around(module: nn.Module) -> bool:
    """Return whether a module is one of peft's modules, with a layer inside."""
    return BASE in module._modules and any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def inside(module: nn.Module) -> nn.Module:
    """Return the layer inside peft's modules; any other module is returned as it is."""
    while is_around(module):
        module = module._modules[BASE]  # type: ignore[assignment]
    return module


def plain_names(model: nn.Module) -> dict[str, str]:
    """Return the name that every module would have without peft. A peft module gets the name of its layer."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        parent, _, own = name.rpartition(".")
        hidden = own == BASE and is_around(model.get_submodule(parent))
        found[name] = found[parent] if hidden else f"{found[parent]}.{own}".lstrip(".") if name else ""
    return found


def lora_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the name of each module with LoRA pairs, the module, and the linear layer inside it."""
    for name, module in model.named_modules():
        if is_around(module) and all(isinstance(module._modules.get(factor), nn.ModuleDict) for factor in FACTORS):
            yield name, module, inside(module)


def find_lora(model: nn.Module) -> dict[str, StyleChoice]:
    """Return the style of every LoRA factor."""
    found: dict[str, StyleChoice] = {}
    for name, module, _ in lora_modules(model):
        for factor in FACTORS:
            pairs: nn.ModuleDict = getattr(module, factor)
            for adapter, layer in pairs.items():
                if isinstance(layer, nn.Linear) and (factor != "lora_A" or layer.bias is None):
                    style = LoraParallel(f"{name}.{BASE}", factor)
                    found[f"{name}.{factor}.{adapter}"] = StyleChoice(
                        style, "one of a low-rank pair beside its base layer"
                    )
    return found


def fix_lora_sizes(model: nn.Module, features: Mapping[str, tuple[int, int]]) -> None:
    """Refuse variants that read the layer's own weight, and remake pairs that peft made for a shard.

    peft takes a layer with a DTensor weight for one that computes only its shard, and gives its pair the shard's sizes.
    `features` has the true (inputs, outputs) of layers on the grid, by the name of the module around them.
    """
    for name, module, _ in lora_modules(model):
        variants: Mapping[str, Any] = getattr(module, "lora_variant", {})
        if variants:
            kind = type(next(iter(variants.values()))).__name__
            raise ValueError(
                f"{name}: {kind} of peft computes with the weight of the layer beside it, which is cut over the grid; "
                "use plain LoRA (use_dora=False, and no other variant)"
            )
        if name in features and (module.in_features, module.out_features) != features[name]:
            _remake_pairs(model, module, features[name])


def _remake_pairs(model: nn.Module, module: Any, features: tuple[int, int]) -> None:
    module.in_features, module.out_features = features
    for adapter, layer in list(module.lora_A.items()):
        dtype = layer.weight.dtype
        module.update_layer(
            adapter,
            module.r[adapter],
            lora_alpha=module.lora_alpha[adapter],
            config=model.peft_config[adapter],  # type: ignore[index]
        )
        for factor in FACTORS:
            getattr(module, factor)[adapter].to(dtype)  # update_layer makes fp32


# computing


class LoraFactor(Adapter[Layer]):
    """Runs one factor of a pair. It gathers the parameters over z and multiplies this rank's part of the wide side."""

    treats_tokens_alike = True
    reads_wide: bool
    """Whether the wide side is the input, as for A."""

    def __init__(
        self, name: str, context: ModelContext, why: str, base: ExpandAdapter | ContractAdapter, module: nn.Linear
    ) -> None:
        super().__init__(name, context, why, Layer(context.grid, context.policy))
        self.base, self.contracts = base, isinstance(base, ContractAdapter)
        self.wide = (inner if self.contracts == self.reads_wide else rest)(context.policy.activations)
        """The layout of the activation on the wide side."""
        self.declare_all(module)

    @abstractmethod
    def declare_all(self, module: nn.Linear) -> None:
        """Declare the parameters of the factor."""

    def declare(self, own: str, shape: tuple[int, ...], dim: int, over: Sequence[str]) -> None:
        """Declare a parameter that has the wide side as its dim `dim`, cut over these axes."""
        storage = Layout((*((axis, dim) for axis in over), (GATHERED, 0)))
        self.layer.declare(own, Spec(shape, storage, self.wide))

    def gathered(self) -> dict[str, Tensor]:
        """Gather the parameters over z."""
        return gather_parameters(self.layer, list(self.layer.specs))


class LoraA(LoraFactor):
    """Runs A, from the base layer's input to r features, which are whole on every rank."""

    reads_wide = True

    def declare_all(self, module: nn.Linear) -> None:
        self.declare("weight", tuple(module.weight.shape), 1, self.wide.over(FEATURES))

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Tensor:  # noqa: ARG002
        w = self.gathered()["weight"]
        shape = (*input.shape[:-1], w.shape[0])
        if self.contracts:
            placement = ChunkPlacement(self.context, input.dim() - 1, self.wide.over(FEATURES))
            a = distribute(input, placement)
            owed = functional.linear(a.local.to(w.dtype), w)
            return Conjugate.apply(owed, lambda part: placement.sum(part, placement.over).view(shape), same)
        a, resting = to_rest(input, self.context), RestPlacement(self.context)
        owed = functional.linear(a.local.to(w.dtype), w)
        return Conjugate.apply(
            owed,
            lambda part: _join_tokens(part, resting, prod(shape[:-1])).view(shape),
            lambda gradient: resting.take_flat(gradient.reshape(-1, shape[-1]), tokens=True, features=False),
        )

    def describe(self) -> tuple[str, str]:
        if self.contracts:
            return "w[r, n/(xy)]/z: inner -> whole", "w over z, the result summed over x and y"
        return "w[r, k/y]/z: rest -> whole", "w over z, the result summed over y and gathered over x"


class LoraB(LoraFactor):
    """Runs B, from r features to the placement of the base layer's output."""

    reads_wide = False

    def declare_all(self, module: nn.Linear) -> None:
        outputs, r = (int(size) for size in module.weight.shape)
        self.outputs, self.pieces = outputs, [outputs]
        if len(self.base.layers) > 1:
            self.pieces = [layer.out_features for layer in self.base.layers]
        head = self.base.layer
        # a head pads its output on each rank of y, so the rows of B are cut as the rows of the head's weight are
        over = _rows_of_head(head).over(0) if isinstance(head, Head) else self.wide.over(FEATURES)
        for index, size in enumerate(self.pieces):
            self.declare(self._own("weight", index), (size, r), 0, over)
            if module.bias is not None:
                self.declare(self._own("bias", index), (size,), 0, over)

    def _own(self, name: str, index: int) -> str:
        return name if len(self.pieces) == 1 else f"{name}_{index}"

    def parameters(self) -> Mapping[str, LayerParameter]:
        found: dict[str, LayerParameter] = {}
        first = 0
        for index, size in enumerate(self.pieces):
            rows = None if len(self.pieces) == 1 else range(first, first + size)
            first += size
            for name in ("weight", "bias"):
                if (own := self._own(name, index)) in self.layer.specs:
                    found[own] = self.layer, own, PlainSlice(name, rows)
        return found

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> GridTensor:  # noqa: ARG002
        u, held = to_whole(input), self.gathered()
        leading = u.shape[:-1]
        if self.contracts:
            resting, tokens = RestPlacement(self.context), prod(leading)
            # each rank of y computes some features of the output, so it finds one part of du
            own = conjugate(
                u.reshape(tokens, -1),
                lambda flat: resting.take_flat(flat, tokens=True, features=False),
                lambda gradient: _join_tokens(gradient, resting, tokens),
            )
            out = functional.linear(own, held["weight"], held.get("bias"))
            return GridTensor(out, resting, (*leading, self.outputs))
        placement = inner_placement(self.context, self.base.layer, len(leading))
        u = conjugate(u, same, lambda gradient: placement.sum(gradient, placement.axes))
        outs = []
        for index, size in enumerate(self.pieces):
            weight, bias = held[self._own("weight", index)], held.get(self._own("bias", index))
            outs.append(GridTensor(self._product(u, weight, bias), placement, (*leading, size)))
        return outs[0] if len(outs) == 1 else fuse(outs)

    def _product(self, u: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        head = self.base.layer
        if not isinstance(head, Head):
            return functional.linear(u, weight, bias)
        grid, columns = self.context.grid, head.columns()
        first = _rows_of_head(head).box((head.vocab,), grid.shape.sizes, grid.coords)[0].start
        rows = slice(columns.start - first, columns.stop - first)
        out = functional.linear(u, weight[rows], None if bias is None else bias[rows])
        return functional.pad(out, (0, head.columns_held - len(columns)))

    def describe(self) -> tuple[str, str]:
        if self.contracts:
            return "w[k/y, r]/z: whole -> rest", "w over z; in backward its input's gradient over x and y"
        return "w[n/(xy), r]/z: whole -> inner", "w over z; in backward its input's gradient over x and y"


def _rows_of_head(head: Head) -> Layout:
    """Return how the ids of a head's weight are cut while the head computes with it."""
    return Layout.along(0, head.specs["weight"].storage.compute.over(0))


def _join_tokens(part: Tensor, resting: RestPlacement, tokens: int) -> Tensor:
    """Sum partial results over the axes that cut features, and gather their tokens."""
    return resting.join_tokens(resting.sum(part, resting.layout.over(FEATURES)), tokens)


# the sizes of base layers


class ShapeOnly(Tensor):
    """Stands for a weight that is stored in parts or transposed. It has shape, dtype and device, but no numbers."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor) -> ShapeOnly:
        return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)

    def __deepcopy__(self, memo: dict[int, object]) -> ShapeOnly:
        return self  # it has nothing that a copy could change

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShapeOnly({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(
            f"{func} reads a weight that is stored in parts or transposed; use state_dict() or "
            "fourfold.wrap.whole_tensors(model), which give it as the plain module has it"
        )


def expose_shapes(module: nn.Module) -> None:
    """Make plain names of parameters that are stored in parts or transposed give a `ShapeOnly`: peft reads sizes."""
    slices, shapes = vars(module)[PLAIN_SLICES], {}
    for original, names in stored_names(slices).items():
        part, parameters = slices[names[0]], [module._parameters[own] for own in names]
        if not part.is_all:
            whole = join_slices([torch.empty(own.shape, device="meta") for own in parameters], part)  # type: ignore[union-attr]
            shapes[original] = ShapeOnly(whole.shape, parameters[0])  # type: ignore[arg-type]
    if shapes:
        vars(module)[SHAPES] = shapes
        module.__class__ = _with_shapes(type(module))


@functools.cache
def _with_shapes(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the same name with `ShapeOnly` attributes. A parameter lent in a pass is preferred."""

    def getattribute(self: nn.Module, name: str) -> Any:
        if name not in (shapes := vars(self)[SHAPES]):
            return kind.__getattr__(self, name)
        try:
            found = kind.__getattr__(self, name)
        except AttributeError:
            return shapes[name]
        return found if isinstance(found, GridTensor) else shapes[name]

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattr__": getattribute}
    return type(kind.__name__, (kind,), names)


# merging


def merge_on_shards(model: nn.Module, grid: Grid) -> None:
    """Make `merge` and `unmerge` of peft's modules work on shards, or refuse where they cannot."""
    for name, module in model.named_modules():
        if not is_around(module) or not hasattr(module, "merge"):
            continue
        pairs = [layer for factor in FACTORS for layer in module._modules.get(factor, nn.ModuleDict()).values()]  # type: ignore[union-attr]
        if pairs and all(PLAIN_SLICES in vars(layer) for layer in (inside(module), *pairs)):
            own = name, module, grid
            vars(module).update(merge=partial(_merge, *own), unmerge=partial(_unmerge, *own))
        else:
            vars(module).update(merge=partial(_refuse_merging, name), unmerge=partial(_refuse_merging, name))


def _refuse_merging(name: str, *_: Any, **__: Any) -> None:
    """Refuse to merge a pair into a layer that is not a linear layer on the grid."""
    raise ValueError(
        f"{name}: on the grid only LoRA pairs beside linear layers are merged; save the adapters and merge them into "
        "the plain model"
    )


def _merge(
    name: str, module: Any, grid: Grid, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> None:
    wanted = module.active_adapters if adapter_names is None else adapter_names
    for adapter in wanted:
        if adapter in module.lora_A and adapter not in module.merged_adapters:
            _add_to_base(name, module, adapter, grid, module.scaling[adapter], finite=safe_merge)
            module.merged_adapters.append(adapter)


def _unmerge(name: str, module: Any, grid: Grid) -> None:
    while module.merged_adapters:
        adapter = module.merged_adapters.pop()
        if adapter in module.lora_A:
            _add_to_base(name, module, adapter, grid, -module.scaling[adapter], finite=False)


@torch.no_grad()
def _add_to_base(name: str, module: Any, adapter: str, grid: Grid, scale: float, *, finite: bool) -> None:
    """Add scale * B A to the base layer: each rank to its own shards, from whole A and B, which are small."""
    a, b = (plain_parameter(getattr(module, factor)[adapter], "weight") for factor in FACTORS)
    base, bias = inside(module), None
    if module.lora_B[adapter].bias is not None:
        bias = plain_parameter(module.lora_B[adapter], "bias")
    slices, specs = vars(base)[PLAIN_SLICES], vars(base)[SPECS]
    if bias is not None and "bias" not in stored_names(slices):
        raise ValueError(f"{name}: a pair with a bias cannot be merged into a layer without one; give the layer a bias")
    for own, part in slices.items():
        rows, *columns = (slice(held.start, held.stop) for held in specs[own].box(grid))
        first = 0 if part.rows is None else part.rows.start
        rows = slice(first + rows.start, first + rows.stop)
        if part.original == "weight":
            change = b[rows] @ a[:, columns[0]]
        elif bias is not None:
            change = bias[rows]
        else:
            continue
        shard = local_of(base._parameters[own])  # type: ignore[arg-type]
        total = shard + change.to(shard.dtype) * scale
        # reads the device; peft's `safe_merge` asks for it
        if finite and not torch.isfinite(total).all():
            raise ValueError(f"{name}: adapter {adapter!r} would make weights that are not finite; it seems broken")
        shard.copy_(total)
