"""Law 5: bad input gets an error with the rule, the values and the way out, on every rank, never a hang."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import fourfold as ff
from fourfold import comm
from fourfold.grid import Grid, Shape
from harness import RankFailed, grid_of

TINY = ff.models.config("gpt-tiny", layers=1, hidden=24, vocab=16, seq=8)


def refusal(attempt: Callable[[], object]) -> str:
    try:
        found = attempt()
    except ValueError as error:
        return str(error)
    return f"no error, but {found}"


def test_every_rank_raises_where_the_world_is_not_the_product(ranks) -> None:
    with pytest.raises(RankFailed) as failure:
        ranks(4).run(ask_for_6_ranks)
    errors = failure.value.errors
    assert sorted(errors) == [0, 1, 2, 3]
    assert {type(error) for error in errors.values()} == {ValueError}
    assert {str(error) for error in errors.values()} == {
        "Grid(x=3 z=2): x*y*z*data*pipe = 3*1*2*1*1 = 6, but this job has 4 ranks; "
        "start 6 ranks or choose sizes whose product is 4"
    }


def ask_for_6_ranks() -> None:
    Grid(x=3, z=2, device="cpu")


def test_ranks_that_disagree_on_the_grid_are_named_on_all_ranks(ranks) -> None:
    found = ranks(4).run(disagree_on_grids)
    assert all(messages == found[0] for messages in found)
    sizes, order, product, size, after = found[0]
    assert sizes == (
        "ranks disagree on the grid: rank 0 has 'x=4 on cpu', rank 1 has 'x=2 y=2 on cpu' "
        "(ranks unlike rank 0: 1); give every rank the same"
    )
    assert (
        "rank 0 has 'x=2 z=2 on cpu', rank 2 has 'x=2 z=2 order=z,x,y,data on cpu' (ranks unlike rank 0: 2, 3)" in order
    )
    assert "ranks unlike rank 0: 3" in product
    assert "3*1*1*1*1 = 3, but this job has 4 ranks" in product
    assert "ranks unlike rank 0: 1, 2, 3" in size
    assert "grid axis x=0: the size of an axis is a whole number from 1 up" in size
    assert after == [0, 1, 2, 3]


def disagree_on_grids() -> list:
    rank = dist.get_rank()
    slow = ("x", "y", "z", "data") if rank < 2 else ("z", "x", "y", "data")
    messages = [
        refusal(lambda: Grid(x=2, y=2, device="cpu") if rank == 1 else Grid(x=4, device="cpu")),
        refusal(lambda: Grid(x=2, z=2, order=slow, device="cpu")),
        refusal(lambda: Grid(x=3 if rank == 3 else 4, device="cpu")),
        refusal(lambda: Grid(x=0 if rank == 0 else 4, device="cpu")),
    ]
    # nobody is left behind: the next grid works
    gathered = comm.all_gather(torch.tensor([rank]), Grid(x=4, device="cpu"), "x").wait()
    return [*messages, gathered.tolist()]


def test_ranks_that_disagree_on_the_model_are_named_on_all_ranks(ranks) -> None:
    found = ranks(4).run(disagree_on_models)
    assert all(messages == found[0] for messages in found)
    size, seed, policy, dtype = found[0]
    for message in found[0]:
        assert message.startswith("ranks disagree on the model: rank 0 has ")
        assert message.endswith("give every rank the same")
    assert "ranks unlike rank 0: 3)" in size
    assert "vocab=16" in size
    assert "vocab=17" in size
    assert "ranks unlike rank 0: 1)" in seed
    assert "seed=0" in seed
    assert "seed=5" in seed
    assert "ranks unlike rank 0: 2)" in policy
    assert "ranks unlike rank 0: 2, 3)" in dtype


def disagree_on_models() -> list[str]:
    grid = grid_of(Shape(x=4))
    rank = grid.rank
    vocab = 17 if rank == 3 else 16
    policy = ff.Policy("replicated" if rank == 2 else "sharded")
    dtype = torch.float32 if rank < 2 else torch.float64
    return [
        refusal(lambda: ff.models.build(dataclasses.replace(TINY, vocab=vocab), grid)),
        refusal(lambda: ff.models.build(TINY, grid, seed=5 if rank == 1 else 0)),
        refusal(lambda: ff.models.build(TINY, grid, policy=policy)),
        refusal(lambda: ff.models.build(TINY, grid, dtype=dtype)),
    ]


def test_a_model_unknown_on_one_rank_is_refused_on_all(ranks) -> None:
    ranks(4).run(os.getpid)  # started before the clock is
    messages = ranks(4).run(misname_on_rank_1, timeout=30)
    assert all("'gpt-tny'" in message for message in messages), messages


def misname_on_rank_1() -> str:
    grid = grid_of(Shape(x=4))
    return refusal(lambda: ff.models.build("gpt-tny" if grid.rank == 1 else "gpt-tiny", grid))


WIDE = {"hidden": 50, "heads": 60, "kv_heads": 60, "mlp_hidden": 60}
GROUPED = {"heads": 6, "kv_heads": 2, "head_dim": 6}
INDIVISIBLE = [
    # grid, mode, sizes, what does not divide, by what, a multiple, some grids that fit and some that do not
    (Shape(y=4), "sharded", WIDE, "hidden=50", "y=4", 52, ["y=2 z=2"], ["y=4"]),
    (Shape(y=4), "replicated", WIDE, "hidden=50", "y=4", 52, ["y=2 z=2"], ["y=4"]),
    (Shape(x=2, y=2), "sharded", {"mlp_hidden": 54}, "mlp_hidden=54", "x*y=2*2", 56, ["x=2 z=2"], ["x=2 y=2", "x=4"]),
    (Shape(x=4), "replicated", {"mlp_hidden": 54}, "mlp_hidden=54", "x=4", 56, ["y=4", "x=2 z=2"], ["x=4"]),
    (Shape(x=2, y=2), "sharded", GROUPED, "heads=6", "x*y=2*2", 8, ["y=2 z=2"], ["x=2 y=2", "x=4"]),
    (Shape(x=4), "replicated", GROUPED, "heads=6", "x=4", 8, ["z=4", "x=2 z=2"], ["x=4"]),
    (
        Shape(x=4),
        "sharded",
        {"kv_heads": 3, "head_dim": 2},
        "kv_heads*head_dim=6",
        "x=4",
        8,
        ["z=4", "x=2 z=2"],
        ["x=4"],
    ),
    (
        Shape(x=4),
        "replicated",
        {"kv_heads": 3, "head_dim": 2},
        "kv_heads*head_dim=6",
        "x=4",
        8,
        ["z=4", "x=2 z=2"],
        ["x=4"],
    ),
]


@pytest.mark.parametrize("case", INDIVISIBLE)
def test_a_model_that_does_not_divide_is_refused_with_a_way_out(case) -> None:
    shape, mode, sizes, what, axes, multiple, fits, misfits = case
    config = ff.models.config("gpt-tiny", **sizes)
    policy = ff.Policy(mode)
    with pytest.raises(ValueError, match=f"{mode} activations") as error:
        config.check(shape, policy)
    message = str(error.value)
    name = what.split("=")[0]
    assert message.startswith(f"{what} is not divisible by {axes} on the grid {shape} ")
    assert message.endswith(f"; or build a model with {name}={multiple}")
    offered = message.split("ranks that fit: ")[1].split("; ")
    assert set(fits) <= set(offered)
    assert not set(misfits) & set(offered)
    if name in sizes:
        dataclasses.replace(config, **{name: multiple}).check(shape, policy)


def test_what_is_whole_over_y_in_replicated_mode_need_not_divide_by_it() -> None:
    config = ff.models.config("gpt-tiny", heads=6, kv_heads=6, mlp_hidden=54)
    config.check(Shape(x=2, y=2), ff.Policy("replicated"))
    with pytest.raises(ValueError, match="heads=6 is not divisible by x"):
        config.check(Shape(x=2, y=2), ff.Policy("sharded"))


def test_every_rank_refuses_what_does_not_divide(ranks) -> None:
    found = ranks(4).run(ask_for_what_does_not_divide)
    assert all(messages == found[0] for messages in found)
    *models, expand, contract, rows, nothing = found[0]
    for message, (_, _, _, what, axes, multiple, _, _) in zip(models, INDIVISIBLE, strict=True):
        assert message.startswith(f"{what} is not divisible by {axes}")
        assert message.endswith(f"={multiple}")
    assert expand.startswith("Expand: in_features=101 is not divisible by y = 2; pad it to 102 or choose y from 1, 101")
    assert contract.startswith(
        "Contract: in_features=6 is not divisible by x*y = 2*2; pad it to 8 or choose x*y from 1"
    )
    assert rows == ("a batch of 6 rows cannot be cut over data*z = 2*2; use a multiple of 4 rows, such as 8")
    assert nothing.startswith("a batch of 0 rows cannot be cut over data*z = 2*2; use a multiple of 4 rows, such as 4")


def ask_for_what_does_not_divide() -> list[str]:
    messages = []
    for shape, mode, sizes, *_ in INDIVISIBLE:
        config = ff.models.config("gpt-tiny", **sizes)
        messages.append(refusal(lambda: ff.models.build(config, grid_of(shape), policy=ff.Policy(mode))))  # noqa: B023
    square = grid_of(Shape(x=2, y=2))
    messages.append(refusal(lambda: ff.nn.Expand(square, ff.Policy(), 101, 64)))
    messages.append(refusal(lambda: ff.nn.Contract(square, ff.Policy(), 6, 64)))
    places = grid_of(Shape(z=2, data=2))
    messages.append(refusal(lambda: ff.local_rows(torch.zeros(6, 8), places)))
    messages.append(refusal(lambda: ff.local_rows(torch.zeros(0, 8), places)))
    return messages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 24, "kv_heads": 5}, "heads=24 is not divisible by kv_heads=5"),
        ({"layers": 0}, "layers=0 must be at least 1"),
        ({"norm": "batch"}, "norm='batch' is none of ('layer', 'rms')"),
        ({"mlp": "relu"}, "mlp='relu' is none of ('gelu', 'swiglu')"),
        ({"positions": "rotary"}, "positions='rotary' is none of ('learned', 'rope')"),
        ({"positions": "rope", "head_dim": 3}, "head_dim=3 must be even for rotary positions"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
    ],
)
def test_a_config_refuses_what_no_model_has(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        ff.models.config("gpt-tiny", **changes)


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"no model 'llama-3-8B' \(did you mean 'llama-3-8b'\?\); there are gpt-tiny, "
    ):
        ff.models.build("llama-3-8B", Grid.alone("cpu"))


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"a model has no 'hiden' \(did you mean 'hidden'\?\); it has layers, hidden, "
    ):
        ff.models.config("gpt-tiny", hiden=64)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="activation"):
        ff.Policy(activation="sharded")
    with pytest.raises(TypeError, match="w"):
        Grid(w=2)
    with pytest.raises(TypeError, match="sed"):
        ff.models.build(TINY, Grid.alone("cpu"), sed=3)
    with pytest.raises(ValueError, match=r"activations='shraded' is none of \('sharded', 'replicated'\)"):
        ff.Policy(activations="shraded")


IDS = torch.zeros(2, 8, dtype=torch.int64)


def with_id(value: int) -> torch.Tensor:
    return IDS.index_put((torch.tensor(1), torch.tensor(7)), torch.tensor(value))


@pytest.mark.parametrize(
    ("tokens", "targets", "message"),
    [
        (with_id(16), IDS, "token ids from 0 to 16: all must be at least 0 and below vocab=16"),
        (with_id(-1), IDS, "token ids from -1 to 0: all must be at least 0 and below vocab=16"),
        (with_id(-100), IDS, "token ids from -100 to 0: all must be at least 0 and below vocab=16"),
        (with_id(16), None, "token ids from 0 to 16: all must be at least 0 and below vocab=16"),
        (IDS, with_id(16), "target ids from 0 to 16: all must be at least 0 and below vocab=16"),
        (IDS, with_id(-1), "target ids from -1 to 0: all must be at least 0 and below vocab=16"),
        (IDS[0], IDS[0], "tokens has shape (8,); it must be [rows, seq]"),
        (IDS[None], IDS[None], "tokens has shape (1, 2, 8); it must be [rows, seq]"),
        (IDS, IDS[:, :7], "targets (2, 7) and tokens (2, 8) differ in shape"),
        (IDS[:0], IDS[:0], "tokens has shape (0, 8); it must be [rows, seq] with at least one of each"),
        (IDS[:, :0], None, "tokens has shape (2, 0); it must be [rows, seq] with at least one of each"),
        (IDS.repeat(1, 2), None, "a sequence of 16 tokens is longer than the 8 learned positions; shorten it or build"),
    ],
)
def test_a_model_refuses_a_bad_batch(tiny_model, tokens, targets, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        tiny_model(tokens, targets)


def test_a_model_takes_the_outermost_ids_and_masked_targets(tiny_model) -> None:
    assert tiny_model(with_id(15), with_id(15)).isfinite()
    assert tiny_model(IDS, with_id(-100)).isfinite()


@pytest.fixture(scope="module")
def tiny_model() -> ff.models.Transformer:
    return ff.models.build(TINY, Grid.alone("cpu"))


def test_gradients_of_something_else_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="Linear is not a Fourfold model: it has no layer on a grid"),
        ff.accumulate(torch.nn.Linear(2, 2)),
    ):
        pass


def test_a_norm_of_gradients_still_owed_is_refused(ranks) -> None:
    for message in ranks(4).run(clip_what_is_owed):
        assert message.startswith("gradients are not summed over ranks yet")
        assert "run the last micro-step's backward() outside of ff.accumulate" in message


def clip_what_is_owed() -> str:
    model = ff.models.build(TINY, grid_of(Shape(data=4)))
    with ff.accumulate(model):
        model(IDS, IDS).backward()
    try:
        ff.clip_grad_norm_(model.parameters(), 1.0)
    except RuntimeError as error:
        return str(error)
    return "no error"


def give_one_place_a_bad_batch() -> list[str]:
    """Places z=0 and z=1, two ranks each; what is wrong is wrong at z=1 alone."""
    grid = grid_of(Shape(x=2, z=2))
    model = ff.models.build("gpt-tiny", grid)
    good = torch.arange(16).view(2, 8)
    wrong = [good + 1000, good.float(), torch.zeros(2, 200, dtype=torch.long), good[0], good[:0]]
    found = []
    for bad in wrong:
        tokens = bad if grid.coords["z"] == 1 else good
        found.append(refusal(lambda: model(tokens, tokens)))  # noqa: B023
        found.append(refusal(lambda: model(tokens)))  # noqa: B023
    found.append(refusal(lambda: model(good, good + (1000 if grid.coords["z"] == 1 else 0))))
    model(good, good).backward()
    return found


def test_every_rank_hears_of_a_bad_batch_at_one_place(ranks) -> None:
    rules = ["below vocab=257", "torch.int64", "learned positions", "[rows, seq]", "[rows, seq]"]
    expected = [rule for rule in rules for _ in range(2)] + ["below vocab=257"]
    found = ranks(4).run(give_one_place_a_bad_batch)
    for rank in (2, 3):
        assert all(rule in message for rule, message in zip(expected, found[rank], strict=True)), found[rank]
    for rank in (0, 1):
        assert all("another place" in message for message in found[rank])


def read_other_rows(**policy: bool) -> list[str]:
    grid = grid_of(Shape(x=2, y=2))
    model = ff.models.build("gpt-tiny", grid, policy=ff.Policy(**policy))
    tokens = torch.arange(16).view(2, 8)
    found = [refusal(lambda: model(tokens + grid.rank // 3, tokens))]  # the last rank alone
    if policy:
        found.append(refusal(lambda: model(tokens, tokens + grid.rank)))
    model(tokens, tokens)
    return found


def test_ranks_of_one_place_must_read_the_same_rows(ranks) -> None:
    """In the first call; in every call with check_inputs."""
    for messages in ranks(4).run(read_other_rows) + ranks(4).run(partial(read_other_rows, check_inputs=True)):
        assert all("given different rows" in message for message in messages)


def test_mixed_precision_is_a_policy() -> None:
    model = ff.models.build("gpt-tiny", Grid.alone("cpu"))
    tokens = torch.arange(8).view(1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="Policy\\(compute_dtype="):
        model(tokens, tokens)
    with pytest.raises(ValueError, match="parameter of a Fourfold module"):
        plain = torch.nn.Linear(2, 2)
        plain(torch.ones(2)).sum().backward()
        ff.clip_grad_norm_(plain.parameters(), 1.0)
