from __future__ import annotations

import contextlib
import json
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from whichlora import trainers
from whichlora.config import DEFAULT_MODELS, load_plan
from whichlora.config.schema import json_schema
from whichlora.errors import ConfigError
from whichlora.serving import other_name_note
from whichlora.spec.costs import own_price
from whichlora.spec.plan import Budget, Limits, Objective, Plan

EXAMPLES = Path(__file__).parents[2] / "examples"

GOLDEN = Path(__file__).parents[1] / "golden" / "config_faults.txt"
CASES = {
    name: (text, message)
    for name, text, message in re.findall(
        r"^== (.+)\n((?:.*\n)*?)=> (.+)\n", GOLDEN.read_text(), flags=re.MULTILINE
    )
}

LENGTHS = """\
dataset: {samples: 10, mean_tokens: 1k, p95_tokens: 2k, max_tokens: 8k}
stage1_profile: {context: 8k, concurrency: 1, prefill_length: [1k, 512], tokens_to_generate: 2k}
serving: vllm
sequence_length: 8k
"""


def test_every_length_of_a_plan_may_be_in_thousands(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(LENGTHS)
    numbers = {"1k": "1024", "2k": "2048", "8k": "8192"}
    plan = load_plan(path)
    path.write_text(re.sub(r"\d+k", lambda length: numbers[length[0]], LENGTHS))
    assert plan == load_plan(path)
    assert plan.inference.context == 8192


# What the golden file, being text, can't hold.
UNREADABLE = {
    "empty": (b"", ": is empty; it needs at least the key dataset"),
    "only a comment": (b"# nothing\n", ": is empty; it needs at least the key dataset"),
    "Latin-1": (
        b"seed: 1\ngpu: \xe9\n",
        ":2:6: is not UTF-8 text (byte 0xe9); save the file as UTF-8",
    ),
    "UTF-16": (
        "seed: 1".encode("utf-16"),
        ":1:1: is not UTF-8 text (byte 0xff); save the file as UTF-8",
    ),
    "control character": (
        b"seed: 1\ngpu: \x00\n",
        ":2:6: character U+0000 is not allowed in YAML; remove it",
    ),
    "too large": (
        b"#" * (2**20 + 1),
        ": is larger than 1 MiB; give the configuration, and the data as dataset.path",
    ),
    "too deep": (
        b"models: " + b"[" * 5000,
        ": lists or mappings are nested too deeply; no setting has five levels",
    ),
    "thousands of digits": (
        b"seed: " + b"9" * 5000,
        ": holds a number of thousands of digits; shorten it",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, so that messages name the file as config.yaml."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str | bytes) -> Plan:
    path = Path("config.yaml")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_plan(path)


def fault(text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text)
    return str(caught.value)


def test_the_golden_faults_are_all_read() -> None:
    assert len(CASES) == GOLDEN.read_text().count("\n== ") >= 30


@pytest.mark.parametrize(("text", "message"), CASES.values(), ids=CASES)
def test_each_fault_is_one_line_with_place_key_value_and_what_is_accepted(
    folder: Path, text: str, message: str
) -> None:
    all_keys = ", ".join(json_schema()["properties"])
    expected = message.replace("<all keys>", all_keys).replace("<folder>", str(folder))
    assert fault(text) == expected


@pytest.mark.parametrize(("text", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_each_file_that_is_no_config_is_told_in_one_line(
    folder: Path, text: bytes, message: str
) -> None:
    assert fault(text) == f"config.yaml{message}"


def test_a_missing_file_and_a_folder_are_told_in_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    with pytest.raises(
        ConfigError, match=r"none\.yaml: can't be read \(No such file or directory\)"
    ):
        load_plan(missing)
    with pytest.raises(ConfigError, match=r": can't be read \(Is a directory\); give the path"):
        load_plan(tmp_path)


def test_names_that_yaml_reads_as_numbers_and_names_as_people_write_them_are_taken(
    folder: Path,
) -> None:
    text = "dataset: org/data\ngpu: 4090\ngpu_prices: {4090: 0.4}\n"
    (folder / "config.yaml").write_text(text + "models: ['llama3.1:8b', meta-llama/Llama-3.1-8B]\n")
    plan = load_plan(folder / "config.yaml")
    assert plan.gpu == "4090"
    assert plan.objective.offer("rtx-4090-24gb") == own_price("rtx-4090-24gb", 0.4)
    assert plan.models == ("meta-llama/Llama-3.1-8B",)
    assert plan.notes == ("llama3.1:8b: taken as meta-llama/Llama-3.1-8B",)


def test_an_engine_is_named_as_people_call_it(folder: Path) -> None:
    text = "dataset: org/data\ngpu: 4090\nserving_options: {num_gpu: all, OLLAMA_NUM_PARALLEL: 2}\n"
    (folder / "config.yaml").write_text(text + "serving: ollama\n")
    plan = load_plan(folder / "config.yaml")
    assert plan.inference.serving == "llama-cpp"
    assert dict(plan.inference.serving_options) == {"n_gpu_layers": 999, "parallel": 2}
    assert plan.notes == (other_name_note("ollama"),)
    (folder / "config.yaml").write_text("dataset: org/data\ngpu: 4090\ntrainer: Axolotl\n")
    plan = load_plan(folder / "config.yaml")
    assert plan.finetune.trainer == "transformers"
    assert plan.notes == (trainers.other_name_note("Axolotl"),)
    (folder / "config.yaml").write_text(text + "serving: llama.cpp\n")
    assert load_plan(folder / "config.yaml").notes == ()


def test_all_faults_are_told_at_once_in_the_order_of_the_file(folder: Path) -> None:
    lines = fault("gpu: true\nprecison: fp16\nranks: [8, x]\nepochs:\nmethods: rola\n").split("\n")
    assert [re.match(r"config\.yaml:(\d+:\d+): (\S+):", line).groups() for line in lines] == [  # type: ignore[union-attr]
        ("1:1", "dataset"),
        ("1:1", "gpu"),
        ("2:1", "precison"),
        ("3:12", "ranks.1"),
        ("4:1", "epochs"),
        ("5:1", "methods"),
    ]


def test_aliases_that_explode_are_refused_quickly(folder: Path) -> None:
    levels = ["a: &a [x]"]
    for before, key in zip(string.ascii_lowercase, string.ascii_lowercase[1:], strict=False):
        levels.append(f"{key}: &{key} [{', '.join([f'*{before}'] * 9)}]")
    text = "\n".join([*levels, "models: *z", "dataset: *z"])
    assert "models.0: is not text (got a list of 9)" in fault(text)


@settings(max_examples=200)
@given(
    text=st.text(st.sampled_from("abc:-[]{}#&*!|>'\"%@`,? \n\t0123.~"), max_size=40)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
@example(text="dataset: &a\n  path: *a\n")
@example(text="&a [*a]: *a\n")
@example(text="<<: [1]\n")
@example(text="dataset: {<<: {path: a/b}, split: train}\n")
def test_no_text_at_all_ends_in_anything_but_a_plan_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        assert load_plan(path).dataset.kind in {"hub", "class"}


@pytest.mark.parametrize("value", ["~nobody/x", "k" * 5000, float("nan"), [[]], "{", ""])
def test_no_value_of_any_setting_ends_in_anything_but_a_plan_or_a_config_error(
    folder: Path, value: Any
) -> None:
    schema = json_schema()
    sections = {"stage1_profile": "Stage1", "stage2_profile": "Stage2", "slurm": "Slurm"}
    settings = [{key: value} for key in schema["properties"]]
    settings += [
        {section: {key: value}}
        for section, name in sections.items()
        for key in schema["$defs"][name]["properties"]
    ]
    settings += [{"dataset": {key: value}} for key in schema["$defs"]["Dataset"]["properties"]]
    for setting in settings:
        with contextlib.suppress(ConfigError):
            load(json.dumps({"dataset": {"tokens": 10, "samples": 2}} | setting))


def test_a_dataset_is_enough(folder: Path) -> None:
    plan = load("dataset: org/data\n")
    assert plan.models == DEFAULT_MODELS
    assert plan.methods == ("lora", "qlora", "dora", "qdora")
    assert plan.ranks == (16,)
    assert plan.lora_alpha is None
    assert plan.finetune.lora_alpha == 32
    assert plan.inference_batch_sizes == plan.finetune_batch_sizes == (1, 2, 4, 8, 16)
    assert plan.limits == Limits()
    assert (plan.gpu, plan.profile, plan.epochs, plan.finetune.seq_len) == (
        "auto",
        "frontier",
        1.0,
        2048,
    )
    assert plan.output_dir == Path("runs/config")
    assert plan.raw == {"dataset": "org/data"}


def test_the_keys_of_the_original_report_mean_what_they_meant() -> None:
    plan = load_plan(EXAMPLES / "report.yaml")
    assert plan.models[0] == "meta-llama/Llama-3.2-1B"
    assert plan.tokenizers == {}  # each model has its own
    assert plan.inference_batch_sizes == (1, 4, 16)
    assert (plan.prompt_lens, plan.max_new_tokens, plan.num_runs) == ((512,), (128,), 5)
    assert plan.finetune_batch_sizes == (1, 2, 4, 8)
    assert plan.limits == Limits(
        time_per_token_s=0.02,
        inference_bytes=24 * 10**9,
        total_time_s=36_000.0,
        finetune_bytes=24 * 10**9,
    )


def test_the_quickstart_is_a_valid_plan_that_trains_on_a_cpu() -> None:
    plan = load_plan(EXAMPLES / "quickstart.yaml")
    assert len(plan.models) >= 3
    assert (plan.gpu, plan.weights, plan.train) == ("cpu", "random", True)
    assert plan.finetune.lora_alpha == 2 * plan.ranks[0]
    assert None not in (plan.limits.time_per_token_s, plan.limits.finetune_bytes)


@pytest.mark.parametrize(
    ("setting", "size"),
    [
        ("peak_memory_gb: 24", 24 * 10**9),
        ("peak_memory_gb: 1.5", 15 * 10**8),
        ("peak_memory: 24GB", 24 * 10**9),
        ("peak_memory: 24GiB", 24 * 2**30),
        ("peak_memory: 512 MiB", 2**29),
    ],
)
def test_gb_and_gib_are_different_amounts(folder: Path, setting: str, size: int) -> None:
    plan = load(f"dataset: a/b\nstage2_profile:\n  {setting}\n")
    assert plan.limits.finetune_bytes == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20ms", 0.02), ("90s", 90), ("1.5 h", 5400), ("2h 30min", 9000), ("1d", 86400)],
)
def test_durations_carry_their_unit(folder: Path, text: str, seconds: float) -> None:
    assert load(f"dataset: a/b\nprofile_timeout: {text}\n").timeout_s == pytest.approx(seconds)


def test_yaml_keeps_words_words_and_exponents_numbers(folder: Path) -> None:
    plan = load("dataset: a/b\nlearning_rate: 1e-4\nprofile: none\nmodels: [NO/off, x/010]\n")
    assert plan.learning_rate == 1e-4
    assert plan.profile == "none"
    assert plan.models == ("NO/off", "x/010")


def test_a_lone_value_is_a_list_of_one(folder: Path) -> None:
    plan = load("dataset: a/b\nmodels: x/y\nranks: 4\nstage2_profile: {batch_size: 3}\n")
    assert (plan.models, plan.ranks, plan.finetune_batch_sizes) == (("x/y",), (4,), (3,))


def test_tokenizers_are_a_parallel_list_or_a_mapping(folder: Path) -> None:
    listed = load("dataset: a/b\nmodels: [m/a, m/b]\nstage1_profile: {tokenizers: [m/a, t/b]}\n")
    mapped = load("dataset: a/b\nmodels: [m/a, m/b]\nstage1_profile: {tokenizers: {m/b: t/b}}\n")
    assert listed.tokenizers == mapped.tokenizers == {"m/b": "t/b"}


def test_a_given_alpha_holds_for_every_rank(folder: Path) -> None:
    plan = load("dataset: a/b\nlora_alpha: 7\nranks: [4, 8]\n")
    assert (plan.lora_alpha, plan.finetune.lora_alpha) == (7, 7)


def test_paths_start_in_the_folder_of_the_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "data.jsonl").touch()
    config = folder / "sub" / "my.yaml"
    config.write_text("dataset: data.jsonl\nmodels: [./model, org/model]\noutput_dir: out\n")
    plan = load_plan(config)
    assert plan.dataset.path == str(folder / "sub" / "data.jsonl")
    assert plan.models == (str(folder / "sub" / "model"), "org/model")
    assert plan.output_dir == folder / "sub" / "out"


def test_clips_stand_beside_a_transcript_or_messages(folder: Path) -> None:
    (folder / "data.jsonl").touch()
    chats = ("messages_column: c", "prompt_column: p, completion_column: c", "text_column: t")
    for names in chats:
        plan = load(f"dataset: {{path: data.jsonl, audio_column: a, {names}}}")
        assert plan.dataset.audio_column == "a"
    for names, told in (
        ("template: '{c}'", "goes with a transcript, messages, or a prompt and its completion"),
        ("messages_column: c, images_column: i", "is beside dataset.images_column"),
    ):
        said = fault(f"dataset: {{path: data.jsonl, audio_column: a, {names}}}")
        assert "dataset.audio_column: " + told in said


def test_counts_stand_for_data(folder: Path) -> None:
    dataset = load("dataset: {tokens: 12000000, samples: 50000}\n").dataset
    assert (dataset.kind, dataset.num_samples, dataset.mean_tokens) == ("counts", 50_000, 240.0)


def test_a_byte_order_mark_is_passed_over(folder: Path) -> None:
    assert load("\ufeffdataset: a/b\n").dataset.path == "a/b"


def test_settings_reach_the_stage_that_they_concern(folder: Path) -> None:
    plan = load("dataset: a/b\nprecision: fp16\nquant: nf4\npadding: none\nkv_cache: static\n")
    assert plan.inference.precision == plan.finetune.precision == "fp16"
    assert plan.inference.quant == plan.finetune.quant == "nf4"
    assert plan.inference.kv_cache == "static"
    assert (plan.inference.phase, plan.finetune.phase) == ("inference", "finetune")


def test_preference_prices_limits_and_budget_reach_the_plan(folder: Path) -> None:
    plan = load(
        "dataset: a/b\nmodels: [org/b, org/a]\nprefer: order\n"
        "gpu_prices: {A100-SXM4-80GB: 1.5}\nconfidence: 0.9\n"
        "max_profile_runs: 4\nmax_profile_time: 2min\n"
        "gpu_limits: {a100-sxm-80gb: {total_time: 2h, finetune_memory: 70GiB}}\n"
    )
    assert plan.objective == Objective(
        prefer="order",
        order=("org/b", "org/a"),
        prices={"a100-sxm-80gb": (own_price("a100-sxm-80gb", 1.5),)},
    )
    assert plan.budget == Budget(confidence=0.9, runs=4, device_s=120.0)
    limits = Limits(total_time_s=7200.0, finetune_bytes=70 * 2**30)
    assert plan.gpu_limits == {"a100-sxm-80gb": limits}


def test_every_setting_of_the_schema_is_known_to_the_loader(folder: Path) -> None:
    schema = json_schema()
    defaults = {
        key: value["default"] for key, value in schema["properties"].items() if "default" in value
    }
    assert load(json.dumps({"dataset": "a/b"} | defaults)) == load("dataset: a/b\n")
    assert schema["additionalProperties"] is False
    assert "null" not in json.dumps(schema)


def test_importing_the_loader_costs_neither_yaml_nor_pydantic() -> None:
    code = (
        "import sys, whichlora.config; "
        "print([name for name in ('pydantic', 'ruamel.yaml', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_type_may_state_how_many(folder: Path) -> None:
    (config,) = load("dataset: org/rows\ngpu: 2x3090\n").spreads
    assert config.gpus == 2
    assert load("dataset: org/rows\ngpu: [2x3090, 2x4090]\n").gpus == ("3090", "4090")
    twice = fault("dataset: org/rows\ngpu: 2x3090\ngpus: 4\n")
    assert twice == "config.yaml:2:1: gpu: 2x3090 states how many; leave gpus out"
    several = fault("dataset: org/rows\ngpu: [2x3090, 4x4090]\n")
    assert several == (
        "config.yaml:2:1: gpu: 2x3090, 4x4090 state several numbers of GPUs; give all types the "
        "same, or ask estimate"
    )
    assert "gpu: is an empty list" in fault("dataset: org/rows\ngpu: []\n")


def test_a_setting_of_the_top_in_a_section_is_told_where_it_stands(folder: Path) -> None:
    told = fault("dataset: org/data\nstage1_profile: {models: [org/model]}\n")
    assert "did you mean models, which stands outside of stage1_profile" in told


def test_optimizers_have_the_names_of_training_arguments_too(folder: Path) -> None:
    plan = load("dataset: org/data\noptimizer: [adamw_bnb_8bit, lion_32bit, sgd]\n")
    assert plan.optimizers == ("adamw_8bit", "lion", "sgd")
    assert (
        "optimizer: is described by no formula here (got 'muon'); accepted: adamw_torch"
        in fault("dataset: org/data\noptimizer: muon\n")
    )


def test_a_length_is_written_as_on_the_command_line(folder: Path) -> None:
    assert load("dataset: org/data\nsequence_length: 4k\n").finetune.seq_len == 4096
    told = fault("dataset: org/data\nsequence_length: 4q\n")
    assert "sequence_length: is no number of tokens (got '4q')" in told
    assert "such as 4096 or 4k" in told


def test_lengths_of_an_inference_are_written_so_too(folder: Path) -> None:
    lengths = "{prefill_length: [2k, 4k], tokens_to_generate: 1k, context: 5k}"
    plan = load(f"dataset: org/data\nserving: vllm\nstage1_profile: {lengths}\n")
    assert plan.prompt_lens == (2048, 4096)
    assert plan.inference.max_new_tokens == 1024
    short = lengths.replace("5k", "4k")
    told = fault(f"dataset: org/data\nserving: vllm\nstage1_profile: {short}\n")
    assert "is less than a prompt of 4096 tokens and its 1024 new ones" in told
