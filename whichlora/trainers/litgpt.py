"""LitGPT's `finetune_lora` and `finetune_full`: its own model code and adapters, under Fabric.

    logits = model(input_ids, lm_head_chunk_size=128)
    loss = chunked_cross_entropy(logits, targets[..., 1:])
    fabric.backward(loss / gradient_accumulation_iters)

Queries, keys and values are one matrix with one adapter, keys and values are repeated for every
head, and rotary tables are fp32. Embeddings and head are two matrices. Fabric casts what the model
returns to fp32, and `logits` holds it until the next forward is done.

bitsandbytes stores the head in 4 bit, too. From 0.5.0 on a `StableEmbedding` takes the place of
the token table then, when all else is frozen: its gradient is added up and never read.

Source: litgpt 0.5.13 `finetune/lora.py`, `finetune/full.py`, `lora.py`, `model.py`, `utils.py`;
lightning 2.6.6 `fabric/plugins/precision/`. What releases did is read at the commits named below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from whichlora.errors import ConfigError
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.dtypes import Dtypes
from whichlora.spec.layer import Attention, Layer, Mlp, Norm, NormKind
from whichlora.spec.run import ALL_LINEAR, ATTENTION, DEFAULT_TARGETS, FOUR_BIT_BNB, RunConfig
from whichlora.spec.versions import ByRelease, Libraries
from whichlora.trainers.base import ChunkedLoss, Defaults, OutputsHeld, Trainer, always

# Types among the checkpoints of litgpt/config.py whose layers are written here.
TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "phi3"),
    *("gpt_neox", "falcon", "stablelm"),
)
QUERY, KEY, VALUE, PROJECTION = "query", "key", "value", "projection"
MLP = ("fc_1", "fc_2", "mlp_proj")  # of two, a `GptNeoxMLP` has the last and "fc"
HEAD = "lm_head"
# `lora_*` of the command → names of the matrices that it adapts
GROUPS: dict[str, tuple[str, ...]] = {
    QUERY: (QUERY,),
    KEY: (KEY,),
    VALUE: (VALUE,),
    PROJECTION: (PROJECTION,),
    "mlp": ("fc", *MLP),
    "head": (HEAD,),
}
_CHUNK = 128  # positions: `lm_head_chunk_size`, `chunk_size`
_METHODS = ("lora", "qlora", "full")
_QUANTS = ("none", *FOUR_BIT_BNB)
_OUT_OF_CHUNKS: ByRelease[bool] = (("0", True), ("0.5.5", False))  # soft caps; commit 17a58dfa
_STABLE_EMBEDDING: ByRelease[bool] = (("0", False), ("0.5.0", True))  # commit ae798aba


# `longest_seq_ix if iter_num == 1`; commit 73baa2d5, before 0.2.0
_HELD: ByRelease[OutputsHeld] = (("0", "until_step_ends"), ("0.2.0", "until_next_outputs"))
_NORMS: ByRelease[NormKind] = (("0", "rms_narrow"), ("0.1.0", "rms_wide"))  # commit 6178c7cc


# --- the model ------------------------------------------------------------------------------------


def _own_model(model: ModelSpec, run: RunConfig) -> ModelSpec:
    """`model` in LitGPT's classes.

    Raises:
        ConfigError: a type that they are not written down for.
    """
    if model.model_type not in TYPES or model.tower is not None or model.head is None:
        raise ConfigError(
            f"trainer: litgpt is predicted for {', '.join(TYPES)}; {model.name} is a "
            f"{model.model_type}; use another trainer"
        )
    kind = run.versions.value_of("litgpt", _NORMS)
    model = model.with_layers(partial(_own_layer, norm_kind=kind))
    assert model.head is not None
    softcap = model.logit_softcap
    if run.method != "full" and run.versions.value_of("litgpt", _OUT_OF_CHUNKS):
        softcap = None
    norms = model.embedding_norms
    if _is_stable(run):
        width = model.embeddings[0].width
        norms = (Norm(name="norm", kind="layer", width=width, bias=True),)
    return replace(
        model,
        head=replace(model.head, name=HEAD),
        head_tied=False,
        final_norms=_own_norms(model.final_norms, kind),
        embedding_norms=norms,
        logit_softcap=softcap,
        rotary_tables_before="0",
        narrow_loss_before="",
        buffer_bytes=0,
    )


def _own_norms(norms: tuple[Norm, ...], kind: NormKind) -> tuple[Norm, ...]:
    return tuple(replace(norm, kind=kind) if norm.kind == "rms" else norm for norm in norms)


def _own_layer(layer: Layer, *, norm_kind: NormKind) -> Layer:
    (attention,) = layer.attentions
    assert layer.mlp is not None
    return replace(
        layer,
        attentions=(_own_attention(attention, norm_kind),),
        mlp=_own_mlp(layer.mlp),
        norms=_own_norms(layer.norms, norm_kind),
        dropouts=(),
        names_attention=False,
        names_norm=False,
        returns_probabilities=False,
        copies_gradients=False,
    )


def _own_attention(attention: Attention, norm_kind: NormKind) -> Attention:
    """One projection, tables in fp32, and a mask of its own in each layer that slides."""
    first, *_, last = attention.linears
    widths = (attention.q_width, attention.k_width, attention.v_width)
    linears = tuple(
        replace(first, name=name, out_features=width, is_subclass=False)
        for name, width in zip((QUERY, KEY, VALUE), widths, strict=True)
    )
    return replace(
        attention,
        linears=(*linears, replace(last, name=PROJECTION, is_subclass=False)),
        norms=_own_norms(attention.norms, norm_kind),
        projection="joined",
        sdpa="fused" if attention.softcap is None else "eager",
        always_masked=attention.sliding_window is not None,
        joins_rotation=False,
        names_parts=False,
        wide_rotation="",
        tables="fp32",
        wide_softmax=True,
        dropout=0.0,
        eager="scaled",
        returns_probabilities=False,
        flash=False,
    )


def _own_mlp(mlp: Mlp) -> Mlp:
    *into, out = mlp.linears
    names = MLP[:2] if mlp.gated else ("fc",)
    # `gelu(approximate="tanh")` is what transformers writes out
    activation = "gelu_pytorch_tanh" if mlp.activation == "gelu_new" else mlp.activation
    own = (
        *(replace(into[0], name=name, out_features=mlp.width, is_subclass=False) for name in names),
        replace(out, name=MLP[2], is_subclass=False),
    )
    return replace(mlp, linears=own, activation=activation, dropout=False)


# --- which matrices are adapted -------------------------------------------------------------------


def _own_targets(model: ModelSpec, targets: tuple[str, ...]) -> tuple[str, ...]:
    """The names of `_own_model`, for its own words and for those of transformers.

    Raises:
        ConfigError: a part of the matrices that are adapted together.
    """
    names = dict(_named_by_transformers(model)) | GROUPS
    own: list[str] = []
    for target in targets:
        if target == DEFAULT_TARGETS:
            own += (QUERY, VALUE)
        elif target in (ALL_LINEAR, ATTENTION):
            own.append(target)
        else:
            own += names.get(target.rpartition(".")[2], (target,))
    of_mlp = set(_mlp_names(model))
    given = of_mlp & set(own)
    if given and given != of_mlp and ALL_LINEAR not in own:
        raise ConfigError(
            f"target_modules: LitGPT adapts all matrices of the MLP or none, got "
            f"{', '.join(sorted(given))}; give mlp"
        )
    has_mlp = of_mlp <= set(own)
    kept = [name for name in own if name in of_mlp or name not in GROUPS["mlp"] or not has_mlp]
    return tuple(dict.fromkeys(kept))


def _mlp_names(model: ModelSpec) -> tuple[str, ...]:
    return tuple(
        {
            linear.name: None
            for layer, _ in model.layers()
            if layer.mlp is not None
            for linear in _own_mlp(layer.mlp).linears
        }
    )


def _named_by_transformers(model: ModelSpec) -> Iterator[tuple[str, tuple[str, ...]]]:
    for layer, _ in model.layers():
        for attention in layer.attentions:
            *into, out = attention.linears
            whole = (QUERY, KEY, VALUE)
            parts = [(name,) for name in whole] if len(into) == len(whole) else [whole]
            yield from zip((linear.name for linear in into), parts, strict=False)
            yield out.name, (PROJECTION,)
        if layer.mlp is not None:
            yield from _mlp_by_transformers(layer.mlp)
    if model.head is not None:
        yield model.head.name, (HEAD,)


def _mlp_by_transformers(mlp: Mlp) -> Iterator[tuple[str, tuple[str, ...]]]:
    own = tuple(linear.name for linear in _own_mlp(mlp).linears)
    if len(own) > len(mlp.linears):  # gate and up in one
        yield mlp.linears[0].name, own[:2]
        yield mlp.linears[1].name, own[2:]
    else:
        yield from zip(
            (linear.name for linear in mlp.linears), ((name,) for name in own), strict=True
        )


# --- its steps ------------------------------------------------------------------------------------


def _outputs_held(run: RunConfig) -> OutputsHeld:
    """The longest row came first, so that what later steps hold is less."""
    return run.versions.value_of("litgpt", _HELD)


def _chunked_loss(run: RunConfig) -> ChunkedLoss:
    """`finetune_full` calls the model without `lm_head_chunk_size`."""
    return ChunkedLoss(positions=_CHUNK, by_head=run.method != "full", widened=True)


def _is_stable(run: RunConfig) -> bool:
    quantised = run.quant in FOUR_BIT_BNB
    return quantised and run.versions.value_of("litgpt", _STABLE_EMBEDDING)


def _defaults(libraries: Libraries) -> Defaults:
    """`--precision` is bf16-mixed where nobody gives one: fp32 weights under autocast.

    Source: `get_default_supported_precision`; `setup` of finetune/lora.py refuses it beside
    `--quantize`.
    """
    return Defaults(told_dtype="float32", autocasts=True, autocasts_quantised=False)


def _narrow_copies(dtypes: Dtypes) -> Dtypes:
    """Source: `BitsandbytesPrecision`, which converts each `Linear`, one by one on the GPU.

    `quantize` of its `_Linear4bit` makes the codes of `weight.to(torch.half)`.
    """
    return replace(
        dtypes,
        quantises_head=True,
        copies_four_bit=False,
        casts_expanded=dtypes.half == "bf16" and dtypes.half_bytes == 2,
        loads_at_once=False,
    )


def _check(run: RunConfig) -> None:
    quant = run.quant or "none"
    is_mixed = run.precision in ("bf16", "fp16")
    spread = run.parallel.gpus > 1
    faults = (
        (run.method not in _METHODS, "method", run.method, "lora, qlora or full"),
        (quant not in _QUANTS, "quant", quant, "nf4, nf4-dq, fp4 or none"),
        (
            is_mixed and (run.base_dtype != "float32" or quant != "none"),
            "precision",
            run.precision,
            "bf16-pure (its bf16-true), fp32, or bf16 with base_dtype float32 (its bf16-mixed)",
        ),
        (run.precision.endswith("no-autocast"), "precision", run.precision, "bf16-pure"),
        (run.attn != "sdpa", "attn", run.attn, "sdpa"),
        (
            bool(run.gradient_checkpointing) and not spread,
            "gradient_checkpointing",
            "true",
            "false",
        ),
        (not run.gradient_checkpointing and spread, "gradient_checkpointing", "false", "true"),
        (spread and run.parallel.names != ("fsdp",), "parallel", run.parallel.strategy, "fsdp"),
        (spread and quant != "none", "quant", quant, "none on several GPUs"),
        (run.bias != "none", "bias", run.bias, "none"),
        (bool(run.modules_to_save), "modules_to_save", ", ".join(run.modules_to_save), "none"),
        (bool(run.method_options), "method_options", "some", "none"),
    )
    for is_wrong, name, value, accepted in faults:
        if is_wrong:
            raise ConfigError(f"{name}: trainer litgpt has {accepted}, got {value}")


def _notes(run: RunConfig) -> tuple[str, ...]:
    notes = [
        "LitGPT's `logits` of the batch before are counted as long as those of this one; after a "
        "shorter batch it takes less",
    ]
    if _is_stable(run):
        notes.append(
            "LitGPT adds up a gradient of the frozen token table, which its StableEmbedding has "
            "and no optimizer reads"
        )
    return tuple(notes)


TRAINER = Trainer(
    name="litgpt",
    summary="LitGPT's finetune_lora and finetune_full, with its own model code",
    also_called={"lit-gpt": ""},
    steps="whichlora.tracer.without_steps:refuse",
    library_class="litgpt.GPT",
    loss_heads=("hf",),
    outputs_held=_outputs_held,
    widens_always=True,
    chunked_loss=_chunked_loss,
    narrows_embedding_states=always,  # only the Trainer asks bitsandbytes for 32 bits
    defaults=_defaults,
    dated_by="litgpt",
    has_one_way=True,
    keeps_base=always,
    narrows_adapters=lambda run: run.quant in FOUR_BIT_BNB,
    own_model=_own_model,
    own_targets=_own_targets,
    leaves_table_gradient=_is_stable,
    narrow_copies=_narrow_copies,
    reentrant=False,
    check=_check,
    notes=_notes,
)
