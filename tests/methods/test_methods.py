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

from whichlora import methods
from whichlora.errors import ConfigError
from whichlora.methods import Method, get_method, list_methods
from whichlora.methods.base import Method as BaseMethod
from whichlora.predict.resolve import resolve
from whichlora.spec import members
from whichlora.spec.architecture import Linear
from whichlora.spec.run import RunConfig
from whichlora.store.models import find_model

SIZES = st.integers(1, 2**14)


def linear(in_features: int = 64, out_features: int = 96, **rest: Any) -> Linear:
    return Linear(
        name="q_proj", in_features=in_features, out_features=out_features, reads="attn_in", **rest
    )


def test_the_report_knows_five_methods() -> None:
    assert list(list_methods()) == ["full", "lora", "qlora", "dora", "qdora"]


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
    with pytest.raises(ConfigError, match="'vera' is not known; accepted are full, lora, qlora"):
        get_method("vera")


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
    installed.append(Point(foreign("vera")))
    assert get_method("vera").summary == "from elsewhere"


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
    assert list(list_methods()) == ["full", "lora", "qlora", "dora", "qdora"]
