"""Exports for other tools: their text, what they refuse, and what changes under the tool."""

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ruamel.yaml import YAML

from whichlora import recommend
from whichlora.cli import exports as command
from whichlora.cli import main
from whichlora.errors import ConfigError, DataFileError
from whichlora.exports import FORMATS, Recipe
from whichlora.exports.axolotl import under_axolotl
from whichlora.exports.installation import Installation
from whichlora.exports.llamafactory import under_llamafactory
from whichlora.exports.requirements import requirements
from whichlora.exports.skypilot import ACCELERATORS
from whichlora.exports.trl import under_trl
from whichlora.exports.unsloth import under_unsloth
from whichlora.exports.yaml import yaml_text
from whichlora.spec.data_format import DataFormat
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import Keeping
from whichlora.spec.results import SCHEMA_VERSION
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu, list_gpus
from whichlora.store.hub import load_model
from whichlora.workflow import export

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL = "HuggingFaceTB/SmolLM2-135M"
RUN = RunConfig(model=MODEL, method="qlora", batch_size=4, seq_len=512, lora_dropout=0.05)
GPU = "l4-24gb"


def recipe(run: RunConfig = RUN, **settings: Any) -> Recipe:
    return replace(export.make_recipe(run, GPU), **settings)


def whichlora(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="whichlora")


@pytest.mark.parametrize("to", [name for name in FORMATS if name != "transformers"])
def test_an_export_is_written_word_for_word(to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = Installation(
        command="pip install ~/'whichlora-source[profile]'",
        uploads={"~/whichlora-source": "/home/me/whichlora"},
    )
    monkeypatch.setattr("whichlora.exports.skypilot.installation", lambda extra: checkout)
    files = FORMATS[to](recipe()).files
    for name in files:
        if name == "train.py":
            continue  # its own golden file is that of the job
        golden = GOLDEN / f"export_{name}.txt"
        assert files[name] == golden.read_text(encoding="utf-8")


def test_the_transformers_export_is_the_job_of_a_run() -> None:
    made = FORMATS["transformers"](recipe())
    assert made.run == recipe().run
    assert "load_in_4bit=True" in made.files["train.py"]


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "dora", "qdora"])
def test_every_method_is_exported_and_predicted_again(to: str, method: str, tmp_path: Path) -> None:
    done = export.write_export(recipe(replace(RUN, method=method)), to, tmp_path)
    assert all(path.is_file() for path in done.paths)
    assert done.after.run == done.export.run
    assert done.changes.keys() == {
        name
        for name, value in done.after.run.to_dict().items()
        if done.before.run.to_dict()[name] != value
    }


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_a_model_of_this_machine_is_found_from_the_folder_of_the_job(
    to: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "newm"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(dict(load_model(MODEL).config)))
    monkeypatch.chdir(tmp_path)
    spread = ["--gpus", "2", "--parallel", strategy]
    args = ["export", "./newm", "--to", to, "--gpu", GPU, *spread, "--output", "job", "--json"]
    done = whichlora(*args)
    assert done.exit_code == 0, done.output
    texts = [Path(path).read_text() for path in json.loads(done.stdout)["files"]]
    assert any(str(model) in text for text in texts)
    assert not any("./newm" in text for text in texts)
    if to == "skypilot":
        task = YAML(typ="safe", pure=True).load(texts[0])
        assert task["file_mounts"][str(model)] == str(model)


def test_skypilot_uploads_no_folder_that_is_not_here_and_names_what_rows_name() -> None:
    made = recipe()
    with pytest.raises(ConfigError, match="/nowhere is no folder of this machine to upload"):
        FORMATS["skypilot"](replace(made, tokenizer="/nowhere"))
    assert FORMATS["skypilot"](made).notes == ()
    audio = replace(made, run=replace(RUN, model="openai/whisper-tiny", method="lora", seq_len=64))
    audio = replace(audio, data_format=DataFormat(kind="transcripts"))
    model = load_model("openai/whisper-tiny")
    audio = replace(audio, model_config=dict(model.config), target_modules=("q_proj",))
    (note,) = FORMATS["skypilot"](audio).notes
    assert "names files of this machine, which don't go along" in note


