"""Claims that several pages make: each page says what is true, and none says what another one denies.

`CLAIMS` is the table. A page that must say something has a pattern in `said`; what no page may say is in `never`. Where
code decides, the test next to it in `holds` shows that the claim is true.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]


class Claim(NamedTuple):
    said: dict[str, str]
    never: str
    """No page may match it; blanks stand for any white space."""
    holds: str = ""
    """A test that shows it, as file::function."""


CLAIMS = {
    "experts: reference models and transformers' mixtures": Claim(
        {
            "README.md": "expert parallelism is for those and for the mixtures of transformers",
            "docs/from_elsewhere.md": "for reference models and the mixtures of transformers",
            "docs/your_model.md": "Mixtures of experts: gated experts",
        },
        "expert parallelism are for the reference models only",
        "tests/wrap/test_wrapped_experts.py",
    ),
    "pipelines: reference models": Claim(
        {
            "README.md": "pipelines are for the reference models only",
            "docs/your_model.md": "A grid with pipe > 1 is refused: only the reference models",
            "docs/from_elsewhere.md": "for reference models \\(\\[pipelines\\]",
        },
        "pipelines? of your own modules? works?",
    ),
    "equal to one process: up to rounding, and how much": Claim(
        {
            "README.md": "that of one process on every mesh, up to rounding \\(1e-10 in fp64\\)",
            "docs/index.md": "equals that of one process, up to rounding \\(1e-10 in fp64",
            "docs/models.md": "in fp64, to 1e-10 of the largest value",
        },
        "is that of one process on every mesh, and",
        "tests/core/test_parity.py",
    ),
    "overlap changes no bit, halves change rounding": Claim(
        {"README.md": "changes no bit of the result; halves, which cut a batch in two, change its rounding"},
        "without changing a bit of the result",
        "tests/core/test_overlap.py",
    ),
    "a large z pays with enough tokens": Claim(
        {"docs/choosing.md": "z=1024 pays with 16,384 tokens per device", "docs/index.md": "1 z=1024"},
        "z in the thousands does not pay",
    ),
    "the fastest grid of the plan in choosing.md": Claim(
        {"docs/choosing.md": "the table the choice is the fastest, at 9.30 s"},
        "there x=8, z=64, data=16 is the fastest",
    ),
    "planning modules of one's own": Claim(
        {
            "docs/trainer.md": "`fourfold plan` can, for \\[a function of grid and policy\\]\\(your_model",
            "docs/your_model.md": "\\[another function\\]\\(trainer.md#models-of-your-own\\)",
        },
        "The planner cannot price the model|fourfold train cannot train the module",
        "tests/planner/test_search.py",
    ),
    "hooks on parameters": Claim(
        {
            "docs/models.md": "Hooks on parameters are called when a backward pass ends, with complete gradients",
            "docs/your_model.md": "are called when a backward pass ends, with complete gradients",
        },
        "hooks on parameters do not see",
        "tests/wrap/test_hooks.py",
    ),
    "context: reference models and modules that attend causally": Claim(
        {"docs/long_context.md": "with \\[your own modules\\]\\(#your-own-modules\\) and models of transformers"},
        "packed documents; for the reference models",
        "tests/wrap/test_context_wrap.py",
    ),
    "scaled rotary positions": Claim(
        {
            "docs/hugging_face.md": "scaled otherwise than by `linear`, `llama3` or `yarn`",
            "docs/long_context.md": "scaled as Llama 3.1 and YaRN do",
        },
        "rotary positions scaled by length",
        "tests/nn/test_rope.py",
    ),
    "what moves to the host": Claim(
        {"docs/config.md": "policy.offload moves activations of recomputed blocks to the host"},
        "nothing is moved to the host",
        "tests/core/test_offload.py",
    ),
    "the planner's choice, also where it was not the fastest": Claim(
        {"README.md": "10 to 13% slower than the fastest", "docs/planner.md": "the planned line is 12.9% slower"},
        "was the fastest in all five settings\\. For",
    ),
    "errors of the planner name how many constants were fitted": Claim(
        {
            "README.md": "where two constants of each machine were fitted",
            "docs/planner.md": "two constants of each machine fitted",
            "docs/scaling.md": "two constants are fitted",
        },
        "where its two constants",
    ),
}


def words(path: Path) -> str:
    """A page in one line."""
    return re.sub(r"\s+", " ", path.read_text())


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_pages_agree(claim: Claim) -> None:
    for page, pattern in claim.said.items():
        assert re.search(pattern, words(ROOT / page)), f"{page} does not say {pattern!r}"
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.toml")]
    pages += (ROOT / "src").rglob("*.py")
    wrong = [
        str(page.relative_to(ROOT)) for page in pages if page.name != "log.md" and re.search(claim.never, words(page))
    ]
    assert not wrong, f"{wrong} say {claim.never!r}"
    assert not claim.holds or (ROOT / claim.holds).exists()


def test_scalings_that_the_page_names_are_those_that_are_read() -> None:
    from fourfold.models.hugging_face import ROPE_KEYS

    assert list(ROPE_KEYS) == ["linear", "llama3", "yarn"]


def test_hooks_on_parameters_of_reference_models_are_called() -> None:
    import torch

    import fourfold as ff

    model, called = ff.models.build("gpt-tiny", ff.Grid.alone("cpu")), []
    weight = dict(model.named_parameters())["layers.0.mlp.up.weight"]
    weight.register_hook(lambda gradient: called.append(gradient.shape))
    weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.grad.shape))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    model(tokens, tokens).backward()
    assert called == [weight.shape, weight.shape]


def test_pages_draw_the_same_batch_on_all_ranks() -> None:
    """Every process seeds torch differently, and ranks of one place must read the same rows.

    The tests that follow the pages do not notice: their ranks are forked from one process.
    """
    drawing = re.compile(r"torch\.rand(?:n|int)?\((?![^\n]*generator=)")
    wrong = []
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            before = text[: text.index(block)]
            if (found := drawing.search(block)) and "manual_seed" not in before + block[: found.start()]:
                wrong.append(f"{page.relative_to(ROOT)}: {block[found.start() :].splitlines()[0]}")
    assert not wrong
