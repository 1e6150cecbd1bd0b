"""Weights from and to Hugging Face folders: tables of names, then files, one tensor at a time.

In this file *theirs* is a name or tensor in Hugging Face's files, *ours* one of Fourfold's model. A table per model
type has our modules by the names of theirs; `*` is a layer's number, and `.weight` or `.bias` follows. One of their
tensors may hold several of ours: side by side with in-features first (GPT-2), or head by head (GPT-NeoX). One of ours
may hold several of theirs: the weights of all experts, where `EXPERT` stands for an expert's number.

Neither direction holds the whole model: a tensor is read, cut or joined, written, and freed before the next. Names,
shapes and dtypes of all files are checked before the first tensor is read.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.atomic import write_bytes
from fourfold.checkpoint.format import MODEL, Record, TensorFile, TensorType, TensorTypes, write_tensor_file
from fourfold.checkpoint.load import read_full_tensor, require_same_names, show_names
from fourfold.checkpoint.save import write_full_tensors
from fourfold.errors import DamagedCheckpointError
from fourfold.grid import Grid
from fourfold.models import ModelConfig, build
from fourfold.nn.layer import specs_of
from fourfold.nn.lora import LORA, LoraConfig, is_lora
from fourfold.parse import parse_json

Table = dict[str, tuple[str, ...]]
"""Our modules by the names of theirs; one of theirs may hold several of ours."""
EXPERT = "EXPERT"
"""Stands for an expert's number in the name of one of their modules; ours is the parameter that holds all experts."""
HEAD = "lm_head.weight"
"""The name of an untied head's weight in every table; the files of a type may have another name for it."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a model that has one, and the file that names the others of a model that has several."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
"""Files that hold the weights of older folders. They are never opened, since a pickle can run code."""
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of plain weights; any other dtype holds packed ones."""

# Names

QKV = ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v")
GPT2: Table = {
    "wte": ("embedding",),
    "wpe": ("positions",),
    "h.*.ln_1": ("layers.*.attention_norm",),
    "h.*.attn.c_attn": QKV,
    "h.*.attn.c_proj": ("layers.*.attention.out",),
    "h.*.ln_2": ("layers.*.mlp_norm",),
    "h.*.mlp.c_fc": ("layers.*.mlp.up",),
    "h.*.mlp.c_proj": ("layers.*.mlp.down",),
    "ln_f": ("norm",),
    "lm_head": ("head",),
}
GPT_NEOX: Table = {
    "embed_in": ("embedding",),
    "layers.*.input_layernorm": ("layers.*.attention_norm",),
    "layers.*.attention.query_key_value": QKV,
    "layers.*.attention.dense": ("layers.*.attention.out",),
    "layers.*.post_attention_layernorm": ("layers.*.mlp_norm",),
    "layers.*.mlp.dense_h_to_4h": ("layers.*.mlp.up",),
    "layers.*.mlp.dense_4h_to_h": ("layers.*.mlp.down",),
    "final_layer_norm": ("norm",),
    "lm_head": ("head",),
}
LLAMA: Table = {
    "embed_tokens": ("embedding",),
    "layers.*.input_layernorm": ("layers.*.attention_norm",),
    "layers.*.self_attn.q_proj": ("layers.*.attention.q",),
    "layers.*.self_attn.k_proj": ("layers.*.attention.k",),
    "layers.*.self_attn.v_proj": ("layers.*.attention.v",),
    "layers.*.self_attn.o_proj": ("layers.*.attention.out",),
    "layers.*.self_attn.q_norm": ("layers.*.attention.q_norm",),
    "layers.*.self_attn.k_norm": ("layers.*.attention.k_norm",),
    "layers.*.post_attention_layernorm": ("layers.*.mlp_norm",),
    "layers.*.mlp.gate_proj": ("layers.*.mlp.gate",),
    "layers.*.mlp.up_proj": ("layers.*.mlp.up",),
    "layers.*.mlp.down_proj": ("layers.*.mlp.down",),
    "norm": ("norm",),
    "lm_head": ("head",),
}
MIXTRAL: Table = {
    **{theirs: ours for theirs, ours in LLAMA.items() if ".mlp." not in theirs},
    "layers.*.block_sparse_moe.gate": ("layers.*.mlp.router",),
    "layers.*.block_sparse_moe.experts.EXPERT.w1": ("layers.*.mlp.gate",),
    "layers.*.block_sparse_moe.experts.EXPERT.w3": ("layers.*.mlp.up",),
    "layers.*.block_sparse_moe.experts.EXPERT.w2": ("layers.*.mlp.down",),
}
QWEN3_MOE: Table = {
    **LLAMA,  # the first blocks may have an MLP
    "layers.*.mlp.gate": ("layers.*.mlp.router",),
    "layers.*.mlp.experts.EXPERT.gate_proj": ("layers.*.mlp.gate",),
    "layers.*.mlp.experts.EXPERT.up_proj": ("layers.*.mlp.up",),
    "layers.*.mlp.experts.EXPERT.down_proj": ("layers.*.mlp.down",),
}


