"""The examples that are no loop of another library (those are in test_loops.py): each runs, and does what it says.

They run on the ranks of the tests through the `main` that a user starts.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from test_loops import EXAMPLES, TOLERANCE, adamw, as_torchrun, example, step

pytestmark = pytest.mark.slow


def on_ranks(name: str, arguments: list[str], changes: dict[str, Any] | None = None) -> tuple[Any, str]:
    """What an example's `main` returns and prints."""
    told, said = example(name), io.StringIO()
    vars(told).update(changes or {})
    with as_torchrun(), redirect_stdout(said):
        return told.main(arguments), said.getvalue()


def compared(arguments: list[str]) -> tuple[dict[str, tuple[Any, ...]], str]:
    """Of compare_grids: losses, seconds and bytes by grid, and the table; a class of the example cannot travel."""
    found, said = on_ranks("compare_grids", arguments)
    return {name: tuple(each) for name, each in found.items()}, said


def text(folder: Path) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"line {number} of a text that says the same again and again\n" for number in range(400)))
    return path


def test_pretrain_gpt_goes_on_from_its_checkpoint_on_another_grid(ranks, tmp_path: Path) -> None:
    given = ["--data", str(text(tmp_path)), "--out", str(tmp_path), "--steps", "12", "--rows", "8", "--seq", "32"]
    ((losses, said), *_) = ranks(4).run(on_ranks, "pretrain_gpt", [*given, "--grid", "x=2,z=2"], {"EVERY": 6})
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 1
    assert "step 10: loss" in said
    folders = sorted(tmp_path.glob("step-*"))
    assert [folder.name for folder in folders] == ["step-00000006", "step-00000012"]
    shutil.rmtree(folders[-1])
    ((again, _), *_) = ranks(4).run(on_ranks, "pretrain_gpt", [*given, "--grid", "y=2,data=2"], {"EVERY": 6})
    assert again == pytest.approx(losses[6:], rel=TOLERANCE)


def test_unet_removes_noise_as_on_one_process(ranks) -> None:
    told = example("unet")
    torch.manual_seed(0)
    model, plain = told.UNet([8, 16]), []
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    ranks(4).start(on_ranks, "unet", ["--grid", "x=2,z=2", "--steps", "8", "--rows", "8"])
    for number in range(8):
        loss = model(*told.batch(number, 8, 16))
        step(model, optimizer, [loss])
        plain.append(loss.item())
    for losses, _ in ranks(4).results():
        assert losses == pytest.approx(plain, rel=TOLERANCE)
    assert plain[-1] < plain[0] / 2


def test_lora_fine_tunes_a_llama_from_its_folder(ranks, tmp_path: Path) -> None:
    """On a text, with the folder's own tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    told = example("lora")
    words = ["<eos>", *text(tmp_path).read_text().split()]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(dict.fromkeys(words))}, "<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "llama"
    told.LlamaForCausalLM(
        told.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=512
        )
    ).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    out = tmp_path / "adapters"
    given = ["--grid", "x=2,data=2", "--model", str(folder), "--text", str(text(tmp_path)), "--out", str(out)]
    ranks(4).start(on_ranks, "lora", given)
    ids, model, plain = tokenizer.encode(text(tmp_path).read_text()).ids, told.model(folder), []
    optimizer = adamw(model)
    for number in range(told.STEPS):
        rows = told.batch(number, torch.tensor(ids))
        loss = model(input_ids=rows, labels=rows).loss
        step(model, optimizer, [loss])
        plain.append(loss.item())
    for losses, _ in ranks(4).results():
        assert losses == pytest.approx(plain, rel=TOLERANCE)
    assert plain[-1] < plain[0]
    assert (out / "adapter_model.safetensors").is_file()


def test_compare_grids_finds_equal_losses_and_other_bytes(ranks, tmp_path: Path) -> None:
    plot, grids = tmp_path / "grids.html", ["data=4", "x=4", "x=2,z=2"]
    given = [*grids, "--steps", "3", "--rows", "8", "--seq", "16", "--plot", str(plot)]
    (found, said), *others = ranks(4).run(compared, given)
    assert list(found) == grids
    plain = found["data=4"][0]
    assert plain[-1] < plain[0]
    for losses, seconds, _ in found.values():
        assert losses == pytest.approx(plain, rel=TOLERANCE)
        assert seconds > 0
    sent = {name: set(by_axis) for name, (_, _, by_axis) in found.items()}
    assert sent == {"data=4": {"data"}, "x=4": {"x"}, "x=2,z=2": {"x", "z"}}
    lines = said.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == grids
    assert f"{found['x=4'][0][-1]:.6f}" in lines[2]
    assert lines[4] == f"figure: {plot}"
    page = plot.read_text()
    assert all(f'"name":"over {axis}"' in page for axis in ("x", "y", "z", "data"))
    assert "<script src=" not in page
    assert not any(said for _, said in others)


def test_compare_grids_prints_its_table_without_plotly(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    told = example("compare_grids")
    told.show({"z=4": told.GridResult([3.0, 2.0], 0.5, {"z": 1e6})}, tmp_path / "grids.html")
    table, missing = capsys.readouterr().out.splitlines()[1:]
    assert table.split() == ["z=4", "2.000000", "0.0e+00", "0.5000", "z", "1.00"]
    assert "fourfold[report]" in missing
    assert not list(tmp_path.iterdir())


def test_plan_a_cluster_says_what_a_wider_network_gives(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--model", "gpt-5b", "--devices", "32", "--rows", "64", "--top", "3"]
    now, then = example("plan_a_cluster").main(given)
    said = capsys.readouterr().out
    assert [row.candidate.shape.world for row in now.ranked[:3]] == [32] * 3
    assert then.best.seconds < now.best.seconds
    assert f"{now.best.seconds / then.best.seconds - 1:.1%} more tokens per second" in said
    for plan in (now, then):
        for row in plan.ranked[:3]:
            assert re.search(rf"^{row.candidate.shape} +{row.seconds:.2f} ", said, re.MULTILINE)


ON_ONE_NODE = "--nproc-per-node 4"


def test_every_example_is_tested_and_in_the_table() -> None:
    tests = Path(__file__).parent
    tested = (tests / "test_examples.py").read_text() + (tests / "test_loops.py").read_text()
    table = (EXAMPLES / "README.md").read_text()
    names = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert re.findall(r"^\| \[(\w+)\.py\]\(\1\.py\) \|", table, re.MULTILINE) == names
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == {"README.md", *(f"{n}.py" for n in names)}
    for name in names:
        (command,) = re.findall(rf"`((?:torchrun {ON_ONE_NODE}|python) examples/{name}\.py)`", table)
        blank, shown = (EXAMPLES / f"{name}.py").read_text().splitlines()[1:3]
        assert (blank, shown.strip()) == ("", command), name  # ruff removes the indentation of a docstring's only block
        assert f'"{name}"' in tested, f"no test runs examples/{name}.py"
