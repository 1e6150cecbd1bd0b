"""Local computation: each function against torch's own in fp64, and the same once it is traced as one graph.

Side-by-side storage too: what joins without a copy, what falls back, and that both compute the same.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
from fourfold import kernels
from fourfold.gradients import Gradients
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective
from fourfold.nn.linear import Expand, join
from fourfold.nn.norm import Norm, NormSpec
from fourfold.optim import AdamW
from fourfold.params import local_of
from fourfold.policy import Policy, Recompute
from fourfold.product import side_by_side
from harness import grid_of
from share import others_slow

EPS = 1e-5
FEATURES = 12


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def norm_case(kind: str, *tokens: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """a, weight, bias, dout. The mean is far from 0, so that statistics are not right by chance."""
    bias = draw(FEATURES, seed=2) if kind == "layer" else None
    return 3 + draw(*tokens, FEATURES), 1 + draw(FEATURES, seed=1), bias, draw(*tokens, FEATURES, seed=3)


def norm_by_torch(a: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, kind: str) -> tuple[Tensor | None, ...]:
    """out, da, dw, db"""
    given = [None if t is None else t.clone().requires_grad_() for t in (a, weight, bias)]
    if kind == "layer":
        out = functional.layer_norm(given[0], [FEATURES], given[1], given[2], EPS)
    else:
        out = functional.rms_norm(given[0], [FEATURES], given[1], EPS)
    out.backward(dout)
    return out.detach(), *(None if t is None else t.grad for t in given)


def norm_whole(a: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, kind: str) -> tuple[Tensor | None, ...]:
    if kind == "layer":
        out, mean, rstd = kernels.layer_norm(a, weight, bias, EPS)
    else:
        mean, (out, rstd) = None, kernels.rms_norm(a, weight, EPS)
    da, dw, db = kernels.norm_backward(dout, a, mean, rstd, weight)
    return out, da, dw, db if bias is not None else None


def norm_by_phases(
    a: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, kind: str
) -> tuple[Tensor | None, ...]:
    """The features in two halves, as two ranks hold them, with the sums between the phases taken here."""
    halves = [tuple(t.chunk(2, -1)) if t is not None else (None, None) for t in (a, weight, bias, dout)]
    parts = list(zip(*halves, strict=True))
    mean = None
    if kind == "layer":
        (mean_a, m2_a), (mean_b, m2_b) = (kernels.layer_statistics(part[0]).unbind(0) for part in parts)
        mean = (mean_a + mean_b) / 2
        m2 = m2_a + m2_b + (mean_a - mean_b).square() * FEATURES / 4
    else:
        m2 = kernels.sum_of_squares(parts[0][0]) + kernels.sum_of_squares(parts[1][0])
    rstd = torch.rsqrt(m2 / FEATURES + EPS)
    out = torch.cat([kernels.normalize(part, mean, rstd, w, b) for part, w, b, _ in parts], dim=-1)
    sums = [kernels.norm_sums(d, part, mean, rstd, w) for part, w, _, d in parts]
    means = (sums[0][0] + sums[1][0]) / FEATURES
    da = torch.cat([kernels.norm_da(d, part, mean, rstd, w, means) for part, w, _, d in parts], dim=-1)
    dw, db = (torch.cat([found[index] for found in sums]) for index in (1, 2))
    return out, da, dw, db if bias is not None else None


@pytest.mark.parametrize("tokens", [(7,), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_compute_what_torch_computes_whole_and_by_phases(kind: str, tokens: tuple[int, ...]) -> None:
    case = norm_case(kind, *tokens)
    expected = norm_by_torch(*case, kind)
    for compute in (norm_whole, norm_by_phases):
        for name, found, value in zip(("out", "da", "dw", "db"), compute(*case, kind), expected, strict=True):
            assert (found is None) == (value is None), name
            if value is not None:
                close(found, value)


def norm_spec(kind: str, *, compiled: bool = False, bias: bool = True) -> NormSpec:
    policy = Policy(compile=compiled)
    layer = Norm(Grid.alone("cpu"), policy, FEATURES, kind=kind, bias=bias and kind == "layer", eps=EPS)
    layer.gradients = Gradients(layer.grid, {}, policy)  # nothing is handed in here
    return NormSpec(layer.group(*layer.specs), kind, FEATURES, "y", EPS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_torchs_kernel_and_ours_agree_inside_a_norm(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    a, weight, bias, dout = (t.to(dtype) for t in norm_case("layer", 7) if t is not None)
    spec = norm_spec("layer")
    assert spec._fused(a)
    for b in (bias, None):
        fused = spec.forward_whole(a, weight, b)
        fused += tuple(spec.backward_whole(dout, a, fused[2], fused[3], weight))
        with monkeypatch.context() as patch:
            patch.setattr(NormSpec, "_fused", lambda *_: False)
            ours = spec.forward_whole(a, weight, b)
            ours += tuple(spec.backward_whole(dout, a, ours[2], ours[3], weight))
        for found, expected in zip(ours, fused, strict=True):
            # fp32: a few roundings at 6e-8 of sums of 12 terms
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


def test_torchs_kernel_runs_where_it_rounds_no_statistics_and_nothing_is_compiled() -> None:
    a = draw(7, FEATURES)
    assert norm_spec("layer")._fused(a.float())
    assert not norm_spec("layer")._fused(a.bfloat16())
    assert not norm_spec("layer", compiled=True)._fused(a)
    assert not norm_spec("rms")._fused(a)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms_of_half_precision_take_their_statistics_in_fp32(kind: str) -> None:
    a, weight, bias, _ = norm_case(kind, 7)
    small = [None if t is None else t.bfloat16() for t in (a, weight, bias)]
    _, out, *statistics = norm_spec(kind).forward_whole(*small)
    assert {t.dtype for t in statistics if t is not None} == {torch.float32}
    wide = [None if t is None else t.double() for t in small]
    _, *expected = norm_spec(kind).forward_whole(*wide)
    torch.testing.assert_close(statistics[-1].double(), expected[2], rtol=1e-6, atol=0)
    # one rounding of the result to 8 bits, no more
    torch.testing.assert_close(out.double(), expected[0], rtol=2**-8, atol=1e-6)


def test_activations_and_bias_sums_compute_what_torch_computes() -> None:
    gate, up = draw(5, 6), draw(5, 6, seed=1)
    close(kernels.gelu(up), functional.gelu(up, approximate="tanh"))
    close(kernels.swiglu(torch.cat([gate, up], dim=1)), gate * gate.sigmoid() * up)
    assert kernels.sum_tokens(up.bfloat16(), torch.float32).dtype == torch.float32
    close(kernels.sum_tokens(up, torch.float64), torch.einsum("mp->p", up))


@pytest.mark.parametrize("packed", [False, True])
def test_rotation_turns_each_pair_of_a_head_by_its_angle(packed: bool) -> None:
    a = draw(2, 3, 4, 6)
    angle = draw(2, 3, 1, 3) if packed else draw(3, 1, 3)
    tables = angle.repeat(*[1] * (angle.dim() - 1), 2)
    turned = torch.complex(a[..., :3], a[..., 3:]) * torch.polar(torch.ones_like(angle), angle)
    close(kernels.rotate(a, tables.cos(), tables.sin()), torch.cat([turned.real, turned.imag], dim=-1))


# --- loss

IGNORED = -100
VOCAB = 11


def loss_case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits, targets with masked ones, dl of the mean by torch, and each token's share of it."""
    logits = (30 * draw(9, VOCAB)).requires_grad_()
    targets = torch.tensor([0, 3, IGNORED, 10, 7, IGNORED, 8, 4, 0])
    functional.cross_entropy(logits, targets, ignore_index=IGNORED).backward()
    scale = (targets != IGNORED).double() / (targets != IGNORED).sum()
    return logits.detach(), targets, logits.grad, scale


