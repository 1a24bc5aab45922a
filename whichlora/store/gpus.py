"""Accelerators by any name people or drivers give them: `calibration/<key>/gpu.json`."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from whichlora.errors import ConfigError, MeasurementError
from whichlora.spec.backends import BACKENDS
from whichlora.spec.backends.cuda import ASSUMED_CAPABILITY
from whichlora.spec.gpu import GpuSpec

# "cpu" and "auto" name detected devices, so that this module imports detection.
from whichlora.store.cpu_prior import cpu_spec
from whichlora.store.detect import DetectedDevice, detect_cpu, detect_gpus
from whichlora.store.gpu_file import SCHEMA_VERSION, read_gpu
from whichlora.store.jsonfiles import is_slug, read_object
from whichlora.store.machines import gpus_of_machine
from whichlora.store.paths import data_folder, user_calibration_folder
from whichlora.text import visible
from whichlora.units import GiB, format_bytes

# Driver totals of a board differ by ECC (7 %) and driver; the next size is 20 % away.
_SAME_BOARD_FRACTION = 0.1
# A file of the driver of each device that nothing here asks, and of which kind the device is.
_OTHER_DRIVERS = {
    Path(path): backend.kind for backend in BACKENDS.values() for path in backend.driver_files
}

# "2x4090", "8 x H100", "t4x2", "a100:4"
_PROCESSOR = re.compile(
    r"\bi[3579][- ]?\d{4,5}|ryzen|epyc|xeon|threadripper|core ultra", re.IGNORECASE
)
_SEVERAL = re.compile(r"\d{1,3} ?[x*] ?(?P<after>.+)|(?P<before>.+?) ?[x*:] ?\d{1,3}")
_COUNTED = re.compile(r"(?P<number>[1-9]\d{0,2}) ?x ?(?P<name>.+)")  # "2x4090"
_COUNTED_LAST = re.compile(r"(?P<name>.+?) ?[x*:] ?(?P<number>[1-9]\d?)")  # "4090x2", "L4:2"
# "8" counts GPUs; those with a number for a name have four digits, "4090"
_COUNT = re.compile(r"[+-]?\d{1,3}(\.\d*)?")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
# "24GB", "24 gib", "any 24 GB card"
_AMOUNT = re.compile(
    r"(?:any )?(?P<number>\d+(?:\.\d+)?) ?(?P<unit>gib|gb|g)(?: (?:gpu|card|vram))?"
)
MOST_GB = 10_000
# of a name: "3060-8gb", "8gb-3060", "a100-pcie-40"
_MEMORY = re.compile(r"-?\b\d{1,3}-?(?:gi?b|g)\b-?|-\d{1,3}$")
# "rtx-3090@280W"
_LIMITED = re.compile(r"(?P<name>[^@]+)@ ?(?P<watts>\d{1,5}(?:\.\d+)?) ?w(?:atts?)?", re.IGNORECASE)
_LEAST_POWER = 0.2  # of a board's own: drivers take no lower limits
# Words of a board's name that make it another board.
_VARIANTS = frozenset(
    {"ti", "super", "xt", "xtx", "gre", "d", "ada", "sff", "pro", "laptop", "max", "q", "ultra"}
)
_JOINED = re.compile(r"(?<!max)\+")  # "3090+4090", but not "Ryzen AI Max+ 395"
_SET_LOWER = 0.98  # of a board's own power: limits from there on are the usual ones
_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|intel|apple|instinct|radeon|tesla|quadro|geforce|graphics|generation|edition"
    r"|corporation|data center gpu)\b"
    r"|\((r|tm)\)"
)


def find_gpu(name: str, *, least_memory: bool = False) -> GpuSpec:
    """The accelerator that `name` means, here or elsewhere; `notes` say so where it is not exact.

    Args:
        name: a key, an alias, the name a driver prints, "cpu" for this host's CPU, "auto" for
            the first GPU here and the CPU where there is none; "rtx-3090@280W" for one whose
            driver is set to draw so much.
        least_memory: of boards that share `name`, take the smallest: a run that fits there fits
            on the others. Without it the name is refused, since a record or a price belongs to
            one board.

    Raises:
        ConfigError: no accelerator has that name, or several have.
        DataFileError: its file is broken.
        MeasurementError: "auto", and the driver does not answer.
    """
    key = name.strip().lower()
    if "@" in key:
        return _limited(name, least_memory)
    if key == "auto":
        return _gpu_here()
    if key == "cpu":
        return _cpu_here()
    if _any_card(name) is not None:
        raise ConfigError(
            f"GPU {name!r} is an amount of memory, and this needs the rates of a card; "
            "'whichlora gpus' lists them; 'whichlora estimate' and a plan with profile: none take "
            "the amount"
        )
    spec = _load(key)
    if spec is not None:
        return spec
    for read_index in _INDEXES:
        index = read_index()
        keys = _keys_named(name, index)
        if len(keys) > 1:
            return _usual(name, keys, least_memory)
        spec = _load(keys[0]) if keys else _by_words(name, index, least_memory)
        if spec is not None:
            return spec
    if key.startswith("cpu-"):
        here = _cpu_here()
        if here.key == key:
            return here
        raise ConfigError(f"unknown GPU {name!r}: the CPU of this machine is {here.key}; use cpu")
    if "," in name:
        raise ConfigError(f"unknown GPU {name!r}: give several types as a list, one name each")
    if _joins(name):
        raise ConfigError(
            f"unknown GPU {name!r}: unequal cards in one run are predicted by 'whichlora estimate' "
            "alone; elsewhere name the smallest, and their number as gpus"
        )
    several = _SEVERAL.fullmatch(key)
    single = _keys_named_anywhere(several["before"] or several["after"]) if several else []
    if single or is_count(name):
        type_or_amount = "a type ('whichlora gpus' lists them) or an amount of memory ('24GB')"
        example = f"the type alone, such as {single[-1]}" if single else type_or_amount
        raise ConfigError(f"unknown GPU {name!r}: give {example}, and the number as gpus")
    if machine := gpus_of_machine(name):
        number, gpu = machine
        raise ConfigError(f"unknown GPU {name!r}: that machine has {number} {gpu}; give the type")
    if _PROCESSOR.search(name):
        raise ConfigError(
            f"unknown GPU {name!r}: a processor; cpu is that of this machine, and cpu-64gb any one "
            "with so much memory, whose rate llama.cpp takes as host_bandwidth, such as ddr5-5600"
        )
    raise ConfigError(
        f"unknown GPU {name!r}{_suggestion(name)}; 'whichlora gpus' lists all, and an amount of "
        "memory ('12GB') is judged without times"
    )


def is_count(name: str) -> bool:
    """Whether `name` is a number of GPUs, not the name of one: "8" and "1024", but not "4090"."""
    if _NUMBER.fullmatch(name.strip()) is None:
        return False
    return _COUNT.fullmatch(name.strip()) is not None or not _keys_named_anywhere(name)


def find_target(name: str) -> GpuSpec:
    """The target of a prediction: an accelerator, or any card with an amount of memory ("24GB").

    Raises:
        ConfigError: as `find_gpu`.
    """
    return _any_card(name) or find_gpu(name, least_memory=True)


def find_cards(name: str) -> tuple[tuple[GpuSpec, int], ...]:
    """The targets that `name` joins with "+", each with its number: "rtx-3090-24gb+2x4090".

    Without a "+" it is one, of any number of equal cards.

    Raises:
        ConfigError: as `find_gpu`.
    """
    if not _joins(name):
        return ((find_target(name), 1),)
    numbers: dict[str, int] = {}
    specs: dict[str, GpuSpec] = {}
    for part in _JOINED.split(name.lower()):
        number, card = _counted(part) or (1, part)
        spec = find_target(card)
        specs[spec.key] = spec
        numbers[spec.key] = numbers.get(spec.key, 0) + number
    if len(specs) == 1:
        ((key, number),) = numbers.items()
        raise ConfigError(f"gpu: {name}: cards are equal; write {number}x{key}")
    return tuple((spec, numbers[key]) for key, spec in specs.items())


def number_of(name: str) -> tuple[int | None, str]:
    """How many equal cards `name` states, and their type; None where it does not.

    "2x3090", "3090x2" and the machines of clouds, "g5.12xlarge", do.
    """
    if not _joins(name) and (counted := _counted(name)):
        return counted
    return gpus_of_machine(name) or (None, name)


def _counted(name: str) -> tuple[int, str] | None:
    """The number of cards before or behind their type; None where `name` has none."""
    first, last = (each.fullmatch(name.strip()) for each in (_COUNTED, _COUNTED_LAST))
    if first is None and last is not None and not _keys_named_anywhere(last["name"].lower()):
        last = None  # the x of "Max 48"
    found = first or last
    return found and (int(found["number"]), found["name"])


def _joins(name: str) -> bool:
    return _JOINED.search(name.lower()) is not None


def types_by_number(names: Iterable[str], *, stated: bool) -> dict[int | None, list[str]]:
    """Types of GPU by the number of equal cards that `names` state; None of those that do not.

    Args:
        stated: whether another setting states the number.

    Raises:
        ConfigError: both do.
    """
    types: dict[int | None, list[str]] = {}
    for name in names:
        number, gpu = number_of(name)
        if number is not None and stated:
            raise ConfigError(f"gpu: {name} states how many; leave gpus out")
        types.setdefault(number, []).append(gpu)
    return types


def one_number(names: Sequence[str], *, stated: bool) -> tuple[int | None, list[str]]:
    """The one number of equal cards that `names` state, if any, and their types.

    Raises:
        ConfigError: as `types_by_number`, or they state several.
    """
    if len({number_of(name)[0] for name in names}) > 1:
        raise ConfigError(
            f"gpu: {', '.join(names)} state several numbers of GPUs; give all types the same, or "
            "ask estimate"
        )
    ((number, types),) = types_by_number(names, stated=stated).items()
    return number, types


def number_in(name: str) -> int | None:
    """How many cards `name` states, equal or not: "2x3090", "3090+2x4090"; None where it does not.

    Raises:
        ConfigError: as `find_gpu`.
    """
    return sum(number for _, number in find_cards(name)) if _joins(name) else number_of(name)[0]


def each_once(specs: Iterable[GpuSpec]) -> list[GpuSpec]:
    """`specs` without repetition: several names may mean one accelerator.

    Raises:
        ConfigError: as `require_one_limit`.
    """
    named = list(specs)
    require_one_limit(named)
    return list({spec.key: spec for spec in named}.values())


def require_one_limit(specs: Iterable[GpuSpec]) -> None:
    """Check that no board is asked for as it is set in several ways, which have one key.

    Raises:
        ConfigError: one has different limits of its power.
    """
    limits: dict[str, float | None] = {}
    for spec in specs:
        if limits.setdefault(spec.key, spec.power_limit_w) != spec.power_limit_w:
            raise ConfigError(
                f"gpu: {spec.key} is named with different power limits; ask for one at a time"
            )


def _limited(name: str, least_memory: bool) -> GpuSpec:
    """The board before the @ of `name`, set to the watts after it.

    Raises:
        ConfigError: as `find_gpu`, and where that is no limit that the board can have.
    """
    limited = _LIMITED.fullmatch(name.strip())
    if limited is None:
        raise ConfigError(
            f"unknown GPU {name!r}: what follows @ is the power limit that its driver is set to, "
            "such as rtx-3090@280W"
        )
    spec, watts = find_gpu(limited["name"], least_memory=least_memory), float(limited["watts"])
    if spec.power_w is None:
        raise ConfigError(
            f"GPU {name!r}: the power of {spec.key} is not known; leave the limit out"
        )
    if not _LEAST_POWER * spec.power_w <= watts <= spec.power_w:
        raise ConfigError(
            f"GPU {name!r}: a power limit of {spec.key} must be from "
            f"{_LEAST_POWER * spec.power_w:g} to {spec.power_w:g} W, got {watts:g}"
        )
    return _as_set(spec, watts)


def _usual(name: str, keys: Sequence[str], least_memory: bool) -> GpuSpec:
    """The board that people mean by a name that several have.

    Raises:
        ConfigError: no packaged file marks one as usual, and `least_memory` is false.
    """
    usual = _packaged_index()["usual"]
    key, why = usual.get(_squash(name)), "the usual one"
    if key is None and least_memory:
        boards = [spec for spec in map(_load, keys) if spec is not None]
        least_bytes = (1 + _SAME_BOARD_FRACTION) * min(spec.memory_bytes for spec in boards)
        smallest = [spec.key for spec in boards if spec.memory_bytes <= least_bytes]
        key = next((key for key in smallest if key in usual.values()), smallest[0])
        why = "the one with the least memory"
    spec = _load(key) if key else None
    if spec is None:
        raise ConfigError(f"GPU {name!r} is ambiguous: {', '.join(keys)}; give one of these")
    return replace(spec, notes=(f"{name}: taken as {key}, {why} of {', '.join(keys)}",))


def _by_words(name: str, index: Mapping[str, Any], least_memory: bool) -> GpuSpec | None:
    """The board with every word of `name` among its names: "4090 24gb"; None without one.

    Raises:
        ConfigError: several have them all.
    """
    other_boards = _VARIANTS - _words(name)
    closest = [key for key in _closest_by_words(name, index) if not _words(key) & other_boards]
    if named := _keys_of_any_size(name, index):  # a 3060 of 8 GB is no 3060 Ti
        closest = [key for key in closest if key in named]
    if len(closest) > 1:
        return _usual(name, closest, least_memory)
    spec = _load(closest[0]) if closest else None
    return spec and replace(spec, notes=(f"{name}: taken as {spec.key}",))


def _closest_by_words(name: str, index: Mapping[str, Any]) -> list[str]:
    """Keys of the boards with every word of `name` among their names, and the fewest others."""
    wanted = _words(name)
    if not wanted or is_count(name):  # the 8 of "8 GPUs" is also a word of p4-8gb
        return []
    further: dict[str, int] = {}
    for key, words in index["words"].items():
        if all(word in words or f"{word}gb" in words for word in wanted):
            further[key] = len(_words(key) - wanted)
    return sorted(key for key in further if further[key] == min(further.values()))


def _any_host(number: str) -> GpuSpec:
    """A processor whose memory alone is known: modules of 64 GB have 64 GiB."""
    num_bytes = round(float(number) * GiB)
    return GpuSpec(
        key=f"cpu-{number}gb",
        name=f"any processor with {number} GB",
        kind="cpu",
        memory_bytes=num_bytes,
        bandwidth_bytes_per_s=0.0,
        peak_flops_per_s={},
        notes=(f"cpu-{number}gb: any processor, with {format_bytes(num_bytes)} of memory",),
    )


def _any_card(name: str) -> GpuSpec | None:
    """A target of memory alone; None where `name` is no amount of memory.

    A card sold as 24 GB reports less to the framework, so the smallest card of that size decides.
    24GiB is exactly that many bytes.
    """
    text = name.strip().lower()
    host = text.removeprefix("cpu-")
    amount = _AMOUNT.fullmatch(host)
    if amount is None or not 1 <= float(amount["number"]) <= MOST_GB:
        return None
    number = f"{float(amount['number']):g}"
    if host != text:
        return _any_host(number)
    if amount["unit"] == "gib":
        num_bytes = round(float(number) * GiB)
        note = f"{name}: {format_bytes(num_bytes)} that the driver reports"
    else:
        sold = _packaged_index()["sold_as_gb"].get(number)
        num_bytes = sold["memory_bytes"] if sold else round(float(number) * 10**9)
        note = f"{name}: {format_bytes(num_bytes)}"
        if sold:
            note += f", what {sold['key']} reports, the least of the cards sold as {number} GB"
    return GpuSpec(
        key=f"{number}{'gib' if amount['unit'] == 'gib' else 'gb'}",
        name=f"any card of {number} {'GiB' if amount['unit'] == 'gib' else 'GB'}",
        kind="cuda",
        memory_bytes=num_bytes,
        bandwidth_bytes_per_s=0.0,
        peak_flops_per_s={},
        notes=(
            f"{note}; compute capability {ASSUMED_CAPABILITY} or newer is assumed",
            "an amount of memory has no time: name a card for it; 'whichlora where' lists them",
        ),
    )


def list_gpus() -> tuple[GpuSpec, ...]:
    """Every accelerator that a name can mean, packaged and the user's, in the order of their keys.

    Raises:
        DataFileError: a file is broken.
    """
    keys = {path.parent.name for root in _roots() for path in _gpu_files(root)}
    return tuple(spec for key in sorted(keys) if (spec := _load(key)) is not None)


def gpu_key(name: str) -> str:
    """`name` as folder names spell it: "NVIDIA A100-SXM4-80GB" is a100-sxm4-80gb."""
    words = _VENDOR_WORDS.sub(" ", name.lower().replace("_", " ").replace("mobile", "laptop"))
    return re.sub(r"[^a-z0-9.]+", "-", words).strip("-.")


def build_index(root: Path) -> dict[str, Any]:
    """Index of the names in all gpu.json below `root`.

    `names` are driver names, in lower case; `aliases` are all spellings without punctuation, so
    that RTX4090, rtx-4090 and "RTX 4090" are equal. A driver name is tried first: "Quadro RTX 6000"
    is one board, "RTX 6000" may be two. `usual` is the board that people mean by a shared name;
    `words` are all words of a board's names; `sold_as_gb` is the smallest card of a size, of CUDA
    where there is one.
    """
    names: dict[str, list[str]] = {}
    aliases: dict[str, list[str]] = {}
    usual: dict[str, str] = {}
    words: dict[str, list[str]] = {}
    sold: dict[str, tuple[bool, int, str]] = {}
    for path in _gpu_files(root):
        spec = read_gpu(path)
        for name in sorted({name.lower() for name in spec.names}):
            names.setdefault(name, []).append(spec.key)
        spellings = (spec.key, *spec.aliases, *spec.names)
        for alias in sorted({_squash(text) for text in spellings}):
            aliases.setdefault(alias, []).append(spec.key)
        words[spec.key] = sorted(set().union(*map(_words, spellings)))
        values = read_object(path)
        usual |= {_squash(alias): spec.key for alias in values.get("usual_for") or ()}
        nominal = values.get("nominal_memory_gb")
        if nominal and not spec.backend.shares_host_memory:  # a Mac of 24 GB is no card of 24 GB
            # the run on such a card is predicted as on CUDA
            card = (spec.backend.torch_device != "cuda", spec.memory_bytes, spec.key)
            sold[f"{nominal:g}"] = min(sold.get(f"{nominal:g}", card), card)
    return {
        "schema_version": SCHEMA_VERSION,
        "names": names,
        "aliases": aliases,
        "usual": usual,
        "words": words,
        "sold_as_gb": {
            size: {"key": key, "memory_bytes": memory_bytes}
            for size, (_, memory_bytes, key) in sold.items()
        },
    }


def _words(name: str) -> set[str]:
    """The words of a name: "RTX 4060Ti 16 GB" has rtx, 4060, ti and 16gb."""
    text = re.sub(r"\b(\d+)[ -]?(?:gi?b|g)\b", r" \1gb ", gpu_key(name).replace("-", " "))
    return set(re.findall(r"[a-z]*\d+(?:gb|[a-z](?![a-z]))?|[a-z]+", text))


def _cpu_here() -> GpuSpec:
    prior = cpu_spec(detect_cpu())
    measured = _load(prior.key)
    # The same CPU in a smaller container has less memory, not another speed.
    return replace(measured, memory_bytes=prior.memory_bytes) if measured else prior


def detected_gpus() -> list[tuple[DetectedDevice, GpuSpec | None]]:
    """Every GPU that a program started here would see, with its spec; None where no file has it.

    Raises:
        MeasurementError: the driver does not answer.
    """
    return [(device, _described(device)) for device in detect_gpus()]


def host_memory_beside(gpu: GpuSpec) -> int | None:
    """Memory of this machine that a process may use; None where this machine has no such GPU."""
    here = gpu.is_cpu or gpu.key in _keys_seen_by(detect_gpus)
    return detect_cpu().memory_bytes if here else None


@cache
def _keys_seen_by(detect: Callable[[], Sequence[DetectedDevice]]) -> frozenset[str]:
    """Types of GPU of this machine, asked once: 'whichlora where' has many types to compare."""
    with suppress(MeasurementError):
        return frozenset(spec.key for spec in map(_described, detect()) if spec)
    return frozenset()


def gpus_here() -> list[tuple[DetectedDevice, GpuSpec]]:
    """Every GPU that a program started here would see, with its spec.

    Raises:
        ConfigError: no file describes one of them.
        MeasurementError: the driver does not answer.
    """
    return [(device, _require_described(device)) for device in detect_gpus()]


def _gpu_here() -> GpuSpec:
    detected = detect_gpus()
    if not detected:
        # the CPU would be a wrong answer there, not a fallback
        if other := next((path for path in _OTHER_DRIVERS if path.exists()), None):
            raise ConfigError(
                f"auto: finds NVIDIA GPUs only, and this machine has {_OTHER_DRIVERS[other]} "
                f"({other}); pass --gpu with a key of 'whichlora gpus', or cpu"
            )
        if sys.platform == "darwin":
            raise ConfigError(
                "auto: finds NVIDIA GPUs only, and this machine is a Mac; pass --gpu with its chip "
                "and memory, such as m4-max-64gb ('whichlora gpus' lists them)"
            )
        return _cpu_here()
    first = _require_described(detected[0])
    return replace(first, notes=(*first.notes, *_how_many(detected, first)))


def _how_many(detected: Sequence[DetectedDevice], first: GpuSpec) -> tuple[str, ...]:
    """A note on the GPUs of this machine, where it shows several."""
    if len(detected) == 1:
        return ()
    described = map(_described, detected)
    names = [
        spec.key if spec else device.name for device, spec in zip(detected, described, strict=True)
    ]
    numbers = {name: names.count(name) for name in names}
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if variable is None else f" (visible: CUDA_VISIBLE_DEVICES={visible(variable)})"
    if len(numbers) == 1:
        advice = f"gpus {len(names)} spreads a run over them"
        return (f"auto: this machine has {len(names)} {first.key}{shown}; {advice}",)
    together = "+".join(
        f"{number}x{name}" if number > 1 else name for name, number in numbers.items()
    )
    return (f"auto: {first.key}, the first GPU of this machine{shown}, which has {together}",)


def _described(device: DetectedDevice) -> GpuSpec | None:
    """The board on file that a detected GPU is, None where no file describes it.

    A user's file is asked where no packaged board of that name has that much memory.
    """
    for read_index in _INDEXES:
        keys = _keys_named(device.name, read_index())
        specs = [spec for key in keys if (spec := _load(key))]
        off = {spec.key: abs(device.memory_bytes / spec.memory_bytes - 1) for spec in specs}
        specs = [spec for spec in specs if off[spec.key] <= _SAME_BOARD_FRACTION]
        if specs:
            return _as_set(min(specs, key=lambda spec: off[spec.key]), device.power_limit_w)
    return None


def _as_set(spec: GpuSpec, limit_w: float | None) -> GpuSpec:
    """`spec` with what its driver is set to, where that is less than the board's own power."""
    if limit_w is None or spec.power_w is None or limit_w >= _SET_LOWER * spec.power_w:
        return spec
    note = f"{spec.key} at {limit_w:g} W of {spec.power_w:g}: products take longer"
    return replace(spec, power_limit_w=limit_w, notes=(*spec.notes, note))


