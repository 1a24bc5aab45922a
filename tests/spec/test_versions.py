"""Library versions: what differs, and that no version moves nothing."""

import ast
import functools
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from whichlora import estimate
from whichlora.errors import ConfigError
from whichlora.predict.quantities import ledger
from whichlora.predict.resolve import resolve
from whichlora.spec.run import RunConfig, usual_optimizer
from whichlora.spec.versions import FUSED_4BIT_ROWS, Libraries
from whichlora.store.gpus import find_gpu, list_gpus
from whichlora.store.hub import load_model

A100 = find_gpu("a100-sxm-80gb")
QWEN = "Qwen/Qwen2.5-1.5B"
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"


def peak(**settings: object) -> int:
    run = RunConfig(**{"model": QWEN, **settings})  # type: ignore[arg-type]
    return int(ledger(resolve(load_model(run.model), run, A100)).peak_allocated_bytes)


def test_the_current_versions_move_nothing() -> None:
    now = tuple((name, getattr(Libraries(), name)) for name in ("torch", "transformers", "trl"))
    for settings in ({}, {"phase": "inference"}, {"method": "qlora"}):
        assert peak(**settings, libraries=now) == peak(**settings)


@pytest.mark.parametrize(
    ("settings", "libraries"),
    [
        ({"phase": "inference", "prompt_len": 4096}, (("transformers", "4.44.2"),)),
        ({"phase": "inference", "max_new_tokens": 2048}, (("transformers", "4.41.0"),)),
        ({"gradient_checkpointing": False}, (("torch", "2.1.2"),)),
        (
            {"method": "qlora", "use_reentrant": False},
            (("bitsandbytes", "0.43.1"),),
        ),
        ({"batch_size": 2}, (("transformers", "4.49.0"),)),
        (
            {"phase": "inference", "quant": "nf4", "prompt_len": 48, "max_new_tokens": 1},
            (("bitsandbytes", "0.49.2"),),
        ),
    ],
)
def test_old_code_keeps_more(
    settings: dict[str, object], libraries: tuple[tuple[str, str], ...]
) -> None:
    assert peak(**settings, libraries=libraries) > peak(**settings)


def test_experts_that_are_modules_are_quantised() -> None:
    old = peak(model=MIXTRAL, method="qlora", libraries=(("transformers", "4.45.2"),))
    assert old < peak(model=MIXTRAL, method="qlora") / 2


@pytest.mark.parametrize(
    ("release", "value"), [("0.1", 1), ("0.8.9", 1), ("0.9", 2), ("0.10rc1", 3), ("1", 3)]
)
def test_the_value_of_a_release_is_that_of_the_last_change_before_it(
    release: str, value: int
) -> None:
    values = (("0", 1), ("0.9", 2), ("0.10", 3))
    assert Libraries(vllm=release).value_of("vllm", values) == value


def test_a_library_never_reaches_a_release_that_is_not_there() -> None:
    assert Libraries(vllm="0.9.0").reaches("vllm", "0.9")
    assert not Libraries(vllm="0.8.5").reaches("vllm", "0.9")
    assert not Libraries().reaches("vllm", None)


def test_a_release_is_the_same_with_zeros_behind_it() -> None:
    for short, long in (("0.11", "0.11.0"), ("0.11.0", "0.11"), ("5", "5.0.0"), ("0", "0.0")):
        libraries = Libraries(vllm=short)
        assert not libraries.older("vllm", long)
        assert not libraries.newer("vllm", long)
        assert libraries.reaches("vllm", long)
        assert libraries.value_of("vllm", (("0", 1), (long, 2))) == 2
    assert Libraries(vllm="0.11").older("vllm", "0.11.0.1")
    assert Libraries(vllm="0.10").newer("vllm", "0.1")


def test_a_hundred_and_ten_is_newer_than_nine() -> None:
    assert not Libraries(transformers="4.110").older("transformers", "4.9")


@pytest.mark.parametrize(
    "version", ["0.6.4.post1", "0.6.4rc2", "v0.6.4", "0.6.4+cu121", "0.6.4.dev73+gdb7a17ecc"]
)
def test_what_a_package_writes_behind_a_release_moves_nothing(version: str) -> None:
    libraries = Libraries(vllm=version)
    assert libraries.older("vllm", "0.6.5")
    assert not libraries.older("vllm", "0.6.4")


