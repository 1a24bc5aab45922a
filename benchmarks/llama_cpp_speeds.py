"""Compare the seconds of llama.cpp on one CPU core with a prediction from a calibration.

    python benchmarks/llama_cpp_speeds.py --write    docs/accuracy/llama_cpp_time.md

`--measure BUILD` measures anew (as of llama_cpp_runs.py). Files have no weights: kernels of zeros
take as long. Seconds are those of the processor, on one thread: medians of several.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import llama_cpp_page
import numpy as np
from markdown_tables import markdown_table, summary

from whichlora.predict.resolve import resolve
from whichlora.serving.base import LoggedTimes
from whichlora.serving.cpu_timer import cpu_timer
from whichlora.serving.gguf import tensors
from whichlora.serving.gguf_architectures import architecture_of
from whichlora.serving.llama_cpp import stepping
from whichlora.serving.step_time import Step as EngineStep
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model

RECORDS = Path(__file__).parent / "llama_cpp_speeds.csv"
COLUMNS = ("model", "file_type", "before", "tokens", "seconds", "least", "repeats")
MODELS = (
    "HuggingFaceTB/SmolLM2-360M", "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M",
    "Qwen/Qwen2.5-0.5B", "meta-llama/Llama-3.2-1B",
)  # fmt: skip
CALIBRATED = ("HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B")
FILE_TYPES = ("Q8_0", "Q4_K_M", "F16", "Q4_0", "Q6_K")
# Tokens in the cache before, tokens of the step, and how often it is measured.
STEPS = ((0, 64, 2), (64, 1, 5), (64, 192, 1), (256, 1, 5), (256, 256, 1), (512, 1, 5))


def measure(build: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import gguf_files

    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(build / "bin")}
    with (
        tempfile.TemporaryDirectory() as folder,
        RECORDS.open("w", encoding="utf-8", newline="") as out,
    ):
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(COLUMNS)
        for stored in FILE_TYPES:
            for name in MODELS:
                file = Path(folder) / "model.gguf"
                gguf_files.write(load_model(name), stored, file)
                asked = json.dumps({"file": str(file)})
                done = subprocess.run(
                    [sys.executable, __file__, "--probe", asked],
                    capture_output=True, text=True, env=environment, check=False,
                )  # fmt: skip
                file.unlink()
                for line in done.stdout.splitlines():
                    if line.startswith("step"):
                        writer.writerow((name, stored, *line.split()[1:]))
                out.flush()


def probe(asked: dict[str, Any]) -> None:
    """Time the steps of one file."""
    import time

    import llama_cpp.llama_cpp as library

    @library.llama_log_callback
    def log(level: int, text: bytes, _: object) -> None:
        if level >= 4:
            sys.stderr.write(text.decode())

    library.llama_log_set(log, None)
    library.llama_backend_init()
    loading = library.llama_model_default_params()
    loading.load_mode, loading.use_extra_bufts = 0, False
    model = library.llama_model_load_from_file(asked["file"].encode(), loading)
    settings = library.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_outputs_max = 768, 512, 1
    settings.n_threads = settings.n_threads_batch = 1
    settings.no_perf = True
    context = library.llama_init_from_model(model, settings)
    memory = library.llama_get_memory(context)

    def step(first: int, tokens: int) -> float:
        batch = library.llama_batch_init(tokens, 0, 1)
        batch.n_tokens = tokens
        for index in range(tokens):
            batch.token[index], batch.pos[index] = 1 + index, first + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = index == tokens - 1
        begin = time.process_time()
        failed = library.llama_decode(context, batch)
        library.llama_synchronize(context)
        taken = time.process_time() - begin
        library.llama_batch_free(batch)
        if failed:
            raise SystemExit(f"llama_decode: {failed}")
        return taken

    step(0, 8)
    for before, tokens, repeats in STEPS:
        seconds = []
        for _ in range(repeats):
            library.llama_memory_seq_rm(memory, 0, before, -1)
            seconds.append(step(before, tokens))
        print("step", before, tokens, f"{median(seconds):.6f}", f"{min(seconds):.6f}", repeats)
        sys.stdout.flush()
    os._exit(0)


# --- comparing --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One measured step.

    Args:
        before: tokens in the cache.
        tokens: of the step; one is decoding, more are a prompt.
    """

    model: str
    file_type: str
    before: int
    tokens: int
    seconds: float

    @property
    def is_decoding(self) -> bool:
        return self.tokens == 1

    def features(self) -> dict[str, float]:
        """What the step does: products by the type of their weights, attention, layers.

        A decoding step reads every stored weight once, so that its products go by bytes. Those of
        a prompt go by weights times tokens; the head has one row in both.
        """
        model = load_model(self.model)
        found: dict[str, float] = {}
        for tensor in tensors(model, self.file_type, architecture_of(model)):
            is_head = tensor.name == ("token_embd" if model.head_tied else "output")
            if tensor.num_rows == 1 or (tensor.layer is None and not is_head):
                continue
            rows = 1 if is_head else self.tokens
            one_row = self.is_decoding or is_head
            amount = tensor.num_bytes if one_row else rows * tensor.num_rows * tensor.row
            name = f"{tensor.type}{'' if one_row else ' of a prompt'}"
            found[name] = found.get(name, 0.0) + amount
        cells = self.tokens * (self.before + (self.tokens + 1) / 2)
        attentions = [
            (count * each.num_attention_heads, each.head_dim)
            for layer, count in model.layers()
            for each in layer.attentions
        ]
        found["scores"] = cells * sum(heads for heads, _ in attentions)
        found["attention"] = cells * sum(heads * width for heads, width in attentions)
        found["layers"] = model.num_hidden_layers * model.hidden_size * self.tokens
        return found


