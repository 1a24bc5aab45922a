"""What each method trains, and the bytes of its step, against PEFT on fake tensors; needs torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

import oracle_memory as oracle
import peft
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig
from peft.tuners.lora.config import ArrowConfig, BdLoraConfig, MontecloraConfig
from peft.tuners.shira import layer as shira_layer
from peft.tuners.supertuning import layer as supertuning_layer
from traced import live_bytes
from train_runs import run_script
from written_job import train_script_of

from whichlora import families
from whichlora.errors import ConfigError
from whichlora.memory.gradients import cached_params, trained_params
from whichlora.methods import BUILT_IN, NOT_MODELLED, get_method, with_defaults
from whichlora.predict import quantities
from whichlora.predict import resolve as resolution
from whichlora.profiler.build import finished_model, meta_model
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.tracer.trace import trace

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import method_traces
import trainer_traces

pytestmark = pytest.mark.oracle

GPU = find_gpu("a100-sxm-80gb")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("miss", {}),
    ("miss", {"init_weights": "mini", "mini_r": 4}),
    ("oft", {}),
    ("oft", {"oft_block_size": 16, "num_cayley_neumann_terms": 3}),
    ("c3a", {"block_size": 128}),
    ("vera", {}),
    ("ia3", {}),
    ("ia3", {"feedforward_modules": "down_proj"}),
    ("lora-fa", {}),
    ("loha", {}),
    ("lokr", {}),
    ("lokr", {"decompose_factor": 8, "decompose_both": True}),
    ("adalora", {"tinit": 10}),
    ("trainable-tokens", {"token_indices": "3+7"}),
    ("prompt-tuning", {}),
    ("p-tuning", {"encoder_hidden_size": 256}),
    ("ln-tuning", {}),
    ("hira", {}),
    ("fourierft", {"n_frequency": 200}),
    ("delora", {}),
    ("road", {}),
    ("road", {"variant": "road_4"}),
    ("gralora", {}),
    ("beft", {}),
    ("osf", {}),
    ("osf", {"effective_rank": 0.9}),
    ("psoft", {}),
    ("psoft", {"use_cayley_neumann": True, "psoft_mag_a": False}),
    ("psoft", {"psoft_orth": False}),
    ("deft", {}),
    ("deft", {"decomposition_method": "qr"}),
    ("deft", {"para": True}),
    ("glora", {}),
    ("glora", {"config_A_B": "vector"}),
    ("peanut", {}),
    ("peanut", {"depth": 2, "act_fn": "silu"}),
    ("supertuning", {}),
    ("supertuning", {"r": 8}),
    ("kasa", {}),
    ("velora", {}),
    ("lily", {}),
    ("lily", {"num_B": 4, "stride_A": 2}),
    ("randlora", {}),
    ("vblora", {"vector_length": 64}),
    ("vblora", {"num_vectors": 90, "topk": 3, "vector_length": 128}),
    ("boft", {}),
    ("boft", {"boft_block_size": 32}),
    ("waveft", {"n_frequency": 1000}),
    ("waveft", {"n_frequency": 200, "use_idwt": False}),
    ("pvera", {}),
    ("tinylora", {}),
    ("tinylora", {"u": 13, "weight_tying": 0.6}),
    ("unilora", {}),
    ("hra", {}),
    ("hra", {"apply_GS": True}),
    ("prefix-tuning", {}),
    ("prefix-tuning", {"num_virtual_tokens": 64}),
    ("prefix-tuning", {"prefix_projection": True, "encoder_hidden_size": 256}),
    ("cartridge", {}),
    ("cartridge", {"num_virtual_tokens": 64, "num_frozen_tokens": 0}),
    ("adaption-prompt", {"adapter_layers": 4}),
    ("adaption-prompt", {"adapter_layers": 4, "adapter_len": 32}),
    ("pissa", {}),
]
READ_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("shira", {}),
    ("adamss", {}),
    ("frod", {}),
    ("mica", {}),
    ("kasa", {}),
]
ANOTHER = {"pissa", "mica", "lora-fa"}  # a config of lora says the same
CONFIGS = [(name, options) for name, options in [*METHODS, *READ_VALUES] if name not in ANOTHER]
CPU_RUNS = [*METHODS, *READ_VALUES[:-1], ("miss", {"init_weights": "bat"}), ("olora", {})]
OF_LATER = [seed for seed in method_traces.LATER if seed >= 2000]
STACKS: list[dict[str, Any]] = [
    {},
    {"gradient_checkpointing": False},
    {"gradient_checkpointing": False, "lora_dropout": 0.1},
    {"gradient_checkpointing": False, "precision": "bf16-no-autocast"},
    {"gradient_checkpointing": False, "precision": "fp32"},
    {"gradient_checkpointing": False, "quant": "nf4-dq"},
]


@pytest.fixture(autouse=True)
def _layers_of_other_tests_are_freed() -> Iterator[None]:
    """PEFT's warning of hooks remembers every layer that these methods ever adapted."""
    yield
    for module in (shira_layer, supertuning_layer):
        module._warn_once_about_module_hooks.cache_clear()