def test_files_of_the_user_are_kept_and_nothing_is_half_written(tmp_path: Path) -> None:
    mine = tmp_path / "train.py"
    mine.write_text("mine")
    with pytest.raises(DataFileError, match=r"train\.py: exists.*give another --output"):
        export.write_export(recipe(), "skypilot", tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    mine.unlink()
    first, *_ = export.write_export(recipe(), "axolotl", tmp_path).paths
    changed = replace(RUN, batch_size=2)
    export.write_export(recipe(changed), "axolotl", tmp_path)
    assert "micro_batch_size: 2\n" in first.read_text()
    first.write_text(first.read_text() + "# mine\n")
    with pytest.raises(DataFileError, match=r"axolotl\.yaml: was edited since"):
        export.write_export(recipe(), "axolotl", tmp_path)
    assert first.read_text().endswith("# mine\n")


def test_the_loss_head_of_trl_and_the_unprepared_base_are_predicted_again(tmp_path: Path) -> None:
    done = export.write_export(recipe(), "trl", tmp_path)
    assert done.changes == {"loss_head": ("hf", "trl-fused"), "prepare_kbit": (True, False)}
    assert done.after.memory.device_used_bytes < done.before.memory.device_used_bytes


def test_a_precision_that_a_tool_does_not_have_is_said(tmp_path: Path) -> None:
    pure = replace(RUN, method="lora", precision="bf16-pure")
    done = export.write_export(recipe(pure), "trl", tmp_path)
    assert done.after.run.precision == "bf16-no-autocast"
    assert "bf16-pure" in done.export.notes[0]
    settings = YAML(typ="safe", pure=True).load(done.paths[0].read_text())
    assert (settings["dtype"], settings["bf16"]) == ("bfloat16", False)


def test_trl_narrows_the_adapters_of_a_quantised_base(tmp_path: Path) -> None:
    done = export.write_export(recipe(replace(RUN, precision="bf16-no-autocast")), "trl", tmp_path)
    assert done.after.run.precision == "bf16-pure"
    assert "narrows the adapters" in done.export.notes[0]


def test_llamafactory_loads_no_frozen_base_in_fp32(tmp_path: Path) -> None:
    wide = replace(RUN, method="lora", precision="fp32")
    with pytest.raises(ConfigError, match="loads a frozen base in 16 bit"):
        export.write_export(recipe(wide), "llamafactory", tmp_path)
    full = export.write_export(recipe(replace(wide, method="full")), "llamafactory", tmp_path)
    assert full.after.run.precision == "fp32"


def test_a_run_without_autocast_gets_none_from_accelerate() -> None:
    spread = ParallelConfig(strategy="fsdp", gpus=4)
    plain = replace(RUN, method="full", precision="bf16-pure", parallel=spread)
    for precision, mixed in (("bf16-pure", "no"), ("bf16", "bf16")):
        files = FORMATS["transformers"](recipe(replace(plain, precision=precision))).files
        settings = YAML(typ="safe", pure=True).load(files["accelerate.yaml"])
        assert settings["mixed_precision"] == mixed


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("trl", {"quant": "gptq-int4", "method": "lora"}, {}, "quant gptq-int4 can't be loaded"),
    ("axolotl", {"quant": "fp4"}, {}, "quant fp4 can't be loaded by it; accepted are int8, nf4-dq"),
    ("trl", {}, {"weights": "random"}, "weights are random"),
    ("llamafactory", {}, {"masked_lm": True}, "is an encoder"),
    ("unsloth", {"precision": "fp32"}, {}, "its kernels are 16-bit"),
    ("skypilot", {}, {"gpu": "rtx-3060-12gb"}, "gpu rtx-3060-12gb has no name there"),
    ("trl", {"method": "full", "precision": "fp16"}, {}, "needs fp32 weights"),
    ("axolotl", {"model": "google-t5/t5-small", "method": "lora"}, {}, "is an encoder-decoder"),
    ("transformers", {"loss_head": "unsloth"}, {}, "can't be trained by the job"),
]


