"""`whichlora recommend`: a few words mean a plan, and have its answer."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from clips import write_clip
from plan_runs import Silent
from rich.console import Console
from small_models import AUDIO_CONFIG

from whichlora.api import estimate
from whichlora.api import recommend as recommended
from whichlora.cli import main
from whichlora.config import LARGE_MODELS
from whichlora.errors import ConfigError
from whichlora.terminal.recommended import print_recommended
from whichlora.terminal.short import best_of_each_model
from whichlora.units import format_bytes
from whichlora.workflow import estimates, session
from whichlora.workflow.recommend import Question, plan_content, recommend, save_plan
from whichlora.workflow.run import run_plan

SMALL, LARGE = "Qwen/Qwen3-4B", "Qwen/Qwen3-14B"
MODELS = (SMALL, LARGE)
SEES = "Qwen/Qwen2.5-VL-3B-Instruct"
HEARS = "openai/whisper-small"
SQUARES = "llava-hf/llava-v1.6-mistral-7b-hf"


def said(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["recommend", *words])


def test_the_saved_plan_has_the_same_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = said("--gpu", "4090", "--models", ",".join(MODELS), "--save", "plan.yaml")
    assert result.exit_code == 0, result.output
    assert "try it with: whichlora run plan.yaml" in result.output
    assert "profile: none" in (tmp_path / "plan.yaml").read_text()  # so that it measures nothing
    assert "profile: frontier in it measures, on a machine with the GPU" in result.output
    assert list(tmp_path.glob("[!.]*")) == [tmp_path / "plan.yaml"]
    again = run_plan(Path("plan.yaml"), progress=Silent())
    assert again.winner is not None
    assert again.winner.run.model == LARGE
    assert f"Winner: {LARGE}" in result.output
    answer = recommended(gpu="4090", models=MODELS)
    assert answer.winner is not None
    assert answer.winner.run == again.winner.run
    assert answer.winner.memory_bytes == again.winner.memory_bytes


def test_the_best_usual_recipe_trains_and_the_plan_and_its_job_carry_it(tmp_path: Path) -> None:
    model = "meta-llama/Llama-3.1-8B"
    question = Question(gpu="3060", models=(model, "Qwen/Qwen3-1.7B"))
    found = recommend(question, progress=Silent())
    plain = recommend(replace(question, trainer="transformers"), progress=Silent())
    assert found.answer.winner is not None
    assert found.answer.winner.run.model == model
    assert plain.answer.winner is not None
    assert plain.answer.winner.run.model != model
    assert found.plan["trainer"] == "sft"
    chosen, other = found.recipes
    assert (chosen.run.trainer, other.run.trainer) == ("sft", "transformers")
    assert (chosen.verdict, other.verdict) == ("fits", "fails")
    alone = {"method": "qlora", "batch_size": chosen.run.batch_size}
    (stated,) = estimate(model, "3060", trainer="transformers", **alone)
    assert other.memory.device_used_bytes == stated.memory.device_used_bytes
    path = tmp_path / "plan.yaml"
    save_plan(found, path)
    with path.open("a") as file:
        file.write(f"output_dir: {tmp_path / 'run'}\n")
    run_plan(path, progress=Silent())
    job = (tmp_path / "run" / "train.py").read_text()
    assert "from trl import SFTConfig, SFTTrainer" in job


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, True),
        ({"trainer": "transformers"}, False),  # as asked
        ({"models": ["answerdotai/ModernBERT-base"]}, False),
        ({"gpu": "cpu"}, False),
    ],
)
def test_a_plan_that_names_no_trainer_is_told_what_the_recipe_takes(
    own: dict[str, Any], told: bool, tmp_path: Path
) -> None:
    lengths = {"mean_tokens": 512, "p95_tokens": 512, "max_tokens": 512}
    plan = {
        "gpu": "l4",
        "models": [SMALL],
        "methods": ["qlora"],
        "dataset": {"samples": 100} | lengths,
        "stage2_profile": {"batch_size": 2},
        "profile": "none",
        "output_dir": str(tmp_path),
    }
    answer = recommended(plan | own)
    notes = [note for note in answer.cautions if "with `trainer: sft`" in note]
    assert len(notes) == told
    if told and answer.winner is not None:
        run = answer.winner.run
        alone = {"method": "qlora", "batch_size": run.batch_size, "seq_len": run.seq_len}
        (recipe,) = estimate(SMALL, "l4", trainer="sft", padding=run.padding, **alone)
        used = format_bytes(recipe.memory.device_used_bytes)
        assert f"takes {used} in place of" in notes[0]


@pytest.mark.parametrize(
    ("asked", "trainer"),
    [
        ({"gpu": "l4"}, "sft"),
        ({"gpu": "24GB", "models": (SMALL,)}, "sft"),
        ({"gpu": "l4", "trainer": "dpo"}, "dpo"),
        ({"gpu": "cpu"}, None),  # where it is slower
        ({"gpu": "l4", "models": ("google/flan-t5-base",)}, None),  # it reads and writes
        ({"gpu": "l4", "models": ("answerdotai/ModernBERT-base", SMALL)}, None),
    ],
)
def test_sft_trains_on_a_gpu_where_all_models_write_texts(
    asked: dict[str, Any], trainer: str | None
) -> None:
    assert plan_content(Question(**asked)).get("trainer") == trainer


def test_a_number_before_the_type_is_how_many_share_the_training() -> None:
    result = said("--gpu", "2x3090", "--models", LARGE)
    assert result.stdout.startswith("the largest models that train on 2 x rtx-3090-24gb")
    assert "on 2 GPUs, batch size" in result.stdout
    assert Question(gpu="2x3090") == Question(gpu="3090", gpus=2)
    with pytest.raises(ConfigError, match="gpu: 2x3090 states how many; leave gpus out"):
        Question(gpu="2x3090", gpus=4)


def test_a_limit_of_power_is_in_the_plan() -> None:
    assert plan_content(Question(gpu="4090@300W"))["gpu"] == "rtx-4090-24gb@300W"
    limited, free = (recommended(gpu=name, models=[SMALL]) for name in ("4090@300W", "4090"))
    assert limited.winner is not None
    assert free.winner is not None
    assert limited.winner.run == free.winner.run
    assert limited.winner.total_s is not None
    assert free.winner.total_s is not None
    assert limited.winner.total_s.value > free.winner.total_s.value


def test_the_time_of_a_million_tokens_is_that_of_the_steps() -> None:
    answer = recommended(gpu="4090", models=[SMALL], samples=1000, seq_len=1024)
    best = answer.winner
    assert best is not None
    assert best.total_s is not None
    (prediction,) = estimates.estimate([best.run], ["4090"])
    assert prediction.time.step_s is not None
    steps = 1000 / best.run.batch_size
    assert best.total_s.value == pytest.approx(steps * prediction.time.step_s, rel=0.02)


def test_where_shorter_sequences_fit_the_longest_of_them_is_named() -> None:
    question = Question(gpu="3060", models=("meta-llama/Llama-3.1-8B",), seq_len=65536)
    found = recommend(question, progress=Silent())
    assert found.nearest is not None
    assert found.nearest.prediction.run.method == "qlora"  # it takes the least memory
    assert found.longest is not None
    assert found.longest.verdict == "fits"
    longer = replace(found.longest.run, seq_len=found.longest.run.seq_len + 1)
    (prediction,) = estimates.estimate([longer], ["3060"])
    assert prediction.verdict != "fits"
    assert found.to_dict()["longest_seq_len"] == found.longest.run.seq_len


def test_where_nothing_fits_every_saving_is_what_an_estimate_says() -> None:
    question = Question(gpu="4090", models=("meta-llama/Llama-3.1-70B",))
    found = recommend(question, progress=Silent())
    assert found.answer.winner is None
    assert found.nearest is not None
    run, used = found.nearest.prediction.run, found.nearest.prediction.memory.device_used_bytes
    saved = [found.nearest.saved_bytes(each) for each in found.savings]
    assert saved == sorted(saved, reverse=True)
    assert saved[-1] > 0
    half = next(each for each in found.savings if each.settings == {"seq_len": run.seq_len // 2})
    (shorter,) = estimates.estimate([replace(run, seq_len=run.seq_len // 2)], ["4090"])
    assert found.nearest.saved_bytes(half) == used - shorter.memory.device_used_bytes
    assert found.longest is None  # its weights alone do not
    assert found.smallest_gpu is not None
    (there,) = estimates.estimate([run], [found.smallest_gpu.gpu.key])
    assert there.verdict == "fits"
    assert found.smallest_gpu.prediction is not None
    assert found.smallest_gpu.prediction.cost is not None
    assert found.smallest_gpu.prediction.cost.offer is not None


def test_where_nothing_fits_the_menu_is_printed() -> None:
    result = said("--gpu", "4090", "--models", "meta-llama/Llama-3.1-70B")
    assert result.exit_code == 1
    assert "give up" in result.output
    assert "another card: Llama-3.1-70B" in result.output
    as_json = said("--gpu", "4090", "--models", "meta-llama/Llama-3.1-70B", "--json")
    answer = json.loads(as_json.output)
    assert answer["winner"] is None
    assert answer["savings"][0]["saved_bytes"] > 0
    assert answer["plan"]["models"] == ["meta-llama/Llama-3.1-70B"]


def test_an_engine_and_its_wait_are_asked() -> None:
    result = said("--gpu", "4090", "--models", SMALL, "--serving", "vllm", "--tpot", "50ms")
    assert result.exit_code == 0, result.output
    assert "by vllm" in result.output
    slow = said("--gpu", "4090", "--models", SMALL, "--serving", "vllm", "--tpot", "1ms")
    assert slow.exit_code == 1
    assert "tpot" in slow.output
    assert "give up" not in slow.output  # it fits: no memory is missing
    assert "another card" not in slow.output


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        (("llama-cpp",), "Q4_K_M"),  # nobody serves 16 bit there
        (("llama-cpp", "--serve", "Q8_0"), "Q8_0"),
        (("vllm", "--serve", "awq-int4"), "awq-int4"),
    ],
)
def test_an_engine_is_asked_for_the_form_of_its_weights(asked: tuple[str, ...], form: str) -> None:
    result = said("--gpu", "4090", "--models", SMALL, "--serving", *asked)
    assert result.exit_code == 0, result.output
    assert f"served as merged {form} by {asked[0]}" in result.output
    assert "--serve awq-int4 looks" not in result.output


def test_narrower_weights_are_offered_where_16_bit_do_not_start() -> None:
    models = f"{SMALL},Qwen/Qwen3-14B"
    result = said("--gpu", "4090", "--models", models, "--serving", "vllm")
    assert "in which vllm starts no more of these models; --serve awq-int4 looks" in result.output
    narrow = said("--gpu", "4090", "--models", models, "--serving", "vllm", "--serve", "awq-int4")
    assert "Winner: Qwen/Qwen3-14B" in narrow.output


def test_an_engine_serves_on_as_many_of_the_gpus_as_divide_its_heads() -> None:
    heads = "Qwen/Qwen2.5-7B"  # 28, and 4 of keys
    result = said("--gpu", "8xh100", "--models", heads, "--serving", "vllm")
    assert result.exit_code == 0, result.output
    assert re.search(r"by vllm \S+ on 4 GPUs: ", result.output)


def test_a_winner_meets_its_limits_as_an_estimate_of_it_alone() -> None:
    answer = recommended(gpu="rtx-3060", seq_len=1024)  # replayed, QDoRA of 8B is too large
    assert answer.winner is not None
    assert answer.winner.chance_of_both_stages >= answer.plan.budget.confidence
    assert all(candidate.chance_of_both_stages < 0.95 for candidate in answer.may_fit)


def test_the_row_of_a_model_is_its_answer_alone() -> None:
    asked: dict[str, Any] = {"gpu": "2x4090", "serving": "vllm", "seq_len": 2048}
    rows = best_of_each_model(recommended(**asked))
    assert len(rows) >= 3
    for row in rows[:3]:
        alone = best_of_each_model(recommended(**asked, models=(row.run.model,)))[0]
        assert row.total_s is not None
        assert alone.total_s is not None
        assert row.total_s.value == pytest.approx(alone.total_s.value)


def test_a_likely_model_stands_before_an_unlikely_one_and_the_others_are_counted() -> None:
    answer = recommended(gpu="l4", samples=20_000, budget="5usd")
    rows = best_of_each_model(answer)
    assert rows[0] is answer.winner
    larger = [row for row in rows[1:] if row.rank < rows[0].rank]
    chances = [row.chance_of_both_stages for row in larger]
    assert len(chances) > 2
    assert chances == sorted(chances, reverse=True)
    models = [row.run.model for row in larger]
    for row in larger:
        of_model = [each for each in answer.finetune if each.run.model == row.run.model]
        likeliest = max(each.chance_of_both_stages for each in of_model)
        assert row.chance_of_both_stages == pytest.approx(likeliest)
    certain = next(i for i, row in enumerate(rows[1:]) if row.rank > rows[0].rank)
    assert [chance > 0.5 for chance in chances] == [i < certain for i in range(len(models))]
    shown = " ".join(said("--gpu", "l4", "--samples", "20000", "--budget", "5usd").output.split())
    assert f"may fit, {chances[0]:.0%}" in shown
    assert re.search(r"not shown: \d+ more .*--json has those looked at looked at:", shown)


def test_each_named_model_without_a_row_has_its_reason() -> None:
    large, huge = "Qwen/Qwen2.5-32B", "meta-llama/Llama-3.1-70B"
    asked = ("--gpu", "24GB", "--seq-len", "512", "--trainer", "transformers")
    result = said(*asked, "--models", f"{SMALL},{large},{huge}")
    assert result.exit_code == 0, result.output
    assert "nan%" not in result.output  # an amount of memory has no time
    for model in (large, huge):
        assert re.search(rf"left out: {model}: .*memory", " ".join(result.output.split()))
    once = said("--gpu", "4090", "--models", f"{LARGE},{huge}").output
    assert once.count(f"{huge} left out") + once.count(f"left out: {huge}") == 1
    assert "left out" not in said("--gpu", "24GB").output


def test_a_narrow_terminal_breaks_no_name_of_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminal() -> Console:
        return Console(width=80, force_terminal=True, color_system=None, highlight=False)

    monkeypatch.setattr("whichlora.terminal.recommended.open_console", terminal)
    question = Question(gpu="2xl4", models=(SMALL, LARGE), serving="vllm")
    print_recommended(recommend(question, progress=Silent()))
    rows = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if "meets" in line[60:]
    ]
    assert rows == ["Qwen3-4B"]


def test_memory_alone_has_no_time() -> None:
    result = said("--gpu", "24GB", "--models", SMALL)
    assert result.exit_code == 0, result.output
    assert "memory of the device" in result.output


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ({"within": "8h"}, "28800s"),
        ({"budget": "10h"}, "36000s"),
        ({"budget": "10h", "gpus": 4}, "9000s"),
        ({"budget": "20usd", "price_per_hour": 0.5}, "144000s"),
        ({"budget": "$20", "price_per_hour": 0.5, "within": "2h"}, "7200s"),
        ({"budget": "20€", "price_per_hour": 0.5}, "144000s"),
        ({"budget": "4.5kWh"}, "36000s"),  # a board of 450 W
        ({"budget": "4.5kWh", "gpus": 2}, "18000s"),
    ],
)
def test_time_and_money_are_a_limit_on_the_time(asked: dict[str, Any], seconds: str) -> None:
    content = plan_content(Question(gpu="4090", samples=1000, **asked))
    assert content["stage2_profile"] == {"total_time": seconds}


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({"gpu": "4o90"}, "did you mean rtx-4090-24gb"),
        ({"within": "8h"}, "within: how long a training takes depends on its data"),
        ({"within": "8hrs", "samples": 9}, "within: '8hrs' is not a duration with a unit"),
        ({"budget": "20eur", "samples": 9}, "is not in USD, which the price table is in; give"),
        ({"gpu": "p4", "budget": "20usd", "samples": 9}, "the price table has no p4-8gb; give"),
        ({"gpu": "24GB", "budget": "5kWh", "samples": 9}, "the power of 24gb is not known"),
        ({"prices": "no.csv", "price_per_hour": 1.0}, "prices and price_per_hour: give one"),
        ({"prices": "no.csv"}, "prices: can't be used: "),
        ({"country": "Frence"}, "did you mean France, Greece, French Polynesia"),
        ({"budget": "0usd", "samples": 9, "price_per_hour": 1.0}, "must be above 0"),
        ({"tpot": "50ms"}, "is a limit of a serving engine; give serving"),
        ({"serve": "fp8"}, "serve: fp8 is a form of a serving engine; give serving"),
        ({"serving": "vlm"}, "serving: 'vlm' is not known; accepted are transformers, vllm"),
        ({"serving": "vllm", "tpot": "50"}, "tpot: '50' is not a duration with a unit"),
        ({"data": "no.jsonl"}, "dataset.path: is not there"),
        ({"data": "no.jsonl", "samples": 9}, "data and samples: give one of both"),
        ({"models": ("qwen3-4c",)}, "did you mean Qwen/Qwen3-4B"),
        ({"seq_len": 1}, "seq_len: must be a whole number from 2"),
        ({"gpus": 0}, "gpus: must be a whole number from 1"),
        ({"epochs": -1.0}, "epochs: must be a number above 0"),
    ],
)
def test_a_fault_is_one_line(asked: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recommend(Question(**({"gpu": "4090"} | asked)), progress=Silent())
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_a_gpu_here_one_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = said()
    assert result.exit_code == 2
    assert "this machine has no GPU; name one" in result.output


def test_python_takes_a_plan_or_keywords() -> None:
    with pytest.raises(ConfigError, match="a plan says it all"):
        recommended({"dataset": "a.jsonl"}, gpu="4090")
    with pytest.raises(ConfigError, match="lengt: is not a keyword; accepted are gpu"):
        recommended(gpu="4090", lengt=4)  # type: ignore[call-arg]


def test_a_file_of_the_user_is_not_replaced_by_the_plan(tmp_path: Path) -> None:
    mine = tmp_path / "own.yaml"
    mine.write_text("mine")
    result = said("--gpu", "4090", "--models", SMALL, "--save", str(mine))
    assert result.exit_code == 2
    assert f"{mine}: exists, and WhichLoRA has no record of writing it" in result.output
    assert mine.read_text() == "mine"


def test_a_plan_that_can_not_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "no").write_text("a file")
    result = said("--gpu", "4090", "--models", SMALL, "--save", str(tmp_path / "no" / "plan.yaml"))
    assert result.exit_code == 2
    assert "can't be written" in result.output


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (560, 420)).save(tmp_path / "a.png")
    path = tmp_path / "seen.jsonl"
    row = {"question": "What is this?", "answer": "A black image.", "image": "a.png"}
    path.write_text(f"{json.dumps(row)}\n" * 40)
    return path


def test_rows_with_images_are_for_models_that_see(seen: Path) -> None:
    result = said("--gpu", "4090", "--data", str(seen))
    assert result.exit_code == 0, result.output
    assert "Winner: Qwen/Qwen2.5-VL-32B-Instruct" in result.output
    assert "note: images: 1 of 560x420 in each row, 300 tokens" in result.output
    assert "google/gemma-4-31B" in result.output
    assert "Qwen3-4B" not in result.output


@pytest.fixture
def heard(tmp_path: Path) -> Path:
    write_clip(tmp_path / "a.wav", 4.0)
    path = tmp_path / "heard.jsonl"
    row = {"audio": "a.wav", "text": "some words that were said"}
    path.write_text(f"{json.dumps(row)}\n" * 40)
    return path


def test_clips_with_transcripts_are_for_models_that_write_them(heard: Path) -> None:
    result = said("--gpu", "4090", "--data", str(heard))
    assert result.exit_code == 0, result.output
    assert "Winner: Qwen/Qwen2-Audio-7B-Instruct " in result.output
    assert "openai/whisper-large-v3 " in result.output
    assert "Qwen3" not in result.output
    question = Question(gpu="4090", models=(SMALL, HEARS), data=str(heard))
    answer = recommend(question, progress=Silent()).answer
    assert answer.winner is not None
    assert answer.winner.run.model == HEARS
    (refused,) = answer.refused
    assert refused.reason.startswith("rows have clips with transcripts, and this model writes none")
    with pytest.raises(ConfigError, match=f"clips with transcripts, which {SMALL} does not learn"):
        recommend(replace(question, models=(SMALL,)), progress=Silent())


def test_an_estimate_of_clips_leaves_out_what_is_too_long(heard: Path) -> None:
    write_clip(heard.with_name("b.wav"), 31.0)
    row = {"audio": "b.wav", "text": "more words than were said"}
    heard.write_text(heard.read_text() + json.dumps(row) + "\n")
    (run,) = estimate(HEARS, gpu="4090", data=str(heard))
    assert run.training.num_sequences == 40
    assert any("1 rows are left out: they are longer than 30 s" in note for note in run.notes)


def test_a_model_that_reads_clips_beside_messages_learns_transcripts_too(heard: Path) -> None:
    config = heard.with_name("config.json")
    config.write_text(json.dumps(AUDIO_CONFIG))
    (run,) = estimate(str(config), gpu="4090", data=str(heard))
    assert (run.run.audios, run.run.audio_seconds) == (1, 4.0)
    assert run.training.num_sequences == 40
    row = {"question": "Who?", "answer": "Nobody.", "audios": ["a.wav", "a.wav"]}
    heard.write_text(f"{json.dumps(row)}\n" * 20)
    (run,) = estimate(str(config), gpu="4090", data=str(heard))
    assert (run.run.audios, run.run.audio_seconds) == (2, 4.0)
    assert run.training.num_sequences == 20
    with pytest.raises(ConfigError, match="audios: the data has its own; leave audios out"):
        estimate(str(config), gpu="4090", data=str(heard), audios=1)


def test_models_that_see_nothing_are_left_out_of_a_plan_with_images(seen: Path) -> None:
    answer = recommend(
        Question(gpu="4090", data=str(seen), models=(SMALL, SEES)), progress=Silent()
    ).answer
    assert answer.winner is not None
    assert answer.winner.run.model == SEES
    assert (answer.winner.run.images, answer.winner.run.image_size) == (1, (560, 420))
    (refused,) = answer.refused
    assert refused.model == SMALL
    assert refused.reason.startswith("rows have images, and this model reads none")
    with pytest.raises(ConfigError, match=f"rows have images, and those of {SMALL} are not"):
        recommend(Question(gpu="4090", data=str(seen), models=(SMALL,)), progress=Silent())


def test_a_model_whose_images_fill_the_rows_is_left_out_of_a_plan(seen: Path) -> None:
    asked = Question(gpu="4090", data=str(seen), models=(SEES, SQUARES))
    answer = recommend(asked, progress=Silent()).answer
    assert answer.winner is not None
    assert answer.winner.run.model == SEES
    (refused,) = answer.refused
    assert refused.model == SQUARES
    assert "no row has room within 2048 tokens for its images" in refused.reason
    longer = recommend(replace(asked, seq_len=4096), progress=Silent()).answer
    assert longer.winner is not None
    assert longer.winner.run.model == SQUARES
    with pytest.raises(ConfigError, match="no row has room within 2048 tokens"):
        recommend(replace(asked, models=(SQUARES,)), progress=Silent())


def test_a_shortlist_has_no_model_whose_images_fill_the_rows(
    seen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MANY", 0)
    models = (SQUARES, SEES)
    answer = recommend(
        Question(gpu="4090", data=str(seen), models=models), progress=Silent()
    ).answer
    assert answer.winner is not None
    assert answer.winner.run.model == SEES
    assert [refused.model for refused in answer.refused] == [SQUARES]


def test_where_there_is_more_memory_larger_models_are_looked_at() -> None:
    result = said("--gpu", "8xh100")
    assert "Winner: meta-llama/Llama-3.1-405B" in result.output
    assert "looked at: 28 widely used models of" in result.output
    assert "left out: google" not in result.output
    one = plan_content(Question(gpu="h100"))
    assert "models" not in one
    assert set(LARGE_MODELS) < set(plan_content(Question(gpu="h200"))["models"])


def test_models_that_the_user_names_are_all_that_is_looked_at() -> None:
    assert "looked at" not in said("--gpu", "4090", "--models", SMALL).output
    assert "looked at: 20 widely used models of" in said("--gpu", "4090").output


def test_of_a_name_of_several_cards_it_says_which_was_taken() -> None:
    result = said("--gpu", "v100", "--models", SMALL, "--attn", "sdpa-efficient")
    assert "note: v100: taken as v100-sxm2-16gb" in result.output
    assert plan_content(Question(gpu="v100", attn="sdpa-efficient"))["attn"] == "sdpa-efficient"


@pytest.mark.parametrize("types", [("--gpu", "a100,3090"), ("--gpu", "a100", "--gpu", "3090")])
def test_several_types_are_refused_with_what_compares_them(types: tuple[str, ...]) -> None:
    result = said(*types)
    assert result.exit_code == 2
    assert "gpu: recommend takes one type, got a100,3090; 'whichlora where'" in result.output


def test_methods_are_chosen_from_those_that_are_named() -> None:
    for method in ("full", ("full",)):
        answer = recommended(gpu="4090", models=["Qwen/Qwen3-0.6B"], method=method)
        assert {candidate.run.method for candidate in answer.finetune} == {"full"}
    result = said("--gpu", "4090", "--method", "ful")
    assert result.exit_code == 2
    assert "is not known (got 'ful'); did you mean full" in result.output


def test_what_is_offloaded_fits_the_host_or_is_said() -> None:
    large = "meta-llama/Llama-3.1-70B"
    command = ("--gpu", "2x3090", "--models", f"{large},{LARGE}", "--method", "qlora")
    unknown = said(*command)
    assert f"Winner: {large}" in unknown.output
    assert re.search(r"note: host memory: .* nobody says what a node has", unknown.output)
    small = said(*command, "--host-memory", "32GiB")
    assert f"Winner: {LARGE}" in small.output
    assert "do not fit in the 32.00 GiB stated" in small.output
    assert "nobody says what a node has" not in small.output
    assert small.output.count("host memory: ") <= 3  # two reasons, and a note on loading


def test_no_more_host_memory_is_taken_for_granted_than_a_known_machine_has() -> None:
    large = "Qwen/Qwen3-235B-A22B"  # whose states on the host take 4 TiB
    question = Question(gpu="8xh100", models=(large, LARGE), method=("full",))
    for host_memory, expected in ((None, LARGE), ("8TiB", large)):
        stated = replace(question, host_memory=host_memory)
        answer = recommend(stated, progress=Silent()).answer
        assert answer.winner is not None
        assert answer.winner.run.model == expected
