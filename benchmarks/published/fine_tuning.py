"""Fine-tuning runs whose settings are whole: one table of columns, which many files share.

What a cell leaves empty is what `RunConfig` has; `notes` has the page's own words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from published.cells import Found, Line, MemoryQuantity, Quantity, Row, libraries_of, whole
from published.models import model_of
from whichlora import families
from whichlora.spec.run import RunConfig

_PLAIN = ("method", "precision", "optimizer", "attn", "trainer", "loss_head", "quant", "task")
_NO_RELEASE = "99"  # none of transformers so far
_OPTIONS: dict[str, Any] = {"true": True, "false": False}
# Answers of a task that a page asks for: BERT-large decides between two.
_LABELS = {"sequence-classification": (("num_labels", 2),)}


def stated_pairs(text: str) -> Iterator[tuple[str, Any]]:
    """Names and values of "name=value;name=value"."""
    for option in filter(None, text.split(";")):
        name, _, value = option.partition("=")
        yield name, _OPTIONS.get(value, value)


def fine_tuning(line: Line) -> Iterator[Found]:
    row = line.row
    if row.get("left_out"):
        yield line.left_out("run", row["left_out"])
        return
    if "activation_offloading" in row["notes"]:
        yield line.left_out("run", "activations offloaded to the host are not modelled")
        return
    spec = model_of(row["model_id"])
    assert spec is not None, row["model_id"]
    seq_len = whole(row["seq_len"])
    if row["source"].startswith("jenga") and spec.max_position_embeddings < seq_len:
        # `opt_base.py` repeats the table of learned positions
        longer = {"max_position_embeddings": seq_len}
        spec = families.build({**spec.config, **longer}, name=spec.name)
    if row["source"] == "universal_llm_trainer":  # its own cross entropy reads 16-bit logits
        spec = replace(spec, narrow_loss_before=_NO_RELEASE)
    run = RunConfig(model=spec.name, **_settings(row))
    if row["counter"]:
        (quantity,) = (each for each in get_args(MemoryQuantity) if each == row["counter"])
        yield from line.memory(spec, run, row["gpu"], quantity)
    if row["step_s"]:
        updates = row["source"] != "transformers_sdpa"
        timed: Quantity = "step_s" if updates else "forward_backward_s"
        yield line.observed(spec, run, row["gpu"], timed, float(row["step_s"]))


def _settings(row: Row) -> dict[str, Any]:
    settings: dict[str, Any] = {name: row[name] for name in _PLAIN if row[name]}
    if row["r"]:
        settings |= {"r": whole(row["r"]), "target_modules": tuple(row["targets"].split("+"))}
    if row["dropout"]:
        settings["lora_dropout"] = float(row["dropout"])
    if row.get("trainer_options"):
        settings["trainer_options"] = tuple(stated_pairs(row["trainer_options"]))
    settings |= dict(stated_pairs(row.get("settings", "")))
    return settings | {
        "task_options": _LABELS.get(row["task"], ()),
        "gradient_checkpointing": row["gradient_checkpointing"] != "False",
        "batch_size": whole(row["batch_size"]),
        "gradient_accumulation_steps": whole(row["grad_accum"]),
        "seq_len": whole(row["seq_len"]),
        "libraries": libraries_of(row["versions"]),
        "expandable_segments": "expandable_segments=True" in row["notes"],
    }
