"""torch's distributed checkpoints: what goes there comes back bit for bit, what others wrote loads on any grid, and
nothing that a folder holds is run."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict

import fourfold as ff
from fourfold.checkpoint import dcp as module
from fourfold.checkpoint.dcp import from_dcp, to_dcp
from fourfold.checkpoint.format import TensorType, read_record
from fourfold.checkpoint.load import load_training, read_full_tensor
from fourfold.checkpoint.save import Saver, write_full_tensors
from fourfold.grid import Shape
from fourfold.optim import AdamW
from harness import DEVICE, grid_of

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53)
STATE = {"step": 4, "config": {"model": {"name": "gpt-tiny"}}, "data": [1, 2.5, None, "\N{GREEK SMALL LETTER PI}"]}


def write(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any] = STATE) -> Path:
    layout = {name: TensorType.of(tensor) for name, tensor in tensors.items()}
    write_full_tensors(folder, layout, tensors.values(), state)
    return folder


def torch_save(state_dict: dict[str, Any], folder: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a single process
        dcp.save(state_dict, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def torch_load(state_dict: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state_dict, checkpoint_id=folder, no_dist=True)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    record = read_record(folder)
    return {name: read_full_tensor(folder, record, name) for name in record.tensors}


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# Ours to torch and back


def test_ours_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saved = {
        "model/a.weight": torch.randn(4, 6),
        "model/a.bias": torch.randn(6).bfloat16(),
        "model/none": torch.zeros(0, 3),
        "optimizer/exp_avg/a.weight": torch.full((4, 6), float("nan")),
        "optimizer/step/a.weight": torch.tensor(3.0),
        "random/cpu": torch.randint(0, 256, (2, 50), dtype=torch.uint8),
        "model/mask": torch.tensor([True, False]),
    }
    one = write(tmp_path / "one", saved)
    to_dcp(one, tmp_path / "dcp")
    done = from_dcp(tmp_path / "dcp", tmp_path / "two")
    assert (done.tensors, done.left_out) == (len(saved), ())
    for name in entries(one):  # every byte of every file, so the state and the order too
        assert (tmp_path / "two" / name).read_bytes() == (one / name).read_bytes()


def test_torch_reads_what_we_write_under_its_own_names(tmp_path: Path) -> None:
    """Into the state dict that torch itself makes of an unsharded model and its optimizer."""

    def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 3)).square().sum().backward()
        optimizer.step()
        return model, optimizer

    weights, state = get_state_dict(*trained())
    saved = {f"model/{name}": tensor for name, tensor in weights.items()}
    for name, moments in state["state"].items():
        saved |= {f"optimizer/{key}/{name}": tensor for key, tensor in moments.items()}
    to_dcp(write(tmp_path / "one", saved), tmp_path / "dcp")

    found_weights, found_state = get_state_dict(*trained())
    wanted = {"model": found_weights, "optim": {"state": found_state["state"]}, "fourfold": ""}
    torch_load(wanted, tmp_path / "dcp")
    assert all(torch.equal(found_weights[name], tensor) for name, tensor in weights.items())
    for name, moments in state["state"].items():
        assert all(torch.equal(found_state["state"][name][key], tensor) for key, tensor in moments.items())
    assert "gpt-tiny" in wanted["fourfold"]


def fresh(shape: Shape) -> tuple[ff.models.Transformer, AdamW]:
    model = ff.models.build(CONFIG, grid_of(shape), dtype=torch.float64)
    return model, AdamW(model, lr=1e-2)


def trained(shape: Shape) -> tuple[ff.models.Transformer, AdamW]:
    """After one step, so that no parameter is what it began as."""
    model, optimizer = fresh(shape)
    rows = ff.local_rows(torch.arange(16, device=DEVICE).view(4, 4), grid_of(shape))
    model(rows, rows).backward()
    optimizer.step()
    return model, optimizer


def save_both(shape: Shape, root: Path, folder: Path) -> None:
    """A checkpoint of training, and what a user of torch saves: DTensors, and a few plain values."""
    model, optimizer = trained(shape)
    Saver(grid_of(shape), root, asynchronous=False).save(1, model, optimizer, STATE)
    moments = {name: {"exp_avg": tensor} for name, tensor in model.state_dict().items()}
    dcp.save({"model": model.state_dict(), "optim": {"state": moments}, "rate": 0.1, "step": 3}, checkpoint_id=folder)


def load_both(shape: Shape, run: Path, weights: Path, root: Path) -> dict[str, Any]:
    """Load them, and save for the test to see what was loaded."""
    grid = grid_of(shape)
    model, optimizer = fresh(shape)
    ff.load(weights, model)
    ff.save(root / "weights", model)
    model, optimizer = fresh(shape)
    state = load_training(run, model, optimizer)
    Saver(grid, root, asynchronous=False).save(1, model, optimizer, {})
    return state


@pytest.mark.slow
def test_a_run_and_the_dtensors_of_others_go_through_torch_to_another_grid(ranks, tmp_path: Path) -> None:
    ranks(4).run(save_both, Shape(x=2, z=2), tmp_path / "first", tmp_path / "dtensors")
    first = tmp_path / "first" / "step-00000001"
    to_dcp(first, tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "run")
    done = from_dcp(tmp_path / "dtensors", tmp_path / "weights")
    assert {key for key in done.left_out if not key.startswith("optim.state.")} == {"rate", "step"}

    states = ranks(4).run(load_both, Shape(y=2, data=2), tmp_path / "run", tmp_path / "weights", tmp_path / "second")
    assert states == [read_record(first).state] * 4
    saved = {name: tensor for name, tensor in tensors_of(first).items() if not name.startswith("random/")}
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in saved)
    found = tensors_of(tmp_path / "second" / "step-00000001")
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())
    weights = tensors_of(tmp_path / "second" / "weights")
    assert weights.keys() == {name for name in saved if name.startswith("model/")}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items())


class Buffer(bytearray):
    """Memory that can be watched."""


class Watched:
    """Passes tensors on in memory of its own, and knows how many of them were alive at once."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self.read, self.most = read, 0
        self.given: list[weakref.ref[Buffer]] = []

    def __call__(self, *args: Any) -> Any:
        found = self.read(*args)
        if not isinstance(found, Tensor):
            return found
        memory = Buffer(found.numpy().tobytes())
        self.given.append(weakref.ref(memory))
        self.most = max(self.most, sum(given() is not None for given in self.given))
        return torch.frombuffer(memory, dtype=found.dtype).view(found.shape)


