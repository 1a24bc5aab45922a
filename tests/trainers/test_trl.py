"""TRL's trainers: their options, what they refuse, and what a reference takes."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import trainer_traces
from devices import A100

from whichlora.errors import ConfigError
from whichlora.exports import FORMATS
from whichlora.memory.lasting import REFERENCE_WEIGHTS
from whichlora.methods import with_defaults
from whichlora.predict.coefficients import prior_calibration
from whichlora.predict.notes import notes_on
from whichlora.predict.predict import predict
from whichlora.predict.quantities import ledger, num_tokens, passes, training_step
from whichlora.predict.resolve import ResolvedRun, resolve
from whichlora.spec.architecture import ModelSpec
from whichlora.spec.data_format import CHAT_ROWS
from whichlora.spec.numeric import added
from whichlora.spec.options import OptionValue
from whichlora.spec.parallel import ParallelConfig
from whichlora.spec.run import RunConfig
from whichlora.store.hub import load_model
from whichlora.workflow.combinations import USUAL, grid
from whichlora.workflow.export import make_recipe

NAME = "HuggingFaceTB/SmolLM2-135M"
SFT = RunConfig(model=NAME, trainer="sft", batch_size=4, seq_len=256)
PRECOMPUTED = (("precompute_ref_log_probs", True),)


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return load_model(NAME)


def job(model: ModelSpec, **settings: Any) -> ResolvedRun:
    return resolve(model, replace(SFT, **settings), A100)


def step_s(model: ModelSpec, **settings: Any) -> float:
    seconds = predict(model, replace(SFT, **settings), A100, prior_calibration(A100)).time.step_s
    assert seconds is not None
    return seconds


def test_a_trainer_brings_its_loss_and_its_options(model: ModelSpec) -> None:
    run = job(model, trainer="dpo").run
    assert run.loss_head == "trl-fused"
    assert run.prepare_kbit is False
    assert run.to_dict()["trainer_options"] == {
        "beta": 0.1,
        "loss_type": "sigmoid",
        "label_smoothing": 0.0,
        "precompute_ref_log_probs": False,
        "disable_dropout": True,
    }
    assert RunConfig.from_dict(run.to_dict()) == run
    assert "trainer_options" not in job(model).run.to_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trainer": "dpo", "loss_head": "liger"}, "loss_head: liger is not in trainer dpo"),
        (
            {"trainer": "dpo", "trainer_options": (("bet", 1),)},
            "'bet' is no option of trainer dpo, whose options are beta, loss_type, label_smooth",
        ),
        (
            {"trainer_options": (("beta", 0.1),)},
            "no option of trainer sft, whose options are use_li",
        ),
        ({"trainer": "dpo", "trainer_options": (("beta", "x"),)}, "beta: 'x' is not a number"),
        (
            {"trainer": "kto", "trainer_options": (("loss_type", "kt"),)},
            "loss_type: 'kt' is not accepted; did you mean kto; accepted are kto, apo_zero",
        ),
    ],
)
def test_what_a_trainer_has_not_is_refused(
    model: ModelSpec, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job(model, **settings)


def test_kto_needs_two_answers_whose_prompts_it_exchanges(model: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="batch_size: trainer kto needs 2 or more"):
        step_s(model, trainer="kto", batch_size=1)
    without_kl = (("loss_type", "apo_zero_unpaired"),)
    assert step_s(model, trainer="kto", batch_size=1, trainer_options=without_kl) > 0


def test_kto_has_two_answers_where_nobody_says_how_many(model: ModelSpec) -> None:
    asked = {"model": [model.name], "trainer": ["kto"], "batch_size": [USUAL]}
    (two,) = grid(asked)
    (one,) = grid({**asked, "trainer_options": [(("loss_type", "apo_zero_unpaired"),)]})
    assert (two.batch_size, one.batch_size) == (2, 1)


def test_a_pair_is_two_sequences(model: ModelSpec) -> None:
    pairs, texts = job(model, trainer="dpo", batch_size=2), job(model)
    assert num_tokens(pairs) == num_tokens(texts) == 4 * 256
    assert training_step(pairs).saved_for_backward == training_step(texts).saved_for_backward


def test_a_reference_is_a_second_model_only_where_all_weights_are_trained(
    model: ModelSpec,
) -> None:
    def reference_bytes(**settings: Any) -> float:
        entries = training_step(job(model, trainer="dpo", **settings)).static
        return added(e.num_bytes for e in entries if e.fact is REFERENCE_WEIGHTS)

    assert reference_bytes(method="full") == 2 * model.num_params
    assert reference_bytes(method="lora") == 0
    assert reference_bytes(method="full", trainer_options=PRECOMPUTED) == 0
    moments = ledger(job(model, trainer="dpo", method="lora")).moments
    assert "reference_forward" in moments
    assert "reference_forward" not in ledger(job(model)).moments


def test_every_forward_without_gradients_takes_time(model: ModelSpec) -> None:
    texts = step_s(model)
    with_kl = step_s(model, trainer="kto")
    without_kl = step_s(model, trainer="kto", trainer_options=(("loss_type", "apo_zero_unpaired"),))
    precomputed = step_s(model, trainer="dpo", batch_size=2, trainer_options=PRECOMPUTED)
    assert texts < without_kl < with_kl
    assert precomputed == texts
    assert without_kl == pytest.approx(step_s(model, trainer="dpo", batch_size=2))


def test_disabled_dropout_keeps_no_mask(model: ModelSpec) -> None:
    def peak(**settings: Any) -> float:
        return ledger(job(model, gradient_checkpointing=False, **settings)).peak_allocated_bytes

    kept = (("disable_dropout", False),)
    dropped = peak(trainer="dpo", lora_dropout=0.1, trainer_options=kept)
    assert peak(trainer="dpo", lora_dropout=0.1) == peak(trainer="dpo", lora_dropout=0.0) < dropped


def test_dropout_that_trl_turns_off_takes_nothing_and_what_it_cannot_stays() -> None:
    off, on = (("disable_dropout", True),), (("disable_dropout", False),)
    for name, differs in (("gpt2", True), ("facebook/opt-125m", False)):
        run = RunConfig(model=name, trainer="dpo", batch_size=2, seq_len=256)
        peaks = [
            ledger(resolve(load_model(name), replace(run, trainer_options=options), A100))
            for options in (off, on)
        ]
        kept, dropped = (peak.peak_allocated_bytes for peak in peaks)
        assert (kept < dropped) is differs  # OPT's probabilities are numbers, not modules


def test_trl_s_exporter_writes_its_own_trainer_and_no_other(model: ModelSpec) -> None:
    files = FORMATS["trl"](make_recipe(SFT, "a100-sxm-80gb")).files
    assert (
        files
        == FORMATS["trl"](make_recipe(replace(SFT, trainer="transformers"), "a100-sxm-80gb")).files
    )
    for name in ("orpo", "cpo"):
        with pytest.raises(ConfigError, match=f"--to trl: trainer {name} can't be written"):
            FORMATS["trl"](make_recipe(replace(SFT, trainer=name), "a100-sxm-80gb"))


def test_trl_s_exporter_writes_a_script_for_rows_with_images() -> None:
    run = RunConfig(
        model="Qwen/Qwen2.5-VL-7B-Instruct",
        method="qlora",
        images=1,
        image_max_pixels=4000,
        freeze_vision_tower=True,
    )
    recipe = make_recipe(run, "a100-sxm-80gb")
    made = FORMATS["trl"](recipe)
    own = make_recipe(replace(run, trainer="sft"), "a100-sxm-80gb")
    assert made.run == own.run
    assert made.files == FORMATS["trl"](own).files == FORMATS["transformers"](own).files
    script = made.files["train.py"]
    for line in (
        "class NarrowTrainer(SFTTrainer):",
        "data_collator=ImageBatches(processor)",
        "IMAGE_MAX_PIXELS = 4000",
        "exclude_modules=frozen",
        "max_length=SEQ_LEN",
    ):
        assert line in script
    for other, fault in (
        (replace(recipe, run=replace(own.run, trainer="dpo")), "--to trl: trainer dpo can't"),
        (replace(recipe, data_format=CHAT_ROWS), "no row names one"),
        (replace(recipe, batching="packed"), "collator packed can't batch them"),
    ):
        with pytest.raises(ConfigError, match=fault):
            FORMATS["trl"](other)


def test_the_ledger_has_the_bytes_of_the_kept_traces() -> None:
    errors = [error for of_trainer in trainer_traces.errors().values() for error in of_trainer]
    assert len(errors) >= 80
    assert median(errors) < 0.001
    assert max(errors) < 0.02


def test_a_reward_model_has_a_head_of_one_output_and_pairs(model: ModelSpec) -> None:
    run = RunConfig(model=NAME, trainer="reward", method="full", batch_size=4, seq_len=256)
    job = resolve(model, run, A100)
    head = model.vocab_size * model.hidden_size * (not model.head_tied)
    assert job.model.num_params == model.num_params - head + model.hidden_size
    assert num_tokens(job) == 2 * 4 * 256
    moments = ledger(job).moments
    logits = added(
        entry.num_bytes for entry in moments["loss_forward"] if entry.part == "logits_and_loss"
    )
    assert logits < 10 * model.hidden_size * 2 * 4 * 256  # the last norm, and no vocabulary


def test_a_reward_model_scores_in_one_forward(model: ModelSpec) -> None:
    """No cache, no logits of a vocabulary and no decoding: whatever number of tokens is asked."""
    asked = {"model": NAME, "phase": "inference", "batch_size": 4, "prompt_len": 512}
    run = RunConfig(**asked, max_new_tokens=64)
    scoring = resolve(model, replace(run, trainer="reward"), A100)
    assert num_tokens(scoring) == 4 * 512
    assert [name for name, _, _ in passes(scoring)] == ["prefill"]
    moments = ledger(scoring).moments
    assert set(moments) == {"forward", "logits"}
    held = [entry for entries in moments.values() for entry in entries]
    assert not any(entry.part == "kv_cache" for entry in held)
    rewards = added(entry.num_bytes for entry in held if entry.part == "logits_and_loss")
    assert rewards == 4 * 512 * 2
    longer = resolve(model, replace(run, trainer="reward", max_new_tokens=4096), A100)
    assert ledger(longer).peak_allocated_bytes == ledger(scoring).peak_allocated_bytes
    written = ledger(resolve(model, run, A100)).peak_allocated_bytes
    assert ledger(scoring).peak_allocated_bytes < written


@pytest.mark.parametrize("setting", [{"serving": "vllm"}, {"kv_cache": "static"}], ids=str)
def test_what_writes_texts_is_refused_beside_a_reward_model(
    model: ModelSpec, setting: dict[str, Any]
) -> None:
    run = RunConfig(model=NAME, phase="inference", trainer="reward", **setting)
    with pytest.raises(ConfigError, match=f"{next(iter(setting))}: .* one that reads them"):
        resolve(model, run, A100)


def test_a_reward_model_is_made_of_one_that_continues_texts() -> None:
    run = RunConfig(model="google-t5/t5-small", trainer="reward")
    with pytest.raises(ConfigError, match="task reward is predicted for models that continue"):
        resolve(load_model("google-t5/t5-small"), run, A100)


def test_orpo_and_cpo_have_pairs_and_no_reference(model: ModelSpec) -> None:
    for name in ("orpo", "cpo"):
        pairs = job(model, trainer=name, batch_size=2)
        assert pairs.run.loss_head == "raw"
        assert num_tokens(pairs) == num_tokens(job(model)) == 4 * 256
        assert "reference_forward" not in ledger(pairs).moments
        assert (
            added(e.num_bytes for e in training_step(pairs).static if "reference" in e.fact.what)
            == 0
        )


def test_alpha_po_and_a_weight_of_0_drop_the_cross_entropy(model: ModelSpec) -> None:
    def run(*options: tuple[str, Any]) -> dict[str, Any]:
        return {"trainer": "cpo", "batch_size": 2, "trainer_options": options}

    def peak(settings: dict[str, Any]) -> float:
        return ledger(job(model, **settings)).peak_allocated_bytes

    usual, alpha, unweighted = run(), run(("loss_type", "alphapo")), run(("cpo_alpha", 0.0))
    assert peak(alpha) == peak(unweighted) < peak(usual) == peak(run(("loss_type", "simpo")))
    long = {"seq_len": 4096}  # so that the host is not what takes longest
    assert step_s(model, **alpha | long) < step_s(model, **usual | long)
    assert peak({"trainer": "orpo", "batch_size": 2}) == peak(usual)


@pytest.mark.parametrize(
    ("name", "embeddings", "head"),
    [
        (NAME, 2, 2),
        ("tiiuae/falcon-7b", 2, 2),  # `word_embeddings`, tied to `lm_head`
        ("EleutherAI/pythia-1.4b", 4, 2),  # `embed_in` is not among the names
    ],
)
def test_orpo_narrows_what_trl_names_of_a_prepared_4_bit_base(
    name: str, embeddings: int, head: int
) -> None:
    run = replace(SFT, model=name, trainer="orpo", method="qlora", precision="bf16", batch_size=1)
    narrowed = resolve(load_model(name), run, A100)
    assert narrowed.run.prepare_kbit
    assert (narrowed.dtypes.embedding_bytes, narrowed.dtypes.head_bytes) == (embeddings, head)
    for left in ({"precision": "fp16"}, {"quant": "int8"}, {"trainer": "transformers"}):
        dtypes = resolve(load_model(name), replace(run, **left), A100).dtypes
        assert (dtypes.embedding_bytes, dtypes.head_bytes) == (4, 4)


def test_orpo_learns_from_models_that_continue_a_text() -> None:
    run = RunConfig(model="google-t5/t5-small", trainer="orpo")
    with pytest.raises(ConfigError, match="trainer orpo is predicted for models that continue"):
        resolve(load_model("google-t5/t5-small"), run, A100)


def test_the_losses_of_dpo_hold_the_same_tensors(model: ModelSpec) -> None:
    def peak(**options: OptionValue) -> int:
        run = replace(SFT, trainer="dpo", trainer_options=tuple(options.items()))
        return predict(model, run, A100, prior_calibration(A100)).memory.peak_allocated_bytes

    assert peak(loss_type="ipo") == peak(loss_type="exo_pair", label_smoothing=0.001) == peak()
    with pytest.raises(ConfigError, match="exo_pair needs label_smoothing above 0"):
        peak(loss_type="exo_pair")


def test_older_sft_trainers_leave_the_loss_to_the_model_or_to_liger(model: ModelSpec) -> None:
    def loss_head(version: str, **settings: Any) -> str:
        return job(model, libraries=(("trl", version),), **settings).run.loss_head

    with_liger = {"trainer_options": (("use_liger_kernel", True),)}
    assert loss_head("0.26.2") == "hf"
    assert loss_head("1.6.0", **with_liger) == loss_head("1.10.0", **with_liger) == "liger"
    assert loss_head("1.15.0") == loss_head("1.16.0", **with_liger) == "trl-fused"
    with pytest.raises(ConfigError, match=r"TRL 1\.10\.0 computes the loss in chunks"):
        loss_head("1.10.0")
    older, plain = (
        job(model, **settings)
        for settings in ({"libraries": (("trl", "0.26.2"),)}, {"trainer": "transformers"})
    )
    assert ledger(older).peak_allocated_bytes == ledger(plain).peak_allocated_bytes


# Read in wheels: whether a quantised base is prepared, by the first release of each way.
PREPARES = {
    "sft": (("0.12.1", True), ("0.25.1", True), ("0.26.0", False)),
    "dpo": (("0.12.1", True), ("0.28.0", True), ("0.29.0", False)),
    "kto": (("0.21.0", True), ("1.3.0", True), ("1.4.0", False)),
    "grpo": (("0.21.0", False), ("0.22.0", True), ("0.25.1", True), ("0.26.0", False)),
    "reward": (("0.17.0", True), ("0.25.1", True), ("0.26.0", False)),
    "orpo": (("0.12.1", True), ("1.16.0", True)),
    "cpo": (("0.12.1", True), ("1.16.0", True)),
    "unsloth": (("0.12.1", False), ("1.16.0", False)),
}


@pytest.mark.parametrize("trainer", PREPARES)
def test_the_release_says_whether_a_quantised_base_is_prepared(
    trainer: str, model: ModelSpec
) -> None:
    for version, prepares in PREPARES[trainer]:
        options = (("max_completion_length", 64), ("num_generations", 4))
        settings = {"trainer_options": options} if trainer == "grpo" else {}
        asked = {"trainer": trainer, "method": "qlora", "libraries": (("trl", version),)}
        run = job(model, **asked, **settings).run
        assert run.prepare_kbit is prepares, version
        dtypes = job(model, **asked, **settings).dtypes
        narrows = trainer in ("sft", "dpo", "kto", "reward", "grpo") and not prepares
        wide = 2 if narrows and version != "0.21.0" else 4
        assert dtypes.adapter_bytes == wide, version  # GRPO to 0.21 leaves both to PEFT


def test_a_prepared_base_of_an_older_sft_has_narrow_tables(model: ModelSpec) -> None:
    def embedding_bytes(**settings: Any) -> int:
        asked = {"method": "qlora", "precision": "bf16", **settings}
        return job(model, **asked).dtypes.embedding_bytes

    assert embedding_bytes(libraries=(("trl", "0.25.1"),)) == 2
    assert embedding_bytes(libraries=(("trl", "0.25.1"),), quant="int8") == 4
    # reward_trainer.py casts nothing before it shares the code of SFT
    assert embedding_bytes(trainer="reward", libraries=(("trl", "0.21.0"),)) == 4
    assert embedding_bytes(trainer="reward", libraries=(("trl", "0.22.0"),)) == 2


def test_trainers_that_ask_leave_a_base_that_is_divided(model: ModelSpec) -> None:
    def run(trainer: str, strategy: str) -> RunConfig:
        spread = ParallelConfig(strategy=strategy, gpus=2)
        libraries = (("trl", "0.21.0"),)
        return with_defaults(
            replace(SFT, trainer=trainer, method="qlora", parallel=spread, libraries=libraries)
        )

    assert [run("sft", name).prepare_kbit for name in ("ddp", "zero2", "zero3", "fsdp")] == [
        *(True, True, False, False)
    ]
    assert run("dpo", "zero3").prepare_kbit


@pytest.mark.parametrize("trainer", ["sft", "dpo", "kto", "reward", "orpo", "cpo"])
def test_trainers_before_0_22_checkpoint_where_they_are_told(
    trainer: str, model: ModelSpec
) -> None:
    def checkpoints(version: str, asked: bool | None = None) -> bool | None:
        settings = {"libraries": (("trl", version),), "gradient_checkpointing": asked}
        return job(model, trainer=trainer, **settings).run.gradient_checkpointing

    assert (checkpoints("0.21.0"), checkpoints("0.22.0")) == (False, True)
    assert (checkpoints("0.21.0", True), checkpoints("0.22.0", False)) == (True, False)
    other = job(model, trainer="unsloth", gradient_checkpointing=None, precision="auto")
    assert other.run.gradient_checkpointing


def test_a_note_says_that_nobody_asked_for_checkpointing(model: ModelSpec) -> None:
    older = job(model, libraries=(("trl", "0.17.0"),), gradient_checkpointing=None)
    text = "gradient_checkpointing is off, as trainer sft of trl 0.17.0 has it"
    assert any(note.startswith(text) for note in notes_on(older))
    assert not any("is off, as" in note for note in notes_on(job(model)))
