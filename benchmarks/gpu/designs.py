"""What is measured on a GPU, and why: lists of runs by group, in the order of their worth.

A group answers one question. Everything is drawn with fixed seeds, so the same command measures
the same runs on every machine, and a later session goes on where an earlier one stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from whichlora.errors import ConfigError
from whichlora.methods import get_method
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model

SEED = 20_261
LONGEST_STEP_S = 2.0  # by prediction: a slice of nine minutes holds many runs
NUM_MEMORY = 96

# 0.1B to 14B, one architecture each, and what each is there for.
TRAINED = (
    "HuggingFaceTB/SmolLM2-135M",  # launch bound
    "openai-community/gpt2-large",  # layer norms, fused projections, learned positions
    "EleutherAI/pythia-1.4b",  # parallel attention and MLP
    "meta-llama/Llama-3.2-1B",  # tied head of 128,256 entries
    "google/gemma-2b",  # head of 256,000 entries, one key-value head
    "Qwen/Qwen2.5-3B",  # biases, 2 key-value heads
    "microsoft/phi-2",  # biases everywhere, partly rotary
    "allenai/OLMoE-1B-7B-0924",  # mixture of experts
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-14B",
)
LARGE_4BIT = ("Qwen/Qwen2.5-32B", "mistralai/Mixtral-8x7B-v0.1")
# Methods with operators of their own, and the settings of adapters that people choose most.
METHODS = (
    *("vera", "ia3", "loha", "lokr", "oft", "hra", "fourierft", "randlora", "miss"),
    *("adalora", "road", "c3a", "prompt-tuning", "prefix-tuning", "ln-tuning", "hira", "shira"),
)
SERVED = (
    "HuggingFaceTB/SmolLM2-135M",
    "meta-llama/Llama-3.2-1B",
    "google/gemma-2b",
    "Qwen/Qwen2.5-3B",
    "mistralai/Mistral-7B-v0.1",
    "Qwen/Qwen2.5-14B",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One run to measure.

    Args:
        group: the question that it answers.
        lengths: padded lengths of its batches (fine-tuning), longest first unless `in_order`.
        num_batches: steps or generations after the warm-up.
        expected: "", or what a boundary run must do by prediction: "fits" or "fails".
        repeat: 0, or the number of the repetition, for the noise between runs.
    """

    group: str
    run: RunConfig
    num_batches: int = 5
    lengths: tuple[int, ...] = ()
    in_order: bool = False
    keeps_history: bool = False
    expected: str = ""
    repeat: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two planned runs the same one."""
        return (self.group, self.run, self.lengths, self.repeat)


def model_of(run: RunConfig) -> ModelSpec:
    """The architecture of `run`, which a design takes from models_db."""
    model = find_model(run.model)
    assert model is not None, f"{run.model} is not in models_db"
    return model


def predicted(run: RunConfig, gpu: GpuSpec) -> Prediction:
    """The prediction before anything was measured.

    Raises:
        ConfigError: settings that exclude each other.
    """
    return predict(model_of(run), run, gpu, prior_calibration(gpu))


def judged(run: RunConfig, gpu: GpuSpec) -> Prediction | None:
    """The prediction before anything was measured; None for settings that exclude each other."""
    try:
        return predicted(run, gpu)
    except ConfigError:
        return None


def train(model: str, **settings: Any) -> RunConfig:
    settings.setdefault("lora_alpha", 2 * settings.get("r", 16))
    return RunConfig(model=model, **settings)


def _sensible(run: RunConfig, gpu: GpuSpec) -> bool:
    """Whether `run` certainly fits, is over within seconds, and has a position for each token."""
    if run.seq_len > (model_of(run).max_position_embeddings or run.seq_len):
        return False
    found = judged(run, gpu)
    if found is None or not found.fits:
        return False
    return (found.time.step_s or found.time.prefill_s or 0.0) <= LONGEST_STEP_S


# --- the groups ---------------------------------------------------------------------------------


def activations(gpu: GpuSpec) -> Iterator[Planned]:
    """What autograd keeps per token, without checkpointing: slopes over batch and length."""
    for precision in ("bf16", "bf16-pure"):
        for batch_size, seq_len in ((1, 512), (1, 1024), (1, 2048), (2, 1024), (4, 1024), (4, 512)):
            run = train(
                "meta-llama/Llama-3.2-1B",
                precision=precision,
                batch_size=batch_size,
                seq_len=seq_len,
                gradient_checkpointing=False,
            )
            yield Planned(group="activations", run=run)


def quantised(gpu: GpuSpec) -> Iterator[Planned]:
    """4 and 8 bit on CUDA: prepared as PEFT does it, and left as TRL leaves it; short and long.

    The fused 4-bit product and the expansion of whole matrices meet between 512 and 4096 rows.
    """
    for quant in ("nf4", "nf4-dq", "int8"):
        for prepare_kbit in (True, False):
            for batch_size, seq_len in ((1, 256), (2, 2048)):
                run = train(
                    "mistralai/Mistral-7B-v0.1",
                    method="qlora",
                    quant=quant,
                    prepare_kbit=prepare_kbit,
                    batch_size=batch_size,
                    seq_len=seq_len,
                )
                yield Planned(group="quantised", run=run)


def methods(gpu: GpuSpec) -> Iterator[Planned]:
    """What methods other than LoRA take: the operators of each, and what autograd keeps of them."""
    for method in METHODS:
        run = train("meta-llama/Llama-3.2-1B", method=method, batch_size=2, seq_len=1024)
        yield Planned(group="methods", run=run, num_batches=3)


def images(gpu: GpuSpec) -> Iterator[Planned]:
    """Rows and prompts with pictures: the tower's time and bytes beside the language model's."""
    for model, batch_size, image_size, gradient_checkpointing in (
        ("HuggingFaceTB/SmolVLM-500M-Instruct", 4, (1024, 768), True),
        ("Qwen/Qwen2-VL-2B-Instruct", 2, (640, 480), True),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 1, (1024, 768), True),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 4, (1024, 768), True),
        ("Qwen/Qwen2.5-VL-3B-Instruct", 1, (1024, 768), False),
        ("Qwen/Qwen3-VL-2B-Instruct", 2, (1024, 768), True),
        ("Qwen/Qwen3-VL-2B-Instruct", 2, (1024, 768), False),
        ("llava-hf/llava-1.5-7b-hf", 2, (336, 336), True),
    ):
        run = train(
            model,
            batch_size=batch_size,
            seq_len=2048,
            images=1,
            image_size=image_size,
            gradient_checkpointing=gradient_checkpointing,
        )
        yield Planned(group="images", run=run)
    for model in ("Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"):
        run = RunConfig(
            model=model,
            phase="inference",
            images=1,
            image_size=(1024, 768),
            prompt_len=2048,
            max_new_tokens=16,
        )
        yield Planned(group="images", run=run, num_batches=2)


def padded(gpu: GpuSpec) -> Iterator[Planned]:
    """Batches with padding: which attention kernel runs, and whether each layer keeps a mask."""
    for model in ("meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-3B"):
        for attn in ("sdpa", "eager"):
            for gradient_checkpointing in (True, False):
                run = train(
                    model,
                    attn=attn,
                    padding="padded",
                    batch_size=4,
                    seq_len=1024,
                    gradient_checkpointing=gradient_checkpointing,
                )
                yield Planned(group="padded", run=run)


def dora(gpu: GpuSpec) -> Iterator[Planned]:
    """The dense norm of DoRA, with and without dropout, on 16 and on 4 bits."""
    for method in ("dora", "qdora"):
        for lora_dropout in (0.0, 0.05):
            for gradient_checkpointing in (True, False):
                run = train(
                    "meta-llama/Llama-3.2-1B",
                    method=method,
                    lora_dropout=lora_dropout,
                    batch_size=2,
                    seq_len=1024,
                    gradient_checkpointing=gradient_checkpointing,
                )
                yield Planned(group="dora", run=run)


def optimizers(gpu: GpuSpec) -> Iterator[Planned]:
    """Temporaries and states of every optimizer, where they are largest: full fine-tuning."""
    for optimizer in (
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_8bit",
        "paged_adamw_8bit",
        "adafactor",
        "sgd",
        "lion",
    ):
        run = train(
            "meta-llama/Llama-3.2-1B", method="full", optimizer=optimizer, batch_size=1, seq_len=512
        )
        yield Planned(group="optimizers", run=run)
    for lora_dropout in (0.0, 0.1):
        run = train(
            "google/gemma-2b", lora_dropout=lora_dropout, seq_len=1024, gradient_checkpointing=False
        )
        yield Planned(group="optimizers", run=run)


def caches(gpu: GpuSpec) -> Iterator[Planned]:
    """Growth of the cache while decoding: dynamic and static; a paged pool takes what is left."""
    for model in ("Qwen/Qwen2.5-3B", "meta-llama/Llama-3.2-1B"):
        for kv_cache in ("dynamic", "static", "paged"):
            for batch_size in (1, 16):
                run = RunConfig(
                    model=model,
                    phase="inference",
                    kv_cache=kv_cache,
                    batch_size=batch_size,
                    prompt_len=1024,
                    max_new_tokens=64,
                )
                yield Planned(group="caches", run=run, num_batches=2)


def experts(gpu: GpuSpec) -> Iterator[Planned]:
    """What 4-bit loading makes of experts held as one three-dimensional parameter."""
    for model in LARGE_4BIT:
        for seq_len in (512, 2048):
            run = train(model, method="qlora", seq_len=seq_len, target_modules=("attention",))
            found = judged(run, gpu)
            # experts in 16 bit are more than 80 GiB: then running out of memory is the answer
            expected = "fails" if found is not None and found.verdict == "fails" else ""
            yield Planned(group="experts", run=run, num_batches=2, expected=expected)


def puzzle(gpu: GpuSpec) -> Iterator[Planned]:
    """The report's chunk: 62.5 MB at batch 1 and 2 GB at batch 32, Gemma-2b, prefill 32."""
    for batch_size in (1, 32):
        run = RunConfig(
            model="google/gemma-2b",
            phase="inference",
            precision="fp32",
            batch_size=batch_size,
            prompt_len=32,
            max_new_tokens=1,
        )
        yield Planned(group="puzzle", run=run, num_batches=1, keeps_history=True)


