"""The Python interface: what an import costs, what it returns, and the notebook that shows it."""

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import whichlora
from whichlora import calibrate, estimate, explain, recommend, to_frame, where
from whichlora.api import RunSettings
from whichlora.errors import ConfigError
from whichlora.spec.run import RunConfig
from whichlora.workflow.guide import make_guide

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOK = json.loads((EXAMPLES / "tour.ipynb").read_text(encoding="utf-8"))
MODEL = "HuggingFaceTB/SmolLM2-135M"
PLAN = {
    "stage1_profile": {"model_names": [MODEL], "prefill_length": 16, "tokens_to_generate": 8},
    "stage2_profile": {"batch_size": [1, 2]},
    "dataset": {"samples": 100, "tokens": 6000},
    "sequence_length": 64,
    "gpu": "l4-24gb",
    "weights": "random",
    "profile": "none",
}


def test_importing_the_package_loads_nothing_but_itself() -> None:
    code = "import whichlora, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert [name for name in loaded if name.startswith("whichlora.")] == []
    assert not {"numpy", "pandas", "torch"} & set(loaded)


CALLS = (
    f"estimate({MODEL!r}, 'a100-sxm-80gb')",
    f"estimate({MODEL!r}, 'rtx-4090-24gb', phase='inference')",
    f"explain({MODEL!r}, 'a100-sxm-80gb')",
    f"where({MODEL!r}, ['l4', 't4'], method='qlora')",
)


def test_a_single_run_is_predicted_without_numpy() -> None:
    lines = ["import whichlora"]
    for call in CALLS:
        lines += [f"assert whichlora.{call}", *no_numpy_after(call)]
    commands = [[name, MODEL, "--gpu", "a100-sxm-80gb"] for name in ("estimate", "explain")]
    lines.append("from whichlora.cli import main")
    for command in (*commands, ["where", MODEL, "--gpu", "l4,t4"]):
        lines += [f"main({command!r}, standalone_mode=False)", *no_numpy_after(" ".join(command))]
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def no_numpy_after(call: str) -> list[str]:
    return ["import sys", f"assert 'numpy' not in sys.modules, {call!r}"]


def test_every_public_name_is_there_and_no_other() -> None:
    assert dir(whichlora) == sorted(whichlora.__all__)
    assert all(getattr(whichlora, name) for name in whichlora.__all__)
    with pytest.raises(AttributeError, match="no attribute 'predict_everything'"):
        whichlora.predict_everything  # noqa: B018


def test_lists_make_a_grid_and_single_values_one_prediction() -> None:
    (one,) = estimate(MODEL, "l4-24gb", seq_len=128, target_modules=("q_proj", "v_proj"))
    assert one.run.target_modules == ("q_proj", "v_proj")
    many = estimate([MODEL, "EleutherAI/pythia-160m"], ["l4-24gb", "t4-16gb"], r=[8, 16])
    assert len(many) == 8


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"batchsize: is not a setting; did you mean batch_size; accepted are phase, .*, "
        "gradient_as_bucket_view",
    ):
        estimate(MODEL, "l4-24gb", batchsize=4)  # type: ignore[call-arg]


def test_settings_that_contradict_their_method_are_refused() -> None:
    told = "quant: none, but method qlora has its base in nf4-dq"
    with pytest.raises(whichlora.ConfigError, match=told):
        estimate(MODEL, "l4-24gb", method="qlora", quant="none")
    with pytest.raises(ConfigError, match="r: method full has no rank"):
        estimate(MODEL, "l4-24gb", method="full", r=8)
    assert len(estimate(MODEL, "l4-24gb", method=["full", "lora"], r=8)) == 2


def test_lengths_and_targets_are_typed_as_they_are_accepted() -> None:
    (one,) = estimate(MODEL, "l4-24gb", seq_len="1k", target_modules=["q_proj"])
    assert (one.run.seq_len, one.run.target_modules) == (1024, ("q_proj",))
    assert isinstance(one.run, whichlora.RunConfig)


