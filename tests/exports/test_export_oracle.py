"""Exports against the tools' own parsers, and TRL's for real on CPU; see docs/trainers.md."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ruamel.yaml import YAML
from train_runs import run_module, run_script
from written_job import script_of, train_script_of

from whichlora.errors import ConfigError
from whichlora.exports import FORMATS, Recipe
from whichlora.exports.simpler import simpler_row
from whichlora.spec.data_format import DataFormat
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.plan import Keeping
from whichlora.spec.run import RunConfig
from whichlora.workflow import export

pytestmark = pytest.mark.oracle

MODEL = "HuggingFaceTB/SmolLM2-135M"
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {"method": "lora"},
    "qlora": {"method": "qlora", "lora_dropout": 0.05},
    "qdora": {"method": "qdora"},
    "int8": {"method": "lora", "quant": "int8"},
    "full": {"method": "full"},
    "names, no checkpointing": {
        "method": "lora",
        "target_modules": ("q_proj", "v_proj"),
        "gradient_checkpointing": False,
        "optimizer": "adamw_8bit",
        "attn": "eager",
    },
    "head": {"method": "qlora", "modules_to_save": ("embed_tokens", "lm_head")},
    "fp16": {"method": "lora", "precision": "fp16", "gradient_accumulation_steps": 4},
}


SPREAD: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp", "options": (("sync_each_batch", True),)},
    "fsdp, whole after the forward": {
        "strategy": "fsdp",
        "options": (("reshard_after_forward", False),),
    },
    "fsdp 1": {"strategy": "fsdp", "options": (("fsdp_version", "1"),)},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3", "options": (("offload", ("optimizer", "params")),)},
}


def spread_recipe(name: str, **settings: Any) -> Recipe:
    parallel = ParallelConfig(gpus=4, **SPREAD[name])
    return recipe({"method": "lora", "parallel": parallel} | settings)


def recipe(settings: dict[str, Any], **job: Any) -> Recipe:
    run = RunConfig(**({"model": MODEL, "batch_size": 2, "seq_len": 128} | settings))
    return export.make_recipe(run, "l4-24gb", learning_rate=2e-5, **job)


def written(to: str, recipe: Recipe, folder: Path) -> Path:
    for name, text in FORMATS[to](recipe).files.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return folder / next(iter(FORMATS[to](recipe).files))


@pytest.fixture(params=VARIANTS)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]


def test_trl_reads_every_setting(settings: dict[str, Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL beside the profile extra")
    if settings.get("precision") == "fp16":
        pytest.skip("TRL checks for a GPU before it accepts fp16")
    winner = recipe(settings)
    path = written("trl", winner, tmp_path)
    # what the machine has is not what the file says: a CPU refuses bf16
    parser = trl.TrlParser(
        (trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    )
    args = ["--config", str(path), "--use_cpu", "true"]
    _, training, model, data = parser.parse_args_and_config(args)
    run = FORMATS["trl"](winner).run
    assert training.per_device_train_batch_size == run.batch_size
    assert training.max_length == run.seq_len
    assert training.learning_rate == 2e-5
    assert training.optim == run.trainer_optim
    assert training.gradient_checkpointing is run.gradient_checkpointing
    assert training.bf16 is (run.precision == "bf16")
    assert model.load_in_4bit is (run.quant == "nf4-dq")
    assert model.load_in_8bit is (run.quant == "int8")
    assert model.use_dora is (run.method in ("dora", "qdora"))
    assert model.use_peft is (run.method != "full")
    assert data.datasets[0].data_files == "train.jsonl"


def test_axolotl_accepts_every_setting_and_drops_none(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    schemas = pytest.importorskip("axolotl.utils.schemas.config", reason="needs Axolotl")
    path = written("axolotl", recipe(settings), tmp_path)
    values = YAML(typ="safe", pure=True).load(path.read_text())
    config = schemas.AxolotlInputConfig.model_validate(values)
    assert set(values) <= set(schemas.AxolotlInputConfig.model_fields)  # it drops unknown keys
    parsed = config.model_dump()
    for name, value in values.items():
        if not isinstance(value, list | dict):
            assert parsed[name] == value, name


def test_llamafactory_accepts_every_setting(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")  # it pins older libraries than ours
    hparams = pytest.importorskip("llamafactory.hparams", reason="needs LLaMA-Factory")
    omegaconf = pytest.importorskip("omegaconf")
    if settings.get("precision") == "fp16":
        pytest.skip("TrainingArguments check for a GPU before they accept fp16")
    winner = recipe(settings)
    path = written("llamafactory", winner, tmp_path)
    monkeypatch.chdir(tmp_path)
    values = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path))
    # the two settings that it looks for a GPU before accepting
    here = {"use_cpu": True, "pure_bf16": False}
    assert values["pure_bf16"] is (settings["method"] == "full")
    model, data, training, tuning, _ = hparams.get_train_args(values | here)
    run = FORMATS["llamafactory"](winner).run
    assert data.cutoff_len == run.seq_len
    assert data.packing is False
    assert training.learning_rate == 2e-5
    assert isinstance(training.learning_rate, float)
    assert training.per_device_train_batch_size == run.batch_size
    assert settings["method"] == "full" or tuning.lora_rank == run.r
    assert tuning.use_dora is (run.method in ("dora", "qdora"))
    assert model.quantization_bit == {"nf4-dq": 4, "int8": 8}.get(run.quant or "none")
    assert model.use_reentrant_gc is False


PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"trainer": "dpo", "trainer_options": (("beta", 0.3), ("loss_type", "ipo"))},
    "kto": {"trainer": "kto"},
    "orpo": {"trainer": "orpo"},
    "simpo": {"trainer": "cpo", "trainer_options": (("loss_type", "simpo"),)},
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_axolotl_accepts_what_learns_preferences(name: str, tmp_path: Path) -> None:
    schemas = pytest.importorskip("axolotl.utils.schemas.config", reason="needs Axolotl")
    path = written("axolotl", recipe({"method": "qlora"} | PREFERENCES[name]), tmp_path)
    values = YAML(typ="safe", pure=True).load(path.read_text())
    config = schemas.AxolotlInputConfig.model_validate(values)
    assert set(values) <= set(schemas.AxolotlInputConfig.model_fields)
    assert config.rl.value == name
    assert config.rl_beta == (0.3 if name == "dpo" else 0.1)
    assert config.datasets[0].type is None  # TRL gets the rows as they are
    assert config.skip_prepare_dataset is True


@pytest.mark.parametrize("name", PREFERENCES)
def test_llamafactory_reads_what_learns_preferences_and_its_rows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    monkeypatch.setitem(sys.modules, "torchaudio", ModuleType("torchaudio"))
    hparams = pytest.importorskip("llamafactory.hparams", reason="needs LLaMA-Factory")
    omegaconf = pytest.importorskip("omegaconf")
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from oracle_tokenizer import byte_tokenizer

    path = written("llamafactory", recipe({"method": "qlora"} | PREFERENCES[name]), tmp_path)
    row = {"prompt": "one?", "chosen": " two", "rejected": " three"}
    if name == "kto":
        row = {"prompt": "one?", "completion": " two", "label": True}
    lines = json.dumps(row) + "\n" + json.dumps(row | ({"label": False} if name == "kto" else {}))
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    values = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path))
    model, data, training, tuning, _ = hparams.get_train_args(values | {"use_cpu": True})
    assert tuning.stage == ("kto" if name == "kto" else "dpo")
    assert name == "kto" or tuning.pref_loss == ("ipo" if name == "dpo" else name)
    assert tuning.use_ref_model is (name == "dpo")
    tokenizer = byte_tokenizer()
    template = get_template_and_fix_tokenizer(tokenizer, data)
    stage = "kto" if name == "kto" else "rm"  # `run_dpo` asks for rows of `rm`
    (read,) = get_dataset(template, model, data, training, stage, tokenizer=tokenizer).values()
    assert len(read) == 2
    if name == "kto":
        assert read["kto_tags"] == [True, False]
    else:
        assert tokenizer.decode(read[0]["chosen_input_ids"]).startswith("one? two")
        assert tokenizer.decode(read[0]["rejected_input_ids"]).startswith("one? three")


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp, whole after the forward", "fsdp 1"])
def test_trl_reads_what_spreads_a_run(name: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL beside the profile extra")
    if name == "fsdp 1":
        pytest.skip("accelerate looks for a GPU before it accepts FSDP 1")
    path = written("trl", spread_recipe(name), tmp_path)
    parser = trl.TrlParser((trl.ScriptArguments, trl.SFTConfig, trl.ModelConfig))
    args = ["--config", str(path), "--use_cpu", "true"]
    _, training, _ = parser.parse_args_and_config(args, fail_with_unknown_args=False)[:3]
    assert bool(training.fsdp) is (name != "ddp")
    if training.fsdp:
        assert training.fsdp_plugin_args["fsdp_version"] == 2
        assert training.fsdp_plugin_args["reshard_after_forward"] is (name == "fsdp")
    kwargs = training.accelerator_config.gradient_accumulation_kwargs or {}
    assert bool(kwargs.get("sync_each_batch")) is (name == "fsdp")


@pytest.mark.parametrize("name", ["ddp", "fsdp, whole after the forward", "zero2", "zero3"])
def test_axolotl_reads_what_spreads_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = pytest.importorskip("axolotl.utils.schemas.config", reason="needs Axolotl")
    path = written("axolotl", spread_recipe(name), tmp_path)
    monkeypatch.chdir(tmp_path)  # it opens DeepSpeed's file
    values = YAML(typ="safe", pure=True).load(path.read_text())
    assert set(values) <= set(schemas.AxolotlInputConfig.model_fields)
    config = schemas.AxolotlInputConfig.model_validate(values)
    if "fsdp" in name:
        assert config.fsdp_version == 2
        assert config.fsdp_config.reshard_after_forward is False
        assert set(values["fsdp_config"]) <= set(type(config.fsdp_config).model_fields)
    assert config.deepspeed == ("deepspeed.json" if name.startswith("zero") else None)


def test_axolotl_refuses_the_optimizer_that_its_export_refuses(tmp_path: Path) -> None:
    schemas = pytest.importorskip("axolotl.utils.schemas.config", reason="needs Axolotl")
    values = YAML(typ="safe", pure=True).load(
        written("axolotl", spread_recipe("fsdp, whole after the forward"), tmp_path).read_text()
    )
    with pytest.raises(ValueError, match="FSDP2 not compatible with adamw_8bit"):
        schemas.AxolotlInputConfig.model_validate(values | {"optimizer": "adamw_8bit"})
    eight_bit = spread_recipe("fsdp, whole after the forward", optimizer="adamw_8bit")
    with pytest.raises(ConfigError, match="it refuses optimizer adamw_8bit beside FSDP 2"):
        FORMATS["axolotl"](eight_bit)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp 1"])
def test_llamafactory_and_accelerate_read_what_spreads_a_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    hparams = pytest.importorskip("llamafactory.hparams", reason="needs LLaMA-Factory")
    made = FORMATS["llamafactory"](spread_recipe(name))
    path = written("llamafactory", spread_recipe(name), tmp_path)
    monkeypatch.chdir(tmp_path)
    values = YAML(typ="safe", pure=True).load(path.read_text())
    _, _, training, _, _ = hparams.get_train_args(values | {"use_cpu": True})
    kwargs = training.accelerator_config.gradient_accumulation_kwargs or {}
    assert bool(kwargs.get("sync_each_batch")) is (name == "fsdp")
    assert ("accelerate.yaml" in made.files) is (name != "ddp")
    if name == "ddp":
        assert made.command.startswith("FORCE_TORCHRUN=1 OPTIM_TORCH=0 NPROC_PER_NODE=4 ")
        return
    (tmp_path / "env.py").write_text("import os, json; print(json.dumps(dict(os.environ)))")
    file = tmp_path / "accelerate.yaml"
    file.write_text(file.read_text().replace("num_processes: 4", "num_processes: 1"))
    launch = ["-m", "accelerate.commands.launch", "--config_file", file.name, "env.py"]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True)
    variables = json.loads(done.stdout.splitlines()[-1])
    assert variables["FSDP_VERSION"] == ("1" if name == "fsdp 1" else "2")
    # both are what makes LLaMA-Factory take a run for one under FSDP
    assert variables["ACCELERATE_USE_FSDP"] == "true"
    assert variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"


def test_skypilot_accepts_the_task(tmp_path: Path) -> None:
    sky = pytest.importorskip("sky", reason="needs SkyPilot, 72 packages")
    path = written("skypilot", recipe(VARIANTS["qlora"]), tmp_path)
    task = sky.Task.from_yaml_config(YAML(typ="safe", pure=True).load(path.read_text()))
    (resources,) = task.resources
    assert resources.accelerators == {"L4": 1}
    assert task.run == "python train.py\n"


def test_the_script_for_unsloth_is_python_that_uses_what_it_imports(tmp_path: Path) -> None:
    for settings in VARIANTS.values():
        path = written("unsloth", recipe(settings), tmp_path)
        rules = ["ruff", "check", "--isolated", "--select", "F,E9", str(path)]
        done = subprocess.run([sys.executable, "-m", *rules], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("method", "strategy"), [("lora", None), ("qlora", None), ("lora", "ddp"), ("lora", "fsdp")]
)
def test_the_trl_export_trains_on_a_cpu(method: str, strategy: str | None, tmp_path: Path) -> None:
    """Under a strategy in two gloo processes."""
    pytest.importorskip("trl", reason="needs TRL beside the profile extra")
    from oracle_memory import CONFIGS
    from oracle_tokenizer import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    model = tmp_path / "model"
    config = AutoConfig.for_model("llama", **CONFIGS["llama"])
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    byte_tokenizer().save_pretrained(model)
    run = RunConfig(
        model=str(model),
        method=method,
        precision="fp32",
        batch_size=2,
        seq_len=64,
        r=4,
        parallel=ParallelConfig(strategy=strategy, gpus=2) if strategy else ParallelConfig(),
    )
    winner = replace(export.make_recipe(run, "cpu"), epochs=1.0)
    path = written("trl", winner, tmp_path)
    rows = [json.dumps({"text": "word " * (number + 4)}) for number in range(8)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    settings = ("--config", path.name, "--use_cpu", "true")
    program = [str(Path(sys.executable).with_name("trl")), "sft"]
    if strategy:
        *launcher, _, _ = FORMATS["trl"](winner).command.replace("-m trl.scripts.sft ", "").split()
        script = str(Path(find_spec("trl").origin).parent / "scripts" / "sft.py")  # type: ignore
        on_cpu = Path(__file__).parents[1] / "spread_on_cpu.py"
        program = [sys.executable, *launcher[1:], str(on_cpu), script]
    if method == "qlora":  # the program itself starts lora and the strategies
        done = run_module("trl.scripts.sft", *settings, folder=tmp_path)
    else:
        done = subprocess.run(
            [*program, *settings],
            cwd=tmp_path,
            env=dict(os.environ) | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    if strategy:
        spread = {"ddp": "MULTI_CPU", "fsdp": "FSDP"}[strategy]
        assert done.stdout.count(f"distributed_type: {spread}") == 2
    steps = json.loads(
        next((tmp_path / "output-trl").glob("checkpoint-*/trainer_state.json")).read_text()
    )["max_steps"]
    assert steps == (2 if strategy else 4)  # of 8 rows, in batches of 2 on each rank
    saved = json.loads((tmp_path / "output-trl" / "adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"]) == (4, run.lora_alpha)
    leaves = {name.rpartition(".")[2] for name in saved["target_modules"]}
    assert leaves == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


# --- the job against TRL's own trainer, token for token

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
WORDS = ["be", "or not to be", "that is", "the question", "whether", "nobler in the mind"]


def turns(number: int) -> list[dict[str, str]]:
    roles = ("user", "assistant") * (1 + number % 3)
    return [
        {"role": role, "content": WORDS[(number + place) % len(WORDS)]}
        for place, role in enumerate(roles)
    ]


def rows_of(kind: str) -> list[dict[str, Any]]:
    make: dict[str, Callable[[int], dict[str, Any]]] = {
        "text": lambda n: {"text": " ".join(WORDS[: 1 + n % 6])},
        "prompt-completion": lambda n: {"prompt": WORDS[n % 6] + " ", "completion": WORDS[-n % 6]},
        "chat-completion": lambda n: {"prompt": turns(n)[:-1], "completion": turns(n)[-1:]},
        "messages": lambda n: {"messages": turns(n)},
    }
    return [make[kind](number) for number in range(10)]


FORMATS_AGAINST_TRL = {
    "text": (DataFormat(), {}),
    "prompt-completion": (DataFormat(kind="prompt-completion"), {"completion_only_loss": True}),
    "chat-completion": (
        DataFormat(kind="prompt-completion", conversational=True),
        {"completion_only_loss": True},
    ),
    "messages": (DataFormat(kind="messages", conversational=True), {"assistant_only_loss": True}),
}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, UNMARKED], ids=["marked", "unmarked"])
@pytest.mark.parametrize("kind", FORMATS_AGAINST_TRL)
def test_the_job_has_the_labels_and_the_losses_of_trl(
    kind: str, template: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl", reason="needs TRL beside the profile extra")
    from datasets import Dataset
    from oracle_memory import CONFIGS
    from oracle_tokenizer import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    model = tmp_path / "model"
    config = AutoConfig.for_model("llama", **CONFIGS["llama"])
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    data_format, only = FORMATS_AGAINST_TRL[kind]
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # where padding by its token would hide the end
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    run = RunConfig(
        model=str(model),
        method="full",
        precision="fp32",
        batch_size=2,
        seq_len=48,  # cuts some rows
        padding="padded",
    )
    keeping = Keeping(save_steps=100, eval_steps=0)
    source = train_script_of(
        run, target_modules=[], data_format=data_format, learning_rate=1e-3, keeping=keeping
    )
    job = tmp_path / "train.py"
    job.write_text(source.replace("logging_steps=10", "logging_steps=1"))
    rows = rows_of(kind)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_script(job)
    assert done.returncode == 0, done.stderr[-3000:]
    (state,) = (tmp_path / "output").glob("checkpoint-*/trainer_state.json")
    history = json.loads(state.read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]

    script, ours = script_of(job), AutoTokenizer.from_pretrained(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = CHAT_TEMPLATE  # TRL reads turns from the marks alone
    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"),
            max_length=run.seq_len,
            packing=False,
            per_device_train_batch_size=run.batch_size,
            num_train_epochs=1,
            learning_rate=1e-3,
            optim=run.trainer_optim,
            bf16=False,
            seed=0,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            **only,
        ),
    )
    encoded = script.read_rows(tmp_path / "train.jsonl", ours)
    theirs = [
        {name: row[name] for name in ("input_ids", "labels")} for row in trainer.train_dataset
    ]
    assert encoded == theirs
    assert any(tokenizer.eos_token_id in row["labels"] for row in encoded)
    trainer.train()
    expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)


# --- the rows of each kind, as the other tools read them


def exported(
    to: str, kind: str, folder: Path, *, train_on: str = "completions"
) -> tuple[Path, list[dict[str, Any]], list[dict[str, Any]]]:
    """The file of the export, the rows, and what `train.py` makes of them."""
    from oracle_memory import CONFIGS
    from oracle_tokenizer import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    model = folder / "model"
    config = AutoConfig.for_model("llama", **CONFIGS["llama"])
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(model)
    run = RunConfig(model=str(model), method="lora", batch_size=2, seq_len=512)
    recipe = replace(
        export.make_recipe(run, "l4-24gb"),
        data_format=ROW_FORMATS[kind],
        train_on=train_on,
        validation=True,
    )
    for split in ("train", "validation"):
        lines = "".join(json.dumps(row) + "\n" for row in rows_of(kind))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    for tool in ("transformers", to):
        made = FORMATS[tool](recipe)
        for name, text in made.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    rows = rows_of(kind)
    if made.made_of:
        rows = [simpler_row(row) for row in rows]
        for name in made.made_of:
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name).write_text(lines, encoding="utf-8")
    encoded = script_of(folder / "train.py").read_rows(folder / "train.jsonl", tokenizer)
    return folder / next(iter(FORMATS[to](recipe).files)), rows, encoded


ROW_FORMATS = {kind: data_format for kind, (data_format, _) in FORMATS_AGAINST_TRL.items()}


@pytest.mark.parametrize("train_on", ["completions", "all"])
@pytest.mark.parametrize("kind", FORMATS_AGAINST_TRL)
def test_axolotl_makes_the_ids_and_labels_of_the_job(
    kind: str, train_on: str, tmp_path: Path
) -> None:
    schemas = pytest.importorskip("axolotl.utils.schemas.config", reason="needs Axolotl")
    strategies = pytest.importorskip("axolotl.prompt_strategies", reason="needs addict, colorama")
    from axolotl.utils.dict import DictDefault
    from transformers import AutoTokenizer

    path, rows, encoded = exported("axolotl", kind, tmp_path, train_on=train_on)
    values = YAML(typ="safe", pure=True).load(path.read_text())
    config = DictDefault(
        schemas.AxolotlInputConfig.model_validate(values).model_dump(exclude_none=True)
    )
    (data,), (validation,) = config.datasets, config.test_datasets
    assert validation.path == data.path.replace("train", "validation")
    assert validation.split == "train"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    named = data.type
    strategy = (
        strategies.load(named, tokenizer, config, data)
        if isinstance(named, str)
        else strategies.load("user_defined", tokenizer, config, named.to_dict())
    )
    made = []
    for row in rows:
        batch = {"text": [row["text"]]} if kind == "text" else row
        tokenized = strategy.tokenize_prompt(batch)
        columns = {name: tokenized[name] for name in ("input_ids", "labels")}
        made.append({name: ids[0] for name, ids in columns.items()} if kind == "text" else columns)
    assert [row["input_ids"] for row in made] == [row["input_ids"] for row in encoded]
    if train_on == "all" and "messages" in rows[0]:  # all turns, without the words around them
        questions = [turn["content"] for row in rows for turn in row["messages"]]
        learned = [tokenizer.decode([i for i in row["labels"] if i != -100]) for row in made]
        assert all(question in " ".join(learned) for question in questions)
    else:
        assert [row["labels"] for row in made] == [row["labels"] for row in encoded]


@pytest.mark.parametrize("kind", FORMATS_AGAINST_TRL)
@pytest.mark.parametrize("train_on", ["completions", "all"])
def test_llamafactory_makes_the_ids_and_labels_of_the_job(
    kind: str, train_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    monkeypatch.setitem(sys.modules, "torchaudio", ModuleType("torchaudio"))  # no sound in text
    hparams = pytest.importorskip("llamafactory.hparams", reason="needs LLaMA-Factory")
    omegaconf = pytest.importorskip("omegaconf")
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from transformers import AutoTokenizer

    if (kind, train_on) == ("prompt-completion", "all"):
        with pytest.raises(ConfigError, match="can't learn prompts of plain text"):
            exported("llamafactory", kind, tmp_path, train_on=train_on)
        return
    path, rows, encoded = exported("llamafactory", kind, tmp_path, train_on=train_on)
    monkeypatch.chdir(tmp_path)
    values = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.load(path))
    model, data, training, tuning, _ = hparams.get_train_args(values | {"use_cpu": True})
    assert training.eval_strategy == "epoch"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    template = get_template_and_fix_tokenizer(tokenizer, data)
    read = get_dataset(template, model, data, training, tuning.stage, tokenizer=tokenizer)
    assert len(read["eval_dataset"]) == len(rows)
    made = read["train_dataset"]
    if kind == "prompt-completion":  # two line breaks before the end
        breaks = tokenizer("\n\n")["input_ids"]
        for row in encoded:
            row["input_ids"][-1:-1] = row["labels"][-1:-1] = breaks
    assert list(made["input_ids"]) == [row["input_ids"] for row in encoded]
    if kind != "text":  # there its collator makes the labels
        assert list(made["labels"]) == [row["labels"] for row in encoded]


@pytest.mark.parametrize("kind", FORMATS_AGAINST_TRL)
def test_the_script_for_unsloth_trains_on_the_ids_and_labels_of_the_job(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason="needs TRL beside the profile extra")
    path, _, encoded = exported("unsloth", kind, tmp_path)
    (tmp_path / "unsloth.py").write_text(UNSLOTH_ON_A_CPU)
    source = path.read_text().replace("bf16=True", "bf16=False,\n        use_cpu=True")
    columns = "{name: row[name] for name in ('input_ids', 'labels')}"
    seen = ", ".join(f"[{columns} for row in trainer.{split}_dataset]" for split in SPLITS)
    path.write_text(f"{source}\n(HERE / 'seen.json').write_text(json.dumps([{seen}]))\n")
    done = run_script(path, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "seen.json").read_text()) == [encoded, encoded]
    assert (tmp_path / "output-unsloth" / "adapter_config.json").is_file()


SPLITS = ("train", "eval")
UNSLOTH_ON_A_CPU = """\
# Unsloth needs a GPU: its two calls, by what lies below them.
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


class FastLanguageModel:
    def from_pretrained(model_name, **settings):
        return (
            AutoModelForCausalLM.from_pretrained(model_name, dtype="float32"),
            AutoTokenizer.from_pretrained(model_name),
        )

    def get_peft_model(model, r, lora_alpha, target_modules, **settings):
        config = LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules)
        return get_peft_model(model, config)
"""
