"""Compare the speeds of llama.cpp on GPUs that others published with our steps.

    python benchmarks/llama_cpp_gpus.py --write    docs/accuracy/llama_cpp_gpus.md

`--fit` prints the constants of `serving.llama_cpp_rates` from the group "scoreboard", and those of
`serving.llama_cpp_host` from two groups of `llama_cpp_host_speeds.csv` and from
`llama_cpp_cpu_prompts.csv`. `llama-bench` times prompts
of `tokens` in micro-batches, and `tokens` that follow `before` others one by one.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from markdown_tables import markdown_table, summary, write_page

from whichlora.predict.judgement import TIME_CONFIDENCE
from whichlora.predict.resolve import resolve
from whichlora.predict.serving_links import host_bytes_per_s
from whichlora.serving.base import Served
from whichlora.serving.hosted_time import HostedTimer, hosted_timer
from whichlora.serving.kernel_rates import KernelRates
from whichlora.serving.llama_cpp import stepping
from whichlora.serving.llama_cpp_host import BANDWIDTH, rates_of
from whichlora.serving.llama_cpp_rates import BLOCK_RATES
from whichlora.serving.step_time import Step, StepTimer, own_all_reduce, step_timer
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import TWO_SIDED_Z
from whichlora.spec.options import written
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.store.links import LinkFiles
from whichlora.timing.model import product_rate, sustained_factor

RECORDS = Path(__file__).parent / "llama_cpp_gpus.csv"
MODELS = RECORDS.with_name("llama_cpp_model_speeds.csv")
HOSTS = RECORDS.with_name("llama_cpp_host_speeds.csv")
PROMPTS = RECORDS.with_name("llama_cpp_cpu_prompts.csv")
ANY_PROCESSOR = "cpu-2048gb"
MACHINES = LinkFiles((RECORDS.parent.parent / "calibration",))
FITTED = "scoreboard"
READS = np.linspace(0.75, 1.0, 26)  # shares of the bandwidth that --fit tries


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One published speed.

    Args:
        kind: "decode" or "prompt"; of a prompt `ubatch` tokens are read at once.
        host: its memory, where it has a part of the model; `options` say which.
    """

    gpu: str
    model: str
    file_type: str
    group: str
    kind: str
    ubatch: int
    tokens: int
    before: int
    tokens_per_s: float
    gpus: int = 1
    host: str = ""
    options: str = ""

    @property
    def seconds(self) -> float:
        return self.tokens / self.tokens_per_s

    def timer(self) -> StepTimer:
        return _timer(self.model, self.file_type, self.tokens, self.gpu)

    def served(self) -> Served:
        """Where its host has a part of the model."""
        options = f"{BANDWIDTH}={self.host} {self.options}"
        tokens = self.before + self.tokens
        return benchmarked(self.model, self.file_type, tokens, self.gpu, self.gpus, options=options)

    def predicted_s(self, timer: StepTimer | HostedTimer) -> float:
        if self.kind == "decode":
            cached = self.before + (self.tokens + 1) / 2
            step = Step(decoding=1, cached_tokens=cached, sampled=1)
            return self.tokens * timer.seconds(step)
        num_steps = self.tokens // self.ubatch
        seconds = 0.0
        for index in range(num_steps):
            first = self.before + index * self.ubatch
            seconds += timer.seconds(
                Step(
                    decoding=0,
                    cached_tokens=0,
                    prompt_tokens=self.ubatch,
                    prompt_pairs=self.ubatch * (first + (self.ubatch + 1) / 2),
                    sampled=0,
                )
            )
        return seconds


def benchmarked(
    model: str, file_type: str, tokens: int, gpu: str, gpus: int = 1, *, options: str = ""
) -> Served:
    """What `llama-bench` runs, on so many equal GPUs; `options` are further ones, as name=value."""
    further = [word.split("=") for word in options.split()]
    run = RunConfig(
        model=model,
        phase="inference",
        serving="llama-cpp",
        serving_options=(
            ("devices", gpus),
            ("file_type", file_type),
            ("fit", False),
            *((name, written(value)) for name, value in further),
        ),
        prompt_len=tokens,
        max_new_tokens=1,
    )
    return resolve(load_model(model), run, find_target(gpu)).served


def timer_of(served: Served) -> StepTimer:
    """Of a GPU that holds all layers."""
    return step_timer(served, stepping=stepping(served), reduction_s=own_all_reduce(0.0, 1))


