"""What a run trains on, opened by all ranks."""

from __future__ import annotations

from pathlib import Path

from fourfold.data.open import open_source
from fourfold.data.token_files import TokenSource
from fourfold.data.tokenizer import load_tokenizer
from fourfold.grid import Grid
from fourfold.train.config import Config


def open_sources(config: Config, grid: Grid, cache: Path) -> list[TokenSource]:
    """Text is prepared once, by rank 0, while the others wait."""
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod)

    def opened() -> list[TokenSource]:
        return [
            open_source(source.path, tokenizer=tokenizer, eod=source.eod, cache=cache) for source in config.data.sources
        ]

    found = grid.run_together("opening the data", lambda: opened() if grid.rank == 0 else [])
    return grid.run_together("opening the data", lambda: found or opened())
