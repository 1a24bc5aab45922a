"""What we answer: predictions that add up, and measurements as immutable records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeVar

from whichlora.errors import ConfigError
from whichlora.spec.costs import RunningCost
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.numeric import is_number
from whichlora.spec.rendering import Rendered
from whichlora.spec.run import RunConfig
from whichlora.spec.words import release_of
from whichlora.units import format_bytes

SCHEMA_VERSION = 1
MAX_REASONS = 3  # in the line that says why nothing is left

T = TypeVar("T")

Interval = tuple[float, float]
Verdict = Literal["fits", "fails", "undecided"]
Outcome = Literal["ok", "oom", "crashed", "killed", "timeout", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """Peak memory of one run on one device, in bytes.

    `breakdown` adds up to `device_used_bytes`; its parts `allocator` (idle cache and rounding)
    and `context` are what lies between the live tensors and the card.

    Args:
        moment: which moment of the run is the peak ("loss", "layer_backward", "decode", …).
        interval_bytes: bounds of `device_used_bytes` at the stated `confidence`.
        allocated_interval_bytes, reserved_interval_bytes: of the two peaks, likewise.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    device_used_bytes: int
    interval_bytes: tuple[int, int]
    allocated_interval_bytes: tuple[int, int]
    reserved_interval_bytes: tuple[int, int]
    breakdown: Mapping[str, int]
    moment: str
    confidence: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPeak:
    """What a trace of the real code says (`--engine trace`), before anything the card adds.

    Args:
        parts: live bytes at the peak: "weights", "adapters", "optimizer_states", "traced".
        note: which layers were traced, and why all of them if they were.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    moment: str
    parts: Mapping[str, int]
    num_params: int
    num_trainable_params: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePrediction:
    """Time of one optimizer step, or of one generation, in seconds; NaN where it is not known.

    Args:
        step_s: one optimizer step (fine-tuning), all accumulation micro-steps included.
        tokens_per_s: fine-tuning: trained tokens, padding included; inference: generated
            tokens of all sequences, or what an encoder reads.
        prefill_s, decode_s_per_token: one prompt pass, one decoding step of the whole batch; an
            encoder has no decoding.
        time_per_token_s: as in the original report: fine-tuning, step time over tokens;
            inference, whole generation over the same tokens.
        interval_s: bounds of `step_s`, or of `time_per_token_s` for inference.
        breakdown: seconds by feature; adds up to the point estimate (`step_s`, or the time of
            the whole generation).
    """

    step_s: float | None
    tokens_per_s: float
    prefill_s: float | None
    decode_s_per_token: float | None
    time_per_token_s: float
    interval_s: Interval
    breakdown: Mapping[str, float]
    confidence: float = 0.9

    @property
    def is_known(self) -> bool:
        return not math.isnan(self.time_per_token_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPrediction:
    """Ranks of a run on several GPUs that hold the same.

    Args:
        name: such as "every rank" or "last stage".
        ranks: their numbers.
        breakdown: bytes by part at `moment`, where they need most; adds up to the use of a card.
        host_bytes: pinned memory of each of them.
    """

    name: str
    ranks: tuple[int, ...]
    moment: str
    peak_allocated_bytes: int
    breakdown: Mapping[str, int]
    host_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape; ranks as ranges, such as "0-7"."""
        return dataclasses.asdict(self) | {"ranks": ranges(self.ranks)}