def test_both_ways_hold_a_tensor_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = write(tmp_path / "one", {f"model/{index}": torch.randn(64, 64) for index in range(12)})
    for name in ("read_full_tensor", "_torch_load"):
        monkeypatch.setattr(module, name, Watched(getattr(module, name)))
    to_dcp(one, tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "two")
    # the one that is written, and the one before it until its name is bound again
    assert 1 <= module.read_full_tensor.most <= 2
    assert 1 <= module._torch_load.most <= 2


# What others wrote


def test_files_that_torch_wrote_as_safetensors(tmp_path: Path) -> None:
    saved = {"model": {"a": torch.randn(3, 2), "b": torch.randn(4).half()}}
    torch_save(saved, tmp_path / "dcp", serialization_format=SerializationFormat.SAFETENSORS)
    from_dcp(tmp_path / "dcp", tmp_path / "one")
    found = tensors_of(tmp_path / "one")
    assert all(torch.equal(found[f"model/{name}"], tensor) for name, tensor in saved["model"].items())


@pytest.mark.parametrize(
    ("keys", "prefix", "taken"),
    [
        (["model.a", "model.b.c", "optim.state.a.exp_avg", "ema.a"], None, {"a", "b.c"}),
        (["a", "b.c", "optimizer.a", "optim.a", "lr_scheduler.x"], None, {"a", "b.c"}),
        (["model.a", "ema.a", "ema.b"], "ema.", {"a", "b"}),
        (["model.a", "model.b"], "", {"model.a", "model.b"}),
    ],
)
def test_which_tensors_of_a_foreign_folder_are_parameters(
    tmp_path: Path, keys: list[str], prefix: str | None, taken: set[str]
) -> None:
    torch_save({key: torch.ones(2) for key in keys}, tmp_path / "dcp")
    done = from_dcp(tmp_path / "dcp", tmp_path / "one", prefix=prefix)
    assert tensors_of(tmp_path / "one").keys() == {f"model/{name}" for name in taken}
    assert done.tensors + len(done.left_out) == len(keys)
    assert read_record(tmp_path / "one").state == {}