def test_gpus_are_types_by_name_or_list_everywhere() -> None:
    for gpu in ("l4-24gb", ["l4-24gb"], ("l4", "l4-24gb")):
        (prediction,) = estimate(MODEL, gpu=gpu, seq_len=64)
        assert prediction.gpu == "l4-24gb"
        (placement,) = where(MODEL, gpu=gpu, seq_len=64)
        assert placement.prediction == prediction
    assert explain(MODEL, gpu=["l4-24gb"], seq_len=64).prediction == prediction
    with pytest.raises(ConfigError, match="explain takes one type, got l4, t4; estimate and where"):
        explain(MODEL, gpu=["l4", "t4"])
    with pytest.raises(ConfigError, match="unknown GPU 'nosuch'"):
        calibrate(gpu=["l4", "nosuch"])
    with pytest.raises(ConfigError, match="gpu: is an empty list"):
        where(MODEL, gpu=[])


def test_the_older_gpus_of_estimate_warns_once_with_the_new_spelling() -> None:
    with pytest.warns(FutureWarning, match=r"write gpu=\['l4', 't4'\] for") as warned:
        older = estimate(MODEL, gpus=["l4", "t4"], seq_len=64)
    assert older == estimate(MODEL, ["l4", "t4"], seq_len=64)
    assert [warning.filename for warning in warned] == [__file__]
    with pytest.raises(ConfigError, match="give gpu= alone"):
        estimate(MODEL, "l4", gpus="t4")


def test_gpus_is_how_many() -> None:
    one, several = estimate(MODEL, "l4", gpus=[1, 4], parallel="ddp", seq_len=64)
    assert (one.run.parallel.gpus, several.run.parallel.gpus) == (1, 4)
    assert estimate(MODEL, "l4", gpus="4", parallel="ddp", seq_len=64) == [several]
    assert explain(MODEL, "l4", gpus=4, parallel="ddp", seq_len=64).prediction == several
    (placement,) = where(MODEL, "l4", gpus=4, parallel="ddp", seq_len=64)
    assert placement.prediction == several


def test_the_options_of_strategies_are_settings() -> None:
    settings: Any = {"gradient_as_bucket_view": [False, True], "parallel": "ddp"}
    plain, views = estimate(MODEL, "l4", gpus=4, method="full", seq_len=64, **settings)
    assert views.memory.peak_allocated_bytes < plain.memory.peak_allocated_bytes
    assert dict(views.run.parallel.options) == {"gradient_as_bucket_view": True}


