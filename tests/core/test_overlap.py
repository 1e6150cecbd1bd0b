"""Law 3: overlap decides when something runs, never what. And that it does run then."""

from __future__ import annotations

import os
import re
import signal
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import cache

import pytest
import torch

import fourfold as ff
from fourfold.comm import Pending
from fourfold.engine import DeferredReductions
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Event
from fourfold.models.config import halves_of
from fourfold.params import LazyTensor, local_of
from fourfold.policy import WORTH_HIDING_NBYTES, Halves, Overlap, Policy, choose_halves
from harness import RankFailed, Ranks, grid_of
from share import others_slow, share

CONFIGS = {
    "gpt": ff.models.config("gpt-tiny", layers=2, hidden=24, heads=4, kv_heads=4, head_dim=6, mlp_hidden=24, vocab=53),
    "llama": ff.models.config(
        "llama-tiny", layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, mlp_hidden=24, vocab=48, qk_norm=True
    ),
}


def all_overlaps(halves: int) -> list[Overlap]:
    """All mechanisms, all with every message by itself, all with hardly a byte in flight, each one alone."""
    off, on = Overlap.off(halves=halves), Overlap(halves=halves)
    alone = [replace(off, **{name: True}) for name in ("prefetch", "defer", "wgrad_behind_messages", "reduce_early")]
    return [on, replace(on, joint_bytes=0), replace(on, bytes_in_flight=1), *alone]


def train(
    shape: Shape, name: str, policy: Policy, steps: int, micro_steps: int = 1, rows: int = 2
) -> list[torch.Tensor]:
    """The losses of all steps, and this rank's gradients and parameters after the last; `rows` are those of a place."""
    grid = grid_of(shape)
    model = ff.models.build(CONFIGS[name], grid, policy=policy, seed=3, dtype=torch.float64)
    optimizer = ff.optim.AdamW(model, lr=1e-2)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        model.clock.begin_step(step)
        optimizer.zero_grad()
        whole = torch.randint(48, (micro_steps, rows * grid.size("z") * grid.size("data"), 10), generator=draw)
        count = whole[:, :, 1:].numel()
        for micro, batch in enumerate(whole):
            own = ff.local_rows(batch, grid)
            if micro < micro_steps - 1:
                with ff.accumulate(model):
                    loss = model(own[:, :-1], own[:, 1:], count=count)
                    loss.backward()
            else:
                loss = model(own[:, :-1], own[:, 1:], count=count)
                loss.backward()
            losses.append(loss.detach())
        gradients = [local_of(p.grad).clone() for p in model.parameters()]
        optimizer.clip_and_step(1.0)
    return [torch.stack(losses), *gradients, *(local_of(p).clone() for p in model.parameters())]


def differences(
    shape: Shape,
    name: str,
    policy: Policy,
    halves: int,
    micro_steps: int,
    steps: int,
    overlaps: list[Overlap],
    rows: int,
) -> list[str]:
    """The overlap policies under which a bit differs from the first one's."""
    expected: list[torch.Tensor] = []
    found = []
    for overlap in (Overlap.off(halves=halves), *overlaps):
        values = train(shape, name, replace(policy, overlap=overlap), steps, micro_steps, rows)
        expected = expected or values
        if not all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)):
            found.append(str(overlap))
    return found


@pytest.mark.parametrize(
    ("shape", "name", "options", "micro_steps", "rows"),
    share(
        [
            (Shape(x=2, z=2), "gpt", {"recompute": "block"}, 1, 2),
            (
                Shape(x=2, data=2),
                "llama",
                {"shard_optimizer": True, "recompute": "block", "activations": "replicated"},
                1,
                2,
            ),
            (Shape(z=2, data=2), "gpt", {"shard_optimizer": True, "bucket_bytes": 4000}, 2, 2),
            (Shape(x=2, z=2), "llama", {}, 1, 1),
        ],
        4,
    ),
    ids=str,
)
def test_overlap_does_not_change_a_bit(ranks, shape, name, options, micro_steps, rows) -> None:
    """Every policy on every grid, for 20 steps, in `make soak`."""
    halves = 2 if shape.x * shape.y > 1 else 1
    overlaps = all_overlaps(halves)[:2]
    found = ranks(4).run(differences, shape, name, Policy(**options), halves, micro_steps, 2, overlaps, rows)
    assert found == [[]] * 4