@cache
def _timer(model: str, file_type: str, tokens: int, gpu: str) -> StepTimer:
    return timer_of(benchmarked(model, file_type, tokens, gpu))


def speeds(records: Path = RECORDS) -> list[Speed]:
    with records.open(encoding="utf-8", newline="") as file:
        return [
            Speed(
                gpu=row["gpu"],
                model=row["model"],
                file_type=row["file_type"],
                group=row["group"],
                kind=row["kind"],
                ubatch=int(row["ubatch"]),
                tokens=int(row["tokens"]),
                before=int(row["before"]),
                tokens_per_s=float(row["tokens_per_s"]),
                gpus=int(row.get("gpus", 1)),
                host=row.get("host", ""),
                options=row.get("options", ""),
            )
            for row in csv.DictReader(file)
        ]


# --- fitting ----------------------------------------------------------------------------------


def with_constants(timer: StepTimer, **constants: float) -> StepTimer:
    """`timer` with other constants of all its kernels."""
    rates: KernelRates = replace(
        timer.rates,
        attention_s=constants["kernel_s"],
        prefill_attention_s=constants["kernel_s"],
        pointwise_s=constants["kernel_s"],
    )
    own = {
        "kernel_s": constants["kernel_s"],
        "reads": constants["reads"],
        "rate": constants.get("rate", timer.products[0].rate),
    }
    return replace(
        timer,
        rates=rates,
        products=tuple(replace(each, **own) for each in timer.products),
        head=replace(timer.head, **own),
    )


def kernel_seconds(cases: Sequence[Speed], reads: float) -> list[float]:
    """Of each case that decodes: what is left for one kernel."""
    found = []
    for case in cases:
        timer = case.timer()
        none = case.predicted_s(with_constants(timer, kernel_s=0.0, reads=reads))
        each = case.predicted_s(with_constants(timer, kernel_s=1e-6, reads=reads)) - none
        found.append(1e-6 * (case.seconds - none) / each)
    return found


def fitted(cases: Sequence[Speed]) -> tuple[float, dict[str, tuple[float, float]]]:
    """The share of the bandwidth; a kernel's seconds and the share of the fp32 peak, by capability.

    The share is the one with the least squares of relative errors while decoding.
    """
    by_capability: dict[str, list[Speed]] = {}
    for case in cases:
        capability = str(find_target(case.gpu).compute_capability)
        by_capability.setdefault(capability, []).append(case)
    best = (math.inf, 0.0)
    for reads in READS:
        squares = 0.0
        for those in by_capability.values():
            decoding = [case for case in those if case.kind == "decode"]
            kernel_s = float(np.mean(kernel_seconds(decoding, float(reads))))
            for case in decoding:
                timer = with_constants(case.timer(), kernel_s=kernel_s, reads=float(reads))
                squares += (case.predicted_s(timer) / case.seconds - 1) ** 2
        best = min(best, (squares, float(reads)))
    reads = best[1]
    found = {}
    for capability, those in by_capability.items():
        decoding = [case for case in those if case.kind == "decode"]
        kernel_s = float(np.mean(kernel_seconds(decoding, reads)))
        shares = [product_share(case, kernel_s, reads) for case in those if case.kind == "prompt"]
        found[capability] = (kernel_s, float(np.exp(np.mean(np.log(shares)))))
    return reads, found


