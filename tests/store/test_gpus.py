from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from whichlora.cli import main
from whichlora.errors import ConfigError, DataFileError
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.run import Precision, RunConfig
from whichlora.store import gpus
from whichlora.store.detect import DetectedDevice
from whichlora.store.gpu_file import _FIELDS, SCHEMA_VERSION, read_gpu
from whichlora.store.gpus import (
    build_index,
    find_cards,
    find_gpu,
    find_target,
    gpu_key,
    list_gpus,
    number_of,
)
from whichlora.store.jsonfiles import is_slug, write_object
from whichlora.store.paths import data_folder
from whichlora.units import GiB, MiB
from whichlora.workflow import estimates
from whichlora.workflow.profiling import device_of

PACKAGED = data_folder("calibration")
KEYS = sorted(path.parent.name for path in PACKAGED.glob("*/gpu.json"))
NO_MATRIX_UNITS = tuple(
    key for key in KEYS if key.startswith(("p4", "p100", "gtx-1", "quadro-p", "titan-xp"))
)
FACTS = (
    "memory_bytes",
    "bandwidth_bytes_per_s",
    "peak_flops_per_s",
    "power_w",
    "num_multiprocessors",
    "l2_bytes",
    "compute_capability",
    "context_bytes",
)


@pytest.fixture(autouse=True)
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of the user's, and a machine without accelerators."""
    folder = tmp_path / "user"
    monkeypatch.setenv("WHICHLORA_CALIBRATION", str(folder))
    monkeypatch.setattr(gpus, "detect_gpus", tuple)
    monkeypatch.setattr(gpus, "_OTHER_DRIVERS", {tmp_path / "kfd": "rocm"})
    return folder


# --- the files


@pytest.mark.parametrize("key", KEYS)
def test_every_accelerator_states_facts_that_agree_with_each_other(key: str) -> None:
    path = PACKAGED / key / "gpu.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    assert path.read_text(encoding="utf-8") == (
        json.dumps(raw, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    )
    spec = read_gpu(path)
    sold_gb = raw["nominal_memory_gb"]
    named_gb = int(key.rsplit("-", 1)[1].removesuffix("gb"))
    assert sold_gb in (named_gb, None)  # none is a card of that size: it has the host's memory
    # The driver never has more than what is soldered on, and ECC costs at most a tenth of it; a
    # Mac and others that share their memory keep up to a third for the host.
    least = 0.65 if spec.backend.shares_host_memory or sold_gb is None else 0.9
    assert least <= spec.memory_bytes / (named_gb * GiB) <= 1
    for fact in FACTS:
        confirmed = fact in spec.sources or fact in spec.unverified
        assert confirmed == (getattr(spec, fact) is not None), fact
    assert spec.power_w is None or 25 <= spec.power_w <= 1400
    peaks = spec.peak_flops_per_s
    if key in NO_MATRIX_UNITS:
        assert not {"bf16", "fp16", "tf32"} & peaks.keys()
        return
    narrow, wide = peaks.get("bf16", peaks.get("fp16", 0)), peaks.get("fp32", 0)
    assert narrow == wide if spec.kind == "mps" else narrow > wide  # Apple's lanes have one rate
    if "bf16" in peaks and "fp16" in peaks and key != "mi100-32gb":  # its bf16 is half as fast
        assert peaks["bf16"] == peaks["fp16"]
    blackwell_ultra = spec.compute_capability == "10.3"  # gave int8 up
    if "int8" in peaks and "bf16" in peaks and spec.kind == "cuda" and not blackwell_ultra:
        # Dense int8 is twice dense bf16, four times the halved bf16 of GeForce boards; any other
        # ratio means that one of the two is a sparse figure.
        assert round(peaks["int8"] / peaks["bf16"]) == (4 if "GeForce" in spec.name else 2)


@pytest.mark.parametrize(
    "key", [k for k in KEYS if k.startswith(("v100", "t4", "rtx-2080", "titan")) or "turing" in k]
)
def test_volta_and_turing_have_no_bf16_and_no_tf32(key: str) -> None:
    assert not {"bf16", "tf32"} & find_gpu(key).peak_flops_per_s.keys()


@pytest.mark.parametrize(
    ("key", "dtype", "tflops"),
    [  # the traps: sparse figures, fp16 accumulation, a neighbour's figure, two devices in one
        ("rtx-4090-24gb", "bf16", 165.2),
        ("rtx-5090-32gb", "bf16", 209.5),
        ("l40s-48gb", "bf16", 362),
        ("h100-sxm-80gb", "bf16", 989.4),
        ("rtx-6000-ada-48gb", "bf16", 364.2),
        ("a10g-24gb", "bf16", 70),
        ("rtx-4070-ti-12gb", "bf16", 80.2),
        ("l20-48gb", "bf16", 119.5),
        ("a16-16gb", "bf16", 18),
        ("gb200-186gb", "bf16", 2500),
        ("p4-8gb", "fp32", 5.5),
        ("mi250x-gcd-64gb", "bf16", 191.5),
    ],
)
def test_peaks_are_dense_with_fp32_accumulation(key: str, dtype: str, tflops: float) -> None:
    assert find_gpu(key).peak_flops_per_s[dtype] == tflops * 1e12


