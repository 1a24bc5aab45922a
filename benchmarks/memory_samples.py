"""Runs drawn with a seed from every family, method and option, and their traced peaks.

The tracer is the slow half and its results are kept, one JSON line per run; the ledger is asked
again each time a table is made, so a changed formula shows at once.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory import allocator
from whichlora.memory.allocator_simulator import replay, rounded
from whichlora.memory.training import Ledger
from whichlora.predict import predict as prediction
from whichlora.predict import quantities
from whichlora.predict import resolve as resolution
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.judged import judged_run
from whichlora.predict.resolve import ResolvedRun
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.run import ALL_LINEAR, ATTENTION, RunConfig
from whichlora.store import models as model_store
from whichlora.store.gpus import find_gpu
from whichlora.tracer.extrapolate import TracedEvent, shallow

GPU = find_gpu("h100-sxm-80gb")
ENDLESS = 2**60  # a full card gives idle segments back, an endless one never
TRACES = Path(__file__).resolve().parent / "traces"  # a file for each draw
FIRST_TRACES = TRACES / "draw-1.jsonl"
LATER_TRACES = TRACES / "later-types.jsonl"
NEWEST_TRACES = TRACES / "newest-types.jsonl"
LATEST_TRACES = TRACES / "latest-types.jsonl"
SETTING_TRACES = TRACES / "settings.jsonl"
EVERY_TYPE_TRACES = TRACES / "draw-6.jsonl"
LED_TRACES = TRACES / "led.jsonl"
LONG_TRACES = TRACES / "long-encoder-decoders.jsonl"
T5_TRACES = TRACES / "long-t5-and-switch.jsonl"
RUNS_OF_LATER = 4  # of each type
RUNS_OF_NEWEST = 6
LATEST_RUNS = {
    "jamba": (*range(20), *range(100, 118), *range(128, 137)),
    "gemma3n_text": (*range(31), *range(100, 131)),
}
LED_RUNS = range(100, 132)
T5_RUNS = {  # from 100 on: drawn after the formulas were finished
    "longt5": (*range(36), *range(100, 130)),
    "switch_transformers": (*range(60), *range(100, 150)),
}
MAX_LAYERS = 8  # where layers differ all are traced, which takes a second or so each
MAX_SECONDS = 200

INVENTED = {  # for types without a model in the database; Llama's names, the rest is the default
    "vocab_size": 50_304,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 96,
}
_BART = {"hidden_size": 1024, "num_hidden_layers": 6, "encoder_layers": 6, "decoder_layers": 6}
_STACK = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 512,
}
_NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}  # chance can't be traced
_SIX = {"num_hidden_layers": 6}
_EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 640}
_ROUTED = {
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 640,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = (
    _SIX
    | _ROUTED
    | {
        "head_dim": None,
        "num_key_value_heads": 16,
        "kv_lora_rank": 128,
        "q_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 96,
    }
)
_NARROW = {"num_experts": 16, "intermediate_size": 640}
_MAMBA = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "head_dim": None}
_MAMBA2 = {"hidden_size": 1536, "state_size": 64, "num_heads": 48, "n_groups": 2, "head_dim": 64}
_T5 = {
    "d_ff": 4096,
    "d_kv": 96,
    "head_dim": None,
    "num_hidden_layers": None,
    "num_layers": 4,
    "num_decoder_layers": 4,
    "decoder_start_token_id": 0,
}
_LONG_T5 = _T5 | {"model_type": "longt5", "feed_forward_proj": "gated-gelu"}
OTHER_NAMES: dict[str, dict[str, Any]] = {  # types that name some otherwise; None leaves one out
    "axk1": _LATENT,
    "bamba": _SIX | _MAMBA | {"mamba_n_groups": 2, "attn_layer_indices": [2, 5]},
    "blenderbot": _BART,
    "blenderbot-small": _BART,
    "codegen": {"n_inner": 4096},
    "cohere2_moe": _SIX | _NARROW | {"num_shared_experts": 1, "sliding_window": 1024},
    "dots1": _SIX | _ROUTED,
    "ernie4_5_moe": _SIX | {"moe_num_experts": 16, "moe_k": 4, "moe_intermediate_size": 640},
    "exaone_moe": _SIX | _EXPERTS | {"sliding_window": 1024},
    "falcon_h1": _SIX
    | _MAMBA
    | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "embedding_multiplier": 5.0},
    "flex_olmo": _NARROW | {"head_dim": None, "pad_token_id": 1, "eos_token_id": 2},
    "gemma3n_text": _SIX
    | {
        "hidden_size": 1024,
        "intermediate_size": 2560,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size_per_layer_input": 4096,
        "hidden_size_per_layer_input": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        "num_kv_shared_layers": 2,
        "max_position_embeddings": 8192,
    },
    "glm4_moe_lite": _LATENT,
    "granitemoehybrid": _SIX
    | _MAMBA
    | {
        "intermediate_size": 640,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "layer_types": ["mamba", "mamba", "attention"] * 2,
    },
    "hy_v3": _SIX | _EXPERTS,
    "hunyuan_v1_moe": _NARROW | {"moe_topk": 4},
    "jamba": _SIX
    | {
        "hidden_size": 1024,
        "intermediate_size": 1280,
        "num_experts": 8,
        "head_dim": None,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "max_position_embeddings": 256,
    },
    "led": _BART
    | {
        "max_encoder_position_embeddings": 4096,
        "max_decoder_position_embeddings": 4096,
        "attention_window": 256,
    },
    "longt5-local": _LONG_T5 | {"encoder_attention_type": "local"},
    "longt5-global": _LONG_T5 | {"encoder_attention_type": "transient-global"},
    "lfm2_moe": _SIX
    | _EXPERTS
    | {"head_dim": None, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "llama4_text": _SIX
    | {
        "intermediate_size": 640,
        "intermediate_size_mlp": 2560,
        "num_local_experts": 8,
        "attention_chunk_size": 1024,
        "interleave_moe_layer_step": 2,
    },
    "m2m_100": _BART | _NO_LAYERDROP,
    "esm": {
        "vocab_size": 33,
        "pad_token_id": 1,
        "mask_token_id": 32,
        "position_embedding_type": "rotary",
        "token_dropout": True,
    },
    "eurobert": {"pad_token_id": 0},
    "mamba2": _MAMBA2,
    "marian": _BART | {"pad_token_id": 0, "decoder_start_token_id": 0},
    "mellum": _SIX | _EXPERTS | {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "minicpm3": {"head_dim": None, "num_key_value_heads": 16, "qk_nope_head_dim": 64},
    "minimax_m2": {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 640},
    "mvp": _BART,
    "pegasus": _BART,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"] * 2,
        "mamba_num_heads": 48,
        "n_groups": 2,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 640,
        "moe_shared_expert_intermediate_size": 1280,
    },
    "persimmon": {"num_key_value_heads": 16},
    "plbart": _BART | {"encoder_attention_heads": 16, "decoder_attention_heads": 16},
    "solar_open": _SIX | _ROUTED,
    "switch_transformers": _T5
    | {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "vocab_size": 32_128},
    "t5gemma": {"encoder": _STACK, "decoder": _STACK},
    "umt5": {"d_ff": 4096, "d_kv": 96, "num_decoder_layers": 12},
}
NO_AUTO_CLASS = {  # never a model by themselves
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"),
    *("glm4v_text", "glm4v_moe_text"),
}
FIRST_TYPES = (
    *("albert", "apertus", "arcee", "bart", "bert", "bloom", "camembert", "codegen", "cohere"),
    *("cohere2", "cwm", "dbrx", "deberta-v2", "deepseek_v2", "deepseek_v3", "distilbert"),
    *("electra", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "gemma4"),
    *("gemma4_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *("gpt_oss", "gptj", "granite", "granitemoe", "granitemoeshared", "helium"),
    *("hunyuan_v1_dense", "internlm3", "jais2", "lfm2", "llama", "mbart", "ministral"),
    *("ministral3", "mistral", "mixtral", "modernbert", "mpt", "mt5", "nemotron", "olmo", "olmo2"),
    *("olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    *("qwen3_next", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5", "umt5"),
    *("vaultgemma", "xlm-roberta", "youtu"),
)
"""The types that seeds 0 and 1 were drawn from; a type that came later has draws of its own."""
NEWEST_TYPES = (
    *("axk1", "bamba", "biogpt", "bitnet", "falcon_h1", "hy_v3", "llama4_text", "mamba2"),
    *("minicpm3", "nemotron_h"),
)
"""The types that came after those, and whose runs have a file of their own."""
LATEST_TYPES = tuple(LATEST_RUNS)
"""The types that came last, so have theirs."""
METHODS = ("full", "lora", "lora", "qlora", "qlora", "dora", "qdora")
QUANTS = (None, None, None, None, "int8", "nf4", "fp4")
PRECISIONS = ("bf16", "bf16", "bf16", "bf16-pure", "bf16-no-autocast", "fp16", "fp32")
OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_torch_fused",
    "adamw_torch",
    "adamw_8bit",
    "paged_adamw_8bit",
    "adafactor",
    "sgd",
    "lion",
)
KERNELS = ("sdpa", "sdpa", "eager", "flash_attention_2")
LOSS_HEADS = ("hf",) * 12 + ("raw", "raw")  # the tracer has no other

_GENERATION = {"phase": "inference", "prompt_len": 64, "max_new_tokens": 4}
SETTINGS: tuple[dict[str, Any], ...] = (  # of one small model, one or two changed at a time
    {},
    {"gradient_checkpointing": False},
    {"seq_len": 1024},
    {"seq_len": 1024, "method": "dora"},
    {"gradient_checkpointing": False, "method": "dora"},
    {"method": "qlora"},
    {"method": "full", "precision": "bf16-pure"},
    {"padding": "padded", "batch_size": 2},
    {"lora_dropout": 0.1},
    {"loss_head": "raw"},
    {"modules_to_save": ("embed_tokens", "lm_head"), "seq_len": 128},
    {"quant": "int8", "precision": "bf16-no-autocast"},
    {"adapter_dtype": "bfloat16"},
    {"base_dtype": "float32"},
    {"base_dtype": "float32", "method": "full", "gradient_checkpointing": False},
    {"base_dtype": "float32", "method": "dora", "lora_dropout": 0.1},
    {"loss_head": "raw", "precision": "bf16-pure"},
    {"trainer": "loop"},
    {"trainer": "loop", "gradient_checkpointing": False, "method": "full"},
    {"trainer": "loop", "quant": "int8", "precision": "fp16-no-autocast"},
    {"trainer": "loop", "loss_head": "raw", "method": "qlora"},
    {"trainer": "loop-function", "gradient_accumulation_steps": 2},
    _GENERATION | {"prompt_len": 512},
    _GENERATION | {"max_new_tokens": 2, "quant": "nf4-dq"},
    _GENERATION | {"prompt_len": 512, "method": "qlora", "serve": "as-trained"},
    _GENERATION | {"method": "qdora", "serve": "as-trained"},
    _GENERATION | {"method": "dora", "serve": "as-trained", "r": 64},
)


@cache
def models_by_type() -> dict[str, tuple[str, ...]]:
    """Models by `model_type`: those of the database, or the type's name for its invented shapes."""
    found: dict[str, list[str]] = {
        model_type: [] for model_type in families.FAMILIES if model_type not in NO_AUTO_CLASS
    }
    for record in model_store.list_models():
        found.setdefault(_TEXTS.get(record.model_type, record.model_type), []).append(record.hub_id)
    shapes = {"longt5": ("longt5-local", "longt5-global")}  # types with several invented ones
    return {
        model_type: tuple(names) or shapes.get(model_type, (model_type,))
        for model_type, names in found.items()
    }