def steps() -> list[Step]:
    with RECORDS.open(encoding="utf-8", newline="") as file:
        return [
            Step(
                model=row["model"],
                file_type=row["file_type"],
                before=int(row["before"]),
                tokens=int(row["tokens"]),
                seconds=float(row["seconds"]),
            )
            for row in csv.DictReader(file)
        ]


def fitted(known: list[Step]) -> dict[str, float]:
    """Seconds of each feature: the least relative errors, none below 0."""
    from scipy.optimize import nnls

    names = sorted({name for step in known for name in step.features()})
    rows = [[step.features().get(name, 0.0) / step.seconds for name in names] for step in known]
    table = np.array(rows)
    scale = table.max(axis=0)
    rates, _ = nnls(table / scale, np.ones(len(known)))
    return dict(zip(names, rates / scale, strict=True))


def compared() -> list[tuple[Step, float]]:
    """Steps of models that are not calibrated with, and their relative errors."""
    found = []
    measured = steps()
    for decoding in (True, False):
        of_kind = [step for step in measured if step.is_decoding == decoding]
        rates = fitted([step for step in of_kind if step.model in CALIBRATED])
        for step in of_kind:
            if step.model not in CALIBRATED and all(name in rates for name in step.features()):
                seconds = sum(rates[name] * value for name, value in step.features().items())
                found.append((step, seconds / step.seconds - 1))
    return found


def by_logs(lengths: int) -> list[tuple[Step, float]]:
    """Steps whose file is known by the log of other lengths, and their relative errors.

    The first log has the shortest prompt, and a token after it, the second a token after more;
    `cpu_timer` reads them as those of a user.
    """
    found = []
    by_file: dict[tuple[str, str], list[Step]] = {}
    for step in steps():
        by_file.setdefault((step.model, step.file_type), []).append(step)
    for (name, stored), of_file in by_file.items():
        run = RunConfig(
            model=name, phase="inference", serving="llama-cpp", max_new_tokens=1,
            serving_options=(("file_type", stored),),
        )  # fmt: skip
        served = resolve(load_model(name), run, find_gpu("cpu")).served
        prompt, *others = of_file
        decoded = [step for step in others if step.is_decoding]
        logs = [
            LoggedTimes(run=replace(run, prompt_len=step.before), values={"tpot_s": step.seconds})
            for step in decoded[:lengths]
        ]
        first = replace(run, prompt_len=prompt.tokens)
        logs.append(LoggedTimes(run=first, values={"ttft_s": prompt.seconds}))
        timer = cpu_timer(served, stored, stepping(served), logs)
        assert timer is not None
        found += [
            (step, timer.seconds(_asked(step)) / step.seconds - 1)
            for step in others
            if step not in decoded[:lengths]
        ]
    return found


def _asked(step: Step) -> EngineStep:
    if step.is_decoding:
        return EngineStep(1, step.before + 1, 1)
    pairs = step.tokens * (step.before + (step.tokens + 1) / 2)
    return EngineStep(0, 0.0, 1, step.tokens, pairs)


def _is_prompt(step: Step) -> bool:
    return not step.is_decoding


def _is_token_after(before: int) -> Callable[[Step], bool]:
    return lambda step: step.is_decoding and step.before == before


def document(found: list[tuple[Step, float]]) -> str:
    one, two = by_logs(1), by_logs(2)
    rows = []
    for name, decoding in (("decoding, one token", True), ("prompt, 64 to 256 tokens", False)):
        for stored in FILE_TYPES:
            errors = [
                error
                for step, error in found
                if step.is_decoding == decoding and step.file_type == stored
            ]
            if errors:
                rows.append((name, stored, *summary(errors).cells()))
        errors = [error for step, error in found if step.is_decoding == decoding]
        rows.append((name, "all", *summary(errors).cells()))
    return "\n\n".join(
        (
            f"One core of an Intel Xeon with AVX-512, llama.cpp 0c1e570 without second layouts of "
            f"weights. Calibrated with {', '.join(CALIBRATED)}; errors are those of the other "
            "models. A decoding step takes the bytes of each type of weights at a rate of that "
            "type, a prompt its products; attention goes by heads and cells.",
            markdown_table(("step", "file", "n", "median", "p90", "worst"), rows, first_figure=2),
            "Answers for a CPU (`serving/cpu_timer.py`) take their rates from logs of the same "
            "file. Here a log has a prompt of 64 tokens and one token after it, a second one a "
            "token after 256; errors are those of the other lengths. What a cached byte and a "
            "pair usually cost beside a weight is fitted to all of these steps.",
            markdown_table(
                ("step", "known by", "n", "median", "p90", "worst"),
                [
                    (name, known, *summary([e for s, e in of_logs if is_of(s)]).cells())
                    for name, known, of_logs, is_of in (
                        ("prompt after 64 and 256", "one log", one, _is_prompt),
                        (
                            "token after 256",
                            "one log",
                            one,
                            lambda s: s.is_decoding and s.before == 256,
                        ),
                        ("token after 512", "one log", one, lambda s: s.before == 512),
                        ("token after 512", "two logs", two, lambda s: s.before == 512),
                    )
                ],
                first_figure=2,
            ),
        )
    )


if __name__ == "__main__":
    llama_cpp_page.run(
        __doc__,
        page="llama_cpp_time",
        title="Time of llama.cpp on a CPU",
        measure=measure,
        probe=probe,
        text=lambda: document(compared()),
    )
