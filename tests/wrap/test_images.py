"""Networks of convolutions on any grid compute what the unmodified ones compute on one process.

For each case: output, loss and every gradient of the first step; losses, parameters and running statistics of three
AdamW steps, of which the last computes its loss outside the model; names, shapes and values of `state_dict`, before and
after the plain model's has been loaded; outputs in evaluation. soak_images.py walks every network over many grids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import fourfold as ff
from fourfold.axes import CUTS
from fourfold.grid import Grid, Shape
from fourfold.policy import Policy
from fourfold.wrap import ChannelNormParallel, ContractParallel, ConvParallel, WholeTensors, whole_tensors
from fourfold.wrap.adapters import adapters_of
from harness import Ranks, grid_of
from parity import LocalAdamW, local_block
from plain_images import MobileNet, ResNet, UNet
from share import others_slow, share

ROWS, STEPS, CLASSES = 12, 3, 10
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: ResNet((8, 12), classes=CLASSES),
    "unet": lambda: UNet((4, 6), groups=2),
    "mobilenet": lambda: MobileNet(CLASSES),
}


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    activations: str
    synced: bool = False
    """BatchNorm as `nn.SyncBatchNorm`, which means the same here."""
    kept: bool = False
    """Gathered tensors are kept for backward."""

    def __str__(self) -> str:
        words = [name for name in ("synced", "kept") if getattr(self, name)]
        return " ".join([self.name, str(self.shape), self.activations, *words])

    @property
    def policy(self) -> Policy:
        return Policy(activations=self.activations, keep_gathered=self.kept, keep_weights=self.kept)  # type: ignore[arg-type]


def cases() -> list[Case]:
    """Each network on grids that together cut all axes, in both modes."""
    grids = {
        "resnet": (Shape(x=2, y=2), Shape(z=2, data=2), Shape(x=3)),
        "unet": (Shape(y=2, data=2), Shape(x=2, z=2), Shape(x=2, y=2)),
        "mobilenet": (Shape(x=2, z=2), Shape(y=2, data=2)),
    }
    modes = ("sharded", "replicated")
    found = [
        Case(name, shape, modes[(turn + number) % 2], synced=turn == 1, kept=turn == 2)
        for number, (name, shapes) in enumerate(grids.items())
        for turn, shape in enumerate(shapes)
    ]
    return sorted(found, key=lambda case: case.shape.world)


class Trained(nn.Module):
    """A network with its loss inside, where targets are given."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:
        out = self.network(images)
        return out if targets is None else (out, loss_of(out, targets))


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(out, targets) if targets.dim() > 1 else functional.cross_entropy(out, targets)


@pytest.mark.parametrize("case", others_slow(share(cases(), 7), 2), ids=str)
def test_a_network_on_a_grid_equals_the_plain_one(ranks, case: Case) -> None:
    check(ranks(case.shape.world), case)


def test_every_network_meets_every_axis_and_both_modes() -> None:
    for name in NETWORKS:
        own = [case for case in cases() if case.name == name]
        assert {axis for case in own for axis in CUTS if case.shape.sizes[axis] > 1} == set(CUTS), name
        assert {case.activations for case in own} == {"sharded", "replicated"}, name


def check(pool: Ranks, case: Case, timeout: float = 60) -> float:
    """The largest error; raises where one is above the tolerance, or names or shapes differ."""
    pool.start(on_ranks, case)
    one = on_one_process(case.name)
    ranks = pool.results(timeout)
    worst = max(off_by(case, one, rank) for rank in ranks)
    assert worst[0] <= 1e-9, f"{case}: {worst[1]} is off by {worst[0]:.1e}"
    return worst[0]


def off_by(case: Case, one: dict[str, Any], rank: dict[str, Any]) -> tuple[float, str]:
    """max|a - b| / s, s the largest value of that kind over the whole model; and where it is largest."""
    found = {}
    for kind, by_name in one.items():
        assert rank[kind].keys() == by_name.keys(), f"{case}: {kind}: {rank[kind].keys() ^ by_name.keys()}"
        scale = max(expected.abs().max().item() for expected in by_name.values())
        for name, expected in by_name.items():
            expected = local_block(expected, case.shape, rank["coords"]) if kind == "outputs" else expected
            value = torch.as_tensor(rank[kind][name])
            assert value.shape == expected.shape, f"{case}: {kind} {name} is {value.shape}, not {expected.shape}"
            difference = (value - expected).abs().max().item() / scale
            found[f"{kind} {name}"] = difference if math.isfinite(difference) else math.inf
    worst = max(found, key=found.__getitem__)
    return found[worst], worst