# Strangers


class Attack:
    """Makes a file when a pickle of it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def by_getattr(marker: Path) -> bytes:
    """getattr is a name of the format: it must not look anything up."""
    return (
        b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\nS'__self__'\ntRp0\n"  # the module builtins, were it getattr
        b"cbuiltins\ngetattr\n(g0\nS'open'\ntR(S'" + str(marker).encode() + b"'\nS'w'\ntR."
    )


def by_build(marker: Path) -> bytes:
    """A state that is given to a class, not to an object, would change the class for all who use it."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    return name + b"(N}S'__setstate__'\nctorch\nSize\nst" + b"b." + str(marker).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((lambda marker, p=p: pickle.dumps(Attack(marker), protocol=p), r"names '\w+\.mkdir'") for p in (0, 2, 4, 5)),
        (lambda marker: b"cos\nsystem\n(S'mkdir " + str(marker).encode() + b"'\ntR.", r"names 'os\.system"),
        (lambda marker: b"cbuiltins\nopen\n(S'" + str(marker).encode() + b"'\nS'w'\ntR.", r"names 'builtins\.open"),
        (lambda _: b"ctorch\nload\n(S'x'\ntR.", r"names 'torch\.load"),
        (lambda _: b"ctorch.distributed.checkpoint.metadata\nos\n.", r"names 'torch\.[a-z.]+\.metadata\.os"),
        (lambda _: b"\x80\x04\x8c\x05torch\x8c\x08Size.mro\x93.", r"names 'torch\.Size\.mro"),
        (by_getattr, "is damaged"),
        (by_build, "is damaged"),
        (lambda _: b"", "is damaged"),
        (lambda _: pickle.dumps({"no": "metadata"}), "does not describe a distributed checkpoint"),
    ],
)  # fmt: skip
def test_metadata_of_a_stranger_run_nothing(tmp_path: Path, content: Callable[[Path], bytes], said: str) -> None:
    folder, marker = torch_save({"a": torch.ones(2)}, tmp_path / "dcp"), tmp_path / "marker"
    before = dict(vars(Metadata))
    (folder / ".metadata").write_bytes(content(marker))
    with pytest.raises(ValueError, match=said) as error:
        from_dcp(folder, tmp_path / "one")
    assert str(folder / ".metadata") in str(error.value)
    assert entries(tmp_path) == ["dcp"] and vars(Metadata) == before


def test_data_of_a_stranger_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    folder = torch_save({"a": Attack(marker), "model": {"b": torch.ones(2)}}, tmp_path / "dcp")

    def exchange(metadata: Metadata) -> None:
        spans = {index.fqn: span for index, span in metadata.storage_data.items()}
        vars(spans["model.b"]).update(vars(spans["a"]))

    edit(folder, exchange)
    with pytest.raises(ValueError, match=r"__0_0\.distcp holds something else than a tensor for 'model\.b'.*mkdir"):
        from_dcp(folder, tmp_path / "one")
    assert entries(tmp_path) == ["dcp"]


def edit(folder: Path, change: Callable[[Metadata], object]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def chunks(*boxes: tuple[int, int]) -> Callable[[Metadata], None]:
    """The tensor, of 4 elements, is cut into these offsets and sizes, all of them stored where it was."""

    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"].chunks = [
            ChunkStorageMetadata(torch.Size([offset]), torch.Size([size])) for offset, size in boxes
        ]
        (index, span), *_ = metadata.storage_data.items()
        metadata.storage_data = {type(index)("a", [offset]): span for offset, _ in boxes}

    return change