# Of models that see, those that were drawn as their texts alone.
_TEXTS = {"gemma3": "gemma3_text"}


@cache
def model_of(name: str) -> ModelSpec:
    """The architecture; one whose layers differ has only its first `MAX_LAYERS`.

    Its weights are random, so that how a checkpoint is stored is left out.
    """
    if name in families.FAMILIES or name in OTHER_NAMES:
        wanted = INVENTED | {"model_type": name} | OTHER_NAMES.get(name, {})
        config = {key: value for key, value in wanted.items() if value is not None}
        return families.build(config, name=name)
    found = model_store.find_model(name)
    assert found is not None
    if found.model_type in _TEXTS:
        found = families.build(found.config["text_config"] | {"dtype": found.dtype}, name=name)
    if len({layer for layer, _ in found.layers()}) == 1:
        return found
    config = {key: value for key, value in found.config.items() if key != "quantization_config"}
    return families.build(shallow(config, MAX_LAYERS), name=name)


def draw(seed: int, index: int) -> RunConfig:
    """Run number `index`: the first families take turns, everything else is drawn."""
    types = list(FIRST_TYPES)
    random.Random(seed).shuffle(types)
    return _drawn(types[index % len(types)], random.Random(f"{seed} {index}"))


def draw_later(model_type: str, number: int) -> RunConfig:
    """Run `number` of a type that is none of the first; it depends on no other type."""
    return _drawn(model_type, random.Random(f"{model_type} {number}"))


