"""131 published runs of torch's FSDP on H100 and A100 (LLM Foundry), and what is assumed and fitted to replay them.

`published_fsdp_runs.csv` has one row for each run, taken from the tables of throughput in LLM Foundry's repository
(scripts/train/benchmarking/README.md): MPT models with 125M to 70B parameters, 512 to 65,536 tokens per sequence, 8 to
512 devices. `seconds_per_step` is the published throughput, turned into the seconds of a step.

The split was decided before any row was priced. A row is fitted if its model, its sequence length and its number of
devices are all in `FITTED_MODELS`, `FITTED_SEQS` and `FITTED_DEVICES`; all other rows are held out. So the held-out
rows have models, sequence lengths and numbers of devices, smaller and larger ones, that no fitted row has. Which
constants to fit, and that recompute stops early, was decided from the fitted rows alone.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROWS_FILE = Path(__file__).with_name("published_fsdp_runs.csv")
FITTED_MODELS = ("MPT-350m", "MPT-1b", "MPT-7b", "MPT-30b")
FITTED_SEQS = (512, 2048, 8192, 32768)
FITTED_DEVICES = (8, 32, 128)
MACHINES = {"H100-80GB": "dgx-h100", "A100-80GB": "dgx-a100"}
"""The packaged machine of each device; their networks are those of the column `network`."""
NUMBERS = ("devices", "layers", "hidden", "heads", "mlp_hidden", "vocab", "seq")
"""Columns that are numbers and fields of the same name."""


class FsdpFit(NamedTuple):
    """What LLM Foundry loses on top of the machine's own rates: factors for the seconds of two kinds of work."""

    products: float
    """For matrix products."""
    attention: float
    """For attention: these runs had Triton's first FlashAttention kernels, the machine file has those of today."""


FSDP_FITTED = {
    "dgx-h100": FsdpFit(products=1.225, attention=2.112),
    "dgx-a100": FsdpFit(products=1.196, attention=1.760),
}
"""Found by `validate.py --fit`: least squares of log(predicted / published) over the fitted rows."""

FSDP_ASSUMPTIONS = (
    "MPT models have learned positions (the published numbers of parameters grow with the sequence), LayerNorm, GELU, "
    "a tied table, no biases and no dropout. Norms and activations are single kernels of torch, so their bytes are "
    "those of fused kernels, whatever `traffic` a machine file has.",
    "FSDP: z is all devices. A block's weights travel in one message, in bf16, with one message ahead; FULL_SHARD "
    "gathers them in forward and in backward, SHARD_GRAD_OP once. Gradients are reduced in fp32 in every micro-step, "
    "which is Composer's mixed_precision=DEFAULT; the published table says PURE, which is bf16, for MPT-70b on A100.",
    "Full recompute runs the forward of a block again except its last product, of which backward needs the input only: "
    "torch's checkpoint stops there. The weights stay gathered from there to the block's backward. With "
    "that product, predicted / published of the fitted rows with recompute is 13% above that of the others, without it "
    "7%.",
    "Published throughput is turned into seconds per step; reading data and logging are part of it.",
)

FSDP_CAUSES = {
    "MPT-30b": "with one row of 8,192 tokens memory is nearly full: the published FLOP/s are 17% (H100) and 23% (A100) "
    "below those with 4,096, with all other models 8% at most",
    "MPT-760m": "on A100 the published FLOP/s fall by 16% and 21% with sequences of 1,024 and 512 instead of 2,048 "
    "tokens, with all other models by 5% at most",
    "MPT-125m": "kernels between products and the loss take a larger part of a small model, and the factor for kernels "
    "is 1 for all",
}
"""The suspected cause of errors of some models, as far as it can be judged from outside."""
GEOMETRIC_MEAN, MEAN_FACTOR, WORST_FACTOR = (0.9, 1.1), 1.15, 1.5
"""Bars for held-out rows: predicted / published on the geometric mean, the mean factor by which a prediction is off in
either direction, and the largest one."""


@dataclass(frozen=True, slots=True)
class FsdpRun:
    """A published run."""

    device: str
    devices: int
    model: str
    layers: int
    hidden: int
    heads: int
    mlp_hidden: int
    vocab: int
    seq: int
    rows: int
    """Rows per device and micro-step."""
    micro_steps: int
    recompute: bool
    """Whether all blocks are recomputed."""
    strategy: str
    """torch's sharding strategy: FULL_SHARD or SHARD_GRAD_OP."""
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.device} x {self.devices}, {self.model}, {self.micro_steps} x {self.rows} x {self.seq}"

    @property
    def machine(self) -> str:
        return MACHINES[self.device]

    @property
    def fitted(self) -> bool:
        return self.model in FITTED_MODELS and self.seq in FITTED_SEQS and self.devices in FITTED_DEVICES


def read_runs() -> list[FsdpRun]:
    """Return the published runs in the order of the file."""
    with ROWS_FILE.open(newline="", encoding="utf-8") as file:
        return [
            FsdpRun(
                device=row["device"],
                model=row["model"],
                **{
                    key: int(row[key]) for key in ("devices", "layers", "hidden", "heads", "mlp_hidden", "vocab", "seq")
                },
                rows=int(row["rows_per_device_and_micro_step"]),
                micro_steps=int(row["micro_steps"]),
                recompute=row["full_recompute"] == "yes",
                strategy=row["fsdp_strategy"],
                seconds=float(row["seconds_per_step"]),
            )
            for row in csv.DictReader(file)
        ]