def test_a_global_batch_sets_the_micro_steps_of_each_number_of_gpus() -> None:
    runs = [
        prediction.run
        for prediction in estimate(
            MODEL,
            "l4",
            gpus=[1, 2, 4],
            parallel="auto",
            batch_size=2,
            global_batch_size=16,
            seq_len=64,
            gradient_as_bucket_view=False,  # type: ignore[call-arg]
        )
    ]
    assert [run.gradient_accumulation_steps for run in runs] == [8, 4, 2]
    assert [run.parallel.strategy for run in runs] == ["none", "ddp", "ddp"]
    assert "global_batch_size" not in runs[1].to_dict()["parallel"]


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (["l4", 2], "^gpus: l4, 2: is the number of GPUs; gpu= takes types"),
        (0, "^gpus: must be 1 to 100000, got 0"),
        (2.5, "^gpus: 2.5 is not a whole number"),
        (True, "^gpus: True is not a whole number"),
    ],
)
def test_what_is_no_number_of_gpus_is_refused(gpus: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(MODEL, "l4", gpus=gpus)
    with pytest.raises(ConfigError, match=message):
        explain(MODEL, "l4", gpus=gpus)


@pytest.mark.parametrize("count", [4, [1, 2, 4], "8", ["l4", 2]])
def test_a_count_is_no_type(count: Any) -> None:
    with pytest.raises(ConfigError, match=r"^unknown GPU .*: give a type .* the number as gpus"):
        estimate(MODEL, gpu=count)
    with pytest.raises(ConfigError, match=r"^gpus: 'l4' is no number of GPUs; gpu= takes types"):
        explain(MODEL, gpus="l4")  # type: ignore[arg-type]


def test_predictions_become_a_frame_whose_parts_add_up() -> None:
    frame = to_frame(estimate(MODEL, "l4-24gb", method=["lora", "qlora"], seq_len=128))
    assert list(frame["method"]) == ["lora", "qlora"]
    run = RunConfig(model=MODEL).to_dict()
    assert set(run) <= set(frame.columns)
    parts = [name for name in frame.columns if name in PARTS]
    assert len(parts) == len(PARTS)
    assert (frame[parts].sum(axis=1) == frame["device_used_bytes"]).all()


PARTS = {
    *("weights_bytes", "adapters_bytes", "gradients_bytes", "optimizer_states_bytes"),
    *("activations_bytes", "logits_and_loss_bytes", "temporary_bytes", "kv_cache_bytes"),
    *("allocator_bytes", "context_bytes"),
}


def test_an_explanation_is_that_of_the_command_and_its_frame_adds_up() -> None:
    found = explain(MODEL, "l4-24gb", method="qlora", seq_len=128)
    (one,) = estimate(MODEL, "l4-24gb", method="qlora", seq_len=128)
    assert found.prediction == one
    frame = to_frame(found)
    assert frame["num_bytes"].sum() == one.memory.device_used_bytes
    assert {"part", "what", "kind", "source", "why"} <= set(frame.columns)


# tests/cli asks for the whole catalog
SOME_CARDS = ["h100-sxm-80gb", "rtx-a2000-6gb", "a10-24gb", "t4-16gb", "p4-8gb", "v100-sxm2-32gb"]


def test_where_a_run_fits_starts_with_the_smallest_card() -> None:
    found = where("Qwen/Qwen2.5-7B", SOME_CARDS, method="qlora", seq_len=128)
    assert len(found) == len(SOME_CARDS)
    fits = [one for one in found if one.prediction and one.prediction.verdict == "fits"]
    assert found[: len(fits)] == fits
    assert 1 < len(fits) < len(found)
    sizes = [one.gpu.memory_bytes for one in fits]
    assert sizes == sorted(sizes)
    frame = to_frame(found)
    assert list(frame["gpu"]) == [one.gpu.key for one in found]
    assert list(frame["largest_batch_size"][: len(fits)]) == [one.batch_size for one in fits]


def test_a_card_that_refuses_a_run_has_a_row_with_the_reason() -> None:
    frame = to_frame(where(MODEL, SOME_CARDS, attn="flash_attention_2", seq_len=128))
    refused = frame[frame["refusal"] != ""]
    assert refused["refusal"].str.contains("flash_attention_2").all()
    assert "t4-16gb" in set(refused["gpu"])


@pytest.mark.parametrize("function", [explain, where])
def test_one_run_is_one_value_of_each_setting(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"takes one run, these settings make 2; .* estimate"):
        function(MODEL, batch_size=[1, 2])
    with pytest.raises(ConfigError, match="batchsize: is not a setting"):
        function(MODEL, batchsize=1)


def test_a_guide_becomes_a_frame() -> None:
    rows = make_guide([RunConfig(model=MODEL, seq_len=64)], ["l4-24gb"], num_samples=10)
    assert list(to_frame(rows)["num_steps"]) == [10]


def test_a_plan_is_recommended_from_a_mapping_as_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = recommend(PLAN)
    assert answer.winner is not None
    assert (tmp_path / "runs/recommend/train.py").is_file()
    assert list(tmp_path.glob("plan-*")) == []
    frame = to_frame(answer)
    assert set(frame["phase"]) == {"inference", "finetune"}
    path = tmp_path / "plan.yaml"
    path.write_text(json.dumps(PLAN | {"output_dir": "again"}))
    assert recommend(path).winner == answer.winner
    assert capsys.readouterr().err == ""


def test_a_fault_in_a_mapping_names_the_key() -> None:
    with pytest.raises(ConfigError, match="stage1_profil"):
        recommend({"stage1_profil": {}})


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("runs"))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WHICHLORA_CALIBRATION", str(tmp_path / "calibration"))
    names: dict[str, Any] = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), "tour.ipynb", "exec"), names)
    assert names["answer"].winner is not None