@pytest.mark.parametrize(
    ("to", "settings", "job", "message"), REFUSED, ids=[f"{row[0]}: {row[3]}" for row in REFUSED]
)
def test_what_a_tool_cannot_do_is_refused(
    to: str, settings: dict[str, Any], job: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        FORMATS[to](recipe(replace(RUN, **settings), **job))


def test_a_job_on_several_nodes_asks_for_all_their_gpus() -> None:
    spread = ParallelConfig(strategy="zero2", gpus=8, nodes=2)
    run = replace(RUN, method="lora", quant=None, parallel=spread)
    files = FORMATS["slurm"](recipe(run)).files
    assert (
        "\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4\n"
        in (files["train.sbatch"])
    )
    assert {"train.py", "accelerate.yaml", "deepspeed.json"} <= set(files)
    task = YAML(typ="safe", pure=True).load(FORMATS["skypilot"](recipe(run)).files["sky.yaml"])
    assert (task["num_nodes"], task["resources"]) == (2, {"accelerators": "L4:4"})
    assert "SKYPILOT_NODE_IPS" in task["run"]
    on_cpu = replace(recipe(run), gpu="cpu")
    assert "--gpus" not in FORMATS["slurm"](on_cpu).files["train.sbatch"]


NEEDED: list[tuple[dict[str, Any], list[str]]] = [
    ({"parallel": ParallelConfig(strategy="zero2", gpus=2)}, ["pip install deepspeed"]),
    ({"parallel": ParallelConfig(strategy="fsdp", gpus=2), "quant": None, "method": "lora"}, []),
    ({"trainer": "dpo"}, ["pip install trl==1.16.0"]),
    ({"loss_head": "liger"}, ["pip install liger-kernel"]),
    ({"trainer_options": (("use_liger_kernel", True),)}, ["pip install liger-kernel"]),
    (
        {"attn": "flash_attention_2"},
        ["pip install ninja wheel", "pip install --no-build-isolation flash-attn"],
    ),
    (
        {"method": "lora", "quant": "gptq-int4"},
        ["pip install optimum ninja wheel", "pip install --no-build-isolation gptqmodel"],
    ),
]


@pytest.mark.parametrize(("settings", "commands"), NEEDED)
def test_a_rented_machine_gets_every_package_that_the_run_needs(
    settings: dict[str, Any], commands: list[str]
) -> None:
    winner = recipe(replace(RUN, **settings))
    task = YAML(typ="safe", pure=True).load(FORMATS["skypilot"](winner).files["sky.yaml"])
    assert task["setup"].splitlines()[1:] == commands
    told = FORMATS["slurm"](winner).files["train.sbatch"].splitlines()[2]
    for package in requirements(winner.run):
        assert f" {package}" in told


def test_a_rented_amd_gpu_gets_the_torch_that_is_built_for_it() -> None:
    task = FORMATS["skypilot"](replace(recipe(), gpu="mi300x-192gb")).files["sky.yaml"]
    torch, ours = YAML(typ="safe", pure=True).load(task)["setup"].splitlines()
    assert torch.endswith(" torch torchvision --index-url https://download.pytorch.org/whl/rocm7.2")
    assert "whichlora" in ours  # keeps the torch that it finds
    assert "pytorch.org" not in FORMATS["skypilot"](recipe()).files["sky.yaml"]


@pytest.mark.parametrize("key", ACCELERATORS)
def test_pip_finds_a_torch_for_every_gpu_that_can_be_rented(key: str) -> None:
    backend = find_gpu(key).backend
    assert backend.torch_index or backend.kind == "cuda"  # whose torch is PyPI's


def spread_recipe(strategy: str, *options: tuple[str, Any], **settings: Any) -> Recipe:
    spread = ParallelConfig(strategy=strategy, gpus=4, options=options)
    plain = {"method": "lora", "quant": None, "parallel": spread}
    return recipe(replace(RUN, **(plain | settings)))


SPREAD_KEYS: list[tuple[str, str, str, str]] = [
    ("trl", "fsdp", "fsdp_config", "-m trl.scripts.sft --config trl.yaml"),
    ("trl", "zero3", "deepspeed", "-m trl.scripts.sft --config trl.yaml"),
    ("axolotl", "fsdp", "fsdp_version", "--launcher torchrun -- --nproc-per-node=4"),
    ("axolotl", "zero2", "deepspeed", "--launcher torchrun -- --nproc-per-node=4"),
    ("axolotl", "device-map", "device_map", "axolotl train axolotl.yaml --launcher python"),
    ("llamafactory", "zero2", "deepspeed", "NPROC_PER_NODE=4 llamafactory-cli train"),
    ("llamafactory", "fsdp", "bf16", "accelerate launch --config_file accelerate.yaml -m"),
]


@pytest.mark.parametrize(("to", "strategy", "key", "command"), SPREAD_KEYS)
def test_a_tool_gets_the_strategy_in_its_own_keys(
    to: str, strategy: str, key: str, command: str, tmp_path: Path
) -> None:
    done = export.write_export(spread_recipe(strategy), to, tmp_path)
    assert YAML(typ="safe", pure=True).load(done.paths[0].read_text())[key]
    assert command in done.export.command
    assert (tmp_path / "deepspeed.json").is_file() is strategy.startswith("zero")


@pytest.mark.parametrize(
    ("to", "file", "lines"),
    [
        ("axolotl", "axolotl.yaml", ["  offload_params: true"]),
        ("trl", "trl.yaml", ["  cpu_offload: true", 'ddp_backend: "cuda:nccl,cpu:gloo"']),
        ("llamafactory", "accelerate.yaml", ["  fsdp_offload_params: true"]),
    ],
)
def test_offloaded_fsdp_in_each_tool_s_own_key(to: str, file: str, lines: list[str]) -> None:
    done = FORMATS[to](spread_recipe("fsdp", ("offload", ("optimizer", "params"))))
    assert set(lines) <= set(done.files[file].splitlines())
    assert ("ddp_backend" in "".join(done.files.values())) is (to == "trl")


def test_qlora_under_fsdp_stores_codes_in_the_dtype_that_is_sharded() -> None:
    winner = spread_recipe("fsdp", method="qlora", quant="nf4-dq")
    assert "bnb_4bit_quant_storage: bfloat16" in FORMATS["trl"](winner).files["trl.yaml"]
    assert "bnb_4bit" not in FORMATS["axolotl"](winner).files["axolotl.yaml"]  # as it does itself
    half = spread_recipe(
        "fsdp", ("bnb_4bit_quant_storage", "float32"), method="qlora", quant="nf4-dq"
    )
    assert "bnb_4bit_quant_storage: float32" in FORMATS["trl"](half).files["trl.yaml"]
    with pytest.raises(ConfigError, match=r"sets bnb_4bit_quant_storage, which axolotl can't"):
        FORMATS["axolotl"](half)


@pytest.mark.parametrize(
    ("to", "strategy", "options", "message"),
    [
        ("unsloth", "fsdp", (), "parallel fsdp sets fsdp, which unsloth can't write"),
        ("axolotl", "fsdp", (("fsdp_version", "1"),), "sets fsdp_config.backward_prefetch"),
        ("llamafactory", "device-map", (), "sets device_map, which llamafactory can't write"),
        ("trl", "pp", (), "parallel: pp has no key in TrainingArguments"),
    ],
)
def test_what_a_tool_cannot_spread_is_refused(
    to: str, strategy: str, options: tuple[tuple[str, Any], ...], message: str
) -> None:
    accumulates = {"gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match=message):
        FORMATS[to](spread_recipe(strategy, *options, **accumulates))


def test_full_fine_tuning_keeps_its_precision_where_llamafactory_leaves_fp32_to_others() -> None:
    full = FORMATS["llamafactory"](spread_recipe("fsdp", method="full"))
    assert full.run.precision == "bf16"
    assert FORMATS["llamafactory"](spread_recipe("ddp", method="full")).run.precision == "bf16-pure"


def test_several_nodes_get_the_launchers_of_each_tool() -> None:
    def command(to: str, strategy: str) -> str:
        spread = ParallelConfig(strategy=strategy, gpus=8, nodes=2)
        return FORMATS[to](spread_recipe(strategy, parallel=spread)).command

    assert "--nnodes=2" in command("trl", "ddp")
    assert "--nnodes=2" in command("axolotl", "zero2")
    assert "NNODES=2 RDZV_ID=whichlora" in command("llamafactory", "ddp")
    assert "--machine_rank $NODE_RANK" in command("llamafactory", "fsdp")


def test_every_accelerator_with_a_sky_name_is_in_the_catalog() -> None:
    assert set(ACCELERATORS) <= {gpu.key for gpu in list_gpus()}


# --- rows and checkpoints

ROWS = {
    "prompt-completion": DataFormat(kind="prompt-completion", conversational=True),
    "messages": DataFormat(kind="messages", conversational=True),
    "preference": DataFormat(kind="preference"),
}


@pytest.mark.parametrize(
    ("kind", "train_on", "expected"),
    [
        ("prompt-completion", "completions", {"completion_only_loss": True}),
        ("prompt-completion", "all", {"completion_only_loss": False}),
        ("messages", "completions", {"assistant_only_loss": True}),
        ("messages", "all", {"assistant_only_loss": False}),
    ],
)
def test_trl_is_told_what_of_a_row_has_a_loss(
    kind: str, train_on: Any, expected: dict[str, bool]
) -> None:
    made = FORMATS["trl"](recipe(data_format=ROWS[kind], train_on=train_on))
    settings = YAML(typ="safe", pure=True).load(made.files["trl.yaml"])
    assert {name: settings.get(name) for name in expected} == expected
    assert "dataset_text_field" not in settings
    marks = any("{% generation %}" in note for note in made.notes)
    assert marks is (expected == {"assistant_only_loss": True})


@pytest.mark.parametrize(
    ("to", "kind"),
    [
        ("trl", "preference"),
    ],
)
def test_rows_that_an_export_cannot_name_are_refused(to: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"--to {to}: the rows of train.jsonl are .*; it takes "):
        FORMATS[to](recipe(data_format=ROWS[kind]))


@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_axolotl_is_told_what_of_a_conversation_has_a_loss(train_on: Any) -> None:
    made = FORMATS["axolotl"](recipe(data_format=ROWS["messages"], train_on=train_on))
    settings = YAML(typ="safe", pure=True).load(made.files["axolotl.yaml"])
    (data,) = settings["datasets"]
    assert (data["type"], data["field_messages"]) == ("chat_template", "messages")
    assert data["roles_to_train"] == ["assistant"]
    assert settings["train_on_inputs"] is (train_on == "all")


@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_llamafactory_is_told_the_roles_and_what_of_a_conversation_has_a_loss(
    train_on: Any,
) -> None:
    made = FORMATS["llamafactory"](recipe(data_format=ROWS["messages"], train_on=train_on))
    settings = YAML(typ="safe", pure=True).load(made.files["llamafactory.yaml"])
    data = json.loads(made.files["dataset_info.json"])["train"]
    assert (data["formatting"], data["columns"]) == ("sharegpt", {"messages": "messages"})
    assert (data["tags"]["role_tag"], data["tags"]["assistant_tag"]) == ("role", "assistant")
    assert (settings["stage"], settings["mask_history"]) == ("sft", False)
    assert settings["train_on_prompt"] is (train_on == "all")
    assert any("template:" in note for note in made.notes)


@pytest.mark.parametrize("to", ["axolotl", "llamafactory"])
def test_a_prompt_in_messages_and_its_answer_become_one_conversation(
    to: str, tmp_path: Path
) -> None:
    question, answer = ({"role": role, "content": "\u2028"} for role in ("user", "assistant"))
    run, exported = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    kinds = {
        "prompt-completion": {"prompt": [question], "completion": [answer]},
        "preference": {"chosen": [question, answer], "rejected": [question, question]},
    }
    for kind, row in kinds.items():
        rows = DataFormat(kind=kind, conversational=True)  # type: ignore[arg-type]
        for split in ("train", "validation"):
            line = json.dumps(row, ensure_ascii=False) + "\n"
            (run / f"{split}.jsonl").write_text(line, encoding="utf-8")
        chats = recipe(data_format=rows, validation=True)
        done = export.write_export(chats, to, exported, data=run)
        assert {path.name for path in done.paths} > {"train_sft.jsonl", "validation_sft.jsonl"}
        (line,) = (exported / "train_sft.jsonl").read_text(encoding="utf-8").strip("\n").split("\n")
        assert json.loads(line) == {
            "messages": [question | {"train": False}, answer | {"train": True}]
        }
        assert "train_sft.jsonl" in "".join(done.export.files.values())
    (run / "train.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataFileError, match="has a row that is not of its recipe's format"):
        export.write_export(chats, to, exported, data=run)


@pytest.mark.parametrize("to", ["axolotl", "llamafactory"])
def test_what_was_chosen_becomes_the_completion(to: str, tmp_path: Path) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    export.write_export(recipe(data_format=ROWS["preference"]), to, tmp_path)
    made = (tmp_path / "train_sft.jsonl").read_text()
    assert json.loads(made) == {"prompt": "a", "completion": "b"}


def test_llamafactory_refuses_to_learn_prompts_of_plain_text() -> None:
    pairs = DataFormat(kind="prompt-completion")
    with pytest.raises(ConfigError, match=r"it can't learn prompts of plain text .*train_on: all"):
        FORMATS["llamafactory"](recipe(data_format=pairs, train_on="all"))


@pytest.mark.parametrize(
    ("to", "size"),
    [
        ("axolotl", "eval_batch_size"),
        ("llamafactory", "per_device_eval_batch_size"),
    ],
)
@pytest.mark.parametrize(
    ("keeping", "when"),
    [
        (Keeping(), {"eval_strategy": "epoch"}),
        (Keeping(eval_steps=50), {"eval_strategy": "steps", "eval_steps": 50}),
        (Keeping(eval_steps=0), {}),
    ],
)
def test_validation_rows_are_evaluated_as_the_plan_says(
    to: str, size: str, keeping: Keeping, when: dict[str, Any]
) -> None:
    made = FORMATS[to](recipe(keeping=keeping, validation=True))
    settings = YAML(typ="safe", pure=True).load(next(iter(made.files.values())))
    expected = {**when, size: RUN.batch_size} if when else {}
    names = ("eval_strategy", "eval_steps", size)
    assert {name: settings[name] for name in names if name in settings} == expected
    assert ("validation.jsonl" in "".join(made.files.values())) is bool(when)
    assert "validation.jsonl" not in "".join(FORMATS[to](recipe()).files.values())


@pytest.mark.parametrize("kind", ROWS)
def test_the_script_for_unsloth_reads_rows_as_the_job_does(kind: str) -> None:
    job = FORMATS["transformers"](recipe(data_format=ROWS[kind])).files["train.py"]
    made = FORMATS["unsloth"](recipe(data_format=ROWS[kind], validation=True))
    script = made.files["train_unsloth.py"]

    def functions(source: str) -> dict[str, str]:
        tree = ast.parse(source)
        return {
            node.name: ast.unparse(node) for node in tree.body if isinstance(node, ast.FunctionDef)
        }

    ours, theirs = functions(job), functions(script)
    assert {"read_rows", "encode"} <= set(theirs)
    assert {name: ours[name] for name in theirs} == theirs
    assert 'eval_dataset=Dataset.from_list(read_rows(HERE / "validation.jsonl"' in script


@pytest.mark.parametrize("to", ["trl", "axolotl", "llamafactory"])
@pytest.mark.parametrize(
    ("keeping", "expected"),
    [
        (Keeping(), {"save_strategy": "steps", "save_steps": 0.1, "save_total_limit": 2}),
        (
            Keeping(save_steps=50, save_total_limit=7),
            {"save_strategy": "steps", "save_steps": 50, "save_total_limit": 7},
        ),
        (Keeping(save_steps=0), {"save_strategy": "no"}),
    ],
)
def test_checkpoints_are_kept_as_the_plan_says(
    to: str, keeping: Keeping, expected: dict[str, Any]
) -> None:
    made = FORMATS[to](recipe(keeping=keeping))
    settings = YAML(typ="safe", pure=True).load(next(iter(made.files.values())))
    saved = {name: value for name, value in settings.items() if name.startswith("save_")}
    assert saved == expected


# --- recipes


def test_a_recipe_reads_back_as_it_was_written(tmp_path: Path) -> None:
    winner = recipe(target_modules=("q_proj", "v_proj"), epochs=2.5)
    (tmp_path / "recipe.json").write_text(json.dumps(winner.to_dict()))
    assert export.read_recipe(tmp_path) == winner


@pytest.mark.parametrize("to", ["trl", "axolotl", "llamafactory", "unsloth"])
def test_a_tool_without_bias_training_says_so_and_is_predicted_without(to: str) -> None:
    made = FORMATS[to](recipe(replace(RUN, method="lora", quant="none", bias="all")))
    assert made.run.bias == "none"
    assert any("has no bias: all is left out" in note for note in made.notes)


def test_a_folder_without_a_winner_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no recipe.json; give the folder of a whichlora"):
        export.read_recipe(tmp_path)
    (tmp_path / "answer.json").write_text('{"winner": null}')
    (tmp_path / "recipe.json").write_text(json.dumps(recipe().to_dict()))  # of an earlier start
    with pytest.raises(ConfigError, match="nothing met the limits of this run"):
        export.read_recipe(tmp_path)


def test_a_run_for_several_gpus_exports_the_winner_of_the_recommended_one(tmp_path: Path) -> None:
    for gpu in ("l4-24gb", "rtx-4090-24gb"):
        (tmp_path / gpu).mkdir()
        (tmp_path / gpu / "recipe.json").write_text(json.dumps(recipe().to_dict()))
    rows = [{"gpu": "l4-24gb", "recommended": False}, {"gpu": "rtx-4090-24gb", "recommended": True}]
    (tmp_path / "answer.json").write_text(json.dumps({"gpus": rows}))
    assert export.folder_of_winner(tmp_path) == tmp_path / "rtx-4090-24gb"
    assert export.folder_of_winner(tmp_path / "l4-24gb") == tmp_path / "l4-24gb"
    assert whichlora("export", str(tmp_path), "--to", "trl").exit_code == 0
    assert (tmp_path / "rtx-4090-24gb" / "trl.yaml").is_file()


@pytest.mark.parametrize("gpus", [[{"gpu": "../x", "recommended": True}], ["x"], 3, None])
def test_an_answer_leads_an_export_to_no_folder_outside_of_its_own(
    tmp_path: Path, gpus: Any
) -> None:
    run, outside = tmp_path / "run", tmp_path / "x"
    for folder in (run, outside):
        folder.mkdir()
    (outside / "recipe.json").write_text(json.dumps(recipe().to_dict()))
    (run / "answer.json").write_text(json.dumps({"gpus": gpus}))
    assert export.folder_of_winner(run) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2, this release reads 1"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"run": {"model": "x", "r": 0}}, "r: must be 1 or more"),
    ],
)
def test_a_broken_recipe_is_refused_with_its_path(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe().to_dict() | change))
    with pytest.raises(DataFileError, match=message) as refusal:
        export.read_recipe(tmp_path)
    assert str(refusal.value).startswith(str(tmp_path / "recipe.json"))


