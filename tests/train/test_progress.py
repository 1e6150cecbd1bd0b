"""The lines that a run prints: at the first and the last step, and at round numbers in between."""

from __future__ import annotations

import io

import pytest

from fourfold.commands.sample import visible
from fourfold.models.config import config
from fourfold.models.open import open_model
from fourfold.train import progress
from fourfold.train.progress import PlainProgress, round_number


def lines(monkeypatch: pytest.MonkeyPatch, steps: int, done: int, seconds: float) -> list[list[str]]:
    """What is printed of steps that take this long each, word by word."""
    clock = iter([1000.0 + seconds * step for step in range(steps + 1)])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    out = io.StringIO()
    shown = PlainProgress(out, steps, done)
    for step in range(done + 1, steps + 1):
        event = dict(loss=1.0, grad_norm=1.0, learning_rate=1e-3, tokens_per_second=9.0, mfu=None, wire_bytes={})
        shown.write({"event": "step", "step": step, **event})
    return [line.split() for line in out.getvalue().splitlines()[1:]]


def test_lines_are_at_round_steps_and_end_with_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for steps, done, seconds, wanted in (
        (24, 20, 0.1, [21, 22, 24]),
        (125, 0, 0.1, [1, *range(10, 121, 10), 125]),
        (1000, 3, 0.3, [4, *range(40, 1001, 40)]),  # every 100 steps would be every 30 seconds: multiples of 20
        (6, 0, 30.0, [1, 2, 3, 4, 5, 6]),
    ):
        found = lines(monkeypatch, steps, done, seconds)
        steps_shown = [int(words[0]) for words in found]
        if seconds == 0.3:
            assert all(step % 20 == 0 for step in steps_shown[1:]) and len(steps_shown) > 20, steps_shown
        else:
            assert steps_shown == wanted
        assert found[-1][6:] == ["0", "s", "-"], "no time is left, and one rank sends nothing"
    assert [round_number(most) for most in (0.2, 1, 2.5, 9.9, 49, 50, 1234)] == [1, 1, 2, 5, 20, 50, 1000]


def test_generated_text_cannot_ring_a_terminal() -> None:
    assert visible("a\n\tb é\x1b[2J\x07\x00\u202e") == "a\n\tb é\\x1b[2J\\x07\\x00\\u202e"


@pytest.mark.parametrize("find", [config, open_model])
def test_a_name_of_another_model_is_no_typing_error(find) -> None:
    """gpt2 is not gpt-20b; the answer says how a model of Hugging Face is named."""
    for name, near in {
        "gpt2": "gpt-125m",
        "gpt2-xl": "gpt-1.4b",
        "gpt-124m": "gpt-125m",
        "llama3-8b": "llama-3-8b",
    }.items():
        with pytest.raises(ValueError, match=rf"there is no model '{name}' \((the nearest is|did you mean) '{near}'"):
            find(name)
    for name in ("gpt2", "gemma-2-9b", "qwen2.5-7b"):
        with pytest.raises(ValueError, match="hf download NAME --local-dir FOLDER"):
            find(name)
