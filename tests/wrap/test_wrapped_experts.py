"""Experts of transformers' mixtures on a grid: found by trying them, cut like an MLP, equal to the plain model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import fourfold as ff
from families import VOCAB, Widened, build
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.wrap import ExpertsParallel, whole_tensors
from fourfold.wrap.adapters import adapters_of
from fourfold.wrap.detect import ExpertsDetector, ExpertsForm
from fourfold.wrap.experts import ExpertsAdapter
from harness import grid_of
from share import others_slow

# --- equal to the plain model


def batch(rows: int = 8, seq: int = 12) -> tuple[Tensor, Tensor]:
    """Ids and targets, some of which do not count."""
    generator = torch.Generator().manual_seed(3)
    ids, targets = (torch.randint(VOCAB, (rows, seq), generator=generator) for _ in range(2))
    return ids, targets.masked_fill(torch.rand(rows, seq, generator=generator) < 0.3, -100)


@cache
def alone(name: str, rows: int, seq: int) -> tuple[float, dict[str, Tensor]]:
    """The loss and all gradients of the plain model on one process."""
    model = build(name)
    ids, targets = batch(rows, seq)
    with Widened():
        loss = model(input_ids=ids, labels=targets).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def on_ranks(name: str, shape: Shape, policy: dict[str, Any], rows: int, seq: int) -> dict[str, Any]:
    grid = grid_of(shape)
    model = build(name)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    ff.parallelize(model, grid, policy=Policy(**policy))
    ids, targets = (ff.local_rows(whole, grid) for whole in batch(rows, seq))
    with Widened(), grid.ledger.watch() as records:
        loss = model(input_ids=ids, labels=targets).loss
        loss.backward()
    experts = model.model.layers[1].mlp.experts
    state = whole_tensors(model, "state")
    return {
        "loss": loss.item(),
        "gradients": whole_tensors(model, "gradient"),
        "adapter": type(adapters_of(experts)[-1]).__name__,
        "held": sum(local_of(parameter).numel() for parameter in experts.parameters()),
        "changed": [name for name in plain if not torch.equal(state[name], plain[name])],
        "over x": [(r.op, r.nbytes) for r in records if r.axis == "x" and r.label.startswith("model.layers.1.mlp.exp")],
    }


Step = tuple[str, Shape, dict[str, Any], int, int]
STEPS: list[Step] = [
    ("mixtral", Shape(x=2, z=2), {}, 8, 12),
    ("qwen3-moe", Shape(x=2, y=2), dict(keep_gathered=True), 8, 12),
    ("qwen3-moe", Shape(y=2, data=2), {}, 8, 12),
    ("mixtral", Shape(x=2, y=2), dict(activations="replicated"), 8, 12),
    ("qwen3-moe", Shape(x=2, data=2), {}, 2, 11),  # a place has 11 tokens
    ("mixtral", Shape(z=2, data=2), dict(keep_weights=True), 8, 12),
    ("qwen3-moe", Shape(x=2, z=2), {}, 8, 12),
    ("mixtral", Shape(x=2, z=2, expert=2), {}, 8, 12),
    ("qwen3-moe", Shape(x=2, data=2, expert=2, ex=2), {}, 2, 11),
    ("mixtral", Shape(y=2, z=2, ez=2), {}, 8, 12),  # tokens stay
    ("qwen3-moe", Shape(x=2, z=2, expert=2, ez=2), dict(activations="replicated"), 8, 12),
]
ALONG_ONE_AXIS = [
    pytest.param((name, Shape(**{axis: 2}), {}, 8, 12), marks=pytest.mark.slow)
    for axis, name in (("x", "mixtral"), ("y", "mixtral"), ("z", "qwen3-moe"), ("data", "qwen3-moe"))
]


@pytest.mark.parametrize("step", [*others_slow(STEPS, 3), *ALONG_ONE_AXIS], ids=lambda step: f"{step[0]} {step[1]}")
def test_experts_on_a_grid_equal_the_plain_model(ranks, step: Step) -> None:
    name, shape, _, rows, seq = step
    pool = ranks(shape.world)
    pool.start(on_ranks, *step)
    loss, gradients = alone(name, rows, seq)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    whole = sum(gradient.numel() for name, gradient in gradients.items() if name.startswith("model.layers.1.mlp.exp"))
    parts = shape.expert * shape.ex * shape.ez if shape.folded else shape.x * shape.z
    for found in pool.results(150):
        assert found["adapter"] == "ExpertsAdapter"
        assert found["held"] == whole // (shape.y * parts)
        assert abs(found["loss"] - loss) < 1e-10 * abs(loss)
        assert found["gradients"].keys() == gradients.keys()
        worst = {name: float((found["gradients"][name] - gradients[name]).abs().max()) for name in gradients}
        assert max(worst.values()) < 1e-10 * scale, max(worst, key=worst.__getitem__)
        assert found["changed"] == []


def narrow(shape: Shape) -> tuple[float, bool]:
    """Return the loss of a model in bf16, whose router has scores in bf16 too, and whether gradients are finite."""
    grid, model = grid_of(shape), build("qwen3-moe").bfloat16()
    ff.parallelize(model, grid)
    ids, targets = (ff.local_rows(whole, grid) for whole in batch())
    loss = model(input_ids=ids, labels=targets).loss
    loss.backward()
    gradients = [local_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return loss.item(), all(bool(each.isfinite().all()) for each in gradients)


def test_tokens_with_scores_of_16_bits_are_sent(ranks) -> None:
    with torch.no_grad():
        ids, targets = batch()
        plain = build("qwen3-moe").bfloat16()(input_ids=ids, labels=targets).loss.item()
    for loss, finite in ranks(4).run(narrow, Shape(x=2, z=2, expert=2)):
        assert finite
        assert loss == pytest.approx(plain, rel=0.02)


def steps(shape: Shape | None) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Take three clipped steps of torch's optimizer, on a grid or not; return losses, norms and all parameters."""
    model = build("qwen3-moe")
    ids, targets = batch()
    if shape is not None:
        grid = grid_of(shape)
        ff.parallelize(model, grid)
        ids, targets = (ff.local_rows(whole, grid) for whole in (ids, targets))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for _ in range(3):
        with Widened():
            loss = model(input_ids=ids, labels=targets).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = dict(model.named_parameters()) if shape is None else whole_tensors(model, "state")
    return losses, norms, {name: value.detach() for name, value in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [Shape(z=2, expert=2), Shape(x=2, z=2, expert=2, ez=2), Shape(y=2, data=2, ex=2)], ids=str
)
def test_clipped_steps_on_a_fold_are_those_of_the_plain_model(ranks, shape: Shape) -> None:
    pool = ranks(shape.world)
    pool.start(steps, shape)
    losses, norms, parameters = steps(None)
    for found in pool.results(150):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert found[1] == pytest.approx(norms, rel=1e-10)
        assert max(float((found[2][name] - value).abs().max()) for name, value in parameters.items()) < 1e-10