# --- YAML


def test_numbers_and_words_survive_every_yaml_reader() -> None:
    settings = {
        "learning_rate": 2e-05,
        "tiny": 1e-8,
        "half": 0.5,
        "whole": 3.0,
        "no": "no",
        "number": "12",
        "path": "org/model-1.5B",
        "off": False,
        "none": None,
        "list": ["a b", 1, True],
        "maps": [{"x": 1, "y": "no"}, {"x": 2, "y": "#"}],
        "text": "one\ntwo\n",
    }
    text = yaml_text(settings, head="first\n\nsecond")
    assert text.startswith("# first\n#\n# second\nlearning_rate: 2.0e-5\n")
    assert YAML(typ="safe", pure=True).load(text) == settings


# --- the command


def test_the_command_offers_every_format() -> None:
    assert tuple(FORMATS) == command._TOOLS


def test_a_model_with_settings_is_exported(tmp_path: Path) -> None:
    args = (MODEL, "--to", "axolotl", "--gpu", GPU, "--method", "qlora")
    result = whichlora("export", *args, "--output", str(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "axolotl changes prepare_kbit: True to False" in result.stdout
    assert (tmp_path / "axolotl.yaml").is_file()


def test_data_that_is_not_there_is_named(tmp_path: Path) -> None:
    args = ("export", MODEL, "--to", "trl", "--gpu", GPU, "--output", str(tmp_path))
    missing = f"{tmp_path}/train.jsonl is not there; write it before the start: a row a line, with"
    assert missing in " ".join(whichlora(*args).stdout.split())
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    assert "train.jsonl is not there" not in whichlora(*args, "--json").stdout


@pytest.mark.parametrize("to", FORMATS)
def test_the_rows_that_a_tool_reads_go_along_to_another_folder(to: str, tmp_path: Path) -> None:
    run, there = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    (run / "recipe.json").write_text(json.dumps(recipe(validation=True).to_dict()))
    for split in ("train", "validation"):
        (run / f"{split}.jsonl").write_text(json.dumps({"text": split}) + "\n")
    args = ("export", str(run), "--to", to, "--output", str(there), "--json")
    result = whichlora(*args)
    read = ["train.jsonl", *["validation.jsonl"] * (to != "trl")]  # whose file evaluates nothing
    assert sorted(path.name for path in there.glob("*.jsonl")) == read
    for name in read:
        assert (there / name).read_bytes() == (run / name).read_bytes()
    assert "jsonl" not in " ".join(json.loads(result.stdout)["notes"])
    (there / "train.jsonl").write_text('{"text": "mine"}\n')
    notes = json.loads(whichlora(*args).stdout)["notes"]
    stays = f"{there}/train.jsonl was there and stays, with other rows than {run}/train.jsonl"
    assert notes[-1] == stays
    assert "mine" in (there / "train.jsonl").read_text()


def test_every_file_of_rows_that_is_nowhere_is_named(tmp_path: Path) -> None:
    winner = recipe(validation=True)
    for to, missing in (("axolotl", ["train", "validation"]), ("trl", ["train"])):
        notes = export.write_export(winner, to, tmp_path / to, data=tmp_path).export.notes
        assert [note.split(" is not there")[0] for note in notes if "is not there" in note] == [
            f"{tmp_path / to}/{split}.jsonl" for split in missing
        ]


def test_a_run_folder_is_exported_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(json.dumps(recipe().to_dict()))
    result = whichlora("export", str(tmp_path), "--to", "llamafactory", "--json")
    assert result.exit_code == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["schema_version"] == SCHEMA_VERSION
    assert answer["command"] == "llamafactory-cli train llamafactory.yaml"
    assert [Path(path).name for path in answer["files"]] == [
        "llamafactory.yaml",
        "dataset_info.json",
    ]
    assert answer["after"]["memory"]["device_used_bytes"] > 0


def test_what_a_run_leaves_is_enough_to_export_it(tmp_path: Path) -> None:
    plan = {
        "stage1_profile": {"model_names": [MODEL], "prefill_length": 16, "tokens_to_generate": 8},
        "stage2_profile": {"batch_size": [1, 2]},
        "methods": ["qlora"],
        "dataset": {"samples": 100, "tokens": 6000},
        "sequence_length": 64,
        "gpu": GPU,
        "profile": "none",
        "output_dir": str(tmp_path / "run"),
    }
    best = recommend(plan).winner
    assert best is not None
    result = whichlora("export", str(tmp_path / "run"), "--to", "trl")
    assert result.exit_code == 0, result.stderr
    settings = YAML(typ="safe", pure=True).load((tmp_path / "run" / "trl.yaml").read_text())
    assert settings["per_device_train_batch_size"] == best.run.batch_size
    assert settings["lora_r"] == best.run.r


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((MODEL, "--to", "trl", "--gpu", GPU, "--r", "8,16"), "these settings make 2"),
        ((MODEL, "--to", "trl", "--gpu", GPU, "--phase", "inference"), "writes a fine-tuning"),
        ((MODEL, "--to", "trl", "--gpu", GPU, "--seq-len", "max"), "--seq-len: export takes num"),
        (("gpt2", "--to", "trl", "--gpu", GPU), "seq_len: gpt2 looks up 1024 positions; give 1024"),
        ((MODEL, "--to", "torchtune"), "'torchtune' is not one of"),
        ((".", "--to", "trl"), "has no recipe.json"),
        ((".", "--to", "trl", "--batch-size", "2"), "--batch-size: is for a MODEL"),
    ],
)
def test_a_bad_export_gets_one_clear_line(args: tuple[str, ...], message: str) -> None:
    result = whichlora("export", *args)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line