_FACTORS: dict[str, Sequence[Any]] = {
    "method": ("lora", "qlora", "dora", "full", "lora", "qdora", "qlora"),
    "precision": ("bf16", "bf16", "bf16-pure"),
    "attn": ("sdpa", "sdpa", "eager"),
    "gradient_checkpointing": (True, True, False),
    "batch_size": (1, 2, 4, 8, 16, 32),
    "seq_len": (128, 256, 512, 1024, 2048, 4096, 8192),
    "optimizer": ("adamw_torch_fused", "adamw_8bit"),
    "loss_head": ("hf", "hf", "hf", "liger"),
    "padding": ("none", "padded"),
    "r": (8, 16, 64),
}


def memory(gpu: GpuSpec) -> Iterator[Planned]:
    """Every setting against every other: each value equally often, combined at random.

    What certainly does not fit is shortened, halving first the batch and then the length.
    """
    draw = random.Random(SEED)
    columns: dict[str, list[Any]] = {}
    for name, values in (_FACTORS | {"model": TRAINED}).items():
        column = [values[index % len(values)] for index in range(NUM_MEMORY)]
        draw.shuffle(column)
        columns[name] = column
    for index in range(NUM_MEMORY):
        settings = {name: column[index] for name, column in columns.items()}
        if get_method(settings["method"]).trains_base and settings["model"] in TRAINED[6:]:
            settings["model"] = TRAINED[index % 5]  # optimizer states of 7B do not fit
        if settings["attn"] == "eager":
            settings["seq_len"] = min(settings["seq_len"], 2048)
        run = train(**settings)
        while not _sensible(run, gpu):
            if run.batch_size > 1:
                run = replace(run, batch_size=run.batch_size // 2)
            elif run.seq_len > 128:
                run = replace(run, seq_len=run.seq_len // 2)
            else:
                break
        else:
            yield Planned(group="memory", run=run)


def boundary(gpu: GpuSpec) -> Iterator[Planned]:
    """The largest batch that fits by prediction, and the smallest that cannot."""
    settings: tuple[dict[str, Any], ...] = (
        {"model": "Qwen/Qwen2.5-14B", "method": "lora", "seq_len": 512},
        {"model": "Qwen/Qwen2.5-32B", "method": "qlora", "seq_len": 512},
        {"model": "mistralai/Mistral-7B-v0.1", "method": "dora", "seq_len": 512},
        {"model": "meta-llama/Llama-3.2-1B", "method": "full", "seq_len": 2048},
        {"model": "google/gemma-2b", "method": "lora", "seq_len": 1024, "attn": "eager"},
        {"model": "Qwen/Qwen2.5-3B", "method": "qlora", "seq_len": 4096},
    )
    for number, one in enumerate(settings):
        one["gradient_checkpointing"] = number % 3 == 2  # without it, less work fills the card

        def verdict(batch_size: int, one: dict[str, Any] = one) -> str:
            found = judged(train(batch_size=batch_size, **one), gpu)
            return "" if found is None else found.verdict

        fits = _last(lambda size: verdict(size) == "fits")
        fails = 1 + _last(lambda size: verdict(size) != "fails")
        for batch_size, expected in ((fits, "fits"), (fails, "fails")):
            if batch_size:
                run = train(batch_size=batch_size, **one)
                yield Planned(group="boundary", run=run, num_batches=1, expected=expected)


def _last(holds: Callable[[int], bool]) -> int:
    """The largest number for which `holds`, true up to somewhere and false beyond; 0 for none."""
    low, high = 0, 1
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def inference(gpu: GpuSpec) -> Iterator[Planned]:
    """Time per token over batch, prompt and generated length, as in the report's Figure 4."""
    for prompt_len, max_new_tokens, batch_sizes in (
        (32, 16, (1, 8, 32)),
        (512, 16, (1, 8, 32)),
        (2048, 16, (1, 8)),
        (512, 96, (1,)),
    ):
        for batch_size in batch_sizes:
            for model in SERVED:
                run = RunConfig(
                    model=model,
                    phase="inference",
                    batch_size=batch_size,
                    prompt_len=prompt_len,
                    max_new_tokens=max_new_tokens,
                )
                if _sensible(run, gpu):
                    yield Planned(group="inference", run=run, num_batches=2)
    for quant in ("nf4", "int8"):
        for model in SERVED[1::2]:
            for batch_size in (1, 8):
                run = RunConfig(
                    model=model,
                    phase="inference",
                    quant=quant,
                    batch_size=batch_size,
                    prompt_len=512,
                    max_new_tokens=16,
                )
                yield Planned(group="inference", run=run, num_batches=2)


NUM_REAL_STEPS = 300


def real(gpu: GpuSpec) -> Iterator[Planned]:
    """Whole fine-tuning runs with batches of mixed lengths, each after its profile of 5 batches."""
    settings: tuple[dict[str, Any], ...] = (
        {"model": "HuggingFaceTB/SmolLM2-135M", "method": "full", "batch_size": 8},
        {"model": "meta-llama/Llama-3.2-1B", "method": "lora", "batch_size": 4},
        {"model": "meta-llama/Llama-3.2-1B", "method": "qlora", "batch_size": 4},
        {"model": "Qwen/Qwen2.5-0.5B", "method": "dora", "batch_size": 4},
        {"model": "Qwen/Qwen2.5-3B", "method": "lora", "batch_size": 2},
    )
    for number, one in enumerate(settings):
        lengths = mixed_lengths(NUM_REAL_STEPS, seed=SEED + number)
        longest = max(lengths)
        run = train(seq_len=longest, padding="padded", **one)
        ordered = sorted(lengths)
        quantiles = tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.125, 0.375))
        upper = tuple(ordered[round(share * (len(ordered) - 1))] for share in (0.625, 0.875))
        profiled = (longest, *reversed(upper), *reversed(quantiles))
        yield Planned(group="real-profile", run=run, lengths=profiled)
        yield Planned(
            group="real",
            run=run,
            num_batches=NUM_REAL_STEPS,
            lengths=lengths,
            in_order=True,
        )


