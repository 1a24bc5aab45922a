"""Which stage of a run is the largest, and what is said of it."""

import json

import pytest
from click.testing import CliRunner

from whichlora import life, to_frame
from whichlora.cli import main
from whichlora.errors import ConfigError

MODEL, GPU = "Qwen/Qwen2.5-7B", "rtx-4090-24gb"


def test_merging_in_16_bit_is_the_largest_stage_of_a_4_bit_run() -> None:
    lived = life(MODEL, GPU, method="qlora", seq_len=512)
    by_name = {stage.name: stage for stage in lived.stages}
    assert lived.largest.name == "merging"
    assert lived.largest.device_used_bytes > by_name["training"].device_used_bytes
    without = life(MODEL, GPU, method="qlora", seq_len=512, merge_on="none")
    assert without.largest.name == "training"


def test_a_run_that_trains_fits_only_where_all_its_stages_do() -> None:
    settings = {"method": "qlora", "seq_len": 512, "batch_size": 2}
    assert life(MODEL, "l4-24gb", **settings, merge_on="none").verdict == "fits"
    lived = life(MODEL, "l4-24gb", **settings, eval_rows=64, merge_on="none")
    assert (lived.verdict, lived.largest.name) == ("fails", "evaluating")
    moved = life(
        MODEL, "l4-24gb", **settings, eval_rows=64, eval_accumulation_steps=1, merge_on="none"
    )
    assert moved.verdict == "fits"
    assert moved.largest_on_host.name == "evaluating"


def test_each_stage_that_is_less_sure_than_training_is_named() -> None:
    settings = {"method": "qlora", "seq_len": 512, "batch_size": 2}
    assert life(MODEL, GPU, **settings).faults() == []
    (fault,) = life(MODEL, "rtx-4080-16gb", **settings).faults()
    assert fault.startswith("merging needs")
    assert fault.endswith("; merge on the CPU instead")


def test_training_is_what_estimate_says() -> None:
    from whichlora import estimate

    (prediction,) = estimate(MODEL, GPU, method="lora", r=8, seq_len=256)
    training = next(s for s in life(MODEL, GPU, method="lora", r=8, seq_len=256).stages[2:3])
    assert training.name == "training"
    assert training.device_used_bytes == prediction.memory.device_used_bytes
    assert training.interval_bytes == prediction.memory.interval_bytes


def test_lines_add_up_to_their_stage() -> None:
    lived = life(MODEL, GPU, method="dora", seq_len=256, eval_rows=4)
    for stage in lived.stages:
        sums = dict.fromkeys(("gpu", "host", "disk"), 0)
        for held in stage.lines:
            sums[held.place] += held.line.num_bytes
        assert sums == {
            "gpu": stage.gpu_bytes,
            "host": stage.host_bytes,
            "disk": stage.disk_bytes,
        }
    frame = to_frame(lived)
    assert frame["num_bytes"].sum() == sum(
        stage.gpu_bytes + stage.host_bytes + stage.disk_bytes for stage in lived.stages
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"phase": "inference"}, "life: is that of a fine-tuning"),
        ({"trainer": "loop"}, "life: trainer loop neither saves nor evaluates"),
        ({"gpus": 2}, "life: is known of one GPU"),
        ({"eval_accumulation_steps": 2}, "give eval_rows, too"),
    ],
)
def test_what_has_no_known_life_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        life(MODEL, GPU, **settings)  # type: ignore[arg-type]


def test_settings_of_the_stages_need_them() -> None:
    refused = CliRunner().invoke(main, ["explain", MODEL, "--gpu", GPU, "--eval-rows", "8"])
    assert "need --life" in str(refused.output) + str(refused.exception)


def test_the_command_prints_the_stages_and_says_which_decides() -> None:
    asked = ["explain", MODEL, "--gpu", GPU, "--method", "qlora", "--life"]
    printed = CliRunner().invoke(main, asked).output
    assert "in merging" in printed.replace("\n", " ")
    assert "merging is the largest stage on the GPU" in " ".join(printed.split())
    answer = json.loads(CliRunner().invoke(main, [*asked, "--json"]).output)["life"]
    assert answer["largest_stage"] == "merging"
    assert {"gpu", "host", "disk"} == {
        line["place"] for stage in answer["stages"] for line in stage["lines"]
    }
    markdown = CliRunner().invoke(main, [*asked, "--markdown"]).output
    assert "| merging * |" in markdown
