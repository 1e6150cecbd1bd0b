"""`fourfold plan` for a model that has no plan of its own: parameters, memory of its state, and the least time.

A config.json of a model type that Fourfold cannot train as it is says nothing about grids and seconds, but its
parameters can be counted, and with them the bytes that any training with AdamW holds. Exact numbers, estimates and
bounds are named as what they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from fourfold.commands.output import show_document
from fourfold.models.count import CountedModel, TransformerSizes, count_model
from fourfold.planner.machine import Machine
from fourfold.report.units import aligned, count, duration, money, nbytes, plural

PARTS = {"weights": 4, "gradients": 4, "AdamW": 8}
"""Bytes per parameter of what training holds, all in fp32; AdamW has two moments."""
LONGEST = 8192
"""The longest sequence for which activations are estimated unless --seq is given, in tokens: configs name the longest
that a model can read, which is seldom what it is trained on."""
MOST_ROWS = 10
"""The most numbers of devices in the table."""
RATE_OPTIONS = ("mtbf", "restart", "checkpoint", "storage")
"""Options that state how often devices fail, and what restarts and checkpoints cost."""
NEEDS_STEPS = ("why", "config", "html", "trace", *RATE_OPTIONS)
"""Options that need the seconds of a step."""


def plan_memory(options: argparse.Namespace, path: Path, name: str, machine: Machine, reason: str) -> int:
    """Show what can be said of any model; `reason` is why there is no plan. Return the exit code."""
    for option in NEEDS_STEPS:
        if getattr(options, option) is not None:
            raise ValueError(f"--{option} needs the seconds of a step, and this model has none: {reason}")
    numbers = options.devices if isinstance(options.devices, list) else [options.devices]
    dtype = options.dtype or ("bf16" if "bf16" in machine.gemm else "fp32")
    if dtype not in machine.gemm:
        raise ValueError(
            f"--dtype {dtype}: {machine.name} has no rate of such products; it has {', '.join(machine.gemm)}"
        )
    model = count_model(path)
    document = memory_document(model, name, machine, numbers, dtype, options.seq)
    document["reason"] = reason
    asked = (options.batch_tokens, options.tokens, options.price)
    document["time"] = [least_time(model, machine, dtype, each, *asked) for each in numbers]
    return show_document(document, memory_text, options.json)


def memory_document(
    model: CountedModel, name: str, machine: Machine, numbers: Sequence[int], dtype: str, seq: int | None
) -> dict[str, Any]:
    """Return the parameters, the state on each number of devices, the fewest that hold it, and activations."""
    usable, state = machine.memory - machine.reserve, sum(PARTS.values()) * model.parameters
    least = ceil(state / usable)
    tokens = seq or min(model.sizes.seq or LONGEST, LONGEST)
    activations = activation_bytes(model.sizes, tokens, machine_bytes(dtype))
    fewest = None
    if activations is not None and activations["least"] < usable:
        fewest = ceil(state / (usable - activations["least"]))
    return {
        "model": {
            "name": name,
            "model_type": model.model_type,
            "parameters": model.parameters,
            "active_parameters": model.active,
            "other_parts": model.other_parts,
            "estimated": model.estimated,
        },
        "machine": {"name": machine.name, "device": machine.device, "usable_bytes": usable},
        "devices": list(numbers),
        "seq": tokens,
        "dtype": dtype,
        "state": [
            {
                "devices": devices,
                **{part: size * model.parameters / devices for part, size in PARTS.items()},
                "bytes": state / devices,
            }
            for devices in shard_numbers(numbers, least)
        ],
        "state_bytes": state,
        "least_devices": least,
        "activations": activations,
        "least_devices_with_activations": fewest,
    }


def shard_numbers(numbers: Sequence[int], least: int) -> list[int]:
    """Return the numbers of devices to show: those that were given and the least, or up to one number its halves."""
    shown = set(numbers)
    if len(numbers) == 1:
        shown |= {1 << power for power in range(numbers[0].bit_length())}
    return sorted({*sorted(shown)[-MOST_ROWS:], *numbers, least})


def machine_bytes(dtype: str) -> int:
    """Return the bytes of one number in the dtype of products."""
    return {"bf16": 2, "fp32": 4}[dtype]


def activation_bytes(sizes: TransformerSizes, tokens: int, size: int) -> dict[str, float] | None:
    """Estimate the activations of one sequence on one device; None if the config does not name enough sizes.

    A layer keeps for backward the inputs and outputs of two norms, q, k, v and the output of attention, and inside the
    MLPs that a token goes through each product and what enters the next: per token
    4 hidden + 2 q + 2 k + 3 mlp features (2 mlp without a gate), and another hidden for each expert. `most` keeps all
    of that. `least` keeps the input of each layer and computes the rest again, one layer at a time. Both have the
    logits and their gradient in fp32.
    """
    if None in (sizes.layers, sizes.hidden, sizes.heads, sizes.mlp_hidden, sizes.vocab):
        return None
    layers, hidden, vocab = sizes.layers or 0, sizes.hidden or 0, sizes.vocab or 0
    queries, keys = sizes.attention_widths
    inside = [sizes.mlp_widths(layer)[1] for layer in range(layers)]
    sent = (sizes.experts_per_token or 1) * hidden if sizes.experts else 0
    by_layer = [4 * hidden + 2 * (queries + keys) + (3 if sizes.gated else 2) * width + sent for width in inside]
    logits = 2 * 4 * vocab * tokens
    return {
        "most": size * tokens * sum(by_layer) + logits,
        "least": size * tokens * (layers * hidden + max(by_layer)) + logits,
        "logits": logits,
    }


def least_time(
    model: CountedModel,
    machine: Machine,
    dtype: str,
    devices: int,
    batch_tokens: float | None,
    tokens: float | None,
    price: float | None,
) -> dict[str, Any] | None:
    """Return bounds of speed and cost: each token takes 6 FLOPs per parameter that it is multiplied with.

    Attention scores, communication and everything between products come on top. None for a model whose tokens go
    through one of two halves, or that has no language model.
    """
    if model.encoder_decoder or model.multiplied <= 0:
        return None
    rate = devices * machine.gemm[dtype] / (6 * model.multiplied)
    hours = None if tokens is None else tokens / rate / 3600
    return {
        "devices": devices,
        "batch_tokens": batch_tokens,
        "tokens": tokens,
        "price": price,
        "most_tokens_per_second": rate,
        "least_step_seconds": None if batch_tokens is None else batch_tokens / rate,
        "least_hours": hours,
        "least_cost": None if hours is None or price is None else hours * devices * price,
    }


def memory_text(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines: parameters, a table of the state by number of devices, activations, the least time."""
    model, machine = document["model"], document["machine"]
    usable = machine["usable_bytes"]
    about = "about " if model["estimated"] else ""
    parameters = f"{about}{count(model['parameters'])} parameters"
    yield f"{model['name']} ({model['model_type']}), {parameters}, on {machine['name']} ({machine['device']})"
    if model["estimated"]:
        yield f"- {model['estimated']}"
    if model["active_parameters"] + model["other_parts"] != model["parameters"]:
        yield f"- a mixture of experts: a token meets {count(model['active_parameters'])} of them"
    if model["other_parts"]:
        yield f"- {count(model['other_parts'])} of them are outside the language model, such as for images"
    yield f"- no grids and no seconds of a step: {document['reason']}"
    yield ""
    rows = [["sharded over", *PARTS, "state per device", f"of {nbytes(usable)}"]]
    for one in document["state"]:
        parts = [nbytes(one[part]) for part in PARTS]
        share = one["bytes"] / usable
        rows.append([plural(one["devices"], "device"), *parts, nbytes(one["bytes"]), f"{share:,.1%}"])
    yield from aligned(rows, right=range(len(rows[0])))
    yield ""
    whole, least = nbytes(document["state_bytes"]), document["least_devices"]
    few = max((number for number in document["devices"] if number < least), default=0)
    not_enough = f"; {few:,} {'does' if few == 1 else 'do'} not" if few else ""
    yield (
        f"Weights, gradients and AdamW's state in fp32 are {whole}, {sum(PARTS.values())} bytes per parameter. At the "
        f"least {least:,} {'device holds' if least == 1 else 'devices hold'} them"
        f"{not_enough}. Activations come on top."
    )
    yield _activation_text(document)
    if None in document["time"]:
        yield "No time: a token goes through one of two halves of the model, or there is no language model."
    else:
        yield from map(_time_text, document["time"])
        yield "Times are bounds: 6 FLOPs per active parameter and token, all at the rate of the largest products."


