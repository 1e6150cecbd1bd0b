"""The base class of all layers on the grid, `assemble`, which gives a model its shards, recompute and dropout.

A layer declares its parameters on the meta device (`Layer.declare`). `assemble` then names all layers of a model, makes
this rank's shards with their initial values, and registers the gradients. A parameter is a DTensor, and on every grid
its global shape is the unpadded model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold import kernels
from fourfold.engine import Engine
from fourfold.gradients import NO_UNITS, ForwardPass, Gradients, Units
from fourfold.grid import Grid
from fourfold.layout import Layout, Spec, rest
from fourfold.nn.rng import Recomputing, StepRng, fill_
from fourfold.operators import OpContext, once_differentiable
from fourfold.param_group import ZEROS_BEHIND, GroupMember, ParamGroup
from fourfold.params import apply_where_it_changes, shard_parameter
from fourfold.policy import Policy
from fourfold.product import MEMORY, Factor

T = TypeVar("T")


class Layer(nn.Module):
    """A module with parameters that are cut over the grid."""

    gradients: Gradients
    clock: StepRng
    side_by_side: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of weights below this layer that one product reads together. Each group is stored in one piece of memory,
    so that the product needs no copy."""

    def __init__(self, grid: Grid, policy: Policy) -> None:
        super().__init__()
        self.grid = grid
        self.policy = policy
        self.label = type(self).__name__.lower()
        self.specs: dict[str, Spec] = {}
        self._members: dict[str, GroupMember] = {}
        self._groups: dict[tuple[str, ...], ParamGroup] = {}
        self._factors: dict[tuple[Layer, ...], Factor] = {}
        self._sites: dict[str, OpContext] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is worked out on first use: a copy of the layer has parameters of its own."""
        return {**self.__dict__, "_members": {}, "_groups": {}, "_factors": {}, "_sites": {}}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layer:
        apply_where_it_changes(nn.Module._apply, self, fn, recurse)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:  # type: ignore[override]
        """Load shards as torch does, and of a whole tensor this rank's part."""
        for name, spec in self.specs.items():
            given: Any = state_dict.get(prefix + name)
            if type(given) in (Tensor, nn.Parameter) and tuple(given.shape) == spec.shape:
                part = spec.storage.take(given.detach(), self.grid).contiguous().to(getattr(self, name).device)
                state_dict[prefix + name] = shard_parameter(part, spec, self.grid).detach()
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def declare(self, name: str, spec: Spec | None) -> None:
        """Register a parameter without memory; with no spec, register that the layer has no such parameter."""
        if spec is None:
            self.register_parameter(name, None)
            return
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, device="meta")))

    def member(self, name: str) -> GroupMember:
        """Return the parameter of this name as a member of parameter groups."""
        parameter, known = getattr(self, name), self._members.get(name)
        # Loading or wrapping a model may have replaced the parameter.
        if known is None or known.parameter is not parameter:
            known = self._members[name] = GroupMember.of(self, name, self.specs[name], self.grid)
        return known

    def group(self, *names: str) -> ParamGroup:
        """Return these parameters of the layer as a group that is gathered in one message."""
        known = self._groups.get(names)
        if known is None or known.gradients is not self.gradients or not known.is_current():
            known = self._groups[names] = self.group_of(*(self.member(name) for name in names))
        return known

    def group_of(self, *members: GroupMember, label: str = "") -> ParamGroup:
        """Return a new group of these members."""
        return ParamGroup(self.grid, self.policy, self.gradients, label or self.label, members)

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    @property
    def hooked(self) -> bool:
        """Whether a hook reads what goes in or comes out; the layer is then called as a module and cannot pause."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def refuse_hooks(self, *layers: Layer | None) -> None:
        """Raise an error if a layer that runs as a part of this one, without being called, has a hook."""
        for layer in layers:
            if layer is not None and layer.hooked:
                raise ValueError(
                    f"{layer.label} has a hook but is run as a part of {self.label}, which does not call it; "
                    f"put the hook on {self.label}"
                )

    def site(self, tokens: int, label: str = "") -> OpContext:
        """Return the context of operators on this many tokens; the last one is kept, since most passes are alike."""
        label, engine = label or self.label, self.gradients.engine
        known = self._sites.get(label)
        if known is None or known.tokens != tokens or known.engine is not engine:
            known = self._sites[label] = OpContext(self.grid, self.policy, tokens, label, engine)
        return known

    def padding_of(self, dtype: torch.dtype) -> dict[tuple[Layer, str], int]:  # noqa: ARG002
        """Return the rows of zeros that a product of this layer reads behind stored parameters of this dtype.

        A parameter is given by its layer and its name there. Its padding is reserved with its memory, so that the
        product needs no copy.
        """
        return {}


def assemble(
    model: nn.Module,
    grid: Grid,
    policy: Policy,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    units: Units = NO_UNITS,
) -> None:
    """Name the layers of a model, make this rank's shards, and register the gradients.

    On the meta device no values are drawn, and the model can run dry.
    """
    device = grid.device if device is None else device
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Layer)]
    for prefix, layer in layers:
        layer.label = prefix or layer.label  # the model itself has no prefix
    specs = specs_of(model)
    memories = reserve_all(dict(layers), specs, grid, dtype, device)
    parameters: dict[str, tuple[nn.Parameter, Spec]] = {}
    for name, spec in specs.items():
        memory = memories[name]
        owner, _, own_name = name.rpartition(".")
        if not memory.shard.is_meta:  # a dry run needs no values
            fill_(memory.shard, spec.box(grid), spec.shape, spec.init, seed, name)
        parameter = memory.parameter(spec, grid)
        setattr(model.get_submodule(owner), own_name, parameter)
        parameters[name] = (parameter, spec)
    gradients = Gradients(grid, parameters, policy, units)
    clock = StepRng(seed, gradients.engine)
    for _, layer in layers:
        layer.gradients = gradients
        layer.clock = clock


SPECS = "_fourfold_specs"
"""Attribute of a module that is no `Layer` but has parameters on the grid: their specs by name."""

PLAIN_SLICES = "_fourfold_plain_slices"
"""Attribute of a wrapped module: for each of its parameters, by name, which part of the plain module's it is."""


