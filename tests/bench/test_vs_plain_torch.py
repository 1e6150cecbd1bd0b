"""The benchmark of one process beside plain torch: both sides train alike, and what is missed is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from benchmarks.speed import vs_plain_table, vs_plain_torch
from benchmarks.speed.plain_models import Transformer
from fourfold.params import local_of

pytestmark = pytest.mark.slow


def test_both_sides_train_alike_and_results_are_added(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    for case in ("llama-tiny:4x16", "gpt-tiny:4x16", "gpt-tiny:4x16"):
        assert vs_plain_torch.main([case, "--device", "cpu", "--rounds", "2", "--out", str(out)]) == 0
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(written) == 3 and len(vs_plain_table.read(out)) == 2, "the later result of a case counts"
    for result in written:
        plain, ours = result["sides"]
        assert (plain["side"], ours["side"]) == ("plain eager", "fourfold eager")
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert plain["losses"][-1] < plain["losses"][0] - 0.05
        assert all(len(side["seconds"]) == 2 for side in (plain, ours))
    text = out.with_suffix(".md").read_text()
    assert text.count("all losses agree within 0.0001 over the first 6 steps: reached") == 2
    assert "| fourfold eager |" in text


def test_every_fused_projection_reaches_its_parts() -> None:
    for name in ("gpt-tiny", "llama-tiny"):
        config = ff.models.config(name)
        plain = Transformer(config)
        plain.init_weights(torch.Generator().manual_seed(0))
        model = ff.models.build(config, ff.Grid())
        ours = {name: local_of(parameter).detach() for name, parameter in model.named_parameters()}
        plain.copy_to(dict(ours))
        width = config.heads * config.head_dim
        fused = plain.layers[1].attention.qkv.weight
        assert torch.equal(
            ours["layers.1.attention.k.weight"], fused[width : width + config.kv_heads * config.head_dim]
        )
        with pytest.raises(ValueError, match="plain torch has no weights for more"):
            plain.copy_to({**ours, "more": torch.zeros(1)})


def result(case: str, device: str, **seconds: float) -> dict[str, Any]:
    """Sides by name, with underscores for spaces; each side needs as many bytes as its milliseconds."""
    sides = [
        {
            "side": name.replace("_", " "),
            "seconds": [each, each],
            "peak_bytes": int(each * 1e3) << 30,
            "losses": [10.0, 9.0],
        }
        for name, each in seconds.items()
    ]
    made = {"date": "2026-01-02", "torch": "2", "command": "python it", "failures": {"fourfold captured": "no memory"}}
    sizes = {"parameters": 1, "tokens": 1, "flops_per_token": 1.0, "peak_flops": None}
    return {"case": case, "weights": "bf16", "dtype": "bf16", "device": device, "sides": sides, **sizes, **made}


def test_missed_bars_stay_visible() -> None:
    case = "gpt-125m:8x1024"
    good = vs_plain_table.section(
        result(case, "G", plain_eager=2.0, plain_graph=1.0, fourfold_eager=2.5, fourfold_compiled=0.8)
    )
    assert "MISSED" not in good
    assert "fourfold compiled takes at most 1.0 of the time of plain torch's best mode (plain graph): reached" in good
    assert "fourfold captured was not measured: no memory" in good
    bad = result(case, "G", plain_eager=2.0, plain_graph=1.0, fourfold_eager=2.7, fourfold_compiled=2.8)
    bad["sides"][0]["losses"] = [10.0, 9.5]
    told = list(vs_plain_table.bars(bad))
    assert [line.count("MISSED") for line in told] == [2, 1, 1, 1, 1]  # time and aim, memory, eager, compile, losses
    on_cpu = {
        seconds: next(vs_plain_table.bars(result("llama-tiny:16x128", "cpu", plain_eager=1.0, fourfold_eager=seconds)))
        for seconds in (1.09, 1.11)
    }
    assert "reached" in on_cpu[1.09] and "MISSED" in on_cpu[1.11]


def test_a_wrong_case_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"gpt-125m:8: .*a case is MODEL"):
        vs_plain_torch.parse_case("gpt-125m:8")
    config, rows, seq = vs_plain_torch.parse_case("llama-1b,layers=2:4x2048")
    assert (config.layers, config.hidden, rows, seq) == (2, 2048, 4, 2048)
    assert 1.0e9 < vs_plain_torch.parse_case("llama-1b:4x2048")[0].parameters < 1.2e9
    assert 3.3e8 < vs_plain_torch.parse_case("gpt-350m:8x1024")[0].parameters < 3.7e8
