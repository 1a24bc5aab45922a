"""A name for the formulas behind coefficients, so that what was fitted to others is noticed."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import whichlora
from whichlora import families
from whichlora.errors import DataFileError
from whichlora.predict.parts import part_bytes
from whichlora.predict.quantities import forward_features, ledger, mean_context, step_features
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import Real
from whichlora.spec.run import RunConfig
from whichlora.store.jsonfiles import read_object, write_object
from whichlora.store.paths import cache_folder

_DIGEST = re.compile("[0-9a-f]{16}")
_DIGITS = 6  # that no compiler's rounding reaches
_SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
_MODELS = {
    "llama": _SIZES | {"num_key_value_heads": 4},
    "gemma2": _SIZES | {"num_key_value_heads": 4, "head_dim": 64, "sliding_window": 128},
    "gpt_neox": _SIZES,
    "mixtral": _SIZES
    | {"num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
}
_DEVICE = GpuSpec(
    key="any",
    name="any",
    kind="cuda",
    memory_bytes=2**36,
    bandwidth_bytes_per_s=1e12,
    peak_flops_per_s={"bf16": 1e14, "fp16": 1e14, "fp32": 1e13},
    num_multiprocessors=108,
    compute_capability="8.0",
)
_RUNS = (
    RunConfig(model="", method="lora", seq_len=512),
    RunConfig(model="", method="qdora", seq_len=384, batch_size=3, lora_dropout=0.1),
    RunConfig(model="", method="full", precision="fp32", attn="eager", seq_len=96),
    RunConfig(model="", method="qlora", precision="fp16", padding="padded", loss_head="liger"),
    RunConfig(model="", phase="inference", batch_size=2),
    RunConfig(model="", phase="inference", quant="nf4", attn="eager", prompt_len=64),
    RunConfig(model="", phase="inference", kv_cache="static", precision="fp32"),
    RunConfig(model="", phase="inference", method="qdora", serve="as-trained", prompt_len=64),
)


@cache
def formulas_digest() -> str:
    """Names what the formulas make of a few runs of several families; changes when they do.

    What it was is kept in the user's cache until a source file of this package changes: to ask
    the formulas takes as long as an estimate.
    """
    path, sources = cache_folder() / "formulas.json", _sources()
    with contextlib.suppress(OSError, DataFileError):
        cached = read_object(path)
        if cached.get("sources") == sources and _DIGEST.fullmatch(str(cached.get("digest"))):
            return str(cached["digest"])
    digest = answers_digest()
    with contextlib.suppress(OSError, DataFileError):
        write_object(path, {"sources": sources, "digest": digest})
    return digest


def answers_digest() -> str:
    """The digest as the formulas in memory have it."""
    return hashlib.sha256("\n".join(_answers()).encode()).hexdigest()[:16]


def _sources() -> str:
    """Names the state of this package's source files: their paths, sizes and times."""
    package = Path(whichlora.__file__).parent
    files = [(path, path.stat()) for path in sorted(package.rglob("*.py"))]
    states = [f"{path} {state.st_size} {state.st_mtime_ns}" for path, state in files]
    return hashlib.sha256("\n".join(states).encode()).hexdigest()


def _answers() -> Iterator[str]:
    for model_type, config in _MODELS.items():
        model = families.build({"model_type": model_type, **config}, name=model_type)
        for run in _RUNS:
            job = resolve(model, run, _DEVICE)
            counted = ledger(job)
            yield from _lines(part_bytes(job, counted, counted.peak_moment))
            if job.run.phase == "finetune":
                yield from _lines(step_features(job))
                continue
            yield from _lines(forward_features(job, context=run.prompt_len, decoding=False))
            yield from _lines(
                forward_features(
                    job, context=mean_context(run.prompt_len, run.max_new_tokens), decoding=True
                )
            )


def _lines(values: Mapping[str, Real]) -> Iterator[str]:
    for name, value in values.items():
        yield f"{name} {float(value):.{_DIGITS}g}"