def _activation_text(document: Mapping[str, Any]) -> str:
    found, fewest = document["activations"], document["least_devices_with_activations"]
    if found is None:
        return "No estimate of activations: the config does not name the usual sizes."
    said = (
        f"Activations, an estimate for one sequence of {document['seq']:,} tokens (--seq) that one device computes: "
        f"{nbytes(found['most'])}, or {nbytes(found['least'])} if only the inputs of layers are kept and the rest is "
        f"computed again; logits are {nbytes(found['logits'])} of each"
    )
    if fewest is None:
        return f"{said}. That fits on no device: a sequence has to be shared by several."
    hold = "device holds" if fewest == 1 else "devices hold"
    return f"{said}. With the smaller number {fewest:,} {hold} both; weights gathered for a layer come on top."


def _time_text(time: Mapping[str, Any]) -> str:
    said = f"{plural(time['devices'], 'device')}: at most {count(time['most_tokens_per_second'])} tokens/s"
    if time["batch_tokens"] is not None:
        said += f", at least {duration(time['least_step_seconds'])} for a step of {count(time['batch_tokens'])} tokens"
    if time["least_hours"] is not None:
        said += (
            f", at least {duration(3600 * time['least_hours'])} ({time['least_hours'] / 24:.3g} days) for "
            f"{count(time['tokens'])} tokens"
        )
    if time["least_cost"] is not None:
        said += f", at a cost of at least {money(time['least_cost'])}"
    return f"{said}."