def test_the_index_agrees_with_the_files() -> None:
    index = json.loads((PACKAGED / "index.json").read_text(encoding="utf-8"))
    assert index == build_index(PACKAGED), (
        "rebuild it: python -c 'from pathlib import Path; from whichlora.store import gpus, "
        'jsonfiles; root = Path("calibration"); '
        'jsonfiles.write_object(root / "index.json", gpus.build_index(root))\''
    )


def test_a_driver_name_means_one_board_and_only_memory_tells_the_exceptions_apart() -> None:
    index = json.loads((PACKAGED / "index.json").read_text(encoding="utf-8"))
    shared = {name: keys for name, keys in index["names"].items() if len(keys) > 1}
    macs = {name: keys for name, keys in shared.items() if name.startswith("apple m")}
    assert all(find_gpu(key).kind == "mps" for keys in macs.values() for key in keys)
    assert shared == macs | {
        "nvidia geforce rtx 2060": ["rtx-2060-12gb", "rtx-2060-6gb"],
        "nvidia geforce rtx 3080": ["rtx-3080-10gb", "rtx-3080-12gb"],
        "nvidia geforce rtx 4060 ti": ["rtx-4060-ti-16gb", "rtx-4060-ti-8gb"],
        "nvidia geforce rtx 5060 ti": ["rtx-5060-ti-16gb", "rtx-5060-ti-8gb"],
    }


# --- names


@pytest.mark.parametrize("key", KEYS)
def test_a_key_finds_itself(key: str) -> None:
    assert find_gpu(key).key == key
    assert find_gpu(key.upper()).key == key


def find_gpu_notes(name: str) -> tuple[str, ...]:
    with contextlib.suppress(ConfigError):
        return find_gpu(name).notes
    return ()


@pytest.mark.parametrize("key", KEYS)
def test_an_alias_finds_its_board_or_lists_it_among_the_candidates(key: str) -> None:
    spec = find_gpu(key)
    for name in (*spec.aliases, *spec.names):
        try:
            answer = find_gpu(name).key
        except ConfigError as error:
            answer = str(error)
        if notes := find_gpu_notes(name):
            assert "the usual one of" in notes[0]
            answer = notes[0].replace("the usual one of", "is ambiguous")
        assert answer == key or ("is ambiguous" in answer and key in answer)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RTX4090", "rtx-4090-24gb"),
        ("4090", "rtx-4090-24gb"),
        ("GeForce RTX 4090", "rtx-4090-24gb"),
        ("h100-80gb-hbm3", "h100-sxm-80gb"),
        ("NVIDIA_H100_80GB_HBM3", "h100-sxm-80gb"),
        ("H100-SXM", "h100-sxm-80gb"),
        ("a100-sxm4-80gb", "a100-sxm-80gb"),
        ("Tesla T4", "t4-16gb"),
        (" l4 ", "l4-24gb"),
        ("Quadro RTX 6000", "rtx-6000-turing-24gb"),
        ("h200", "h200-sxm-141gb"),
        ("2080ti", "rtx-2080-ti-11gb"),
        ("mi300x", "mi300x-192gb"),
        ("RTX 2080 Ti", "rtx-2080-ti-11gb"),
        ("4070 Ti SUPER", "rtx-4070-ti-super-16gb"),
        ("a6000", "rtx-a6000-48gb"),
    ],
)
def test_spellings_of_people_and_drivers_find_the_board(name: str, key: str) -> None:
    assert find_gpu(name).key == key


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("H100", "h100-sxm-80gb"),
        ("H100 80GB", "h100-sxm-80gb"),
        ("a100-80gb", "a100-sxm-80gb"),
        ("A100 40 GB", "a100-sxm-40gb"),
        ("a100-80g", "a100-sxm-80gb"),
        ("v100 32gb", "v100-sxm2-32gb"),
        ("P100", "p100-pcie-16gb"),
    ],
)
def test_of_boards_with_one_name_and_memory_the_usual_one_is_taken_and_said(
    name: str, key: str
) -> None:
    spec = find_gpu(name)
    assert spec.key == key
    assert spec.notes[0].startswith(f"{name}: taken as {key}, the usual one of ")


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("4090 24gb", "rtx-4090-24gb"),
        ("4060ti 16gb", "rtx-4060-ti-16gb"),
        ("4060 Ti 8 GB", "rtx-4060-ti-8gb"),
        ("3080 12gb", "rtx-3080-12gb"),
        ("H100 SXM5 80GB", "h100-sxm-80gb"),
        ("a100 pcie 40", "a100-pcie-40gb"),
    ],
)
def test_words_in_any_order_find_the_board_that_has_them_all(name: str, key: str) -> None:
    spec = find_gpu(name)
    assert (spec.key, spec.notes) == (key, (f"{name}: taken as {key}",))


