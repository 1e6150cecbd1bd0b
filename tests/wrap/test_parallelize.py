"""Modules that nobody foresaw train on every grid as they do on one process, or say why they cannot."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.policy import Policy
from fourfold.wrap import ContractParallel, ExpandParallel, HeadParallel, NormParallel, WholeTensors, whole_tensors
from harness import grid_of, what_is_said
from parity import LocalAdamW
from share import share
from strange import (
    LOSSES,
    STRANGE,
    Answers,
    Calls,
    Changes,
    Checkpointed,
    Llamalike,
    Mixed,
    NanoGPT,
    OnlyBuffer,
    Pairs,
    Raw,
    Remembers,
    Scored,
    SharedOtherwise,
    Siblings,
    Strange,
    WithReset,
    encoder,
    tokens,
)

TOLERANCE = 1e-9


def loss_of(strange: Strange, model: nn.Module, inputs: tuple[Tensor, ...], grid: Grid | None) -> tuple[Tensor, Tensor]:
    """The output that is compared, and the mean over the whole batch."""
    result = model(*inputs)
    output = strange.output(result)
    if strange.own_loss:
        return output, result[1]
    loss = functional.mse_loss(output, torch.ones_like(output).cos())
    return output, loss if grid is None else ff.global_mean(loss, len(output), grid)


def train(strange: Strange, model: nn.Module, grid: Grid | None, rows: int, steps: int = 2) -> dict[str, Any]:
    """Output, loss and gradients of inputs and parameters of the first step; losses and parameters of AdamW steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True) if grid is None else LocalAdamW(trained)
    found: dict[str, Any] = {}
    for step in range(steps):
        whole = strange.inputs(rows, step)
        inputs = tuple(part if grid is None else ff.local_rows(part, grid).clone() for part in whole)
        leaves = [part.requires_grad_() for part in inputs if part.is_floating_point()]
        output, loss = loss_of(strange, model, inputs, grid)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0:
            found["output"] = output.detach().as_subclass(Tensor) if grid is None else output.detach()
            # what reaches an input is, as under DDP, the gradient of the place's own loss: no average is taken of it
            places = 1 if grid is None else grid.shape.places
            found |= {f"input {number}": leaf.grad / places for number, leaf in enumerate(leaves)}
            found |= {f"gradient of {name}": value for name, value in gradients(model, grid).items()}
        unused(model)
        optimizer.step()
        model.zero_grad()
    values = dict(model.named_parameters(remove_duplicate=False)) if grid is None else whole_tensors(model)
    return found | {f"parameter {name}": value.detach() for name, value in values.items()}


