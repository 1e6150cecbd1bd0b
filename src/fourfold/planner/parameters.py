"""The sizes of the parameters of a rank, without a model: names, layouts and owed axes come from the real layers.

`parameter_specs` declares a model of one layer on meta tensors and reads its specs. All layers of a kind have the same
sizes, so parameters are asked for by the names that they have in the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch

from fourfold.axes import CUTS, FOLDED, REPLICAS
from fourfold.grid import Grid, Shape
from fourfold.layout import GATHERED, Spec
from fourfold.models.config import ModelConfig
from fourfold.models.transformer import Transformer
from fourfold.nn.layer import specs_of
from fourfold.policy import Activations, Policy
from fourfold.schedule.stages import Stages

LAYER = "layers.0."
"""The beginning of the names of the first layer's parameters."""


class PaperGrid(Grid):
    """A grid without a process group, of one rank or with a fold: layers can be declared on it, but nothing can run."""

    def __init__(self, *, folded: bool = False) -> None:
        self.shape, self.rank = Shape(z=2, expert=2) if folded else Shape(), 0
        self.coords = self.shape.coords(0)
        self.device = torch.device("meta")


@lru_cache(maxsize=256)
def parameter_specs(config: ModelConfig, activations: Activations, *, folded: bool = False) -> dict[str, Spec]:
    """Return the spec of every parameter of a layer, of embedding, last norm and head, by name.

    All layers have the names of the first one. If the model has both MLPs and mixtures, it has the parameters of both.
    On a grid that is `folded` experts are cut in another way.
    """
    found: dict[str, Spec] = {}
    for mixture in kinds_of_layers(config):
        config_of_kind, grid = config.one_layer(mixture=mixture), PaperGrid(folded=folded and mixture)
        model = Transformer(config_of_kind, grid, Policy(activations=activations))
        found |= specs_of(model)
    return found


def kinds_of_layers(config: ModelConfig) -> list[bool]:
    """Return whether layers are mixtures of experts, once for each kind of layer that the model has."""
    return [False, True] if config.dense_layers else [config.experts > 0]


@lru_cache(maxsize=4096)
def names_of_layer(config: ModelConfig, mixture: bool) -> tuple[str, ...]:
    """Return the names that the parameters of a layer of this kind have in the first layer, in the model's order."""
    specs = parameter_specs(config.one_layer(mixture=mixture), "sharded")
    return tuple(name for name in specs if name.startswith(LAYER))


@lru_cache(maxsize=256)
def names_of_experts(config: ModelConfig) -> tuple[str, ...]:
    """Return the names of the parameters that a folded grid cuts in a way of its own, in the first layer."""
    specs = parameter_specs(config, "sharded", folded=True)
    return tuple(name for name, spec in specs.items() if spec.gathered != GATHERED)


@lru_cache(maxsize=256)
def owed_axes(config: ModelConfig, activations: Activations, *, folded: bool = False) -> dict[str, tuple[str, ...]]:
    """Return the axes that the gradient of each of these parameters owes a sum over."""
    return {name: spec.owes for name, spec in parameter_specs(config, activations, folded=folded).items()}


@lru_cache(maxsize=4096)
def in_first_layer(name: str) -> str:
    """Return the name of the same parameter in the first layer."""
    return LAYER + name.split(".", 2)[2] if name.startswith("layers.") else name


def part(length: int, parts: int, index: int) -> int:
    """Return the length of the `index`-th part as `layout.chunk` cuts."""
    size = -(-length // parts)
    return min(size, max(0, length - index * size))


class HeldUnits(NamedTuple):
    """The units of a model that the ranks of one pipe coordinate hold."""

    layers: Sequence[int]
    embedding: bool
    head: bool
    """Whether they hold the last norm and the head."""
    copies_table: bool = False
    """Whether they hold a copy of a tied embedding's table, for the head."""

    def has(self, name: str) -> bool:
        """Return whether a parameter outside of layers is among them."""
        if name.startswith(("norm.", "head.")):
            return self.head
        return self.embedding or (self.copies_table and name.startswith("embedding."))


@lru_cache(maxsize=4096)
def held_units(stages: Stages, pipe_rank: int, tied: bool) -> HeldUnits:
    own = stages.of_rank(pipe_rank)
    layers = tuple(index for stage in own for index in stages.layers_of(stage))
    embedding, head = (any(map(has, own)) for has in (stages.has_embedding, stages.has_head))
    return HeldUnits(tuple(sorted(layers)), embedding, head, tied and head and not embedding)


class ParameterSizes(NamedTuple):
    """The sizes of one parameter on a rank, in elements except for the rows."""

    rows: int
    """Rows of the shard."""
    row: int
    """Elements of a row of the shard."""
    gathered: int
    """Elements of the parameter as products use it."""
    message: int
    """Elements in a message over z."""

    @property
    def shard(self) -> int:
        return self.rows * self.row


class ParameterTable:
    """Sizes of the parameters of the first layer and of those outside of layers, on one rank of a grid."""

    def __init__(self, specs: Mapping[str, Spec], sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.sizes: dict[str, ParameterSizes] = {}
        self._groups: dict[tuple[str, ...], tuple[int, int, int]] = {}
        for name, spec in specs.items():
            lengths, gathered = list(spec.shape), list(spec.shape)
            for axis, dim in spec.storage.cuts:
                lengths[dim] = part(lengths[dim], sizes[axis], coords[axis])
                if axis != spec.gathered:
                    gathered[dim] = part(gathered[dim], sizes[axis], coords[axis])
            # a message has the dim that is cut in front, padded to equal parts
            dim, ranks = dict(spec.storage.cuts).get(spec.gathered, 0), sizes[spec.gathered]
            padded = [*gathered]
            padded[dim] = part(gathered[dim], ranks, 0) * ranks
            self.sizes[name] = ParameterSizes(lengths[0], prod(lengths[1:]), prod(gathered), prod(padded))
        self._others = tuple(name for name in specs if not name.startswith(LAYER))

    def outside_layers(self, held: HeldUnits) -> int:
        """Return the elements of the shards outside of layers that a rank with these units holds."""
        return self.group(tuple(name for name in self._others if held.has(name)))[2]

    def group(self, names: tuple[str, ...]) -> tuple[int, int, int]:
        """Return elements of these parameters: as products use them, in a message over z, in this rank's shards."""
        found = self._groups.get(names)
        if found is None:
            every = [self.sizes[in_first_layer(name)] for name in names]
            gathered, sent = sum(one.gathered for one in every), sum(one.message for one in every)
            found = self._groups[names] = gathered, sent, sum(one.shard for one in every)
        return found


def parameter_table(config: ModelConfig, shape: Shape, coords: Mapping[str, int]) -> ParameterTable:
    """Return the sizes of parameters at these coordinates, which grids share that differ in replicas and stages."""
    axes = [axis for axis in (*CUTS, *(FOLDED if shape.folded else ())) if axis not in REPLICAS]
    return _table_of_cuts(config, tuple((axis, shape.cuts[axis], coords[axis]) for axis in axes))


@lru_cache(maxsize=4096)
def _table_of_cuts(config: ModelConfig, cuts: tuple[tuple[str, int, int], ...]) -> ParameterTable:
    folded = any(axis in FOLDED for axis, _, _ in cuts)
    # the mode decides which sums gradients owe, not the shards
    specs = parameter_specs(config, "sharded", folded=folded)
    return ParameterTable(specs, {axis: size for axis, size, _ in cuts}, {axis: place for axis, _, place in cuts})