def test_the_notebook_shows_what_its_cells_gave() -> None:
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells[1:])
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds == {"execute_result"}


def test_python_asks_an_engine_as_the_command_does() -> None:
    (answer,) = whichlora.estimate(
        "meta-llama/Llama-3.1-8B",
        "rtx-4090-24gb",
        phase="inference",
        serving="vllm",
        serving_options={"max_num_seqs": 4},
        concurrency=16,
        context=4096,
    )
    assert answer.serving is not None
    assert (answer.serving.concurrency, answer.serving.max_running) == (16, 4)
    with pytest.raises(ConfigError, match="batch_size: is concurrency by another name"):
        whichlora.estimate(
            "smollm2-135m", "l4-24gb", phase="inference", batch_size=2, concurrency=2
        )


def test_numbers_and_arrays_of_numpy_and_pandas_are_numbers() -> None:
    asked = {"batch_size": np.array([1, 2]), "seq_len": np.int64(128), "method": "lora"}
    plain = estimate(MODEL, "l4-24gb", batch_size=[1, 2], seq_len=128, method="lora")
    assert estimate(MODEL, "l4-24gb", **asked) == plain  # type: ignore[arg-type]
    served = {"phase": "inference", "serving": "vllm", "concurrency": np.int32(2)}
    share = {"gpu_memory_utilization": np.float64(0.5)}
    (found,) = estimate(MODEL, "l4-24gb", serving_options=share, **served)  # type: ignore
    assert found.run.batch_size == 2
    answer = recommend(gpu="l4", models=(MODEL,), seq_len=np.int64(128), samples=np.int32(50))  # type: ignore[arg-type]
    assert answer.winner is not None


def test_a_path_is_a_folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}/my-model: no such file or folder"):
        estimate(Path("my-model"), "l4-24gb")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"data": [{"text": "a"}]},
            "^data: must be a file, .* got list; write the rows to a JSONL",
        ),
        ({"samples": "many"}, "^samples: must be a whole number from 1 to .*, got 'many'"),
        ({"samples": 10, "epochs": "2"}, "^epochs: must be a number above 0, .* got '2'"),
        ({"batch_size": []}, "^batch_size: is an empty list; give a value"),
        ({"target_modules": 5}, "target_modules: "),
        (
            {"engine": "tracer"},
            "^engine: 'tracer' is not known; did you mean trace; accepted are auto, ledger, trace",
        ),
    ],
)
def test_a_value_of_a_wrong_type_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate(MODEL, "l4-24gb", **settings)


def test_a_frame_is_made_of_answers_alone() -> None:
    for junk in (None, [1]):
        with pytest.raises(ConfigError, match="to_frame: takes what estimate, explain"):
            to_frame(junk)  # type: ignore[arg-type]


