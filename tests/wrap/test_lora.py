"""LoRA on a grid trains as on one process, and what is frozen costs nothing.

For each case: losses of three AdamW steps, every gradient of the adapters, the adapters afterwards under peft's own
names, generation, and the weights that merging leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fourfold as ff
from families import VOCAB, Case, batch, build
from fourfold.grid import Shape
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from harness import grid_of
from parity import LocalAdamW
from share import share

STEPS = 3
PROMPTS = torch.arange(18).view(3, 6) * 7 % VOCAB
"""Rows that no number of places above 1 divides."""
TARGETS: dict[str, Any] = {
    "llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"],  # beside layers without a pair
    "qwen2": "all-linear",  # fewer heads of keys than ranks, a tied head
    "gpt2": ["c_attn", "c_proj", "c_fc"],  # three layers in one weight, [in, out]
    "phi3": "all-linear",  # three layers in one weight
}


@dataclass(frozen=True)
class Adapted:
    case: Case
    after: bool
    """Adapters come to a model that is on the grid already."""

    def __str__(self) -> str:
        return f"{self.case} {'after' if self.after else 'before'}"


def adapted(name: str, shape: Shape, activations: str, *, after: bool = False) -> Adapted:
    return Adapted(Case(name, shape, activations, widened=True), after)


CASES = [
    adapted("llama", Shape(x=2, y=2), "sharded"),
    adapted("llama", Shape(z=2, data=2), "replicated", after=True),
    adapted("qwen2", Shape(y=2, z=2), "sharded", after=True),
    adapted("qwen2", Shape(x=2, y=2), "replicated"),
    adapted("gpt2", Shape(x=2, z=2), "sharded", after=True),
    adapted("gpt2", Shape(y=2, data=2), "replicated"),
    adapted("phi3", Shape(x=2, data=2), "sharded", after=True),
]


@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # peft takes the bias of a pair for a shard that is flat
@pytest.mark.parametrize("each", share(CASES, 13), ids=str)
def test_lora_on_a_grid_equals_the_plain_model(ranks, each: Adapted) -> None:
    pool = ranks(4)
    pool.start(on_ranks, each)
    one = on_one_process(each.case.name)
    for found in pool.results():
        assert found["tokens"] == one["tokens"]
        for kind in ("losses", "gradients", "adapters", "merged"):
            assert found[kind].keys() == one[kind].keys(), kind
            scale = max(abs(value).max() for value in one[kind].values())
            for name, value in one[kind].items():
                error = abs(found[kind][name] - value).max() / scale
                assert error <= each.case.tolerance, f"{kind}: {name} differs by {error}"


def adapt(model: Any, name: str) -> Any:
    from peft import LoraConfig, get_peft_model

    options = dict(lora_bias=True, fan_in_fan_out=True) if name == "gpt2" else {}
    return get_peft_model(model, LoraConfig(r=5, lora_alpha=7, target_modules=TARGETS[name], **options))


def some_numbers(model: Any) -> dict[str, Tensor]:
    """peft's B is zero at first, and A's gradient with it."""
    generator = torch.Generator().manual_seed(3)
    trained = sorted((name, p.shape) for name, p in model.named_parameters() if p.requires_grad)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) / 5 for name, shape in trained}


def plain(name: str) -> Any:
    model = adapt(build(name), name)
    model.load_state_dict(some_numbers(model), strict=False)
    return model


def train(model: Any, case: Case, rows: Any) -> dict[str, Any]:
    optimizer = adamw([parameter for parameter in model.parameters() if parameter.requires_grad], case)
    found: dict[str, Any] = {"losses": {}}
    for step in range(STEPS):
        with case.arithmetic(False):
            loss = model(**{key: rows(value) for key, value in batch(case, step).items()}).loss
        loss.backward()
        found["losses"][step] = array(loss)
        if step == 0:
            found["gradients"] = gradients(model)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        optimizer.step()
        model.zero_grad()
    return found


def adamw(trained: list[torch.nn.Parameter], case: Case) -> Any:
    if not isinstance(trained[0], DTensor):
        return torch.optim.AdamW(trained, **case.adam, fused=True)
    optimizer = LocalAdamW(trained)
    optimizer.adamw.param_groups[0].update(case.adam)
    return optimizer


def finish(model: Any, case: Case) -> dict[str, Any]:
    """What is left after training; merging undoes the model, so it comes last."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    with case.arithmetic(False):
        tokens = model.eval().generate(input_ids=PROMPTS, do_sample=False, max_new_tokens=5, pad_token_id=0)
    found = {"adapters": arrays(state), "tokens": tokens.tolist()}
    merged = model.merge_and_unload()
    on_grid = any(isinstance(p, DTensor) for p in merged.parameters())
    return found | {"merged": arrays(whole_tensors(merged) if on_grid else merged.state_dict())}


