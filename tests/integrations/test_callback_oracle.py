"""The Trainer callback in real trainings on CPU: what it reads, says, measures and refuses."""

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.oracle
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import oracle_trainer as oracle
import torch
from peft import LoraConfig, get_peft_model
from train_runs import run_ranks

from whichlora.calibration.load import model_of, refit
from whichlora.errors import ConfigError
from whichlora.exports.launch import launch_files
from whichlora.integrations.live import read_job
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.measurements import read_measurements
from whichlora.trainers import get_trainer

MEMORY_BAR = 0.06
PLAIN = oracle.CASES[0]


@pytest.fixture(autouse=True)
def _own_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICHLORA_CALIBRATION", str(tmp_path / "calibration"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", oracle.CASES, ids=lambda case: case.name)
def test_the_prediction_before_step_1_is_the_peak_of_the_run(case: oracle.Case) -> None:
    trained = oracle.train(case)
    predicted, measured = trained.memory
    assert predicted == pytest.approx(measured, rel=MEMORY_BAR)
    # it was of the longest batch, and that is the one that was measured
    measurement = trained.callback.measurement
    assert measurement is not None
    assert measurement.run.seq_len == case.seq_len
    assert measurement.step_s
    assert "fits cpu-" in trained.lines[0]
    assert f"{oracle.NUM_STEPS} steps will take" in trained.lines[1]


def test_every_setting_is_read_from_the_live_objects() -> None:
    case = oracle.Case(
        name="all",
        adapter={"r": 4, "lora_alpha": 12, "lora_dropout": 0.1, "use_dora": True},
        load=oracle.NF4,
        args={"gradient_accumulation_steps": 3, "optim": "adafactor"} | oracle.CHECKPOINTING,
    )
    forecast = oracle.train(case).callback.forecast
    assert forecast is not None
    run = forecast.job.run
    assert (run.method, run.quant, run.r, run.lora_alpha) == ("qdora", "nf4-dq", 4, 12)
    assert (run.lora_dropout, run.target_modules) == (0.1, ("all-linear",))
    assert (run.batch_size, run.gradient_accumulation_steps, run.seq_len) == (2, 3, 64)
    assert (run.optimizer, run.precision, run.attn) == ("adafactor", "fp32", "sdpa")
    assert run.gradient_checkpointing
    assert not run.use_reentrant
    assert run.prepare_kbit


def test_rows_of_many_lengths_are_padded_batches_and_their_longest_is_named() -> None:
    case = oracle.CASES[2]
    trained = oracle.train(case)
    forecast = trained.callback.forecast
    assert forecast is not None
    assert forecast.job.run.padding == "padded"
    assert forecast.batches.longest == 64
    assert len(forecast.batches.widths) > 1
    assert sum(forecast.batches.widths.values()) == pytest.approx(oracle.NUM_STEPS)
    (warning,) = [line for line in trained.lines if line.startswith("the longest batch")]
    assert "64 tokens (row 2)" in warning


def test_a_recorded_run_is_an_ordinary_record_that_the_next_prediction_rests_on(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "database"
    trained = oracle.train(PLAIN, record=True, calibration_dir=folder)
    gpu = find_gpu("cpu")
    (record,) = read_measurements([folder], gpu.key)
    assert record == trained.callback.measurement
    assert record.batch_seq_len == (64,) * (oracle.NUM_STEPS - 2)  # not the first, not the counted
    assert record.environment["libraries"]["torch"]
    assert "recorded time and memory" in trained.lines[-1]
    assert model_of(record).num_hidden_layers == 2
    refit(gpu, folder)
    again = oracle.train(PLAIN, calibration_dir=folder).callback.forecast
    assert again is not None
    assert "corrected by 1 run; times fitted to 1 of 1 run on" in again.prediction.basis


def test_nothing_is_recorded_unless_asked(tmp_path: Path) -> None:
    oracle.train(PLAIN, calibration_dir=tmp_path / "database")
    assert not (tmp_path / "database").exists()


def test_training_goes_on_as_if_it_were_not_there() -> None:
    def losses(*callbacks: Any) -> list[float]:
        with tempfile.TemporaryDirectory() as folder, oracle.quiet():
            case = replace(PLAIN, adapter={"r": 8, "lora_dropout": 0.2})  # draws at every step
            trainer = oracle.Trainer(
                model=oracle.load(case, Path(folder)),
                args=oracle.arguments(replace(case, args={"logging_steps": 1}), folder),
                train_dataset=oracle.rows(case),
                data_collator=oracle.pad,
                callbacks=list(callbacks),
            )
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    callback = oracle.WhichLoRACallback(say=lambda line: None)
    assert losses(callback) == losses()
    assert callback.forecast is not None


def two_adapters(model: Any) -> None:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))


