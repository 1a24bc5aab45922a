"""The largest models that an engine serves, where nobody names one."""

import pytest
from click.testing import CliRunner, Result

from whichlora import estimate
from whichlora.cli import main
from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving import list_engines
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model
from whichlora.workflow.served_models import MOST_SHOWN, asks_for_models, largest_served


def said(*args: str) -> Result:
    return CliRunner().invoke(main, ["estimate", *args], prog_name="whichlora")


def test_the_largest_start_whole_in_the_widest_weights_that_fit() -> None:
    answers = estimate(serving="llama-cpp", gpu="16GB", context=16_384)
    sizes = [load_model(each.run.model).num_params for each in answers]
    assert 0 < len(answers) <= MOST_SHOWN
    assert sizes == sorted(sizes, reverse=True)
    assert len({each.run.model for each in answers}) == len(answers)
    assert answers[0].notes[0].startswith("the largest of 20 widely used models of ")
    usual = list_engines()["llama-cpp"].usual_quants
    for answer in answers:
        form = str(dict(answer.run.serving_options)["file_type"])
        job = resolve(load_model(answer.run.model), answer.run, find_target("16GB"))
        assert job.engine.start is not None
        assert job.engine.start(job.served).is_whole
        if form != usual[0]:
            wider = usual[usual.index(form) - 1]
            (more,) = estimate(
                answer.run.model, "16GB", serving="llama-cpp", quant=wider, context=16_384
            )
            started = job.engine.start(
                resolve(load_model(more.run.model), more.run, find_target("16GB")).served
            )
            assert not started.is_whole or more.verdict != "fits"


def test_what_is_asked_beside_it_counts() -> None:
    narrow = said("--serving", "vllm", "--gpu", "4090", "--context", "8192")
    assert narrow.exit_code == 0, narrow.output
    assert "merged awq-int4" in narrow.stdout
    wide = estimate(serving="vllm", gpu="4090", quant="none", context=8192)
    assert {each.run.quant for each in wide} == {"none"}
    many = estimate(serving="vllm", gpu="4090", context=8192, concurrency=16)
    assert all(each.serving and each.serving.max_running >= 16 for each in many)
    assert load_model(many[0].run.model).num_params < load_model("Qwen/Qwen3-14B").num_params


def test_nothing_and_too_much_are_one_line() -> None:
    none = said("--serving", "vllm", "--gpu", "4090", "--context", "8192", "--concurrency", "900")
    assert none.exit_code == 1
    assert none.stderr.startswith("no widely used model is served so; give fewer sequences")
    several = said("--serving", "vllm", "--gpu", "4090,3090")
    assert several.exit_code == 2
    assert "gpu: without a model give one, got " in several.stderr
    for serving in ("transformers", "vllm"):
        assert asks_for_models({"model": [], "serving": [serving]}) == (serving == "vllm")
    with pytest.raises(ConfigError, match="serving: without a model give one"):
        largest_served({"model": [], "serving": ["vllm", "sglang"]}, ["4090"])