def test_any_processor_is_a_target_by_its_memory() -> None:
    spec = find_target("cpu-768GB")
    assert (spec.key, spec.memory_bytes, spec.is_cpu) == ("cpu-768gb", 768 * GiB, True)
    assert not spec.is_timed
    with pytest.raises(ConfigError, match="is an amount of memory, and this needs the rates"):
        find_gpu("cpu-768gb")


@pytest.mark.parametrize("name", ["rtx-2080-max-q", "m6 ultra", "rx 6900 xtx", "rtx 4070 ti d"])
def test_a_board_that_is_not_on_file_is_never_taken_for_another(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^unknown GPU"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("24GB", 23622320128),  # of an A10, the least that a card sold so reports
        ("24 gb", 23622320128),
        ("any 24GB card", 23622320128),
        ("24GiB", 24 * GiB),
        ("37 GB", 37 * 10**9),
    ],
)
def test_an_amount_of_memory_is_a_target_without_rates(name: str, num_bytes: int) -> None:
    spec = find_target(name)
    assert (spec.memory_bytes, spec.is_timed) == (num_bytes, False)
    with pytest.raises(ConfigError, match="is an amount of memory, and this needs the rates"):
        find_gpu(name)


@pytest.mark.parametrize("name", ["3090@280W", "RTX 3090 @ 280 watts", "rtx-3090-24gb@280.0w"])
def test_what_follows_an_at_sign_is_the_power_its_driver_allows(name: str) -> None:
    spec = find_gpu(name)
    assert (spec.key, spec.power_limit_w, spec.most_w) == ("rtx-3090-24gb", 280, 280)
    assert "rtx-3090-24gb at 280 W of 350: products take longer" in spec.notes
    assert find_gpu("3090").most_w == find_gpu("3090").power_w == 350


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("3090@", "what follows @ is the power limit"),
        ("3090@280", "such as rtx-3090@280W"),
        ("3090@280W@200W", "what follows @"),
        ("3090@600W", "must be from 70 to 350 W, got 600"),
        ("3090@0W", "must be from 70 to 350 W, got 0"),
        ("cpu@100W", "power of cpu.* is not known; leave the limit out"),
        ("4091@280W", "unknown GPU '4091'"),
        ("24GB@280W", "is an amount of memory"),
    ],
)
def test_a_limit_that_no_board_has_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        find_target(name)


def test_one_board_is_named_with_one_limit() -> None:
    run = RunConfig(model="gpt2", seq_len=64)
    with pytest.raises(ConfigError, match="rtx-3090-24gb is named with different power limits"):
        estimates.estimate([run], ["3090", "3090@280W"])
    (limited,) = estimates.estimate([run], ["3090@280W"])
    (free,) = estimates.estimate([run], ["3090"])
    assert limited.time.step_s >= free.time.step_s
    assert limited.memory == free.memory


def test_an_amount_of_memory_gives_a_verdict_and_no_time() -> None:
    run = RunConfig(model="Qwen/Qwen2.5-7B", method="qlora")
    (small,), (large,) = (estimates.estimate([run], [name]) for name in ("8GB", "24GB"))
    assert (small.verdict, large.verdict) == ("fails", "fits")
    time = json.loads(json.dumps(large.to_dict(), allow_nan=False))["time"]
    assert time["step_s"] is time["tokens_per_s"] is None
    assert any("has no time" in note for note in large.notes)


@pytest.mark.parametrize(
    ("name", "key", "others"),
    [
        ("A100", "a100-sxm-40gb", "a100-pcie-40gb, a100-pcie-80gb, a100-sxm-40gb, a100-sxm-80gb"),
        ("v100 sxm2", "v100-sxm2-16gb", "v100-sxm2-16gb, v100-sxm2-32gb"),
        ("3080", "rtx-3080-10gb", "rtx-3080-10gb, rtx-3080-12gb"),
        ("4060 ti", "rtx-4060-ti-8gb", "rtx-4060-ti-16gb, rtx-4060-ti-8gb"),
        ("a100 pcie", "a100-pcie-40gb", "a100-pcie-40gb, a100-pcie-80gb"),
    ],
)
def test_what_is_asked_for_by_a_shared_name_is_its_board_with_the_least_memory(
    name: str, key: str, others: str
) -> None:
    spec = find_target(name)
    assert spec.key == key
    assert spec.notes == (f"{name}: taken as {key}, the one with the least memory of {others}",)


