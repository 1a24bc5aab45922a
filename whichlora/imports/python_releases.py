"""Arguments that newer releases refuse → the releases that a script was written for.

A script that hands over such an argument ends in a TypeError under the releases that formulas are
made for, so that its run is one of older ones, with their defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from whichlora.imports.base import Keys, Launch
from whichlora.spec.releases import by_month
from whichlora.spec.versions import Libraries, release_numbers
from whichlora.trainers import Trainer
from whichlora.trainers.trl import LIBRARY

# Arguments of trainers → the last release of TRL that takes them. Read: the classes of 0.11.4 to
# 1.9.0; "tokenizer" is "processing_class" since.
_OF_SFT = ("max_seq_length", "dataset_text_field", "packing", "dataset_num_proc", "eval_packing")
_OF_DPO = ("beta", "max_length", "max_prompt_length", "loss_type", "label_smoothing")
_TRAINERS: Mapping[str, Mapping[str, str]] = {
    "Trainer": {"tokenizer": "4.57.6"},  # of transformers
    "SFTTrainer": {**dict.fromkeys(_OF_SFT, "0.12.2"), "tokenizer": "0.15.2"},
    "DPOTrainer": {**dict.fromkeys(_OF_DPO, "0.12.2"), "tokenizer": "0.15.2"},
    "ORPOTrainer": {"tokenizer": "0.14.0"},
    "RewardTrainer": {"tokenizer": "0.14.0"},
    "CPOTrainer": {"tokenizer": "0.13.0"},
    "KTOTrainer": {"tokenizer": "0.13.0"},
}
# Arguments of their configs, the same. Read: sft_config.py, dpo_config.py, grpo_config.py.
_CONFIGS: Mapping[str, Mapping[str, str]] = {
    "SFTConfig": {"max_seq_length": "0.19.1"},
    "DPOConfig": {"max_prompt_length": "0.28.0"},
    "GRPOConfig": {"max_prompt_length": "0.27.2"},
}
# Fields of `TrainingArguments` → the last release of transformers that was read and takes them.
# Read: training_args.py of 4.45, 4.46, 4.57, 5.0, 5.4 and 5.23.
_PLAIN = "TrainingArguments"
_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("evaluation_strategy", "dispatch_batches", "split_batches"), "4.46.3"),
    **dict.fromkeys(("overwrite_output_dir", "no_cuda", "push_to_hub_token"), "4.57.6"),
    **dict.fromkeys(("fp16_backend", "half_precision_backend", "fp16_opt_level"), "4.57.6"),
    **dict.fromkeys(("per_gpu_train_batch_size", "per_gpu_eval_batch_size"), "4.57.6"),
    **dict.fromkeys(("save_safetensors", "adafactor", "use_mps_device", "ray_scope"), "4.57.6"),
    **dict.fromkeys(("include_inputs_for_metrics", "push_to_hub_model_id"), "4.57.6"),
    "group_by_length": "5.0.0",
    **dict.fromkeys(("warmup_ratio", "logging_dir"), "5.4.0"),
}
# Releases of TRL, newest first, with the oldest transformers that each asks for
# and one of its day. Source: setup.py and pyproject.toml of its tags.
_PAIRS = (
    ("0.28.0", "4.56.2", "5.1.0"),
    ("0.27.2", "4.56.2", "5.0.0"),
    ("0.19.1", "4.51.0", "4.53.1"),
    ("0.15.2", "4.46.0", "4.49.0"),
    ("0.14.0", "4.46.0", "4.48.1"),
    ("0.13.0", "4.46.0", "4.47.0"),
    ("0.12.2", "4.46.0", "4.46.3"),
    ("0.11.4", "4.40.0", "4.45.2"),
)
# Classes, and arguments of them → the first release that has them; of others, the first that was
# read: TRL's trainers of 0.8.6, transformers 4.31. Source: files of TRL's tags; transformers 4.41
# and 4.46 `TrainingArguments`, `Trainer`.
_FIRST = {"trl": "0.8.6", "transformers": "4.31.0"}
_SINCE: Mapping[str, Mapping[str, str]] = {
    "SFTConfig": {"trl": "0.9.3"},
    "DPOConfig": {"trl": "0.9.3"},
    "GRPOConfig": {"trl": "0.14.0"},
    "GRPOTrainer": {"trl": "0.14.0"},
    "processing_class": {"trl": "0.12.0", "transformers": "4.46.0"},
    "steps_per_generation": {"trl": "0.18.0"},
    "vllm_mode": {"trl": "0.18.0"},
    "eval_strategy": {"transformers": "4.41.0"},
}
OLD_ARGUMENTS = frozenset({name for names in _TRAINERS.values() for name in names})
_NEWEST_ASKS = "4.56.2"  # of transformers, TRL 1.9


def written_for(
    keys: Keys, launch: Launch, trainer: Trainer, arguments: str
) -> tuple[Launch, Mapping[str, str]]:
    """`launch` under the newest releases that take all arguments, and these; else empty.

    Where the user states libraries, or the script installs those that refuse them, nothing
    changes, and a note says what they refuse.

    Args:
        arguments: class of the training arguments; empty where it is not known.
    """
    now = launch.libraries
    name = trainer.class_name
    of_trainer, of_config = _TRAINERS.get(name, {}), _CONFIGS.get(arguments, {})
    given = sorted(each for each in keys.under("Trainer") if each in of_trainer)
    asked = (
        _Asked(trainer.library, name, {each: of_trainer[each] for each in given}),
        _Asked("trl", arguments, {n: last for n, last in of_config.items() if n in keys}),
        _Asked("transformers", _PLAIN, {n: last for n, last in _ARGUMENTS.items() if n in keys}),
    )
    refusing = [each for each in asked if each.refusal(now)]
    what = "; ".join(each.refusal(now) for each in refusing)
    are_pinned = all(each.library in launch.pins for each in refusing)
    if not what or launch.states_libraries or are_pinned:
        keys.assumed += [what] if what else []
        return launch, {}
    older = _releases(now, asked, uses_trl=trainer.library == LIBRARY)
    shown = ",".join(map("=".join, older.items()))
    keys.assumed.append(f"{what}; predicted as --libraries {shown}, which take it")
    keys.oldest = _oldest(keys, (name, arguments), older)
    return replace(launch, libraries=replace(now, **older)), older


def _oldest(keys: Keys, classes: Iterable[str], newest: Mapping[str, str]) -> str:
    """The first month whose releases have all that is asked, where they are before `newest`."""
    asked = {*classes, *(name for name in _SINCE if name in keys or name in keys.under("Trainer"))}
    firsts = [_FIRST, *(_SINCE.get(name, {}) for name in asked)]
    for month, installed in by_month().items():
        numbers = {library: release_numbers(installed[library]) for library in newest}
        has_all = all(
            numbers[library] >= release_numbers(each.get(library, "0"))
            for each in firsts
            for library in newest
        )
        if has_all:
            is_older = all(numbers[name] < release_numbers(newest[name]) for name in newest)
            return month if is_older else ""
    return ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """Arguments that a script hands to `owner`, with the last release that takes each."""

    library: str
    owner: str
    lasts: Mapping[str, str]

    def refusal(self, now: Libraries) -> str:
        """What the library refuses; empty for nothing."""
        names = [name for name, last in self.lasts.items() if now.newer(self.library, last)]
        if not names:
            return ""
        release = f"{self.library} {getattr(now, self.library)}"
        return f"{release} refuses {', '.join(names)} of {self.owner}"


def _releases(now: Libraries, asked: Sequence[_Asked], *, uses_trl: bool) -> dict[str, str]:
    """The newest releases that go together and take all that is asked."""
    most = {"trl": now.trl, "transformers": now.transformers}
    for each in asked:
        if each.lasts:
            lasts = (most[each.library], *each.lasts.values())
            most[each.library] = min(lasts, key=release_numbers)
    if not uses_trl:
        return {"transformers": most["transformers"]}
    newest = (now.trl, _NEWEST_ASKS, now.transformers)
    limits = {library: release_numbers(version) for library, version in most.items()}
    pairs = (
        (release, min(most["transformers"], of_its_day, key=release_numbers))
        for release, oldest, of_its_day in (newest, *_PAIRS)
        if release_numbers(release) <= limits["trl"]
        and release_numbers(oldest) <= limits["transformers"]
    )
    release, beside = next(pairs, (most["trl"], most["transformers"]))
    return {"trl": release, "transformers": beside}
