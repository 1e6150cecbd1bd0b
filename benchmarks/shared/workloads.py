"""What a benchmark runs: a workload (model and batch), and the lines of its table (who runs it, on which grid, how)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import fourfold as ff
from fourfold.models import ModelConfig

Measure = Literal["step", "compute", "communication"]
Mode = Literal["eager", "compiled", "captured", "captured compiled"]
"""How the host runs a step: operation by operation, compiled, or recorded once as a CUDA graph and replayed."""


@dataclass(frozen=True)
class Workload:
    """A model and a batch, the same for every line."""

    name: str
    config: ModelConfig
    rows: int
    """Rows of the whole batch; a row has `config.seq` tokens."""
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.rows * self.config.seq

    @property
    def about(self) -> dict[str, Any]:
        """What a reader of results must know."""
        model = {**asdict(self.config), "parameters": self.config.parameters}
        batch = {"rows": self.rows, "seq": self.config.seq, "dtype": str(self.dtype).removeprefix("torch.")}
        return {"size": self.name, "model": model, **batch}

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of the whole batch."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab, (self.rows, self.config.seq + 1), generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Line:
    """One line of a table: who trains, on which grid, in which variant."""

    kind: str
    """`fourfold`, or the name of a peer."""
    shape: ff.Shape
    variant: str = ""
    policy: ff.Policy = ff.Policy()
    """Used by Fourfold's lines only."""
    bounded: bool = False
    """Whether the line's computation alone and its communication alone are measured too."""
    mode: Mode = "eager"
    pipe: int = 1
    """Ranks of a peer's pipeline; `data` replicates the whole pipeline. Fourfold's has an axis in the shape."""
    micro_batches: int = 1
    """Into how many parts a pipeline cuts the batch."""
    reshard: bool = True
    """Whether FSDP2 frees the gathered weights of a block after forward; otherwise it keeps them for backward."""

    @property
    def name(self) -> str:
        mode = "" if self.mode == "eager" else self.mode
        return " ".join(part for part in (self.kind, self.grid, self.label, mode) if part)

    @property
    def label(self) -> str:
        """The variant with everything else that tells lines of a kind and grid apart, except for the mode."""
        parts = f"{self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return ", ".join(part for part in ("" if self.reshard else "no resharding", parts, self.variant) if part)

    @property
    def grid(self) -> str:
        if self.pipe == 1:
            return str(self.shape)
        return f"pipe={self.pipe}" + (f" {self.shape}" if self.shape.world > 1 else "")

    @property
    def compiled(self) -> bool:
        return self.mode.endswith("compiled")

    @property
    def captured(self) -> bool:
        return self.mode.startswith("captured")

    @property
    def measures(self) -> tuple[Measure, ...]:
        return ("step", "compute", "communication") if self.bounded else ("step",)
