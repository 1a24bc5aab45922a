"""Compare the waits and speeds of serving engines with what others measured.

    python benchmarks/serving_speeds.py --write    docs/accuracy/serving_speeds.md

Sources: Qwen's speed pages (one sequence under vLLM 0.4.2 to 0.6.3 on one, two and four
A100, and under SGLang 0.4.6 on four and eight H20) and `serving_speeds.csv`, rows of the
measurements that aiconfigurator collects (InferenceMAX: clients that begin at once and each wait
for their answer, ten requests each; prompts and answers are 0.8 to 1 times the length named). Its
engines run with 0.9 of the memory, 8,192 tokens a step and as many sequences as there are clients;
keys and values are in 8 bits on B200, as its scripts say, and of Llama on H200, where 32 prompts of
8,192 tokens do not wait for room, as they do on H100. `serving_scripts.csv` has later rows of the
same collection, each with the options of its script (github.com/SemiAnalysisAI/InferenceX); rows
that draft tokens are left out. `serving_experts.csv` has those that divide experts whole, and those
of sparse attention; rows that the collection calls data parallel are left out, since their scripts
start none. `serving_decoding.csv` has engines that only decode, on eight GPUs with sequences of
their own, and no waits for prompts. `serving_capacity.csv` has tokens a second under vLLM 0.30 on
an H100, with the most users that silybench found within its limits. And `serving_published.csv`
has what others published of engines of their own, with how they started these.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

from markdown_tables import markdown_table, write_page

from whichlora.calibration.load import load_calibration
from whichlora.predict.predict import predict
from whichlora.spec.results import ServingTime
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

HERE = Path(__file__).parent
READ_LAST = "several_gpus/qwen25_speed_unseen.csv"  # rows that no formula had seen
SPEED_PAGES = ("qwen25_speed.csv", "qwen2_speed.csv", "several_gpus/qwen_speed.csv", READ_LAST)
GPUS = {"A100-80GB": "a100-sxm-80gb", "H20-96GB": "h20-96gb"}
BUSY = HERE / "serving_speeds.csv"
SCRIPTS = HERE / "serving_scripts.csv"
EXPERTS = HERE / "serving_experts.csv"
DECODING = HERE / "serving_decoding.csv"
CAPACITY = HERE / "serving_capacity.csv"
PUBLISHED = HERE / "serving_published.csv"
QUANTISED_COPY = "-AWQ"  # of a base whose config is the same
MEAN_SHARE = 0.9  # of the length named: lengths are uniform from 0.8 of it
SPREAD = 0.1 / MEAN_SHARE  # around that mean
# These clients send tokens drawn at random, whose text takes the server 3.2 us a token
# (`tokenizing.py`); what is predicted has 1.6, of text that people write.
RANDOM_TOKEN_S = 1.6e-6
EQUAL = 0.02  # two speeds that differ by less have no order


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One measured number beside ours.

    Args:
        group: its line in the tables.
        case: what was served, whatever the storage of its weights (`quant`) and `num_gpus`.
    """

    what: str
    group: str
    case: tuple[str, ...]
    quant: str
    measured: float
    predicted: float
    num_gpus: int = 1

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


YARN_FACTOR = 4  # of Qwen's model cards, for sequences beyond 32,768 tokens


def _time(run: RunConfig, gpu_name: str) -> ServingTime | None:
    gpu, model = find_target(gpu_name), load_model(run.model)
    calibration = load_calibration(gpu)
    positions = model.max_position_embeddings
    if positions is not None and run.longest_sequence > positions:  # their rotation was scaled
        model = replace(model, max_position_embeddings=YARN_FACTOR * positions)
    answer = predict(model, run, gpu, calibration).serving
    return None if answer is None else answer.time


def _options(row: dict[str, str]) -> tuple[tuple[str, str | float | int | bool], ...]:
    """What a row of Qwen's pages states of its engine."""
    ranks = int(row["n_gpus"])
    if row["framework"] == "sglang":
        return (("tp_size", ranks), ("mem_fraction_static", 0.85))
    return (
        ("tensor_parallel_size", ranks),
        ("gpu_memory_utilization", 0.98),  # 0.9, or 1.0 where that is too small
        ("enforce_eager", "enforce_eager=True" in row["notes"]),
    )