def frozen_layer(model: Any) -> None:
    for parameter in model.model.layers[0].parameters():
        parameter.requires_grad = False


def half_frozen_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad = False


class OwnConfig(LoraConfig):
    """Of a variant that only its author knows."""


def own_adapters(model: Any) -> Any:
    return get_peft_model(model, OwnConfig(r=4, target_modules=["q_proj"]))


def narrow_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float16)


FULL = replace(PLAIN, adapter=None)
REFUSED: list[tuple[str, oracle.Case, Any, str]] = [
    ("two adapters", PLAIN, two_adapters, "2 adapters are loaded (default, second)"),
    ("frozen layer", FULL, frozen_layer, "weights are frozen and there is no adapter"),
    ("frozen adapters", PLAIN, half_frozen_adapters, "parameters are trained, its settings"),
    ("own adapters", FULL, own_adapters, "OwnConfig are not modelled"),
    (
        "rank pattern",
        replace(PLAIN, adapter={"rank_pattern": {"q_proj": 4}}),
        None,
        "LoraConfig.rank_pattern={'q_proj': 4} is not modelled",
    ),
    (
        "modules to save",
        replace(PLAIN, adapter={"modules_to_save": ["input_layernorm"]}),
        None,
        "modules_to_save: 'input_layernorm' is neither the token embedding nor the head",
    ),
    (
        "adapters of another dtype",
        replace(PLAIN, dtype=torch.bfloat16, args={"bf16": True}),
        narrow_adapters,
        "float16 adapters under bf16 autocast are not modelled",
    ),
    ("optimizer", replace(PLAIN, args={"optim": "adagrad"}), None, "optim='adagrad'"),
    (
        "label smoothing",
        replace(PLAIN, args={"label_smoothing_factor": 0.1}),
        None,
        "label_smoothing_factor=0.1 is not modelled",
    ),
]


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [row[1:] for row in REFUSED],
    ids=[row[0] for row in REFUSED],
)
def test_what_it_cannot_read_it_says_in_one_line_and_the_training_goes_on(
    case: oracle.Case, change: Any, said: str
) -> None:
    trained = oracle.train(case, change=change)
    assert trained.callback.forecast is None
    assert trained.callback.measurement is None
    (line,) = trained.lines
    assert line.startswith("no prediction: ")
    assert said in line


def packed(batch: list[dict[str, Any]]) -> dict[str, Any]:
    ids = torch.cat([row["input_ids"] for row in batch])[None]
    return {"input_ids": ids, "labels": ids}


def to_multiple_of_16(batch: list[dict[str, Any]]) -> dict[str, Any]:
    made = oracle.pad(batch)
    missing = -made["input_ids"].shape[1] % 16
    return {name: torch.nn.functional.pad(one, (0, missing)) for name, one in made.items()}


def to_96(batch: list[dict[str, Any]]) -> dict[str, Any]:
    made = oracle.pad(batch)
    missing = 96 - made["input_ids"].shape[1]
    return {name: torch.nn.functional.pad(one, (0, missing)) for name, one in made.items()}


def test_joined_rows_are_refused() -> None:
    (line,) = oracle.train(PLAIN, collator=packed).lines
    assert "of shape (1, 128) of 2 rows" in line


@pytest.mark.parametrize(
    ("collator", "longest"), [(to_multiple_of_16, 64), (to_96, 96)], ids=["multiple", "fixed"]
)
def test_the_rule_of_a_collator_is_found_by_asking_it(collator: Any, longest: int) -> None:
    trained = oracle.train(oracle.CASES[2], collator=collator)
    forecast = trained.callback.forecast
    assert forecast is not None
    assert forecast.batches.longest == longest
    assert all(width % 16 == 0 for width in forecast.batches.widths)
    predicted, measured = trained.memory
    assert predicted == pytest.approx(measured, rel=MEMORY_BAR)


def test_a_hub_dataset_is_read_through_its_selection_and_its_format() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": row["input_ids"].tolist()} for row in oracle.rows(oracle.CASES[2])]
    kept = datasets.Dataset.from_list(rows).select(range(3, 23)).with_format("torch")
    forecast = oracle.train(oracle.CASES[2], dataset=kept).callback.forecast
    assert forecast is not None
    lengths = sorted(len(row["input_ids"]) for row in rows[3:23])
    assert (forecast.batches.longest, forecast.batches.median) == (lengths[-1], lengths[10])