def test_weights_of_experts_do_not_travel_over_x(ranks) -> None:
    """Only the tokens do: 96 of the 2 places along z with 48 features, and the gradient of how much 2 experts count."""
    stream, counts = 8 * 48 * 12 * 8 // 2, 8 * 2 * 12 * 8 // 2
    for found in ranks(4).run(on_ranks, "mixtral", Shape(x=2, z=2), {}, 8, 12, timeout=150):
        forward = [("all_gather", stream), ("reduce_scatter", stream)]
        backward = [("all_gather", stream), ("all_gather", stream), ("all_reduce", counts), ("reduce_scatter", stream)]
        assert sorted(found["over x"]) == sorted(forward + backward)


# --- found by trying


class Experts(nn.Module):
    """Experts as transformers writes them, with a change."""

    def __init__(self, change: str = "", experts: int = 4, features: int = 6, hidden: int = 5) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * hidden, features))
        self.down_proj = nn.Parameter(torch.randn(experts, features, hidden))
        self.change, self.calls = change, 0
        self.act_fn = nn.GELU() if change == "another activation" else nn.SiLU()

    def forward(self, tokens: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in ids.unique().tolist():
            rows, place = torch.where(ids == expert)
            both = functional.linear(tokens[rows], self.gate_up_proj[expert])
            gate, up = (both[:, ::2], both[:, 1::2]) if self.change == "interleaved" else both.chunk(2, dim=-1)
            gate, up = (up, gate) if self.change == "up before gate" else (gate, up)
            up = up.clamp(-50, 50) if self.change == "clamped" else up
            up = up + 1 if self.change == "shifted" else up
            each = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            counts = weights[rows, place, None]
            counts = counts.detach() if self.change == "not learned from" else counts
            each = each if self.change == "weights left out" else each * counts
            out.index_add_(0, rows, each)
        if self.change == "counts calls":
            self.calls += 1
        if self.change == "in training" and self.training:
            out = out * 2
        return out + tokens if self.change == "adds its input" else out


def changed(change: Callable[[Experts], object]) -> Experts:
    experts = Experts()
    change(experts)
    return experts


CHANGES = (
    "another activation", "interleaved", "up before gate", "clamped", "shifted", "not learned from", "weights left out",
    "counts calls", "in training", "adds its input",
)  # fmt: skip
OTHERS: dict[str, Callable[[], nn.Module]] = {
    **{change: lambda change=change: Experts(change) for change in CHANGES},
    "has a bias": lambda: changed(lambda made: made.register_parameter("bias", nn.Parameter(torch.zeros(4, 6)))),
    "has a buffer": lambda: changed(lambda made: made.register_buffer("seen", torch.zeros(4))),
    "has a hook": lambda: changed(lambda made: made.register_forward_hook(lambda *_: None)),
    "its own forward": lambda: changed(lambda made: setattr(made, "forward", made.forward)),
    "a layer inside": lambda: changed(lambda made: made.add_module("norm", nn.LayerNorm(6))),
}


def test_experts_are_found_by_their_shapes_and_numbers() -> None:
    detector, form = ExpertsDetector(), ExpertsForm(4, 6, 5, "gate_up_proj", "down_proj")
    assert detector.form_of(Experts()) == form
    with torch.device("meta"):
        assert detector.form_of(Experts(experts=3, features=7)) == ExpertsForm(3, 7, 5, "gate_up_proj", "down_proj")
    assert detector.form_of(Experts().to(torch.bfloat16)) == form


@pytest.mark.parametrize("change", OTHERS)
def test_what_computes_something_else_keeps_its_own_code(change: str) -> None:
    assert ExpertsDetector().form_of(OTHERS[change]()) is None


def test_kernels_that_lack_fp64_are_tried_in_fp32() -> None:
    import transformers

    sizes: Any = dict(hidden_size=32, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    config = transformers.MixtralConfig(**sizes, num_hidden_layers=1, vocab_size=8, num_attention_heads=4)
    model = transformers.MixtralForCausalLM(config)
    assert model.config._experts_implementation == "grouped_mm"
    experts: Any = model.model.layers[0].mlp.experts
    with pytest.raises(RuntimeError, match="got Double"):
        experts.double()(torch.ones(1, 32).double(), torch.tensor([[0, 1]]), torch.ones(1, 2).double())
    assert ExpertsDetector().form_of(experts) == ExpertsForm(4, 32, 16, "gate_up_proj", "down_proj")
    config = transformers.GptOssConfig(**sizes, num_hidden_layers=1, vocab_size=8, num_attention_heads=4)
    with torch.device("meta"):
        other: Any = transformers.GptOssForCausalLM(config)
    assert ExpertsDetector().form_of(other.model.layers[0].mlp.experts) is None


# --- plans


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 4, bias=False), experts

    def forward(self, tokens: Tensor) -> Tensor:
        flat = tokens.flatten(0, 1)
        weights, ids = self.router(flat).softmax(-1).topk(2)
        return self.experts(flat, ids, weights).view(tokens.shape)


def test_a_plan_may_name_them_and_they_must_be_what_it_says() -> None:
    grid = grid_of(Shape())
    for word in (ExpertsParallel(), "moe_tp_experts"):
        model = ff.parallelize(Block(Experts()), grid, plan={"experts": word})
        assert isinstance(adapters_of(model.experts)[-1], ExpertsAdapter)
    with pytest.raises(ValueError, match=r"experts \(Experts\): ExpertsParallel\(\) is for modules with gated experts"):
        ff.parallelize(Block(Experts("clamped")), grid, plan={"experts": ExpertsParallel()})
    assert "its structure is not known (Experts)" in ff.explain(ff.parallelize(Block(Experts("clamped")), grid))


def test_the_plan_of_transformers_is_understood() -> None:
    """It names the weights of experts too, which a module that the plan does not name may not have."""
    model = ff.parallelize(build("mixtral"), grid_of(Shape()), plan=build("mixtral").tp_plan)
    assert "plan: 'model.layers.*.mlp.experts'" in ff.explain(model)
    with pytest.raises(ValueError, match=r"'experts.down_proj' matches no module"):
        ff.parallelize(Block(Experts()), grid_of(Shape()), plan={"experts.down_proj": "rowwise"})


def width_that_does_not_divide() -> str:
    return ff.explain(ff.parallelize(Block(Experts()), grid_of(Shape(x=2))))


def test_a_width_that_does_not_divide_keeps_its_own_code(ranks) -> None:
    said = ranks(2).run(width_that_does_not_divide)[0]
    assert "4 gated experts, but 6 features and 5 hidden units do not divide by 1 and 2" in said