def mixed_lengths(count: int, *, seed: int) -> tuple[int, ...]:
    """Padded lengths of batches, spread as instruction data is: median 250, at most 1024."""
    draw = random.Random(seed)
    return tuple(max(32, min(1024, round(draw.lognormvariate(5.5, 0.6)))) for _ in range(count))


def repeats(gpu: GpuSpec) -> Iterator[Planned]:
    """The same runs again, in new processes: the noise that no predictor can beat."""
    for repeat in (1, 2, 3):
        for one in (*list(activations(gpu))[:2], *list(quantised(gpu))[:1]):
            yield replace(one, group="repeats", repeat=repeat)


GROUPS: dict[str, Callable[[GpuSpec], Iterator[Planned]]] = {
    "activations": activations,
    "puzzle": puzzle,
    "quantised": quantised,
    "padded": padded,
    "dora": dora,
    "inference": inference,
    "memory": memory,
    "optimizers": optimizers,
    "boundary": boundary,
    "caches": caches,
    "methods": methods,
    "images": images,
    "real": real,
    "experts": experts,
    "repeats": repeats,
}


def planned(gpu: GpuSpec, groups: Sequence[str]) -> list[Planned]:
    """Every run of `groups`, each once, in their order; impossible settings left out."""
    found: dict[tuple[Any, ...], Planned] = {}
    for group in groups:
        for one in GROUPS[group](gpu):
            try:
                run = resolve(model_of(one.run), one.run, gpu).run
            except ConfigError:
                continue
            resolved = replace(one, run=run)
            found.setdefault(resolved.key, resolved)
    return list(found.values())