def every_type_runs() -> list[RunConfig]:
    """One run of each type that there is, drawn with a seed of their own."""
    return [_drawn(name, random.Random(f"5 {name}")) for name in sorted(models_by_type())]


def later_types() -> tuple[str, ...]:
    earlier_or_apart = {*FIRST_TYPES, *NEWEST_TYPES, *LATEST_TYPES, *T5_RUNS, "led"}
    return tuple(sorted(set(models_by_type()) - earlier_or_apart))


def long_encoder_decoder_runs() -> list[RunConfig]:
    """T5 with checkpointing, so long that a layer's backward is the peak."""
    sizes = (("google-t5/t5-small", 4096), ("google/flan-t5-base", 3072))
    chosen: tuple[dict[str, Any], ...] = (
        {"method": "lora", "attn": "eager", "use_reentrant": False},
        {"method": "full", "attn": "eager", "use_reentrant": False},
        {"method": "lora", "attn": "eager", "use_reentrant": True},
        {"method": "full", "attn": "eager", "use_reentrant": True, "precision": "fp32"},
        {"method": "lora", "attn": "sdpa", "use_reentrant": False},
        {"method": "qlora", "attn": "eager", "use_reentrant": False, "precision": "bf16-pure"},
    )
    return [
        RunConfig(model=model, seq_len=length, gradient_checkpointing=True, **each)
        for model, length in sizes
        for each in chosen
    ]