@pytest.mark.parametrize(
    ("name", "candidates"),
    [
        ("A100", "a100-pcie-40gb, a100-pcie-80gb, a100-sxm-40gb, a100-sxm-80gb"),
        ("3080", "rtx-3080-10gb, rtx-3080-12gb"),
        ("V100", "v100-pcie-16gb, v100-pcie-32gb, v100-sxm2-16gb, v100-sxm2-32gb"),
        ("rtx6000", "rtx-6000-ada-48gb, rtx-6000-turing-24gb"),
    ],
)
def test_a_name_that_several_boards_share_is_refused_with_the_candidates(
    name: str, candidates: str
) -> None:
    with pytest.raises(ConfigError, match=f"^GPU .{name}. is ambiguous: {candidates}; give one"):
        find_gpu(name)


@pytest.mark.parametrize("name", ["2x4090", "2 x RTX 4090", "4090x2", "rtx-4090:4", "8*4090"])
def test_several_gpus_are_answered_with_the_one_that_can_be_predicted(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"type alone, such as rtx-4090-24gb, and the number as gpus"
    ):
        find_gpu(name)


@pytest.mark.parametrize("name", ["1", "2", "8", " 24 ", "80", "480", "4.0", "-1", "0", "1024"])
def test_a_number_of_gpus_is_no_name_although_boards_have_the_word(name: str) -> None:
    with pytest.raises(ConfigError, match=r"give a type .*, and the number as gpus"):
        find_target(name)
    assert find_target("4090").key == "rtx-4090-24gb"


def test_names_with_commas_in_one_text_are_a_list_to_be() -> None:
    with pytest.raises(ConfigError, match=r"^unknown GPU 'l4,t4': give several types as a list"):
        find_gpu("l4,t4")


def test_an_unknown_name_gets_one_line_with_near_matches() -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu("rtx-4900")
    message = str(caught.value)
    assert message.startswith("unknown GPU 'rtx-4900': did you mean rtx-4090-24gb")
    assert message.endswith("an amount of memory ('12GB') is judged without times")
    assert "\n" not in message
    with pytest.raises(ConfigError, match=r"^unknown GPU 'zzz'; 'whichlora gpus' lists all, and"):
        find_gpu("zzz")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("RTX 3060 8GB", "rtx-3060-12gb, rtx-3060-ti-8gb"),
        ("3060-8gb", "rtx-3060-12gb, rtx-3060-ti-8gb"),
        ("3060 8", "rtx-3060-12gb, rtx-3060-ti-8gb"),
        ("4070 super 16gb", "rtx-4070-super-12gb, rtx-4070-ti-super-16gb"),
        ("3080 20gb", "rtx-3080-10gb, rtx-3080-12gb"),
        ("4080 32gb", "rtx-4080-16gb"),
    ],
)
def test_another_memory_is_no_reason_to_take_another_chip(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_gpu(name, least_memory=True)
    assert str(caught.value).startswith(f"unknown GPU {name!r}: did you mean {near}; 'whichlora")


@given(name=st.text())
def test_no_text_whatever_gives_another_error(name: str) -> None:
    with contextlib.suppress(ConfigError):
        find_gpu(name)


@pytest.mark.parametrize("name", ["../secret", "a/../../secret", "/etc", "", ".", "\0"])
def test_a_path_is_no_name(user_folder: Path, name: str) -> None:
    write_gpu(user_folder.parent, a_gpu(key="secret"))
    with pytest.raises(ConfigError, match="unknown GPU"):
        find_gpu(name)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "a100-sxm4-80gb-mig-3g.40gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
    ],
)
def test_driver_names_become_folder_names(name: str, key: str) -> None:
    assert gpu_key(name) == key
    assert is_slug(key)


def test_a_name_costs_one_gpu_file_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def noted(path: Path) -> GpuSpec:
        read.append(path.parent.name)
        return read_gpu(path)

    monkeypatch.setattr(gpus, "read_gpu", noted)
    find_gpu("h100-sxm-80gb")
    find_gpu("rtx4090")
    assert read == ["h100-sxm-80gb", "rtx-4090-24gb"]


# --- the user's folder


def write_gpu(root: Path, spec: GpuSpec) -> Path:
    """Write `spec` below a calibration folder."""
    path = root / spec.key / "gpu.json"
    facts: dict[str, Any] = {
        field: getattr(spec, field) for field in _FIELDS if hasattr(spec, field)
    }
    facts |= {"peak_flops_per_s": dict(spec.peak_flops_per_s), "sources": dict(spec.sources)}
    write_object(path, {"schema_version": SCHEMA_VERSION} | facts)
    return path