def test_an_evaluation_between_steps_is_not_a_step(tmp_path: Path) -> None:
    class Trainer(oracle.Trainer):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            super().__init__(eval_dataset=settings["train_dataset"], **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oracle, "Trainer", Trainer)
        case = replace(PLAIN, args={"eval_strategy": "steps", "eval_steps": 2})
        measurement = oracle.train(case).callback.measurement
    assert measurement is not None
    assert measurement.batch_seq_len == (64,) * (oracle.NUM_STEPS - 2)


def test_a_stream_is_refused() -> None:
    datasets = pytest.importorskip("datasets")
    rows = oracle.rows(PLAIN)
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    (line,) = oracle.train(PLAIN, dataset=stream).lines
    assert "the dataset is a stream" in line


def test_a_fault_of_ours_does_not_end_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **settings: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    monkeypatch.setattr("whichlora.integrations.callback.read_job", broken)
    (line,) = oracle.train(PLAIN).lines
    assert line.startswith("no prediction, by a fault of whichlora: ZeroDivisionError")


def test_importing_whichlora_loads_no_torch_and_no_transformers() -> None:
    code = "import whichlora, whichlora.api, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & {"torch", "transformers", "peft", "accelerate"}


# --- TRL

NF4_BF16 = oracle.NF4 | {"bnb_4bit_compute_dtype": torch.bfloat16}
TRL_CASES = (
    oracle.Case(name="lora fp32", args={"bf16": False}),
    oracle.Case(name="lora bf16", dtype=torch.bfloat16),
    oracle.Case(name="full fp32", adapter=None, args={"bf16": False}),
    oracle.Case(name="qlora", dtype=torch.bfloat16, load=NF4_BF16),
    oracle.Case(
        name="dora, no checkpointing",
        adapter={"use_dora": True},
        args={"bf16": False, "activation_checkpointing": False},
    ),
)


@pytest.mark.parametrize("case", TRL_CASES, ids=lambda case: case.name)
def test_the_sft_trainer_of_trl_is_predicted_with_its_own_loss_head(case: oracle.Case) -> None:
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl beside the profile extra")
    from datasets import Dataset
    from oracle_tokenizer import byte_tokenizer

    lines: list[str] = []
    callback = oracle.WhichLoRACallback(say=lines.append)
    texts = ["x" * (63 if number == 2 else 40) for number in range(24)]  # and one token to end it
    adapter = None
    if case.adapter is not None:
        settings = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"} | case.adapter
        adapter = LoraConfig(**settings)
    with tempfile.TemporaryDirectory() as folder, oracle.quiet():
        bare = replace(case, adapter=None, prepare=False)
        trainer = trl.SFTTrainer(
            model=oracle.load(bare, Path(folder) / "model"),
            args=trl.SFTConfig(
                output_dir=folder,
                max_steps=4,
                per_device_train_batch_size=2,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                train_sampling_strategy="sequential",
                **case.args,
            ),
            train_dataset=Dataset.from_list([{"text": text} for text in texts]),
            processing_class=byte_tokenizer(),
            peft_config=adapter,
            callbacks=[callback],
        )
        trainer.train()
    predicted, measured = oracle.Trained(callback=callback, lines=lines).memory
    assert callback.forecast is not None
    assert callback.forecast.job.run.loss_head == "trl-fused"
    assert predicted == pytest.approx(measured, rel=MEMORY_BAR)


def preferences(name: str) -> list[dict[str, Any]]:
    """Rows of a trainer of TRL, whose third is the longest."""
    texts = ["x" * (40 if number == 2 else 24) for number in range(24)]
    match name:
        case "kto":
            return [
                {"prompt": "y" * 20, "completion": text, "label": bool(number % 2)}
                for number, text in enumerate(texts)
            ]
        case "grpo":
            return [{"prompt": text} for text in texts]
    return [{"prompt": "y" * 20, "chosen": text, "rejected": text[:-4]} for text in texts]