def setting_runs() -> list[RunConfig]:
    return [RunConfig(model="TinyLlama/TinyLlama-1.1B-Chat-v1.0", **each) for each in SETTINGS]


def later_runs() -> list[RunConfig]:
    return [draw_later(name, number) for name in later_types() for number in range(RUNS_OF_LATER)]


def newest_runs() -> list[RunConfig]:
    return [draw_later(name, number) for number in range(RUNS_OF_NEWEST) for name in NEWEST_TYPES]


def latest_runs() -> list[RunConfig]:
    return [draw_later(name, number) for name in LATEST_TYPES for number in LATEST_RUNS[name]]


def led_runs() -> list[RunConfig]:
    return [draw_later("led", number) for number in LED_RUNS]


def t5_runs() -> list[RunConfig]:
    return [draw_later(name, number) for name, numbers in T5_RUNS.items() for number in numbers]


# What they are, the runs, and where their traces are kept.
APART: dict[str, tuple[str, Callable[[], list[RunConfig]], Path]] = {
    "later": ("the types that came after the draws", later_runs, LATER_TRACES),
    "newest": ("the types that came then", newest_runs, NEWEST_TRACES),
    "latest": ("the types that came last", latest_runs, LATEST_TRACES),
    "every-type": ("one run of each type", every_type_runs, EVERY_TYPE_TRACES),
    "led": ("LED, whose encoder attends in windows", led_runs, LED_TRACES),
    "t5": ("LongT5 and Switch Transformers", t5_runs, T5_TRACES),
    "settings": ("one model, setting by setting", setting_runs, SETTING_TRACES),
}