def build(name: str) -> Trained:
    """The plain network in fp64 with its loss; equal in every process."""
    torch.manual_seed(len(name))
    model = Trained(NETWORKS[name]()).double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms of one and biases of zero would hide what is left out
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def batch(name: str, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)
    if name == "unet":
        return images, torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    return images, targets.masked_fill(torch.arange(ROWS) == 1, -100)  # places count differently


@cache
def on_one_process(name: str) -> dict[str, dict[str, Tensor]]:
    model = build(name)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    found = trained(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        lambda step: batch(name, step),
        lambda: {key: parameter.grad.clone() for key, parameter in model.named_parameters()},
        loss_of,
    )
    found["state"] = {key: value.clone() for key, value in model.state_dict().items()}
    found["loaded"] = start
    model.load_state_dict(start)
    found["outputs"]["loaded"] = model.eval()(batch(name, 0)[0]).detach()
    return found


def on_ranks(case: Case) -> dict[str, Any]:
    grid, model = grid_of(case.shape), build(case.name)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    if case.synced:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = ff.parallelize(model, grid, policy=case.policy)

    def rows(step: int) -> tuple[Tensor, Tensor]:
        images, targets = (ff.local_rows(whole, grid).to(grid.device) for whole in batch(case.name, step))
        return images, targets

    def outside(out: Tensor, targets: Tensor) -> Tensor:
        return ff.global_mean(loss_of(out, targets), (targets != -100).sum(), grid)

    found: dict[str, Any] = trained(
        model, LocalAdamW(model.parameters()), rows, lambda: whole_tensors(model, "gradient"), outside
    )
    found["state"] = wholes(model)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(start)
    found["loaded"] = wholes(model)
    found["outputs"]["loaded"] = model.eval()(rows(0)[0]).detach()
    # numpy: a tensor would cross the pipe as shared memory
    found = {kind: {key: value.cpu().numpy() for key, value in values.items()} for kind, values in found.items()}
    return {**found, "coords": grid.coords}


def trained(
    model: nn.Module,
    optimizer: Any,
    rows: Callable[[int], tuple[Tensor, Tensor]],
    gradients: Callable[[], dict[str, Tensor]],
    outside: Callable[[Tensor, Tensor], Tensor],
) -> dict[str, dict[str, Tensor]]:
    found: dict[str, dict[str, Tensor]] = {"outputs": {}, "losses": {}}
    for step in range(STEPS):
        images, targets = rows(step)
        if step == STEPS - 1:
            out = model(images)
            loss = outside(out, targets)
        else:
            out, loss = model(images, targets)
        loss.backward()
        if step == 0:
            found["gradients"] = gradients()
        found["outputs"][f"step {step}"], found["losses"][f"step {step}"] = out.detach(), loss.detach()
        optimizer.step()
        model.zero_grad()
    with torch.no_grad():
        found["outputs"]["evaluated"] = model.eval()(rows(STEPS)[0])
    model.train()
    return found