@pytest.mark.parametrize(
    ("libraries", "message"),
    [
        ((("transfomers", "5.0"),), "'transfomers' is not known; did you mean transformers; acc"),
        ((("numpyy", "2.0"),), "'numpyy' is not known; accepted are torch"),
        ((("torch", "nightly"),), "torch='nightly' is no version"),
        ((("torch", ""),), "torch='' is no version"),
        ((("torch", "2.1.post1x"),), "torch='2.1.post1x' is no version"),
        ((("torch", "rc1"),), "torch='rc1' is no version"),
    ],
)
def test_what_is_no_version_is_refused(
    libraries: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(model=QWEN, libraries=libraries)


def test_requirements_may_name_what_changes_nothing() -> None:
    named = (("accelerate", "1.15.0"), ("flash_attn", "2.8.3"), ("numpy", "1.26"))
    assert peak(libraries=named) == peak()
    (prediction,) = estimate(QWEN, gpu="h100-sxm-80gb", libraries=dict(named))
    assert "libraries: no formula asks for the version of flash_attn, numpy" in prediction.notes


def test_gradients_that_torch_1_zeroes_are_there_in_the_next_forward() -> None:
    settings = {"method": "full", "precision": "fp32", "gradient_checkpointing": False}
    settings |= {"model": "google-bert/bert-large-uncased", "task": "sequence-classification"}
    settings |= {"seq_len": 512, "batch_size": 4, "attn": "eager"}
    before, since = ((("torch", version),) for version in ("1.13.1", "2.0.0"))
    gradients = 4 * load_model(str(settings["model"])).num_params
    kept = peak(**settings, libraries=before) - peak(**settings, libraries=since)
    assert kept == pytest.approx(gradients, rel=0.1)
    many = settings | {"gradient_accumulation_steps": 4}
    assert peak(**many, libraries=before) == peak(**many, libraries=since)


def test_accelerate_before_1_11_sends_gradients_of_fsdp_2_after_every_micro_step() -> None:
    settings = {
        "method": "full",
        "gpu": "h100-sxm-80gb",
        "gpus": 4,
        "gradient_accumulation_steps": 4,
    }

    def allocated(**further: Any) -> int:
        (prediction,) = estimate(QWEN, **settings, parallel="fsdp", **further)
        assert prediction.memory is not None
        return prediction.memory.peak_allocated_bytes

    today, synced = allocated(), allocated(sync_each_batch=True)
    assert synced < today
    assert allocated(libraries={"accelerate": "1.10.1"}) == synced
    assert allocated(libraries={"accelerate": "1.11.0"}) == today


def test_a_run_keeps_its_versions_as_json() -> None:
    run = RunConfig(model=QWEN, libraries=(("torch", "2.1.1"), ("transformers", "4.35.2")))
    assert run.to_dict()["libraries"] == {"torch": "2.1.1", "transformers": "4.35.2"}
    assert RunConfig.from_dict(run.to_dict()) == run
    assert RunConfig.from_dict(run.chosen()) == replace(run, serve="merged")


@pytest.mark.parametrize(
    "younger",
    [
        "modules_to_save",
        "base_dtype",
        "adapter_dtype",
        "bias",
        "use_rslora",
        "loraplus_lr_ratio",
        "quant_group_size",
        "expandable_segments",
    ],
)
def test_a_record_that_is_older_than_a_setting_has_its_default(younger: str) -> None:
    run = RunConfig(model=QWEN, batch_size=4)
    older = {name: value for name, value in run.to_dict().items() if name != younger}
    assert len(older) == len(run.to_dict()) - 1
    assert RunConfig.from_dict(older) == run


@pytest.mark.parametrize(
    ("bitsandbytes", "device_kind", "capability", "dtype", "rows"),
    [
        ("0.39.1", "cuda", "8.0", "bf16", 0),
        ("0.40.0", "cuda", "8.0", "bf16", 1),
        ("0.49.2", "cuda", "9.0", "fp16", 1),
        ("0.50.0", "cuda", "8.0", "bf16", 64),
        ("0.50.2", "cuda", "9.0", "bf16", 32),
        ("0.50.2", "cuda", "7.5", "fp16", 128),
        ("0.50.2", "cuda", "7.5", "bf16", 7),
        ("0.50.2", "cuda", "8.0", "fp32", 7),
        ("0.50.2", "cuda", "7.0", "fp16", 7),
        ("0.50.2", "rocm", "gfx1100", "bf16", 8),
        ("0.50.2", "rocm", "gfx942", "bf16", 4),
        ("0.50.2", "cpu", None, "bf16", 0),
        ("0.50.2", "hpu", None, "bf16", 0),
    ],
)
def test_a_4_bit_weight_is_multiplied_as_it_is_stored_up_to_so_many_rows(
    bitsandbytes: str, device_kind: str, capability: str | None, dtype: str, rows: int
) -> None:
    libraries = Libraries(bitsandbytes=bitsandbytes)
    assert libraries.fused_4bit_rows(device_kind, capability, dtype) == rows


@pytest.mark.oracle
@pytest.mark.parametrize("capability", FUSED_4BIT_ROWS)
def test_so_many_rows_are_what_bitsandbytes_chooses(capability: str) -> None:
    """Its choice, read from the source: without CUDA the module can't be imported."""
    package = find_spec("bitsandbytes")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "backends" / "cuda" / "ops.py"
    name = "_gemm_4bit_use_custom_cuda"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    choice = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    multiprocessors = max(
        gpu.num_multiprocessors or 0 for gpu in list_gpus() if gpu.compute_capability == capability
    )
    scope: dict[str, Any] = {
        "functools": functools,
        "torch": import_module("torch"),
        "_GEMM_4BIT_CUSTOM_FLOOR_M": 4,
        "_gpu_dispatch_props": lambda _: (multiprocessors, *map(int, capability.split("."))),
    }
    exec(compile(ast.Module(choice, []), str(path), "exec"), scope)
    fp16 = scope["torch"].float16
    fused = [rows for rows in range(1, 1537) if scope[name](0, fp16, rows, 14336, 4096)]
    assert fused == list(range(1, FUSED_4BIT_ROWS[capability] + 1))


def test_the_usual_optimizer_is_that_of_the_release() -> None:
    for transformers, torch, expected in (
        ("4.31.0", "2.13.0", "adamw_hf"),
        ("4.46.1", "2.13.0", "adamw_torch"),
        ("4.54.0", "2.7.1", "adamw_torch"),
        ("4.54.0", "2.8.0", "adamw_torch_fused"),
    ):
        libraries = {"transformers": transformers, "torch": torch}
        assert usual_optimizer(Libraries(**libraries)) == expected
        asked = {"method": "full", "batch_size": 1, "libraries": libraries}
        (found,) = estimate(QWEN, "a100", **asked)
        assert found.run.optimizer == expected
        (stated,) = estimate(QWEN, "a100", optimizer="adafactor", **asked)
        assert stated.run.optimizer == "adafactor"
    (found,) = estimate(QWEN, "a100", optimizer="adamw_hf", method="full")
    assert found.run.optimizer == "adamw_torch"  # transformers 5 has no other


BERT_LARGE = {"model": "google-bert/bert-large-uncased", "method": "full", "attn": "eager"}
TEXTS = {"task": "sequence-classification", "seq_len": 512, "gradient_checkpointing": False}


def test_older_softmaxes_keep_what_they_read() -> None:
    settings = {**BERT_LARGE, **TEXTS, "precision": "fp32", "optimizer": "adamw_hf"}
    settings["task_options"] = (("num_labels", 2),)
    old, new = (("torch", "1.10.1"),), (("torch", "1.11"),)
    scores = 24 * 16 * 512**2
    assert peak(**settings, libraries=old) - peak(**settings, libraries=new) == pytest.approx(
        4 * scores, rel=0.01
    )
    # an fp32 mask, without which scores have 16 bits under autocast
    before = (("torch", "1.10.1"), ("transformers", "4.57"))
    settings["precision"] = "fp16"
    gained = peak(**settings, libraries=before) - peak(**settings, libraries=old)
    assert gained == pytest.approx(2 * scores, rel=0.05)