PARTS = [(0, 11, 11), (0, 11, 13), (0, 4, 4), (4, 4, 6), (8, 3, 4), (11, 0, 4), (11, 0, 0)]
"""first id, ids held, columns: all of the vocabulary, a part, with padding, and padding alone."""


@pytest.mark.parametrize(("first", "held", "columns"), PARTS)
def test_gradients_of_logits_are_those_of_torch_in_every_form(first: int, held: int, columns: int) -> None:
    logits, targets, dlogits, scale = loss_case()
    lse = logits.logsumexp(1)
    padding = torch.full((len(logits), columns - held), 1e3, dtype=logits.dtype)  # large: it must not be read
    part = torch.cat([logits[:, first : first + held], padding], dim=1)
    expected = functional.pad(dlogits[:, first : first + held], (0, columns - held))
    for compute in (kernels.dlogits, kernels.dlogits_eager):
        found = compute(part, targets, lse, scale, first, held)
        assert found.shape == part.shape
        close(found, expected)
        assert not found[:, held:].any()
        assert not found[targets == IGNORED].any()
        assert compute(part.float(), targets, lse.float(), scale.float(), first, held).dtype == torch.float32


@pytest.mark.parametrize("ignored", [-100, 3, 5000])
def test_gradients_from_log_probabilities_are_those_of_torch(ignored: int) -> None:
    logits, targets, _, _ = loss_case()
    targets = targets.masked_fill(targets == IGNORED, ignored)
    logits.requires_grad_()
    functional.cross_entropy(logits, targets, ignore_index=ignored, reduction="sum").backward()
    scale = (targets != ignored).double()
    logp = logits.detach().log_softmax(1)
    kept = logp.clone()
    close(kernels.dlogits_normalized(logp, targets, scale), logits.grad)
    assert torch.equal(logp, kept), "backward may run twice"