def in_halves(shape: Shape, name: str, options: dict, rows: int = 2) -> float:
    """How far two halves are from one: losses, gradients, parameters; each against the largest value of its kind."""
    one, two = (train(shape, name, Policy(**options, overlap=Overlap(halves=h)), 2, rows=rows) for h in (1, 2))
    scale = max(a.abs().max().item() for a in one[1:])
    worst = ((one[0] - two[0]).abs().max() / one[0].abs().max()).item()
    return max(worst, *((a - b).abs().max().item() / scale for a, b in zip(one[1:], two[1:], strict=True) if len(a)))


@pytest.mark.parametrize(
    ("shape", "name", "options"),
    [
        pytest.param(Shape(x=2, z=2), "llama", {"recompute": "block"}, marks=pytest.mark.slow),
        (Shape(x=2, y=2), "gpt", {}),
        (Shape(y=2, data=2), "gpt", {"recompute": "attention", "loss_chunk": 7}),
    ],
    ids=str,
)
def test_two_halves_agree_with_one(ranks, shape, name, options) -> None:
    assert max(ranks(4).run(in_halves, shape, name, options)) < 1e-12


@pytest.mark.parametrize(
    ("shape", "name", "options"),
    [
        pytest.param(Shape(x=2, z=2), "llama", {"recompute": "block", "mlp_chunk": 2}, marks=pytest.mark.slow),
        (Shape(x=2, y=2), "gpt", {"loss_chunk": 4, "keep_gathered": True}),
        (Shape(x=4), "llama", {"activations": "replicated", "loss_chunk": 2}),
        (Shape(x=2, pipe=2), "llama", {"recompute": "block", "schedule": "zb-h1"}),
        pytest.param(Shape(y=4), "llama", {"recompute": "block", "offload": True}, marks=pytest.mark.slow),
        pytest.param(Shape(y=2, pipe=2), "gpt", {}, marks=pytest.mark.slow),
        pytest.param(Shape(x=2, data=2), "gpt", {"recompute": "block"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_halves_of_one_row_agree_with_all_of_it(ranks, shape, name, options) -> None:
    """Nine tokens, of which x and y divide neither half."""
    assert max(ranks(4).run(in_halves, shape, name, options, 1)) < 1e-12


def logits_of_a_row() -> float:
    """How far the logits of a row that is cut are from those of a whole one, in evaluation."""
    tokens, alone = torch.arange(9)[None], Grid.alone(torch.device("cpu"))
    policies = [Policy(overlap=Overlap(halves=halves)) for halves in (1, 2)]
    whole, cut = (
        ff.models.build(CONFIGS["llama"], alone, policy=policy, dtype=torch.float64).eval() for policy in policies
    )
    with torch.no_grad():
        return (whole(tokens) - cut(tokens)).abs().max().item()


def test_logits_of_a_row_that_is_cut_are_those_of_the_row(ranks) -> None:
    assert ranks(1).run(logits_of_a_row) == [pytest.approx(0, abs=1e-14)]


def test_a_row_is_cut_only_on_request_and_where_its_halves_can_be_told_apart() -> None:
    def halves(
        rows: int = 1, seq: int = 8, shape: Shape = Shape(x=2), packed: bool = False, **options: object
    ) -> Halves:
        model = {key: options.pop(key) for key in ("dropout",) if key in options}
        policy = Policy(**{"overlap": Overlap(halves=2), **options})  # type: ignore[arg-type]
        return halves_of(replace(CONFIGS["gpt"], **model), shape, policy, rows, seq, 4, packed=packed, alike=True)

    assert halves().number == 2
    for reason, options in {
        "only if the policy says halves=2": dict(overlap=Overlap()),
        "it has one token": dict(seq=1),
        "places share it": dict(shape=Shape(x=2, z=2, context=2)),
        "it has packed documents": dict(packed=True),
        "attention drops weights, whose mask is that of whole rows": dict(dropout=0.1),
        "recompute=attention runs the attention of a half again by itself": dict(recompute="attention"),
    }.items():
        assert halves(**options) == (1, f"1 row is not cut: {reason}")
        assert "overlap" in options or halves(**options, rows=2).number == 2


def test_halves_are_chosen_where_messages_are_worth_hiding() -> None:
    large = 2 * WORTH_HIDING_NBYTES
    assert choose_halves(Policy(), 8, large, "").number == 2
    assert choose_halves(Policy(), 8, large - 2, "") == (
        1,
        f"messages over x or y, or to experts, of at most {large - 2} bytes are too small to be cut",
    )
    assert choose_halves(Policy(), 8, 0, "").reason == "nothing is sent over x or y, or to experts"
    assert choose_halves(Policy(overlap=Overlap(halves=2)), 2, 0, "").number == 2


# --- each mechanism, from the order of launches, waits and products


def events_of(shape: Shape, overlap: Overlap, steps: int = 3, **options: object) -> list[Event]:
    """What the host did in the last of some steps, the optimizer's of the one before included."""
    grid = grid_of(shape)
    policy = Policy(overlap=overlap, bucket_bytes=4000, **options)
    model = ff.models.build(CONFIGS["gpt"], grid, policy=policy)
    optimizer = ff.optim.AdamW(model, lr=1e-3)
    rows = ff.local_rows(torch.arange(32 * grid.size("z") * grid.size("data")).view(-1, 8) % 48, grid)
    for _ in range(steps):
        with grid.ledger.events() as events:
            model(rows, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    return events


def flights(events: list[Event], op: str, axis: str, label: str) -> list[list[str]]:
    """The products that ran while each of these collectives was in flight."""
    found: list[list[str]] = []
    for at, (kind, what) in enumerate(events):
        if kind == "launch" and isinstance(what, Collective) and (what.op, what.axis, what.label) == (op, axis, label):
            end = next(i for i in range(at, len(events)) if events[i].kind == "wait" and events[i].what is what)
            found.append([str(event.what) for event in events[at:end] if event.kind == "product"])
    return found


def behind(ranks, shape: Shape, overlap: Overlap, op: str, axis: str, label: str, **options: object) -> list[list[str]]:
    found = [flights(events, op, axis, label) for events in all_events(ranks, shape, overlap, tuple(options.items()))]
    assert found[0]
    assert all(other == found[0] for other in found)  # every rank launches and waits in the same order
    return found[0]


@cache
def all_events(ranks, shape: Shape, overlap: Overlap, options: tuple[tuple[str, object], ...]) -> list[list[Event]]:
    """Return the events of every rank. Several collectives are looked up in the events of one run."""
    return ranks(shape.world).run(run_events, shape, overlap, dict(options))


def run_events(shape: Shape, overlap: Overlap, options: dict) -> list[Event]:
    return events_of(shape, overlap, **options)


ALONE = replace(Overlap.off(), joint_bytes=0)


def test_prefetch_gathers_a_weight_behind_the_product_before_it(ranks) -> None:
    grid, label = Shape(z=2), "layers.1.mlp.down"
    assert behind(ranks, grid, ALONE, "all_gather", "z", label) == [[], []]
    forward, backward = behind(ranks, grid, replace(ALONE, prefetch=True), "all_gather", "z", label)
    assert "E1 layers.1.mlp.up" in forward
    assert "E2 head" in backward
    again = behind(ranks, grid, replace(ALONE, prefetch=True), "all_gather", "z", label, recompute="block")
    assert len(again) == 3
    assert all(again)


def test_defer_reduces_dw_behind_the_products_after_it(ranks) -> None:
    grid, label = Shape(z=2), "layers.1.mlp.down"
    assert behind(ranks, grid, ALONE, "reduce_scatter", "z", label) == [[]]
    ((*products,),) = behind(ranks, grid, replace(ALONE, defer=True), "reduce_scatter", "z", label)
    assert "E2 layers.1.mlp.up" in products


def joint_and_apart(shape: Shape, options: dict) -> list[list[Collective]]:
    """The messages over z of a step, with small ones that travel together and without."""
    both = [events_of(shape, replace(Overlap(), joint_bytes=joint), **options) for joint in (16 << 20, 0)]
    return [
        [what for kind, what in events if kind == "launch" and isinstance(what, Collective) and what.axis == "z"]
        for events in both
    ]


@pytest.mark.parametrize("options", others_slow([{"recompute": "block"}, {}, {"keep_weights": True}], 2), ids=str)
def test_small_messages_over_z_travel_together(ranks, options: dict) -> None:
    """In all the same bytes, in messages of about the size of the largest weight, but for the last ones of a pass."""
    found = ranks(2).run(joint_and_apart, Shape(z=2), options)
    assert found[0] == found[1]
    joint, apart = found[0]
    for op in ("all_gather", "reduce_scatter"):
        sizes, single = ([each.nbytes for each in records if each.op == op] for records in (joint, apart))
        assert sum(sizes) == sum(single)
        assert len(sizes) < 0.6 * len(single)
        assert sum(size < max(single) // 2 for size in sizes) <= 2
        assert max(sizes) < 2 * max(single)
    assert "layers.0.attention_norm .. layers.0.mlp.up" in [each.label for each in joint]


def test_dw_is_found_behind_the_collective_that_da_needs(ranks) -> None:
    grid, label = Shape(x=2), "layers.1.mlp.up"
    assert behind(ranks, grid, ALONE, "reduce_scatter", "x", label) == [[]]
    ((*products,),) = behind(ranks, grid, replace(ALONE, wgrad_behind_messages=True), "reduce_scatter", "x", label)
    assert any(product.startswith("E3") for product in products)
    reread = behind(ranks, grid, replace(ALONE, wgrad_behind_messages=True), "all_gather", "x", label)[1]
    assert "E2 layers.1.mlp.up" in reread


def test_halves_run_behind_each_other_in_forward_and_backward(ranks) -> None:
    grid = Shape(x=2)
    for op, label, equations in (
        ("all_gather", "layers.1.mlp.up", ["E1", "E1", "E2", "E2"]),  # twice more for dw
        ("reduce_scatter", "layers.1.mlp.up", ["E2", "E2"]),
        ("reduce_scatter", "layers.0.mlp.down", ["E1", "E1"]),
        ("all_gather", "layers.0.mlp.down", ["E2", "E2"]),
    ):
        found = behind(ranks, grid, Overlap(halves=2), op, "x", label)
        for equation, products in zip(equations, found, strict=True):
            assert any(product.startswith(equation) for product in products), (op, label, found)
    assert behind(ranks, Shape(y=2), Overlap(halves=2), "reduce_scatter", "y", "layers.1.mlp.up")[0]


def test_buckets_travel_over_data_while_backward_goes_on(ranks) -> None:
    grid = Shape(data=2)
    events = ranks(2).run(run_events, grid, replace(ALONE, reduce_early=True), {})[0]
    first = next(
        event.what
        for event in events
        if event.kind == "launch" and event.what.axis == "data" and "gradients" in event.what.label
    )
    assert flights(events, "all_reduce", "data", first.label)[0]
    off = ranks(2).run(run_events, grid, ALONE, {})[0]
    assert not any(flights(off, "all_reduce", "data", first.label))


def stepped(overlap: Overlap) -> tuple[bool, bool, list[Event]]:
    """Whether parameters are on their way after a step; what who reads them then gets; the next forward's events."""
    grid = grid_of(Shape(data=2))
    policy = Policy(overlap=overlap, shard_optimizer=True, bucket_bytes=4000)
    model = ff.models.build(CONFIGS["gpt"], grid, policy=policy)
    optimizer = ff.optim.AdamW(model, lr=1e-2)
    rows = ff.local_rows(torch.arange(32).view(4, 8), grid)
    for _ in range(3):
        with grid.ledger.events() as events:
            loss = model(rows, rows)
        loss.backward()
        before = [p.full_tensor().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    on_the_way = any(isinstance(p._local_tensor, LazyTensor) for p in model.parameters())
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    read = [p.full_tensor() for p in model.parameters()]
    changed = all(not torch.equal(a, b) for a, b in zip(before, read, strict=True) if a.dim() > 1)
    equal = all(torch.equal(a, b) for a, b in zip(after.values(), read, strict=False))
    return on_the_way, changed and equal, events


def test_stepped_parameters_travel_behind_the_next_forward_and_are_never_stale(ranks) -> None:
    with_overlap, without = (ranks(2).run(stepped, overlap) for overlap in (Overlap(), Overlap.off()))
    assert [found[:2] for found in with_overlap] == [(True, True)] * 2
    assert [found[:2] for found in without] == [(False, True)] * 2
    waits = [
        i for i, (kind, what) in enumerate(with_overlap[0][2]) if kind == "wait" and what.label.startswith("parameters")
    ]
    products = [i for i, (kind, _) in enumerate(with_overlap[0][2]) if kind == "product"]
    assert waits[-1] > products[0]  # the last bucket was still on its way when the first product ran


# --- bounds


def most_in_flight(bytes_in_flight: int | None) -> tuple[int, int]:
    """The most bytes of gathers over z in flight at once, and the largest gather."""
    events = events_of(Shape(z=2), Overlap(bytes_in_flight=bytes_in_flight))
    now = most = largest = 0
    for kind, what in events:
        if isinstance(what, Collective) and what.op == "all_gather":
            now += what.nbytes if kind == "launch" else -what.nbytes
            most, largest = max(most, now), max(largest, what.nbytes)
    return most, largest


def test_bytes_in_flight_are_bounded(ranks) -> None:
    for bound in (None, 20_000, 1):
        most, largest = ranks(2).run(most_in_flight, bound)[0]
        # what is waited for now, and ahead of it as much as the bound says, or one message where that is less
        assert largest < most <= largest + max(2 * largest if bound is None else bound, largest)


class Reduction:
    """A reduction that arrives at once; whoever refers to it keeps its gradients in memory."""

    nbytes, alike = 8, None

    def __init__(self, used: list[int]) -> None:
        self.use = used.append

    def launch(self, *behind: Reduction) -> list[Pending[int]]:
        return [Pending(lambda: 1) for _ in (self, *behind)]


@pytest.mark.parametrize("joint", [0, 16, 1000])
def test_gradients_are_freed_when_their_reduction_is_launched_and_all_are_used(joint: int) -> None:
    used: list[int] = []
    deferred = DeferredReductions(Overlap(bytes_in_flight=64, joint_bytes=joint))
    made = []
    for _ in range(11):
        reduction = Reduction(used)
        made.append(weakref.ref(reduction))
        deferred.defer(reduction)
        del reduction
    alive = sum(each() is not None for each in made)
    assert alive == len(deferred._held) < 4
    assert len(used) >= 3  # no more than 64 bytes are in flight
    deferred.wait_all()
    assert len(used) == 11


def buffers_made() -> list[int]:
    grid = grid_of(Shape(z=2))
    model = ff.models.build(replace(CONFIGS["gpt"], layers=8), grid)
    rows = ff.local_rows(torch.arange(32).view(4, 8), grid)
    made = []
    for _ in range(4):
        model(rows, rows).backward()
        model.zero_grad()
        made.append(model.engine.buffers.made)
    return made


def test_buffers_of_gathered_weights_are_used_again(ranks) -> None:
    """The layers' own ones for good; the few that only the ends of the model use are made again in every pass."""
    _, second, third, fourth = ranks(2).run(buffers_made)[0]
    assert fourth - third == third - second < 16


# --- faults


def fail_midway(how: str) -> None:
    """A rank that dies, or falls asleep, while others have collectives in flight."""
    grid = Grid(z=2, timeout=timedelta(seconds=1))
    model = ff.models.build(CONFIGS["gpt"], grid)
    rows = ff.local_rows(torch.arange(32).view(4, 8), grid)
    for _ in range(2):  # from then on ranks expect the passes of the others, and meet in no store before them
        model(rows, rows).backward()
    loss = model(rows, rows)
    if grid.rank == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
    loss.backward()


@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_a_rank_that_does_not_come_ends_in_an_error_that_names_the_collective(how: str) -> None:
    pool = Ranks(2)
    with pytest.raises(RankFailed) as failure:
        pool.run(fail_midway, how, timeout=30)
    assert re.search(r"collective failed: \w+\[z\] [\w.+]+( \.\. [\w.+]+)?: ", str(failure.value.errors[0]))