def unused(model: nn.Module) -> None:
    """What took no part counts as 0, for LocalAdamW takes all."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def gradients(model: nn.Module, grid: Grid | None) -> dict[str, Tensor]:
    if grid is not None:
        return whole_tensors(model, "gradient")
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters}


def differences(one: dict[str, Tensor], two: dict[str, Tensor], grid: Grid) -> list[str]:
    wrong = []
    for name in sorted(one.keys() | two.keys()):
        if name not in one or name not in two:
            wrong.append(f"{name} is on one side only")
            continue
        expected, found = one[name], two[name]
        if name == "output" or name.startswith("input"):
            expected = ff.local_rows(expected, grid)
        if expected.shape != found.shape:
            wrong.append(f"{name}: {tuple(found.shape)}, not {tuple(expected.shape)}")
            continue
        error = (expected - found).abs().max().item() / max(expected.abs().max().item(), 1e-2)
        if not error <= TOLERANCE:
            wrong.append(f"{name}: {error:.1e}")
    return wrong


def check_strange(name: str, shape: Shape, mode: str) -> list[str]:
    grid, strange, rows = grid_of(shape), STRANGE[name], 2 * shape.data * shape.z
    one = train(strange, strange.build(), None, rows)
    model = ff.parallelize(strange.build(), grid, policy=Policy(activations=mode))  # type: ignore[arg-type]
    return differences(one, train(strange, model, grid, rows), grid)


PAIRS = [
    ((Shape(x=2, y=2), "sharded"), (Shape(z=2, data=2), "replicated")),
    ((Shape(x=2, z=2), "replicated"), (Shape(y=2, data=2), "sharded")),
    ((Shape(y=2, z=2), "sharded"), (Shape(x=2, data=2), "replicated")),
]
"""Each module meets all four axes and both modes."""
CASES = [(name, *case) for number, name in enumerate(STRANGE) for case in PAIRS[number % len(PAIRS)]]
ALSO = [("odd mlp", Shape(x=3)), ("odd tokens", Shape(x=3)), ("nano gpt", Shape(y=3)), ("llama-like", Shape(z=3))]
CASES += [(name, shape, "sharded") for name, shape in ALSO]
CASES += [(name, Shape(), "sharded") for name in ("multihead", "normed", "lstm")]


@pytest.mark.parametrize(("name", "shape", "mode"), share(CASES, 13), ids=str)
def test_module_without_known_structure_trains_as_on_one_process(ranks, name: str, shape: Shape, mode: str) -> None:
    for wrong in ranks(shape.world).run(check_strange, name, shape, mode):
        assert not wrong, f"{name} on {shape}, {mode}: {wrong}"


def compare_losses(shape: Shape) -> list[str]:
    """torch's loss functions inside a model, beside the same on the whole batch; sums beside their mean over places."""
    grid, wrong = grid_of(shape), []
    places = [partial(local_rows_of, place=place, places=shape.places) for place in range(shape.places)]
    own_place = grid.coords["data"] * shape.z + grid.coords["z"]
    for name, loss in LOSSES.items():
        torch.manual_seed(0)
        one = Scored(loss).double()
        torch.manual_seed(0)
        model = ff.parallelize(Scored(loss).double(), grid)
        found = model(partial(ff.local_rows, grid=grid))
        found.backward()
        if "sum" in name:
            each = [one(rows) for rows in places]
            expected, whole = each[own_place], torch.stack(each).mean()
        else:
            expected = whole = one(lambda rows: rows)
        whole.backward()
        gradients = whole_tensors(model, "gradient")
        errors = [(expected - found).abs().item()]
        errors += [(gradients[own] - p.grad).abs().max().item() for own, p in one.named_parameters()]
        if not max(errors) < 1e-12:
            wrong.append(f"{name}: {max(errors):.1e}")
    return wrong


def local_rows_of(batch: Tensor, place: int, places: int) -> Tensor:
    return batch.chunk(places)[place]


def test_losses_inside_a_model_are_those_of_the_whole_batch(ranks) -> None:
    assert ranks(2).run(compare_losses, Shape(z=2)) == [[]] * 2


