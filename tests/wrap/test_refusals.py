"""What torch offers and a parallelised model cannot do is refused in one line, and the way out that it names works."""

from __future__ import annotations

import io
import os
import pickle
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, prune

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from harness import grid_of, what_is_said
from strange import NanoGPT, tokens


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT()


def rows(grid: Grid) -> list[Tensor]:
    return [ff.local_rows(part, grid) for part in tokens(4, torch.Generator().manual_seed(0))]


def under_autocast(grid: Grid, **options: Any) -> None:
    model = ff.parallelize(gpt(), grid, policy=Policy(**options))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*rows(grid))[1]
    loss.backward()


def with_accelerate(grid: Grid, **options: Any) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    before = dict(os.environ)
    os.environ |= dict(RANK=str(grid.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    try:
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model = accelerator.prepare(ff.parallelize(gpt(), grid, policy=Policy(**options)))
        accelerator.backward(model(*rows(grid))[1])
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)


def compile_around(grid: Grid) -> None:
    torch.compile(ff.parallelize(gpt(), grid))(*rows(grid))


def compile_itself(grid: Grid) -> None:
    model = ff.parallelize(gpt(), grid)
    model.compile()
    model(*rows(grid))


def compile_before(grid: Grid) -> None:
    ff.parallelize(torch.compile(gpt()), grid)


def compile_block(grid: Grid) -> None:
    model = gpt()
    model.transformer["h"][1].compile()
    ff.parallelize(model, grid)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class Forces(nn.Module):
    """Differentiates its own result, as models of energies do: by what it was given, or by what a layer made of it."""

    def __init__(self, *, embeds: bool) -> None:
        super().__init__()
        self.embed, self.embeds = nn.Linear(6, 6), embeds
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embeds else x.requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=True)[0]


def take_forces(grid: Grid, *, embeds: bool) -> None:
    ff.parallelize(Forces(embeds=embeds).double(), grid)(numbers(grid))


def net(grid: Grid) -> nn.Module:
    torch.manual_seed(0)
    return ff.parallelize(Net().double(), grid)


def numbers(grid: Grid) -> Tensor:
    whole = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return ff.local_rows(whole, grid).clone()


def step(grid: Grid, kind: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    model = net(grid)
    optimizer = kind([parameter for parameter in model.parameters() if parameter.dim() == 2])

    def closure() -> Tensor:
        loss = model(numbers(grid)).square().mean()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure) if kind is torch.optim.LBFGS else optimizer.step()
    return optimizer


def step_with_transformers(grid: Grid) -> None:
    from transformers import Adafactor

    step(grid, Adafactor)


def resize(grid: Grid, tokens: int = 60) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = ff.parallelize(GPT2LMHeadModel(GPT2Config(vocab_size=53, n_embd=8, n_layer=1, n_head=2)), grid)
    model.resize_token_embeddings(tokens)


def differentiate_twice(grid: Grid) -> None:
    rows = numbers(grid).requires_grad_()
    torch.autograd.grad(net(grid)(rows).sum(), rows, create_graph=True)


def differentiate_functionally(grid: Grid) -> None:
    model, rows = net(grid), numbers(grid)
    torch.func.grad(lambda given: functional_call(model, given, rows).sum())(dict(model.named_parameters()))


def call_functionally(grid: Grid) -> None:
    model = net(grid)
    given = {name: torch.zeros(parameter.shape) for name, parameter in model.named_parameters()}
    functional_call(model, given, numbers(grid))