@cache
def on_one_process(name: str) -> dict[str, Any]:
    case, model = Case(name, Shape(), "sharded", widened=True), plain(name)
    return train(model, case, lambda value: value) | finish(model, case)


def on_ranks(each: Adapted) -> dict[str, Any]:
    case, grid = each.case, grid_of(each.case.shape)
    policy = Policy(activations=case.activations)
    numbers = some_numbers(plain(case.name))
    model = ff.parallelize(build(case.name), grid, policy=policy) if each.after else build(case.name)
    model = ff.parallelize(adapt(model, case.name), grid, policy=policy)
    model.load_state_dict(numbers, strict=False)
    return train(model, case, lambda value: ff.local_rows(value, grid).to(grid.device)) | finish(model, case)


def gradients(model: Any) -> dict[str, Any]:
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return arrays({name: value for name, value in whole_tensors(model, "gradient").items() if "lora_" in name})
    return arrays({name: p.grad for name, p in model.named_parameters() if p.requires_grad})


def array(tensor: Tensor) -> Any:
    """numpy: a tensor would cross the pipe as shared memory."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().numpy().copy()


def arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: array(tensor) for name, tensor in tensors.items()}


def test_what_is_frozen_sends_no_gradients(ranks) -> None:
    """Over z and data backward reduces the adapters' gradients, byte for byte, and nothing else."""
    for reduced, owed, whole in ranks(4).run(reductions):
        loss = 4  # the gradient of the loss, which is every place's, is averaged
        assert reduced == {
            ("reduce_scatter", "z"): owed,
            ("all_reduce", "data"): whole + loss,
            ("all_reduce", "z"): loss,
        }
        assert owed > 0
        assert whole > 0


def reductions() -> tuple[dict[tuple[str, str], int], int, int]:
    grid = grid_of(Shape(z=2, data=2))
    model = ff.parallelize(adapt(build("llama"), "llama"), grid)
    rows = torch.arange(48).view(4, 12).chunk(4)[grid.rank]
    for _ in range(2):
        loss = model(input_ids=rows, labels=rows).loss
        with grid.ledger.watch() as records:
            loss.backward()
    reduced: dict[tuple[str, str], int] = {}
    for record in records:
        if record.op != "all_gather":
            reduced[record.op, record.axis] = reduced.get((record.op, record.axis), 0) + record.nbytes
    specs = specs_of(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shards = sum(local_of(p).nbytes for p in trained.values())
    # the message over z holds every shard with as many rows as the longest has
    padded = sum(-(-specs[name].shape[0] // 2) * 2 * p[0].numel() * p.itemsize for name, p in trained.items())
    return reduced, padded, shards


def test_nothing_is_made_whole(ranks) -> None:
    """Beside layers that are cut the adapters run on parts, so only what lies between A and B travels."""
    for told in ranks(4).run(explained):
        assert "Made whole" not in told
        assert "lora_A.default" in told


def explained() -> str:
    grid = grid_of(Shape(x=2, y=2))
    model = ff.parallelize(adapt(build("llama"), "llama"), grid)
    rows = torch.arange(48).view(4, 12)
    model(input_ids=rows, labels=rows).loss.backward()
    return ff.explain(model)


def test_what_reads_the_frozen_weight_is_refused(ranks) -> None:
    for message in ranks(4).run(refused):
        assert "q_proj" in message
        assert "use_dora=False" in message


def refused() -> str:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ValueError) as error:
        ff.parallelize(model, grid_of(Shape(x=2, y=2)))
    return str(error.value)