@pytest.mark.parametrize("under", [under_trl, under_axolotl, under_llamafactory, under_unsloth])
def test_a_tool_that_pins_no_attention_kernel_runs_with_sdpa_and_says_so(
    under: Callable[[RunConfig], tuple[RunConfig, tuple[str, ...]]],
) -> None:
    changed, notes = under(replace(RUN, attn="sdpa-efficient"))
    assert changed.attn == "sdpa"
    assert any("pins no kernel of SDPA" in note for note in notes)
    assert not any("kernel of SDPA" in note for note in under(RUN)[1])


def test_pairs_and_labelled_answers_are_written_for_the_command_of_trl(tmp_path: Path) -> None:
    def written(trainer: str, **settings: Any) -> str:
        run = RunConfig(model=MODEL, trainer=trainer, batch_size=2, **settings)
        made = export.write_export(export.make_recipe(run, "a100-sxm-80gb"), "trl", tmp_path)
        assert made.export.command == f"trl {trainer} --config trl.yaml"
        assert made.changes == {}
        return made.paths[0].read_text(encoding="utf-8")

    dpo = written("dpo", trainer_options=(("beta", 0.3),), method="qlora")
    assert "\nbeta: 0.3\ndisable_dropout: true\nlabel_smoothing: 0.0\nloss_type: sigmoid\n" in dpo
    assert "packing" not in dpo
    assert "lora_task_type: SEQ_CLS" in written("reward")
    assert "loss_type: kto" in written("kto")