def a_gpu(**changes: Any) -> GpuSpec:
    spec = GpuSpec(
        key="dgx-comet-128gb",
        name="NVIDIA DGX Comet",
        kind="cuda",
        memory_bytes=120 * GiB,
        bandwidth_bytes_per_s=273e9,
        peak_flops_per_s={"bf16": 62e12},
        aliases=("comet",),
        names=("NVIDIA GB12",),
        sources={"bandwidth_bytes_per_s": "https://example.org"},
        unverified=("memory_bytes", "peak_flops_per_s.bf16"),
    )
    return dataclasses.replace(spec, **changes)


def test_a_user_adds_an_accelerator(user_folder: Path) -> None:
    path = write_gpu(user_folder, a_gpu())
    assert path == user_folder / "dgx-comet-128gb" / "gpu.json"
    for name in ("dgx-comet-128gb", "Comet", "NVIDIA GB12", "gb12"):
        assert find_gpu(name) == a_gpu()
    assert [spec.key for spec in list_gpus()] == sorted([*KEYS, "dgx-comet-128gb"])


def test_a_packaged_description_wins_and_the_users_is_told(user_folder: Path) -> None:
    packaged = find_gpu("t4-16gb")
    mine = a_gpu(key="t4-16gb", aliases=("t4",), names=("Tesla T4",))
    path = write_gpu(user_folder, mine)
    for name in ("t4-16gb", "t4", "Tesla T4"):
        spec = find_gpu(name)
        assert dataclasses.replace(spec, notes=()) == packaged
        assert spec.notes[-1].startswith(f"{path} is not used: the packaged description of t4-16gb")
    assert [dataclasses.replace(spec, notes=()) for spec in list_gpus() if "t4" in spec.key] == [
        packaged
    ]


@pytest.mark.parametrize("key", ["4090", "rtx4090", "h100", "a100", "auto", "cpu", "24gb"])
def test_a_file_that_came_with_records_takes_over_no_name(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    def meaning(name: str) -> GpuSpec | str:
        try:
            return find_target(name)
        except ConfigError as error:
            return str(error)

    see(monkeypatch, ("NVIDIA GeForce RTX 4090", 24564))
    names = (key, "4090", "4090 24gb", "NVIDIA GeForce RTX 4090", "a100 80gb", "auto", "cpu")
    before = {name: meaning(name) for name in names}
    write_gpu(
        user_folder,
        a_gpu(
            key=key,
            memory_bytes=24564 * 2**20,
            aliases=(*names, "auto"),
            names=("NVIDIA GeForce RTX 4090",),
        ),
    )
    assert {name: meaning(name) for name in names} == before
    assert [spec.key for spec in list_gpus()] == KEYS


def test_a_board_with_more_memory_than_any_packaged_of_its_name_is_the_users(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "NVIDIA GeForce RTX 4090"
    modded = a_gpu(key="rtx-4090-48gb-modded", names=(name,), memory_bytes=48 * GiB, aliases=())
    write_gpu(user_folder, modded)
    see(monkeypatch, (name, 48 * 1024))
    assert find_gpu("auto") == modded
    see(monkeypatch, (name, 24564))
    assert find_gpu("auto").key == "rtx-4090-24gb"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("schema_version", 2, "schema_version is 2, this release reads 1 to 1; upgrade whichlora"),
        ("schema_version", None, "schema_version: must be a whole number from 1 to 1, got None"),
        ("key", "other", "key: is 'other', the folder is 'dgx-comet-128gb'; rename one"),
        ("key", "../x", "key: got '../x'; must be the name of the folder"),
        (
            "kind",
            "tpu",
            "kind: got 'tpu'; must be one of cuda, rocm, xpu, hpu, mps, cpu; correct it",
        ),
        ("memory_bytes", "24GiB", "memory_bytes: got '24GiB'; must be a whole number above 0"),
        ("memory_bytes", True, "memory_bytes: got True"),
        ("memory_bytes", 0, "memory_bytes: got 0"),
        ("memory_bytes", ..., "memory_bytes: missing"),
        ("bandwidth_bytes_per_s", -1, "bandwidth_bytes_per_s: got -1; must be a number from 1e+06"),
        ("bandwidth_bytes_per_s", 10**400, "bandwidth_bytes_per_s: got 1000"),
        ("peak_flops_per_s", {}, "peak_flops_per_s: got {}; must be an object of bf16"),
        ("peak_flops_per_s", {"bfloat16": 1}, "peak_flops_per_s: got {'bfloat16': 1}"),
        ("power_w", "300 W", "power_w: got '300 W'; must be a number from 0.1"),
        ("aliases", "comet", "aliases: got 'comet'; must be a list of texts"),
        ("sources", {"colour": "x"}, "sources or unverified: 'colour' is no field of this file"),
        ("unverified", ["peak_flops_per_s.fp8"], "'peak_flops_per_s.fp8' is no field of this file"),
        ("colour", "red", "colour: is not a field; known are schema_version, key"),
    ],
)
def test_a_broken_file_is_refused_with_path_and_key(
    user_folder: Path, field: str, value: object, message: str
) -> None:
    path = write_gpu(user_folder, a_gpu())
    values = json.loads(path.read_text()) | {field: value}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    with pytest.raises(DataFileError) as caught:
        find_gpu("dgx-comet-128gb")
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


