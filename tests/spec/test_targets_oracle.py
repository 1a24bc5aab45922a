"""Which layers get an adapter, beside PEFT's own on models of each type, without storage."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from functools import cache

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import match_target_against_key
from small_models import CONFIGS
from transformers.pytorch_utils import Conv1D

from whichlora.errors import ConfigError
from whichlora.families import build
from whichlora.profiler.build import meta_model
from whichlora.spec.module_paths import LINEAR_PATHS
from whichlora.spec.run import RunConfig
from whichlora.spec.targets import PATTERN, resolve_targets

pytestmark = pytest.mark.oracle
PATTERNS = (
    r".*\.(q_proj|v_proj)",
    r".*(query|key|value).*",
    r"model\.layers\.\d+\.self_attn\.(q|k|v|o)_proj",
    r".*\.(self_attn|attention|attn)\..*",
    r".*mlp.*",
    r".*\.layers\.[01]\..*",
    r"^(?!.*lm_head).*proj$",
)


@cache
def linears(family: str) -> tuple[str, ...]:
    model = meta_model(
        RunConfig(model=family, quant="none"),
        {"model_type": family, **CONFIGS[family]},
        device="cpu",
    )
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
    )


def places_by_leaf(family: str) -> dict[str, list[str]]:
    places = defaultdict(list)
    for name in linears(family):
        places[name.rpartition(".")[2]].append(name)
    return places


def of_peft(family: str, targets: list[str] | str) -> set[str]:
    config = LoraConfig(target_modules=targets)
    return {name for name in linears(family) if check_target_module_exists(config, name)}


def check(family: str, asked: str, matched: set[str]) -> None:
    """Ours is what PEFT matches, or is refused where that is a part of the layers of a name."""
    spec = build({"model_type": family, **CONFIGS[family]}, name=family)
    places = places_by_leaf(family)
    leaves = {name.rpartition(".")[2] for name in matched}
    whole = {name for leaf in leaves for name in places[leaf]} == matched
    try:
        ours = set(resolve_targets(spec, (asked,)))
    except ConfigError as error:
        text = str(error)
        assert (not matched) or (not whole) or "not predicted" in text, (family, asked, text)
        return
    assert whole, (family, asked, sorted(matched)[:4])
    assert ours == leaves, (family, asked)


def cases() -> list[str]:
    return sorted(set(CONFIGS) & set(LINEAR_PATHS))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", cases())
def test_names_mean_the_layers_that_peft_adapts(family: str) -> None:
    chosen = random.Random(family)
    names = linears(family)
    suffixes = {".".join(name.split(".")[-parts:]) for name in names for parts in (1, 2, 3)}
    suffixes = {suffix for suffix in suffixes if not any(p.isdecimal() for p in suffix.split("."))}
    leaves = places_by_leaf(family)
    wrong = {f"{parent}.{leaf}" for parent in ("mlp", "attn", "self_attn") for leaf in leaves}
    sample = chosen.sample(sorted(suffixes), min(12, len(suffixes)))
    for asked in sample + chosen.sample(sorted(wrong), min(6, len(wrong))):
        check(family, asked, of_peft(family, [asked]))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("family", cases())
def test_patterns_mean_the_layers_that_peft_adapts(family: str) -> None:
    for pattern in PATTERNS:
        matched = {name for name in linears(family) if match_target_against_key(pattern, name)}
        check(family, PATTERN + pattern, matched)


@pytest.mark.parametrize("family", cases())
def test_the_table_has_the_paths_of_this_transformers(family: str) -> None:
    lines = LINEAR_PATHS[family]
    known = {
        f"{line.partition(': ')[0]}.{leaf}".lstrip(".")
        for line in lines
        for leaf in line.partition(": ")[2].split()
    }
    plain = {re.sub(r"(?<=\.)\d+(?=\.)", "{}", name) for name in linears(family)}
    assert plain <= known, sorted(plain - known)
