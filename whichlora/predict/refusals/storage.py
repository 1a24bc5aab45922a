"""What is refused beside the form in which a checkpoint is stored."""

from __future__ import annotations

from whichlora.errors import ConfigError
from whichlora.serving import get_engine, list_engines
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.checkpoint import (
    LOADED_AS_STORED,
    is_gguf,
    is_mixed,
    packed_experts,
    refuses_bitsandbytes,
    stored_quant,
)
from whichlora.spec.float_blocks import FLOAT_BLOCKS
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import ENGINE_QUANTS, FP32_PRECISIONS, PACKED_QUANTS, RunConfig


def check_storage(model: ModelSpec, run: RunConfig, gpu: GpuSpec) -> None:
    """Refuse what transformers refuses beside, or without, experts in mxfp4."""
    quant = run.quant or "none"
    if refuses_bitsandbytes(model.config, quant):
        raise ConfigError(
            f"quant: {model.name} is stored in mxfp4, beside which transformers refuses "
            f"bitsandbytes, got {quant}; use method lora, which expands it to 16 bit, or name a "
            "16-bit copy of the model, such as unsloth/gpt-oss-20b-BF16"
        )
    if is_gguf(model.config) and reads_checkpoint(run):
        raise ConfigError(
            f"model: {model.name} is a GGUF file, which llama.cpp serves and nothing trains; give "
            "serving llama-cpp, or the model it was made from with method qlora"
        )
    if is_mixed(model.config):
        raise ConfigError(
            f"quant: {model.name} is stored in several forms beside each other, such as NVFP4 and "
            "FP8, which is not predicted; name a copy in one form, or the 16-bit model it was made "
            "from"
        )
    stored = stored_quant(model.config)
    if stored in PACKED_QUANTS and quant != stored:
        raise ConfigError(
            f"quant: {model.name} is stored in {_packed_in_words(stored)}, which "
            f"{' and '.join(_engines_that_serve(stored))} serve and nothing here trains or "
            f"expands, got {quant}; name the 16-bit model it was made from"
        )
    if stored in LOADED_AS_STORED and quant != stored and reads_checkpoint(run):
        raise ConfigError(
            f"quant: {model.name} is stored in {stored}, and is loaded so, got {quant}; leave "
            "quant out, or name a 16-bit copy of the model"
        )
    if quant != "mxfp4":
        return
    for is_wrong, fault in (
        (not packed_experts(model), f"{model.name} has no experts of gpt-oss's class; use none"),
        (run.phase == "finetune", "transformers trains no packed experts; use none, or leave out"),
        (not gpu.backend.keeps_mxfp4, f"is predicted on NVIDIA's GPUs, not on {gpu.key}; use none"),
        (run.precision in FP32_PRECISIONS, f"needs 16 bit, got precision {run.precision}"),
    ):
        if is_wrong:
            raise ConfigError(f"quant: mxfp4: {fault}")


def check_engine_quant(run: RunConfig) -> None:
    """Refuse a form of weights that engines alone read, where none of them serves the run."""
    if run.quant not in ENGINE_QUANTS:
        return
    readers = _engines_that_serve(run.quant)
    if run.phase == "finetune" or run.serving not in readers:
        raise ConfigError(
            f"quant: {run.quant} is how {' or '.join(readers)} serve weights; give serving one "
            "of them, or quant none"
        )


def reads_checkpoint(run: RunConfig) -> bool:
    return run.phase == "finetune" or get_engine(run.serving).reads_checkpoints


def _engines_that_serve(quant: str) -> list[str]:
    """Names of engines that serve weights so stored."""
    return [name for name, engine in list_engines().items() if quant in engine.stored_forms]


def _packed_in_words(quant: str) -> str:
    if quant in FLOAT_BLOCKS:
        return f"{FLOAT_BLOCKS[quant].bits}-bit floats ({quant})"
    return f"4-bit integers ({quant})"