def test_statistics_of_parts_of_a_vocabulary_merge_into_its_log_sum_exp() -> None:
    logits, targets, _, _ = loss_case()
    parts = []
    for first, held, columns in ((0, 4, 4), (4, 4, 6), (8, 3, 4), (11, 0, 4)):
        padding = torch.full((len(logits), columns - held), 1e3, dtype=logits.dtype)
        part = torch.cat([logits[:, first : first + held], padding], dim=1)
        parts.append(kernels.loss_statistics(part, targets, first, held))
    tops, totals, found = torch.stack(parts, dim=1).unbind(0)
    top = tops.amax(0)
    close(top + (totals * (tops - top).exp()).sum(0).log(), logits.logsumexp(1))
    masked = targets == IGNORED
    expected = logits.gather(1, targets.masked_fill(masked, 0)[:, None])[:, 0].masked_fill(masked, 0)
    close(found.sum(0), expected)


# --- compiled


@cache
def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """As `kernels._compiled`, but for fixed shapes and without generating code: seconds less for each function."""
    return TORCH_COMPILE(function, fullgraph=True, dynamic=False, backend="aot_eager")


TORCH_COMPILE = torch.compile


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The compiler replaced by one that only traces; the names of what was compiled."""
    compiled: list[str] = []

    def compile_(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function.__name__)
        return traced(function)

    monkeypatch.setattr(kernels, "_compiled", compile_)
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_(function))
    kernels.compiled_for.cache_clear()
    yield compiled
    kernels.compiled_for.cache_clear()


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiler replaced by one that leaves functions as they are: regions and whole blocks run eagerly."""
    monkeypatch.setattr(kernels, "_compiled", lambda function: function)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    kernels.compiled_for.cache_clear()
    yield
    kernels.compiled_for.cache_clear()


