"""`--override-tensor`: which matrices lie on the host, and what is refused."""

from __future__ import annotations

import pytest

from whichlora.errors import ConfigError
from whichlora.predict.resolve import resolve
from whichlora.serving.base import Served
from whichlora.serving.llama_cpp import command, notes, start
from whichlora.serving.llama_cpp_memory import placement, taken
from whichlora.serving.llama_cpp_split import Moved
from whichlora.spec.options import OptionValue
from whichlora.spec.run import RunConfig
from whichlora.store.gpus import find_target
from whichlora.store.hub import load_model

EXPERTS, LLAMA = "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B"
GPU = find_target("rtx-4090-24gb")


def served(model: str = EXPERTS, **options: OptionValue) -> Served:
    run = RunConfig(
        model=model,
        phase="inference",
        serving="llama-cpp",
        context=4096,
        serving_options=tuple(sorted({"file_type": "Q8_0", **options}.items())),
    )
    return resolve(load_model(model), run, GPU).served


def bytes_of(asked: Served) -> tuple[int, int]:
    needed = taken(asked, placement(asked), 4096, 1)
    return needed.device, needed.host


@pytest.mark.parametrize(
    "pattern",
    [
        "exps=CPU",
        ".ffn_.*_exps.=CPU",
        r"\.ffn_.*_exps\.weight$=CPU",
        "ffn_(up|down|gate)_exps=CPU",
        "ffn_gate_exps=CPU,ffn_up_exps=CPU,ffn_down_exps=CPU",
        r"blk\.[0-9]+\.ffn_(up|gate|down|gate_up)_(ch|)exps=CPU",
    ],
)
def test_usual_spellings_of_all_experts_are_cpu_moe(pattern: str) -> None:
    assert placement(served(ot=pattern)) == placement(served(cpu_moe=True))
    assert bytes_of(served(ot=pattern)) == bytes_of(served(cpu_moe=True))


def test_experts_of_any_layers_may_lie_on_the_host() -> None:
    asked = served(ot=r"blk\.(1[0-9]|2[0-9])\.ffn_.*_exps=CPU")
    assert placement(asked).moved == tuple(Moved(layer=n, kind="experts") for n in range(10, 30))
    assert bytes_of(asked) == bytes_of(served(n_cpu_moe=20))
    assert not start(asked).untimed


def test_mlps_of_a_dense_model_may_lie_on_the_host() -> None:
    asked = served(LLAMA, override_tensor=r"blk\.(2[0-9]|3[01])\.ffn_.*=CPU")
    assert [each.kind for each in placement(asked).moved] == ["all but attention"] * 12
    host = bytes_of(asked)[1] - bytes_of(served(LLAMA))[1]
    assert host == pytest.approx(12 * 3 * 4096 * 14336 * 34 / 32, rel=0.01)
    assert "the MLPs of 12 of 32 layers lie on the host, far slower" in notes(asked, start(asked))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("ffn_up_exps=CPU", "moves ffn_up_exps of layer 0, which is not predicted"),
        ("output=CPU", "moves output, output_norm outside of layers"),
        ("exps=CUDA0", "is no pattern=CPU"),
        ("exps", "is no pattern=CPU"),
        ("a**=CPU", "'*' is not understood"),
        ("nothing=CPU", "matches no matrix of a layer of Qwen/Qwen3-30B-A3B"),
    ],
)
def test_other_places_are_refused_in_one_line(pattern: str, said: str) -> None:
    with pytest.raises(ConfigError, match="give exps=CPU, another pattern") as error:
        served(ot=pattern)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_two_ways_to_place_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match="n_cpu_moe places experts, too; give one of both"):
        served(ot="exps=CPU", n_cpu_moe=3)


def test_the_command_has_the_pattern_quoted() -> None:
    assert command(served(ot=r"\.ffn_.*_exps=CPU")).endswith(
        r" --override-tensor '\.ffn_.*_exps=CPU'"
    )
