"""What an exporter writes, an importer reads: the same bytes and the same time."""

import random
from pathlib import Path
from typing import Any

import pytest

from whichlora.errors import ConfigError
from whichlora.exports import FORMATS, Export
from whichlora.methods import BUILT_IN
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.workflow import combinations, estimates, export
from whichlora.workflow.from_files import with_files

MODEL = "HuggingFaceTB/SmolLM2-135M"
GPU = "h100-sxm-80gb"
TOOLS = ("axolotl", "llamafactory", "trl", "transformers")
DRAWS = 40
PRECISIONS = ("bf16", "bf16", "bf16-no-autocast", "bf16-pure", "fp16", "fp32", "tf32")
STRATEGIES: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("ddp", ()),
    ("fsdp", ()),
    ("fsdp", (("reshard_after_forward", False),)),
    ("fsdp", (("fsdp_version", "1"), ("backward_prefetch", "BACKWARD_PRE"))),
    ("fsdp", (("sync_each_batch", True),)),
    ("fsdp", (("offload", ("optimizer", "params")),)),
    ("zero1", ()),
    ("zero2", (("offload", ("optimizer",)),)),
    ("zero3", (("offload", ("optimizer", "params")),)),
    ("zero3", (("stage3_param_persistence_threshold", 1000),)),
)


def drawn_run(draw: random.Random) -> RunConfig:
    method = draw.choice(["full", "lora", "qlora", "dora", "qdora"])
    spread = {}
    if draw.random() < 0.5:
        strategy, options = draw.choice(STRATEGIES)
        nodes = draw.choice([1, 1, 2])
        spread = {
            "parallel": ParallelConfig(
                strategy=strategy, gpus=4, nodes=nodes, options=tuple(sorted(options))
            )
        }
    quant = draw.choice([None, "int8", "fp4", "nf4"]) if method in ("lora", "qlora") else None
    return RunConfig(
        model=MODEL,
        method=method,
        quant=quant,
        batch_size=draw.choice([1, 3, 8]),
        seq_len=draw.choice([512, 1000, 2048]),
        r=draw.choice([4, 16, 64]),
        lora_alpha=draw.choice([8, 32]),
        lora_dropout=draw.choice([0.0, 0.05]),
        target_modules=draw.choice([("all-linear",), ("q_proj", "v_proj")]),
        modules_to_save=draw.choice([(), (), ("embed_tokens",)]) if method != "full" else (),
        precision=draw.choice(PRECISIONS),
        optimizer=draw.choice(
            ["adamw_torch_fused", "adamw_8bit", "paged_adamw_32bit", "sgd", "lion"]
        ),
        gradient_checkpointing=draw.random() < 0.6,
        use_reentrant=draw.choice([True, False]),
        gradient_accumulation_steps=draw.choice([1, 4]),
        attn=draw.choice(["sdpa", "eager", "flash_attention_2"]),
        base_dtype=draw.choice(["auto", "auto", "auto", "float32"]),
        use_rslora=draw.random() < 0.2,
        **spread,
    )


def exported(to: str, draw: random.Random) -> tuple[Export, Prediction]:
    """A drawn run that the tool and the model can do, and its prediction as the tool runs it."""
    while True:
        try:
            made = FORMATS[to](export.make_recipe(drawn_run(draw), GPU))
            (prediction,) = estimates.estimate([made.run], [GPU])
        except ConfigError:
            continue
        return made, prediction


def read_back(made: Export, folder: Path, *, gpus: int) -> Prediction:
    """The prediction of the files, from the command that starts them."""
    for name, text in made.files.items():
        (folder / name).write_text(text)
    script = folder / "train.sh"
    script.write_text(f"#!/bin/bash\nset -e\n{made.command}\n")
    stated = {} if gpus == 1 else {"gpus": [gpus]}
    settings, said = with_files([script], {"precision": ["auto"], **stated}, stated)
    assert not any("unknown keys" in note for note in said.notes)
    assert said.epochs == 1
    (run,) = combinations.grid(settings)
    (prediction,) = estimates.estimate([run], [GPU])
    return prediction


@pytest.mark.sampled(60)
@pytest.mark.parametrize("seed", range(DRAWS))
@pytest.mark.parametrize("to", TOOLS)
def test_an_exported_run_is_read_back(to: str, seed: int, tmp_path: Path) -> None:
    made, before = exported(to, random.Random(f"{to} {seed}"))
    after = read_back(made, tmp_path, gpus=1)
    assert after.run.parallel.nodes == before.run.parallel.nodes
    assert after.memory == before.memory
    assert after.time == before.time


@pytest.mark.parametrize(
    "method",
    [name for name, each in BUILT_IN.items() if each.peft_class not in ("", "peft.LoraConfig")],
)
def test_other_configs_of_peft_are_read_back(method: str, tmp_path: Path) -> None:
    run = RunConfig(model=MODEL, method=method, batch_size=2, r=4, lora_alpha=8)
    try:
        (before,) = estimates.estimate([run], [GPU])
        made = FORMATS["transformers"](export.make_recipe(run, GPU))
    except ConfigError as error:
        pytest.skip(str(error))
    after = read_back(made, tmp_path, gpus=1)
    assert after.run.method == method
    assert after.memory == before.memory
    assert after.time == before.time


OF_PREFERENCES: list[tuple[str, tuple[tuple[str, Any], ...]]] = [
    ("dpo", ()),
    ("dpo", (("beta", 0.3), ("loss_type", "ipo"))),
    ("kto", ()),
    ("orpo", ()),
    ("cpo", (("cpo_alpha", 0.0), ("loss_type", "simpo"))),
]


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("case", OF_PREFERENCES)
@pytest.mark.parametrize("to", ["axolotl", "llamafactory"])
def test_a_run_on_preferences_is_read_back(
    to: str, case: tuple[str, Any], method: str, tmp_path: Path
) -> None:
    trainer, options = case
    run = RunConfig(
        model=MODEL, method=method, trainer=trainer, trainer_options=options, batch_size=2
    )
    made = FORMATS[to](export.make_recipe(run, GPU))
    (before,) = estimates.estimate([made.run], [GPU])
    after = read_back(made, tmp_path, gpus=1)
    assert after.run.trainer == before.run.trainer
    assert after.memory == before.memory
    assert after.time == before.time


@pytest.mark.parametrize("checkpointing", ["unsloth", "true"])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_run_under_unsloth_is_read_back(method: str, checkpointing: str, tmp_path: Path) -> None:
    options = (("use_gradient_checkpointing", checkpointing),)
    run = RunConfig(
        model="Qwen/Qwen2.5-0.5B",
        method=method,
        trainer="unsloth",
        trainer_options=options,
        batch_size=2,
        r=8,
    )
    made = FORMATS["unsloth"](export.make_recipe(run, GPU))
    (before,) = estimates.estimate([made.run], [GPU])
    after = read_back(made, tmp_path, gpus=1)
    assert after.memory == before.memory
    assert after.time == before.time


def test_a_model_on_several_gpus_in_one_process_is_read_back(tmp_path: Path) -> None:
    spread = ParallelConfig(strategy="device-map", gpus=2)
    run = RunConfig(model=MODEL, method="qlora", parallel=spread)
    made = FORMATS["axolotl"](export.make_recipe(run, GPU))
    (before,) = estimates.estimate([made.run], [GPU])
    after = read_back(made, tmp_path, gpus=2)
    assert after.memory == before.memory
    assert after.time == before.time