def spans(**fields: Any) -> Callable[[Metadata], None]:
    return lambda metadata: [vars(span).update(fields) for span in metadata.storage_data.values()]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spans(relative_path="../secret"), "'../secret' is not the name of a file in the folder"),
        (spans(relative_path="/etc/passwd"), "'/etc/passwd' is not the name of a file in the folder"),
        (spans(relative_path="gone.distcp"), r"gone\.distcp is missing"),
        (spans(offset=-1), "are no lengths"),
        (spans(length=10**9), r"__0_0\.distcp is cut short"),
        (spans(length=3), "3 bytes for a part"),
        (spans(transform_descriptors=["stream.zstd/1"]), r"transformed by .*stream\.zstd"),
        (chunks((0, 2)), "do not tile"),
        (chunks((0, 3), (2, 1)), "do not tile"),
        (chunks((0, 2), (4, 2)), "do not tile"),
        (chunks((0, 2), (2, 2)), r"holds .*\(4,\).*\.metadata says .*\(2,\)"),
        (lambda metadata: metadata.storage_data.clear(), "'a' from .* lies in no file"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"].properties, "dtype", torch.int32), "torch.int32"),
        (lambda metadata: setattr(metadata.state_dict_metadata["a"], "size", torch.Size([10**12])), "do not tile"),
    ],
)
def test_metadata_are_believed_in_nothing(tmp_path: Path, change: Callable[[Metadata], None], said: str) -> None:
    folder = torch_save({"a": torch.ones(4)}, tmp_path / "dcp")
    edit(folder, change)
    with pytest.raises((ValueError, OSError), match=said):
        from_dcp(folder, tmp_path / "one")
    assert entries(tmp_path) == ["dcp"]


def test_what_is_no_folder_of_torch_is_named(tmp_path: Path) -> None:
    for name, said in (
        ("__0.metadata", "use_collectives"),
        ("model.safetensors", "fourfold import"),
        ("x", "is missing"),
    ):
        folder = tmp_path / said
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(FileNotFoundError, match=said):
            from_dcp(folder, tmp_path / "one")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        from_dcp(tmp_path / "nowhere", tmp_path / "one")


# What fails leaves nothing


def test_what_cannot_be_converted_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"model/a": torch.ones(4), "model/b": torch.ones(4)})
    file = one / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank-00000\.safetensors is damaged: 'model/b'"):
        to_dcp(one, tmp_path / "dcp")
    other = write(tmp_path / "other", {"else/a": torch.ones(4)})
    with pytest.raises(ValueError, match="'else/a' is neither of model/"):
        to_dcp(other, tmp_path / "dcp")
    torch_save({"model": {"a": torch.ones(2, dtype=torch.complex64)}}, tmp_path / "complex")
    with pytest.raises(ValueError, match=r"'model\.a' has dtype torch\.complex64"):
        from_dcp(tmp_path / "complex", tmp_path / "dcp")
    torch_save({"optim": {"a": torch.ones(2)}}, tmp_path / "optim")
    with pytest.raises(ValueError, match=r"no tensor that begins with 'model\.'.*'optim\.a'"):
        from_dcp(tmp_path / "optim", tmp_path / "dcp", prefix="model.")
    with pytest.raises(FileExistsError, match="other is there already"):
        from_dcp(tmp_path / "complex", other)
    assert entries(tmp_path) == ["complex", "one", "optim", "other"]


def test_a_disk_that_takes_no_more_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    one = write(tmp_path / "one", {"model/a": torch.randn(300, 300)})
    to_dcp(one, tmp_path / "dcp")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"cannot write .*two\.partial") as there:
            to_dcp(one, tmp_path / "two")
        with pytest.raises(OSError, match=r"cannot write .*two\.partial") as back:
            from_dcp(tmp_path / "dcp", tmp_path / "two")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert there.value.errno == back.value.errno == errno.EFBIG
    assert entries(tmp_path) == ["dcp", "one"]


def test_a_folder_of_ours_with_edited_names_is_refused(tmp_path: Path) -> None:
    to_dcp(write(tmp_path / "one", {"model/a": torch.ones(4)}), tmp_path / "dcp")
    with pytest.raises(ValueError, match="knows its names"):
        from_dcp(tmp_path / "dcp", tmp_path / "two", prefix="model.")
    edit(tmp_path / "dcp", lambda metadata: metadata.state_dict_metadata.pop("model.a"))
    with pytest.raises(ValueError, match="not those of its tensors"):
        from_dcp(tmp_path / "dcp", tmp_path / "two")