def test_a_plan_takes_paths_sets_and_numbers_of_numpy(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n' * 40)
    own = {"dataset": rows, "output_dir": tmp_path, "epochs": np.int64(2), "methods": {"lora"}}
    answer = recommend(PLAN | own)
    assert answer.plan.epochs == 2
    assert answer.plan.methods == ("lora",)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([PLAN], "^plan: must be a config file or its content as a mapping, got list"),
        (PLAN | {"epochs": object()}, "^plan: <object .*> is no number, text, list or mapping"),
    ],
)
def test_what_is_no_plan_is_one_line(plan: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recommend(plan)


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ({"budget": 20}, "^budget: must be text, got 20"),
        ({"country": 5}, "^country: must be text, got 5"),
        ({"epochs": "2"}, "^epochs: must be a number above 0, got '2'"),
    ],
)
def test_a_keyword_of_a_wrong_type_is_one_line(keyword: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recommend(gpu="l4", models=(MODEL,), samples=10, **keyword)


def test_every_field_of_a_run_is_a_setting() -> None:
    assert {field.name for field in fields(RunConfig)} - {"model"} <= set(
        RunSettings.__annotations__
    ) | {"parallel"}


def test_an_adapter_beside_its_base_under_an_older_engine_is_asked_in_python() -> None:
    engine: dict[str, Any] = {"phase": "inference", "serving": "vllm", "serve": "as-trained"}
    (found,) = estimate("Qwen/Qwen3-8B", "l40s", libraries={"vllm": "0.20"}, r=32, **engine)
    assert (found.run.serve, found.run.r, found.run.libraries) == (
        "as-trained",
        32,
        (("vllm", "0.20"),),
    )
    assert found.memory.breakdown["adapters"] > 0
    assert found.serving is not None
    assert found.serving.version == "0.20"
    with pytest.raises(ConfigError, match=r"^libraries: .* is not a mapping of settings"):
        estimate("Qwen/Qwen3-8B", "l40s", libraries="vllm=0.20")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="serve"):
        estimate("Qwen/Qwen3-8B", "l40s", phase="inference", serve="as-traind")  # type: ignore[arg-type]


def test_a_length_is_written_as_on_the_command_line() -> None:
    (prediction,) = estimate("Qwen/Qwen2.5-0.5B", "t4", seq_len="1k")
    assert prediction.run.seq_len == 1024
    with pytest.raises(ConfigError, match="seq_len: '4q' is no number of tokens"):
        estimate("Qwen/Qwen2.5-0.5B", "t4", seq_len="4q")


def test_a_config_in_place_of_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model: must be a name or a folder .*, got dict"):
        estimate({"model_type": "llama"}, "t4")  # type: ignore[arg-type]


def test_a_rank_above_that_of_every_matrix_is_said_to_be_one() -> None:
    (prediction,) = estimate("Qwen/Qwen2.5-0.5B", "h100-sxm-80gb", r=897, seq_len=64)
    assert any("has a rank above 896" in note for note in prediction.notes)
    (prediction,) = estimate("Qwen/Qwen2.5-0.5B", "h100-sxm-80gb", r=896, seq_len=64)
    assert not any("has a rank above" in note for note in prediction.notes)


def test_recommend_takes_a_length_as_people_write_it() -> None:
    asked: dict[str, Any] = {"gpu": "4090", "models": ["Qwen/Qwen2.5-0.5B"]}
    winner = whichlora.recommend(**asked, seq_len="4k").winner
    assert winner is not None
    assert winner.run.seq_len == 4096
    with pytest.raises(ConfigError, match="seq_len: 'long' is no number of tokens"):
        whichlora.recommend(**asked, seq_len="long")


def test_the_largest_batch_and_length_can_be_asked_for() -> None:
    (largest,) = whichlora.estimate(MODEL, "24GB", method="qlora", seq_len=1024, batch_size="max")
    (one_more,) = whichlora.estimate(
        MODEL, "24GB", method="qlora", seq_len=1024, batch_size=largest.run.batch_size + 1
    )
    assert (largest.verdict, one_more.verdict == "fits") == ("fits", False)
    (longest,) = whichlora.estimate(MODEL, "24GB", method="qlora", seq_len="max")
    assert longest.run.seq_len > 1024
    with pytest.raises(ConfigError, match="batch_size and seq_len: only one of both can be max"):
        whichlora.estimate(MODEL, "24GB", seq_len="max", batch_size="max")
    with pytest.raises(ConfigError, match="batch_size: max stands alone"):
        whichlora.estimate(MODEL, "24GB", batch_size=[1, "max"])
