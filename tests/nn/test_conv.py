"""Convolutions and norms of images on the grid beside torch's own layers on one process.

A stack is a sequence of plain modules. Every rank builds it with the same values, plain and on the grid, and compares
what it holds: outputs, the gradient of the input, every parameter's gradient, running statistics.
"""

from __future__ import annotations

import warnings
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.gradients import gradients_of
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective
from fourfold.nn.images.channel_norm import BatchNorm, GroupNorm
from fourfold.nn.images.channels import Channels, join, take
from fourfold.nn.images.conv import Conv, Geometry, GroupedConv
from fourfold.nn.layer import specs_of
from fourfold.operators import Conjugate, OpContext
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from fourfold.shape import shapes_of
from harness import grid_of, join_shards
from share import others_slow

MODES = ("sharded", "replicated")

STACKS: dict[str, Any] = {
    "even": lambda: [
        nn.Conv2d(4, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=None, bias=False),
    ],
    "uneven": lambda: [
        nn.Conv2d(3, 10, (3, 1), dilation=(2, 1), padding=(1, 0)),
        nn.BatchNorm2d(10, affine=False),
        nn.ReLU(inplace=True),
        nn.Conv2d(10, 7, 2),
        nn.GroupNorm(1, 7),
        nn.ReLU(inplace=True),
        nn.Conv2d(7, 1, 1),
        nn.BatchNorm2d(1, track_running_stats=False),
    ],
    "transposed": lambda: [
        nn.ConvTranspose2d(6, 5, 3, stride=2, padding=1, output_padding=1),
        nn.GroupNorm(5, 5, bias=False),
        nn.ConvTranspose2d(5, 6, 2, stride=(1, 2), bias=False),
        nn.GroupNorm(3, 6),
        nn.ConvTranspose2d(6, 6, 2, groups=2),
    ],
    "groups": lambda: [
        nn.Conv2d(8, 8, 3, groups=8, padding=1),  # cut over y and x: parameters lie over y alone
        nn.Conv2d(8, 12, 1),
        nn.Conv2d(12, 24, 2, groups=12, bias=False),
        nn.Conv2d(24, 6, 1, groups=3),  # 3 groups for 2 or 4 ranks
        nn.GroupNorm(2, 6, affine=False),
        nn.Conv2d(6, 6, 1),
        nn.Conv2d(6, 6, 2, groups=3),
    ],
    "sequences": lambda: [
        nn.Conv1d(5, 4, 4, padding="same"),
        nn.BatchNorm1d(4),
        nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"),
    ],
}
SPACE = {"sequences": (6,)}
ROWS = (2, 1, 0, 3)
"""The rows of each place: places may differ, and one may have none."""


def convert(a: Tensor, channels: Channels, axes: tuple[str, ...], site: OpContext) -> Tensor:
    """Return the same tensor with its channels cut over other axes; backward converts its gradient back."""

    def recut(a: Tensor, here: Channels, aim: Channels) -> Tensor:
        return take(join(a, here, 0, site), aim.block(site.grid)).clone()

    aim = Channels(channels.count, axes)
    return Conjugate.apply(a, partial(recut, here=channels, aim=aim), partial(recut, here=aim, aim=channels))


def on_grid(plain: nn.Sequential, grid: Grid, policy: Policy) -> nn.Sequential:
    """The same layers on the grid, with the same values; convolutions alternate in their roles."""
    cuts = 2 if policy.activations == "sharded" else 1
    axes = ("y", "x")[:cuts]
    layers: list[nn.Module] = []
    for module in plain:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d):
            sizes = (grid, policy, module.in_channels, module.out_channels, Geometry.of(module))
            bias = module.bias is not None
            if module.groups > 1:
                layers.append(GroupedConv(*sizes, groups=module.groups, axes=axes, bias=bias))
                continue
            layers.append(Conv(*sizes, role="expand" if axes[0] == "y" else "contract", bias=bias))
            axes = layers[-1].gives.axes
        elif isinstance(module, nn.GroupNorm):
            options = dict(affine=module.affine, bias=module.bias is not None)
            layers.append(GroupNorm(grid, policy, module.num_groups, module.num_channels, axes=axes, **options))
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            options = dict(affine=module.affine, bias=module.bias is not None, dtype=torch.float64)
            options |= dict(momentum=module.momentum, track_running_stats=module.track_running_stats)
            layers.append(BatchNorm(grid, policy, module.num_features, axes=axes, **options))
        else:
            layers.append(module)
    stack = nn.Sequential(*layers)
    ff.nn.assemble(stack, grid, policy, dtype=torch.float64)
    values, specs = dict(plain.named_parameters()), specs_of(stack)
    assert values.keys() == specs.keys()
    for name, parameter in stack.named_parameters():
        held = specs[name].storage.box(specs[name].shape, grid.shape.sizes, grid.coords)
        local_of(parameter).copy_(values[name].detach()[tuple(slice(part.start, part.stop) for part in held)])
    return stack