def run_of(method: str, options: dict[str, Any], **settings: Any) -> RunConfig:
    checkpoints = get_method(method).checkpoints
    usual = {"seq_len": 256, "expandable_segments": True, "gradient_checkpointing": checkpoints}
    settings = usual | settings  # no remainders
    return RunConfig(
        model="x", method=method, method_options=tuple(sorted(options.items())), **settings
    )


def test_every_type_of_peft_is_modelled_or_named_as_not() -> None:
    classes = {method.peft_class for method in BUILT_IN.values()}
    missing = {
        str(kind.value)
        for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
        if f"peft.{config.__name__}" not in classes
    }
    assert missing == {name.upper().replace("-", "_") for name in NOT_MODELLED}


# whose config is LoRA's, takes names of norms, or states a rank of its own
READ_OTHERWISE = ("lora-fa", "pissa", "ln-tuning", "adalora")


@pytest.mark.parametrize(
    ("method", "options"), [case for case in METHODS if case[0] not in READ_OTHERWISE], ids=str
)
def test_a_config_of_peft_is_read_as_what_it_was_made_of(
    method: str, options: dict[str, Any]
) -> None:
    run = with_defaults(run_of(method, options, r=4))
    found = get_method(method).of(run)
    config = getattr(peft, found.peft_class.removeprefix("peft."))(**found.peft_config(run))
    settings = found.read_peft(config)
    assert settings is not None
    stated = dict(settings).get("method_options", run.method_options)
    assert stated == run.method_options
    assert dict(settings).get("r", 4) == 4


@pytest.mark.parametrize(("method", "options"), METHODS, ids=str)
def test_peft_trains_as_many_parameters(method: str, options: dict[str, Any]) -> None:
    run = run_of(method, options, precision="fp32", seq_len=16)
    job = resolution.resolve(families.build(LLAMA, name="x"), run, GPU)
    expected = trained_params(job.model, job.targets, job.method, job.run.r)
    # on the meta device, where no start is computed
    model = meta_model(job.run, LLAMA, device="cpu")
    if method == "lora-fa":  # the optimizer freezes A
        return
    if method == "pissa":
        assert cached_params(job.model, job.targets, job.method, job.run.r) == expected
        return
    wrapped = finished_model(model, job.run, job.peft_targets)
    trained = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    assert trained == expected


@pytest.mark.parametrize(("method", "options"), CONFIGS, ids=str)
def test_the_config_that_a_run_gives_peft_is_read_as_that_run(
    method: str, options: dict[str, Any]
) -> None:
    run = run_of(method, options, target_modules=("q_proj", "down_proj"), lora_dropout=0.1)
    described = get_method(method)
    config = resolve_name(described.peft_class)(**described.peft_config(run))
    settings = dict(described.read_peft(config) or {})
    assert options.items() <= dict(settings.pop("method_options", ())).items()
    for name, value in settings.items():
        if name not in described.ignores and name != "target_modules":
            assert getattr(run, name) == value, name