@pytest.mark.parametrize(
    ("to", "trainer"),
    [("trl", "orpo"), ("unsloth", "orpo"), ("axolotl", "reward"), ("llamafactory", "reward")],
)
def test_trainers_that_a_tool_does_not_run_are_refused(
    to: str, trainer: str, tmp_path: Path
) -> None:
    recipe = export.make_recipe(RunConfig(model=MODEL, trainer=trainer), "a100-sxm-80gb")
    message = f"--to {to}: trainer {trainer} can't be written, it runs transformers.*; use --to"
    with pytest.raises(ConfigError, match=message):
        export.write_export(recipe, to, tmp_path)


@pytest.mark.parametrize(
    ("to", "trainer", "head"),
    [
        ("axolotl", "transformers", "hf"),
        ("llamafactory", "transformers", "hf"),
        ("unsloth", "unsloth", "unsloth-fused"),
    ],
)
def test_the_recipe_of_trl_is_predicted_as_a_tool_with_sft_of_its_own_runs_it(
    to: str, trainer: str, head: str, tmp_path: Path
) -> None:
    """Whose trainer that of `recommend` is."""
    run = RunConfig(model=MODEL, method="qlora", trainer="sft")
    made = export.write_export(export.make_recipe(run, "a100-sxm-80gb"), to, tmp_path)
    assert (made.after.run.trainer, made.after.run.loss_head) == (trainer, head)
    assert made.changes["trainer"] == ("sft", trainer)
    assert any(
        note.endswith(f"trains SFT itself: it is predicted with the steps of trainer {trainer}")
        for note in made.export.notes
    )