def one_sequence() -> Iterator[Compared]:
    """Tokens per second of a whole answer, its prompt included.

    Qwen3's page counts the tokens of the prompt, too.
    """
    for page in SPEED_PAGES:
        with (HERE / "published" / page).open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["framework"] in ("vllm", "sglang")]
        for row in rows:
            engine = row["framework"]
            version = row["versions"].split(f"{engine} ")[1].split(";")[0].split(".post")[0]
            if "vllm==" in row["notes"]:
                version = row["notes"].split("vllm==")[1].split(",")[0]
            prompt_len, new_tokens = int(row["prefill_len"]), int(row["decode_len"])
            run = RunConfig(
                model=row["model_id"],
                phase="inference",
                serving=engine,
                serving_options=_options(row),
                prompt_len=prompt_len,
                max_new_tokens=new_tokens,
                # Qwen's files of AWQ and GPTQ say float16
                precision="fp16" if row["quant"].startswith(("awq", "gptq")) else "bf16",
                quant=row["quant"],  # type: ignore[arg-type]
                libraries=((engine, version),),
            )
            if (time := _time(run, GPUS[row["gpu"]])) is None:
                continue
            seconds = time.ttft_s + (new_tokens - 1) * time.tpot_s
            counted = new_tokens + prompt_len * ("prompt + generated" in row["tokens_or_samples"])
            num_gpus = int(row["n_gpus"])
            yield Compared(
                what="tokens/s of one sequence"
                + ", several GPUs" * (num_gpus > 1)
                + ", rows read last" * (page == READ_LAST),
                group=f"{row['source']}, {row['quant']}",
                case=(row["source"], row["model_id"], row["prefill_len"]),
                quant=row["quant"],
                measured=float(row["time_value"]),
                predicted=counted / seconds,
                num_gpus=num_gpus,
            )


def busy() -> Iterator[Compared]:
    """Waits of many clients at once, of two engines that run alike."""
    for row in _rows(BUSY):
        ranks = "tp_size" if row["backend"] == "sglang" else "tensor_parallel_size"
        options = (
            (ranks, row["tp_size"]),
            ("gpu_memory_utilization", "0.9"),
            ("kv_cache_dtype", row["kv_cache_dtype"]),
            ("max_num_batched_tokens", "8192"),
            ("max_num_seqs", row["concurrency"]),
        )
        group = f"{row['model_path'].rpartition('/')[2]}, {row['backend']}, {row['gpu']}"
        yield from _waits(row, options, group=group)


def scripts(path: Path = SCRIPTS, beside: str = ", scripts of 2026") -> Iterator[Compared]:
    """Waits of many clients at once, with the options of each script."""
    for row in _rows(path):
        options = _stated(row)
        name = row["model_path"].rpartition("/")[2]
        group = f"{name} {row['quant']}, {row['backend']}, {row['gpu']}"
        both = _waits(row, options, group=group, beside=beside)
        # SGLang looks for new requests every 10 or 30 steps there: its first waits are not ours
        yield from (each for each in both if row["backend"] == "vllm" or "first" not in each.what)


def experts() -> Iterator[Compared]:
    """As `scripts`, of experts that are divided whole, and of sparse attention."""
    yield from scripts(EXPERTS, ", experts and indexers")


def decoding() -> Iterator[Compared]:
    """Time per token of engines that only decode: one step of their share of the clients."""
    for row in _rows(DECODING):
        prompt_len, new_tokens = (round(MEAN_SHARE * int(row[name])) for name in ("isl", "osl"))
        run = RunConfig(
            model=row["model_path"],
            phase="inference",
            serving=row["backend"],
            serving_options=tuple((name, _value(text)) for name, text in _stated(row)),
            batch_size=int(row["concurrency"]) // int(row["engines"]),
            prompt_len=prompt_len,
            max_new_tokens=new_tokens,
            context=int(row["isl"]) + int(row["osl"]) + 200,
            quant=row["quant"],  # type: ignore[arg-type]
            libraries=((row["backend"], row["version"]),),
        )
        if (time := _time(run, row["gpu"])) is None:
            continue
        yield Compared(
            what="time per token, engines that only decode",
            group=f"DeepSeek-V3 fp8, {row['backend']}, {row['gpu']}, eight groups",
            case=(row["isl"], row["osl"], row["concurrency"], row["engines"]),
            quant=row["quant"],
            measured=float(row["tpot_ms"]) / 1e3,
            predicted=sum(time.step_parts_s.values()),
        )


