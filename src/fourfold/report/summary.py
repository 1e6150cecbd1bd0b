"""The strip of key figures, and what MFU and HFU mean: HTML from a run's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from statistics import median

from fourfold.report.figures import colour, median_wire_bytes
from fourfold.report.run import Run
from fourfold.report.units import DASH, count, duration, known, nbytes, percent, plain

MFU = "MFU = model FLOPs per token \N{MULTIPLICATION SIGN} tokens/s / (ranks \N{MULTIPLICATION SIGN} peak FLOP/s)"
HFU = "HFU = the same with hardware FLOPs per token: model FLOPs and what recompute runs again"


def key_figures(run: Run) -> str:
    """The strip of cards at the top of the page."""
    cards = [
        _steps(run),
        _final_loss(run),
        _validation(run),
        ("Unigram entropy", plain(run.number("unigram_entropy")), "the loss of guessing by frequency alone", ""),
        ("Tokens per second", count(_median(run, "tokens_per_second")), "median, all ranks", ""),
        ("MFU", percent(_median(run, "mfu")), "median", MFU),
        ("HFU", percent(_median(run, "hfu")), "median", HFU),
        _step_time(run),
        _memory(run),
    ]
    return f'<dl class="cards">{"".join(card(*one) for one in cards)}{_wire_card(run)}</dl>'


def utilisation(run: Run) -> str:
    """The footnote that says what MFU and HFU are, with this run's numbers."""
    model, hardware = run.number("flops_per_token", "model"), run.number("flops_per_token", "hardware")
    peak = run.number("peak_flops")
    source = f" ({escape(run.text('peak_flops_from'))})" if run.text("peak_flops_from") else ""
    known_peak = f"{_flops(peak)}/s a rank{source}" if known(peak) else f"not known{source}, so neither is shown"
    return (
        f"<p>{MFU}. Model FLOPs = 6 \N{MULTIPLICATION SIGN} parameters of matrix products + attention, of which the "
        f"causal mask leaves half. {HFU}.</p>"
        f"<p>Here: {_flops(model)} a token by the model, {_flops(hardware)} by the hardware "
        f"(recompute: {escape(run.text('recompute')) or DASH}); {ranks(run)}; peak {known_peak}.</p>"
    )


def ranks(run: Run) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{run.shape.world} rank{'s' if run.shape.world > 1 else ''}"


def _flops(value: float | None) -> str:
    return f"{count(value)}FLOP" if known(value) else f"{DASH} FLOP"


def _steps(run: Run) -> tuple[str, str, str, str]:
    done = run.steps[-1].step if run.steps else 0
    planned, each = run.number("steps"), run.number("tokens_per_step")
    of = f" / {planned:,.0f}" if planned is not None and known(planned) else ""
    tokens = f"{count(done * each)} tokens, " if each is not None else ""
    state = run.end if run.end is not None else "no end recorded"
    return "Steps", f"{done:,}{of}", f"{tokens}{state}", ""


def _final_loss(run: Run) -> tuple[str, str, str, str]:
    logged = [step for step in run.steps if step.loss is not None]
    if not logged:
        return "Final loss", DASH, "", ""
    last = logged[-1]
    shown = "not finite" if last.diverged else plain(last.loss)
    return "Final loss", shown, f"training, step {last.step:,}", ""


def _validation(run: Run) -> tuple[str, str, str, str]:
    if not run.evaluations:
        return "Best validation loss", DASH, "no evaluation", ""
    step = min(run.evaluations, key=run.evaluations.__getitem__)
    return "Best validation loss", plain(run.evaluations[step]), f"step {step:,}", ""


def _step_time(run: Run) -> tuple[str, str, str, str]:
    shares = [
        sum(step.exposed_seconds.values()) / step.seconds
        for step in run.steps
        if step.seconds is not None and known(step.seconds) and step.seconds > 0
    ]
    exposed = f"median, {percent(median(shares))} exposed" if shares else ""
    return "Step", duration(_median(run, "seconds")), exposed, "exposed: communication not hidden behind computation"


def _memory(run: Run) -> tuple[str, str, str, str]:
    peaks = _numbers(step.peak_memory_bytes for step in run.steps)
    return "Peak memory", nbytes(max(peaks, default=None)), "rank 0", ""


def _wire_card(run: Run) -> str:
    found = median_wire_bytes(run)
    parts = " ".join(
        f'<span style="--axis:{colour(axis)}"><i></i>{escape(axis)}&nbsp;{nbytes(size)}</span>'
        for axis, size in found.items()
    )
    total = nbytes(sum(found.values())) if found else DASH
    detail = f'<span class="by-axis">{parts}</span>' if found else "nothing recorded"
    return f'<div class="wide"><dt>Sent per step</dt><dd>{total}</dd><dd class="detail">{detail}</dd></div>'


def card(label: str, value: str, detail: str, tip: str) -> str:
    title = f' title="{escape(tip)}"' if tip else ""
    name = f"<abbr{title}>{escape(label)}</abbr>" if tip else escape(label)
    return f'<div><dt>{name}</dt><dd>{escape(value)}</dd><dd class="detail">{escape(detail)}</dd></div>'


def _median(run: Run, name: str) -> float | None:
    values = _numbers(getattr(step, name) for step in run.steps)
    return median(values) if values else None


def _numbers(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and known(value)]
