"""Trace drawn runs of every task on twelve architectures, and compare them with the ledger.

`python benchmarks/task_traces.py` prints the errors of the peak by task; `--write` writes
docs/accuracy/tasks.md. `--draw 50` traces as many runs anew, each in the real classes of
transformers on fake tensors. A drawn run that is refused is drawn again.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import trainer_traces
from trace_records import DrawnRuns, first_accepted

from whichlora.spec.run import RunConfig
from whichlora.tasks import get_task

MODELS = (
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-large",
    "microsoft/deberta-v3-base",
    "answerdotai/ModernBERT-base",
    "microsoft/mpnet-base",
    "distilbert/distilbert-base-uncased",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen3-0.6B",
    "google/gemma-2-2b",
    "openai-community/gpt2",
    "mistralai/Mistral-7B-v0.3",
)
TASKS = ("sequence-classification", "token-classification", "question-answering", "reranking")
EMBEDDINGS = 1000  # first seed of embeddings, so that the others draw what they drew
CACHED = ("loss", "CachedMultipleNegativesRankingLoss")


def draw(seed: int) -> tuple[dict[str, Any], int]:
    """A run, and how many drawn before it were refused."""
    rng = random.Random(f"tasks {seed}")
    embeds = seed >= EMBEDDINGS
    task = get_task("embedding" if embeds else TASKS[seed % len(TASKS)])  # as many of each

    def propose() -> dict[str, Any]:
        options: dict[str, Any] = {}
        if any(option.name == "num_labels" for option in task.options):
            options["num_labels"] = rng.choice((2, 3, 17, 1000))
        method = rng.choice(("full", "full", "lora", "lora", "qlora", "dora"))
        run = RunConfig(
            model=rng.choice(MODELS),
            task=task.name,
            task_options=tuple(sorted(options.items())),
            trainer=rng.choice(task.trainers[:2]),
            method=method,
            r=rng.choice((8, 16, 64)),
            lora_dropout=rng.choice((0.0, 0.0, 0.05)),
            batch_size=rng.choice((2, 4, 8, 16)),
            seq_len=rng.choice((64, 128, 256, 512)),
            precision=rng.choice(("bf16", "bf16", "bf16-pure", "fp32")),
            base_dtype="auto",
            gradient_checkpointing=rng.choice((None, False, False)),
            gradient_accumulation_steps=rng.choice((1, 1, 2)),
        )
        if embeds:
            run = _embedding(run, rng)
        return {"layers": rng.choice((2, 3, 4)), "run": run.chosen()}

    return first_accepted(propose, trainer_traces.predicted)


def _embedding(run: RunConfig, rng: random.Random) -> RunConfig:
    """`run` with settings of embeddings in place of labels'."""
    loss = rng.choice(((), (CACHED, ("mini_batch_size", rng.choice((2, 4, 8))))))
    negatives = rng.choice(((), (("num_negatives", 1),), (("num_negatives", 3),)))
    return replace(
        run,
        trainer="sentence-transformers",
        task_options=(("pooling_mode", rng.choice(("mean", "cls", "lasttoken"))),),
        trainer_options=(*loss, *negatives),
        model=rng.choice(MODELS),
    )


TEXT = (
    "# Peak memory of tasks, against traces\n\n"
    "Made by `benchmarks/task_traces.py --write`. Runs are drawn with a seed: task, its "
    "settings, model, method, trainer, rank, batch, length, precision, dropout, "
    "checkpointing, accumulation. The real classes run on fake tensors, in two to four layers "
    "of the model's real width; the ledger predicts the peak of live bytes. Formulas were "
    "finished on seeds below 200; the others were drawn after. Seeds from "
    f"{EMBEDDINGS} on are of embeddings, in sentence-transformers 6.2: pooling, loss, mini-batches "
    "and negatives are drawn, too. Their formulas were finished on seeds below 1100."
)
RUNS = DrawnRuns(
    records=Path(__file__).parent / "traces" / "tasks.jsonl",
    page=Path(__file__).parents[1] / "docs" / "accuracy" / "tasks.md",
    kind="task",
    text=TEXT,
    draw=draw,
    predicted=trainer_traces.predicted,
    traced=trainer_traces.traced,
)

if __name__ == "__main__":
    RUNS.main(__doc__)