SIMPO = (("loss_type", "simpo"),)


@pytest.mark.parametrize(
    ("trainer", "options", "keys"),
    [
        ("dpo", (("beta", 0.3),), ("rl: dpo", "rl_beta: 0.3", "dpo_loss_type:\n  - sigmoid")),
        ("kto", (), ("rl: kto", "rl_beta: 0.1")),
        ("orpo", (), ("rl: orpo",)),
        ("cpo", SIMPO, ("rl: simpo", "cpo_alpha: 1.0")),
    ],
)
def test_axolotl_learns_preferences_with_the_older_trl_that_it_needs(
    trainer: str, options: Any, keys: tuple[str, ...], tmp_path: Path
) -> None:
    run = RunConfig(model=MODEL, trainer=trainer, batch_size=2, trainer_options=options)
    made = export.write_export(export.make_recipe(run, "a100-sxm-80gb"), "axolotl", tmp_path)
    text = made.paths[0].read_text(encoding="utf-8")
    assert all(f"\n{key}\n" in text for key in keys)
    assert "\n    ds_type: json\nval_set_size: 0.0\nskip_prepare_dataset: true\n" in text
    assert made.changes["libraries"] == ({}, {"trl": "1.9.0"})
    assert made.after.memory.peak_allocated_bytes > made.before.memory.peak_allocated_bytes


@pytest.mark.parametrize(
    ("trainer", "options", "keys", "peak_ratio"),
    [
        ("dpo", (("beta", 0.3),), ("stage: dpo", "pref_beta: 0.3", "pref_loss: sigmoid"), 4),
        ("kto", (), ("stage: kto", "pref_beta: 0.1"), 3),
        ("orpo", (), ("stage: dpo", "pref_loss: orpo"), 1),
        ("cpo", SIMPO, ("stage: dpo", "pref_loss: simpo", "pref_ftx: 1.0"), 1),
    ],
)
def test_llamafactory_learns_preferences_by_its_own_trainers(
    trainer: str, options: Any, keys: tuple[str, ...], peak_ratio: int, tmp_path: Path
) -> None:
    run = RunConfig(
        model=MODEL, method="qlora", trainer=trainer, batch_size=2, trainer_options=options
    )
    made = export.write_export(export.make_recipe(run, "a100-sxm-80gb"), "llamafactory", tmp_path)
    text = made.paths[0].read_text(encoding="utf-8")
    assert all(f"\n{key}\n" in text for key in keys)
    data = json.loads(made.paths[1].read_text(encoding="utf-8"))["train"]
    assert data["columns"]["prompt"] == "prompt"
    assert data.get("ranking", False) is (trainer != "kto")
    by = "kto" if trainer == "kto" else "dpo"
    assert made.changes["trainer"] == (trainer, f"llamafactory-{by}")
    before, after = made.before.memory, made.after.memory
    assert after.peak_allocated_bytes > peak_ratio * before.peak_allocated_bytes