# --- "cpu" and "auto"


def detected_cpu(memory_bytes: int = 8 * GiB) -> DetectedDevice:
    return DetectedDevice(name="Epyc 9", kind="cpu", memory_bytes=memory_bytes, num_cores=2)


def test_cpu_is_this_hosts_and_its_key_finds_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "detect_cpu", detected_cpu)
    spec = find_gpu("cpu")
    assert (spec.key, spec.kind, spec.memory_bytes) == ("cpu-epyc-9-2c", "cpu", 8 * GiB)
    assert find_gpu("cpu-epyc-9-2c") == find_gpu("auto") == spec
    with pytest.raises(ConfigError, match="unknown GPU 'cpu-epyc-9-4c'"):
        find_gpu("cpu-epyc-9-4c")


def test_a_cpu_on_file_keeps_its_rates_and_takes_the_memory_that_is_here(
    user_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "detect_cpu", detected_cpu)
    measured = dataclasses.replace(
        find_gpu("cpu"), bandwidth_bytes_per_s=31e9, memory_bytes=64 * GiB, unverified=()
    )
    write_gpu(user_folder, measured)
    assert find_gpu("cpu-epyc-9-2c") == measured
    assert find_gpu("cpu") == dataclasses.replace(measured, memory_bytes=8 * GiB)


def see(monkeypatch: pytest.MonkeyPatch, *devices: tuple[str, int]) -> None:
    devices = tuple(
        DetectedDevice(name=name, kind="cuda", memory_bytes=mib * MiB) for name, mib in devices
    )
    monkeypatch.setattr(gpus, "detect_gpus", lambda: devices)


@pytest.mark.parametrize(
    ("name", "mib", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 81559, "h100-sxm-80gb"),
        ("Tesla P100-PCIE-16GB", 16276, "p100-pcie-16gb"),
        ("Tesla P4", 7606, "p4-8gb"),
        ("NVIDIA GB10", 122570, "gb10-128gb"),
        ("NVIDIA GeForce RTX 3080", 10240, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080", 12288, "rtx-3080-12gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 8188, "rtx-4060-ti-8gb"),
        ("NVIDIA GeForce RTX 4060 Ti", 16380, "rtx-4060-ti-16gb"),
        ("NVIDIA L40S", 49140, "l40s-48gb"),  # ECC off
    ],
)
def test_auto_is_the_first_gpu_here_and_memory_tells_twins_apart(
    monkeypatch: pytest.MonkeyPatch, name: str, mib: int, key: str
) -> None:
    see(monkeypatch, (name, mib), ("Tesla T4", 15360))
    assert find_gpu("auto").key == key


def test_auto_takes_the_power_that_the_driver_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, taken in ((275.0, 275.0), (400.0, None), (395.0, None), (None, None)):
        device = DetectedDevice(
            name="NVIDIA A100-SXM4-80GB",
            kind="cuda",
            memory_bytes=81920 * MiB,
            power_limit_w=limit,
        )
        monkeypatch.setattr(gpus, "detect_gpus", lambda device=device: (device,))
        spec = find_gpu("auto")
        assert (spec.key, spec.power_limit_w) == ("a100-sxm-80gb", taken)
        notes = ("a100-sxm-80gb at 275 W of 400: products take longer",) if taken else ()
        assert spec.notes == notes


def test_auto_says_how_many_gpus_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    see(monkeypatch, ("Tesla T4", 15360))
    assert not find_gpu("auto").notes
    see(monkeypatch, *[("Tesla T4", 15360)] * 4)
    advice = "gpus 4 spreads a run over them"
    assert find_gpu("auto").notes == (f"auto: this machine has 4 t4-16gb; {advice}",)
    (prediction,) = estimates.estimate([RunConfig(model="gpt2", seq_len=64)])
    assert f"auto: this machine has 4 t4-16gb; {advice}" in prediction.notes
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    (note,) = find_gpu("auto").notes
    assert "4 t4-16gb (visible: CUDA_VISIBLE_DEVICES=4,5,6,7)" in note
    assert find_gpu("t4-16gb").notes == ()