def _require_described(device: DetectedDevice) -> GpuSpec:
    spec = _described(device)
    if spec is None:
        user_file = user_calibration_folder() / gpu_key(device.name) / "gpu.json"
        raise ConfigError(
            f"auto: no file describes the {device.name} with {format_bytes(device.memory_bytes)} "
            "of this machine; name a GPU like it (gpu: in a plan, --gpu elsewhere; 'whichlora "
            f"gpus' lists them), or describe it in {user_file}, after the gpu.json of a GPU like "
            f"it in {data_folder('calibration')}"
        )
    return spec


def _roots() -> tuple[Path, Path]:
    """The packaged folder first: a file that came with shared records takes over no name."""
    return data_folder("calibration"), user_calibration_folder()


def _gpu_files(root: Path) -> list[Path]:
    return sorted(root.glob("*/gpu.json"))


def _load(key: str) -> GpuSpec | None:
    """The accelerator with this key; a user's file only where no packaged one has that name."""
    if not is_slug(key):
        return None
    packaged, of_user = (root / key / "gpu.json" for root in _roots())
    if packaged.is_file():
        spec = read_gpu(packaged)
        if not of_user.is_file():
            return spec
        note = (
            f"{of_user} is not used: the packaged description of {key} wins; give yours another key"
        )
        return replace(spec, notes=(*spec.notes, note))
    if not of_user.is_file() or key in ("auto", "cpu") or _any_card(key) is not None:
        return None
    return None if _keys_named(key, _packaged_index()) else read_gpu(of_user)