def specs_of(model: nn.Module) -> dict[str, Spec]:
    """Return the spec of every parameter, by its name in the model."""
    return {
        f"{prefix}.{name}" if prefix else name: spec
        for prefix, module in model.named_modules()
        for name, spec in (module.specs if isinstance(module, Layer) else vars(module).get(SPECS, {})).items()
    }


class ShardMemory(NamedTuple):
    """The memory of one shard, for weights that a product reads without a copy of them."""

    shard: Tensor
    joint: Tensor | None = None
    """The memory of all shards that lie side by side, with the padding behind them, if this shard is the first."""
    padding: int = 0
    """The rows of zeros behind this shard."""

    def parameter(self, spec: Spec, grid: Grid) -> nn.Parameter:
        """Return the shard as a parameter that knows the memory around it."""
        made = shard_parameter(self.shard, spec, grid)
        if self.joint is not None:
            setattr(made, MEMORY, self.joint)
        if self.padding:
            setattr(made, ZEROS_BEHIND, self.padding)
        return made


def reserve_all(
    layers: Mapping[str, Layer], specs: Mapping[str, Spec], grid: Grid, dtype: torch.dtype, device: torch.device
) -> dict[str, ShardMemory]:
    """Return memory for this rank's shards of all parameters of these layers, by name."""
    prefixes = {layer: f"{name}." if name else "" for name, layer in layers.items()}
    paddings = [layer.padding_of(dtype).items() for layer in layers.values()]
    # a head may be tied to a table outside of this model
    zeros = {prefixes[of] + name: rows for padding in paddings for (of, name), rows in padding if of in prefixes}
    together = [[prefix + name for name in group] for layer, prefix in prefixes.items() for group in layer.side_by_side]
    found: dict[str, ShardMemory] = {}
    for group in [*together, *([name] for name in specs)]:
        names = [name for name in group if name in specs and name not in found]
        if names:
            found |= reserve(names, specs, grid, dtype, device, padding=zeros.get(names[-1], 0))
    return found