def train_by_trl(
    name: str, *, full: bool = False, load: dict[str, Any] | None = None, **settings: Any
) -> oracle.Trained:
    """A training by the trainer `name`, made as a user's script does."""
    from pkgutil import resolve_name

    from datasets import Dataset
    from oracle_memory import CONFIGS
    from oracle_tokenizer import byte_tokenizer
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        BitsAndBytesConfig,
    )

    trainer = get_trainer(name)
    lines: list[str] = []
    callback = oracle.WhichLoRACallback(say=lines.append)
    further: dict[str, Any] = {}
    if name == "grpo":
        settings |= {"max_completion_length": 16, "num_generations": 2}
        settings["generation_kwargs"] = {"min_new_tokens": 16}
        further["reward_funcs"] = lambda completions, **_: [float(len(c)) for c in completions]
    auto = AutoModelForCausalLM
    config = AutoConfig.for_model("llama", **CONFIGS["llama"])
    if trainer.task:
        auto, config.num_labels, config.pad_token_id = AutoModelForSequenceClassification, 1, 0
    if not full:
        task = "SEQ_CLS" if trainer.task else "CAUSAL_LM"
        further["peft_config"] = LoraConfig(r=8, target_modules="all-linear", task_type=task)
    with tempfile.TemporaryDirectory() as folder, oracle.quiet():
        torch.manual_seed(0)
        auto.from_config(config).save_pretrained(f"{folder}/model")  # a reference is loaded again
        quantised = {"quantization_config": BitsAndBytesConfig(**load)} if load else {}
        dtype = torch.bfloat16 if load else torch.float32
        made = resolve_name(trainer.library_class)(
            model=auto.from_pretrained(f"{folder}/model", dtype=dtype, **quantised),
            args=resolve_name(trainer.config_class)(
                output_dir=folder,
                max_steps=4,
                per_device_train_batch_size=2,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                train_sampling_strategy="sequential",
                **({"bf16": bool(load)} | settings),
            ),
            train_dataset=Dataset.from_list(preferences(name)),
            processing_class=byte_tokenizer(),
            callbacks=[callback],
            **further,
        )
        made.train()
    return oracle.Trained(callback=callback, lines=lines)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["dpo", "kto", "reward", "orpo", "cpo", "grpo"])
def test_a_trainer_of_trl_is_predicted_as_itself(name: str, full: bool) -> None:
    pytest.importorskip("trl", reason="pip install --no-deps trl beside the profile extra")
    trained = train_by_trl(name, full=full)
    forecast, measurement = trained.callback.forecast, trained.callback.measurement
    assert forecast is not None, trained.lines
    assert measurement is not None
    assert forecast.job.run.trainer == name
    assert forecast.batches.longest == (56 if name == "grpo" else 61)  # with the end, or an answer
    # at the batch that was measured, which GRPO draws
    at_it = forecast.at(measurement.run.seq_len, padded=True)
    measured = measurement.peak_allocated_bytes
    assert at_it.memory.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert len(measurement.step_s) == 2  # forwards of a reference are no batches of their own