def wholes(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict().items()
    return {name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in state}


def pass_of(model: nn.Module, grid: Grid, rows: int = 4) -> nn.Module:
    """On the grid, after a pass."""
    ff.parallelize(model.double(), grid)
    model(torch.randn(rows, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(grid.device))
    return model


def made_whole(name: str) -> dict[tuple[str, str], int]:
    torch.manual_seed(0)
    model = pass_of(NETWORKS[name](), grid_of(Shape(x=2, y=2)))
    return dict(adapters_of(model)[0].context.made_whole)


def test_convolutions_read_what_the_ones_before_them_leave(ranks) -> None:
    """All that is read otherwise than it lies: a shortcut's input beside two convolutions, that of the last of three, a
    U-Net's channels side by side, what one of its lists reads of another, 7 features of a linear layer."""
    shortcut = {("for stages.1.0.downsample.0", "input that is cut otherwise"): 1}
    assert ranks(4).run(made_whole, "resnet") == [shortcut] * 4
    bottleneck = {("for blocks.2.conv3", "input that is cut otherwise"): 1, ("after fc", "linear"): 1}
    assert ranks(4).run(made_whole, "mobilenet") == [bottleneck] * 4
    joined = {("after up.0", "cat"): 2, ("after up.1", "cat"): 2, ("for up.1", "input that is cut otherwise"): 1}
    assert ranks(4).run(made_whole, "unet") == [joined] * 4


def sent_for_an_image() -> list[str]:
    """What a sharded convolution of a plain image sends forward, and back for an image without a gradient."""
    grid = grid_of(Shape(x=2, y=2))
    model = ff.parallelize(nn.Sequential(nn.Conv2d(3, 8, 3)), grid)
    with grid.ledger.watch() as records:
        out = adapters_of(model[0])[0](model[0], model[0].forward, torch.ones(2, 3, 5, 5, device=grid.device))
    sent = [f"{record.op} {record.axis}" for record in records]
    with grid.ledger.watch() as records:
        out.local.sum().backward()
    return sent + [f"{record.op} {record.axis}" for record in records]


def test_a_first_convolution_takes_its_part_of_an_image(ranks) -> None:
    assert ranks(4).run(sent_for_an_image) == [["reduce_scatter y", "all_gather y"]] * 4


class Operation(nn.Module):
    def __init__(self, operation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.operation, self.after = nn.Conv2d(3, 3, 1), operation, nn.Conv2d(3, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.after(self.operation(self.before(images)))


def unpooled(a: Tensor) -> Tensor:
    return functional.max_unpool2d(*functional.max_pool2d(a, 2, return_indices=True), 2)


def pooled_in_rows(a: Tensor) -> Tensor:
    return functional.avg_pool1d(functional.max_pool1d(a.flatten(2), 2), 2).unflatten(2, (4, 4))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda a: functional.max_pool2d(a, 3, 2, 1),
    "avg": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "rows": pooled_in_rows,
    "adaptive": lambda a: functional.adaptive_avg_pool2d(a, (3, 2)),
    "adaptive max": nn.AdaptiveMaxPool2d(3),
    "lp": lambda a: functional.lp_pool2d(a.abs() + 1, 2, 2),
    "unpooled": unpooled,
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": lambda a: functional.interpolate(a, (5, 11), mode="bilinear", align_corners=True),
    "zeros around": lambda a: functional.pad(a, (1, 0, 2, 1)),
    "mirrored": nn.ReflectionPad2d(2),
    "cropped": lambda a: functional.pad(a[:, :, ::2, 1:], (0, -1)),
    "volume": lambda a: functional.max_pool3d(a.unflatten(2, (4, 2)), 2).squeeze(3),
    "alone": lambda a: torch.stack([functional.max_pool2d(row, 2) for row in a.unbind()]),
}


def operations(shape: Shape) -> dict[str, tuple[float, dict]]:
    """How far each is off, with its gradients, and what was made whole for it."""
    grid, found = grid_of(shape), {}
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name, operation in OPERATIONS.items():
        torch.manual_seed(0)
        plain = Operation(operation).double()
        expected = plain(images)
        expected.square().sum().backward()
        model = Operation(operation).double()
        model.load_state_dict(plain.state_dict())
        ff.parallelize(model, grid)
        out = model(images.to(grid.device))
        out.square().sum().backward()
        errors = [(out.cpu() - expected).abs().max().item()]
        for key, gradient in whole_tensors(model, "gradient").items():
            errors.append((gradient.cpu() - plain.get_parameter(key).grad).abs().max().item())
        found[name] = max(errors), dict(adapters_of(model)[0].context.made_whole)
    return found


@pytest.mark.parametrize("shape", others_slow([Shape(x=4), Shape(x=2, y=2)], 2), ids=str)
def test_operations_over_space_run_on_parts(ranks, shape: Shape) -> None:
    """Of 3 channels on 4 ranks, so that one has none."""
    for found in ranks(4).run(operations, shape):
        for name, (error, whole) in found.items():
            assert error < 1e-10, name
            assert {what for _, what in whole} <= ({"stack"} if name == "alone" else set()), name


def dropped() -> Any:
    grid = grid_of(Shape(x=2))
    model = ff.parallelize(nn.Sequential(nn.Conv2d(3, 16, 1), nn.Dropout2d(0.5), nn.Identity()), grid)
    images = torch.ones(8, 3, 4, 4, device=grid.device)
    out, kept = model(images), model.eval()(images)
    return (out / kept).detach().cpu().numpy()


def test_dropout_of_channels_takes_them_whole(ranks) -> None:
    first, second = (torch.as_tensor(found) for found in ranks(2).run(dropped))
    assert torch.equal(first, second)
    assert torch.allclose(first, first[:, :, :1, :1].expand_as(first))  # a channel has one fate
    fates = first[:, :, 0, 0].round()
    assert set(fates.flatten().tolist()) == {0.0, 2.0}
    assert not torch.equal(fates[:, :8], fates[:, 8:])  # the halves of the two ranks are drawn apart


def single_images() -> float:
    """Layers that take an image without a batch, or are told the size of their output, or are used twice."""
    grid, errors = grid_of(Shape(x=2)), []
    torch.manual_seed(0)
    image = torch.randn(3, 5, 5, dtype=torch.float64)
    up, norm = nn.ConvTranspose2d(3, 3, 3, stride=2), nn.InstanceNorm2d(3)

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = up, norm

        def forward(self, a: Tensor) -> Tensor:
            return self.up(self.norm(self.up(a, output_size=(12, 11))), output_size=(3, 26, 24))

    model = Single().double()
    expected = model(image)
    expected.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    ff.parallelize(model, grid)
    out = model(image.to(grid.device))
    out.sum().backward()
    errors.append((out.cpu() - expected).abs().max().item())
    for name, gradient in whole_tensors(model, "gradient").items():
        errors.append((gradient.cpu() - gradients[name]).abs().max().item())
    return max(errors)


def test_an_image_without_a_batch(ranks) -> None:
    assert max(ranks(2).run(single_images)) < 1e-10


def told(plan: dict[str, Any]) -> str:
    grid = grid_of(Shape(x=2))
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1, groups=2), nn.BatchNorm2d(8), nn.GroupNorm(4, 8))
    ff.parallelize(model, grid, plan=plan)
    model(torch.ones(2, 3, 4, 4, device=grid.device))
    return ff.explain(model)


def test_explain_and_plan(ranks) -> None:
    text = " ".join(ranks(2).run(told, {})[0].split())
    for words in (
        "Conv2d w[n/x, k/y]/z: channels over y,x -> x,y enter over x, w over z, leave over y a convolution, in turn",
        "Conv2d w[n/x,y]/z: 2 groups of channels over x,y w over z a convolution in groups",
        "BatchNorm2d w[k/x,y]/z: channels over x,y statistics over data,z, w over z a norm of channels",
        "GroupNorm w[k/x,y]/z: channels over x,y w over z a norm of channels",
    ):
        assert words in text, text
    plan = {"0": ConvParallel(contract=True), "1": WholeTensors(), "2": ChannelNormParallel(contract=True)}
    text = ranks(2).run(told, plan)[0]
    assert "w[n/y, k/x]/z: channels over x,y -> y,x" in text
    assert "plan: '2'" in text


def test_wrong_words_and_inputs_are_told() -> None:
    grid = grid_of(Shape())
    with pytest.raises(ValueError, match=r"0 \(Linear\): ConvParallel\(\) is for torch's convolutions"):
        ff.parallelize(nn.Sequential(nn.Linear(4, 4)), grid, plan={"0": ConvParallel()})
    with pytest.raises(ValueError, match=r"0 \(Conv2d\): ChannelNormParallel\(\) is for torch's BatchNorm"):
        ff.parallelize(nn.Sequential(nn.Conv2d(4, 4, 1)), grid, plan={"0": ChannelNormParallel()})
    with pytest.raises(ValueError, match=r"0 \(Conv2d\): ContractParallel\(\) is for linear layers"):
        ff.parallelize(nn.Sequential(nn.Conv2d(4, 4, 1)), grid, plan={"0": ContractParallel()})
    model = ff.parallelize(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(5)), grid)
    with pytest.raises(ValueError, match=r"0: expected \[rows, 3 channels, \*space\], but the input is \(1, 4, 5, 5\)"):
        model(torch.ones(1, 4, 5, 5))
    with pytest.raises(ValueError, match=r"1: expected \[rows, 5 channels"):
        model(torch.ones(1, 3, 5, 5))