def product_share(case: Speed, kernel_s: float, reads: float) -> float:
    """Of the fp32 peak, that the products of a prompt reach on a board without a limit of power."""
    timer = case.timer()
    gpu = find_target(case.gpu)
    rest = case.predicted_s(with_constants(timer, kernel_s=kernel_s, reads=reads, rate=math.inf))
    flops = case.predicted_s(with_constants(timer, kernel_s=kernel_s, reads=reads, rate=1.0)) - rest
    return flops / (case.seconds - rest) / product_rate(gpu, "fp32") / sustained_factor(gpu, "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConstants:
    """Of `serving.llama_cpp_host`; None for those that it has."""

    reads: float | None = None
    kernel_s: float | None = None
    crossing_s: float | None = None
    flops_per_byte: float | None = None


def hosted_seconds(case: Speed, constants: HostConstants = HostConstants()) -> float:
    """What we say of a step in which a host has a part."""
    return case.predicted_s(hosted_of(case, constants))


def hosted_of(case: Speed, constants: HostConstants = HostConstants()) -> HostedTimer:
    """The timer of a step in which a host has a part."""
    asked = case.served()
    steps = stepping(asked)
    hosted = steps.hosted
    assert hosted is not None
    if constants.reads is not None and constants.kernel_s is not None:
        rates = partial(_rates, reads=constants.reads, kernel_s=constants.kernel_s)
        hosted = replace(hosted, rates=rates)
    if constants.crossing_s is not None:
        hosted = replace(hosted, crossing_s=constants.crossing_s)
    if constants.flops_per_byte is not None:
        rate = constants.flops_per_byte * hosted.host.bandwidth_bytes_per_s
        peaks = dict.fromkeys(hosted.host.peak_flops_per_s, rate)
        hosted = replace(hosted, host=replace(hosted.host, peak_flops_per_s=peaks))
    link = host_bytes_per_s(asked.gpu, MACHINES)
    return hosted_timer(asked, hosted, stepping=steps, link_bytes_per_s=link)


def _rates(gpu: GpuSpec, dtype: str, *, reads: float, kernel_s: float) -> KernelRates:
    return rates_of(gpu, reads=reads, kernel_s=kernel_s)


def fitted_hosts(cases: Sequence[Speed]) -> HostConstants:
    """Of hosts that compute alone, the least squares of logs, each host as much as another.

    The wait of GPU and host is the geometric mean over hosts of what is left where these have
    experts alone, at the shortest context that was measured.
    """
    alone = _by_host([case for case in cases if case.group == "host alone"])
    best = (math.inf, HostConstants())
    for reads, kernel_us in product(np.arange(0.5, 0.91, 0.02), np.arange(0, 31, 2.5)):
        constants = HostConstants(reads=float(reads), kernel_s=1e-6 * float(kernel_us))
        squares = [
            np.mean([math.log(hosted_seconds(case, constants) / case.seconds) ** 2 for case in of])
            for of in alone.values()
        ]
        best = min(best, (float(np.mean(squares)), constants), key=lambda each: each[0])
    waits = []
    experts = [case for case in cases if case.group == "experts" and case.kind == "decode"]
    for of_host in _by_host(experts).values():
        first = min(case.before for case in of_host)
        without = replace(best[1], crossing_s=0.0)
        left = [
            (case.seconds - hosted_seconds(case, without)) / case.tokens / _crossings(case)
            for case in of_host
            if case.before == first
        ]
        waits.append(float(np.exp(np.mean(np.log(left)))))
    return replace(best[1], crossing_s=float(np.exp(np.mean(np.log(waits)))))


def prompt_errors(constants: HostConstants = HostConstants()) -> dict[str, float]:
    """Of each processor, the mean log of prompt over answer speed, published over ours."""
    logs: dict[str, list[float]] = {}
    with PROMPTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            answer = Speed(
                gpu=ANY_PROCESSOR,
                model=row["model"],
                file_type=row["file_type"],
                group="processor alone",
                kind="decode",
                ubatch=1,
                tokens=128,
                before=0,
                tokens_per_s=float(row["tokens_per_s"]),
                host="64",  # any: both speeds are in proportion to it
            )
            speed = float(row["prompt_tokens_per_s"])
            prompt = replace(answer, kind="prompt", ubatch=512, tokens=512, tokens_per_s=speed)
            ours = hosted_seconds(answer, constants) / hosted_seconds(prompt, constants)
            published = answer.seconds / prompt.seconds
            logs.setdefault(row["processor"], []).append(math.log(published / ours))
    return {processor: float(np.mean(each)) for processor, each in logs.items()}


def fitted_prompts() -> tuple[float, float, int]:
    """FLOP of a host for each byte that its memory reads, the deviation of the log, processors."""
    tried = np.arange(4.0, 16.0, 0.1)
    best = min(
        tried,
        key=lambda each: abs(
            np.mean(list(prompt_errors(HostConstants(flops_per_byte=float(each))).values()))
        ),
    )
    logs = list(prompt_errors(HostConstants(flops_per_byte=float(best))).values())
    return float(best), float(np.std(logs, ddof=1)), len(logs)


def _by_host(cases: Sequence[Speed]) -> dict[str, list[Speed]]:
    hosts: dict[str, list[Speed]] = {}
    for case in cases:
        hosts.setdefault(case.host, []).append(case)
    return hosts


def _crossings(case: Speed) -> int:
    hosted = stepping(case.served()).hosted
    assert hosted is not None
    return hosted.crossings


# --- comparing --------------------------------------------------------------------------------


def compared() -> list[tuple[Speed, float]]:
    """Relative errors of speeds."""
    return [(each, each.seconds / each.predicted_s(each.timer()) - 1) for each in speeds()]


def left_out() -> list[tuple[Speed, float]]:
    """Errors of cards with the constants of the others of their compute capability."""
    cases = [speed for speed in speeds() if speed.group == FITTED]
    found = []
    for name in sorted({case.gpu for case in cases}):
        gpu = find_target(name)
        reads, constants = fitted([case for case in cases if case.gpu != name])
        known = constants.get(str(gpu.compute_capability))
        if known is None:
            continue
        kernel_s, share = known
        rate = share * sustained_factor(gpu, "bf16") * product_rate(gpu, "fp32")
        for case in cases:
            if case.gpu == name:
                timer = with_constants(case.timer(), kernel_s=kernel_s, reads=reads, rate=rate)
                speed = replace(case, group="scoreboard, this card left out")
                found.append((speed, case.seconds / case.predicted_s(timer) - 1))
    return found


def document(found: Sequence[tuple[Speed, float]]) -> str:
    rows = []
    kinds = sorted({(speed.group, speed.kind, files_of(speed)) for speed, _ in found})
    for group, kind, files in kinds:
        errors = [
            error
            for speed, error in found
            if (speed.group, speed.kind, files_of(speed)) == (group, kind, files)
        ]
        cards = {
            speed.gpu
            for speed, _ in found
            if (speed.group, speed.kind, files_of(speed)) == (group, kind, files)
        }
        rows.append((group, kind, files, len(cards), *summary(errors).cells()))
    capabilities = ", ".join(sorted(BLOCK_RATES, key=float))
    return "\n\n".join(
        (
            "Speeds that `llama-bench` printed, with the source of each in "
            "`benchmarks/llama_cpp_gpus.csv`. The scoreboard (releases of 2025 and 2026, Llama 2 "
            "7B in Q4_0, no flash attention) gives the constants of the kernels: one share of the "
            f"bandwidth, and two of each compute capability ({capabilities}); those of few rows "
            "come from one card. The other groups are not fitted: other models, types, lengths "
            "and micro-batches.",
            "Misses. Releases of May 2024 had no matrix units in products with blocks, nor flash "
            "attention by default: their prompts are other kernels. In 16 bit, two of those "
            "cards print less for short prompts than for long ones. V100 has no 8-bit matrix "
            "units: its micro-batches of 64 and 128 tokens take longer than we say. Decoding of "
            "2024 on A100 and H100 was 20 to 50 % slower than we say, also in 16 bit.",
            "The scoreboard was read from two transcriptions, which agree on the five cards that "
            "both have. It does not say whether its A100 and V100 are PCIe cards; we took "
            "A100-SXM and V100-PCIe.",
            markdown_table(
                ("published in", "step", "weights", "cards", "n", "median", "p90", "worst"),
                rows,
                first_figure=3,
            ),
        )
    )


def model_document() -> str:
    """Of models with experts or recurrent layers that GPUs hold whole."""
    errors: dict[tuple[str, str], list[float]] = {}
    cards: dict[tuple[str, str], set[str]] = {}
    for case in speeds(MODELS):
        key = case.group, case.kind
        errors.setdefault(key, []).append(case.seconds / case.predicted_s(case.timer()) - 1)
        cards.setdefault(key, set()).add(case.gpu)
    rows = [(*key, len(cards[key]), *summary(each).cells()) for key, each in errors.items()]
    return "\n\n".join(
        (
            "## Experts and recurrent layers",
            "Published speeds with the source of each in `benchmarks/llama_cpp_model_speeds.csv`. "
            "Nothing is fitted to them. Recurrent layers keep their states in fp32 and copy them "
            "once a step; a prompt passes the delta rule token by token, as the source says. Two "
            "cards are taken as one, since layers follow each other.",
            "Misses. Prompts of Nemotron 3 Nano take 1.9 times as long as we say on the one card "
            "that published them. Prompts of gpt-oss-20b are 24 to 81 % slower on a GB10, more "
            "the longer their context. Two releases from before May 2026 print less for mixtures "
            "with recurrent layers; which of their kernels differ was not read.",
            markdown_table(
                ("model", "step", "cards", "n", "median", "p90", "worst"), rows, first_figure=2
            ),
        )
    )


def host_document() -> str:
    """Of hosts that have a part of the model."""
    rows, inside, count = host_rows([each for each in speeds(HOSTS) if not _is_alone(each)])
    return "\n\n".join(
        (
            "## With a part of the model on the host",
            "Published speeds whose host's memory is stated, with the source of each in "
            "`benchmarks/llama_cpp_host_speeds.csv`. Hosts that have all layers give the share of "
            "their bandwidth, and what an operator takes there. Those that have experts give the "
            "wait of GPU and host for each other, at the shortest context. Prompts, layers and "
            "longer contexts are not fitted. Whole requests are a mean over prompt and answer, "
            "so that they are slower than their steps. "
            f"{inside} of {count} lie inside the interval of the answer "
            f"({TIME_CONFIDENCE:.0%}).".replace("%", " %"),
            "Misses. A token after 4,096 and 8,192 others took 10 to 20 % longer in releases of "
            "May 2025, whose attention read a group's keys once for each query. One of these "
            "hosts is a virtual machine with more threads than cores.",
            markdown_table(
                ("of the model on the host", "step", "hosts", "n", "median", "p90", "worst"),
                rows,
                first_figure=2,
            ),
        )
    )


def processor_document() -> str:
    """Of processors alone."""
    rows, inside, count = host_rows([each for each in speeds(HOSTS) if _is_alone(each)])
    errors = [math.exp(-log) - 1 for log in prompt_errors().values()]
    rows.append(("processor alone", "prompt over answer", len(errors), *summary(errors).cells()))
    return "\n\n".join(
        (
            "## On a processor alone",
            "Further published speeds of processors whose memory is stated: the constants above "
            "are not fitted to them, except the share of memory that is made for a GPU. "
            f"{inside} of {count} lie inside the interval ({TIME_CONFIDENCE:.0%}). ".replace(
                "%", " %"
            )
            + "How much faster prompts are read than answers is fitted to the processors of "
            "`benchmarks/llama_cpp_cpu_prompts.csv`.",
            "Misses. An AmpereOne has 192 cores that wait for each other after each operator: "
            "Llama 3.2 3B is three times as slow as we say, 405B as fast. DeepSeek-R1 ran there "
            "under an Ollama of January 2025. A processor with a GPU's memory beside it (Strix "
            "Halo, M2 Ultra, Cix P1) reads 40 % of what that memory has. Prompts differ most "
            "where cores are many, or few.",
            markdown_table(
                ("", "step", "processors", "n", "median", "p90", "worst"), rows, first_figure=2
            ),
        )
    )


def host_rows(cases: Sequence[Speed]) -> tuple[list[tuple[str | int, ...]], int, int]:
    """Rows of a table by group; how many of how many lie inside the interval."""
    errors: dict[tuple[str, str], list[float]] = {}
    hosts: dict[tuple[str, str], set[str]] = {}
    inside = 0
    for case in cases:
        key, timer = (case.group, case.kind), hosted_of(case)
        predicted = case.predicted_s(timer)
        errors.setdefault(key, []).append(case.seconds / predicted - 1)
        hosts.setdefault(key, set()).add(case.host)
        farthest = TWO_SIDED_Z[TIME_CONFIDENCE] * timer.deviation
        inside += abs(math.log(case.seconds / predicted)) <= farthest
    rows = [(*key, len(hosts[key]), *summary(each).cells()) for key, each in errors.items()]
    return rows, inside, len(cases)


def _is_alone(speed: Speed) -> bool:
    return speed.gpu == ANY_PROCESSOR


def files_of(speed: Speed) -> str:
    return "16 bit" if speed.file_type in ("F16", "BF16") else "in blocks"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--fit", action="store_true")
    asked = parser.parse_args()
    if asked.fit:
        print(fitted([speed for speed in speeds() if speed.group == FITTED]))
        print(fitted_hosts(speeds(HOSTS)))
        print(fitted_prompts())
        return
    gpus = document([*compared(), *left_out()])
    text = "\n\n".join((gpus, model_document(), host_document(), processor_document()))
    print(text)
    if asked.write:
        write_page("llama_cpp_gpus", "Speed of llama.cpp on GPUs", text)


if __name__ == "__main__":
    main()
