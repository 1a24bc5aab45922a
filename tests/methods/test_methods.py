"""The fine-tuning methods: what each adds to a matrix, and how it is registered."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from devices import A100
from hypothesis import given
from hypothesis import strategies as st
from written_job import train_script_of

from whichlora import methods
from whichlora.errors import ConfigError
from whichlora.exports import FORMATS
from whichlora.memory.checkpoint import checkpoint_bytes
from whichlora.memory.gradients import frozen_outer_bytes, outer_bytes, trained_params
from whichlora.memory.kv_cache import prefix_cache_bytes
from whichlora.memory.step_events import has_events
from whichlora.methods import COMPARED, Method, get_method, list_methods, with_defaults
from whichlora.methods.base import Method as BaseMethod
from whichlora.predict.quantities import ledger, num_trained, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec import members
from whichlora.spec.layer import Linear
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model
from whichlora.workflow.export import make_recipe

SIZES = st.integers(1, 2**14)
SMOL = "HuggingFaceTB/SmolLM2-135M"  # 576 wide, 30 layers, tied


def linear(in_features: int = 64, out_features: int = 96, **rest: Any) -> Linear:
    return Linear(
        name="q_proj", in_features=in_features, out_features=out_features, reads="attn_in", **rest
    )


def test_the_report_compares_five_methods_and_knows_more() -> None:
    known = list(list_methods())
    assert tuple(known[:5]) == COMPARED == ("full", "lora", "qlora", "dora", "qdora")
    assert {"pissa", "olora", "miss", "oft", "c3a", "vera", "ia3"} < set(known)


@given(in_features=SIZES, out_features=SIZES, r=st.integers(1, 512))
def test_lora_trains_two_factors(in_features: int, out_features: int, r: int) -> None:
    added = get_method("lora").adapter_params(linear(in_features, out_features), r)
    assert added == in_features * r + r * out_features


@given(in_features=SIZES, out_features=SIZES, r=st.integers(1, 512))
def test_dora_trains_one_magnitude_per_output_more(
    in_features: int, out_features: int, r: int
) -> None:
    one = linear(in_features, out_features)
    lora, dora = (get_method(name).adapter_params(one, r) for name in ("lora", "dora"))
    assert dora - lora == out_features


@pytest.mark.parametrize(
    ("settings", "magnitude_bytes"),
    [
        ({"adapter_dtype": "bfloat16"}, 2),  # PEFT reads it off the state of the 4-bit weight
        ({"adapter_dtype": "bfloat16", "quant": "int8"}, 4),
        ({"adapter_dtype": "bfloat16", "quant": "none"}, 2),
        ({"loss_head": "trl-fused", "prepare_kbit": False}, 4),  # TRL casts the factors alone
        ({}, 4),
    ],
)
def test_magnitudes_stay_wide_where_fp32_adapters_are_narrowed_later(
    settings: dict[str, Any], magnitude_bytes: int
) -> None:
    run = RunConfig(model="Qwen/Qwen2.5-0.5B", method="qdora", **settings)
    model = find_model(run.model)
    assert model is not None
    job = resolve(model, run, A100)
    factor = job.dtypes.adapter_bytes
    q_proj = linear()
    assert tuple(job.method.adapter_widths(q_proj, job.dtypes)) == (factor, factor, magnitude_bytes)
    added = job.method.adapter_bytes(q_proj, job.dtypes, 8)
    assert added == factor * 8 * (64 + 96) + magnitude_bytes * 96


@pytest.mark.parametrize(("quantised", "plain"), [("qlora", "lora"), ("qdora", "dora")])
def test_a_quantised_method_differs_only_in_what_it_stores(quantised: str, plain: str) -> None:
    ours, other = get_method(quantised), get_method(plain)
    assert (ours.base_quant, other.base_quant) == ("nf4-dq", "none")
    assert ours.forward is other.forward
    assert ours.work is other.work


def test_full_fine_tuning_adds_nothing_and_has_no_adapter() -> None:
    full = get_method("full")
    assert full.trains_base
    assert full.adapter_params(linear(), 16) == 0
    assert not full.peft_class


def test_peft_gets_the_settings_of_the_run() -> None:
    run = RunConfig(model="m", method="dora", r=8, lora_alpha=4, target_modules=("q_proj",))
    assert get_method("dora").peft_config(run) == {
        "r": 8,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_dora": True,
    }


def test_peft_resolves_all_linear_itself() -> None:
    config = get_method("lora").peft_config(RunConfig(model="m"))
    assert config["target_modules"] == "all-linear"


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="'veera' is not known; did you mean vera; accepted are full, lora, qlora"
    ):
        get_method("veera")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("xlora", "it mixes LoRA adapters that were trained"),
        ("poly", "its forward asks for task_ids"),
    ],
)
def test_a_type_of_peft_that_is_not_modelled_is_named_so(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"method: {name} of PEFT is not modelled: {reason}"):
        get_method(name)


@dataclass
class Point:
    """An entry point of an installed package."""

    loaded: object
    value: str = "elsewhere:METHOD"

    def load(self) -> object:
        return self.loaded


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    points: list[Point] = []
    monkeypatch.setattr(members, "entry_points", lambda group: points)
    return points


def foreign(name: str) -> Method:
    return BaseMethod(name=name, summary="from elsewhere", peft_config=lambda run: {})


def test_an_installed_package_brings_its_method(installed: list[Point]) -> None:
    installed.append(Point(foreign("hypernet")))
    assert get_method("hypernet").summary == "from elsewhere"


def test_a_package_cannot_take_a_built_in_name(installed: list[Point]) -> None:
    installed.append(Point(foreign("lora")))
    with pytest.raises(ConfigError, match="method 'lora' exists already"):
        list_methods()


def test_an_entry_point_must_load_a_method(installed: list[Point]) -> None:
    installed.append(Point("a string"))
    with pytest.raises(ConfigError, match="is not a whichlora"):
        list_methods()


def test_a_foreign_method_that_trains_the_base_in_fp16_gets_master_weights(
    installed: list[Point],
) -> None:
    installed.append(Point(replace(get_method("full"), name="badam")))
    model = find_model("HuggingFaceTB/SmolLM2-135M")
    assert model is not None
    run = RunConfig(model=model.name, method="badam", precision="fp16")
    assert resolve(model, run, A100).dtypes.base_bytes == 4


def test_an_installed_package_changes_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: outside\nVersion: 1.0\n", encoding="utf-8")
    point = f"[{methods.ENTRY_POINT_GROUP}]\noutside = nowhere:METHOD\n"
    (info / "entry_points.txt").write_text(point, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "outside" in importlib.metadata.entry_points(group=methods.ENTRY_POINT_GROUP).names
    assert "outside" not in list_methods()


@pytest.mark.parametrize(
    ("method", "options", "fault"),
    [
        ("lora", {"init_lora_weight": "pissa"}, "whose options are init_lora_weights"),
        ("lora", {"init_lora_weights": "svd"}, "'svd' is not accepted; accepted are true"),
        ("qdora", {"r": 4}, "'r' is no option of method qdora, which has none"),
        ("oft", {"oft_block_size": 0}, "0 is not a whole number from 1 on"),
    ],
)
def test_an_option_that_a_method_does_not_have_is_refused(
    method: str, options: dict[str, Any], fault: str
) -> None:
    run = RunConfig(model="m", method=method, method_options=tuple(options.items()))
    with pytest.raises(ConfigError, match=fault):
        with_defaults(run)


def test_an_option_at_its_default_names_no_other_run() -> None:
    stated = RunConfig(model="m", method_options=(("init_lora_weights", "true"),))
    assert with_defaults(stated) == with_defaults(RunConfig(model="m"))


@pytest.mark.parametrize(
    ("name", "start"), [("pissa", "pissa"), ("olora", "olora"), ("lora-ga", "lora_ga")]
)
def test_a_short_name_is_lora_with_that_start(name: str, start: str) -> None:
    stated = RunConfig(model="m", method_options=(("init_lora_weights", start),))
    short = get_method(name).peft_config(RunConfig(model="m"))
    assert short == get_method("lora").peft_config(stated)
    assert short["init_lora_weights"] == start


def test_a_start_changes_loading_and_no_step() -> None:
    model = find_model("HuggingFaceTB/SmolLM2-135M")
    assert model is not None
    plain, started = (
        resolve(model, RunConfig(model=model.name, method=name), A100) for name in ("lora", "pissa")
    )
    assert started.method.forward is plain.method.forward
    one = linear(512, 512)
    assert plain.method.start_bytes([(one, 1)], plain.dtypes, 16) == 0
    # the fp32 weight, its vectors, the product and the residual
    assert started.method.start_bytes([(one, 1)], started.dtypes, 16) == 4 * 5 * 512 * 512


@pytest.mark.parametrize(
    ("model_name", "method", "settings", "fault"),
    [
        ("openai-community/gpt2", "miss", {}, "takes nn.Linear, and no Conv1D"),
        ("openai-community/gpt2", "olora", {}, "takes no Conv1D that is not square"),
        ("HuggingFaceTB/SmolLM2-135M", "c3a", {}, "block_size must divide 576, got 256"),
        ("HuggingFaceTB/SmolLM2-135M", "pissa", {"quant": "nf4"}, "in 16 or 32 bits, not nf4"),
        ("openai-community/gpt2", "beft", {}, "takes nn.Linear, and no Conv1D"),
        ("openai-community/gpt2", "osf", {}, "passes over Conv1D, so that nothing is trained"),
        ("openai-community/gpt2", "psoft", {}, "takes nn.Linear, and no Conv1D"),
        ("openai-community/gpt2", "adamss", {}, "takes nn.Linear, and no Conv1D"),
        ("openai-community/gpt2", "glora", {}, "takes plain nn.Linear alone, not Conv1D"),
        ("openai-community/gpt2", "peanut", {}, "takes nn.Linear, and no Conv1D"),
        ("openai-community/gpt2", "frod", {}, "factors of a Conv1D are not predicted"),
        ("openai-community/gpt2", "supertuning", {}, "takes nn.Linear, and no Conv1D"),
        ("openai-community/gpt2", "kasa", {}, "takes nn.Linear, and no Conv1D"),
        (SMOL, "osf", {"quant": "nf4"}, "the stored weight, which is none in nf4"),
        (SMOL, "psoft", {"quant": "int8"}, "weights of 16 or 32 bits, not int8"),
        (SMOL, "psoft", {"r": 256}, "r must not be above 192, got 256"),
        (SMOL, "deft", {"quant": "nf4"}, "starts R from the stored weight, which is none in nf4"),
        (SMOL, "deft", {"r": 256}, "r must not be above out_features, 192, got 256"),
        (SMOL, "adamss", {"quant": "nf4"}, "the stored weight, which is none in nf4"),
        (SMOL, "adamss", {"r": 256}, "r must not be above 192, got 256"),
        (SMOL, "glora", {"quant": "nf4"}, "not Conv1D or quantised"),
        (SMOL, "peanut", {"quant": "nf4"}, "reads the stored weight, which is none in nf4"),
        (SMOL, "frod", {"quant": "nf4"}, "the stored weight, which is none in nf4"),
        (SMOL, "supertuning", {"quant": "int8"}, "the stored weight, which is none in int8"),
        (SMOL, "kasa", {"quant": "nf4"}, "KaSA is for weights that are not quantised, not nf4"),
        (SMOL, "velora", {"quant": "nf4"}, "VeLoRA is for weights that are not quantised"),
        (SMOL, "osf", {"method_options": (("effective_rank", 1.0),)}, "keeps all 576 directions"),
        (
            SMOL,
            "supertuning",
            {"method_options": (("sparsity", 1.0),)},
            "leave an element to train",
        ),
        ("openai-community/gpt2", "lily", {}, "takes nn.Linear, and no Conv1D"),
        ("HuggingFaceTB/SmolLM2-135M", "lily", {"method_options": (("num_B", 1),)}, "2 or more"),
        ("HuggingFaceTB/SmolLM2-135M", "vblora", {}, "vector_length must divide 576, got 256"),
        ("openai-community/gpt2", "boft", {}, "takes nn.Linear, and no Conv1D"),
        ("HuggingFaceTB/SmolLM2-135M", "boft", {"quant": "nf4"}, "not quantised, not nf4"),
        ("openai-community/gpt2", "waveft", {}, "Conv1D is not predicted"),
        ("HuggingFaceTB/SmolLM2-135M", "tinylora", {"quant": "int8"}, "not quantised, not int8"),
        ("HuggingFaceTB/SmolLM2-135M", "unilora", {"quant": "nf4"}, "makes whole numbers"),
        ("openai-community/gpt2", "hra", {}, "takes nn.Linear, and no Conv1D"),
        (SMOL, "hra", {"quant": "int8"}, "the stored weight, which is none in int8"),
    ],
)
def test_what_peft_cannot_adapt_is_refused_with_its_reason(
    model_name: str, method: str, settings: dict[str, Any], fault: str
) -> None:
    model = find_model(model_name)
    assert model is not None
    with pytest.raises(ConfigError, match=fault):
        resolve(model, RunConfig(model=model.name, method=method, **settings), A100)


def test_a_bias_has_numbers_of_its_own_in_glora() -> None:
    run = RunConfig(model="m", method="glora", r=8)
    method, biased = get_method("glora").of(run), linear(bias=True)
    coupling, scale_and_shift = 8 * (64 + 1), 2
    params = method.adapter_params(linear(), 8) + coupling + scale_and_shift
    assert method.adapter_params(biased, 8) == params


def test_the_gradient_of_osf_is_a_view_of_a_larger_one_where_parameters_are_widened() -> None:
    # which loses the hooks that project gradients, and make new ones of them
    run = {"target_modules": ("q_proj",)}
    wide, narrow = (smol_run("osf", precision=p, **run) for p in ("bf16", "bf16-pure"))
    one = next(li for li in wide.model.groups[0].layer.linears if li.name == "q_proj")
    trained, kept = 288, 4 * 288 * 576
    gradients = wide.method.gradient_bytes(one, wide.dtypes, 16)
    assert gradients - wide.method.adapter_bytes(one, wide.dtypes, 16) == kept
    assert narrow.method.gradient_remainders(one, narrow.dtypes, 16) == 0
    step = training_step(wide)
    assert step.gradients.total == 30 * gradients
    assert step.layers[0].gradients == gradients
    assert num_trained(wide) == 30 * trained * (2 * 576 + 1)


@pytest.mark.parametrize(
    ("method", "options", "num_params"),
    [  # of 64 inputs and 96 outputs at rank 8
        ("miss", {}, 8 * 96),
        ("miss", {"init_weights": "bat"}, 96 * 8),
        ("miss", {"init_weights": "mini", "mini_r": 4}, 8 * 4),
        ("vera", {}, 8 + 96),
        ("ia3", {}, 96),
        ("ia3", {"feedforward_modules": "q_proj"}, 64),
        ("oft", {}, 2 * 32 * 31 // 2),
        ("oft", {"block_share": True}, 32 * 31 // 2),
        ("oft", {"oft_block_size": 30}, 2 * 32 * 31 // 2),  # no divisor: PEFT takes the nearest
        ("c3a", {"block_size": 32}, 64 * 96 // 32),
        ("shira", {}, 8 * (64 + 96)),
        ("loha", {}, 2 * 8 * (64 + 96)),
        ("lokr", {}, 8 * 8 + 12 * 8),  # kron([8, 8], [12, 8]): rank 8 is not low for 12
        ("lokr", {"decompose_factor": 2}, 2 * 2 + 8 * (48 + 32)),
        ("adalora", {"target_r": 4}, 8 * (64 + 1 + 96) + 1),  # `ranknum` is trained, too
        ("hira", {}, 8 * (64 + 96)),
        ("fourierft", {"n_frequency": 300}, 300),
        ("delora", {}, 8 * (64 + 96) + 1),
        ("lily", {"num_B": 4}, 8 * (64 + 4)),  # its B are shared
        ("lily", {"num_B": 4, "stride_A": 2}, 8 * 4),
        ("randlora", {}, 8 * 8 + 8 * 64),  # lambda, and gamma of as many bases as full rank takes
        ("vblora", {"vector_length": 32, "num_vectors": 90}, 8 * (2 + 3) * 90),
        ("boft", {"boft_block_size": 8}, 64 * 8 + 96),
        ("waveft", {"n_frequency": 300}, 300),
        ("pvera", {}, 2 * 8 + 96),
        ("tinylora", {"u": 13}, 13),
        ("tinylora", {"weight_tying": 0.5}, 0),  # layers share them
        ("unilora", {}, 0),  # its vector is shared
        ("road", {}, 96),
        ("road", {"variant": "road_4"}, 4 * 96),
        ("beft", {}, 96),
        ("osf", {}, 32 * (64 + 96 + 1)),
        ("osf", {"effective_rank": 0.75}, 16 * (64 + 96 + 1)),
        ("osf", {"effective_rank": 60.0}, 4 * (64 + 96 + 1)),
        ("psoft", {}, 8 * 7 // 2 + 2 * 8),
        ("psoft", {"psoft_orth": False, "psoft_mag_a": False}, 8 * 8 + 8),
        ("deft", {}, 8 * (64 + 96)),
        ("deft", {"para": True}, 8 * 96),
        ("adamss", {}, 5 * 8 + 96),
        ("adamss", {"num_subspaces": 3, "subspace_rank": 2}, 2 * (3 * 8 + 96)),
        ("glora", {}, 2 * 8 * (64 + 96)),
        ("glora", {"config_A_B": "vector"}, 2 * 96),
        ("glora", {"config_A_B": "constant"}, 2),
        ("peanut", {}, 2 * 8 * 96),
        ("peanut", {"depth": 2}, 2 * 8 * 96 + 4 * 8 * 8),
        ("frod", {}, 64 + 40),
        ("supertuning", {}, 61),
        ("supertuning", {"sparsity": 0.5, "r": 4}, 64 * 48 + 4 * (64 + 96)),
        ("mica", {}, 8 * 64),
        ("kasa", {}, 8 * (64 + 96) + 8),
        ("velora", {}, 8 * (64 + 96)),
        ("hra", {}, 8 * 64),
    ],
)
def test_each_method_trains_as_many_parameters_as_peft_makes(
    method: str, options: dict[str, Any], num_params: int
) -> None:
    run = RunConfig(model="m", method=method, r=8, method_options=tuple(sorted(options.items())))
    assert get_method(method).of(run).adapter_params(linear(), 8) == num_params


def test_tensors_that_layers_share_are_trained_once() -> None:
    model = find_model("HuggingFaceTB/SmolLM2-135M")
    assert model is not None
    targets = ("q_proj", "v_proj")

    def params(**options: int) -> Any:
        pairs = tuple(sorted(options.items()))
        run = RunConfig(model=model.name, method="lily", r=8, method_options=pairs)
        return trained_params(model, targets, get_method("lily").of(run), 8)

    of_b, of_a = 2 * 8 * (576 + 192), 8 * (576 + 576)
    assert params() == of_b + 30 * (of_a + 2 * 8 * 2)
    assert params(stride_A=4) == of_b + 8 * of_a + 30 * 2 * 8 * 2
    run = RunConfig(model=model.name, method="lily")
    job = resolve(model, run, A100)
    assert has_events(training_step(job))  # what they share is little beside the rest
    assert job.peft_targets == job.targets  # not "all-linear", of which PEFT may make full names
    several = replace(run, parallel=ParallelConfig(strategy="ddp", gpus=2))
    with pytest.raises(ConfigError, match="lily is predicted on one GPU, got gpus 2"):
        resolve(model, several, A100)


def test_lora_fa_is_an_optimizer_that_trains_b_alone() -> None:
    run = with_defaults(RunConfig(model="m", method="lora-fa", r=8))
    method = get_method("lora-fa").of(run)
    assert run.optimizer == "lora_fa"
    assert method.adapter_params(linear(), 8) == 96 * 8
    (frozen,) = method.frozen_tensors([(linear(), 2)], 8)
    assert frozen.num_params == 2 * 8 * 64
    with pytest.raises(ConfigError, match="optimizer: lora_fa is method lora-fa, got method lora"):
        with_defaults(RunConfig(model="m", optimizer="lora_fa"))


def test_train_py_hands_the_trainer_the_optimizer_of_lora_fa() -> None:
    run = RunConfig(model="HuggingFaceTB/SmolLM2-135M", method="lora-fa", lora_alpha=8)
    script = train_script_of(run, target_modules="all-linear")
    made = "create_lorafa_optimizer(model, r=16, lora_alpha=8, lr=LEARNING_RATE)"
    assert f"optimizer = {made}" in script
    assert "optimizers=(optimizer, None)" in script
    with pytest.raises(ConfigError, match=r"needs peft\.optimizers\.create_lorafa_optimizer"):
        FORMATS["trl"](make_recipe(run, "a100-sxm-80gb"))


def test_train_py_refuses_a_start_that_reads_batches() -> None:
    run = RunConfig(model="HuggingFaceTB/SmolLM2-135M", method="corda")
    with pytest.raises(ConfigError, match="corda needs preprocess_corda of PEFT"):
        train_script_of(run, target_modules="all-linear")


def smol_run(method: str, **settings: Any) -> ResolvedRun:
    model = find_model(SMOL)
    assert model is not None
    return resolve(model, RunConfig(model=SMOL, method=method, **settings), A100)


@pytest.mark.parametrize(
    ("method", "num_params"),
    [
        ("prompt-tuning", 20 * 576),
        ("p-tuning", 20 * 576 + 3 * 576 * (576 + 1)),
        ("ln-tuning", (2 * 30 + 1) * 576),
        ("trainable-tokens", 576),
    ],
)
def test_what_is_trained_outside_of_linear_layers_is_counted(method: str, num_params: int) -> None:
    assert num_trained(smol_run(method)) == num_params


def test_virtual_tokens_lengthen_the_sequence_of_all_layers() -> None:
    options = (("num_virtual_tokens", 64),)
    job = smol_run("prompt-tuning", seq_len=448, method_options=options)
    step, plain = training_step(job), training_step(smol_run("lora", seq_len=512))
    assert step.seq_len == plain.seq_len
    assert step.loss.backward_bytes == plain.loss.backward_bytes
    with pytest.raises(ConfigError, match="is predicted for decoders"):
        resolve(find_model("google-t5/t5-base"), replace(job.run, model="t5"), A100)


def test_a_prefix_has_keys_and_values_in_every_layer_and_no_checkpointing() -> None:
    job = smol_run("prefix-tuning", seq_len=512, gradient_checkpointing=None)
    assert job.run.gradient_checkpointing is False
    assert num_trained(job) == 20 * 30 * 2 * 3 * 64
    assert training_step(job).seq_len == 512
    # attention reads copies of them, one per query head
    cached = prefix_cache_bytes(job.model, job.dtypes, tokens=2 * 512, span=512)
    assert cached == 2 * (512 + 20) * 30 * 2 * 3 * 64 * 2
    assert not prefix_cache_bytes(job.model, smol_run("lora").dtypes, tokens=512, span=512)
    with pytest.raises(ConfigError, match="true, but prefix-tuning hands layers a cache"):
        smol_run("prefix-tuning", gradient_checkpointing=True)


def test_a_projected_prefix_is_saved_without_what_makes_it() -> None:
    options = (("encoder_hidden_size", 64), ("prefix_projection", True))
    job = smol_run("prefix-tuning", gradient_checkpointing=None, method_options=options)
    keys, prefix = 3 * 64, 30 * 2 * 3 * 64
    assert num_trained(job) == 20 * keys + 64 * (keys + 1) + prefix * (64 + 1)
    in_training = frozen_outer_bytes(job.model, job.method, job.dtypes, training=True)
    assert in_training == 0
    stored = checkpoint_bytes(
        job.model,
        job.dtypes,
        job.method,
        training_step(job).tensors,
        optimizer_name=job.run.optimizer,
    )
    assert stored.tensors == 20 * prefix * 4


def test_the_first_tokens_of_a_cartridge_are_stored_and_not_trained() -> None:
    options = (("num_frozen_tokens", 4), ("num_virtual_tokens", 64))
    job = smol_run("cartridge", gradient_checkpointing=None, method_options=options)
    row, tensors = 30 * 2 * 3 * 64, training_step(job).tensors
    assert num_trained(job) == 60 * row
    assert frozen_outer_bytes(job.model, job.method, job.dtypes) == 4 * 4 * row
    stored = checkpoint_bytes(
        job.model, job.dtypes, job.method, tensors, optimizer_name=job.run.optimizer
    )
    assert stored.tensors == 64 * row * 4
    asked = {"gradient_checkpointing": None, "method_options": (("num_frozen_tokens", 20),)}
    with pytest.raises(ConfigError, match="below num_virtual_tokens, 20, got 20"):
        smol_run("cartridge", **asked)


def test_adaption_prompts_are_in_the_upper_layers_in_the_dtype_of_the_base() -> None:
    options = (("adapter_layers", 12), ("adapter_len", 8))
    job = smol_run("adaption-prompt", method_options=options)
    assert num_trained(job) == 12 * (8 * 576 + 1)
    lower, upper = job.model.groups
    assert (lower.count, upper.count) == (18, 12)
    step = training_step(job)
    assert step.gradients.total == 2 * num_trained(job)
    assert step.layers[0].gradients == 0
    assert step.layers[0].backward < step.layers[1].backward
    for fault, settings in (
        (
            "must not be above the 30 layers of .*, got 31",
            {"method_options": (("adapter_layers", 31),)},
        ),
        ("12 of 30 layers are predicted with gradient", {"gradient_checkpointing": False}),
    ):
        with pytest.raises(ConfigError, match=fault):
            smol_run("adaption-prompt", **({"method_options": options} | settings))


@pytest.mark.parametrize(
    ("model_name", "fault"),
    [
        ("Qwen/Qwen3-0.6B", "adaption-prompt is predicted for llama and mistral, got qwen3"),
        ("mistralai/Mistral-Nemo-Base-2407", "which .* has otherwise"),
    ],
)
def test_adaption_prompts_are_refused_where_peft_has_no_code_for_the_attention(
    model_name: str, fault: str
) -> None:
    model = find_model(model_name)
    assert model is not None
    with pytest.raises(ConfigError, match=fault):
        resolve(model, RunConfig(model=model.name, method="adaption-prompt"), A100)


def test_a_table_that_is_made_in_fp32_is_narrowed_by_name_beside_a_4_bit_base() -> None:
    in_4_bits, plain = (
        smol_run("prompt-tuning", precision="bf16-pure", quant=quant).dtypes
        for quant in ("nf4", "none")
    )
    assert (outer_bytes(in_4_bits), outer_bytes(plain)) == (2, 4)


@pytest.mark.parametrize(
    ("model_name", "fault"),
    [
        ("deepseek-ai/DeepSeek-V2-Lite", "DeepSeek-V2-Lite has layers that take none"),
        ("mosaicml/mpt-7b", "of mpt: PEFT finds no number of heads"),
    ],
)
def test_a_prefix_is_refused_where_peft_has_none_in_the_shape_of_the_layers(
    model_name: str, fault: str
) -> None:
    model = find_model(model_name)
    assert model is not None
    run = RunConfig(model=model.name, method="prefix-tuning", gradient_checkpointing=None)
    with pytest.raises(ConfigError, match=fault):
        resolve(model, run, A100)


def test_a_checkpoint_of_p_tuning_has_no_encoder() -> None:
    job = smol_run("p-tuning")
    tensors = training_step(job).tensors
    stored = checkpoint_bytes(
        job.model, job.dtypes, job.method, tensors, optimizer_name=job.run.optimizer
    )
    assert stored.tensors == 20 * 576 * outer_bytes(job.dtypes)
    assert outer_bytes(job.dtypes) == 4  # PEFT makes it in fp32 beside any base


def test_the_copy_of_a_tied_table_has_a_gradient_of_all_rows() -> None:
    job = smol_run("trainable-tokens")
    moments = ledger(job).moments
    table = 49152 * 576 * 2
    for name in ("table_backward", "head_backward"):
        (gradient,) = (e for e in moments[name] if e.fact.what.startswith("gradient of the copy"))
        assert gradient.num_bytes >= table
    with pytest.raises(ConfigError, match=r"token_indices: '3\+x' is no list of token ids"):
        smol_run("trainable-tokens", method_options=(("token_indices", "3+x"),))


def test_adalora_holds_scores_and_early_gradients_and_is_told_each_step() -> None:
    job = smol_run("adalora")
    step = training_step(job)
    (scores,) = (e for e in step.static if e.fact.what.startswith("scores"))
    assert scores.num_bytes == 3 * step.gradients.total
    assert step.gradients.of_term == step.gradients.total
    script = train_script_of(job.run, target_modules="all-linear")
    assert "model.base_model.update_and_allocate(state.global_step)" in script
    assert "callbacks=[LogAtCheckpoints(), AfterUpdate()]" in script
    with pytest.raises(ConfigError, match="is predicted on one GPU, got gpus 2"):
        smol_run("adalora", parallel=ParallelConfig(strategy="ddp", gpus=2))
    with pytest.raises(ConfigError, match="must be above target_r, 16, got 16"):
        smol_run("adalora", r=16, method_options=(("target_r", 16),))


def test_ln_tuning_takes_names_of_norms() -> None:
    job = smol_run("ln-tuning", target_modules=("input_layernorm",))
    assert job.targets == ("input_layernorm",)
    with pytest.raises(ConfigError, match="'q_proj' is no norm of"):
        smol_run("ln-tuning", target_modules=("q_proj",))


def test_an_adapter_that_peft_lacks_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="method: relora is not in PEFT"):
        get_method("relora")
