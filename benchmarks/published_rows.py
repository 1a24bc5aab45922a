"""Runs that others measured and published, as our settings: each cell of `published/` becomes an
`Observation` to compare a prediction with, or `LeftOut` with the reason.

What a source means by its columns is in `published/README.md`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from whichlora import families
from whichlora.architecture import Layer, ModelSpec
from whichlora.specs import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.models import find_model
from whichlora.units import GiB, MiB

FOLDER = Path(__file__).parent / "published"

Quantity = Literal[
    "peak_allocated",
    "peak_reserved",
    "device_used",
    "perhaps_allocated",
    "perhaps_device_used",
    "allocated_between_steps",
    "allocated_after_forward",
    "step_s",
    "forward_s",
    "forward_backward_s",
    "prefill_s",
    "generate_s",
]
MEMORY: tuple[Quantity, ...] = (
    "peak_allocated",
    "peak_reserved",
    "device_used",
    "perhaps_allocated",
    "perhaps_device_used",
    "allocated_between_steps",
    "allocated_after_forward",
)
Row = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One measured value with the run it was measured on.

    Args:
        source: stem of the file; `line` of its row, the header being line 1.
        label: the model as the source calls it.
        stack: what the source's software does differently, in a few words.
        value: bytes or seconds.
        rounding: half of the last printed digit, in the unit of `value`.
    """

    source: str
    line: int
    label: str
    stack: str
    model: ModelSpec
    run: RunConfig
    gpu: str
    quantity: Quantity
    value: float
    rounding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A cell that nothing is compared with."""

    source: str
    line: int
    label: str
    what: Literal["memory", "time", "run"]
    reason: str


Found = Observation | LeftOut


# --- models that are not in the database --------------------------------------------------------

POWERLM_3B = {  # ibm/PowerLM-3b config.json
    "model_type": "granite",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "vocab_size": 49152,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
FSDP_QLORA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
_QWEN1 = {  # hidden, layers, heads, half of the remote code's intermediate_size, vocabulary
    "1_8B": (2048, 24, 16, 5504, 151936),
    "7B": (4096, 32, 32, 11008, 151936),
    "14B": (5120, 40, 40, 13696, 152064),
    "72B": (8192, 80, 64, 24576, 152064),
}
_ELSEWHERE = {
    "TheBloke/Mistral-7B-v0.1-GPTQ": "mistralai/Mistral-7B-v0.1",
    "ybelkada/test-mistral-7b-v0.1-awq": "mistralai/Mistral-7B-v0.1",
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mistralai/Mixtral-8x7B-v0.1",
    "TheBloke/Llama-2-7B-GPTQ": "meta-llama/Llama-2-7b-hf",
    "NousResearch/Llama-2-7b-hf": "meta-llama/Llama-2-7b-hf",
    "TheBloke/LLaMa-7B-GPTQ": "huggyllama/llama-7b",
    "TheBloke/vicuna-7B-v1.5-GPTQ": "meta-llama/Llama-2-7b-hf",
    "IlyasMoutawwakil/vicuna-7b-v1.5-awq-gemv": "meta-llama/Llama-2-7b-hf",
    "IlyasMoutawwakil/vicuna-7b-v1.5-awq-gemm": "meta-llama/Llama-2-7b-hf",
    "OpenBuddy/openbuddy-zephyr-7b-v14.1": "mistralai/Mistral-7B-v0.1",
    "GLM-4-32B-0414": "zai-org/GLM-4-32B-0414",
    "GLM-4-9B-0414": "zai-org/GLM-4-9B-0414",
}


def _qwen1_layer(layer: Layer) -> Layer:
    """Qwen2's layer with the matrices that Qwen's first code has: q, k and v in one."""
    attention, mlp = layer.attentions[0], layer.mlp
    assert mlp is not None
    query, output = attention.linears[0], attention.linears[-1]
    fused = replace(query, name="c_attn", out_features=3 * query.out_features)
    gate, up, down = mlp.linears
    return replace(
        layer,
        attentions=(replace(attention, linears=(fused, replace(output, name="c_proj"))),),
        mlp=replace(
            mlp,
            linears=(
                replace(gate, name="w2"),
                replace(up, name="w1"),
                replace(down, name="c_proj"),
            ),
        ),
    )


def _qwen1(size: str) -> ModelSpec:
    hidden, layers, heads, width, vocab = _QWEN1[size]
    spec = families.build(
        {
            "model_type": "qwen2",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": width,
            "vocab_size": vocab,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        name=f"Qwen/Qwen-{size}",
    )
    return replace(
        spec,
        groups=tuple(replace(group, layer=_qwen1_layer(group.layer)) for group in spec.groups),
    )


@cache
def model_of(label: str) -> ModelSpec | None:
    """The architecture that a source calls `label`; None where neither file nor facts have it."""
    if label == "ibm/PowerLM-3b":
        return families.build(POWERLM_3B, name=label)
    if label.startswith("random Llama 1B"):
        return families.build(FSDP_QLORA_1B, name="random-llama-1b")
    first = re.fullmatch(r"Qwen/Qwen-(1_8B|7B|14B|72B)(-Chat)?(-Int[48])?", label)
    if first:
        return _qwen1(first[1])
    name = _ELSEWHERE.get(label) or re.sub(r"-(GPTQ-Int[48]|AWQ)$", "", label)
    spec = find_model(name)
    if spec and label.startswith("Qwen/Qwen2-"):  # the database has the base models' 131,072
        return replace(spec, max_position_embeddings=32_768)
    return spec


# --- cells --------------------------------------------------------------------------------------

_UNITS = {"GiB": GiB, "MiB": MiB, "MB(1e6)": 10**6, "GB(1e9)": 10**9, "GB (inferred GiB)": GiB}
_QUANT = {
    "none": "none",
    "nf4": "nf4",
    "bnb-fp4": "fp4",
    "bnb-int8": "int8",
    "gptq-int4": "gptq-int4",
    "gptq-int8": "gptq-int8",
    "awq-int4": "awq-int4",
}
_LIBRARY = re.compile(r"(torch|transformers|peft|bitsandbytes|trl) (\d+(?:\.\d+)+)")


def _whole(text: str) -> int:
    return int(float(text))


def _rounding(text: str) -> float:
    digits = len(text.rpartition(".")[2]) if "." in text else 0
    return 0.5 * 10.0**-digits


def libraries_of(versions: str) -> tuple[tuple[str, str], ...]:
    """Versions that a source states, of the libraries whose version moves a number."""
    return tuple(sorted(_LIBRARY.findall(versions)))


_FMS_FIRST = {
    "bitsandbytes": "0.43.1",
    "torch": "2.2.2",
    "transformers": "4.39.3",
    "trl": "0.9.6",
}


@dataclass(frozen=True, slots=True)
class _Line:
    """One row of one file, on its way to observations."""

    source: str
    number: int
    row: Row

    def left_out(self, what: Literal["memory", "time", "run"], reason: str) -> LeftOut:
        label = self.row.get("model_id") or self.row["model"]
        return LeftOut(source=self.source, line=self.number, label=label, what=what, reason=reason)

    def observed(
        self,
        model: ModelSpec,
        run: RunConfig,
        gpu: str,
        quantity: Quantity,
        value: float,
        *,
        stack: str = "",
        rounding: float = 0.0,
    ) -> Observation:
        return Observation(
            source=self.source,
            line=self.number,
            label=self.row.get("model_id") or self.row["model"],
            stack=stack,
            model=model,
            run=run,
            gpu=gpu,
            quantity=quantity,
            value=value,
            rounding=rounding,
        )

    def memory(
        self, model: ModelSpec, run: RunConfig, gpu: str, quantity: Quantity, *, stack: str = ""
    ) -> Iterator[Observation]:
        """The memory cell, where there is one; a unit that only says GB is taken as 2^30."""
        text = self.row.get("mem_value", "")
        if text:
            unit = _UNITS.get(self.row["mem_unit"], GiB)
            yield self.observed(
                model,
                run,
                gpu,
                quantity,
                float(text) * unit,
                stack=stack,
                rounding=_rounding(text) * unit,
            )


# --- sources ------------------------------------------------------------------------------------

A100 = "a100-sxm-80gb"
_FMS_COUNTERS: dict[str, Quantity] = {
    "nvidia-smi memory.used peak minus first reading": "device_used",
    "max_memory_allocated via HF Trainer memory tracker": "peak_allocated",
    "memory_allocated after train via HF Trainer memory tracker": "allocated_between_steps",
}


def _fms_settings(row: Row) -> dict[str, Any]:
    config, mixed = _fms_config(row)
    if mixed == "none":
        # adapters stay fp32 (peft's default) and every product casts for itself
        precision = "bf16-pure" if row["method"] == "full" else "bf16-no-autocast"
    else:
        precision = mixed
    heads = {"fast": "unsloth", "ligr": "liger"}
    head = heads["fast"] if "fast cross" in row["loss_kernel"] else "hf"
    if "liger" in row["loss_kernel"]:
        head = heads["ligr"]
    quant = "nf4-dq" if row["quant"] == "nf4" else _QUANT[row["quant"]]
    dropout = re.search(r"lora_dropout ([\d.]+)", row["notes"])
    return {
        "method": row["method"],
        "r": _whole(row["rank"] or "16"),
        "lora_dropout": float(dropout[1]) if dropout else 0.0,
        "precision": precision,
        "optimizer": "adamw_torch",
        "attn": "flash_attention_2",
        "gradient_checkpointing": True,
        "gradient_accumulation_steps": _whole(row["grad_accum"]),
        "loss_head": head,
        "quant": quant,
        "prepare_kbit": config.startswith("baseline-peft-bnb"),
        # what a commit does not pin looks like the first versions that one does
        "libraries": tuple(sorted((_FMS_FIRST | dict(libraries_of(row["versions"]))).items())),
    }


def _fms_config(row: Row) -> tuple[str, str]:
    """Name of the framework configuration, and the autocast dtype or "none"."""
    config = re.search(r"framework_config ([^;]*)", row["notes"])
    mixed = re.search(r"mixed precision fp16=(\w*) bf16=(\w*)", row["notes"])
    assert config is not None
    assert mixed is not None
    return config[1].strip(), "fp16" if mixed[1] else "bf16" if mixed[2] else "none"


def _fms(line: _Line) -> Iterator[Found]:
    row = line.row
    if "OOM" in row["flags"]:
        yield line.left_out("run", "flagged as failed or out of memory by the source")
        return
    config, _ = _fms_config(row)
    spec = model_of(row["model_id"])
    if "scattermoe" in config or spec is None or "granite" in row["model_id"]:
        yield line.left_out("run", "mixture kernels of its own, or lengths not stated")
        return
    targets = tuple(row["target_modules"].split())
    names = {linear.name for layer, _ in spec.layers() for linear in layer.linears}
    targets = tuple(name for name in targets if name in names)
    settings = _fms_settings(row)
    mean = re.search(r"mean ([\d.]+) tokens per sample", row["notes"])
    packed = bool(row["seq_len"])
    length = _whole(row["seq_len"]) if packed else _whole(mean[1]) if mean else 0
    run = RunConfig(
        model=spec.name,
        batch_size=_whole(row["batch_size"]),
        seq_len=max(1, length),
        **settings,
        **({"target_modules": targets} if targets else {}),
    )
    if row["mem_value"]:
        if packed or _FMS_COUNTERS[row["mem_counter"]] == "allocated_between_steps":
            yield from line.memory(spec, run, A100, _FMS_COUNTERS[row["mem_counter"]], stack=config)
        else:
            yield line.left_out("memory", "length of the longest batch is not stated")
    if row["time_value"]:
        if not length or row["padding"] == "longest":
            yield line.left_out("time", "padded, and the share of padding is not stated")
            return
        per_step = run.batch_size * length * run.gradient_accumulation_steps
        yield line.observed(
            spec, run, A100, "step_s", per_step / float(row["time_value"]), stack=config
        )


def _fsdp_qlora(line: _Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    assert spec is not None
    moment = row["mem_counter"]
    moments: dict[str, Quantity] = {
        "memory_allocated after forward": "allocated_after_forward",
        "max_memory_allocated over forward+backward": "peak_allocated",
    }
    if moment not in moments or row["phase"] == "inference":
        reason = "weights alone, or gradients alone" if row["phase"] == "finetune" else "no_grad"
        yield line.left_out("memory", f"{reason}: after {moment.rpartition('after ')[2]}")
        return
    run = RunConfig(
        model=spec.name,
        method=row["method"],
        r=8,
        lora_dropout=0.1 if row["method"] != "full" else 0.0,
        target_modules=("q_proj", "v_proj"),
        seq_len=_whole(row["seq_len"]),
        precision="bf16-pure",
        quant="nf4" if row["quant"] == "nf4" else "none",
        prepare_kbit=False,
        gradient_checkpointing=row["grad_ckpt"] == "True",
        use_reentrant=False,
        optimizer="sgd",  # none runs
        loss_head="raw",
        libraries=(("bitsandbytes", "0.42.0"), ("torch", "2.1.2"), ("transformers", "4.37.2")),
    )
    yield from line.memory(spec, run, A100, moments[moment])


def _generation(line: _Line, gpu: str, **settings: Any) -> tuple[ModelSpec, RunConfig] | LeftOut:
    """The run of an inference row, or why it has none."""
    row = line.row
    quant = _QUANT.get(row["quant"])
    if quant is None:
        return line.left_out("run", f"{row['quant']}: no storage formula for this format")
    spec = model_of(row["model_id"])
    if spec is None:
        return line.left_out("run", "architecture neither in the database nor stated")
    run = RunConfig(
        model=spec.name,
        phase="inference",
        precision="bf16" if row["base_dtype"] in ("bfloat16", "") else "fp16",
        quant=quant,  # type: ignore[arg-type]
        batch_size=_whole(row["batch_size"]),
        prompt_len=_whole(row["prefill_len"]),
        max_new_tokens=max(1, _whole(row["decode_len"] or "1")),
        libraries=libraries_of(row["versions"]),
        **settings,
    )
    return spec, run


def _qwen_speed(line: _Line) -> Iterator[Found]:
    row = line.row
    engine = "vllm" if row["framework"] == "vllm" else "dynamic"
    attn = "flash_attention_2" if row["attn_impl"] == "flash_attention_2" else "sdpa"
    found = _generation(line, A100, attn=attn, kv_cache=engine)
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    if line.source == "qwen15_hf_infer":
        run = replace(run, libraries=(("torch", "2.1.2"), ("transformers", "4.38.2")))
    if engine == "vllm":  # has model code of its own
        vllm = re.search(r"vllm ([\d.]+)", row["versions"])
        assert vllm, line
        run = replace(run, libraries=(("vllm", vllm[1]),))
    yield from line.memory(spec, run, A100, "peak_allocated")
    if row["time_value"]:
        seconds = run.max_new_tokens / float(row["time_value"])
        if engine == "vllm" and row["quant"] != "none":
            yield line.left_out("time", "vLLM's own 4-bit and 8-bit kernels")
        elif "MoE" in row["model_id"] or "A14B" in row["model_id"]:
            yield line.left_out("time", "experts of transformers 4 run in a Python loop")
        else:
            yield line.observed(spec, run, A100, "generate_s", seconds)


def _optimum(line: _Line) -> Iterator[Found]:
    row = line.row
    gpu = "rtx-4090-24gb" if row["gpu"] == "RTX4090" else A100
    if row["phase"] == "finetune":
        yield from _optimum_training(line, gpu)
        return
    if row["mem_counter"].startswith("peak_memory"):
        counter: Quantity | None = None
    else:
        counter = {
            "max_memory_allocated": "peak_allocated",
            "max_memory_reserved": "peak_reserved",
            "nvml used memory, polled peak": "device_used",
        }[row["mem_counter"]]  # type: ignore[assignment]
    attn = {"flash_attention_2": "flash_attention_2", "bettertransformer sdpa": "sdpa"}
    found = _generation(line, gpu, attn=attn.get(row["attn_impl"], "eager"))
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    if counter is None:
        yield line.left_out("memory", "one peak of an unnamed counter (allocator or driver)")
    elif counter == "device_used" and run.max_new_tokens > 1:
        reason = "polled in another pass: 26 GB used where the allocator reserved 84 GB"
        yield line.left_out("memory", reason)
    else:
        # NVML's first counter has what the driver keeps of the board, which CUDA never offers
        reserve = 80 * GiB - find_gpu(gpu).memory_bytes if counter == "device_used" else 0
        for one in line.memory(spec, run, gpu, counter, stack=_experiment(row)):
            yield replace(one, value=one.value - reserve)
    if row["time_value"]:
        forward = row["time_unit"].startswith("s per forward")
        yield line.observed(
            spec,
            run,
            gpu,
            "prefill_s" if forward else "generate_s",
            float(row["time_value"]),
            stack=_experiment(row),
        )


def _experiment(row: Row) -> str:
    found = re.search(r"experiment ([^;(]*)", row["notes"])
    return re.sub(r"-batch_size$", "", found[1].strip()) if found else ""


def _optimum_training(line: _Line, gpu: str) -> Iterator[Found]:
    row = line.row
    quant = _QUANT.get(row["quant"])
    spec = model_of(row["model_id"])
    assert spec is not None
    run = RunConfig(
        model=spec.name,
        method="lora" if quant == "none" else "qlora",
        r=8,
        target_modules=("q_proj", "v_proj"),
        batch_size=_whole(row["batch_size"]),
        seq_len=256,
        precision="fp16",
        quant=quant,  # type: ignore[arg-type]
        gradient_checkpointing=False,
        optimizer="adamw_torch",
        attn="eager",
        prepare_kbit=False,
        libraries=libraries_of(row["versions"]),
    )
    seconds = run.batch_size / float(row["time_value"])
    yield line.observed(spec, run, gpu, "step_s", seconds, stack=_experiment(row))


_QWEN1_LIBRARIES = (("peft", "0.7.1"), ("torch", "2.0.1"), ("transformers", "4.32.0"))


def _qwen1_inference(line: _Line) -> Iterator[Found]:
    row = line.row
    if not row["prefill_len"]:
        yield line.left_out("run", "prompt length not stated")
        return
    if "README says averaged" in row["notes"]:
        yield line.left_out("time", "speed is an average over read and generated tokens")
        return
    attn = "flash_attention_2" if "flash" in row["attn_impl"] else "eager"
    found = _generation(line, A100, attn=attn)
    if isinstance(found, LeftOut):
        yield found
        return
    spec, run = found
    run = replace(run, libraries=_QWEN1_LIBRARIES)
    yield from line.memory(spec, run, A100, "perhaps_allocated")
    if row["time_value"]:
        seconds = run.max_new_tokens / float(row["time_value"])
        yield line.observed(spec, run, A100, "generate_s", seconds)


def _qwen1_finetune(line: _Line) -> Iterator[Found]:
    row = line.row
    if "LoRA (emb)" in row["notes"] or "embeddings+lm_head trained" in row["notes"]:
        yield line.left_out("run", "embeddings and head trained beside the adapters")
        return
    spec = model_of(row["model_id"])
    assert spec is not None
    run = RunConfig(
        model=spec.name,
        method=row["method"],
        r=64,
        lora_dropout=0.05 if row["method"] != "full" else 0.0,
        target_modules=tuple(row["target_modules"].split("+"))
        if row["target_modules"]
        else ("all-linear",),
        batch_size=1,
        seq_len=_whole(row["seq_len"]),
        precision="bf16" if row["base_dtype"] == "bfloat16" else "fp16",
        quant=_QUANT[row["quant"]],  # type: ignore[arg-type]
        prepare_kbit=False,
        gradient_checkpointing=True,
        gradient_accumulation_steps=8,
        attn="flash_attention_2" if row["attn_impl"] else "eager",
        optimizer="adamw_torch",
        libraries=_QWEN1_LIBRARIES,
    )
    yield from line.memory(spec, run, A100, "perhaps_device_used", stack=row["method"])
    if row["time_value"]:
        yield line.observed(
            spec, run, A100, "step_s", float(row["time_value"]), stack=row["method"], rounding=0.05
        )


def _torchtune(line: _Line) -> Iterator[Found]:
    row = line.row
    if "in backward" in row["optimizer"]:
        yield line.left_out("run", "optimizer fused into the backward pass")
    elif not row["seq_len"]:
        yield line.left_out("run", "length of the longest sample not stated")
    else:
        yield line.left_out("run", "torchtune's own model code, checkpointing per row not stated")


def _glm4(line: _Line) -> Iterator[Found]:
    row = line.row
    spec = model_of(row["model_id"])
    if spec is None:
        yield line.left_out("run", "architecture neither in the database nor stated")
        return
    prompt = _whole(row["prefill_len"])
    run = RunConfig(
        model=spec.name, phase="inference", prompt_len=prompt, max_new_tokens=1, attn="sdpa"
    )
    gpu = "h100-sxm-80gb"
    yield from line.memory(spec, run, gpu, "perhaps_device_used")
    value = float(row["time_value"])
    if row["time_unit"] == "s prefill":
        yield line.observed(
            spec, run, gpu, "prefill_s", value, rounding=_rounding(row["time_value"])
        )
    else:
        yield line.left_out("time", "number of decoded tokens not stated")


_NEUSIGHT_GPUS = {
    "AMD Instinct MI210": "mi210-64gb",
    "AMD Instinct MI250": "mi250x-gcd-64gb",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie-80gb",
    "NVIDIA L4": "l4-24gb",
    "Tesla V100-PCIE-32GB": "v100-pcie-32gb",
}


@cache
def _neusight_model(
    name: str, kind: str, hidden: int, layers: int, heads: int, ffn: int, vocab: int
) -> ModelSpec:
    sizes = {"vocab_size": vocab, "torch_dtype": "float32"}
    if kind == "gpt2":
        sizes |= {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn}
        sizes |= {"n_positions": 2048}
    else:
        sizes |= {"hidden_size": hidden, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": heads, "max_position_embeddings": 2048}
        sizes |= {"ffn_dim": ffn, "word_embed_proj_dim": hidden} if kind == "opt" else {}
        sizes |= {"intermediate_size": ffn} if kind == "bert" else {}
    return families.build({"model_type": kind, **sizes}, name=name)


def _neusight(line: _Line) -> Iterator[Found]:
    row = line.row
    if row["variant"]:
        yield line.left_out("time", "compiled with fused operators")
        return
    if row["model_type"] not in ("bert", "gpt2", "opt"):
        yield line.left_out("time", "switch transformer: experts in a Python loop, 0 layers timed")
        return
    gpu = _NEUSIGHT_GPUS.get(row["gpu"])
    if gpu is None:
        yield line.left_out("time", f"{row['gpu']}: no datasheet facts on file")
        return
    sizes = (_whole(row[key]) for key in ("hidden", "layers", "heads", "ffn", "vocab"))
    spec = _neusight_model(row["model"], row["model_type"], *sizes)
    run = RunConfig(
        model=spec.name,
        method="full",
        precision="fp32",
        batch_size=_whole(row["batch_size"]),
        seq_len=_whole(row["seq_len"]),
        attn="eager",
        gradient_checkpointing=False,
        optimizer="sgd",
        loss_head="raw",
    )
    quantity: Quantity = "forward_s" if row["phase"] == "forward" else "forward_backward_s"
    yield line.observed(spec, run, gpu, quantity, float(row["e2e_ms"]) / 1e3)


def _not_ours(reason: str) -> Callable[[_Line], Iterator[Found]]:
    def one(line: _Line) -> Iterator[Found]:
        yield line.left_out("run", reason)

    return one


SOURCES: dict[str, Callable[[_Line], Iterator[Found]]] = {
    "autoawq_readme": _not_ours("AutoAWQ's fused modules and preallocated cache"),
    "axolotl_examples": _not_ours("counter and GPU not stated, printed as approximate"),
    "chatglm2_readme": _not_ours("counter not stated, remote code"),
    "chatglm_finetuning_readme": _not_ours("counter not stated, rounded to whole G, DeepSpeed"),
    "fms_acceleration_bench": _fms,
    "fsdp_qlora": _fsdp_qlora,
    "github_issues": _not_ours("targets and quantisation not stated, or a loss kernel alone"),
    "glm4": _glm4,
    "misc_docs": _not_ours("compiled static-cache decode, lengths not stated"),
    "ms_swift_benchmark": _not_ours(
        "lengths mixed up to a limit: neither mean nor order is stated"
    ),
    "neusight_labels": _neusight,
    "optimum_benchmark": _optimum,
    "qwen15_hf_infer": _qwen_speed,
    "qwen1_inference": _qwen1_inference,
    "qwen25_speed": _qwen_speed,
    "qwen2_speed": _qwen_speed,
    "qwen_readme_finetune": _qwen1_finetune,
    "torchtune_docs": _torchtune,
}


def read(source: str) -> Iterator[Found]:
    """Every cell of one file."""
    with (FOLDER / f"{source}.csv").open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.DictReader(file), start=2):
            yield from SOURCES[source](_Line(source, number, row))


@cache
def read_all() -> tuple[Found, ...]:
    """Every cell of every file, in the order of the files."""
    return tuple(found for source in SOURCES for found in read(source))