def _drawn(model_type: str, rng: random.Random) -> RunConfig:
    model = model_of(rng.choice(models_by_type()[model_type]))
    longest = min(8192, model.max_position_embeddings or 8192)
    if rng.random() < 0.25:
        precision = rng.choice(("bf16", "bf16", "fp16", "fp32"))
        return RunConfig(
            model=model.name,
            phase="inference",
            batch_size=2 ** rng.randrange(7),
            prompt_len=_length(rng, longest - 8),
            max_new_tokens=rng.choice((1, 2, 4, 8)),
            precision=rng.choice(("bf16", "bf16", "fp16", "fp32")),
            attn=rng.choice(KERNELS),
            kv_cache=rng.choice(("dynamic", "static")),
            quant=rng.choice(("none", "none", "nf4-dq", "int8")),
        )
    method = rng.choice(METHODS)
    precision = rng.choice(PRECISIONS)
    return RunConfig(
        model=model.name,
        method=method,
        batch_size=2 ** rng.randrange(7),
        seq_len=_length(rng, longest),
        r=2 ** rng.randrange(8),
        lora_dropout=rng.choice((0.0, 0.0, 0.05)),
        target_modules=(rng.choice((ALL_LINEAR, ALL_LINEAR, ATTENTION)),),
        precision=precision,
        optimizer=rng.choice(OPTIMIZERS),
        gradient_checkpointing=rng.random() < 0.5 and model.supports_checkpointing,
        use_reentrant=rng.choice((None, None, False, True)),
        gradient_accumulation_steps=rng.choice((1, 1, 1, 2, 3)),
        attn=rng.choice(KERNELS if precision != "fp32" else KERNELS[:3]),
        padding=rng.choice(("none", "none", "none", "padded")),
        loss_head=rng.choice(LOSS_HEADS),
        quant=rng.choice(QUANTS) if method in ("lora", "dora") else None,
    )


def _length(rng: random.Random, longest: int) -> int:
    """Log-uniform from 64 on; two thirds are multiples of 64, as batches often are."""
    length = int(64 * (longest / 64) ** rng.random())
    return length // 64 * 64 if rng.random() < 0.67 else length


def settings(run: RunConfig) -> dict[str, Any]:
    """What `run` says beyond the defaults."""
    default = RunConfig(model=run.model).to_dict()
    return {
        name: value
        for name, value in run.to_dict().items()
        if name == "model" or value != default.get(name)
    }


def traced(run: RunConfig) -> dict[str, Any]:
    """The line of `run`: traced peaks, or why there are none."""
    line: dict[str, Any] = {"run": settings(run)}
    began = time.monotonic()
    gc.freeze()  # what is imported needs no collecting
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(MAX_SECONDS)
    try:
        line |= _peaks(run)
    except ConfigError as error:
        line["refused"] = str(error)
    except Exception as error:  # the libraries refuse with every type there is
        line["refused"] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    finally:
        signal.alarm(0)
        gc.collect()
    return line | {"seconds": round(time.monotonic() - began, 1)}


def _too_long(*_: Any) -> None:
    raise ConfigError(f"traced for more than {MAX_SECONDS} s")