def rows_of(grid: Grid, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return ff.local_rows(whole_rows(*shape).to(dtype), grid).clone()


def whole_rows(*shape: int) -> Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradients_with(model: nn.Module, grid: Grid, inputs: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = ff.global_mean(model(inputs).float().square().mean(), len(inputs), grid)
    loss.backward()
    return loss.item(), whole_tensors(model, "gradient")


def try_policies(shape: Shape) -> dict[str, float]:
    """The largest difference that an option makes, of those that must make none; and that narrow dtypes make."""
    grid = grid_of(shape)
    found: dict[str, float] = {}
    ids, targets = (ff.local_rows(part, grid) for part in tokens(4, torch.Generator().manual_seed(0)))

    def gpt(dropout: float, **options: Any) -> tuple[float, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = ff.parallelize(NanoGPT(dropout=dropout).double(), grid, policy=Policy(**options))
        torch.manual_seed(grid.rank)  # loops may do that
        loss = model(ids, targets)[1]
        loss.backward()
        return loss.item(), whole_tensors(model, "gradient")

    for dropout in (0.0, 0.3):
        plain = gpt(dropout)
        for options in (dict(recompute="block"), dict(keep_gathered=True, keep_weights=True)):
            loss, gradients = gpt(dropout, **options)
            worst = max((gradients[name] - value).abs().max().item() for name, value in plain[1].items())
            found[f"{options} with dropout {dropout}"] = max(abs(loss - plain[0]), worst)
    for kind, size in ((Raw, 7), (Llamalike, 24)):
        torch.manual_seed(0)
        wide = ff.parallelize(kind(), grid)
        torch.manual_seed(0)
        narrow = ff.parallelize(kind(), grid, policy=Policy(compute_dtype=torch.bfloat16))
        inputs = rows_of(grid, 5, size, dtype=torch.float32)
        expected = gradients_with(wide, grid, inputs)
        with torch.autocast(grid.device.type, torch.bfloat16):
            both = ff.parallelize(build(kind).float(), grid, policy=Policy(compute_dtype=torch.bfloat16))
            under = gradients_with(both, grid, inputs)
        for label, (loss, gradients) in (("bf16", gradients_with(narrow, grid, inputs)), ("autocast", under)):
            worst = max(
                ((gradients[name] - value).abs().max() / value.abs().max()).item()
                for name, value in expected[1].items()
            )
            found[f"{label} {kind.__name__}"] = max(abs(loss - expected[0]) / expected[0], worst)
    return found


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16
@pytest.mark.parametrize("shape", share([Shape(x=2), Shape(z=2)], 2), ids=str)
def test_policies_and_precisions(ranks, shape: Shape) -> None:
    """Of the policy only the dtypes change a result, and these by their rounding: 8 bits, a few operations deep."""
    for found in ranks(2).run(try_policies, shape):
        for name, error in found.items():
            assert error <= (0.1 if name.startswith(("bf16", "autocast")) else TOLERANCE), f"{name}: {error}"


def try_uses(shape: Shape) -> dict[str, Any]:
    """Ways to use a model that are not a plain training step."""
    grid, found = grid_of(shape), {}
    inputs = rows_of(grid, 5, 7)
    model = ff.parallelize(build(Raw), grid)
    with torch.inference_mode():
        found["inference"] = model.eval()(inputs).clone()
    with torch.no_grad():
        found["no_grad"] = model(inputs)
    found["train"] = model.train()(inputs).detach()
    halves = inputs.chunk(2)
    with ff.accumulate(model):
        ff.global_mean(model(halves[0]).square().mean(), 1, grid).div(2).backward()
    ff.global_mean(model(halves[1]).square().mean(), 1, grid).div(2).backward()
    accumulated = whole_tensors(model, "gradient")
    model.zero_grad()
    _, at_once = gradients_in_full(model, grid, inputs)
    found["accumulated"] = max((accumulated[name] - value).abs().max().item() for name, value in at_once.items())

    ff.parallelize(model, grid)  # a second time: nothing is new
    found["twice"] = model(inputs).detach()

    drops = ff.parallelize(nn.Sequential(nn.Linear(7, 8), nn.Dropout(0.5), nn.Linear(8, 2)).double(), grid).eval()
    drops[1].train()
    torch.manual_seed(grid.rank)
    found["drawn in evaluation"] = [drops(inputs).detach().sum().item() for _ in range(2)]

    answers = ff.parallelize(build(Answers), grid)(rows_of(grid, 5, 6))
    found["plain answers"] = type(answers["out"].hidden) is type(answers["out"].rest[2][1]["again"]) is Tensor
    whole = ff.parallelize(nn.Sequential(OrderedDict(inside=Calls())).double(), grid, plan={"inside": WholeTensors()})
    whole(rows_of(grid, 5, 6)).sum().backward()
    found["a function on whole tensors"] = all(p.grad is not None for p in whole.parameters())
    mixed = ff.parallelize(Mixed(), grid)
    out = mixed(inputs[..., :4])
    out.sum().backward()
    found["dtypes"] = [out.dtype, mixed.a.grad.dtype, mixed.b.grad.dtype, mixed.n.dtype]
    return {name: value.numpy().copy() if isinstance(value, Tensor) else value for name, value in found.items()}


def gradients_in_full(model: nn.Module, grid: Grid, inputs: Tensor) -> tuple[float, dict[str, Tensor]]:
    loss = ff.global_mean(model(inputs).square().mean(), len(inputs), grid)
    loss.backward()
    return loss.item(), whole_tensors(model, "gradient")


@pytest.mark.parametrize("shape", [Shape(x=2), Shape(z=2)], ids=str)
def test_other_uses_of_a_model(ranks, shape: Shape) -> None:
    first, second = ranks(2).run(try_uses, shape)
    for found in (first, second):
        for name in ("inference", "no_grad", "twice"):
            assert (found[name] == found["train"]).all(), name
        assert found["accumulated"] <= 1e-14
        assert found["plain answers"] and found["a function on whole tensors"]
        assert found["dtypes"] == [torch.float64, torch.bfloat16, torch.float64, torch.int64]
        one, two = found["drawn in evaluation"]
        assert one != two, "each evaluation draws anew"
    assert (first["drawn in evaluation"] == second["drawn in evaluation"]) == (shape.x == 2), "alike on a place alone"


def drawn_on(shape: Shape) -> dict[str, Any]:
    """Initial values of models that were built on the meta device."""
    found: dict[str, Any] = {}
    for name, make in dict(gpt=NanoGPT, encoder=encoder, pieces=WithReset).items():
        with torch.device("meta"):
            model = make()
        model = ff.parallelize(model, grid_of(shape), seed=3)
        found |= {f"{name} {own}": value.numpy().copy() for own, value in whole_tensors(model).items()}
        for own, buffer in model.named_buffers():
            whole = buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
            found[f"{name} {own}"] = whole.numpy().copy()
    return found


def test_values_of_a_model_on_the_meta_device_depend_on_the_seed_alone(ranks) -> None:
    one = ranks(2).run(drawn_on, Shape(x=2))
    for found in (*one[1:], *ranks(2).run(drawn_on, Shape(y=2)), *ranks(2).run(drawn_on, Shape(z=2))):
        assert found.keys() == one[0].keys()
        assert all((found[name] == value).all() for name, value in one[0].items())


def overrides(shape: Shape) -> dict[str, float]:
    """The largest difference of a gradient from the plain model's, with words for some modules."""
    grid = grid_of(shape)
    inputs = rows_of(grid, 5, 6)
    one = build(Pairs)
    one(
        torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).square().mean().backward()
    found = {}
    for name, plan in PLANS.items():
        model = ff.parallelize(build(Pairs), grid, plan=plan)
        _, gradients = gradients_in_full(model, grid, inputs)
        found[name] = max((gradients[own] - p.grad).abs().max().item() for own, p in one.named_parameters())
    return found


PLANS: dict[str, dict[str, Any]] = {
    "the other way round": {"layers.*.up": ContractParallel(), "layers.*.down": ExpandParallel()},
    "heads": {"up": HeadParallel(), "layers.1.down": HeadParallel()},
    "a block whole": {"layers.0": WholeTensors(), "layers.1.up": WholeTensors()},
    "all whole": {"": WholeTensors()},
    "every step": {"layers.*.*": WholeTensors()},
    "Hugging Face's words": {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "layers.*.norm": "sequence_parallel",
    },
    "parts": {"layers.*.up": ExpandParallel(parts=2)},
}


@pytest.mark.parametrize("shape", [Shape(x=2), Shape(y=2)], ids=str)
def test_a_plan_changes_no_result(ranks, shape: Shape) -> None:
    for found in ranks(2).run(overrides, shape):
        assert max(found.values()) < 1e-12, found


def llama_with_its_plan() -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=24, intermediate_size=48, num_hidden_layers=1, vocab_size=53)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    grid, ids = grid_of(Shape(x=2)), torch.arange(28).view(4, 7)
    losses = []
    for plan in (None, config.base_model_tp_plan, LlamaForCausalLM(config).tp_plan):
        torch.manual_seed(0)
        model = ff.parallelize(LlamaForCausalLM(config).double(), grid, plan=plan)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses += [
            loss.item(),
            *(gradient.square().sum().item() for gradient in whole_tensors(model, "gradient").values()),
        ]
    return losses


def test_plans_that_hugging_face_models_bring_along(ranks) -> None:
    for losses in ranks(2).run(llama_with_its_plan):
        none, base, own = torch.tensor(losses).chunk(3)
        torch.testing.assert_close(base, none)
        torch.testing.assert_close(own, none)


Z2 = SimpleNamespace(shape=Shape(z=2), rank=0)
"""As much of a grid as the cutting of rows needs."""


def on(grid: Grid, kind: Callable[[], nn.Module], **options: Any) -> nn.Module:
    return ff.parallelize(build(kind), grid, policy=Policy(**options))


def on_meta(grid: Grid, kind: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        model = kind()
    return ff.parallelize(model, grid)


def planned(plan: Any, **options: Any) -> Callable[[Grid], nn.Module]:
    return lambda grid: ff.parallelize(build(Pairs), grid, plan=plan, policy=Policy(**options))


def replaced_weight(grid: Grid) -> None:
    model = on(grid, Siblings)
    model.a.weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64))
    model(rows_of(grid, 5, 6))


def changing(how: str, grid: Grid) -> None:
    on(grid, partial(Changes, how))(rows_of(grid, 5, 6))


REFUSED: dict[str, tuple[str, Callable[[Grid], Any]]] = {
    # what is asked for
    "misspelt": (
        "'layers.*.upp' matches no module.*nearest name is 'layers.*.up'",
        planned({"layers.*.upp": ExpandParallel()}),
    ),
    "a style that does not fit": (
        r"layers.0.norm \(LayerNorm\): ExpandParallel\(\) is for linear",
        planned({"layers.*.norm": ExpandParallel()}),
    ),
    "no norm": (
        r"layers.0.up \(Linear\): it computes neither.*WholeTensors\(\)",
        planned({"layers.*.up": NormParallel()}),
    ),
    "no style": (
        r"'layers.*.up' has 'colwize'; use one of the styles ExpandParallel\(\)",
        planned({"layers.*.up": "colwize"}),
    ),
    "parts that do not divide": (
        r"layers.0.up \(Linear\): .*parts=3.*8 outputs",
        planned({"layers.*.up": ExpandParallel(parts=3)}),
    ),
    "no plan": ("plan='auto': a plan is a dict", planned("auto")),
    "attention again": ("recompute='attention'.*use 'block'", planned(None, recompute="attention")),
    "halves": ("halves=2.*use halves=None or 1", planned(None, overlap=ff.Overlap(halves=2))),
    "chunks": ("loss_chunk=5.*use loss_chunk=0", planned(None, loss_chunk=5)),
    "offload": ("offload=True works with.*use offload=False", planned(None, offload=True)),
    "chunks of an MLP": ("mlp_chunk=5.*use mlp_chunk=0", planned(None, mlp_chunk=5)),
    "state of a number": ("shard_optimizer=True.*scale has no dims", lambda g: on(g, Raw, shard_optimizer=True)),
    "another policy": (
        "on the grid x=2 already",
        lambda g: ff.parallelize(on(g, Raw), g, policy=Policy(keep_weights=True)),
    ),
    # what is given
    "shared": (
        r"layers.0.down.weight and layers.0.up.weight share.*WholeTensors\(\)",
        lambda g: on(g, SharedOtherwise),
    ),
    "meta": ("w is on the meta device and nothing draws.*reset_parameters", lambda g: on_meta(g, Raw)),
    "meta buffer": ("angles is on the meta device", lambda g: on_meta(g, OnlyBuffer)),
    "rows": ("one .data, z. place were given different rows", lambda g: on(g, Pairs)(rows_of(g, 5, 6) + g.rank)),
    "batch": ("a batch of 3 rows cannot be cut over data\\*z", lambda _: ff.local_rows(torch.zeros(3), Z2)),
    # what runs
    "replaced": ("a.weight was replaced after", replaced_weight),
    "reentrant": (
        "CheckpointFunction.*use_reentrant=False",
        lambda g: on(g, partial(Checkpointed, reentrant=True))(rows_of(g, 5, 12).requires_grad_()),
    ),
    **{
        f"in place: {how}": (f"{said}.*forward.*outside of forward", partial(changing, how))
        for how, said in dict(own="w ", data="w ", assign="w ", child="a.weight", attribute="w ").items()
    },
}


def refusals() -> dict[str, str]:
    return what_is_said({name: act for name, (_, act) in REFUSED.items()}, grid_of(Shape(x=2)))


def test_what_cannot_work_is_refused_with_a_way_out(ranks) -> None:
    for found in ranks(2).run(refusals):
        for name, said in found.items():
            assert re.search(REFUSED[name][0], said, re.DOTALL), f"{name}: {said}"


def buffers_from_rows(how: str) -> str:
    grid = grid_of(Shape(z=2))
    model = ff.parallelize(Remembers(how).double(), grid)
    try:
        model(rows_of(grid, 5, 6))
    except RuntimeError as error:
        return str(error)
    return f"counted {model.count.item():.0f}"


def test_buffers_may_count_but_not_depend_on_rows(ranks) -> None:
    assert ranks(2).run(buffers_from_rows, "count") == ["counted 1"] * 2
    for how in ("in place", "assign", "keep"):
        for said in ranks(2).run(buffers_from_rows, how):
            assert "the model (Remembers) writes its buffer 'mean'" in said and "or keep the buffer out" in said


def infer_twice(shape: Shape) -> list[Tensor]:
    """Two passes in inference mode, the second of which prefetches weights as it begins, and one outside of it."""
    torch.manual_seed(0)
    # uneven rows over z, in one message: it arrives in memory of its own, which is then copied
    grid, widths = grid_of(shape), itertools.pairwise((8, 6, 6, 6))
    model = ff.parallelize(nn.Sequential(*(nn.Linear(*sizes) for sizes in widths)).eval(), grid)
    inputs = torch.ones(2, 8)
    with torch.inference_mode():
        found = [model(inputs).clone() for _ in range(2)]
    return [*found, model(inputs).detach()]


def test_passes_in_inference_mode_prefetch_weights(ranks) -> None:
    for first, second, outside in ranks(4).run(infer_twice, Shape(x=2, z=2)):
        assert torch.equal(first, second)
        assert torch.equal(first, outside)
