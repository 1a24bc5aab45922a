"""How many GPUs a run has, and how it is spread over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from whichlora.errors import ConfigError
from whichlora.spec.options import OptionValue
from whichlora.text import require_printable

ONE_DEVICE = "none"  # the strategy of a run on one GPU
AUTO_INTERCONNECT = "auto"  # what machines of the run's GPUs usually have
AUTO = "auto"  # asks for the best of all strategies
MOST_GPUS = 100_000

_FIELDS = ("strategy", "gpus", "nodes", "interconnect", "host_memory_bytes", "global_batch_size")
_WHERE_STATED = ("host_memory_bytes", "global_batch_size")  # in files, if they are not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The GPUs of one run and the strategy that spreads it over them.

    Args:
        strategy: names registered in `whichlora.parallel`, joined with "+", such as "tp+fsdp".
        gpus: over all nodes; `batch_size` is per GPU.
        nodes: machines, which have equally many GPUs.
        interconnect: links between the GPUs: the name of a known machine, or a bandwidth such as
            "25GB/s" that each GPU sends with.
        host_memory_bytes: of each node; None: what is known of its machine.
        global_batch_size: sequences per optimizer step, from which `resolve` counts the
            micro-steps; None: the run states those.
        options: (name, value) pairs of what the strategies declare, where they are not the
            defaults; sorted.
    """

    strategy: str = ONE_DEVICE
    gpus: int = 1
    nodes: int = 1
    interconnect: str = AUTO_INTERCONNECT
    host_memory_bytes: int | None = None
    global_batch_size: int | None = None
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __post_init__(self) -> None:
        require_printable("parallel", self.strategy)
        require_printable("interconnect", self.interconnect)
        for setting, value in (("gpus", self.gpus), ("nodes", self.nodes)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{setting}: {value!r} is not a whole number; give 1 or more")
            if not 1 <= value <= MOST_GPUS:
                raise ConfigError(f"{setting}: must be 1 to {MOST_GPUS}, got {value}")
        _check_count("host_memory_bytes", self.host_memory_bytes)
        _check_count("global_batch_size", self.global_batch_size)
        if self.gpus % self.nodes:
            raise ConfigError(
                f"gpus: {self.gpus} over all nodes can't be divided by {self.nodes} nodes; give a "
                f"multiple of {self.nodes}"
            )
        if self.gpus > 1 and self.strategy == ONE_DEVICE:
            raise ConfigError(
                f"parallel: is missing for {self.gpus} GPUs; give ddp, fsdp or another strategy, "
                "or auto"
            )

    @property
    def is_one_device(self) -> bool:
        """Whether nothing is spread, whatever the host of the GPU has."""
        return self.strategy == ONE_DEVICE

    @property
    def gpus_per_node(self) -> int:
        return self.gpus // self.nodes

    @property
    def in_words(self) -> str:
        """The strategy as a table names it, with its options that are lists, such as offload."""
        if self.strategy == ONE_DEVICE:
            return "-"
        lists = (f"{name} {'+'.join(v)}" for name, v in self.options if isinstance(v, tuple) and v)
        nodes = f"{self.nodes} nodes"
        return ", ".join([self.strategy, *lists, *([nodes] if self.nodes > 1 else [])])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the strategies that are combined."""
        return tuple(name.strip() for name in self.strategy.split("+"))

    def to_dict(self) -> dict[str, Any]:
        """Every setting as JSON types; options stand beside the others."""
        options = {
            name: list(value) if isinstance(value, tuple) else value for name, value in self.options
        }
        fields = {name: getattr(self, name) for name in _FIELDS}
        for name in _WHERE_STATED:
            if fields[name] is None:
                del fields[name]
        return fields | options

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: a value that is not accepted.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"parallel: {values!r} is not an object of settings")
        options = {
            str(name): tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
            if name not in _FIELDS
        }
        return cls(
            options=tuple(sorted(options.items())),
            **{name: values[name] for name in _FIELDS if name in values},
        )


def _check_count(setting: str, value: int | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"{setting}: {value!r} is not a whole number from 1 on")


def requested(settings: Mapping[str, Any]) -> ParallelConfig:
    """What is asked of the GPUs of a run: `gpus`, `nodes`, `parallel` and the like, and options.

    None is not asked. Several GPUs without a strategy ask for the best one, "auto".

    Raises:
        ConfigError: they exclude each other, or the number of GPUs is missing.
    """
    strategy = settings.get("parallel")
    options = {k: v for k, v in settings.items() if k != "parallel" and v is not None}
    if not options and strategy in (None, ONE_DEVICE):
        return ONE_GPU
    if set(options) == {"host_memory_bytes"} and strategy in (None, ONE_DEVICE):
        options["gpus"] = 1
    if "gpus" not in options:
        raise ConfigError(
            f"gpus: is missing beside {next(iter(options), f'parallel {strategy}')}; say how many "
            "GPUs the run has over all nodes, such as gpus 4"
        )
    of_gpus = {name: options.pop(name) for name in _FIELDS[1:] if name in options}
    if strategy in (None, AUTO):
        strategy = AUTO
        if of_gpus["gpus"] == 1:  # nothing is spread, so no option of a strategy is read
            strategy, options = ONE_DEVICE, {}
            of_gpus.pop("interconnect", None)
    return ParallelConfig(strategy=strategy, options=tuple(sorted(options.items())), **of_gpus)


def micro_steps(global_batch_size: int, *, batch_size: int, at_once: int, accumulation: int) -> int:
    """Micro-steps in which `at_once` GPUs with `batch_size` each reach `global_batch_size`.

    Raises:
        ConfigError: they can't, or `accumulation`, the number that the run states, is another.
    """
    _check_count("global_batch_size", global_batch_size)
    sequences = batch_size * at_once
    if global_batch_size % sequences:
        of_gpus = f" on {at_once} GPUs at once" if at_once > 1 else ""
        raise ConfigError(
            f"global_batch_size: {global_batch_size} can't be reached with batch_size {batch_size}"
            f"{of_gpus}; give a multiple of {sequences}"
        )
    steps = global_batch_size // sequences
    if accumulation not in (1, steps):
        raise ConfigError(
            f"gradient_accumulation_steps: follows from global_batch_size, which makes {steps} of "
            f"them, got {accumulation}; leave one of both out"
        )
    return steps


ONE_GPU = ParallelConfig()