def _stated(row: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The options of a row."""
    parts = (each.partition("=") for each in row["options"].split())
    return tuple((name, value) for name, _, value in parts)


def _value(text: str) -> str | float | int | bool:
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except ValueError:
        return text


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


# The newest release of vLLM on the days that rows without one were measured, which all are between
# its own (2025-10-02) and that of the next (2025-11-18).
_UNSTATED_VLLM = "0.11.0"


def _release(row: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The release of the engine that a row states, or that its day implies."""
    version = row["version"] or (_UNSTATED_VLLM if row["backend"] == "vllm" else "")
    return ((row["backend"], version),) if version else ()


def _waits(
    row: dict[str, str], options: tuple[tuple[str, str], ...], *, group: str, beside: str = ""
) -> Iterator[Compared]:
    """Time per token and mean time to the first of clients that each wait for their answer."""
    prompt_len, new_tokens = (round(MEAN_SHARE * int(row[name])) for name in ("isl", "osl"))
    engine = row["backend"]
    run = RunConfig(
        model=row["model_path"],
        phase="inference",
        serving=engine,
        serving_options=tuple((name, _value(text)) for name, text in options),
        batch_size=int(row["concurrency"]),
        prompt_len=prompt_len,
        max_new_tokens=new_tokens,
        length_spread=SPREAD,
        context=int(row["isl"]) + int(row["osl"]) + 200,
        quant=row["quant"],  # type: ignore[arg-type]
        libraries=_release(row),
    )
    if (time := _time(run, row["gpu"])) is None:
        return
    ranks = row.get("tp_size") or options[0][1]
    for what, measured, predicted in (
        ("time per output token", row["tpot_ms"], time.tpot_s),
        (
            "mean time to first token",
            row["ttft_ms"],
            time.mean_ttft_s + RANDOM_TOKEN_S * prompt_len,
        ),
    ):
        yield Compared(
            what=what + beside,
            group=group,
            case=(ranks, row["isl"], row["osl"], row["concurrency"]),
            quant=row["quant"],
            measured=float(measured) / 1e3,
            predicted=predicted,
        )


def capacity() -> Iterator[Compared]:
    """Tokens a second of many users; found when the formulas were finished."""
    with CAPACITY.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            run = RunConfig(
                model=row["model_path"],
                phase="inference",
                serving="vllm",
                batch_size=int(row["users"]),
                prompt_len=int(row["prompt_len"]),
                max_new_tokens=int(row["max_new_tokens"]),
                quant=row["quant"],  # type: ignore[arg-type]
                libraries=(("vllm", "0.30.0"),),
            )
            time = _time(run, "h100-sxm-80gb")
            assert time is not None
            yield Compared(
                what="tokens/s of all users",
                group="Qwen3-8B, vllm, h100-sxm-80gb",
                case=(row["quant"], row["prompt_len"], row["max_new_tokens"], row["users"]),
                quant=row["quant"],
                measured=float(row["output_tokens_per_s"]),
                predicted=time.output_tokens_per_s,
            )


def published() -> Iterator[Compared]:
    """Times per token, first waits and tokens a second that others published, one at a time too."""
    for row in _rows(PUBLISHED):
        clients, prompt_len = int(row["concurrency"]), int(row["prompt_len"])
        run = RunConfig(
            model=row["model_path"].removesuffix(QUANTISED_COPY),
            phase="inference",
            serving=row["backend"],
            serving_options=tuple((name, _value(text)) for name, text in _stated(row)),
            batch_size=clients,
            prompt_len=prompt_len,
            max_new_tokens=int(row["max_new_tokens"]),
            quant=row["quant"],  # type: ignore[arg-type]
            libraries=((row["backend"], row["version"]),),
            shared_prompt_fraction=float(row["shared"] or 0),
        )
        if (time := _time(run, row["gpu"])) is None:
            continue
        first_s = time.ttft_s if clients == 1 else time.mean_ttft_s
        name = row["model_path"].rpartition("/")[2]
        for what, cell, scale, predicted in (
            ("time per output token", "tpot_ms", 1e-3, time.tpot_s),
            ("mean time to first token", "ttft_ms", 1e-3, first_s),
            ("tokens/s", "output_tokens_per_s", 1.0, time.output_tokens_per_s),
        ):
            if row[cell]:
                yield Compared(
                    what=f"{what}, others' pages, " + ("alone" if clients == 1 else "clients"),
                    group=f"{name} {row['quant']}, {row['backend']}, {row['gpu']}",
                    case=(row["options"] or "-", str(prompt_len), row["concurrency"]),
                    quant=row["quant"],
                    measured=scale * float(row[cell]),
                    predicted=predicted,
                )


def ordered_pairs(found: Sequence[Compared]) -> tuple[int, int]:
    """Pairs of rows that are ordered right, and all.

    A pair are two storages of one model, measured with one prompt, whose speeds differ. Each may
    have its own number of GPUs: who chooses a storage chooses how many GPUs hold it.
    """
    by_case = defaultdict(list)
    for each in found:
        by_case[each.case].append(each)
    right = pairs = 0
    for same in by_case.values():
        for one, other in combinations(same, 2):
            if one.quant != other.quant and abs(one.measured / other.measured - 1) > EQUAL:
                pairs += 1
                right += (one.measured > other.measured) == (one.predicted > other.predicted)
    return right, pairs


def _named(compared: Compared) -> str:
    gpus = f", {compared.num_gpus} GPUs" if compared.num_gpus > 1 else ""
    return " ".join(compared.case) + gpus


def _summary(found: Sequence[Compared]) -> list[tuple[str, ...]]:
    groups = defaultdict(list)
    for each in found:
        groups[each.what, "**all**"].append(each)
        groups[each.what, each.group].append(each)
    rows: list[tuple[str, ...]] = []
    for (what, group), members in sorted(groups.items()):
        errors = sorted(abs(each.error) for each in members)
        worst = max(members, key=lambda each: abs(each.error))
        p90 = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
        rows.append(
            (
                what,
                group,
                str(len(members)),
                f"{100 * median(errors):.1f} %",
                f"{100 * p90:.0f} %",
                f"{100 * worst.error:+.0f} % ({_named(worst)})",
            )
        )
    return rows


SEVERAL_GPUS = """\
**Several GPUs.** No formula had seen these 38 rows. As first predicted, 35 of them had a median of
7.3 %, p90 32 % and worst +186 %; three were said not to start. Their causes, by the engines' code:

- Experts of GPTQ and AWQ are read in their codes, not in 16 bit.
- SGLang 0.4.6 launches a kernel for each of them: 24,064 a step of Qwen3-235B-A22B, which is why
  GPTQ-Int4 makes 14.69 tokens/s.
- Attention over a chunk of 512 tokens has too few blocks for an A100 (0.6.2 and 0.6.3).
- Ray schedules each step of 0.4.2 on every rank.
- AWQ's first kernel passes its tiles one by one, and expands its codes for prompts (0.4.2). Its
  time for a tile is fitted, to one GPU; nothing else of this list is.

Not explained:

- Qwen2-57B-A14B under 0.4.2: a step takes 14 ms more than we derive in a graph, and 27 without.
  Its kernel of experts has the tiles of later releases, and would have to read a quarter as fast
  as theirs. We found no measurement of it under Triton 2.3.
- Qwen3-235B-A22B under SGLang 0.4.6: a step takes 3 to 4 ms more in 16 and 8 bit, on four and
  eight H20, at all lengths. Its source has five small kernels more in each of 94 layers: 1.2 ms.
  Sorting tokens by expert took 20 µs then and takes 10 now (pulls 4327 and 14133 of
  github.com/sgl-project/sglang): 0.9 ms. The rest is unknown. Links are taken to be an HGX H100's.
- The same in GPTQ-Int4: a prompt of 63,488 tokens is read faster than we say.
- Qwen2.5-72B in 16 bit on four A100: a step takes 1 to 2 ms more than errors on one GPU let expect.
  vLLM's own all-reduce of 16 KiB takes 6 µs there, NCCL's 16 (aiconfigurator's tables, NVSwitch):
  1.6 ms a step, if the engine fell back to it. The pages do not say. Long prompts show no slow
  links, and two A100 show no such time.
- Two rows of Qwen2-72B on two A100 contradict each other. With 63,488 tokens AWQ's steps take
  22 ms more than with one, GPTQ-Int8's 9; with 30,720 both take 11, by the same attention.

**Llama-3.1-405B in FP8 on eight H100 under 0.6.0**, of a thread that names no boards
(github.com/vllm-project/vllm/issues/8244) and is not a row: 32 prompts make 335 tokens/s, more of
them 700 at most. Ours are 904 on SXM boards, and 3,420 of 256 prompts, where the engine's authors
state 3,100. On PCIe boards they are 364 and 850: adding up takes 33 ms of a step of 78 there, over
NVSwitch 2.4 of 32. A host that is slower would not stop at 700: without graphs a step takes 52 ms,
and 256 prompts share it. So the thread's links are slow, and no formula was changed."""


SCRIPTS_OF_2026 = """\
**Scripts of 2026**: DeepSeek-V3 (R1), MiniMax M2.5 and Qwen3.5-397B-A17B, 191 rows that no formula
had seen. As first predicted their times per output token had a median of 9.4 %, p90 28 % and worst
+72 %. The cause: tiles of each expert were counted as waves of their own, and one kernel takes
those of all. Since then a layer of experts is one operator, fitted to aiconfigurator's tables
([engine_kernels.md](engine_kernels.md)). Before, gpt-oss on H200 had 6.0 % in time per token and
17 % in first waits.

Not explained:

- First tokens of mixtures under vLLM come 25 to 45 ms later than we say after prompts of 8,192
  tokens, 10 to 20 after 1,024, on one GPU and on eight: it is not work that is shared. Nor is it
  the text of their random tokens, which takes 3.2 µs for each here (`benchmarks/tokenizing.py`;
  3.4 with OpenAI's 200,000 tokens), and is counted in these comparisons.
- DeepSeek-V3 on four B300: prompts of 8,192 tokens take four times as long as on four B200.
- MiniMax and Kimi under vLLM took what we said while the host's 0.8 ms came on top of each step.
  Since 0.14 these pass meanwhile, as gpt-oss shows (25, 12 and 10 % in the median before, 9, 5
  and 4 now). So a step of these two takes 0.4 to 0.8 ms that we do not count, about 10 µs a layer.
- MiniMax on H200 is 14 % slower than we say: its script turns DeepGEMM off and captures pieces of
  a step alone. Qwen3.5 in 16 bit on B200 is 21 % slower, its release is not stated.
- Of 256 and 512 clients MiniMax takes 15 to 23 % longer for a token, and answers sooner: its engine
  shares steps between prompts and answers in another way.

**Whole experts and routers**, counted later, from the engine's code and from other tables alone.
Triton's kernels gate, narrow and add up the rows of all experts, also of those that other GPUs
hold; FlashInfer's, which Hopper has for fp8 in blocks since 0.17, do not. MiniMax's routers are
multiplied in fp32. Times per token of the 191 rows had 9.8 % before and 8.7 % now, of the 135 rows
below 9.2 and 8.4, first waits 27 and 22 %, and 22 and 19 %. Ada multiplies fp8 in blocks by
Triton's kernel without a tuned config: one user of Qwen3-30B-A3B on two L40S had 30 % too little,
and has 17; of Qwen3-235B on eight 31 and 19 %.

All clients of these pages have lengths of 0.8 to 1 of what is named (`--length-spread 0.11`).
Another log, with equal lengths (MiniMax M2.5, eight H100, whole experts, 0.20.0, prompts of 10,240
tokens), has first waits of 284, 582, 936, 1,032 and 969 ms for 2 to 32 clients, and times per token
of 8.7 to 36.1; we say 263, 386, 736, 620 and 629, and 8.0 to 32.4. What is left is one client's
prompt: 185 ms against 264.

Not a fault of these formulas: two A100 over PCIe whose platform lacks peer-to-peer access, so that
vLLM turns its own all-reduce off (its log says so) and NCCL goes through the host's memory. Each
all-reduce of 10 to 200 tokens takes 30 to 60 µs more than over PCIe itself, 20 to 26 % of a token
of Qwen2-7B and 8 % of a 72B. `whichlora calibrate --links` measures such links."""


EXPERTS_AND_INDEXERS = """\
**Experts and indexers**: 145 rows that no formula had seen, first predicted when experts could be
divided whole, and indexers were counted. Kimi K2.5 in 4-bit integers had 1.9 % on B200 and 1.2 %
on H200, MiniMax M2.5 with whole experts 6.2 % on H100 and 3.9 % on B200, DeepSeek-V3 in eight
groups that only decode 11.5 %. GLM-5 under SGLang had 13 % on H200, 21 % on B200 and 16 % on B300,
all of it too fast: its release launches 13 kernels for each indexer, where 0.5.23 has five. Their
number is counted in its code; nothing else changed.

Not explained:

- Qwen3.5 under SGLang has 12 to 19 % with whole experts, and up to 21 % without: it is not experts.
- GLM-5's prompts take two to three times as long as we say, and answers wait for them. With
  answers of 8,192 tokens, where prompts are few, steps on H200 are right within 0.2 ms for up to 32
  clients; those on B200 take 2 ms more than we say.
- Kimi on H200, 16 clients and 8,192 tokens: 64 ms a token, where 32 clients have 22. We take it for
  a fault of the run.
- 1,024 clients of one decoding engine are 128 in each group, of which the default share holds 81;
  what share it had is not stated. With all of them running the error is 8 %, not 32.
- Rows that call themselves data parallel (MiniMax) have the times of those that do not: their
  scripts start no data parallel. Measured engines of that kind under vLLM were not found, but for a
  server that ran a profiler, whose prompts take ten times their arithmetic."""


OTHERS_PAGES = """\
**Others' pages**: 40 rows, of vLLM 0.27 to 0.29 but for one, that no formula had seen: 62 numbers.
As first predicted:

| what | n | median | p90 | worst |
|---|---|---|---|---|
| time per token, alone | 11 | 8.5 % | 25 % | -25 % |
| tokens/s, alone | 4 | 15.4 % | 17 % | -17 % |
| first wait, alone | 7 | 26.6 % | 58 % | -58 % |
| time per token, clients | 11 | 17.2 % | 23 % | +49 % |
| tokens/s, clients | 19 | 7.3 % | 46 % | +47 % |
| mean first wait, clients | 10 | 102 % | 231 % | +231 % |

They named one fault: since 0.9 zeros of AWQ are multiplied by their scales before
(github.com/vllm-project/vllm/pull/16850), and cost no time. Not explained:

- Prompts in AWQ on an L40S and on L4 take about half of what we say, and their first waits, too.
  What large products of codes reach is fitted to 0.6.3; pull 16850 changed that kernel as well.
- An L4 alone reads 92 % of its bandwidth, ours 85: its rates are an L40S's.
- Qwen3-235B on four cards over PCIe: a step alone takes 4 to 5 ms more than we say, as ranks and
  as whole experts, and in stages what we say. With 32 clients it takes less as ranks: the page has
  no times of its links.
- Qwen2.5-0.5B under WSL makes 17 % less alone than ours and 32 % less with four and sixteen: the
  host sets the pace, and this one is not known.
- Qwen3-4B on an RTX 5090 with 128 users makes 28 % more than ours, with 4 to 64 within 8 %, but for
  16 of them (23 % less).
- First waits of a few words have an HTTP server of their own: 7 to 60 ms more than ours."""


def document(single: Sequence[Compared], many: Sequence[Compared]) -> str:
    right, pairs = ordered_pairs([each for each in single if each.num_gpus == 1])
    all_right, all_pairs = ordered_pairs(single)
    return "\n\n".join(
        (
            "One sequence: [Qwen's pages](https://github.com/QwenLM/Qwen2.5), A100-SXM-80GB and "
            "H20. Clients: [InferenceMAX](https://github.com/SemiAnalysisAI/InferenceMAX), as "
            "aiconfigurator collects it (Apache-2.0). The kernels' constants are fitted to other "
            "tables ([engine_kernels.md](engine_kernels.md)), the host's to Qwen's pages and to "
            "four clients of Llama; gpt-oss is not fitted at all. Users: "
            "[silybench](https://github.com/tgarg01/silybench-data), read when the formulas were "
            "finished. Its rows of 512 clients are left out: they state fewer milliseconds than "
            "the arithmetic takes at the peak. A request waits for the step under way, under "
            "asynchronous scheduling for the next one, too, and 6 ms outside of the engine "
            "(`FRONT_S`, from other logs); without these three the median of the first waits was "
            "25 %. Misses: gpt-oss's kernels on B200 are faster (its scripts choose "
            "TensorRT-LLM's with inputs in 8 bits, and Marlin's on H100 and H200), and short "
            "prompts to Llama on four and eight B200 wait 55 to 65 ms for something beside the "
            "GPU: its script captures decoding steps alone (`FULL_DECODE_ONLY`), that of gpt-oss "
            "steps of up to 2,048 tokens, whose first waits we miss by 11 ms at most with four "
            "clients.",
            "Beyond its graphs (8,192 tokens) the host of 0.6.2 sets the pace of quantised models: "
            "a step of Qwen2.5-7B takes 19 to 20 ms in all three forms. The type of their codes is "
            "a script object there, for which torch walks the arguments of each product in Python. "
            "That code, run here with kernels that do nothing (`benchmarks/eager_host.py`), takes "
            "10 ms for 28 layers, 5.8 in 16 bit, and 3.4 in 0.4.2, to whose rows the cost of a "
            "launch is fitted. Nothing is fitted to rows of 0.6.2: these three were 13 to 19 % too "
            "fast, and are 2 to 5 % too slow. Then 19 rows of the same pages were read that no "
            "formula had seen. Of Qwen2.5-14B at 129,024 tokens all four storages are within 3.3 % "
            "and in order; there 16 bit is the slowest. For Qwen2.5-72B in GPTQ-Int4 the page puts "
            "eager settings beside two GPUs, whose steps of 22 ms need graphs; on one they take 61 "
            "ms, of which the host explains 52, and the GPU 33. They are taken as exchanged.",
            f"Storages of one model are ordered right in {right} of {pairs} pairs on one GPU that "
            f"differ by more than {100 * EQUAL:.0f} %, and in {all_right} of {all_pairs} pairs "
            "where either may be on several. All on one GPU that are not have one of two "
            "measurements in 16 bit: Qwen2-1.5B at 14,336 and 30,720 tokens, beyond the "
            "captured lengths of 0.4.2, where the host sets the pace (that run's host was "
            "slower: its steps take 11 and 14 % longer than we say, those of the fourteen other "
            "such runs of 0.5B and 1.5B 4 % less to 3 % more). Their "
            "script counts 2,048 tokens even where an answer ends sooner. On several: GPTQ-Int8 "
            "of Qwen2-72B, which we predict "
            "5 % too slow, beside AWQ, and AWQ of Qwen2.5-32B on one beside 16 bit on two.",
            SEVERAL_GPUS,
            SCRIPTS_OF_2026,
            EXPERTS_AND_INDEXERS,
            OTHERS_PAGES,
            markdown_table(
                ("what", "of", "n", "median", "p90", "worst"), _summary([*single, *many])
            ),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    text = document(
        list(one_sequence()),
        [*busy(), *scripts(), *experts(), *decoding(), *capacity(), *published()],
    )
    print(text)
    if parser.parse_args().write:
        write_page("serving_speeds", "Published speeds of serving engines", text)


if __name__ == "__main__":
    main()
