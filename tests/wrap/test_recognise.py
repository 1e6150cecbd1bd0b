"""Linear layers and attention are recognised under any name, and cut instead of gathered; what only looks like a
linear layer keeps its own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_parallelize import differences, train
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode

import fourfold as ff
from fourfold.grid import Shape
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from fourfold.wrap.adapters import GatheredAdapter, adapters_of
from fourfold.wrap.detect import LinearDetector, LinearForm
from harness import grid_of
from linears import LINEARS, ByHand, OwnForward, Products, Turned, by_einsum, by_matmul
from share import others_slow, share

GRIDS = [
    *(Shape(x=2), Shape(y=2), Shape(z=2), Shape(data=2)),
    *(Shape(x=2, y=2), Shape(x=2, z=2), Shape(y=2, data=2)),
]
CASES = [
    (name, shape, mode)
    for world in (2, 4)
    for name in LINEARS
    for mode in ("sharded", "replicated")
    for shape in GRIDS
    if shape.world == world
]


def compared(name: str, shape: Shape, mode: str) -> list[str]:
    grid, strange, rows = grid_of(shape), LINEARS[name], 2 * shape.data * shape.z
    one = train(strange, strange.build(), None, rows)
    model = ff.parallelize(strange.build(), grid, policy=Policy(activations=mode))  # type: ignore[arg-type]
    return differences(one, train(strange, model, grid, rows), grid)


@pytest.mark.parametrize(("name", "shape", "mode"), share(CASES, 43), ids=str)
def test_recognised_modules_train_as_on_one_process(ranks, name: str, shape: Shape, mode: str) -> None:
    assert ranks(shape.world).run(compared, name, shape, mode) == [[]] * shape.world


def gathered_share(model: nn.Module) -> float:
    """The part of a model's parameters, by elements, that modules which run their own code hold."""
    counts = {True: 0, False: 0}
    for module in model.modules():
        for adapter in adapters_of(module)[-1:]:
            elements = sum(p.numel() for p in module._parameters.values() if p is not None)
            counts[isinstance(adapter, GatheredAdapter)] += elements
    return counts[True] / sum(counts.values())


def falcon(**options: Any) -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    sizes = dict(vocab_size=53, hidden_size=48, num_hidden_layers=1, num_attention_heads=8)
    return FalconForCausalLM(FalconConfig(**sizes, **options))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=1, n_head=4, vocab_size=530, n_positions=8))


SHARES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "half of it": (lambda: nn.Sequential(nn.Linear(4, 8, bias=False), nn.Bilinear(2, 4, 4, bias=False)), 0.5),
    "transformer": (lambda: nn.Transformer(24, 4, 1, 1, 32), 0.0),
    "falcon": (lambda: falcon(new_decoder_architecture=True, num_kv_heads=4), 0.0),
    "falcon with one key head": (lambda: falcon(multi_query=True), 0.0),
    "falcon without rotation": (lambda: falcon(multi_query=False, alibi=True, bias=True), 0.0),
    "gpt2": (gpt2, 0.03),  # its table of positions
}


def shares() -> dict[str, float]:
    grid = grid_of(Shape(x=2))
    return {name: gathered_share(ff.parallelize(make(), grid)) for name, (make, _) in SHARES.items()}


@pytest.mark.slow
def test_little_is_gathered(ranks) -> None:
    found = ranks(2).run(shares)[0]
    assert found.pop("half of it") == 0.5
    for name, part in found.items():
        assert part <= SHARES[name][1], f"{name}: {part:.0%} of the parameters are gathered"