def regions() -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The regions that a training step of one rank does not run, with arguments."""
    a, weight, bias, dout = norm_case("layer", 7)
    _, mean, rstd = kernels.layer_norm(a, weight, bias, EPS)
    means = kernels.norm_sums(dout, a, mean, rstd, weight)[0] / FEATURES
    logits, targets, _, scale = loss_case()
    lse = logits.logsumexp(1)
    return [
        (kernels.layer_statistics, (a,)),
        (kernels.sum_of_squares, (a,)),
        (kernels.normalize, (a, mean, rstd, weight, bias)),
        (kernels.normalize, (a, None, rstd, weight, None)),
        (kernels.norm_sums, (dout, a, mean, rstd, weight)),
        (kernels.norm_da, (dout, a, mean, rstd, weight, means)),
        (kernels.loss_statistics, (logits[:, :4], targets, 8, 3)),
        (kernels.loss_statistics, (logits[:, :4], targets, 11, 0)),
        (kernels.dlogits, (logits[:, :4], targets, lse, scale, 8, 3)),
        (kernels.dlogits, (logits[:, :4], targets, lse, scale, 11, 0)),
    ]


@pytest.mark.slow
def test_regions_between_collectives_trace_as_one_graph_and_compute_the_same() -> None:
    for function, args in regions():
        close(traced(function)(*args), function(*args))


def test_a_region_takes_inputs_of_many_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, evaluation and generation differ in shapes, ranks and what needs gradients. torch compiles a
    function 8 times by default and then, where it must be one graph, refuses."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # how often, not how well
    compiled = kernels._compiled.__wrapped__(kernels.sum_of_squares)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for shape in ((3, 4), (1, 4), (2, 3, 4), (2, 3, 4, 4)):
            a = torch.ones(shape, dtype=dtype)
            assert torch.equal(compiled(a), kernels.sum_of_squares(a))


# dynamo hides this warning about a step of its own, but not where warnings are errors
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recompute", ["none", "attention"])
@pytest.mark.parametrize("name", [pytest.param("gpt-tiny", marks=pytest.mark.slow), "llama-tiny"])
def test_a_compiled_training_step_computes_the_same(name: str, recompute: Recompute, tracing: list[str]) -> None:
    """Without recompute a block is one compiled function, otherwise what lies between its products is compiled."""
    config = ff.models.config(name, layers=2, qk_norm=name == "llama-tiny")
    tokens = torch.arange(32).view(2, 16) * 7 % config.vocab
    targets = tokens.roll(-1, 1).masked_fill(tokens % 5 == 0, -100)
    found = []
    for compiled in (False, True):
        policy = Policy(compile=compiled, recompute=recompute)
        model = ff.models.build(config, Grid.alone("cpu"), policy=policy, dtype=torch.float64)
        optimizer = AdamW(model, lr=1e-3)
        loss = model(tokens, targets)
        loss.backward()
        gradients = [local_of(p.grad).clone() for p in model.parameters()]
        optimizer.clip_and_step(1.0)
        found.append((loss.detach(), gradients, [local_of(p).detach() for p in model.parameters()]))
        assert bool(tracing) == compiled
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12 if recompute == "none" else 1e-10)
    norm, mlp = ("layer_norm", "gelu") if name == "gpt-tiny" else ("rms_norm", "swiglu")
    assert {"norm_backward", "loss_statistics", "dlogits"} <= set(tracing)
    blocks = [name for name in tracing if name.startswith("block_")]
    if recompute == "none":
        assert len(blocks) == 1  # the function of both blocks
        assert mlp not in tracing
    else:
        assert not blocks
        assert {norm, mlp} <= set(tracing)
        # the llama has norms of heads, so its attention does not begin at the product
        (attention,) = [name for name in tracing if name.startswith("attend_")]
        assert attention.startswith("attend_from_") == (name == "gpt-tiny")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_all_blocks_share_one_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block reads a stream in one part, the others in two: that makes two graphs for any number of layers."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(kernels, "_compiled", lambda function: function)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    kernels.compiled_for.cache_clear()
    model = ff.models.build(ff.models.config("llama-tiny", layers=5), Grid.alone("cpu"), policy=Policy(compile=True))
    for _ in range(2):
        model(TOKENS, TOKENS).backward()
    kernels.compiled_for.cache_clear()
    assert len(graphs) == 2


@pytest.mark.parametrize(
    "changes",
    [dict(bias=False), dict(norm="rms"), dict(attention_dropout=0.2), dict(positions="rope", mlp="swiglu", tied=False)],
    ids=str,
)
def test_a_block_of_any_kind_computes_the_same_as_one_function(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler: that the function is the block's, or that the block is left to its layers."""
    monkeypatch.setattr(kernels, "_compiled", lambda function: function)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    kernels.compiled_for.cache_clear()
    found = []
    for compiled in (False, True):
        config = ff.models.config("gpt-tiny", layers=2, **changes)
        model = ff.models.build(config, Grid.alone("cpu"), policy=Policy(compile=compiled), dtype=torch.float64)
        for _ in range(2):  # the second pass adds to the gradients of the first
            loss = model(TOKENS, TOKENS)
            loss.backward()
        found.append((loss.detach(), [local_of(parameter.grad).clone() for parameter in model.parameters()]))
    kernels.compiled_for.cache_clear()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("uncompiled")