@dataclass(frozen=True, slots=True)
class Family:
    """The names and the layout of tensors in the files of one or several model types."""

    table: Table
    prefix: str
    """The prefix of all names but the head's in files of a whole model; files of its body alone lack it."""
    buffers: re.Pattern[str]
    """The names of tensors that older files hold and no model reads."""
    head: str = HEAD
    """The name of the head's weight in the type's files."""
    transposed: re.Pattern[str] | None = None
    """The modules that store weights with in-features first; None if no module does."""
    by_head: bool = False
    """Whether q, k and v alternate head by head."""

    def table_name(self, name: str) -> str:
        """Return the table's name of a tensor in a file."""
        return HEAD if name == self.head else name.removeprefix(self.prefix)

    def file_name(self, name: str) -> str:
        """Return the name that files of a whole model have for a tensor of the table."""
        return self.head if name == HEAD else self.prefix + name


_LLAMA = Family(LLAMA, "model.", re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"))
FAMILIES = {
    "gpt2": Family(
        GPT2,
        "transformer.",
        re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
        transposed=re.compile(r"h\.\*\.(attn|mlp)\.c_\w+"),
    ),
    "gpt_neox": Family(
        GPT_NEOX,
        "gpt_neox.",
        re.compile(r"layers\.\d+\.attention\.(masked_)?bias|(layers\.\d+\.attention\.)?rotary_emb\.inv_freq"),
        head="embed_out.weight",
        by_head=True,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": replace(_LLAMA, table=MIXTRAL),
    "qwen3_moe": replace(_LLAMA, table=QWEN3_MOE),
}


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One of their tensors and the tensors of ours that it holds, or one of ours and the tensors of theirs."""

    theirs: tuple[str, ...]
    """The names in the table, without prefix; several are those of the experts that ours holds, in order."""
    ours: tuple[str, ...]
    transposed: bool = False
    heads: int = 0
    """The number of heads if our tensors alternate head by head in theirs, else 0."""
    by_expert: bool = False
    """Whether each of theirs is one expert of ours."""

    def to_ours(self, theirs: Iterator[Tensor]) -> Iterator[Tensor]:
        """Yield ours from theirs, in order, each made when it is asked for."""
        if self.by_expert:
            yield torch.stack(list(theirs))
            return
        tensor = next(theirs)
        for index in range(len(self.ours)):
            if self.heads:
                part = tensor.unflatten(0, (self.heads, len(self.ours), -1))[:, index].flatten(0, 1)
            else:
                part = tensor.chunk(len(self.ours), dim=-1)[index] if len(self.ours) > 1 else tensor
                part = part.t() if self.transposed else part
            yield part.contiguous()

    def to_theirs(self, ours: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield theirs from ours, which come in order."""
        if self.by_expert:
            yield from ours[0].unbind()
        elif self.heads:
            yield torch.stack([part.unflatten(0, (self.heads, -1)) for part in ours], dim=1).flatten(0, 2)
        else:
            laid_out = [part.t() if self.transposed else part for part in ours]
            yield (torch.cat(laid_out, dim=-1) if len(laid_out) > 1 else laid_out[0]).contiguous()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Return the shape of each of theirs, given the shapes of ours."""
        return tuple(next(self.to_theirs([torch.empty(shapes[name], device="meta") for name in self.ours])).shape)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the model, by name, from a model without memory."""
    model = build(config, Grid.alone("cpu"), device="meta")
    return {name: spec.shape for name, spec in specs_of(model).items()}


def tensor_mappings(config: ModelConfig, model_type: str, shapes: Mapping[str, tuple[int, ...]]) -> list[TensorMapping]:
    """Return all tensors of a model with these parameters in files of this type, layer by layer."""
    family = FAMILIES[model_type]
    modules = [(theirs, "") for theirs in family.table if "*" not in theirs]
    modules += [(theirs, str(layer)) for layer in range(config.layers) for theirs in family.table if "*" in theirs]
    found = []
    for theirs, layer in modules:
        in_first = family.transposed is not None and family.transposed.fullmatch(theirs) is not None
        own = tuple(module.replace("*", layer) for module in family.table[theirs])
        if EXPERT in theirs:
            if own[0] in shapes:  # the block may have an MLP
                name = f"{theirs}.weight".replace("*", layer)
                names = tuple(name.replace(EXPERT, str(expert)) for expert in range(config.experts))
                found.append(TensorMapping(names, own, by_expert=True))
            continue
        for kind in ("weight", "bias"):
            ours = tuple(f"{module}.{kind}" for module in own)
            if ours[0] in shapes:  # the model may have no bias, no learned positions, no head of its own
                name = f"{theirs}.{kind}".replace("*", layer)
                heads = config.heads if family.by_head and len(ours) > 1 else 0
                found.append(TensorMapping((name,), ours, transposed=in_first and kind == "weight", heads=heads))
    return found


def match_names(
    mappings: Iterable[TensorMapping], model_type: str, found: Iterable[str], folder: Path
) -> dict[str, str]:
    """Return the names in the files by the names in the table. A tied head's copy of the embedding, which has no
    mapping, is there as `HEAD`.

    Raise unless the files hold all mapped tensors, each once, and nothing else that a model would read.
    """
    family, wanted = FAMILIES[model_type], {name: None for mapping in mappings for name in mapping.theirs}
    names: dict[str, str] = {}
    for name in found:
        plain = family.table_name(name)
        if family.buffers.fullmatch(plain):
            continue
        if plain in names:
            raise ValueError(f"{folder} holds both {names[plain]!r} and {name!r}, which are one tensor; remove one")
        names[plain] = name
    missing = [name for name in wanted if name not in names]
    unknown = [names[name] for name in names if name not in wanted and name != HEAD]
    if missing or unknown:
        faults = show_names(list(map(family.file_name, missing)), unknown, list(map(family.file_name, wanted)))
        if missing == [HEAD]:
            faults += "; where the head is the embedding's table, say tie_word_embeddings=true in config.json"
        raise ValueError(f"{folder} is not the {model_type} model that its config.json describes: {faults}")
    return names


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file as transformers does, and flush it to the disk."""
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


# From their files to a checkpoint


def import_weights(
    source: Path, model_type: str, config: ModelConfig, folder: Path, state: dict[str, Any]
) -> torch.dtype:
    """Write the weights of a Hugging Face folder as a checkpoint, in their dtypes; return the embedding's."""
    shapes = parameter_shapes(config)
    mappings = tensor_mappings(config, model_type, shapes)
    with _open_files(source) as files:
        names = match_names(mappings, model_type, files, source)
        types: dict[str, TensorType] = {}
        for mapping in mappings:
            expected, found = mapping.shape(shapes), []
            for name in (names[theirs] for theirs in mapping.theirs):
                path, (dtype, shape) = files[name].path, files[name].tensors[name]
                if shape != expected:
                    raise DamagedCheckpointError(
                        f"{path}: {name!r} has shape {shape}, and by config.json {expected}; copy both again"
                    )
                if dtype not in FLOATS:
                    raise ValueError(
                        f"{path}: {name!r} has dtype {dtype}, so the weights are packed; save them in one of "
                        f"{', '.join(map(str, FLOATS))}"
                    )
                found.append(dtype)
            # experts may differ in dtype; the promoted one holds the values of all
            dtype = reduce(torch.promote_types, found)
            types |= {MODEL + ours: TensorType(dtype, shapes[ours]) for ours in mapping.ours}
        if config.tied and HEAD in names:
            _require_tied(files, names, mappings)

        def tensors() -> Iterator[Tensor]:  # read one at a time, when the writer asks for the next
            for mapping in mappings:
                stored = (names[theirs] for theirs in mapping.theirs)
                yield from mapping.to_ours(files[name].read(name) for name in stored)

        write_full_tensors(folder, types, tensors(), state)
        return types[MODEL + "embedding.weight"].dtype


@contextmanager
def _open_files(folder: Path) -> Iterator[dict[str, TensorFile]]:
    """Open the files of a folder and yield the file of every tensor, by the tensor's name."""
    with ExitStack() as stack:
        found: dict[str, TensorFile] = {}
        for path, promised in _weight_files(folder).items():
            file = stack.enter_context(TensorFile(path))
            if lacking := sorted(promised - file.tensors.keys()):
                raise DamagedCheckpointError(
                    f"{path} does not hold {lacking[0]!r}, though {INDEX} lists it there; copy the folder again"
                )
            for name in file.tensors:
                if name in found:
                    raise DamagedCheckpointError(
                        f"{name!r} is both in {found[name].path} and in {path}; copy the folder again"
                    )
                found[name] = file
        yield found


def _conversion(folder: Path) -> str:
    """Return a line for a shell that converts a folder's pickles, whatever characters its name has."""
    name = json.dumps(str(folder), ensure_ascii=False)  # double quotes, because shlex.quote adds single ones
    code = f'from transformers import AutoModelForCausalLM as M; M.from_pretrained({name}).save_pretrained("NEW")'
    return f"python -c {shlex.quote(code)}"


def _weight_files(folder: Path) -> dict[Path, set[str]]:
    """Return the files of a folder that hold weights, each with the tensors that the folder's index promises there."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: set()}
    index = folder / INDEX
    if not index.is_file():
        if pickles := [name for name in PICKLES if (folder / name).exists()]:
            raise ValueError(
                f"{folder} has its weights in {pickles[0]}, a pickle, which can run code and is never opened; if you "
                f"trust it, convert it: {_conversion(folder)}"
            )
        raise FileNotFoundError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}; give a Hugging Face folder with its weights"
        )
    try:
        files: dict[Path, set[str]] = {}
        for name, file in parse_json(index.read_bytes())["weight_map"].items():
            if Path(file).name != file:  # nothing outside the folder is opened
                raise ValueError(f"{file!r} is not the name of a file beside it")
            files.setdefault(folder / file, set()).add(name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{index} is not an index of weights ({type(error).__name__}: {error}); copy it again"
        ) from error
    return files


def _require_tied(files: Mapping[str, TensorFile], names: Mapping[str, str], mappings: Iterable[TensorMapping]) -> None:
    """Raise if the head differs from the embedding's table, though config.json says that they are one."""
    table = next(names[mapping.theirs[0]] for mapping in mappings if mapping.ours == ("embedding.weight",))
    head = names[HEAD]
    if not torch.equal(files[table].read(table), files[head].read(head)):
        raise ValueError(
            f"{files[head].path}: {head!r} is not equal to {table!r}, though config.json ties them; "
            "say tie_word_embeddings=false there to keep both"
        )


# From a checkpoint to their files


@dataclass(frozen=True, slots=True)
class ExportedWeights:
    """The weight files that an export has written."""

    files: int
    nbytes: int
    dtype: torch.dtype
    """The dtype of the embedding."""


def export_weights(
    checkpoint: Path,
    record: Record,
    model_type: str,
    config: ModelConfig,
    to: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    lora: LoraConfig | None = None,
) -> ExportedWeights:
    """Write the weights of a checkpoint into files of at most `max_file_bytes`; a larger tensor has one for itself.

    Without a dtype each tensor keeps its own. The pairs of a model with LoRA are added to the weights beside them.
    """
    shapes, scale = parameter_shapes(config), 0.0 if lora is None else lora.alpha / lora.rank
    pairs = [name for name in record.names(MODEL) if lora is not None and is_lora(name)]
    require_same_names([*(MODEL + name for name in shapes), *pairs], record.names(MODEL), checkpoint)
    for name, shape in shapes.items():
        if record.tensors[MODEL + name].shape != shape:
            found = record.tensors[MODEL + name].shape
            raise ValueError(f"{MODEL + name!r} has shape {found} in {checkpoint}, and by the config {shape}")
    family = FAMILIES[model_type]
    mappings = tensor_mappings(config, model_type, shapes)
    types: dict[str, TensorType] = {}
    for mapping in mappings:
        # Our parts of one of their tensors may differ in dtype; the promoted one holds the values of all.
        own = reduce(torch.promote_types, (record.tensors[MODEL + part].dtype for part in mapping.ours))
        types |= {family.file_name(name): TensorType(dtype or own, mapping.shape(shapes)) for name in mapping.theirs}
    groups = _group_by_file(types, max_file_bytes)
    files = [WEIGHTS]
    if len(groups) > 1:
        files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    tensors = _read_theirs(checkpoint, record, mappings, types, scale)
    for file, names in zip(files, groups, strict=True):
        write_tensor_file(to / file, {name: types[name] for name in names}, islice(tensors, len(names)))
    nbytes = sum(kind.nbytes for kind in types.values())
    if len(groups) > 1:
        where = {name: file for file, names in zip(files, groups, strict=True) for name in names}
        write_json(to / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": where})
    return ExportedWeights(len(groups), nbytes, next(iter(types.values())).dtype)


def _read_ours(checkpoint: Path, record: Record, name: str, scale: float) -> Tensor:
    """Return one of our tensors; a weight with a LoRA pair beside it is W + scale B A."""
    whole = read_full_tensor(checkpoint, record, MODEL + name)
    layer, _, own = name.rpartition(".")
    factors = [f"{MODEL}{layer}.{LORA}.{factor}" for factor in ("a", "b")]
    if own != "weight" or not set(factors) <= record.tensors.keys():
        return whole
    a, b = (read_full_tensor(checkpoint, record, factor) for factor in factors)
    return whole + scale * (b @ a)


def _read_theirs(
    checkpoint: Path, record: Record, mappings: Iterable[TensorMapping], types: TensorTypes, scale: float
) -> Iterator[Tensor]:
    """Yield their tensors in the order of `types`, made from ours and cast; `scale` is that of LoRA pairs."""
    kinds = iter(types.items())
    for mapping in mappings:
        # not kept in a variable, so that they are freed before the next are read
        for tensor in mapping.to_theirs([_read_ours(checkpoint, record, part, scale) for part in mapping.ours]):
            name, (dtype, _) = next(kinds)
            cast = tensor.to(dtype)
            # A narrower dtype rounds, which the user asked for; values that became infinite would make the model
            # useless.
            if cast.dtype != tensor.dtype and not torch.equal(cast.isfinite(), tensor.isfinite()):
                raise ValueError(
                    f"{name!r} has values that {dtype} cannot hold; export in another dtype, such as --dtype bf16"
                )
            yield cast


def _group_by_file(types: TensorTypes, max_file_bytes: int) -> list[list[str]]:
    """Divide the names, in order, into files that are as full as possible."""
    groups: list[list[str]] = []
    filled = 0
    for name, kind in types.items():
        if not groups or filled + kind.nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += kind.nbytes
    return groups