class Odd(ByHand):
    """Nearly a linear layer: `how` says what else it does."""

    def __init__(self, how: str) -> None:
        super().__init__(by_matmul, (6, 6), bias=True)
        self.how, self.calls, self.seen = how, 0, []
        if how == "has a buffer":
            self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor, more: Tensor | None = None) -> Any:
        return ODD[self.how](self, x, more)

    def plain(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.b

    def count(self) -> None:
        self.calls += 1


ODD: dict[str, Callable[[Odd, Tensor, Tensor | None], Any]] = {
    "doubles many rows": lambda own, x, _: own.plain(x * 2 if x.numel() > 60 else x),
    "freezes": lambda own, x, _: x @ own.kernel.detach() + own.b,
    "clamps": lambda own, x, _: own.plain(x.clamp(-100, 100)),
    "drops": lambda own, x, _: own.plain(functional.dropout(x, 0.1, own.training)),
    "counts": lambda own, x, _: (own.count(), own.plain(x))[1],
    "keeps": lambda own, x, _: (own.seen.append(x), own.plain(x))[1],
    "is narrow": lambda own, x, _: (x.float() @ own.kernel.float() + own.b.float()).to(x),
    "gives two": lambda own, x, _: (own.plain(x), None),
    "needs more": lambda own, x, more: own.plain(x) + more,
    "scales the gradient": lambda own, x, _: own.plain(x * 0.5 + (x * 0.5).detach()),
    "has a buffer": lambda own, x, _: own.plain(x),
}


def test_a_trial_tells_linear_layers_from_what_is_nearly_one() -> None:
    every = frozenset({1, 2, 3, 4})
    cases = (
        (OwnForward(6, 6), LinearForm(6, 6, bias="bias", dims=every)),
        (OwnForward(6, 8, bias=False), LinearForm(6, 8, dims=every)),
        (Turned(6, 6), LinearForm(6, 6, bias="bias", transposed=True, dims=every)),
        (Turned(6, 8), LinearForm(6, 8, bias="bias", transposed=True, dims=every)),
        (ByHand(functional.linear, (8, 6), bias=True), LinearForm(6, 8, "kernel", "b", dims=every)),
        (ByHand(by_matmul, (6, 6)), LinearForm(6, 6, "kernel", transposed=True, dims=every)),
        (ByHand(by_einsum, (6, 6)), LinearForm(6, 6, "kernel", dims=frozenset({3}))),
        *((Odd(how), None) for how in ODD),
        (nn.Bilinear(6, 6, 6), None),
        (nn.Embedding(6, 6), None),
        (nn.PReLU(6), None),
    )
    drawn = torch.get_rng_state()
    for module, expected in cases:
        assert LinearDetector().form_of(module) == expected, getattr(module, "how", type(module).__name__)
    assert torch.equal(torch.get_rng_state(), drawn) and not any(getattr(m, "calls", 0) for m, _ in cases)
    hooked = Turned(6, 6)
    hooked.register_forward_hook(lambda *_: None)
    assert LinearDetector().form_of(hooked) is None
    with torch.device("meta"), torch.no_grad():
        assert LinearDetector().form_of(Turned(6, 8)) == LinearForm(6, 8, bias="bias", transposed=True, dims=every)


class Evaluated(nn.Module):
    """Layers of torch's that in evaluation would hand their weights to one kernel."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True, dropout=0.3)
        self.encoder, self.attend = nn.TransformerEncoder(layer, 2), nn.MultiheadAttention(12, 2, 0.5, batch_first=True)

    def forward(self, x: Tensor, late: Tensor) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=late)
        return self.attend(x, x, x, key_padding_mask=late)[0].masked_fill(late[..., None], 0)


def uses(shape: Shape) -> dict[str, Any]:
    """Evaluation, dropout, and the names of `state_dict`."""
    grid, found = grid_of(shape), {}
    torch.manual_seed(0)
    plain = Evaluated().double()
    rows = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    late = torch.arange(5) >= torch.tensor([3, 5, 4, 2])[:, None]
    values = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.no_grad():
        expected = ff.local_rows(plain.eval()(rows, late), grid)
    model = ff.parallelize(plain, grid)
    inputs = ff.local_rows(rows, grid), ff.local_rows(late, grid)
    for name, mode in (("no grad", torch.no_grad), ("inference", torch.inference_mode)):
        with mode():
            found[name] = (model.eval()(*inputs) - expected).abs().max().item()
    found["with gradients"] = (model(*inputs) - expected).abs().max().item()
    found["dropped"] = [model.train()(*inputs).sum().item() for _ in range(2)]
    found["names"] = {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: tuple(value.shape) for name, value in values.items()
    }
    model.load_state_dict({name: value * 2 for name, value in values.items()})
    found["loaded"] = all(torch.equal(value, values[name] * 2) for name, value in whole_tensors(model).items())
    return found


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("shape", [Shape(x=2), Shape(z=2)], ids=str)
def test_attention_of_torch_in_evaluation_with_dropout_and_saved(ranks, shape: Shape) -> None:
    first, second = ranks(2).run(uses, shape)
    for found in (first, second):
        assert max(found[name] for name in ("no grad", "inference", "with gradients")) <= 1e-12
        assert found["dropped"][0] != found["dropped"][1]
        assert found["names"] and found["loaded"]
    assert (first["dropped"] == second["dropped"]) == (shape.x == 2), "alike on a place alone"


def multiplied(shape: Shape) -> dict[str, float]:
    """The multiplications of a rank, forward and backward, over those of one process."""
    grid, found = grid_of(shape), {}
    normed = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(12, 12)) for _ in range(2)))
    for name, model in dict(computed=normed, einsum=Products(), attention=nn.Transformer(12, 4, 1, 1)).items():
        inputs = [torch.randn(4, 5, 12, dtype=torch.float64)] * (2 if name == "attention" else 1)
        counts = []
        for form in (model.double(), ff.parallelize(copy.deepcopy(model), grid)):
            with FlopCounterMode(display=False) as counter:
                form(*inputs).sum().backward()
            counts.append(counter.get_total_flops())
        found[name] = counts[1] / counts[0]
    return found


@pytest.mark.parametrize("shape", others_slow([Shape(x=2), Shape(y=2)], 2), ids=str)
def test_every_rank_multiplies_its_part_alone(ranks, shape: Shape) -> None:
    for found in ranks(2).run(multiplied, shape):
        assert all(part == 0.5 for part in found.values()), found