@pytest.mark.parametrize(
    ("to", "trainer", "options", "message"),
    [
        ("axolotl", "cpo", (), "its rl: simpo has loss_type simpo, not sigmoid"),
        ("axolotl", "kto", (("precompute_ref_log_probs", True),), "rl: kto has precompute"),
        ("axolotl", "dpo", (("disable_dropout", False),), "rl: dpo has disable_dropout True"),
        ("llamafactory", "cpo", (), "its stage dpo has no loss sigmoid; it has simpo"),
        ("llamafactory", "dpo", (("loss_type", "robust"),), "has no loss robust; it has sigmoid"),
        ("llamafactory", "dpo", (("disable_dropout", False),), "stage dpo turns dropout off"),
    ],
)
def test_what_a_tool_can_not_say_of_preferences_is_refused(
    to: str, trainer: str, options: Any, message: str, tmp_path: Path
) -> None:
    run = RunConfig(model=MODEL, trainer=trainer, batch_size=2, trainer_options=options)
    with pytest.raises(ConfigError, match=f"--to {to}: .*{message}"):
        export.write_export(export.make_recipe(run, "a100-sxm-80gb"), to, tmp_path)


def test_more_gpus_than_a_machine_has_are_exported_over_several(tmp_path: Path) -> None:
    spread = ParallelConfig(strategy="fsdp", gpus=16)
    run = RunConfig(model=MODEL, method="full", parallel=spread)
    written = {to: FORMATS[to](export.make_recipe(run, "h100")) for to in ("slurm", "skypilot")}
    text = "".join(written["slurm"].files.values())
    assert "--nodes=2" in text
    assert "--gpus-per-node=8" in text
    assert "num_nodes: 2" in "".join(written["skypilot"].files.values())


def test_a_rank_takes_its_alpha_along(tmp_path: Path) -> None:
    done = whichlora(
        "export", MODEL, "--gpu", GPU, "--r", "64", "--to", "trl", "--output", str(tmp_path)
    )
    assert done.exit_code == 0, done.output
    assert "lora_alpha: 128" in (tmp_path / "trl.yaml").read_text(encoding="utf-8")


def on_eight(to: str, folder: Path, method: str = "full") -> Any:
    return whichlora(
        *("export", "meta-llama/Llama-3.1-70B", "--gpu", "h100-sxm-80gb", "--gpus", "8"),
        *("--method", method, "--to", to, "--output", str(folder)),
    )


@pytest.mark.parametrize(
    ("to", "taken"),
    [
        ("transformers", "device-map is the only one of 6 that surely fits"),
        ("trl", "fsdp, offload optimizer+params is the fastest of 2 that fit"),
    ],
)
def test_auto_is_the_best_strategy_that_the_tool_can_write(
    to: str, taken: str, tmp_path: Path
) -> None:
    done = on_eight(to, tmp_path)
    assert done.exit_code == 0, done.output
    text = " ".join(done.output.split())
    assert f"{taken}, of those that --to {to} can write" in text


def test_an_estimate_says_what_is_written_instead_of_the_fastest() -> None:
    done = whichlora(
        *("estimate", "meta-llama/Llama-3.1-70B", "--gpu", "8xh100-sxm-80gb", "--method", "full")
    )
    text = " ".join(done.output.split())
    assert "on 8 GPUs: tp is the fastest of 2 that fit" in text
    assert "tp has no key in the Trainer; they take device-map, which fits" in text


def test_a_rented_machine_gets_the_token_of_a_gated_model() -> None:
    gated = FORMATS["skypilot"](recipe(replace(RUN, model="meta-llama/Llama-3.2-1B")))
    task = YAML(typ="safe", pure=True).load(gated.files["sky.yaml"])
    assert task["secrets"] == {"HF_TOKEN": None}
    assert gated.command == "sky launch --secret HF_TOKEN sky.yaml"
    assert any("is gated: accept its terms on the hub" in note for note in gated.notes)
    assert "secrets" not in FORMATS["skypilot"](recipe()).files["sky.yaml"]


@pytest.mark.parametrize(("to", "taken"), [("axolotl", "device-map"), ("llamafactory", "zero3")])
def test_a_tool_that_loads_all_weights_on_each_gpu_needs_room_for_them(
    to: str, taken: str, tmp_path: Path
) -> None:
    asked = (
        *("export", "meta-llama/Llama-3.1-70B", "--gpu", "2x3090", "--method", "qlora"),
        *("--to", to, "--output", str(tmp_path)),
    )
    done = whichlora(*asked)
    text = " ".join(done.output.split())
    assert f"{taken} needs least memory of" in text
    assert "none surely fits" in text
    named = whichlora(*asked, "--parallel", "fsdp", "--offload", "optimizer,params")
    assert named.exit_code != 0
    assert "fsdp loads all weights on each GPU before they are sharded, " in named.output
