"""The price of a pipeline: stages one by one and then the schedule, against all ranks' programs played together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import fourfold as ff
from fourfold.axes import PIPE
from fourfold.planner.machine import LinkSpeed, Machine, Seconds, load_machine
from fourfold.planner.price import Candidate, Task, beside_messages, price
from fourfold.planner.program import LaunchOp, Program, WaitOp
from fourfold.planner.simulate import Simulation
from fourfold.planner.step_program import step_program
from fourfold.policy import Overlap, Policy
from fourfold.schedule.named import named
from fourfold.schedule.play import play
from fourfold.schedule.stages import Stages
from fourfold.shape import Shape


class Together:
    """Players of the programs of all pipe ranks: whoever waits for a message waits for the player that sends it."""

    def __init__(self, programs: Sequence[Program], seconds: Seconds, dtype: str) -> None:
        self.programs, self.seconds = programs, seconds
        self.players = [Simulation(seconds, dtype, trace=False) for _ in programs]
        self.at = [0] * len(programs)
        self.arrivals: dict[tuple[str, int], float] = {}
        """When a message arrives, by its label and how many of that label were sent before."""
        self.free: dict[int, float] = {}
        self.met: dict[int, list[float]] = {}
        self.sums = [0] * len(programs)
        self.flights: list[dict[int, object]] = [{} for _ in programs]

    def seconds_of_step(self) -> float:
        able = deque(range(len(self.programs)))
        while able:
            before = list(self.at)
            for rank in list(able):
                self.advance(rank)
            able = deque(rank for rank in able if self.at[rank] < len(self.programs[rank].work))
            assert not able or self.at != before, "the players wait for each other forever"
        for player in self.players:
            player.finish()
        return max(max(player.now, player.links.now) for player in self.players)

    def advance(self, rank: int) -> None:
        """Play a rank until it waits for something that another has not sent."""
        player, work = self.players[rank], self.programs[rank].work
        while self.at[rank] < len(work):
            item = work[self.at[rank]]
            if isinstance(item, LaunchOp) and item.record.axis == PIPE:
                self.launch(rank, item)
            elif isinstance(item, WaitOp) and item.flight in self.flights[rank]:
                landed = self.landed(rank, item.flight)
                if landed is None:
                    return
                player.now = max(player.now, landed)
            else:
                player.play(item, "")
            self.at[rank] += 1

    def launch(self, rank: int, item: LaunchOp) -> None:
        player, record = self.players[rank], item.record
        if record.op == "send":
            cost = self.seconds.transfer(record)
            player._compute(cost.host)
            begin = max(player.now, self.free.get(rank, 0.0))
            self.free[rank] = begin + cost.fixed + cost.moving
            self.arrivals[self.key(rank, record.label, sends=True)] = self.free[rank]
        elif record.op == "receive":
            self.flights[rank][item.flight] = self.key(rank, record.label, sends=False)
        else:
            number = self.sums[rank]
            self.sums[rank] += 1
            self.met.setdefault(number, []).append(player.now + self.seconds.collective(record))
            self.flights[rank][item.flight] = number

    def key(self, rank: int, label: str, *, sends: bool) -> tuple[str, int]:
        """Both ends of a tied table send under one label."""
        both = label.startswith("gradient")
        return label, (rank if sends else len(self.programs) - 1 - rank) if both else 0

    def landed(self, rank: int, flight: int) -> float | None:
        what = self.flights[rank][flight]
        if isinstance(what, int):
            return max(self.met[what]) if len(self.met[what]) == len(self.programs) else None
        return self.arrivals.get(what)  # type: ignore[arg-type]


def together(task: Task, candidate: Candidate) -> float:
    programs = [
        step_program(candidate.sizes(task, pipe_rank=rank), micro_steps=candidate.micro_steps)
        for rank in range(candidate.shape.pipe)
    ]
    return Together(programs, task.seconds_on(candidate), task.dtype).seconds_of_step()


GPT = ff.models.config("gpt-5b", layers=16)
LLAMA = ff.models.config("llama-3-8b", layers=16)
# Simulated alone, a stage begins with a host that has issued nothing; in a step the host is ahead. So the two levels
# differ where the host is late, and here it never is.
H100 = replace(load_machine("dgx-h100"), name="H100 with a host that is never late", host={})
SLOW = load_machine("perlmutter")


def bf16(**policy) -> Policy:
    return Policy(compute_dtype=torch.bfloat16, **policy)


CASES = [
    (GPT, H100, Shape(pipe=4), bf16(), 8),
    (GPT, H100, Shape(pipe=8), bf16(schedule="zb-h1"), 16),
    (LLAMA, H100, Shape(pipe=4), bf16(stages=Stages.even(16, 4, 2)), 8),
    (LLAMA, H100, Shape(pipe=4), bf16(stages=Stages.even(16, 4, 2, "wave"), schedule="found"), 8),
    (LLAMA, H100, Shape(pipe=4), bf16(stages=Stages((0, 6, 11, 16, 18), (0, 1, 2, 3)), recompute="block"), 8),
    (LLAMA, H100, Shape(x=2, pipe=4), bf16(schedule="zb-h1"), 8),
    (LLAMA, SLOW, Shape(x=4, pipe=4), bf16(overlap=Overlap(halves=1)), 8),
    (LLAMA, H100, Shape(z=2, pipe=4), bf16(), 8),
    (GPT, SLOW, Shape(data=4, pipe=4), bf16(shard_optimizer=True), 8),
    (GPT, SLOW, Shape(x=4, data=2, pipe=4), bf16(shard_optimizer=True), 4),
]


@pytest.mark.parametrize(("config", "machine", "shape", "policy", "micro_steps"), CASES, ids=lambda one: str(one)[:20])
def test_two_levels_agree_with_all_ranks_together(
    config: ff.models.ModelConfig, machine: Machine, shape: Shape, policy: Policy, micro_steps: int
) -> None:
    task = Task(config, machine, 2 * micro_steps * shape.places, 2048)
    candidate = Candidate(shape, policy, 2, micro_steps)
    assert price(task, candidate).seconds == pytest.approx(together(task, candidate), rel=0.03)


def test_actions_beside_messages_are_counted_once() -> None:
    seconds = {"F": [1.0, 1.0], "B": [1.0, 1.0], "W": [1.0, 1.0]}
    played = play(named("1f1b", 2, 1, 2), seconds, 0.5)
    beside = beside_messages(played, 0.5, waiting=False)
    # rank 0: F0 alone, F1 beside F0's message; rank 1: each F beside a message, which arrives or leaves
    assert beside["F", 0] == pytest.approx(0.25)
    assert beside["F", 1] == pytest.approx(0.5)


def test_a_receive_that_waits_counts_on_a_gpu() -> None:
    seconds = {"F": [1.0] * 4, "B": [1.0] * 4, "W": [1.0] * 4}
    waits = {}
    for name in ("1f1b", "zb-h1"):
        played = play(named(name, 4, 1, 8), seconds, 1e-3)
        quick, slow = (sum(beside_messages(played, 1e-3, waiting=waiting).values()) for waiting in (False, True))
        waits[name] = slow - quick
        assert quick < 0.05
    # a rank of 1F1B mostly waits for what it receives; beside W it computes while a receive waits
    assert waits["zb-h1"] > 2 * waits["1f1b"]


def test_computation_is_slower_beside_messages_between_stages() -> None:
    slow_links = replace(H100, inside={group: LinkSpeed(2e9, 1e-6) for group in H100.inside}, name="slow links")
    candidate = Candidate(Shape(pipe=4), bf16(schedule="zb-h1"), 2, 8)
    plain, slower = (
        price(Task(GPT, replace(slow_links, contention=contention, name=f"{contention}"), 16, 2048), candidate)
        for contention in (1.0, 2.0)
    )
    assert 1.02 * plain.seconds < slower.seconds < 2 * plain.seconds
    assert slower.totals.compute > 1.02 * plain.totals.compute