def test_host_memory_is_known_beside_a_gpu_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu = DetectedDevice(name="x", kind="cpu", memory_bytes=64 * GiB, num_cores=2)
    monkeypatch.setattr(gpus, "detect_cpu", lambda: cpu)
    assert gpus.host_memory_beside(find_gpu("t4-16gb")) is None
    see(monkeypatch, ("Tesla T4", 15360))
    assert gpus.host_memory_beside(find_gpu("t4-16gb")) == 64 * GiB
    assert gpus.host_memory_beside(find_gpu("l4-24gb")) is None
    assert gpus.host_memory_beside(find_gpu("cpu")) == 64 * GiB


def test_auto_names_all_of_unequal_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    see(monkeypatch, *[("Tesla T4", 15360)] * 2, ("Tesla P4", 7606))
    spec = find_gpu("auto")
    assert spec.notes == (
        "auto: t4-16gb, the first GPU of this machine, which has 2xt4-16gb+p4-8gb",
    )


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("NVIDIA GeForce RTX 3080", 20480),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192),
        ("NVIDIA Z9", 1),
    ],
)
def test_auto_refuses_a_gpu_that_no_file_describes(
    monkeypatch: pytest.MonkeyPatch, name: str, mib: int
) -> None:
    see(monkeypatch, (name, mib))
    with pytest.raises(ConfigError, match=f"^auto: no file describes the {name} with") as caught:
        find_gpu("auto")
    assert f"{gpu_key(name)}/gpu.json" in str(caught.value)


def test_auto_does_not_take_the_cpu_of_a_machine_with_an_amd_gpu(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    with pytest.raises(ConfigError, match=r"auto: finds NVIDIA GPUs only.*has rocm .*or cpu"):
        find_gpu("auto")


def test_auto_on_a_mac_asks_for_its_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match=r"this machine is a Mac; pass --gpu.*m4-max-64gb"):
        find_gpu("auto")


def test_a_mac_is_named_by_its_chip_and_its_memory_and_is_no_card_of_that_size() -> None:
    assert find_gpu("Apple M4 Max 64 GB").key == find_gpu("m4-max-64gb").key == "m4-max-64gb"
    assert find_target("m4-max").key == "m4-max-36gb"
    with pytest.raises(ConfigError, match=r"GPU 'm4-max' is ambiguous: m4-max-128gb"):
        find_gpu("m4-max")
    sold = json.loads((PACKAGED / "index.json").read_text(encoding="utf-8"))["sold_as_gb"]
    assert all(find_gpu(card["key"]).kind in ("cuda", "rocm", "hpu") for card in sold.values())


def test_a_plan_runs_on_the_twin_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, ("Tesla T4", 15360), ("NVIDIA GeForce RTX 4060 Ti", 16380))
    assert device_of(find_gpu("rtx-4060-ti-16gb")) == "cuda:1"
    with pytest.raises(ConfigError, match="rtx-4060-ti-8gb is not in this machine"):
        device_of(find_gpu("rtx-4060-ti-8gb"))


def test_the_catalog_is_listed_where_no_file_describes_the_gpu_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    see(monkeypatch, ("NVIDIA Z9", 1))
    result = CliRunner().invoke(main, ["gpus"])
    assert result.exit_code == 0
    assert "this machine: auto: no file describes the NVIDIA Z9" in result.stdout
    assert "h100-sxm-80gb" in result.stdout


@pytest.mark.sampled(120)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("precision", get_args(Precision))
def test_every_accelerator_predicts_in_every_precision_or_says_why_not(
    key: str, precision: Precision
) -> None:
    run = RunConfig(model="EleutherAI/pythia-160m", precision=precision)
    with contextlib.suppress(ConfigError):
        [estimate] = estimates.estimate([run], [key])
        assert estimate.time.step_s is not None


def test_a_precision_without_any_rate_names_those_that_have_one() -> None:
    run = RunConfig(model="EleutherAI/pythia-160m", precision="fp32")
    with pytest.raises(ConfigError, match="fp32 has no known rate on gaudi2-96gb; use one of bf16"):
        estimates.estimate([run], ["gaudi2-96gb"])


@pytest.mark.parametrize("key", NO_MATRIX_UNITS)
def test_a_gpu_before_tensor_cores_multiplies_at_its_fp32_rate_and_says_so(key: str) -> None:
    runs = [
        RunConfig(model="EleutherAI/pythia-160m", method=method, precision=precision)
        for method in ("lora", "qlora")
        for precision in ("bf16", "fp16")
    ]
    for estimate in estimates.estimate(runs, [key]):
        units = [note for note in estimate.notes if "matrix units" in note]
        assert units == [
            f"{key} has no {estimate.run.precision} matrix units: time is taken from its fp32 rate"
        ]
        wheels = [note for note in estimate.notes if "CUDA 12.6 wheels only" in note]
        assert len(wheels) == (str(find_gpu(key).compute_capability) < "7.5")