def _squash(text: str) -> str:
    name = re.sub(r"(\d) ?gi?b?$", r"\1gb", gpu_key(text))  # a100-80g, "A100 80 GiB"
    return re.sub(r"[^a-z0-9]", "", name)


def _packaged_index() -> Mapping[str, Any]:
    return read_object(data_folder("calibration") / "index.json")


def _user_index() -> Mapping[str, Any]:
    return build_index(user_calibration_folder())


# In this order: a packaged name always means the packaged GPU.
_INDEXES = (_packaged_index, _user_index)


def _keys_named(name: str, index: Mapping[str, Any]) -> list[str]:
    """Keys of the accelerators that the driver, or else people, call `name`."""
    for kind, spelling in (("names", name.strip().lower()), ("aliases", _squash(name))):
        if keys := index[kind].get(spelling):
            return sorted(keys)
    return []


def _keys_of_any_size(name: str, index: Mapping[str, Any]) -> list[str]:
    """Keys of the accelerators that `name` means without the memory in it, whatever theirs is."""
    plain = _MEMORY.sub("", gpu_key(name))
    return _keys_named(plain, index) if plain != gpu_key(name) else []


def _keys_named_anywhere(name: str) -> list[str]:
    return next((keys for index in _INDEXES if (keys := _keys_named(name, index()))), [])


def _suggestion(name: str) -> str:
    """`: did you mean a, b`, or nothing where no known name comes near."""
    indexes = [read_index() for read_index in _INDEXES]
    keys = [key for index in indexes for key in _keys_of_any_size(name, index)]
    if keys:  # boards of that name, and others that have this memory
        keys += [key for index in indexes for key in _closest_by_words(name, index)]
    else:
        keys_of: dict[str, list[str]] = {}
        for index in indexes:
            for alias, named in index["aliases"].items():
                keys_of.setdefault(alias, []).extend(named)
        near = difflib.get_close_matches(_squash(name), keys_of, n=3, cutoff=0.7)
        keys = [key for index in indexes for key in _closest_by_words(name, index)]
        keys += [key for alias in near for key in keys_of[alias]]
    shown = list(dict.fromkeys(keys))[:3]
    return f": did you mean {', '.join(shown)}" if shown else ""
