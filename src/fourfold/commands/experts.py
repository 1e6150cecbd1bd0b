"""`fourfold experts show | place`: how evenly a run uses its experts, and where they should be.

Both read what the run has recorded about its last steps. `place` writes a new run's folder with a renumbered copy of
the newest checkpoint, from which training goes on as it would have.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fourfold.atomic import AtomicFolder
from fourfold.checkpoint.format import read_record
from fourfold.checkpoint.load import CHECKPOINTS, find_checkpoint
from fourfold.checkpoint.renumber import renumber
from fourfold.commands.output import show_document
from fourfold.expert_counts import COMPANIONS, COUNTS, StepCounts, read_companions, read_counts
from fourfold.expert_placement import ExpertRanks, cost_of, place
from fourfold.models.config import ModelConfig
from fourfold.report.plan_text import coloured
from fourfold.report.units import aligned, nbytes, percent, plural
from fourfold.train.checkpoints import PASSED_OVER
from fourfold.train.config import DTYPES, SCHEDULE_FILE, TrainConfig, read_config
from fourfold.train.progress import percent_of

RECENT_STEPS = 100
"""Steps at the end of a run whose counts are read: the routers of the first steps are not those of later ones."""
IN_A_NODE = 8
"""Ranks along expert in a node, if nobody says how many: most machines have 8 devices in a node."""
BARS = " ▁▂▃▄▅▆▇█"
"""How a load is drawn, from none to that of the block's busiest expert."""
WIDEST_BAR = 64
"""Experts drawn in one line; blocks with more have several."""
UNEVEN = 2.0
"""The load of the busiest expert, as a multiple of the mean, from which a block is drawn in yellow."""


@dataclass(frozen=True, slots=True)
class ExpertsOfRun:
    """What a run has recorded about its experts in its last steps."""

    folder: Path
    config: TrainConfig
    model: ModelConfig
    steps: Sequence[int]
    blocks: Sequence[int]
    """The numbers of the blocks that have experts."""
    counts: Tensor
    """The pairs of each expert, [blocks, E]."""
    companions: Tensor | None
    """The tokens that chose both of two experts, [blocks, E, E]; None if they are not recorded."""

    @classmethod
    def read(cls, folder: Path) -> ExpertsOfRun:
        """Read the records of a run; raise ValueError if it has none, with the way to get them."""
        if not (folder / "config.toml").is_file():
            raise FileNotFoundError(f"{folder} has no config.toml, so it is no run's folder; give that of a mixture")
        config = read_config(folder / "config.toml")
        if config.model.is_own or not config.model.build().experts:
            raise ValueError(
                f"{folder}: the model {config.model.name} has no experts that are known; give the run of a mixture, "
                "such as one with --model moe-tiny"
            )
        model, found = config.model.build(), list(read_counts(folder, last=RECENT_STEPS))
        if not found:
            raise ValueError(
                f"{folder} has no counts of experts yet ({COUNTS}); train some steps: fourfold train --resume "
                f"{shlex.quote(str(folder))}"
            )
        blocks = [block for block in range(model.layers) if model.is_mixture(block)]
        _require_shape(folder, model, found[-1])
        counts = torch.tensor([one.by_block for one in found]).sum(0)[blocks]
        if int(counts.sum(1).min()) == 0:
            raise ValueError(f"{folder}: the experts of a block have had no token at all; train some more steps")
        companions = _companions(folder, config, model, blocks)
        return cls(folder, config, model, [one.step for one in found], blocks, counts, companions)

    def where(self, expert: int | None, node: int | None) -> ExpertRanks:
        """Return the ranks to place for: those that are given, else those of the run's grid."""
        number = expert or self.config.grid.expert
        if number == 1 and expert is None:
            raise ValueError(
                f"the grid of {self.folder} has no ranks along expert; say for how many to place: --expert 8 --node 4"
            )
        if number > self.model.experts:
            raise ValueError(f"{number} ranks along expert for {self.model.experts} experts; give at most as many")
        return ExpertRanks(number, node or (IN_A_NODE if number % IN_A_NODE == 0 else number))

    def place(self, where: ExpertRanks) -> Tensor:
        """Return the numbering that suits these ranks, [blocks, E]."""
        model = self.model
        return place(self.counts, self.companions, where, model.groups if model.top_groups < model.groups else 1)

    def costs(self, where: ExpertRanks, order: Tensor) -> dict[str, Any]:
        """Return what today's numbering and another one cost on these ranks."""
        model, today = self.model, torch.arange(self.model.experts).repeat(len(self.blocks), 1)
        tokens = (self.counts.sum(1) / len(self.steps) / model.top_k).tolist()
        item = DTYPES[self.config.policy.dtype].itemsize
        # to the experts and back, in forward and in backward; one way p and ids travel as well
        row = 4 * model.hidden * item + 4 * model.top_k * max(4, item)

        def load(by_block: list[float]) -> dict[str, Any]:
            return {"mean": fmean(by_block), "worst": max(by_block), "by_block": by_block}

        def entry(order: Tensor) -> dict[str, Any]:
            cost = cost_of(self.counts, self.companions, order, where)
            ranks = cost.ranks_of_a_token(model.top_k)
            rows = sum(many * each for many, each in zip(tokens, ranks, strict=True)) if ranks else None
            return {
                "rank_load": load(cost.rank_loads),
                "node_load": load(cost.node_loads),
                "ranks_of_a_token": fmean(ranks) if ranks else None,
                "bytes_between_nodes": None if rows is None else row * rows * (1 - 1 / where.nodes),
            }

        return {"expert": where.number, "node": where.per_node, "today": entry(today), "placed": entry(order)}