COMPILED = r"is compiled by torch.compile.*policy=ff.Policy\(compile=True\)"
TRANSFORMED = "is called inside torch.vmap, torch.func.grad.*use loss.backward"
PICKLED = (
    r"torch.save, pickle and safetensors would write.*ff.save\(folder.*"
    r"whole_tensors\(model, 'state'\).*torch.distributed.checkpoint"
)
REFUSED: dict[str, tuple[str, Callable[[Grid], object]]] = {
    "autocast": (r"torch.autocast to torch.bfloat16 is on.*Policy\(compute_dtype=torch.bfloat16\)\)", under_autocast),
    "accelerate": (r"mixed_precision='bf16' .*is on.*Policy\(compute_dtype=torch.bfloat16\)\)", with_accelerate),
    "compiled around": (f"the model {COMPILED}", compile_around),
    "compiled itself": (f"the model {COMPILED}", compile_itself),
    "compiled before": (f"the model {COMPILED}", compile_before),
    "compiled block": (f"transformer.h.1 {COMPILED}", compile_block),
    **{
        kind.__name__: (f"{kind.__name__} cannot step.*torch.optim.AdamW, SGD", partial(step, kind=kind))
        for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.Rprop)
    },
    "Adafactor of transformers": ("Adafactor cannot step.*torch.optim.AdamW", step_with_transformers),
    "resizing": (r"resize_token_embeddings\(60\): the embedding of 53 tokens.*before ff.parallelize", resize),
    "vmap": (f"the model {TRANSFORMED}", lambda grid: torch.vmap(net(grid))(numbers(grid)[None])),
    "torch.func.grad": (f"the model {TRANSFORMED}", differentiate_functionally),
    "functional_call": ("up.weight was replaced.*functional_call.*cannot be used", call_functionally),
    "gradients of gradients": ("create_graph=True: .*keep the module that needs it out", differentiate_twice),
    "gradients by inputs in forward": ("create_graph=True", partial(take_forces, embeds=False)),
    "gradients in forward": (
        "torch.autograd.grad on a tensor made after .*beside the model",
        partial(take_forces, embeds=True),
    ),
    "torch.save": (PICKLED, lambda grid: torch.save(net(grid).state_dict(), io.BytesIO())),
    "torch.save of an optimizer": (
        PICKLED,
        lambda grid: torch.save(step(grid, torch.optim.AdamW).state_dict(), io.BytesIO()),
    ),
}
"""What is said, and what is done."""
ALLOWED: dict[str, Callable[[Grid], object]] = {
    "autocast as the policy": lambda grid: under_autocast(grid, compute_dtype=torch.bfloat16),
    "accelerate as the policy": lambda grid: with_accelerate(grid, compute_dtype=torch.bfloat16),
    "the size that it has": lambda grid: resize(grid, tokens=53),
}


def refuse(shape: Shape) -> dict[str, str]:
    """What was said on each occasion, and what failed of that which should not."""
    grid = grid_of(shape)
    said = what_is_said({name: act for name, (_, act) in REFUSED.items()}, grid)
    for act in ALLOWED.values():
        act(grid)
    return said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16
def test_what_cannot_work_is_refused_in_one_line_with_a_way_out(ranks) -> None:
    for said in ranks(2).run(refuse, Shape(x=2)):
        for name, text in said.items():
            assert re.search(REFUSED[name][0], text) and "\n" not in text, f"{name}: {text}"


def data_parallel(grid: Grid) -> nn.Module:
    return nn.parallel.DistributedDataParallel(net(grid))


