"""What a config leaves open about the batch, the optimizer and checkpoints: values for the model's size and the device.

`fourfold plan` and `fourfold train` take their defaults from here, so a plan is about the run that follows it. The
values for GPUs are those of published runs, interpolated by the number of parameters; on the CPU a step must end while
somebody watches, so its batch is small.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2

from fourfold.axes import PIPE
from fourfold.models.config import ModelConfig
from fourfold.planner.goodput import MOST_SECONDS, FailureRates
from fourfold.shape import Shape
from fourfold.train.config import TrainConfig

REFERENCE_PARAMETERS = 125e6
"""The size from which batch and learning rate are interpolated: the smallest GPT-3 (arXiv 2005.14165, table 2.1)."""
REFERENCE_TOKENS = 1 << 19
"""Tokens per step of that model: 0.5 million."""
REFERENCE_RATE = 6e-4
"""The highest learning rate of that model."""
MOST_RATE = 1e-3
"""The highest learning rate by default; the formula would give models below 27 million parameters more."""
CPU_TOKENS, CPU_SEQ = 16 * 128, 128
"""Tokens per step on the CPU, and the most tokens of a sequence there."""
OWN_TOKENS, OWN_SEQ, OWN_RATE = 8192, 1024, 3e-4
"""Tokens of a rank's batch, tokens of a sequence, and learning rate on a GPU for a module of the user."""
LEAST_WARMUP, MOST_WARMUP = 10, 2000
"""Bounds of the steps of warm-up. Between them it is one step in fifty."""
LEAST_MINUTES = 5.0
"""The fewest minutes between checkpoints by default, since storage may be slower than assumed."""
MICRO_STEPS_PER_PIPE_RANK = 2
"""Micro-batches for each pipe rank, at least: 1F1B then idles for less than a third of a step, (pipe - 1) of
micro-batches + pipe - 1."""


def sequence(model: ModelConfig | None, *, on_gpu: bool) -> int:
    """Return the tokens of a sequence: as many as the model was made for, on the CPU fewer."""
    most = OWN_SEQ if model is None else model.seq
    return most if on_gpu else min(most, CPU_SEQ)


def batch_tokens(model: ModelConfig, *, on_gpu: bool) -> int:
    """Return the tokens of a step: a power of two that grows with the fourth root of the number of parameters.

    0.5 M for 125 M parameters, 1 M for 1.4 B, 2 M for 8 B; GPT-3 used 0.5 M for 125 M, 1 M for 1.3 B, 2 M for 13 B.
    """
    if not on_gpu:
        return CPU_TOKENS
    return 2 ** round(log2(REFERENCE_TOKENS * (model.parameters / REFERENCE_PARAMETERS) ** 0.25))


def learning_rate(model: ModelConfig) -> float:
    """Return the highest learning rate, with two digits: it falls with the cube root of the number of parameters.

    6e-4 for 125 M parameters, 1.5e-4 for 8 B; GPT-3 used 6e-4 for 125 M, 1.2e-4 for 6.7 B and 0.6e-4 for 175 B.
    """
    rate = REFERENCE_RATE * (model.parameters / REFERENCE_PARAMETERS) ** (-1 / 3)
    return float(f"{min(MOST_RATE, rate):.1e}")


def warmup(steps: int) -> int:
    """Return the steps in which the learning rate rises."""
    return min(steps, max(LEAST_WARMUP, min(MOST_WARMUP, steps // 50)))


def checkpoint_minutes(model: ModelConfig, devices: int) -> float:
    """Return the minutes between checkpoints that lose the least time, by the rates that `planner.goodput` assumes."""
    return float(round(max(LEAST_MINUTES, FailureRates().job(model.parameters, devices).recommended / 60)))


def rows_near(tokens: float, seq: int, devices: int) -> int:
    """Return the sequences of a batch with about this many tokens: within 5%, the number that most grids divide."""
    rows = max(1, round(tokens / seq))
    steps = [devices << power for power in range(12, -1, -1)]  # up to 4096 sequences per device
    steps += [step for step in range(devices - 1, 0, -1) if devices % step == 0]
    return next(near for step in steps if abs((near := round(rows / step) * step) - rows) <= 0.05 * rows)


def pipe_micro_steps(rows: int, shape: Shape) -> int:
    """Return the micro-batches of a step on a grid with a pipe axis: the fewest that are enough for its pipe ranks.

    They divide the rows of a place. If a place has too few rows, every row is a micro-batch. Rows that places cannot
    share are one, and `planning.resolve` refuses them.
    """
    if rows % shape.row_places:
        return 1
    most = max(1, rows // shape.row_places)
    enough = range(MICRO_STEPS_PER_PIPE_RANK * shape.sizes[PIPE], most)
    return next((number for number in enough if most % number == 0), most)


def _own_tokens(ranks: int, *, on_gpu: bool) -> int:
    return ranks * OWN_TOKENS if on_gpu else CPU_TOKENS


def fill_in(config: TrainConfig, ranks: int, *, on_gpu: bool) -> TrainConfig:
    """Return the config with sequence length, rows, learning rate and checkpoint interval, where it has none.

    Rows are a multiple of what a given grid needs; without one, of the number of ranks, if there are enough of them.
    With pipe ranks they are also a multiple of the micro-batches that those need, if there are as many.
    Nobody knows the size of a module of the user, which gets the `OWN_` values.
    """
    model, batch, shape = None if config.model.is_own else config.model.build(), config.batch, config.grid.shape
    seq = batch.seq or sequence(model, on_gpu=on_gpu)
    rows = batch.rows
    if not rows:
        tokens = _own_tokens(ranks, on_gpu=on_gpu) if model is None else batch_tokens(model, on_gpu=on_gpu)
        rows = rows_near(tokens, seq, ranks)
        places = (ranks if ranks <= rows else 1) if config.grid.auto else shape.row_places
        unit = places * (batch.micro_steps or 1)
        enough = MICRO_STEPS_PER_PIPE_RANK * shape.sizes[PIPE] * places
        if not config.grid.auto and shape.sizes[PIPE] > 1 and not batch.micro_steps and enough <= rows:
            unit = enough
        rows = max(1, round(rows / unit)) * unit
    optimizer, checkpoint = config.optimizer, config.checkpoint
    if optimizer.learning_rate is None:
        optimizer = replace(optimizer, learning_rate=OWN_RATE if model is None else learning_rate(model))
    if checkpoint.minutes is None:
        minutes = MOST_SECONDS / 60 if model is None else checkpoint_minutes(model, ranks)
        checkpoint = replace(checkpoint, minutes=minutes)
    return replace(config, batch=replace(batch, rows=rows, seq=seq), optimizer=optimizer, checkpoint=checkpoint)