def _peaks(run: RunConfig) -> dict[str, Any]:
    from whichlora.tracer.trace import whole_trace

    predicted_allocated(run)  # what the formulas refuse is not traced
    if run.attn == "flash_attention_2" and run.padding == "padded":
        raise ConfigError("flash-attention 2 of a padded batch is not traced")
    job = resolution.resolve(model_of(run.model), run, GPU)
    alike = len({layer for layer, _ in job.model.layers()}) == 1
    events, note = whole_trace(
        job.run,
        job.model.config,
        target_modules=job.peft_targets,
        device_kind=GPU.kind,
        compute_capability=GPU.compute_capability,
        layers="4" if alike else "all",
    )
    found = replay(one.event for one in events)
    return {
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "peak_reserved_bytes": found.peak_reserved_bytes,
        "moments": moment_peaks(events),
        "note": note,
    }


def moment_peaks(events: list[TracedEvent]) -> dict[str, int]:
    """Most bytes alive in each moment of two steps, in blocks of 512 bytes."""
    sizes: dict[int, int] = {}
    peaks: dict[str, int] = {}
    total = 0
    for one in events:
        if one.num_bytes is None:
            total -= sizes.pop(one.storage)
            continue
        sizes[one.storage] = rounded(one.num_bytes)
        total += sizes[one.storage]
        peaks[one.moment] = max(peaks.get(one.moment, 0), total)
    return peaks


def read_lines(path: Path = FIRST_TRACES) -> Iterator[dict[str, Any]]:
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from map(json.loads, file)


def as_traced(job: ResolvedRun) -> ResolvedRun:
    """`job` without what no trace sees: buffers inside kernels; fp16 is traced as bf16 is.

    All kept traces begin with the warm-up block of loading.
    """
    dtypes = replace(job.dtypes, kernel_buffers=False, fused_fp16_softmax=False, loads_at_once=True)
    return replace(job, dtypes=dtypes)


_MOMENTS = {
    "layer_forward": "forward",
    "loss_forward": "forward",
    "merging_forward": "forward",
    "encoder_forward": "forward",
    "optimizer_step": "optimizer",
}


def without_workspaces(run: RunConfig) -> tuple[resolution.ResolvedRun, Ledger]:
    """`run` and its ledger as a trace sees them: without workspaces and buffers of kernels.

    Raises:
        WhichLoraError: settings that exclude each other.
    """
    job = as_traced(
        resolution.resolve(model_of(run.model), run, replace(GPU, memory_bytes=ENDLESS))
    )
    found = quantities.ledger(job)
    # a trace places finished weights: what loading needs besides is not in it
    moments = {name: entries for name, entries in found.moments.items() if name != "loading"}
    return job, replace(found, moments=moments)


def predicted_allocated(run: RunConfig) -> dict[str, Any]:
    """What the ledger says of the live bytes of `run`, in the words of a line."""
    _, found = without_workspaces(run)
    peaks: dict[str, int] = {}
    for moment in found.moments:
        name = _MOMENTS.get(moment, "backward") if run.phase == "finetune" else "forward"
        size = int(found.moment_bytes(moment)) - found.workspace_bytes
        for entry in found.moments[moment]:
            if entry.fact is allocator.REMAINDERS:  # the traced moments are live blocks
                size -= int(entry.num_bytes)
        peaks[name] = max(peaks.get(name, 0), size)
    return {
        "peak_allocated_bytes": int(found.peak_allocated_bytes) - found.workspace_bytes,
        "moment": found.peak_moment,
        "moments": peaks,
    }


def predicted_reserved(run: RunConfig) -> dict[str, int]:
    """What the replay says that the allocator reserves for `run`, in the words of a line."""
    job, found = without_workspaces(run)
    memory, _ = prediction.memory_prediction(judged_run(job, prior_calibration(GPU)))
    return {
        "peak_reserved_bytes": memory.peak_reserved_bytes - found.workspace_bytes,
        "reserved_bound_bytes": memory.reserved_interval_bytes[1] - found.workspace_bytes,
    }


def predicted(run: RunConfig) -> dict[str, Any]:
    """What is predicted of `run`, in the words of a line.

    Raises:
        WhichLoraError: settings that exclude each other.
    """
    return predicted_allocated(run) | predicted_reserved(run)


def model_type(run: RunConfig) -> str:
    return str(model_of(run.model).config["model_type"])
