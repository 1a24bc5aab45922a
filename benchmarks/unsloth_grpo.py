"""Compare what Unsloth starts its vLLM with, and how long GRPO's steps take, with its notebooks.

    python benchmarks/unsloth_grpo.py --write    docs/accuracy/unsloth_grpo.md

`unsloth_grpo.csv` has one row per notebook: its settings of the day its outputs are of, what it
prints of the engine (the share of the GPU, GB for keys and values), and its progress bar. TRL is
the release that the notebooks of that day install, bitsandbytes the newest of the day. Nothing is
fitted to a row.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from markdown_tables import markdown_table, percent, write_page

from whichlora.calibration.load import load_calibration
from whichlora.memory import allocator
from whichlora.predict.predict import predict
from whichlora.predict.resolve import resolve
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.trainers.unsloth_grpo import engine_settings
from whichlora.trainers.unsloth_vllm import Settings
from whichlora.units import GiB

READINGS = Path(__file__).parent / "unsloth_grpo.csv"
GPUS = {
    "Tesla T4": "t4-16gb",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA L4": "l4-24gb",
    "NVIDIA GeForce RTX 4090": "rtx-4090-24gb",
}
HEADER = (
    "model", "GPU", "unsloth", "base", "answers", "share", "printed", "cache", "printed",
    "step", "printed", "error", "note",
)  # fmt: skip
BESIDE = """\
The share and the cache are Unsloth's own formulas: they are met but where a base is in fp8, which
is counted in 16 bit, and where a release of 2025.5 takes a 16-bit checkpoint for one although it
loads it in 4 bit (DeepSeek: 0.0 GB, whereupon vLLM starts for 256 tokens). T4s with torch 2.5 have
a smaller context. Where the longest answer is printed, 4-bit bases on T4s are within 13 %: their
codes are expanded for every token, which instructions bound there. Elsewhere an answer is as long
as the mean here, and a step ends with the longest: with 8 answers of twice the mean the A100's
18.4 s are met. What is left on a T4 in 16 bit (17 ms a token of Qwen3 4B) is not explained: rewards
and its two slow cores under vLLM's first engine are not counted. With an fp8 base in 16 bit a step
is too slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One notebook beside ours."""

    row: Mapping[str, str]
    settings: Settings
    step_s: float

    @property
    def error(self) -> float:
        """Relative error of the step's time."""
        return self.step_s / float(self.row["step_s"]) - 1

    @property
    def share_error(self) -> float:
        return self.settings.share - float(self.row["utilization"]) / 100

    @property
    def cache_error_gib(self) -> float:
        return self.settings.cache_gib - float(self.row["cache_gib"])


def run_of(row: Mapping[str, str]) -> tuple[RunConfig, GpuSpec]:
    """The training of a row, whose answers are as long as the longest that is printed."""
    gpu = find_target(GPUS[row["gpu"]])
    gpu = replace(gpu, memory_bytes=round(float(row["total_gib"]) * GiB))
    answer = round(float(row["longest_answer"] or row["mean_answer"]))
    counts_prompts = "counts prompts" in row["notes"]
    named = (each.strip().split(" ") for each in row["versions"].split(";"))
    options = {
        "fast_inference": True,
        "max_lora_rank": int(row["r"]),
        "max_seq_length": int(row["max_seq_length"]),
        "num_generations": int(row["num_generations"]),
        "max_completion_length": answer,
        "UNSLOTH_VLLM_STANDBY": row["standby"] == "True",
        "gpu_memory_utilization": float(row["gpu_memory_utilization"] or 0.5),
    }
    run = RunConfig(
        model=row["model_id"],
        trainer="unsloth-grpo",
        method="qlora" if row["quant"] == "nf4-dq" else "lora",
        r=int(row["r"]),
        target_modules=tuple(row["target_modules"].split("+")),
        precision="fp16" if gpu.key == "t4-16gb" else "bf16",
        optimizer=row["optimizer"],  # type: ignore[arg-type]
        gradient_accumulation_steps=int(row["gradient_accumulation_steps"]),
        batch_size=int(row["num_generations" if counts_prompts else "batch_size"]),
        seq_len=int(row["max_prompt_length"]) + answer,
        libraries=(*((name, version) for name, version in named), ("unsloth", row["unsloth"])),
        trainer_options=tuple(options.items()),
    )
    return run, gpu


def compared() -> Iterator[Compared]:
    """Every notebook."""
    with READINGS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            run, gpu = run_of(row)
            model = load_model(run.model)
            job = resolve(model, run, gpu)
            free = gpu.memory_bytes - allocator.idle_context_bytes(gpu)
            step_s = predict(model, run, gpu, load_calibration(gpu)).time.step_s
            assert step_s is not None
            yield Compared(
                row=row, settings=engine_settings(job.run, job.model, gpu, free), step_s=step_s
            )


def _cells(found: Compared) -> tuple[str, ...]:
    row = found.row
    repository, _, path = row["source_ref"].partition(":")
    name, _, commit = repository.partition("@")
    quoted = path.replace("(", "%28").replace(")", "%29")
    link = f"https://github.com/{name}/blob/{commit}/{quoted}"
    return (
        row["model_id"].rpartition("/")[2],
        row["gpu"].rpartition(" ")[2],
        row["unsloth"],
        row["quant"],
        f"{row['num_generations']} of {row['longest_answer'] or row['mean_answer']}",
        f"{found.settings.share:.2%}".replace("%", " %"),
        f"{row['utilization']} %",
        f"{found.settings.cache_gib:.2f}",
        row["cache_gib"],
        f"{found.step_s:.1f} s",
        f"{row['step_s']} s",
        percent(found.error),
        f"[{path.partition('/')[2]}]({link}): {row['notes']}",
    )


def document(found: list[Compared]) -> str:
    errors = sorted(abs(each.error) for each in found)
    shares = sorted(abs(each.share_error) for each in found)
    narrow = [each for each in found if each.row["quant"] != "fp8"]
    caches = sorted(abs(each.cache_error_gib) for each in narrow)
    return "\n\n".join(
        (
            f"Of {len(found)} notebooks the share of the GPU is met to {shares[-1]:.2%} of it. "
            f"What is left for keys and values is met to {median(caches):.2f} GB in the median of "
            f"{len(caches)}, {caches[-1]:.2f} at worst. A step's time is {median(errors):.0%} off "
            f"in the median, {errors[-1]:.0%} at worst.".replace("%", " %"),
            BESIDE,
            markdown_table(HEADER, map(_cells, found)),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = document(list(compared()))
    print(text)
    if parser.parse_args().write:
        write_page("unsloth_grpo", "Unsloth's GRPO against its notebooks", text)


if __name__ == "__main__":
    main()