def test_dpo_on_a_quantised_base_has_narrow_adapters() -> None:
    pytest.importorskip("trl", reason="pip install --no-deps trl beside the profile extra")
    trained = train_by_trl("dpo", load=NF4_BF16, beta=0.3)
    forecast = trained.callback.forecast
    assert forecast is not None, trained.lines
    assert (forecast.job.run.method, forecast.job.run.trainer_option("beta")) == ("qlora", 0.3)
    assert forecast.job.dtypes.adapter_bytes == 2
    predicted, measured = trained.memory
    assert predicted == pytest.approx(measured, rel=MEMORY_BAR)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("dpo", {"padding_free": True}, "padding_free=True of dpo is not modelled"),
        ("dpo", {"loss_type": ["sigmoid", "sft"]}, "loss_type=['sigmoid', 'sft'] is not modelled"),
    ],
)
def test_a_loss_of_trl_that_is_not_modelled_is_said(
    name: str, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trl = pytest.importorskip("trl", reason="pip install --no-deps trl beside the profile extra")
    arguments = trl.DPOConfig(output_dir="x", use_cpu=True, bf16=False, report_to="none")
    for key, value in settings.items():  # some need a GPU's kernels
        monkeypatch.setattr(arguments, key, value)
    with pytest.raises(ConfigError) as error:
        read_job(
            oracle.load(PLAIN, Path("unused")),
            arguments,
            None,
            gpu=find_gpu("cpu"),
            batch_size=2,
            seq_len=64,
            padded=False,
        )
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("parallel", "usual"),
    [
        (ParallelConfig(), "float32"),
        (ParallelConfig(strategy="ddp", gpus=2), "float32"),
        (ParallelConfig(strategy="fsdp", gpus=2), "bfloat16"),
    ],
    ids=lambda value: getattr(value, "strategy", value),
)
def test_adapters_that_an_older_trl_narrows_where_the_base_is_sharded(
    parallel: ParallelConfig, usual: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # TRL 0.24 casts those of QLoRA alone that FSDP or ZeRO-3 divide: `trainers.trl.is_sharded`
    live = "whichlora.integrations.live"
    monkeypatch.setattr(f"{live}.read_trainer", lambda args: get_trainer("sft"))
    monkeypatch.setattr(f"{live}._older_libraries", lambda trainer: (("trl", "0.24"),))
    monkeypatch.setattr(f"{live}._read_options", lambda args, trainer: ())
    monkeypatch.setattr(f"{live}._read_autocast", lambda args: "bf16")
    case = oracle.Case(name="nf4", load=oracle.NF4, dtype=oracle.BF16, prepare=False)
    with oracle.quiet():
        model = oracle.load(case, tmp_path / "model")
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(getattr(torch, usual))
    job = read_job(
        model,
        oracle.arguments(case, str(tmp_path)),
        None,
        gpu=find_gpu("cpu"),
        batch_size=2,
        seq_len=64,
        padded=False,
        parallel=parallel,
    )
    assert job.run.adapter_dtype == "auto"


def test_rows_of_preferences_in_a_trainer_that_is_not_known_are_refused() -> None:
    # those of LLaMA-Factory's stage kto, whose arguments are the Trainer's
    rows = [row | {"kl_input_ids": row["input_ids"]} for row in oracle.rows(PLAIN)]
    (line,) = oracle.train(PLAIN, dataset=rows).lines
    assert "rows with kl_input_ids are those of preferences: its trainer is not known" in line


# --- several GPUs: gloo processes

FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
RANKS: dict[str, tuple[dict[str, Any], str, float]] = {
    "lora, ddp": ({}, "ddp", 0.03),
    "lora, ddp, checkpointing, 2 micro-steps": (
        {"args": {"gradient_accumulation_steps": 2} | oracle.CHECKPOINTING},
        "ddp",
        0.03,
    ),
    "lora, fsdp": ({"args": FSDP}, "fsdp", 0.03),
    # the two ranks differ by 7 %, which is not explained
    "full, fsdp": ({"adapter": None, "args": FSDP}, "fsdp", 0.12),
}


def told_by_ranks(case: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    here = Path(__file__).parent
    script = str(here / "callback_ranks.py")
    arguments = (script, json.dumps({"args": {}} | case), str(folder))
    run_ranks(here.parent / "spread_on_cpu.py", *arguments, world_size=2, logs_folder=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("name", RANKS)
def test_each_rank_compares_itself_and_rank_0_tells(name: str, tmp_path: Path) -> None:
    case, strategy, bar = RANKS[name]
    first, second = told_by_ranks(case, tmp_path)
    for rank in (first, second):
        assert (rank["parallel"]["strategy"], rank["parallel"]["gpus"]) == (strategy, 2)
        assert rank["predicted"] == pytest.approx(rank["measured"], rel=bar)
    assert f"{strategy} on 2 GPUs: fits cpu-" in first["lines"][0]
    assert "the time is not known" in first["lines"][1]  # no links of CPUs are
    assert "largest of 2 ranks: " in first["lines"][-1]
    assert second["lines"] == []


def test_each_rank_compares_itself_under_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed 0.19.8, which is no dependency")
    run = RunConfig(model="m", parallel=ParallelConfig(strategy="zero2", gpus=2))
    (tmp_path / "ds.json").write_text(launch_files(run)["deepspeed.json"])
    settings = {"bf16": True, "deepspeed": str(tmp_path / "ds.json")}
    first, second = told_by_ranks({"dtype": "bfloat16", "args": settings}, tmp_path)
    for rank in (first, second):
        assert rank["parallel"]["strategy"] == "zero2"
        assert rank["predicted"] == pytest.approx(rank["measured"], rel=0.03)


def test_what_no_strategy_models_is_said_once(tmp_path: Path) -> None:
    args = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "NO_WRAP"}}
    first, second = told_by_ranks({"args": args}, tmp_path)
    assert first["lines"] == ["no prediction: fsdp: only TRANSFORMER_BASED_WRAP is modelled"]
    assert second["lines"] == []


def test_a_fault_after_step_1_ends_the_comparison_not_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr("whichlora.profiler.meter.Meter.start_extra_run", fails)
    trained = oracle.train(PLAIN)
    assert trained.lines[-1] == (
        "no comparison, by a fault of whichlora: RuntimeError: no counters; please report it; "
        "the training goes on"
    )