def test_a_hook_or_another_module_inside_leaves_a_block_to_its_layers() -> None:
    model = ff.models.build("gpt-tiny", Grid.alone("cpu"), policy=Policy(compile=True))
    (first, second), seen = model.layers, []
    assert first._weights_of_whole() is not None
    first.mlp.register_forward_hook(lambda *_: seen.append("mlp"))
    second.attention.requires_grad_(False)
    assert first._weights_of_whole() is None
    assert second._weights_of_whole() is None
    model(TOKENS, TOKENS).backward()
    assert seen == ["mlp"]
    assert second.attention.q.weight.grad is None


def run_packed(name: str, shape: Shape, compiled: bool) -> tuple[list[Tensor], list[Collective]]:
    """The gradients of two passes over packed documents, and the messages of the passes."""
    grid = grid_of(shape)
    policy = Policy(compile=compiled, bucket_bytes=4000)
    model = ff.models.build(ff.models.config(name, layers=2), grid, policy=policy, dtype=torch.float64)
    tokens = ff.local_rows(torch.arange(64).view(4, 16), grid)
    positions = torch.arange(16).remainder(5).expand(len(tokens), -1)
    kernels.compiled_for.cache_clear()
    with (
        mock.patch.object(kernels, "_compiled", lambda function: function),
        mock.patch.object(torch, "compile", lambda function, **_: function),
        grid.ledger.watch() as records,
    ):
        with ff.accumulate(model):
            model(tokens, tokens, positions=positions).backward()
        model(tokens, tokens, positions=positions).backward()
    kernels.compiled_for.cache_clear()
    return [local_of(parameter.grad).clone() for parameter in model.parameters()], records


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("gpt-tiny", Shape(y=2, z=2)),
        pytest.param("llama-tiny", Shape(x=2, y=2), marks=pytest.mark.slow),
        pytest.param("gpt-tiny", Shape(data=2), marks=pytest.mark.slow),
        pytest.param("llama-tiny", Shape(z=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_functions_deposit_and_send_what_their_layers_do(ranks, name: str, shape: Shape) -> None:
    """Whole blocks on replicas, on other grids what lies between two products."""
    runs = (ranks(shape.world).run(run_packed, name, shape, compiled) for compiled in (True, False))
    for (found, sent), (expected, expected_sent) in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert sent == expected_sent


@pytest.mark.usefixtures("uncompiled")
def test_attention_dropout_alone_is_drawn_in_compiled_blocks() -> None:
    config = ff.models.config("gpt-tiny", layers=1, dropout=0.0, attention_dropout=0.5)
    models = [ff.models.build(config, Grid.alone("cpu"), policy=Policy(compile=flag)) for flag in (True, False)]
    torch.testing.assert_close(*(model(TOKENS, TOKENS) for model in models))
    torch.testing.assert_close(*(model.eval()(TOKENS, TOKENS) for model in models))


@pytest.mark.usefixtures("uncompiled")
def test_every_norm_of_a_compiled_block_has_an_eps_of_its_own() -> None:
    config, found = ff.models.config("llama-tiny", layers=1, qk_norm=True), []
    for flag in (True, False):
        model = ff.models.build(config, Grid.alone("cpu"), policy=Policy(compile=flag), dtype=torch.float64)
        model(TOKENS, TOKENS)
        block = model.layers[0]
        for eps, norm in enumerate(
            [block.attention_norm, block.attention.q_norm, block.attention.k_norm, block.mlp_norm]
        ):
            norm.eps = 0.1 * (eps + 1)
        found.append(model(TOKENS, TOKENS))
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("part", ["mlp", "attention", "mlp_dropout", "attention_dropout"])
def test_hooks_on_the_parts_of_a_compiled_block_are_called(part: str) -> None:
    model = ff.models.build(ff.models.config("gpt-tiny", layers=1), Grid.alone("cpu"), policy=Policy(compile=True))
    called = []
    model.layers[0].get_submodule(part).register_full_backward_hook(lambda *_: called.append(part))
    model(TOKENS, TOKENS).backward()
    assert called == [part]


@pytest.mark.usefixtures("uncompiled")
def test_passes_may_run_between_a_compiled_block_and_its_backward() -> None:
    """The block has saved the kept casts of its weights, which the other passes cast again."""
    found = []
    for keep in (True, False):
        policy = Policy(compile=True, compute_dtype=torch.float32, keep_casts=keep)
        config = ff.models.config("gpt-tiny", layers=1)
        model = ff.models.build(config, Grid.alone("cpu"), policy=policy, dtype=torch.float64)
        first = model(TOKENS, TOKENS)
        with torch.inference_mode():
            model(TOKENS, TOKENS)
        (first + model(TOKENS.flip(1), TOKENS)).backward()
        found.append([local_of(parameter.grad) for parameter in model.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.usefixtures("uncompiled")
def test_a_change_of_weights_between_a_compiled_block_and_its_backward_is_an_error() -> None:
    policy, config = Policy(compile=True, compute_dtype=torch.float32), ff.models.config("gpt-tiny", layers=1)
    model = ff.models.build(config, Grid.alone("cpu"), policy=policy, dtype=torch.float64)
    loss = model(TOKENS, TOKENS)
    with torch.no_grad():
        model.layers[0].mlp.up.weight.mul_(2)
        model(TOKENS, TOKENS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_dry_run_compiles_nothing(tracing: list[str]) -> None:
    model = ff.models.build("gpt-tiny", Grid.alone("cpu"), policy=Policy(compile=True), device="meta")
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    model(tokens, tokens).backward()
    assert tracing == []


# --- weights that are read together lie side by side


@cache
def one_rank() -> Grid:
    return Grid.alone("cpu")


def model_of(name: str = "llama-tiny", compute_dtype: torch.dtype | None = None) -> ff.models.Transformer:
    config = ff.models.config(name, layers=1)
    return ff.models.build(config, one_rank(), policy=Policy(compute_dtype=compute_dtype), dtype=torch.float64)


def reads(model: ff.models.Transformer) -> list[list[Expand]]:
    attention, mlp = model.layers[0].attention, model.layers[0].mlp
    return [[attention.q, attention.k, attention.v], [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]]


def joined_in_place(model: ff.models.Transformer) -> list[bool]:
    """For each product, whether its weights are the parameters' own memory."""
    found = []
    for layers in reads(model):
        first = local_of(layers[0].weight)
        factor = join(*layers)
        weights, bias, _ = factor.with_biases.launch()[0].wait()
        expected = torch.cat([local_of(layer.weight) for layer in layers])
        assert torch.equal(weights, expected.to(weights.dtype))
        if layers[0].bias is None:
            assert bias is None
        else:
            assert torch.equal(bias, torch.cat([local_of(layer.bias) for layer in layers]))
        again = factor.without.launch()[0].wait().w
        assert torch.equal(again, weights)
        found.append(weights.data_ptr() == first.data_ptr() == again.data_ptr())
    return found


TOKENS = torch.arange(24).view(2, 12)


def outcome(model: ff.models.Transformer) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model(TOKENS, TOKENS.roll(1, 1))
    loss.backward()
    gradients = [local_of(p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_weights_read_together_join_without_a_copy_also_after_a_step(name: str) -> None:
    model = model_of(name)
    before = joined_weights(model)
    assert joined_in_place(model) == [True, True]
    optimizer = AdamW(model, lr=1e-2)
    model(TOKENS, TOKENS).backward()
    optimizer.step()
    assert joined_in_place(model) == [True, True]
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(joined_weights(model), before, strict=True))


def joined_weights(model: ff.models.Transformer) -> list[Tensor]:
    return [join(*layers).without.launch()[0].wait().w.clone() for layers in reads(model)]


def test_loaded_weights_still_join_without_a_copy() -> None:
    model, other = model_of(), model_of()
    with torch.no_grad():
        for layer in reads(other)[0]:
            local_of(layer.weight).mul_(2)
    attention = model.layers[0].attention
    attention.load_state_dict(other.layers[0].attention.state_dict())
    assert joined_in_place(model) == [True, True]
    assert torch.equal(joined_weights(model)[0], joined_weights(other)[0])


def test_weights_that_moved_apart_are_copied_together_and_compute_the_same() -> None:
    apart, together = model_of(), model_of()
    assert joined_in_place(apart) == [True, True]
    moved, stays = apart.layers[0].attention.k, together.layers[0].attention.k
    moved.to(torch.float32).to(torch.float64)  # rounds and moves it
    with torch.no_grad():
        local_of(stays.weight).copy_(local_of(moved.weight))
    gate = apart.layers[0].mlp.gate.weight
    gate._local_tensor = local_of(gate).clone()
    assert joined_in_place(apart) == [False, False]
    assert joined_in_place(together) == [True, True]
    torch.testing.assert_close(outcome(apart), outcome(together), rtol=0, atol=0)


def test_weights_whose_memory_moved_are_read_where_they_are() -> None:
    model = model_of()
    assert joined_in_place(model) == [True, True]
    shard = local_of(reads(model)[0][0].weight)
    shard.share_memory_()  # the same tensor, in other memory
    with torch.no_grad():
        shard.mul_(2)
    assert joined_in_place(model) == [False, True]


def test_weights_that_are_cast_are_joined_before_the_cast() -> None:
    model = model_of(compute_dtype=torch.bfloat16)
    assert joined_in_place(model) == [False, False]
    assert join(*reads(model)[0]).with_biases.launch()[0].wait().w.dtype == torch.bfloat16


@pytest.mark.parametrize("trained", [False, True])
def test_a_conversion_that_changes_nothing_leaves_parameters_as_they_are(trained: bool) -> None:
    """`model.to(device)` is a line of most training scripts."""
    model = ff.models.build("gpt-tiny", Grid.alone("cpu"))
    optimizer = AdamW(model, lr=1e-2)
    if trained:
        model(TOKENS, TOKENS).backward()
    before = {name: (parameter, local_of(parameter), parameter.grad) for name, parameter in model.named_parameters()}
    assert model.to("cpu").float().to(torch.float32) is model
    after = {name: (parameter, local_of(parameter), parameter.grad) for name, parameter in model.named_parameters()}
    assert list(after) == list(before)
    assert all(a is b for name in after for a, b in zip(after[name], before[name], strict=True))
    loss = model(TOKENS, TOKENS)
    loss.backward()
    optimizer.step()
    assert model(TOKENS, TOKENS) < loss
    model.double().to("cpu")
    assert model(TOKENS, TOKENS).dtype == torch.float64


def test_a_copy_of_a_model_computes_the_same_and_shares_nothing_with_it() -> None:
    model = model_of()
    other = copy.deepcopy(model)
    expected = outcome(model)
    joined_in_place(other)
    torch.testing.assert_close(outcome(other), expected, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in other.parameters():
            local_of(parameter).zero_()
    torch.testing.assert_close(outcome(model), expected, rtol=0, atol=0)


def test_a_copy_goes_on_drawing_where_the_model_is() -> None:
    """Also after replays, which count on the device alone."""
    config = ff.models.config("gpt-tiny", layers=2, dropout=0.3, attention_dropout=0.0)
    model = ff.models.build(config, Grid.alone("cpu"))
    first = model(TOKENS, TOKENS)
    assert model.clock._counter is not None
    model.clock._counter[1:].add_(3)  # as three replays do
    other = copy.deepcopy(model)
    losses = [each(TOKENS, TOKENS).item() for each in (model, other)]
    assert losses[0] == losses[1] != first.item()


def test_a_model_is_freed_with_its_last_reference() -> None:
    """What layers keep must not refer to them: the memory of a model would wait for Python's garbage collector."""
    references = []
    gc.disable()
    try:
        for _ in range(2):  # torch itself keeps something of the first one
            model = model_of()
            outcome(model)
            references.append(weakref.ref(model.layers[0].attention.q.weight))
            del model
        assert references[1]() is None
    finally:
        gc.enable()


def test_a_model_with_gradients_can_be_copied() -> None:
    model = model_of()
    model(TOKENS, TOKENS).backward()
    for found, expected in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True):
        assert torch.equal(local_of(found), local_of(expected))
        assert found.grad is None  # as in a copy of a plain module


def test_a_state_dict_can_be_copied() -> None:
    model = model_of()
    kept = copy.deepcopy(model.state_dict())
    before = {name: local_of(p).detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).zero_()
    assert all(torch.equal(local_of(kept[name]), value) for name, value in before.items())


def test_only_neighbours_in_one_memory_lie_side_by_side() -> None:
    attention = ff.models.build("gpt-tiny", Grid.alone("cpu")).layers[0].attention
    q, k, v = (layer.weight for layer in (attention.q, attention.k, attention.v))
    whole = side_by_side([q, k, v])
    assert whole is not None
    assert torch.equal(whole, torch.cat([local_of(part) for part in (q, k, v)]))
    assert whole.data_ptr() == local_of(q).data_ptr()
    assert torch.equal(side_by_side([q, k]), torch.cat([local_of(q), local_of(k)]))  # v lies behind, unasked for
    assert side_by_side([k, v]) is None  # the first of them does not know of the others
    assert side_by_side([q, v, k]) is None  # another order
    k._local_tensor = local_of(k).clone()
    assert side_by_side([q, k, v]) is None  # another memory


def test_moving_one_neighbour_leaves_the_others_their_memory() -> None:
    """Sharing memory with other processes moves a storage: were it that of all three, two would dangle."""
    attention = ff.models.build("gpt-tiny", Grid.alone("cpu")).layers[0].attention
    shards = [local_of(layer.weight) for layer in (attention.q, attention.k, attention.v)]
    before = [shard.clone() for shard in shards]
    shards[0].share_memory_()
    junk = [torch.full_like(shards[0], 7.0) for _ in range(8)]  # would take memory that was given back
    assert all(torch.equal(shard, old) for shard, old in zip(shards, before, strict=True))
    del junk


def outcomes_with_bias_and_without(shape: Shape) -> list[float]:
    """On a grid: the largest difference that joining by a copy makes, for a model with biases and one without."""
    grid = grid_of(shape)
    rows = ff.local_rows(torch.arange(48).view(4, 12), grid)
    differences = []
    for bias in (True, False):
        config = ff.models.config("llama-tiny", layers=1, bias=bias)
        found = []
        for copied in (False, True):
            model = ff.models.build(config, grid, dtype=torch.float64)
            for layers in reads(model) if copied else ():
                for layer in layers:
                    layer.weight._local_tensor = local_of(layer.weight).clone()
            model(rows, rows).backward()
            found.append([local_of(p.grad) for p in model.parameters()])
        differences.append(max((a - b).abs().max().item() for a, b in zip(*found, strict=True)))
    return differences


@pytest.mark.parametrize("shape", others_slow([Shape(x=2, y=2), Shape(x=4)], 2), ids=str)
def test_joining_in_place_and_by_a_copy_agree_on_grids(ranks, shape: Shape) -> None:
    assert ranks(4).run(outcomes_with_bias_and_without, shape) == [[0.0, 0.0]] * 4