@pytest.mark.parametrize(
    ("key", "torch", "told"),
    [
        ("p100-pcie-16gb", "2.7.1", False),
        ("p100-pcie-16gb", "2.8.0", True),
        ("v100-pcie-16gb", "2.10.0", False),
        ("v100-pcie-16gb", "2.11.0", True),
        ("t4-16gb", "2.13.0", False),
    ],
)
def test_a_gpu_that_newer_wheels_dropped_is_told_which_it_needs(
    key: str, torch: str, told: bool
) -> None:
    run = RunConfig(model="EleutherAI/pythia-160m", libraries=(("torch", torch),))
    [estimate] = estimates.estimate([run], [key])
    assert any("CUDA 12.6 wheels" in note for note in estimate.notes) == told


@pytest.mark.parametrize(
    ("key", "settings", "message"),
    [
        ("p100-pcie-16gb", {"quant": "int8"}, "quant: int8 does not run on p100-pcie-16gb (bitsan"),
        ("v100-sxm2-32gb", {"quant": "int8"}, "needs compute capability 7.5 or newer); use nf4"),
        ("p40-24gb", {"loss_head": "liger"}, "loss_head: liger does not run on p40-24gb (Triton"),
        ("p4-8gb", {"phase": "inference", "kv_cache": "vllm"}, "(vLLM needs compute capability 7"),
        ("gtx-1080-ti-11gb", {"attn": "flash_attention_2"}, "flash_attention_2 does not run on"),
        ("p4-8gb", {"precision": "tf32"}, "precision: tf32 has no units on p4-8gb"),
    ],
)
def test_a_library_without_kernels_for_an_old_gpu_is_refused(
    key: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        estimates.estimate([RunConfig(model="EleutherAI/pythia-160m", **settings)], [key])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    modern = {"quant": "none", "loss_head": "hf", "kv_cache": "dynamic", "attn": "sdpa"}
    works = {name: modern.get(name, value) for name, value in settings.items()} | {
        "precision": "fp16"
    }
    [estimate] = estimates.estimate([RunConfig(model="EleutherAI/pythia-160m", **works)], [key])
    assert estimate.memory.device_used_bytes > 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rtx 4090 laptop", "rtx-4090-laptop-16gb"),
        ("RTX 4060 Laptop GPU", "rtx-4060-laptop-8gb"),
        ("4070 mobile", "rtx-4070-laptop-8gb"),
        ("rtx 2080", "rtx-2080-8gb"),
        ("4090 48gb", "rtx-4090-48gb"),
        ("Ryzen AI Max+ 395", "strix-halo-128gb"),
    ],
)
def test_a_board_is_not_its_larger_namesake(name: str, key: str) -> None:
    assert find_target(name).key == key
    assert find_cards(f"{name}+a100-sxm-80gb")[0][0].key == key
    assert find_cards(f"l4+{name}x2")[1] == (find_target(name), 2)


@pytest.mark.parametrize(
    ("name", "cards"),
    [
        ("2x4090", (2, "4090")),
        ("RTX 4090 x2", (2, "RTX 4090")),
        ("L40S:4", (4, "L40S")),
        ("m4 max 48", (None, "m4 max 48")),  # whose x joins nothing
        ("4090:0", (None, "4090:0")),
    ],
)
def test_a_number_stands_before_or_behind_the_type(
    name: str, cards: tuple[int | None, str]
) -> None:
    assert number_of(name) == cards


@pytest.mark.parametrize(
    ("machine", "cards"),
    [
        ("g5.8xlarge", (1, "a10g-24gb")),
        ("P4d.24xlarge", (8, "a100-sxm-40gb")),
        ("kaggle", (2, "t4-16gb")),
    ],
)
def test_the_machine_of_a_cloud_is_the_gpus_in_it(machine: str, cards: tuple[int, str]) -> None:
    assert number_of(machine) == cards
    with pytest.raises(ConfigError, match=f"that machine has {cards[0]} {cards[1]}"):
        find_gpu(machine)


def test_every_machine_has_gpus_of_the_catalog() -> None:
    machines = json.loads((PACKAGED / "machines.json").read_text(encoding="utf-8"))["machines"]
    assert {machine["gpu"] for machine in machines.values()} <= set(KEYS)
    assert not set(machines) & set(KEYS)


@pytest.mark.parametrize("name", ["i5-6500", "Intel Core i9 13900K", "Ryzen 9 7900", "EPYC 9654"])
def test_a_processor_is_told_how_processors_are_named(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"a processor; cpu is that .* cpu-64gb .* host_bandwidth"
    ):
        find_gpu(name)