def _require_shape(folder: Path, model: ModelConfig, counts: StepCounts) -> None:
    """Raise unless the counts are those of the model."""
    found, wanted = (len(counts.by_block), len(counts.by_block[0])), (model.layers, model.experts)
    if found != wanted:
        raise ValueError(
            f"{folder / COUNTS} counts {found[1]} experts in {found[0]} blocks, and the model of config.toml has "
            f"{wanted[1]} in {wanted[0]}; they are of two runs: copy the folder again"
        )


def _companions(folder: Path, config: TrainConfig, model: ModelConfig, blocks: Sequence[int]) -> Tensor | None:
    """Return the companions in each block with experts, in the newest records."""
    every = config.log.companions_every
    found = list(read_companions(folder, max(1, RECENT_STEPS // every) if every else 1))
    if not found:
        return None
    sizes = model.layers, model.experts, model.experts
    if len(found[0].by_block) != prod(sizes):
        raise ValueError(
            f"{folder / COMPANIONS} has {len(found[0].by_block)} numbers in a record, and the model of config.toml "
            f"{' x '.join(map(str, sizes))}; they are of two runs: copy the folder again"
        )
    total = torch.stack([torch.tensor(one.by_block) for one in found]).sum(0).view(sizes)[blocks]
    return total if total.any() else None


def show(options: argparse.Namespace, _: object) -> int:
    """Show how evenly the run uses its experts, and what placing them would bring; return the exit code."""
    run = ExpertsOfRun.read(options.folder)
    document = _document(run)
    if options.expert or run.config.grid.expert > 1:
        where = run.where(options.expert, options.node)
        document["placement"] = run.costs(where, run.place(where))
    return show_document(document, _lines, options.json)


def _document(run: ExpertsOfRun) -> dict[str, Any]:
    """Return the load of every expert as a JSON object."""
    model, steps = run.model, run.steps
    expected = run.config.batch.tokens * model.top_k * len(steps)
    return {
        "run": str(run.folder),
        "steps": [steps[0], steps[-1], len(steps)],
        "experts": model.experts,
        "top_k": model.top_k,
        "blocks": [
            {
                "block": block,
                "pairs": counts,
                "load": max(counts) * len(counts) / sum(counts),
                "unused": counts.count(0),
                "dropped": 1 - sum(counts) / expected if model.capacity else None,
            }
            for block, counts in zip(run.blocks, run.counts.tolist(), strict=True)
        ],
    }


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that `show` prints."""
    first, last, number = document["steps"]
    yield (
        f"{document['run']}: {plural(number, 'step')}, {first} to {last}; {document['experts']} experts in each of "
        f"{plural(len(document['blocks']), 'block')}, {document['top_k']} of them for a token"
    )
    drops = any(block["dropped"] is not None for block in document["blocks"])
    head = ("block", "max/mean", "unused", *(("dropped",) if drops else ()), "load of each expert")
    rows, styles = [head], ["bold"]
    for block in document["blocks"]:
        bars = _bars(block["pairs"])
        dropped = (percent(block["dropped"]),) if drops else ()
        rows.append((str(block["block"]), f"{block['load']:.2f}", str(block["unused"]), *dropped, bars[0]))
        rows += [*(("",) * (len(head) - 1) + (more,) for more in bars[1:])]
        styles += ["yellow" if block["load"] >= UNEVEN or block["unused"] else ""] * len(bars)
    lines = aligned(rows, right=range(len(head) - 1))
    colours = sys.stdout.isatty() and find_spec("rich") is not None
    yield coloured(zip(lines, styles, strict=True)) if colours else "\n".join(lines)
    if "placement" in document:
        yield ""
        yield from _placement_lines(document["placement"])
    else:
        yield "to see what placing them would bring: --expert 8 --node 4"


def _bars(pairs: Sequence[int]) -> list[str]:
    """Return a character for each expert, as high as its load, in lines of a bearable width."""
    most = max(pairs)
    drawn = "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in pairs)
    return [drawn[first : first + WIDEST_BAR] for first in range(0, len(drawn), WIDEST_BAR)]


def _placement_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what today's numbering costs and the new one."""
    today, placed = found["today"], found["placed"]
    nodes = found["expert"] // found["node"]
    rows = [(f"{plural(found['expert'], 'rank')} along expert, {found['node']} in a node", "today", "placed")]

    def add(what: str, read: Callable[[Mapping[str, Any]], str]) -> None:
        rows.append((what, read(today), read(placed)))

    for what in ("rank", "node") if nodes > 1 else ("rank",):
        add(f"busiest {what}, max/mean", lambda each, key=f"{what}_load": f"{each[key]['mean']:.3f}")
        add("  in the worst block", lambda each, key=f"{what}_load": f"{each[key]['worst']:.3f}")
    known = today["ranks_of_a_token"] is not None
    if known:
        add("ranks that a token goes to", lambda each: f"{each['ranks_of_a_token']:.2f}")
    if known and nodes > 1:
        add("bytes between nodes in a step", lambda each: nbytes(each["bytes_between_nodes"]))
    yield from aligned(rows, right=(1, 2))
    if not known:
        yield "What tokens choose together was not recorded (log.companions_every), so only the load is balanced."


def place_experts(options: argparse.Namespace, _: object) -> int:
    """Write a run's folder with a renumbered copy of the newest checkpoint; return the exit code."""
    run = ExpertsOfRun.read(options.folder)
    where = run.where(options.expert, options.node)
    checkpoint = find_checkpoint(options.folder)
    out = options.out or options.folder.resolve().with_name(f"{options.folder.resolve().name}-placed")
    order = run.place(where)
    total, done, bar = sum(info.nbytes for info in read_record(checkpoint).tensors.values()), 0, percent_of("verifying")

    def progress(size: int) -> None:
        nonlocal done
        done += size
        bar(done, total)

    with AtomicFolder(out.resolve()).fill() as folder:
        orders = dict(zip(run.blocks, order.tolist(), strict=True))
        renumber(checkpoint, folder / CHECKPOINTS / checkpoint.name, orders, progress)
        for name in ("config.toml", Path(run.config.data.tokenizer).name, SCHEDULE_FILE, PASSED_OVER):
            if (options.folder / name).is_file():
                shutil.copyfile(options.folder / name, folder / name)
    print("\n".join(_placement_lines(run.costs(where, order))))
    print(f"{out}: {checkpoint.name} with {run.model.experts} experts renumbered in {plural(len(orders), 'block')}")
    print(f"  fourfold train --resume {shlex.quote(str(out))}")
    return 0