def ranges(numbers: Sequence[int]) -> str:
    """`numbers` in ascending order, such as "0-7,16"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, ends)) for ends in runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePrediction:
    """Equal messages of one optimizer step of one rank.

    Args:
        num_bytes: of the whole tensor that one of them gathers, reduces or sends.
        size: ranks that take part.
        hidden_by: what computes meanwhile, or "nothing".
        seconds: of all of them; NaN where the links are not known.
    """

    what: str
    collective: str
    num_bytes: int
    count: int
    size: int
    hidden_by: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What one rank takes part in during an optimizer step, the rank that sends most.

    Args:
        num_bytes: that it sends.
        exposed_s: seconds that it waits; NaN where the links are not known.
        overlapped_s: seconds of communication while it computes.
    """

    num_bytes: int
    exposed_s: float
    overlapped_s: float
    messages: tuple[MessagePrediction, ...]

    def to_dict(self) -> dict[str, Any]:
        values = known_values(dataclasses.asdict(self))
        values["bytes"] = values.pop("num_bytes")
        values["messages"] = [known_values(dataclasses.asdict(each)) for each in self.messages]
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingPrediction:
    """What a checkpoint of the Trainer copies or gathers of tensors that ranks divide.

    Args:
        what: is copied to host memory, such as "all weights".
        by_all_ranks: each rank copies; else rank 0 alone.
        host_bytes: of all ranks of the first node.
        device_bytes: largest tensors that a GPU gathers at once; 0: it has them.
        instead: the setting with which shares are written; empty where there is none.
    """

    what: str
    by_all_ranks: bool
    host_bytes: int
    device_bytes: int
    instead: str

    @property
    def in_words(self) -> str:
        """Who copies what, and how much."""
        copies = "each rank copies" if self.by_all_ranks else "rank 0 copies"
        size = format_bytes(self.host_bytes) + " on a node" * self.by_all_ranks
        return f"{copies} {self.what} to host memory, {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralGpus:
    """What several GPUs add to a prediction.

    Args:
        ranks: one entry for each kind of rank; the memory of the prediction is that of the one
            that needs most.
        host_bytes: pinned host memory of all ranks of a node.
        host_memory_bytes: what a node has of it; None where that is not known.
        exceeds_host: a node has less of it than they need.
        loading_host_bytes: host memory that they take before, until the GPUs have the weights.
        saving: of a checkpoint; None where ranks write what they hold.
        global_batch_size: sequences per optimizer step.
    """

    ranks: tuple[RankPrediction, ...]
    host_bytes: int
    communication: Communication
    global_batch_size: int
    host_memory_bytes: int | None = None
    exceeds_host: bool = False
    loading_host_bytes: int = 0
    saving: SavingPrediction | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "ranks": [rank.to_dict() for rank in self.ranks],
            "host_bytes": self.host_bytes,
            "host_memory_bytes": self.host_memory_bytes,
            "loading_host_bytes": self.loading_host_bytes,
            "saving": None if self.saving is None else dataclasses.asdict(self.saving),
            "communication": self.communication.to_dict(),
            "global_batch_size": self.global_batch_size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTime:
    """What users of a serving engine wait, and what it answers.

    Args:
        ttft_s: to the first token of an answer, median of the requests; `tpot_s` for each further
            one. Where many begin at once, `mean_ttft_s` is far longer.
        output_tokens_per_s, requests_per_s: of the whole engine.
        ttft_percentiles_s, tpot_percentiles_s: by the percent of requests that wait no longer.
        queue_grows: more requests arrive than are answered, so that waits have no end.
        length_spread: share by which prompts and answers vary in length.
        step_sequences: that decode at once, in the middle; `step_parts_s` is one step of them by
            kind of work.
    """

    ttft_s: float
    tpot_s: float
    mean_ttft_s: float
    output_tokens_per_s: float
    requests_per_s: float
    interval_ttft_s: tuple[float, float]
    interval_tpot_s: tuple[float, float]
    interval_output_tokens_per_s: tuple[float, float]
    ttft_percentiles_s: Mapping[int, float]
    tpot_percentiles_s: Mapping[int, float]
    queue_grows: bool
    length_spread: float
    step_sequences: int
    step_parts_s: Mapping[str, float]
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPrediction:
    """What an engine with a pool of keys and values answers when it starts, on one GPU.

    Args:
        reason: why it does not start; empty where it does.
        context: tokens of a prompt and its answer that it is started for.
        is_close: whether the pool may as well be on the other side of what a start needs.
        kv_pool_bytes: left for keys and values; below 0 where the rest takes too much.
        interval_kv_pool_bytes: that hold it with 90 %; itself, where it is stated, and of
            llama.cpp, which has none.
        kv_pool_tokens: of sequences of `context` tokens, as vLLM logs them.
        max_concurrency: sequences of `context` tokens that the pool holds, a fraction.
        max_context: tokens of the longest sequence for which it starts, or that the pool of a
            start for any length holds; 0 for none, at most the model's positions.
        concurrency: sequences that are asked for at once.
        max_running: of `context` tokens each, that run at once; what is asked beyond waits.
        left_bytes: of the GPU, beside all that the engine takes.
        command: starts it as it is judged; empty where it does not start, or has none.
        lacking_storage: what the weights of its model are to be stored as first; empty where the
            model's own files are.
        refuses: why it refuses the requests that are asked for; empty where it takes them.
        time: what users wait; None where it is not predicted, or where it refuses them.
    """

    engine: str
    version: str
    starts: bool
    reason: str
    context: int
    kv_pool_bytes: int
    interval_kv_pool_bytes: tuple[int, int]
    kv_pool_tokens: int
    num_blocks: int
    block_bytes: int
    max_concurrency: float
    max_context: int
    concurrency: int
    max_running: int
    left_bytes: int
    is_close: bool = False
    command: str = ""
    lacking_storage: str = ""
    refuses: str = ""
    time: ServingTime | None = None

    @property
    def release(self) -> str:
        """The engine with its version."""
        return release_of(self.engine, self.version)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the waits beside the pool, null where they are not predicted."""
        values = dataclasses.asdict(self)
        waits = values.pop("time")
        names = (field.name for field in dataclasses.fields(ServingTime))
        return values | (dict.fromkeys(names) if waits is None else waits)

    @property
    def starts_in_words(self) -> str:
        """Whether it starts, as far as that is known."""
        if self.is_close:
            return "maybe"
        return "yes" if self.starts else "no"

    def refusal(self, subject: str, where: str = "") -> str:
        """That `subject` does not start `where`, or may not, and why; empty where it starts."""
        if self.starts:
            return ""
        return f"{subject} {'may' if self.is_close else 'does'} not start{where}: {self.reason}"

    @property
    def lacks_context(self) -> bool:
        """Whether shorter sequences would do."""
        return 0 < self.max_context < self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingTotal:
    """A whole fine-tuning over its data.

    Args:
        num_sequences: rows of the data.
        num_tokens: of one pass over it, cut to the length of the run, without padding.
        longest: tokens of the longest row after the cut, which decides the memory.
        num_truncated: rows that are cut.
        num_steps: optimizer steps of all epochs.
        total_s, interval_s: of all of them, NaN where no time is known.
    """

    num_sequences: int
    epochs: float
    num_tokens: int
    longest: int
    num_truncated: int
    num_steps: int
    total_s: float
    interval_s: Interval

    def to_dict(self) -> dict[str, Any]:
        return known_values(dataclasses.asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationMemory:
    """What evaluations take of the device, where that is more than training.

    Args:
        batch_size: rows that they read at once.
        interval_bytes: 95 % of `device_used_bytes`.
    """

    batch_size: int
    device_used_bytes: int
    interval_bytes: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a fine-tuning was predicted with that its user did not state.

    Args:
        settings: by name of a `RunConfig` field.
        by_release: they are those of the stated release of the trainer's library.
        own: settings in which the trainer by itself differs from them.
        own_bytes: device memory with these; None where they change nothing, or nobody knows.
    """

    settings: Mapping[str, Any]
    by_release: bool = False
    own: Mapping[str, Any] = field(default_factory=dict)
    own_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class FileKey:
    """A key of another tool's file that alone says a setting.

    Args:
        values: of the setting → of the key; empty where they are the same.
    """

    name: str
    values: Mapping[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOut:
    """A run that fits in place of one that does not.

    Args:
        settings: what changes, by name of a `RunConfig` field.
        gpu: another accelerator; empty for the same.
        keys: what changes in the file that the run was read from, by its keys.
        is_lower_bound: something is not counted, so that it may fit.
    """

    settings: Mapping[str, Any]
    gpu: str
    device_used_bytes: int
    usable_bytes: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    is_lower_bound: bool = False

    def in_file(self, keys: Mapping[str, FileKey]) -> Self:
        """With the keys of a file, if those of `keys` say all that changes."""
        said: dict[str, Any] = {}
        for name, value in self.settings.items():
            if name not in keys or value not in (keys[name].values or (value,)):
                return self
            said[keys[name].name] = keys[name].values.get(value, value)
        return dataclasses.replace(self, keys=said)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape; GPUs and strategy as `RunConfig.to_dict` has them."""
        values = dataclasses.asdict(self)
        if "parallel" in self.settings:
            values["settings"]["parallel"] = self.settings["parallel"].to_dict()
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Rendered):
    """One candidate judged on one device.

    Args:
        fits: the upper bound of the need is within what the device can give.
        verdict: "fits", "fails" or "undecided" (the interval contains the limit).
        basis: which formulas and which calibration stand behind the numbers.
        several_gpus: of a run that is spread over them, else None.
        serving: of an engine with a pool, else None.
        cost: of an hour of it, where the one who predicts looked up prices.
        training: over all the data, where there is some.
        evaluation: where it takes more than training, and the verdict is its own; else None.
        assumed: what its user left open; None where nobody told what was stated.
        ways_out: of a run that does not fit, where they were looked for, cheapest change first.
    """

    run: RunConfig
    gpu: str
    num_params: int
    num_trainable_params: int
    memory: MemoryPrediction
    time: TimePrediction
    usable_bytes: int
    fits: bool
    verdict: Verdict
    basis: str
    notes: tuple[str, ...] = ()
    several_gpus: SeveralGpus | None = None
    serving: ServingPrediction | None = None
    cost: RunningCost | None = None
    training: TrainingTotal | None = None
    evaluation: EvaluationMemory | None = None
    assumed: Assumed | None = field(default=None, compare=False)  # of the question
    ways_out: tuple[WayOut, ...] = ()

    @property
    def exceeds_host(self) -> bool:
        """Whether a node has less memory than its ranks pin."""
        return self.several_gpus is not None and self.several_gpus.exceeds_host

    @property
    def tokens_per_generation(self) -> int:
        """What the time per token of an inference is over; an encoder generates none, it reads."""
        reads = self.time.decode_s_per_token is None
        return self.run.batch_size * (self.run.prompt_len if reads else self.run.max_new_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape of `whichlora estimate --json`: a contract, extended but never broken."""
        return {
            "model": self.run.model,
            "config": self.run.to_dict() | {"gpu": self.gpu},
            "num_params": self.num_params,
            "num_trainable_params": self.num_trainable_params,
            "memory": dataclasses.asdict(self.memory),
            "time": known_values(dataclasses.asdict(self.time)),
            "usable_bytes": self.usable_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
            "basis": self.basis,
            "notes": list(self.notes),
            **({} if self.several_gpus is None else self.several_gpus.to_dict()),
            **({} if self.serving is None else {"serving": self.serving.to_dict()}),
            **({} if self.cost is None else {"cost": self.cost.to_dict()}),
            **({} if self.training is None else {"training": self._training()}),
            **(
                {}
                if self.evaluation is None
                else {"evaluation": dataclasses.asdict(self.evaluation)}
            ),
            **({} if self.assumed is None else {"assumed": dataclasses.asdict(self.assumed)}),
            **({"ways_out": [way.to_dict() for way in self.ways_out]} if self.ways_out else {}),
        }

    def _training(self) -> dict[str, Any]:
        """The whole training, and its cost."""
        assert self.training is not None
        cost = None if self.cost is None else self.cost.to_dict(self.training.total_s)
        return {**self.training.to_dict(), "cost": cost}


def known_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with null for what is not known, which JSON has no number for."""

    def clean(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(clean, value))
        return None if isinstance(value, float) and math.isnan(value) else value

    return {name: clean(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """One combination of a grid that nothing can be predicted of.

    Args:
        gpu: the accelerator's key; empty where it was not asked.
        settings: those that were asked for, by name of a `RunConfig` field.
    """

    model: str
    settings: Mapping[str, Any]
    reason: str
    gpu: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape."""
        return {
            "model": self.model,
            "gpu": self.gpu or None,
            "settings": dict(self.settings),
            "reason": self.reason,
        }


class Answers(list[T], Rendered):
    """What a grid was answered with, and the combinations of it that were refused."""

    def __init__(self, answered: Iterable[T] = (), refused: Iterable[Refused] = ()) -> None:
        super().__init__(answered)
        self.refused = tuple(refused)
        if self.refused and not self:
            raise ConfigError(_nothing_left(self.refused))


def _nothing_left(refused: Sequence[Refused]) -> str:
    """Why all of `refused` were; of a lone reason the reason alone."""
    reasons = list(dict.fromkeys(each.reason for each in refused))
    if len(reasons) == 1:
        return reasons[0]
    more = f"; and {len(reasons) - MAX_REASONS} more reasons" if len(reasons) > MAX_REASONS else ""
    return (
        f"nothing is left of {len(refused)} combinations: {'; '.join(reasons[:MAX_REASONS])}{more}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One profiled candidate: an immutable record with its provenance.

    Args:
        id: unique name of the record; merging databases is a union over it.
        gpu: device key; `environment` holds the raw device name.
        config: `RunConfig.to_dict()` of what ran.
        model_config: the Hugging Face config of a model that models_db does not hold.
        outcome: "ok", or how it ended: out of memory, a crash, a kill, a time-out, an error of
            the libraries. All are results.
        detail: one line of the error, empty when ok.
        step_s: seconds of each measured optimizer step, warm-up left out (fine-tuning); fewer
            than were asked for where the first ones settled what the run was for.
        warm_up_s: seconds of the first step, at the longest length; 0 where not recorded.
        batch_seq_len: padded length of the batches of each of these steps.
        generate_s: seconds of each measured generation (inference), with `prefill_s` and
            `decode_s_per_token` of the same generations.
        peak_allocated_bytes: peak of the framework's allocator, live tensors only.
        peak_reserved_bytes, device_used_bytes: None where the device has no such counter.
        moment_peak_bytes: peak allocated within each moment of the ledger, over all steps; empty
            where the device's allocator has no counters.
        largest_blocks_bytes: the largest blocks that the allocator handed out, where its history
            was asked for.
        engine_log: what a serving engine's log or metrics state, by name with its unit.
        device_s: seconds of device time that the measurement cost, building included.
        build_s: of these, until the model was built; 0 where it was kept from the run before, or
            not recorded.
        environment: device name, driver and the power that it is set to, library versions, host
            facts.
        provenance: who measured (free text), command, commit, run id.
    """

    id: str
    gpu: str
    date: str
    config: Mapping[str, Any]
    outcome: Outcome
    model_config: Mapping[str, Any] | None = None
    detail: str = ""
    step_s: tuple[float, ...] = ()
    batch_seq_len: tuple[int, ...] = ()
    generate_s: tuple[float, ...] = ()
    prefill_s: tuple[float, ...] = ()
    decode_s_per_token: tuple[float, ...] = ()
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    moment_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    largest_blocks_bytes: tuple[int, ...] = ()
    engine_log: Mapping[str, float] = field(default_factory=dict)
    device_s: float = 0.0
    build_s: float = 0.0
    warm_up_s: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def run(self) -> RunConfig:
        return RunConfig.from_dict(self.config)

    @property
    def power_limit_w(self) -> float | None:
        """What the driver of its device was set to; None where nobody wrote that down."""
        watts = self.environment.get("power_limit_w")
        return float(watts) if is_number(watts) and 0 < watts < math.inf else None

    def as_set(self, gpu: GpuSpec) -> GpuSpec:
        """`gpu` with the power that its driver allowed."""
        return dataclasses.replace(gpu, power_limit_w=self.power_limit_w)

    @property
    def closest_peak_bytes(self) -> int | None:
        """The peak of the counter closest to the card, of those that the device has."""
        peaks = (self.device_used_bytes, self.peak_reserved_bytes, self.peak_allocated_bytes)
        return next((peak for peak in peaks if peak is not None), None)

    @property
    def step_lengths(self) -> tuple[int, ...]:
        """Padded length of the batches of each step; a record without them had its run's own."""
        return self.batch_seq_len or (self.run.seq_len,) * len(self.step_s)

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION} | dataclasses.asdict(self)
