"""What people read: tables, reasons, and the files that an answer leaves."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from candidates import SERVE, USABLE_BYTES, measurement, plan, prediction

from whichlora.errors import DataFileError
from whichlora.predict.repeated_times import Repeatability
from whichlora.predict.words import describe
from whichlora.search.feasibility import Candidate, Check, Quantity, judge
from whichlora.spec.plan import Limits
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.terminal import (
    MAX_REASONS,
    Progress,
    comparison_rows,
    comparison_summary,
    deciding,
    explanation,
    print_answer,
    reason,
    write_candidates,
    write_comparison,
    write_summary,
)
from whichlora.units import GiB
from whichlora.workflow.answer import Answer, Compared, Search

TRAIN = RunConfig(model="org/good", batch_size=4, seq_len=100)


def candidate(
    run: RunConfig, *, size: int = 5, used: float = 8 * GiB, measure: bool = True
) -> Candidate:
    total = Quantity(value=90.0, low=60.0, high=135.0, measured=False)
    if measure:
        total = Quantity(value=80.0, low=80.0, high=80.0, measured=True)
    return judge(
        prediction(run, num_params=size * 10**9, used_bytes=used),
        Limits(total_time_s=120.0, time_per_token_s=1.0),
        total_s=total if run.phase == "finetune" else None,
        measurement=measurement(run, used_bytes=used) if measure else None,
    )


def answer(*finetune: Candidate, winner: Candidate | None, passed: tuple[str, ...] = ()) -> Answer:
    models = tuple(dict.fromkeys(c.run.model for c in finetune))
    return Answer(
        plan=plan(TRAIN, models),
        gpu=find_gpu("h100-sxm-80gb"),
        basis="made up",
        inference=[candidate(replace(SERVE, model=model)) for model in models],
        finetune=finetune,
        kept=passed or models,
        winner=winner,
        front=[c for c in finetune if c is winner],
        search=Search(
            confidence=0.97, stopped_by="certain", runs=3, device_s=42.0, chance_to_win={}
        ),
        compared=(),
        tokens="12 sequences",
    )


# --- words


def test_a_candidate_has_a_name_that_tells_it_from_the_others() -> None:
    assert describe(TRAIN) == "good lora r=16, batch 4, 100 tokens"
    assert describe(replace(TRAIN, method="full")) == "good full, batch 4, 100 tokens"
    assert describe(SERVE) == ("good inference, merged 16-bit, batch 1, prompt 16, 8 new tokens")


def test_a_reason_has_the_value_the_limit_and_where_the_value_is_from() -> None:
    measured, predicted = candidate(TRAIN), candidate(TRAIN, used=USABLE_BYTES, measure=False)
    assert reason(measured.checks[0]) == (
        "measured 8.00 GiB against memory of the device 20.00 GiB"
    )
    assert reason(predicted.checks[0]) == (
        "predicted 20.00 GiB against memory of the device 20.00 GiB (50% chance to meet it)"
    )
    assert reason(measured.checks[1]) == "measured 80 s against total time limit 2 min 00 s"


def test_the_limit_least_likely_to_be_met_decides() -> None:
    tight = candidate(TRAIN, used=30 * GiB, measure=False)
    assert deciding(tight).startswith("predicted 30.00 GiB against memory of the device")
    assert deciding(candidate(TRAIN)) == ""


def test_a_failed_profile_is_its_own_reason() -> None:
    failed = measurement(TRAIN, outcome="oom", detail="tried to allocate 2 GiB")
    judged = judge(prediction(TRAIN), Limits(), measurement=failed)
    assert deciding(judged) == "oom: tried to allocate 2 GiB"


# --- the explanation


def test_the_explanation_names_the_winner_and_why_better_ones_fell() -> None:
    best = candidate(TRAIN)
    large = candidate(replace(TRAIN, model="org/large"), size=9, used=40 * GiB, measure=False)
    small = candidate(replace(TRAIN, model="org/small"), size=1)
    lines = explanation(answer(best, large, small, winner=best))
    assert lines[0] == ("Winner: org/good (5B parameters), lora r=16, batch size 4 (measured).")
    assert "  measured 80 s against total time limit 2 min 00 s" in lines
    (fell,) = [line for line in lines if "left out" in line]
    assert fell.startswith("large lora r=16, batch 4, 100 tokens left out: predicted 40.00 GiB")


def test_of_what_ranks_better_each_variant_has_one_line_of_its_nearest() -> None:
    best = candidate(TRAIN)
    runs = [replace(TRAIN, model="org/large", batch_size=size) for size in (8, 4, 2)]
    sizes = (60, 50, 40)
    large = [
        candidate(run, size=9, used=size * GiB, measure=False)
        for run, size in zip(runs, sizes, strict=True)
    ]
    fell = [line for line in explanation(answer(best, *large, winner=best)) if "left out" in line]
    assert fell == [
        "large lora r=16, batch 2, 100 tokens left out: predicted 40.00 GiB against memory of the "
        "device 20.00 GiB (0% chance to meet it)"
    ]


def test_a_variant_that_meets_the_limits_in_another_layout_is_not_left_out() -> None:
    """It ranks behind, where its fastest layout, which does not fit, would rank before."""
    run = replace(TRAIN, method="dora")
    fits = candidate(run, used=9 * GiB, measure=False)
    ahead = candidate(replace(run, batch_size=8), used=40 * GiB, measure=False)
    best = candidate(TRAIN)
    fast = Quantity(value=50.0, low=40.0, high=60.0, measured=False)
    lines = explanation(answer(best, fits, replace(ahead, total_s=fast), winner=best))
    assert not any("left out" in line for line in lines)
    told = "dora r=16, batch 4, 100 tokens meets every limit, but ranks behind the winner: "
    assert f"good {told}90 s, 9.00 GiB" in lines


def test_a_model_that_fell_in_stage_one_says_so() -> None:
    best, slow = candidate(TRAIN), candidate(replace(TRAIN, model="org/slow"), size=4)
    lines = explanation(answer(best, slow, winner=best, passed=("org/good",)))
    assert any(line.startswith("org/slow left out in stage 1") for line in lines)


def test_without_a_winner_the_closest_one_says_what_it_lacks() -> None:
    near = candidate(TRAIN, used=21 * GiB, measure=False)
    far = candidate(replace(TRAIN, model="org/large"), size=9, used=90 * GiB, measure=False)
    lines = explanation(answer(near, far, winner=None))
    assert lines[:3] == [
        "Nothing meets every limit.",
        "  97% sure that nothing meets every limit; as sure as asked, after 3 runs and 42 s "
        "on the device",
        "Closest: good lora r=16, batch 4, 100 tokens.",
    ]
    assert lines[3].startswith("  it would need memory of the device of at least 23.1")
    assert lines[3].endswith(" is predicted")


def test_no_limit_is_told_to_be_zero() -> None:
    near = candidate(TRAIN, used=21 * GiB, measure=False)
    none = Quantity(value=0, low=0, high=0, measured=False, confidence=0.9)
    check = Check(
        limit="concurrency", unit="sequences", quantity=none, bound=8, chance=0.0, is_least=True
    )
    lines = explanation(answer(replace(near, checks=(*near.checks, check)), winner=None))
    assert any("would need" in line for line in lines)
    assert not any("would need concurrency" in line for line in lines)


def test_without_a_winner_each_limit_says_how_far_it_alone_must_give_way() -> None:
    large = candidate(TRAIN, used=25 * GiB, measure=False)
    larger = candidate(replace(TRAIN, batch_size=8), used=30 * GiB, measure=False)
    lines = explanation(answer(large, larger, winner=None))
    assert (
        "Alone, memory of the device 25.00 GiB instead of 20.00 GiB (+25%) would do for "
        "good lora r=16, batch 4, 100 tokens (predicted)." in lines
    )


def test_the_winner_says_how_sure_it_is_and_what_was_preferred() -> None:
    best = candidate(TRAIN)
    lines = explanation(answer(best, winner=best))
    assert lines[1] == (
        "  97% sure that no other candidate beats it; as sure as asked, after 3 runs and 42 s "
        "on the device"
    )
    assert "size alone is not quality" in lines[2]


def test_the_winner_says_what_its_profile_knows_and_what_more_batches_cost() -> None:
    best = candidate(TRAIN)
    of = Repeatability(
        run_deviation=0.031,
        num_repeated=4,
        num_batches=10,
        known_to=0.029,
        more_batches=11,
        more_s=22.0,
    )
    lines = explanation(replace(answer(best, winner=best), repeatability=of))
    assert lines[2] == (
        "  its 10 batches tell the mean time to 2.9%; 11 more, about 22 s, would to 2% "
        "(num_batches: 21); a repeated run differs by 3.1% (4 runs repeated)"
    )
    known = replace(of, num_repeated=0, num_batches=4, known_to=0.016, more_batches=0, more_s=0.0)
    lines = explanation(replace(answer(best, winner=best), repeatability=known))
    assert lines[2] == (
        "  its 4 batches tell the mean time to 1.6%; a repeated run differs by 3.1% "
        "(assumed, none repeated)"
    )


def test_what_posterior_samples_cannot_tell_from_certainty_is_not_called_certain() -> None:
    best = candidate(TRAIN)
    nearly_sure = answer(best, winner=best)
    sure = replace(nearly_sure, search=replace(nearly_sure.search, confidence=1.0))
    assert explanation(sure)[1].startswith("  over 99% sure that no other candidate")


def test_a_better_ranked_candidate_that_was_not_worth_a_run_says_so() -> None:
    best = candidate(TRAIN)
    larger = judge(prediction(replace(TRAIN, model="org/large"), num_params=9 * 10**9), Limits())
    (line,) = [line for line in explanation(answer(best, larger, winner=best)) if "out" in line]
    assert line.endswith("left out: not measured, 0% chance to beat the winner")


def test_a_long_list_of_reasons_is_cut_with_its_count() -> None:
    fallen = [
        candidate(replace(TRAIN, model=f"org/m{i}"), size=9, used=90 * GiB, measure=False)
        for i in range(MAX_REASONS + 3)
    ]
    lines = explanation(answer(*fallen, winner=None))
    assert lines[-1] == "… and better-ranked ones of 3 more variants, see the table"


# --- files


def test_the_table_has_a_row_for_every_candidate_of_both_stages(tmp_path: Path) -> None:
    best = candidate(TRAIN)
    large = candidate(replace(TRAIN, model="org/large"), size=9, used=40 * GiB, measure=False)
    path = write_candidates(tmp_path / "deep" / "table.csv", answer(best, large, winner=best))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["model"], row["phase"], row["source"], row["verdict"]) for row in rows] == [
        ("org/good", "inference", "measured", "meets"),
        ("org/large", "inference", "measured", "meets"),
        ("org/good", "finetune", "measured", "meets"),
        ("org/large", "finetune", "predicted", "misses"),
    ]
    assert rows[2]["peak_bytes"] == str(8 * GiB)
    assert float(rows[2]["total_time_s"]) == 80.0
    assert rows[0]["method"] == rows[0]["total_time_s"] == ""


def test_the_comparison_has_a_row_for_every_measured_quantity(tmp_path: Path) -> None:
    cold = prediction(TRAIN, used_bytes=6 * GiB, time_s=0.05)
    warm = prediction(TRAIN, used_bytes=8 * GiB, time_s=0.1)
    compared = Compared(measurement=measurement(TRAIN), cold=cold, before=cold, after=warm)
    rows = comparison_rows([compared])
    assert [(row["quantity"], row["unit"]) for row in rows] == [
        ("peak_allocated", "bytes"),
        ("step", "s"),
    ]
    assert [row["cold_error"] for row in rows] == pytest.approx([-0.25, -0.5])
    assert [row["after_error"] for row in rows] == pytest.approx([0.0, 0.0])
    summary = comparison_summary(rows)
    assert [(entry["quantity"], entry["cold_worst"]) for entry in summary] == [
        ("peak_allocated", pytest.approx(0.25)),
        ("step", pytest.approx(0.5)),
    ]
    best = candidate(TRAIN)
    compared_answer = replace(answer(best, winner=best), compared=(compared,))
    text = write_comparison(tmp_path / "compared.csv", compared_answer).read_text()
    assert text.count("\n") == 3


def test_a_run_that_failed_is_compared_with_nothing() -> None:
    failed = measurement(TRAIN, outcome="timeout")
    guess = prediction(TRAIN)
    assert (
        comparison_rows([Compared(measurement=failed, cold=guess, before=guess, after=guess)]) == []
    )


def test_the_summary_is_the_explanation_in_markdown(tmp_path: Path) -> None:
    best = candidate(TRAIN)
    winning = answer(best, winner=best)
    text = write_summary(tmp_path / "answer.md", winning).read_text()
    assert text.startswith("# WhichLoRA on h100-sxm-80gb\n")
    assert all(line in text for line in explanation(winning))
    assert "Basis: made up." in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    best = candidate(TRAIN)
    with pytest.raises(DataFileError, match=r"file/answer.md: can't be written"):
        write_summary(tmp_path / "file" / "answer.md", answer(best, winner=best))


# --- the terminal


def test_the_answer_prints_both_stages_and_marks_the_winner(
    capsys: pytest.CaptureFixture[str],
) -> None:
    best = candidate(TRAIN)
    large = candidate(replace(TRAIN, model="org/large"), size=9, used=40 * GiB, measure=False)
    print_answer(answer(best, large, winner=best))
    text = capsys.readouterr().out
    assert "stage 1: inference" in text
    assert "stage 2: fine-tuning" in text
    assert text.count("WINNER") == 1
    assert "basis: made up" in text


def test_what_holds_for_every_candidate_or_for_the_winner_is_noted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def noted(c: Candidate, *notes: str) -> Candidate:
        return replace(c, prediction=replace(c.prediction, notes=notes))

    best = noted(candidate(TRAIN), "slow units", "about the winner")
    large_run = replace(TRAIN, model="org/large")
    large = noted(candidate(large_run, size=9, used=40 * GiB), "slow units", "about another")
    print_answer(answer(best, large, winner=best))
    lines = capsys.readouterr().out.splitlines()
    assert [c for c in lines if c.startswith("note: ")] == [
        "note: slow units",
        "note: about the winner",
    ]


def test_progress_goes_to_stderr_and_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (False, True):
        with Progress(quiet=quiet) as progress:
            progress.say("stage 1")
            progress.profiling(TRAIN, number=1, open_candidates=3)
            progress.learned(measurement(TRAIN), prediction(TRAIN))
            progress.learned(measurement(TRAIN, outcome="oom"), prediction(TRAIN))
        shown = capsys.readouterr()
        assert shown.out == ""
        assert (shown.err == "") == quiet
        if not quiet:
            assert "profile 1: good lora r=16, batch 4, 100 tokens (3 candidates open)" in shown.err
            assert "peak 8.00 GiB (predicted +0%), step 100 ms (predicted +0%)" in shown.err


def test_progress_says_how_long_the_open_candidates_would_take_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress() as progress:
        progress.profiling(TRAIN, number=1, open_candidates=9)
        for seconds in (10.0, 20.0):
            progress.learned(replace(measurement(TRAIN), device_s=seconds), prediction(TRAIN))
        progress.profiling(TRAIN, number=3, open_candidates=4)
    shown = capsys.readouterr().err
    assert "(9 candidates open)" in shown
    assert "(4 candidates open, at most 60 s left)" in shown