def sharded_again(grid: Grid, *, inside: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = net(grid)
    fully_shard(model.up if inside else model)


def save_for_others(grid: Grid, kind: str) -> None:
    from safetensors.torch import save_file, save_model

    model, path = net(grid), os.devnull
    (save_file(model.state_dict(), path) if kind == "save_file" else save_model(model, path))


class Graph(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(6).to_sparse())


PRUNED = "cannot be replaced by one that is computed; do it before ff.parallelize.*whole_tensors"
DISTRIBUTED = "is distributed already.*call the model itself"
NOT_ON_GRID: dict[str, tuple[str, Callable[[Grid], object]]] = {
    "DistributedDataParallel": (DISTRIBUTED, data_parallel),
    "DataParallel": (DISTRIBUTED, lambda grid: nn.DataParallel(net(grid))),
    "fully_shard": (DISTRIBUTED, partial(sharded_again, inside=False)),
    "fully_shard of a layer": (DISTRIBUTED, partial(sharded_again, inside=True)),
    "pruning": (PRUNED, lambda grid: prune.l1_unstructured(net(grid).up, "weight", amount=0.3)),
    "global pruning": (
        PRUNED,
        lambda grid: prune.global_unstructured([(net(grid).up, "weight")], prune.L1Unstructured, amount=0.2),
    ),
    "weight norm": (PRUNED, lambda grid: parametrizations.weight_norm(net(grid).up)),
    "spectral norm": (PRUNED, lambda grid: parametrizations.spectral_norm(net(grid).up)),
    "torch.save of a model": (PICKLED, lambda grid: torch.save(net(grid), io.BytesIO())),
    "pickle of a model": (PICKLED, lambda grid: pickle.dumps(net(grid))),
    "torch.save of gradients": (PICKLED, lambda grid: torch.save([*net(grid).parameters()], io.BytesIO())),
    **{kind: (PICKLED, partial(save_for_others, kind=kind)) for kind in ("save_model", "save_file")},
    "a sparse buffer": (
        r"^edges is a sparse tensor \(torch.sparse_coo\).*to_dense\(\), or keep a buffer as a plain",
        lambda grid: ff.parallelize(Graph(), grid),
    ),
}


def refuse_others(shape: Shape) -> dict[str, str]:
    grid = grid_of(shape)
    for plain in (Net(), nn.Linear(3, 3)):  # on no grid all of it stays possible
        prune.l1_unstructured(plain.up if isinstance(plain, Net) else plain, "weight", amount=0.3)
        parametrizations.weight_norm(plain.down if isinstance(plain, Net) else nn.Linear(2, 2))
        pickle.dumps(nn.Linear(2, 2))
    return what_is_said({name: act for name, (_, act) in NOT_ON_GRID.items()}, grid)


def test_what_wraps_replaces_or_pickles_parameters_is_refused_in_one_line(ranks) -> None:
    for said in ranks(2).run(refuse_others, Shape(x=2)):
        for name, text in said.items():
            assert re.search(NOT_ON_GRID[name][0], text) and "\n" not in text, f"{name}: {text}"


def prune_trained(shape: Shape) -> float:
    """The way out that pruning names, followed literally: prune the plain model, and go on with it on the grid."""
    grid = grid_of(shape)
    torch.manual_seed(0)
    one, trained = Net().double(), net(grid)
    plain = Net().double()
    plain.load_state_dict(whole_tensors(trained, "state"))
    for each in (one, plain):
        prune.l1_unstructured(each.up, "weight", amount=0.3)
    model = ff.parallelize(plain, grid)
    rows = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one(rows).square().mean().backward()
    model(numbers(grid)).square().mean().backward()
    wanted = one.up.weight_orig.grad
    return (whole_tensors(model, "gradient")["up.weight_orig"] - wanted).abs().max().item()


def test_a_trained_model_is_pruned_as_the_error_says(ranks) -> None:
    assert max(ranks(2).run(prune_trained, Shape(x=2))) <= 1e-10


def save_and_load(shape: Shape, folder: str) -> dict[str, bool]:
    """The two ways out of saving shards, followed literally: are values and statistics back?"""
    grid = grid_of(shape)
    model = net(grid)
    optimizer = torch.optim.AdamW(model.parameters())
    model(numbers(grid)).square().mean().backward()
    optimizer.step()
    state = whole_tensors(model, "state")
    if grid.rank == 0:
        torch.save(state, f"{folder}/whole.pt")
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(both, checkpoint_id=f"{folder}/shards")  # and all ranks wait for the first
    found = {}
    for name in ("whole", "shards"):
        other = net(grid)
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.zero_()
        if name == "whole":
            other.load_state_dict(torch.load(f"{folder}/whole.pt"))
        else:
            again = {"model": other.state_dict(), "optimizer": optimizer.state_dict()}
            dcp.load(again, checkpoint_id=f"{folder}/shards")
            other.load_state_dict(again["model"])
        loaded = whole_tensors(other, "state")
        found[name] = state.keys() == loaded.keys() and all(torch.equal(loaded[key], state[key]) for key in state)
    return found


def test_a_model_is_saved_whole_or_by_torchs_distributed_checkpoint(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(save_and_load, Shape(x=2, z=2), str(tmp_path)) == [{"whole": True, "shards": True}] * 4


def feed(shape: Shape, cut: bool) -> list[str]:
    """The warnings of two training passes, after one without gradients, with the batch cut over places or not."""
    grid = grid_of(shape)
    model, batch = ff.parallelize(gpt(), grid), tokens(4, torch.Generator().manual_seed(0))
    given = rows(grid) if cut else batch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(*given)
        for _ in range(2):
            model(*given)[1].backward()
    return [str(warning.message) for warning in caught]


def test_a_batch_that_was_not_cut_is_warned_of_once(ranks) -> None:
    first, *others = ranks(2).run(feed, Shape(z=2), False)
    assert len(first) == 1 and "the same rows" in first[0] and "ff.local_rows(batch, grid)" in first[0], first
    assert others == [[]]
    assert ranks(2).run(feed, Shape(z=2), True) == [[]] * 2
    assert ranks(2).run(feed, Shape(x=2), True) == [[]] * 2  # one place