class Standardized(nn.Conv2d):
    """Uses its weight in a way of its own."""

    def forward(self, input: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(input, w, self.bias)


def nested() -> tuple[float, float]:
    """A part is put on the grid before the whole; a convolution of its own kind runs its own code."""
    grid = grid_of(Shape(x=2, y=2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), Standardized(4, 6, 1)).double()
    images = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    expected = model(images)
    expected_mean = model[0][1].running_mean.clone()
    model[0][1].reset_running_stats()
    ff.parallelize(model[0], grid)
    ff.parallelize(model, grid)
    out = model(images.to(grid.device))
    held = model[0][1].running_mean.full_tensor()
    return (out.cpu() - expected).abs().max().item(), (held.cpu() - expected_mean).abs().max().item()


def test_parts_and_convolutions_of_their_own_kind(ranks) -> None:
    for errors in ranks(4).run(nested):
        assert max(errors) < 1e-12


def drawn() -> dict[str, float]:
    """A network that is drawn on the grid: statistics start at 0 and 1."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    ff.parallelize(model, grid_of(Shape(y=2)))
    state = wholes(model)
    model[1].momentum = 1.0  # as a user may say at any time
    model(torch.ones(2, 3, 4, 4, device=state["1.weight"].device))
    after = wholes(model)["1.running_var"]
    return {name: state[name].sum().item() for name in state if name.startswith("1.")} | {"after": after.sum().item()}


def test_a_network_on_the_meta_device_is_drawn(ranks) -> None:
    for found in ranks(2).run(drawn):
        assert found["1.running_mean"] == found["1.num_batches_tracked"] == found["1.bias"] == 0
        assert found["1.running_var"] == found["1.weight"] == 4
        assert abs(found["after"]) < 1e-6