def plain_stack(name: str) -> nn.Sequential:
    torch.manual_seed(len(name))
    stack = nn.Sequential(*STACKS[name]()).double()
    for parameter in stack.parameters():
        nn.init.normal_(parameter, 0.1, 0.5)
    return stack


def own_rows(grid: Grid) -> tuple[range, int]:
    """The rows of this place, and how many there are."""
    places = grid.size("data") * grid.size("z")
    counts = [ROWS[place % len(ROWS)] for place in range(places)]
    place = grid.coords["data"] * grid.size("z") + grid.coords["z"]
    return range(sum(counts[:place]), sum(counts[: place + 1])), sum(counts)


def off_by(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return 0.0 if found.numel() == 0 else (found - expected).abs().max().item() / max(1, expected.abs().max().item())


def errors(shape: Shape, policy: Policy, name: str) -> dict[str, float]:
    """How far a stack on the grid is off after two passes in training and one in evaluation."""
    grid = grid_of(shape)
    plain = plain_stack(name)
    stack = on_grid(plain, grid, policy)
    first, last = (next(m for m in order if hasattr(m, "gives")) for order in (stack, reversed(stack)))
    rows, count = own_rows(grid)
    mine, channels, out_channels = slice(rows.start, rows.stop), first.reads, last.gives
    found: dict[str, float] = {}

    def passes(label: str) -> None:
        images = torch.randn(count, channels.count, *SPACE.get(name, (5, 4)), dtype=torch.float64).requires_grad_()
        with warnings.catch_warnings(action="ignore"):  # torch says that an even kernel's margins are a copy
            expected = plain(images * 1)
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        own = images[mine].detach().requires_grad_()
        gradients_of(stack).begin_forward(label)
        site = first.site(len(rows))
        out = convert(stack(convert(own, Channels(channels.count, ()), channels.axes, site)), out_channels, (), site)
        out.backward(gradient[mine])
        found[f"{label} out"] = off_by(out, expected[mine])
        found[f"{label} input"] = off_by(own.grad, images.grad[mine])

    passes("first")
    passes("second")
    specs = specs_of(stack)
    for label, parameter in plain.named_parameters():
        local = local_of(stack.get_parameter(label).grad)
        average = parameter.grad / shape.places  # each place's loss is its own share of a sum
        found[label] = off_by(join_shards(local, specs[label], grid), average)
    for label, buffer in plain.named_buffers():
        layer, _, own = label.rpartition(".")
        held = stack.get_buffer(label)
        if own != "num_batches_tracked":
            held = join_shards(local_of(held), stack.get_submodule(layer).buffer_specs[own], grid)
        found[label] = off_by(held, buffer)
    if any(isinstance(layer, BatchNorm) for layer in stack):
        plain.eval()
        stack.eval()
        passes("eval")
    return found


def all_errors(cases: list[tuple[Shape, Policy, str]]) -> list[tuple[str, dict[str, float]]]:
    return [(f"{shape} {policy.activations} {name}", errors(shape, policy, name)) for shape, policy, name in cases]


def cases_of(shapes: list[Shape], *, every: bool, share: int = 1) -> list[tuple[Shape, Policy, str]]:
    """Each stack on each grid in both modes, or in the two by turns; options change from grid to grid. Of these one in
    `share`, another one for each grid."""
    cases = []
    for index, shape in enumerate(shapes):
        kept = dict(keep_gathered=index % 2 == 1, keep_weights=index % 3 == 1)
        overlap = Overlap.off() if index % 4 == 3 else Overlap()
        for stack, name in enumerate(STACKS):
            modes = MODES if every else [MODES[(index // 2 + stack) % 2]]
            if (index + stack) % share == 0:
                cases += [(shape, Policy(activations=mode, overlap=overlap, **kept), name) for mode in modes]
    return cases


GRIDS = {
    2: list(shapes_of(2)),
    3: [Shape(x=3), Shape(y=3)],
    4: list(shapes_of(4)),
}


def check(found: list[tuple[str, dict[str, float]]]) -> None:
    for where, by_name in found:
        worst = max(by_name, key=by_name.__getitem__)
        assert by_name[worst] < 1e-10, f"{where}: {worst} is off by {by_name[worst]}"


def test_stacks_on_one_rank_equal_plain_torch() -> None:
    check(all_errors(cases_of([Shape()], every=True)))


@pytest.mark.parametrize("world", others_slow(GRIDS, 2))
def test_stacks_equal_plain_torch(ranks, world: int) -> None:
    """A part of the stacks on each grid; soak_images.py takes all."""
    cases = cases_of(GRIDS[world], every=world == 2, share={2: 4, 3: 2, 4: 6}[world])
    for shape in GRIDS[world]:
        for found in ranks(world).run(all_errors, [case for case in cases if case[0] == shape]):
            check(found)


def halves(shape: Shape) -> float:
    """How far the gradient of two halves that take turns is off from that of one pass."""
    grid, policy = grid_of(shape), Policy()
    conv = Conv(grid, policy, 3, 5, Geometry.of(nn.Conv2d(3, 5, 3)), role="expand")
    ff.nn.assemble(conv, grid, policy, dtype=torch.float64)
    torch.manual_seed(0)
    a = torch.randn(4, len(conv.reads.block(grid)), 5, 5, dtype=torch.float64)
    found = []
    for parts in (a.chunk(2), [a]):
        conv.zero_grad()
        out = torch.cat(conv.engine.take_turns([conv.turns(part) for part in parts]))
        out.square().sum().backward()
        found.append(torch.cat([local_of(p.grad).flatten() for p in conv.parameters()] + [out.detach().flatten()]))
    return off_by(*found)


def test_halves_take_turns(ranks) -> None:
    assert all(max(ranks(4).run(halves, shape)) < 1e-12 for shape in (Shape(x=2, z=2), Shape(y=2, z=2)))


def whole_input() -> tuple[float, set[str]]:
    """A sharded convolution whose input is whole over x, as images are: how far it is off, what it sends over x."""
    grid, policy = grid_of(Shape(x=2, y=2)), Policy()
    plain = nn.Sequential(nn.Conv2d(3, 5, 3)).double()
    for parameter in plain.parameters():
        nn.init.ones_(parameter)
    (conv,) = on_grid(plain, grid, policy)
    images = torch.arange(2 * 3 * 25.0, dtype=torch.float64).view(2, 3, 5, 5).requires_grad_()
    own = images.detach().requires_grad_()
    plain(images).square().sum().backward()
    with grid.ledger.watch() as records:
        out = conv(convert(own, Channels(3, ()), ("y",), conv.site(2)), whole=True)
        out.backward(2 * out.detach())
    found = [off_by(own.grad, images.grad)]
    for name, spec in conv.specs.items():
        gradient = local_of(conv.get_parameter(name).grad)
        found.append(off_by(join_shards(gradient, spec, grid), plain[0].get_parameter(name).grad))
    return max(found), {record.op for record in records if record.axis == "x"}


def test_an_input_that_is_whole_already_is_not_gathered(ranks) -> None:
    for error, sent in ranks(4).run(whole_input):
        assert error < 1e-12
        assert sent == {"all_reduce"}


def large_mean() -> float:
    """Of fp32 images around 1e4: the norm on z=2, data=2, beside fp64."""
    grid = grid_of(Shape(z=2, data=2))
    norm = BatchNorm(grid, Policy(), 2, axes=("x", "y"))
    ff.nn.assemble(norm, grid, Policy())
    images = 1e4 + torch.arange(4 * 2 * 6.0).view(4, 2, 6) ** 2 / 100
    place = grid.coords["data"] * 2 + grid.coords["z"]
    out = norm(images[place : place + 1])
    expected = nn.BatchNorm1d(2).double()(images.double())[place : place + 1]
    return off_by(out.detach().double(), expected.detach())


def test_batch_statistics_do_not_cancel(ranks) -> None:
    # fp32 holds 1e4 to 1e-3 of a deviation of about 7; E[x^2] - E[x]^2 would be off by 1e8 * 1e-7 = 10
    assert max(ranks(4).run(large_mean)) < 1e-3


@pytest.mark.slow
def test_stacks_on_eight_ranks_equal_plain_torch(ranks) -> None:
    for found in ranks(8).run(all_errors, cases_of([Shape(2, 2, 2)], every=False)):
        check(found)


def padded(length: int, ranks: int) -> int:
    return -(-length // ranks) * ranks


def one_conv(
    policy: Policy, role: str, channels: tuple[int, int], *, frozen: bool = False
) -> tuple[dict[str, int], list[Collective], list[Collective], list[str]]:
    """Records of forward and of backward for a convolution of 3 rows from 5x4 to 3x2 places, and the host's events."""
    grid = grid_of(Shape(2, 2, 2))
    plain = nn.Conv2d(*channels, 3)
    conv = Conv(grid, policy, *channels, Geometry.of(plain), role=role)
    ff.nn.assemble(conv, grid, policy)
    conv.requires_grad_(not frozen)
    a = torch.ones(3, len(conv.reads.block(grid)), 5, 4, requires_grad=True)
    with grid.ledger.watch() as forward:
        out = conv(a)
    with grid.ledger.watch() as backward, grid.ledger.events() as events:
        out.sum().backward()
    said = [f"{event.kind} {event.what}" for event in events]
    blocks = {
        "C": len(conv.reads.outer(1).block(grid)),
        "O": len(conv.gives.outer(1).block(grid)),
        "b": conv.member("bias").rows,
    }
    return blocks, forward, backward, said


def closed_form(
    blocks: dict[str, int], policy: Policy, role: str
) -> tuple[list[tuple[str, str, int]], list[tuple[str, str, int]]]:
    """Conv's docstring, in bytes of fp32 on a grid of 2, 2, 2."""
    summed, out = ("y", "x") if role == "expand" else ("x", "y")
    r, p, q = 3, 5 * 4, 3 * 2
    c, o, kernel = blocks["C"], blocks["O"], 9
    weight = padded(o, 2) * c * kernel
    vector = padded(blocks["b"], 2)
    if policy.activations == "sharded":
        enter, leave = r * padded(c, 2) * p, r * padded(o, 2) * q
        forward = [("all_gather", out, enter), ("all_gather", "z", weight + vector), ("reduce_scatter", summed, leave)]
        backward = [("all_gather", summed, leave)]
        backward += [] if policy.keep_gathered else [("all_gather", out, enter)]
        backward += [("all_gather", "z", weight), ("reduce_scatter", out, enter)]
    else:
        forward = [("all_gather", "z", weight + vector), ("all_reduce", summed, r * o * q)]
        backward = [("all_gather", "z", weight), ("all_reduce", out, r * c * p)]
    backward.append(("reduce_scatter", "z", weight + vector))
    return tuple([(op, axis, 4 * n) for op, axis, n in records if n] for records in (forward, backward))  # type: ignore


@pytest.mark.parametrize("role", ["expand", "contract"])
@pytest.mark.parametrize("channels", [(4, 8), (3, 5)], ids=str)
def test_a_convolution_communicates_what_its_docstring_says(ranks, role: str, channels: tuple[int, int]) -> None:
    for policy in (Policy(), Policy(keep_gathered=True), Policy(activations="replicated")):
        for blocks, forward, backward, _ in ranks(8).run(one_conv, policy, role, channels):
            expected = closed_form(blocks, policy, role)
            assert tuple([(r.op, r.axis, r.nbytes) for r in records] for records in (forward, backward)) == expected


def test_dw_is_found_behind_the_sum_of_da(ranks) -> None:
    for *_, events in ranks(8).run(one_conv, Policy(), "expand", (4, 8)):
        launch, product, wait = (
            events.index(event)
            for event in ("launch reduce_scatter[x] conv", "product E3 conv", "wait reduce_scatter[x] conv")
        )
        assert launch < product < wait


def frozen_conv() -> set[str]:
    _, _, backward, events = one_conv(Policy(), "expand", (4, 8), frozen=True)
    return {f"{record.op} {record.axis}" for record in backward} | {event for event in events if "E3" in event}


def test_a_frozen_convolution_sends_no_gradient(ranks) -> None:
    assert ranks(8).run(frozen_conv) == [{"all_gather y", "all_gather z", "reduce_scatter x"}] * 8


def test_one_value_is_no_batch() -> None:
    norm = BatchNorm(grid_of(Shape()), Policy(), 2, axes=("x", "y"))
    ff.nn.assemble(norm, grid_of(Shape()), Policy())
    with pytest.raises(ValueError, match="more than one value per channel"):
        norm(torch.ones(1, 2))


def test_recomputing_does_not_count_a_batch_twice() -> None:
    norm = BatchNorm(grid_of(Shape()), Policy(), 2, axes=("x", "y"))
    ff.nn.assemble(norm, grid_of(Shape()), Policy())
    norm(torch.ones(3, 2, 4))
    norm.engine.recomputing = True
    norm(torch.ones(3, 2, 4))
    assert norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(local_of(norm.running_mean), torch.full((2,), 0.1))


def test_a_transposed_convolution_can_be_told_its_output() -> None:
    plain = nn.Sequential(nn.ConvTranspose2d(2, 3, 3, stride=2)).double()
    (conv,) = on_grid(plain, grid_of(Shape()), Policy())
    a = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(conv(a, output_padding=(0, 1)), plain[0](a, output_size=(9, 10)))


def test_a_dry_run_needs_no_memory() -> None:
    grid = grid_of(Shape())
    plain = plain_stack("even")
    stack = on_grid(plain, grid, Policy())
    ff.nn.assemble(stack, grid, Policy(), device=torch.device("meta"))
    images = torch.empty(2, 4, 5, 4, device="meta")
    assert stack(images).shape == plain(torch.ones(2, 4, 5, 4, dtype=torch.float64)).shape
    stack(images).sum().backward()
    assert stack.eval()(images).is_meta


def test_wrong_input_is_told() -> None:
    grid, geometry = grid_of(Shape()), Geometry.of(nn.Conv2d(4, 4, 3))
    conv = Conv(grid, Policy(), 4, 4, geometry, role="expand")
    ff.nn.assemble(conv, grid, Policy())
    with pytest.raises(ValueError, match=r"4 channels cut over y=1, x=1 are 4 on this rank .* input is \(1, 3, 5, 5\)"):
        conv(torch.ones(1, 3, 5, 5))
    with pytest.raises(ValueError, match="2 dims of space"):
        conv(torch.ones(1, 4, 5))
    with pytest.raises(ValueError, match="role='both' is none of"):
        Conv(grid, Policy(), 4, 4, geometry, role="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="groups=3 must divide in_channels=4"):
        GroupedConv(grid, Policy(), 4, 6, geometry, groups=3, axes=("x", "y"))
    with pytest.raises(ValueError, match="features=4 is not divisible by groups=3"):
        GroupNorm(grid, Policy(), 3, 4, axes=("x", "y"))
    norm = BatchNorm(grid, Policy(), 4, axes=("x", "y"))
    ff.nn.assemble(norm, grid, Policy())
    with pytest.raises(ValueError, match=r"use Overlap\(halves=1\)"):
        norm.engine.take_turns([iter_norm(norm), iter_norm(norm)])


def iter_norm(norm: BatchNorm) -> Any:
    yield
    return norm(torch.ones(2, 4, 3))


def test_blocks_cover_all_channels_once() -> None:
    for count in (1, 3, 8, 10):
        for sizes in ({"x": 2, "y": 3}, {"x": 4, "y": 2}):
            for axes in ((), ("x",), ("x", "y"), ("y", "x")):
                boxes = Channels(count, axes).layout.boxes((count,), Shape(**sizes).sizes)
                blocks = [block for _, (block,) in boxes]
                assert [channel for block in blocks for channel in block] == list(range(count))
                assert len(blocks) == prod(sizes[axis] for axis in axes)