@pytest.mark.parametrize(
    "variant",
    [
        {"use_qalora": True},
        {"use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"])},
        {"monteclora_config": MontecloraConfig()},
        {"arrow_config": ArrowConfig()},
        {"alora_invocation_tokens": [3, 4]},
    ],
    ids=str,
)
def test_a_variant_of_lora_with_other_operators_is_not_read_as_lora(variant: Any) -> None:
    config = LoraConfig(target_modules=["q_proj"], **variant)
    with pytest.raises(ConfigError, match=rf"LoraConfig\.{next(iter(variant))}=.* is not modelled"):
        get_method("lora").read_peft(config)


@pytest.mark.parametrize(("method", "options"), READ_VALUES, ids=str)
def test_peft_trains_as_many_parameters_where_values_are_read(
    method: str, options: dict[str, Any]
) -> None:
    size = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    one = oracle.case("llama", config=size | {"num_key_value_heads": 2}, method=method)
    job = oracle.job_of(one)
    trained = sum(p.numel() for p in oracle.load(one).parameters() if p.requires_grad)
    assert trained == trained_params(job.model, job.targets, job.method, job.run.r)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("settings", STACKS, ids=str)
@pytest.mark.parametrize(("method", "options"), METHODS[:-1], ids=str)
def test_the_ledger_agrees_with_the_trace(
    method: str, options: dict[str, Any], settings: dict[str, Any]
) -> None:
    if method == "adalora" and settings.get("precision") == "fp32":
        pytest.skip("a trace moves no tensor to a device, which makes one of its own trained")
    run = run_of(method, options, **settings)
    try:
        job = resolution.resolve(families.build(LLAMA, name="x"), run, GPU)
    except ConfigError:
        assert "quant" in settings
        pytest.skip("refused")
    found = quantities.ledger(job)
    events = trace(
        job.run,
        LLAMA,
        target_modules=job.peft_targets,
        compute_capability=GPU.compute_capability,
    )
    traced = max(num_bytes for _, num_bytes in live_bytes(events))
    predicted = int(found.peak_allocated_bytes) - found.workspace_bytes
    assert predicted == pytest.approx(traced, rel=0.012)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", [*range(390, 404), *range(1000, 2000, 100), *OF_LATER])
def test_a_run_drawn_anew_is_traced_as_predicted(seed: int) -> None:
    line, _ = method_traces.draw(seed)
    assert trainer_traces.predicted(line) == pytest.approx(trainer_traces.traced(line), rel=0.02)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("method", "options"), CPU_RUNS, ids=str)
def test_a_real_step_on_a_cpu_takes_the_predicted_bytes(
    method: str, options: dict[str, Any]
) -> None:
    sizes = {"c3a": {"block_size": 32}, "vblora": {"vector_length": 32}}  # that fit the model
    stated = options | sizes.get(method, {})
    size = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    one = oracle.case(
        "llama", config=size | heads, method=method, method_options=tuple(sorted(stated.items()))
    )
    assert oracle.predicted_peak(one) == pytest.approx(oracle.step_peak(one), rel=0.01)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("method", "options"), CPU_RUNS, ids=str)
def test_train_py_trains_it(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    sizes = {
        "c3a": {"block_size": 16},
        "road": {"group_size": 16},
        "vblora": {"vector_length": 16},
    }  # that fit the small model
    stated = options | sizes.get(method, {})
    run = run_of(method, stated, padding="padded", seq_len=32, batch_size=2, precision="fp32", r=4)
    config = LLAMA | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 128}
    path = tmp_path / "train.py"
    targets = resolution.resolve(families.build(config, name="x"), run, GPU).peft_targets
    path.write_text(
        train_script_of(
            run, target_modules=targets, weights="random", model_config=config, epochs=0.5
        )
    )
    rows = "".join(json.dumps({"text": "to be or not to be"}) + "\n" for _ in range(4))
    (tmp_path / "train.jsonl").write_text(rows)
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "output" / "result.json").read_text())