def reserve(
    names: Sequence[str],
    specs: Mapping[str, Spec],
    grid: Grid,
    dtype: torch.dtype,
    device: torch.device,
    *,
    padding: int = 0,
) -> dict[str, ShardMemory]:
    """Return memory for this rank's shards of these parameters, one after the other, with rows of zeros behind them."""
    shapes = [[len(part) for part in specs[name].box(grid)] for name in names]
    used = sum(map(prod, shapes))
    joint = torch.empty(used + padding * prod(shapes[-1][1:]), dtype=dtype, device=device)
    joint[used:].zero_()
    parts = joint[:used].split([prod(shape) for shape in shapes])
    shards = {name: ShardMemory(part.view(shape)) for name, part, shape in zip(names, parts, shapes, strict=True)}
    if padding or len(names) > 1:
        shards[names[0]] = shards[names[0]]._replace(joint=joint)
        shards[names[-1]] = shards[names[-1]]._replace(padding=padding)
    return shards


def recompute(function: Callable[..., T], clock: StepRng, *args: Any) -> T:
    """Return `function(*args)`, and let backward compute it again instead of keeping what it computed.

    Collectives are repeated as well, except a last one with a result that backward does not read
    (`Engine.recomputing`). The results are bitwise the same as without recompute.
    """
    point = clock.now
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # draws depend on the clock, not on the state of torch's generators
        context_fn=lambda: (nullcontext(), Recomputing(clock, point)),
    )


def add_gradients(group: ParamGroup, gradients: Sequence[Tensor | None], turns: int, during: ForwardPass) -> None:
    """Add the gradients of those members that are trained, from one of `turns` halves of the pass `during`."""
    members, found = [], []
    for member, gradient in zip(group.members, gradients, strict=False):
        if gradient is None:
            # Autograd found that nothing depends on the parameter: the forward pass must not wait for its gradient.
            during.take([id(member.parameter)], 1)
        elif member.parameter.requires_grad:
            members.append(member)
            found.append(gradient)
    if found:
        group.only(members).add(found, turns=turns, during=during)


def gather_parameters(layer: Layer, names: Sequence[str]) -> dict[str, Tensor]:
    """Gather parameters of a layer over z in one message; their gradients go back to the shards."""
    wholes = GatherParameters.apply(layer.group(*names), *(getattr(layer, name) for name in names))
    return dict(zip(names, wholes, strict=True))


class GatherParameters(torch.autograd.Function):
    """Gathers parameters over z, for code that uses them in any way; gradients go back to the shards."""

    @staticmethod
    def forward(ctx: Any, group: ParamGroup, *_: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.group, ctx.during = group, group.use()
        ctx.set_materialize_grads(False)
        with group.using(turns=1, keep=True) as wholes:
            # Autograd wants output tensors of its own. It would refuse a change in place of a view, in words only;
            # a detached tensor can be changed, and `wrap` sees that its version has changed.
            # A cast that the group keeps is written again in the next pass, whatever this code has done with it.
            kept = group.casts and group.policy.keep_casts and not group.travels
            return tuple(held.clone() if kept else held.detach() for held in wholes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        # Copies, because autograd may hand the same tensor to others and the group changes what it gets. Contiguous,
        # as the parameter is: a fused optimizer reads both in memory order, and einsum's gradients are strided.
        own = torch.contiguous_format
        dense = [None if g is None else g.to_dense() if g.is_sparse else g.clone(memory_format=own) for g in gradients]
        add_gradients(ctx.group, dense, 1, ctx.during)
        return (None, *[None] * len(gradients))


class Dropout(Layer):
    """Dropout of tokens in a layout, by default at rest: masks are independent where it is cut, else equal."""

    def __init__(self, grid: Grid, policy: Policy, probability: float, layout: Layout | None = None) -> None:
        super().__init__(grid, policy)
        self.layout = rest(policy.activations) if layout is None else layout
        if not 0 <= probability < 1:
            raise ValueError(f"dropout={probability} must be at least 0 and below 1")
        self.probability = probability

    @property
    def active(self) -> bool:
        return self.training and self.probability > 0

    @property
    def acts(self) -> bool:
        """Whether the layer must be called: it drops something, or it has a hook."""
        return (self.training and self.probability > 0) or self.hooked

    def forward(self, a: Tensor) -> Tensor:
        if not self.active:
            return a
        key = self.clock.key_on(a.device, self.label, self.grid, self.layout)
        # on the CPU eager: there a compiler may take an integer product that wraps around for an error
        drop = kernels.region(kernels.drop, a, compiled=self.policy.compile and a.is_cuda)
        return drop(a, self.probability, self.clock.position(a.device), key)
