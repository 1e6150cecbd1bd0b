"""Hugging Face families, small and random: how each is built, what it reads, how exactly it computes.

`FAMILIES` is the table; a `Case` is one of them on a grid; `build`, `batch` and `generate` are the same on one process
and on ranks. test_families.py and soak_families.py compare the two.

Weights are drawn anew over a model's own initial ones: those have zero biases and norms of one, which would hide a
bias that is added twice or a norm that is left out.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fourfold.grid import Shape

SEED = 5
VOCAB = 53
SEQ = 12
CLASSES = 5
PROMPTS = 5
"""Rows that no number of places above 1 divides: generation must pad and drop."""
ENDS = list(range(2, VOCAB, 3))
"""A third of all ids end a row, so that rows, and with them places, finish at different steps."""

HF_LOSS = "loss/loss_utils.py:61 (logits.float())"


@dataclass(frozen=True)
class Family:
    model: str
    """A class of transformers; its config class is made with `sizes`."""
    sizes: dict[str, Any]
    batch: str = "causal"
    generates: bool = True
    fp32: str = ""
    """The lines (of transformers 5.22, under models/ where no folder is named) that compute in fp32 what depends on
    data. Positions' cosines are fp32 too, but the same numbers on every grid."""
    eager: bool = False
    """Attention as plain operations, whose mask is the lowest fp64 number: in the softmax's fp32 that is -inf, and a
    query that sees nothing but padding NaN. With padding such a family computes only where fp64 is kept."""
    layers: float = 0.3
    """Spread of the layers' weights, twice 48 ** -0.5: layers outweigh the embedding, or greedy generation would repeat
    the last id for ever."""
    embedding: float = 0.15
    extra: bool = False
    """A variant that only the soak takes."""

    @property
    def tolerance(self) -> float:
        """fp32 rounds at 6e-8, and sums in another order, or in fp64, differ by some of that; fp64 rounds at 1e-16."""
        return 1e-5 if self.fp32 else 1e-9


LLAMA = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2 = dict(
    vocab_size=VOCAB, n_embd=48, n_inner=96, n_layer=2, n_head=8, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
OPT = dict(
    vocab_size=VOCAB, hidden_size=48, ffn_dim=96, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=32, dropout=0.0, word_embed_proj_dim=48, pad_token_id=1, bos_token_id=2, eos_token_id=2,
)  # fmt: skip
BERT = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
)  # fmt: skip
DEBERTA = dict(
    BERT, type_vocab_size=2, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4,
    norm_rel_ebd="layer_norm", share_att_key=True, position_biased_input=False,
)  # fmt: skip
T5 = dict(
    vocab_size=VOCAB, d_model=48, d_kv=6, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=8,
    relative_attention_num_buckets=8, relative_attention_max_distance=16, dropout_rate=0.0, pad_token_id=0,
    eos_token_id=2, decoder_start_token_id=0,
)  # fmt: skip
VIT = dict(
    hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, image_size=12, patch_size=4,
    num_labels=CLASSES,
)  # fmt: skip
EAGER = dict(experts_implementation="eager")
EXPERTS = dict(
    num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1,
    mlp_only_layers=[0], norm_topk_prob=True,
)  # fmt: skip
LATENT = dict(
    num_key_value_heads=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1,
    first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8,
    n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.0,
)  # fmt: skip
SLIDING = dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
FALCON = dict(
    vocab_size=VOCAB, hidden_size=48, ffn_hidden_size=96, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
NEOX = dict(LLAMA, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.34))
PHI = dict(LLAMA, rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.67))


def rms(name: str, line: int) -> str:
    return f"{name}/modeling_{name}.py:{line} (RMS norm), {HF_LOSS}"


