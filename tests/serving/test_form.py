"""The form in which a model is served: asked of its method, or of the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plan_runs import Silent, write_config

from whichlora.config import load_plan
from whichlora.methods import with_defaults
from whichlora.predict.quantities import forward_features, ledger
from whichlora.predict.resolve import resolve
from whichlora.serving.form import form_in_words, serving_form, serving_run, with_text_alone
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_gpu
from whichlora.store.hub import load_model
from whichlora.workflow import combinations
from whichlora.workflow.session import Session

LLAMA = "meta-llama/Llama-3.1-8B"
INFERENCE = RunConfig(model=LLAMA, phase="inference")


def form_of(method: str, serve: str | None = None, **settings: object) -> str:
    trained = RunConfig(model=LLAMA, method=method, **settings)
    return form_in_words(serving_form(serving_run(INFERENCE, trained, serve)))


@pytest.mark.parametrize(
    ("method", "serve", "words"),
    [
        ("lora", None, "merged 16-bit"),
        ("dora", None, "merged 16-bit"),
        ("full", None, "merged 16-bit"),
        ("qlora", None, "nf4-dq + qlora r=16"),
        ("qdora", None, "nf4-dq + qdora r=16"),
        ("qlora", "merged", "merged 16-bit"),
        ("lora", "as-trained", "16-bit + lora r=16"),
        ("full", "as-trained", "merged 16-bit"),
        ("qlora", "nf4", "merged nf4"),
        ("lora", "gptq-int4", "merged gptq-int4"),
    ],
)
def test_a_method_says_how_its_model_is_served_unless_the_plan_does(
    method: str, serve: str | None, words: str
) -> None:
    assert form_of(method, serve) == words


def test_methods_that_are_served_alike_share_one_stage_1(tmp_path: Path) -> None:
    path = write_config(tmp_path, methods="[full, lora, dora, qlora]")
    path.write_text(path.read_text().replace("ranks: 8", "ranks: [4, 8]"))
    session = Session(load_plan(path), find_gpu("cpu"), Silent(), fresh=True)
    runs = session.space.inference_runs()
    forms = {serving_form(run) for run in runs if run.model == LLAMA or "Smol" in run.model}
    assert {form_in_words(form) for form in forms} == {
        "merged 32-bit",
        "nf4-dq + qlora r=4",
        "nf4-dq + qlora r=8",
    }
    assert len(runs) == len({*runs}) == 3 * 3 * 2  # models, forms, batch sizes
    for run in session.space.finetune_runs():
        assert session.space.form(run) in {session.space.form(one) for one in runs}


def test_a_record_from_before_forms_was_served_merged() -> None:
    old = INFERENCE.to_dict()
    del old["serve"]
    assert with_defaults(RunConfig.from_dict(old | {"method": "qlora"})).serve == "merged"
    assert with_defaults(replace(INFERENCE, method="qlora")).serve == "as-trained"


def test_an_unmerged_adapter_is_held_and_costs_every_token() -> None:
    gpu = find_gpu("rtx-4090-24gb")
    model = load_model(LLAMA)
    base = replace(INFERENCE, quant="nf4-dq", serve="merged")
    runs = {"none": base} | {
        method: replace(base, method=method, serve="as-trained") for method in ("qlora", "qdora")
    }
    jobs = {name: resolve(model, run, gpu) for name, run in runs.items()}
    adapters = {
        name: sum(x.num_bytes for x in ledger(job).moments["decode"] if x.part == "adapters")
        for name, job in jobs.items()
    }
    # 41.9 M parameters at rank 16, in the fp32 that PEFT gives them
    assert adapters["none"] == 0
    assert adapters["qlora"] == pytest.approx(4 * 41.9e6, rel=0.01)
    assert adapters["qdora"] > adapters["qlora"]
    token = {name: forward_features(job, context=512, decoding=True) for name, job in jobs.items()}
    kernels = {name: found["launch"] for name, found in token.items()}
    # of each matrix a clone, a cast, two products, a scale, a cast and a sum
    assert kernels["qlora"] - kernels["none"] == 32 * 7 * 7
    # DoRA expands and sums up every weight for every token
    assert token["qdora"]["dequant"] > 3 * token["qlora"]["dequant"]
    assert token["qdora"]["elementwise"] > 100 * token["qlora"]["elementwise"]


def test_inference_with_a_method_is_a_run_of_its_own_only_where_it_is_served_so() -> None:
    settings = {"model": [LLAMA], "phase": ["inference"], "r": [8, 64]}
    methods = ["lora", "dora", "full", "qlora"]
    runs = [with_defaults(run) for run in combinations.grid(settings | {"method": methods})]
    assert [(run.serve, run.method, run.r) for run in runs] == [
        ("merged", "lora", 16),
        ("as-trained", "qlora", 8),
        ("as-trained", "qlora", 64),
    ]


@pytest.mark.parametrize(
    ("engine", "release", "options"),
    [
        ("vllm", "0.33.0", (("language_model_only", True),)),
        ("vllm", "0.16.0", (("limit_mm_per_prompt", '{"image": 0, "video": 0}'),)),
        ("sglang", "0.5.12", ()),
    ],
)
def test_an_engine_is_told_that_files_are_of_a_text(
    engine: str, release: str, options: tuple[tuple[str, object], ...]
) -> None:
    model = load_model("Qwen/Qwen3.5-4B")
    run = replace(INFERENCE, model=model.name, serving=engine, libraries=((engine, release),))
    assert with_text_alone(run, model).serving_options == options
