"""Which architectures a release knows, beside what its registry says."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from devices import A100

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving import get_engine, sglang, vllm
from whichlora.serving.base import Served
from whichlora.serving.known_models import (
    FOLDER,
    architectures_of,
    check_known,
    known_models,
    known_note,
    release_note,
)
from whichlora.spec.run import RunConfig
from whichlora.spec.versions import Libraries
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.store.models import list_models

ENGINES = ("vllm", "sglang")
FIRST_STARTS = {"vllm": vllm.FIRST_START, "sglang": sglang.FIRST_START}
RUN = RunConfig(model="Qwen/Qwen3-8B", phase="inference", serving="vllm", context=2048)


def served(model: str, engine: str, version: str, **changes: str) -> Served:
    run = replace(RUN, model=model, serving=engine, libraries=((engine, version),), **changes)
    return resolve(load_model(model), run, find_gpu("h100-sxm-80gb")).served


@pytest.mark.parametrize(
    ("model", "engine", "version", "since"),
    [
        ("Qwen/Qwen3-8B", "vllm", "0.5.0", "0.8.4"),
        ("google/gemma-3-1b-pt", "vllm", "0.6.3", "0.8.0"),
        ("openai/gpt-oss-20b", "vllm", "0.8.5", "0.10.1"),
        ("zai-org/GLM-4-9B-0414", "vllm", "0.7.1", "0.8.4"),
        ("zai-org/GLM-4.5-Air", "vllm", "0.9.2", "0.10.0"),
        ("deepseek-ai/DeepSeek-V3", "vllm", "0.6.5", "0.6.6"),
        ("Qwen/Qwen3-8B", "sglang", "0.4.4", "0.4.5.post2"),
        ("openai/gpt-oss-20b", "sglang", "0.5.0", "0.5.1"),
        ("zai-org/GLM-4.5-Air", "sglang", "0.4.8", "0.4.9.post5"),
    ],
)
def test_a_model_is_refused_before_the_first_release_that_knows_it(
    model: str, engine: str, version: str, since: str
) -> None:
    (name,) = architectures_of(load_model(model))
    with pytest.raises(ConfigError) as error:
        served(model, engine, version)
    assert str(error.value) == (
        f"serving: {engine} {version} does not know {name}, {engine} {since} or newer does; give "
        f"libraries {engine}={since}, or leave serving out"
    )
    known, spec = known_models(engine), load_model(model)
    assert known.knows(Libraries.of([(engine, since)]), spec)
    assert not known.knows(Libraries.of([(engine, version)]), spec)


@pytest.mark.parametrize(
    ("model", "version", "since"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "0.6.6", "0.7.2"),
        ("meta-llama/Llama-4-Scout-17B-16E", "0.8.2", "0.8.3"),
    ],
)
def test_a_model_that_sees_is_told_the_first_release_that_is_predicted(
    model: str, version: str, since: str
) -> None:
    with pytest.raises(ConfigError) as error:
        served(model, "vllm", version)
    assert str(error.value).endswith(
        f"vllm {since} or newer does; give libraries vllm=0.10.1, the first that is predicted, or "
        "leave serving out"
    )
    assert served(model, "vllm", "0.10.1")
    with pytest.raises(ConfigError, match=r"give libraries vllm=0\.11\.0, or leave serving out"):
        served("Qwen/Qwen3-VL-8B-Instruct", "vllm", version)


@pytest.mark.parametrize(
    ("model", "engine", "version"),
    [  # the first release itself, with what packages write behind it, and the newest
        ("Qwen/Qwen3-8B", "vllm", "0.8.4"),
        ("Qwen/Qwen3-8B", "vllm", "0.8.5.post1"),
        ("openai/gpt-oss-20b", "vllm", "0.10.1"),
        ("openai/gpt-oss-20b", "vllm", "0.10.1rc1.dev73+gdb7a17ecc"),
        ("openai/gpt-oss-20b", "vllm", "0.33.0"),
        ("zai-org/GLM-4.5-Air", "sglang", "0.4.9"),  # of which a later patch is the first
        ("mosaicml/mpt-7b", "vllm", "0.28.0"),
        ("microsoft/Phi-3.5-MoE-instruct", "vllm", "0.6.1"),  # the hub's name has other capitals
    ],
)
def test_a_release_that_knows_a_model_says_nothing_of_it(
    model: str, engine: str, version: str
) -> None:
    asked = served(model, engine, version)
    check_known(asked)
    assert known_note(asked) == []


@pytest.mark.parametrize(
    ("model", "engine", "version", "message"),
    [
        (
            "mosaicml/mpt-7b",
            "vllm",
            "0.33.0",
            r"MptForCausalLM any more; give libraries vllm=0\.28",
        ),
        ("EleutherAI/gpt-neo-1.3B", "vllm", "0.33.0", r"nor does any release up to 0\.33\.0;"),
        ("tiiuae/falcon-7b", "sglang", "0.5.23", r"nor does any release up to 0\.5\.23;"),
        ("HuggingFaceTB/SmolLM3-3B", "sglang", "0.4.6", r"sglang=0\.4\.7 or newer, which may run"),
    ],
)
def test_what_no_later_release_knows_is_refused(
    model: str, engine: str, version: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        served(model, engine, version)


@pytest.mark.parametrize(
    ("model", "engine", "version", "later"),
    [
        ("Qwen/Qwen3-8B", "vllm", "0.8.3", ", vllm 0.8.4 does"),
        ("HuggingFaceTB/SmolLM3-3B", "sglang", "0.5.23", ""),
    ],
)
def test_a_class_of_transformers_may_do_and_is_told(
    model: str, engine: str, version: str, later: str
) -> None:
    asked = served(model, engine, version)
    (name,) = architectures_of(asked.model)
    (note,) = known_note(asked)
    assert f"no class of its own for {name}{later}: it starts if" in note
    its = get_engine(engine)
    assert its.start is not None
    assert note in its.notes(asked, its.start(asked))


def test_transformers_classes_with_experts_images_or_states_come_later_or_never() -> None:
    vllm = known_models("vllm")
    since = {
        name: vllm.backend_since(load_model(name))
        for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/gemma-3-4b-pt")
    }
    assert list(since.values()) == ["0.7.2", "0.11.1", "0.10.0"]
    assert vllm.backend_since(load_model("Qwen/Qwen3-Next-80B-A3B-Instruct")) is None
    assert vllm.backend_since(load_model("EleutherAI/gpt-neo-1.3B")) is None


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.34.0"), ("sglang", "0.1.5")])
def test_of_a_release_that_was_not_read_nothing_is_refused(engine: str, version: str) -> None:
    check_known(served("EleutherAI/gpt-neo-1.3B", engine, version))


@pytest.mark.parametrize(("gpu", "version"), [("rtx-5090-32gb", "0.8.5"), ("b200-180gb", "0.8.4")])
def test_a_blackwell_needs_wheels_of_cuda_12_8(gpu: str, version: str) -> None:
    model = load_model(RUN.model)
    older = replace(RUN, libraries=(("vllm", version),))
    with pytest.raises(ConfigError, match=r"wheels before 0\.9 have no kernels for compute capab"):
        resolve(model, older, find_gpu(gpu))
    assert resolve(model, replace(RUN, libraries=(("vllm", "0.9.2"),)), find_gpu(gpu)).served
    assert resolve(model, older, A100).served


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_is_in_order(engine: str) -> None:
    kept = json.loads((FOLDER / f"{engine}.json").read_text(encoding="utf-8"))
    known = known_models(engine)
    assert kept["schema_version"] == 1
    assert kept["engine"] == engine
    places = {version: place for place, version in enumerate(known.releases)}
    assert len(places) == len(known.releases) > 99
    assert all(
        not Libraries.of([(engine, later)]).older(engine, earlier)
        for earlier, later in pairwise(known.releases)
    )
    assert len(known.first) == len(kept["first"])
    assert known.last.keys() <= known.first.keys()
    assert all(places[known.first[name]] <= places[last] for name, last in known.last.items())
    assert {*known.first.values(), *known.backend.values()} <= places.keys()


@pytest.mark.parametrize(
    ("engine", "unknown"),
    [
        (
            "vllm",
            {
                "GPTNeoForCausalLM",
                "Gemma3TextModel",
                "MllamaForConditionalGeneration",
                "MptForCausalLM",
            },
        ),
        (
            "sglang",
            {
                *(
                    "BloomForCausalLM",
                    "FalconForCausalLM",
                    "GPTNeoForCausalLM",
                    "Gemma3TextModel",
                    "MptForCausalLM",
                ),
                *("GPTNeoXForCausalLM", "GlmForCausalLM", "NemotronForCausalLM"),
                *("Olmo3ForCausalLM", "SeedOssForCausalLM", "SmolLM3ForCausalLM"),
                *("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"),
                "LlavaNextForConditionalGeneration",
            },
        ),
    ],
)
def test_of_the_database_the_newest_release_knows_all_but_these(
    engine: str, unknown: set[str]
) -> None:
    known = known_models(engine)
    libraries = Libraries.of([(engine, known.releases[-1])])
    models = [load_model(record.hub_id) for record in list_models()]
    texts = [model for model in models if model.task == "causal-lm"]
    assert len(texts) >= 277
    assert {
        name
        for model in texts
        if not known.knows(libraries, model)
        for name in architectures_of(model)
    } == unknown


@pytest.mark.parametrize(
    ("engine", "version", "told"),
    [
        ("vllm", "99", "vllm 99 is newer than 0.33.0, the last that was read: predicted as that"),
        ("sglang", "99", "sglang 99 is newer than 0.5.23, the last that was read: predicted as"),
        ("vllm", "0.2.0", "vllm 0.2.0 is older than 0.2.4, the first with a start to compare"),
        ("sglang", "0.1.16", "sglang 0.1.16 is older than 0.1.17, the first with a start to"),
        ("vllm", "0.33.0", ""),
        ("vllm", "0.2.4", ""),
        ("sglang", "0.5.23", ""),
    ],
)
def test_a_release_beyond_those_that_were_read_is_told(
    engine: str, version: str, told: str
) -> None:
    asked = served("meta-llama/Llama-2-7b-hf", engine, version)
    notes = release_note(asked, first_start=FIRST_STARTS[engine])
    assert [note.startswith(told) for note in notes] == [True] * bool(told)


def test_the_first_start_is_that_of_the_published_ones() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "serving_starts.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for engine, first in FIRST_STARTS.items():
        read = [Libraries.of([(engine, row["version"])]) for row in rows if row["engine"] == engine]
        assert not any(libraries.older(engine, first) for libraries in read)
        assert any(not libraries.newer(engine, first) for libraries in read)
