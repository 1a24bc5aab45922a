"""Embeddings in sentence-transformers on CPU: traces, real steps, a train.py whose model embeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
oracle = pytest.importorskip("oracle_memory")

from sentence_transformers import SentenceTransformer
from train_runs import run_script
from written_job import train_script_of

from whichlora.spec.data_format import DataFormat
from whichlora.spec.run import RunConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import task_traces

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CACHED = (("loss", "CachedMultipleNegativesRankingLoss"), ("mini_batch_size", 2))
NEGATIVES = (("num_negatives", 2),)
CPU_RUNS = [
    (family, method, pooling, options)
    for family in ("bert", "llama", "gpt2")
    for method in ("full", "lora")
    for pooling, options in (
        ("mean", ()),
        ("cls", NEGATIVES),
        ("lasttoken", NEGATIVES),
        ("mean", CACHED),
        ("lasttoken", CACHED + NEGATIVES),
    )
]


@pytest.mark.parametrize("seed", [2000, 2001, 2002])
def test_the_ledger_has_the_bytes_that_the_library_s_code_makes(seed: int) -> None:
    line, _ = task_traces.draw(seed)
    runs = task_traces.RUNS
    assert runs.predicted(line) == pytest.approx(runs.traced(line), rel=0.02)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("family", "method", "pooling", "options"), CPU_RUNS)
def test_a_real_step_on_a_cpu_takes_the_predicted_bytes(
    family: str, method: str, pooling: str, options: tuple[tuple[str, Any], ...]
) -> None:
    one = oracle.case(
        family,
        task="embedding",
        method=method,
        batch_size=4,
        trainer="sentence-transformers",
        trainer_options=options,
        task_options=(("pooling_mode", pooling),),
    )
    assert oracle.predicted_peak(one) == pytest.approx(oracle.step_peak(one), rel=0.01)


BERT = {
    "model_type": "bert",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = {**BERT, "model_type": "llama", "num_key_value_heads": 2}
WORDS = ("river", "castle", "engine", "violin", "harbour", "pepper", "meadow", "comet")


@pytest.mark.parametrize(
    ("config", "method", "options", "pooling"),
    [(BERT, "lora", (), "mean"), (LLAMA, "full", CACHED, "lasttoken")],
    ids=["pairs", "cached"],
)
def test_train_py_trains_a_model_that_embeds(
    tmp_path: Path,
    config: dict[str, Any],
    method: str,
    options: tuple[tuple[str, Any], ...],
    pooling: str,
) -> None:
    run = RunConfig(
        model="tiny",
        task="embedding",
        method=method,
        trainer="sentence-transformers",
        trainer_options=(*options, ("num_negatives", 1)),
        task_options=(("pooling_mode", pooling),),
        seq_len=32,
        batch_size=4,
        precision="fp32",
        r=4,
    )
    path = tmp_path / "train.py"
    path.write_text(
        train_script_of(
            run,
            target_modules="all-linear",
            weights="random",
            model_config=config,
            epochs=12,
            learning_rate=1e-2,
            data_format=DataFormat(kind="anchors"),
        )
    )
    rows = [
        {"anchor": f"a {word}", "positive": f"the {word}", "negative": f"no {other}"}
        for word, other in zip(WORDS, WORDS[::-1], strict=True)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "output" / "result.json").read_text())
    states = sorted((tmp_path / "output").glob("checkpoint-*/trainer_state.json"))
    (first, *_) = json.loads(states[-1].read_text())["log_history"]
    assert result["final_loss"] < first["loss"]
    trained = SentenceTransformer(str(tmp_path / "output"), device="cpu")
    assert trained.encode(["a river", "the river"]).shape == (2, 32)
    assert trained[1].pooling_mode == pooling


def test_train_py_names_the_row_that_has_other_negatives(tmp_path: Path) -> None:
    run = RunConfig(model="tiny", task="embedding", trainer="sentence-transformers", method="full")
    path = tmp_path / "train.py"
    path.write_text(
        train_script_of(
            run,
            target_modules=[],
            weights="random",
            model_config=BERT,
            data_format=DataFormat(kind="anchors"),
        )
    )
    row = {"anchor": "a", "positive": "b", "negative": "c"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    done = run_script(path)
    assert done.returncode == 1
    assert "train.jsonl:1: ValueError: has 1 negatives, planned with 0" in done.stderr