LLAMA_FP32 = rms("llama", 63)
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", dict(LLAMA, num_key_value_heads=8), fp32=LLAMA_FP32),
    "mistral": Family(
        "MistralForCausalLM", dict(LLAMA, num_key_value_heads=4, sliding_window=5), fp32=rms("mistral", 192)
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", dict(LLAMA, num_key_value_heads=2, tie_word_embeddings=True), fp32=rms("qwen2", 241)
    ),
    "qwen3": Family("Qwen3ForCausalLM", dict(LLAMA, num_key_value_heads=4, head_dim=8), fp32=rms("qwen3", 60)),
    "gemma": Family("GemmaForCausalLM", dict(LLAMA, num_key_value_heads=2, head_dim=8), fp32=rms("gemma", 73)),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        dict(LLAMA, **SLIDING, num_key_value_heads=4, head_dim=6, query_pre_attn_scalar=6, attn_logit_softcapping=2.0),
        fp32=rms("gemma2", 58) + ", gemma2/modeling_gemma2.py:203 (softmax)",
        eager=True,
        embedding=0.03,  # what layers add is normed to 1
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        dict(LLAMA, **SLIDING, num_key_value_heads=2, head_dim=6, query_pre_attn_scalar=6),
        fp32=rms("gemma3", 145),
        embedding=0.03,
    ),
    "phi": Family("PhiForCausalLM", dict(PHI, num_key_value_heads=8), fp32=HF_LOSS),
    "phi3": Family("Phi3ForCausalLM", dict(LLAMA, num_key_value_heads=2), fp32=rms("phi3", 267)),
    "gpt2": Family("GPT2LMHeadModel", GPT2, fp32=HF_LOSS),
    "gpt-neox": Family("GPTNeoXForCausalLM", NEOX, fp32=HF_LOSS),
    "opt": Family("OPTForCausalLM", OPT, fp32=HF_LOSS),
    "bert": Family("BertForMaskedLM", BERT, "masked", generates=False),
    "bert-classes": Family("BertForSequenceClassification", dict(BERT, num_labels=CLASSES), "classes", generates=False),
    "bloom": Family(
        "BloomForCausalLM",
        dict(
            vocab_size=VOCAB,
            hidden_size=48,
            n_layer=2,
            n_head=8,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        fp32=HF_LOSS + ", bloom/modeling_bloom.py (softmax)",
        eager=True,
        extra=True,
    ),
    "rwkv": Family(
        "RwkvForCausalLM",
        dict(
            vocab_size=VOCAB,
            context_length=32,
            hidden_size=48,
            num_hidden_layers=2,
            intermediate_size=96,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        fp32=HF_LOSS + ", rwkv/modeling_rwkv.py (its state)",
        generates=False,
        extra=True,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        dict(
            LLAMA,
            **EAGER,
            num_key_value_heads=4,
            head_dim=8,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=1,
            attention_chunk_size=8,
        ),
        fp32=rms("llama4", 96),
        generates=False,
        extra=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        dict(LLAMA, **EAGER, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2),
        fp32=rms("mixtral", 130),
        generates=False,
        extra=True,
    ),
    "qwen2-moe": Family(
        "Qwen2MoeForCausalLM",
        dict(LLAMA, **EAGER, **EXPERTS, shared_expert_intermediate_size=24),
        fp32=rms("qwen2_moe", 60),
        generates=False,
        extra=True,
    ),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        dict(LLAMA, **EAGER, **EXPERTS, head_dim=8),
        fp32=rms("qwen3_moe", 60),
        generates=False,
        extra=True,
    ),
    "deepseek-v2": Family(
        "DeepseekV2ForCausalLM",
        dict(LLAMA, **EAGER, **LATENT, topk_method="greedy"),
        fp32=rms("deepseek_v2", 60),
        generates=False,
        extra=True,
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        dict(LLAMA, **EAGER, **LATENT),
        fp32=rms("deepseek_v3", 60),
        generates=False,
        extra=True,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        dict(
            LLAMA,
            **EAGER,
            **SLIDING,
            num_key_value_heads=4,
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
        ),
        fp32=rms("gpt_oss", 60),
        eager=True,
        generates=False,
        extra=True,
    ),
    "phi-moe": Family(
        "PhimoeForCausalLM",
        dict(
            LLAMA, **EAGER, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0
        ),
        fp32=HF_LOSS + ", phimoe/modeling_phimoe.py (router)",
        generates=False,
        extra=True,
    ),
    "vit": Family("ViTForImageClassification", VIT, "images", generates=False),
    "t5": Family(
        "T5ForConditionalGeneration",
        T5,
        "translation",
        fp32="t5/modeling_t5.py:65 (variance)",
        layers=0.15,  # its scores are not divided by the root of the heads' width
    ),
    "t5-gated": Family(
        "T5ForConditionalGeneration",
        dict(T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        "translation",
        fp32="t5/modeling_t5.py:65 (variance)",
        layers=0.15,
    ),
    "falcon": Family("FalconForCausalLM", dict(FALCON, new_decoder_architecture=True, num_kv_heads=4), fp32=HF_LOSS),
    "falcon-one-kv-head": Family(
        "FalconForCausalLM", dict(FALCON, multi_query=True, bias=True), fp32=HF_LOSS, extra=True
    ),
    "falcon-alibi": Family(
        "FalconForCausalLM",
        dict(FALCON, multi_query=False, alibi=True, parallel_attn=False),
        fp32=HF_LOSS,
        extra=True,
    ),
    "deberta-v2": Family("DebertaV2ForMaskedLM", DEBERTA, "masked", generates=False),
    "llama-biases": Family(
        "LlamaForCausalLM",
        dict(LLAMA, num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        fp32=LLAMA_FP32,
        extra=True,
    ),
    "llama-eager": Family(
        "LlamaForCausalLM",
        dict(LLAMA, num_key_value_heads=4, attn_implementation="eager"),
        fp32=LLAMA_FP32 + ", llama/modeling_llama.py:197 (softmax)",
        eager=True,
        extra=True,
    ),
    "gemma-one-kv-head": Family(
        "GemmaForCausalLM", dict(LLAMA, num_key_value_heads=1, head_dim=8), fp32=rms("gemma", 73), extra=True
    ),
    "phi-normed-queries": Family(
        "PhiForCausalLM", dict(PHI, num_key_value_heads=4, qk_layernorm=True), fp32=HF_LOSS, extra=True
    ),
    "gpt-neox-in-turn": Family("GPTNeoXForCausalLM", dict(NEOX, use_parallel_residual=False), fp32=HF_LOSS, extra=True),
    "opt-norm-after": Family(
        "OPTForCausalLM", dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=24), fp32=HF_LOSS, extra=True
    ),
}


@dataclass(frozen=True)
class Case:
    name: str
    shape: Shape
    activations: str
    padded: bool = False
    """Rows of different lengths, with an attention mask."""
    widened: bool = False
    """fp64 all through, also where the family's code says fp32: what is left to differ is order alone."""
    generates: bool = True
    loads: bool = True
    """The plain model's state dict into the trained one: seconds, as torch derives anew for each mesh and shape how a
    DTensor is copied."""
    accumulates: bool = False
    """Two micro-steps a step, the first inside `ff.accumulate`."""
    checkpoints: bool = False
    """The model's own gradient checkpointing, non-reentrant, where the family has it."""
    through_dtensors: bool = False
    """torch's AdamW steps the DTensors themselves, instead of their shards: seconds dearer, see LocalAdamW."""

    def __str__(self) -> str:
        words = [name for name in ("padded", "widened", "accumulates", "checkpoints") if getattr(self, name)]
        return " ".join([self.name, str(self.shape), self.activations, *words])

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    @property
    def tolerance(self) -> float:
        return 1e-9 if self.widened else self.family.tolerance

    @property
    def rows(self) -> int:
        """Of the whole batch; few sizes, so that grids share what one process computes."""
        return 8 if 8 % (self.shape.z * self.shape.data) == 0 else 6

    @property
    def alone(self) -> Case:
        """The same on one process: equal for all cases of the same model and batch."""
        shape = Shape() if self.rows == 8 else Shape(z=3)
        if self.accumulates:  # which rows a micro-step has depends on how many places there are
            shape = Shape(data=self.shape.places)
        same = dict(activations="sharded", generates=True, loads=True, through_dtensors=False, checkpoints=False)
        return replace(self, shape=shape, **same)

    def micro_steps(self, inputs: dict[str, Tensor], places: int) -> list[dict[str, Tensor]]:
        """The rows of each micro-step: of the whole batch, or with `places` = 1 of a place's own."""
        if not self.accumulates:
            return [inputs]
        halves = [{name: [] for name in inputs} for _ in range(2)]
        for name, rows in inputs.items():
            for own in rows.chunk(places):
                for half, part in zip(halves, own.chunk(2), strict=True):
                    half[name].append(part)
        return [{name: torch.cat(parts) for name, parts in half.items()} for half in halves]

    @property
    def adam(self) -> dict[str, float]:
        """Adam divides a gradient by its own size: where the true one is 0, rounding by rounding. Its epsilon has to
        stand above what the tolerance lets a gradient differ by; the default 1e-8 does for fp64 alone."""
        return dict(lr=1e-3, eps=1e-8 if self.tolerance < 1e-6 else 1e-4)

    def arithmetic(self, padded: bool) -> contextlib.AbstractContextManager[Any]:
        return Widened() if self.widened or (padded and self.family.eager) else contextlib.nullcontext()


class Widened(TorchFunctionMode):
    """What a model's code would cast from fp64 to fp32 stays as it is."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func in (Tensor.float, Tensor.to, Tensor.type, functional.softmax, Tensor.softmax)
            and args[0].dtype == torch.float64
        ):
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def build(name: str) -> Any:
    """The plain model in fp64; equal in every process."""
    import transformers

    transformers.logging.set_verbosity_error()
    family = FAMILIES[name]
    torch.manual_seed(SEED)  # vectors are drawn around the model's own initial values
    with warnings.catch_warnings():  # transformers' DeBERTa decorates functions with torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        kind = getattr(transformers, family.model)
    model = kind(kind.config_class(**family.sizes)).double().train()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                parameter.add_(0.15 * drawn)
            else:
                parameter.copy_(drawn * (family.embedding if len(parameter) == VOCAB else family.layers))
    return model


def batch(case: Case, step: int) -> dict[str, Tensor]:
    """The whole batch. Rows have ever fewer targets, so that places count differently; in the second step the rows of
    the second half, so of some whole places, have none."""
    rows, kind = case.rows, case.family.batch
    generator = torch.Generator().manual_seed(step)
    # the id that pads occurs in unpadded rows too: an embedding's padding_idx gives it no gradient
    ids = torch.randint(VOCAB, (rows, SEQ), generator=generator)
    share = 1 / (1 + torch.arange(rows) / 2) * (torch.arange(rows) < (rows if step != 1 else rows // 2))
    if kind == "images":
        inputs = dict(pixel_values=torch.randn(rows, 3, 12, 12, generator=generator, dtype=torch.float64))
    else:
        inputs = dict(input_ids=ids)
    if kind in ("masked", "classes"):
        inputs["token_type_ids"] = torch.randint(2, ids.shape, generator=generator)
    labels = {
        "causal": ids,
        "masked": torch.randint(VOCAB, ids.shape, generator=generator),
        "translation": torch.randint(VOCAB, (rows, 7), generator=generator),
    }.get(kind, torch.randint(CLASSES, (rows, 1), generator=generator))
    keep = torch.rand(labels.shape, generator=generator) < share[:, None]
    keep[0] = True
    if case.padded:
        lengths = SEQ - torch.arange(rows) * 5 % 9
        mask = torch.arange(SEQ) < lengths[:, None]
        inputs["input_ids"] = ids.masked_fill(~mask, case.family.sizes["pad_token_id"])
        inputs["attention_mask"] = mask.long()
        keep &= mask if labels.shape == mask.shape else True
    inputs["labels"] = labels.masked_fill(~keep, -100).squeeze(1)
    return inputs


def generate(model: Any, case: Case) -> list[list[int]] | None:
    """Greedy: every rank gives all prompts, padded on the left, and gets all of the result. None from a family that
    does not generate."""
    if not case.family.generates:
        return None
    generator = torch.Generator().manual_seed(100)
    ids = torch.randint(VOCAB, (PROMPTS, 7), generator=generator)
    mask = (torch.arange(7) >= torch.arange(PROMPTS)[:, None]).long()
    pad = case.family.sizes["pad_token_id"]
    ids = torch.where(mask == 1, ids, pad)
    with case.arithmetic(padded=True):
        found = model.eval().generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=6, eos_token_id=ENDS, pad_token_id=pad
        )
    model.train()
    return found.tolist()
