"""What is printed of a run on several GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whichlora.api import estimate, explain
from whichlora.spec.results import Communication, MessagePrediction, RankPrediction, SeveralGpus
from whichlora.terminal.estimate import print_predictions
from whichlora.terminal.explained import print_explanation
from whichlora.terminal.several_gpus import kinds_sheet, messages_sheet, spread_lines
from whichlora.units import GiB

MODEL = "meta-llama/Llama-3.2-1B"


def rank(name: str, ranks: tuple[int, ...], size: int) -> RankPrediction:
    return RankPrediction(
        name=name,
        ranks=ranks,
        moment="loss_backward",
        peak_allocated_bytes=size,
        breakdown={"weights": size},
        host_bytes=0,
    )


def test_the_table_names_gpus_and_strategy_where_a_run_has_several(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_predictions(estimate(MODEL, "l4", gpus=[1, 4], parallel="ddp", seq_len=64))
    printed = capsys.readouterr().out
    assert "GPUs   strategy" in printed
    rows = [line.split("r=16")[1].split() for line in printed.splitlines() if "r=16" in line]
    assert [row[:2] for row in rows] == [["1", "ddp"], ["4", "ddp"]]
    print_predictions(estimate(MODEL, "l4", seq_len=64))
    assert "strategy" not in capsys.readouterr().out


def test_messages_that_differ_in_their_tensor_alone_have_one_row() -> None:
    settings: dict[str, Any] = {"gpus": 8, "parallel": "fsdp", "method": "qlora"}
    (prediction,) = estimate("meta-llama/Llama-3.1-8B", "h100", fsdp_version="1", **settings)
    several = prediction.several_gpus
    assert several is not None
    messages = several.communication.messages
    rows = messages_sheet(messages).rows
    assert len(rows) == len({(*row[:3], row[4], row[6]) for row in rows}) < len(messages)
    assert sum(int(row[3]) for row in rows) == sum(message.count for message in messages)


def test_options_that_differ_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    views = {"gradient_as_bucket_view": [True, False]}
    print_predictions(estimate(MODEL, "l4", gpus=4, parallel="ddp", seq_len=64, **views))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "gradient as bucket view yes" in printed
    assert "gradient as bucket view no" in printed


def test_below_one_answer_stand_the_global_batch_and_what_is_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"batch_size": 2, "gradient_accumulation_steps": 3}
    print_predictions(estimate(MODEL, "l4", gpus=4, parallel="ddp", seq_len=64, **settings))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    batch = "global batch of an optimizer step: 24 (batch size 2 x 3 accumulation steps x 4"
    assert batch in printed
    assert "all-reduce" in printed
    assert "all 4 GPUs hold the same amounts" in printed


def test_zero_on_one_gpu_sends_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(
        f"model_name_or_path: {MODEL}\nstage: sft\nfinetuning_type: full\ncutoff_len: 64\n"
        "deepspeed: ds_z3_config.json\ntemplate: llama3\n"
    )
    print_predictions(estimate(from_file=tmp_path / "full.yaml", gpu="h100", gpus=1))
    printed = capsys.readouterr().out
    assert "zero3" in printed
    assert "all-gather" not in printed
    assert "all 1 GPUs" not in printed


def test_numbers_of_gpus_are_compared_below_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"gpus": [1, 2, 4], "parallel": "ddp", "global_batch_size": 8, "seq_len": 64}
    print_predictions(estimate(MODEL, "l4", **asked))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if line.startswith("fewest GPUs")]
    assert line.startswith("fewest GPUs: 1 (ddp); fastest: 4 (ddp), ")
    assert "; least GPU time: 1 (ddp), " in line
    print_predictions(estimate(MODEL, "8GB", seq_len=4096, batch_size=8, gpus=[1, 2]))
    assert "surely fits with none of these numbers of GPUs" in capsys.readouterr().out
    print_predictions(estimate(MODEL, "l4", seq_len=64, gpus=2))
    assert "fewest" not in capsys.readouterr().out


def test_a_grid_leaves_out_the_notes_on_each_choice(capsys: pytest.CaptureFixture[str]) -> None:
    print_predictions(estimate(MODEL, "l4", seq_len=64, gpus=2))
    assert "note: parallel auto on 2 GPUs: " in capsys.readouterr().out
    print_predictions(estimate(MODEL, "l4", seq_len=[64, 128], gpus=2))
    assert "parallel auto" not in capsys.readouterr().out


def test_each_kind_of_rank_has_a_column_and_many_kinds_are_cut() -> None:
    two = [rank("first stage", (0,), GiB), rank("last stage", (1, 2, 3), 2 * GiB)]
    sheet = kinds_sheet(two)
    assert sheet.columns == ("part", "first stage", "last stage")
    assert ("ranks", "0", "1-3") in sheet.rows
    assert ("device memory used", "1.00 GiB", "2.00 GiB") in sheet.rows
    many = kinds_sheet([rank(f"stage {i}", (i,), (9 - i) * GiB) for i in range(8)])
    assert many.columns == ("part", *(f"stage {i}" for i in range(6)))
    assert many.title == "each kind of rank, but 2 that need less"


def test_pinned_memory_and_waiting_are_sentences() -> None:
    (prediction,) = estimate(MODEL, "l4", gpus=4, parallel="ddp", seq_len=64)
    assert prediction.several_gpus is not None
    communication = Communication(num_bytes=GiB, exposed_s=0.5, overlapped_s=0.25, messages=())
    several: SeveralGpus = replace(
        prediction.several_gpus, host_bytes=3 * GiB, communication=communication
    )
    lines = list(spread_lines(prediction, several))
    unknown = "whose memory is not known; --host-memory states it"
    assert f"host memory: 3.00 GiB pinned on the machine, {unknown}" in lines
    known = replace(several, host_memory_bytes=2 * GiB)
    has = "host memory: 3.00 GiB pinned on the machine, which has 2.00 GiB"
    assert has in list(spread_lines(prediction, known))
    assert any("the step waits 500 ms for it, 250 ms overlap" in line for line in lines)


def test_an_explanation_names_what_more_gpus_do_not_shrink(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_explanation(explain(MODEL, "l4", gpus=4, parallel="ddp", seq_len=512))
    printed = capsys.readouterr().out
    assert "more GPUs do not shrink" in printed
    sentence = printed.split("more GPUs do not shrink")[1].splitlines()
    assert "weights of the layers" in sentence[0]
    assert sentence[1].startswith("what would: ")
    print_explanation(explain(MODEL, "l4", seq_len=512))
    assert "more GPUs" not in capsys.readouterr().out


def test_messages_that_differ_in_bytes_alone_share_a_row() -> None:
    def message(what: str, num_bytes: int) -> MessagePrediction:
        return MessagePrediction(
            what=what,
            collective="all_gather",
            num_bytes=num_bytes,
            count=3,
            size=2,
            hidden_by="forward",
            seconds=0.5,
        )

    sizes = [("adapter", 2048), ("layer", 4096), ("adapter", 1024), ("adapter", 1024)]
    adapter, layer = messages_sheet([message(*each) for each in sizes]).rows
    assert adapter[:6] == ("adapter", "all-gather", "2", "9", "1.00 KiB to 2.00 KiB", "1.5 s")
    assert layer[3:6] == ("3", "4.00 KiB", "500 ms")
