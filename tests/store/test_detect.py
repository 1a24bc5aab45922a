from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whichlora.errors import MeasurementError
from whichlora.store import detect
from whichlora.store.cpu_prior import cpu_spec
from whichlora.store.detect import DetectedDevice, detect_cpu, detect_gpus
from whichlora.units import GiB, MiB

XEON = """\
processor\t: {number}
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
physical id\t: 0
core id\t\t: {core}
flags\t\t: fpu sse2 avx2 fma avx512f avx512_bf16 amx_bf16 amx_int8
"""


# --- the CPU


def a_host(tmp_path: Path, *, cpuinfo: str, groups: str = "", total_kb: int = 16 << 20) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "cpuinfo").write_text(cpuinfo)
    (proc / "meminfo").write_text(f"MemTotal:       {total_kb} kB\nMemFree:        1 kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    return proc


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    cpuinfo = "\n".join(XEON.format(number=n, core=n % 4) for n in range(8))
    proc = a_host(tmp_path, cpuinfo=cpuinfo)
    cpu = detect_cpu(proc=proc, cgroup=tmp_path, cpus=range(8))
    assert cpu == DetectedDevice(
        name="Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
        kind="cpu",
        memory_bytes=16 * GiB,
        num_cores=4,
        flags=frozenset({"avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8"}),
    )
    assert detect_cpu(proc=proc, cgroup=tmp_path, cpus={0, 4}).num_cores == 1


def test_an_arm_kernel_that_prints_no_model_is_named_by_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpuinfo = "processor\t: 0\nFeatures\t: fp asimd\n\nprocessor\t: 1\nFeatures\t: fp asimd\n"
    cpu = detect_cpu(proc=a_host(tmp_path, cpuinfo=cpuinfo), cgroup=tmp_path, cpus={0, 1})
    assert (cpu.name, cpu.num_cores, cpu.flags) == ("aarch64", 2, frozenset())


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/memory.max": 4 * GiB, "job/step/memory.max": "max"}, 4 * GiB),
        ("0::/job\n", {"job/memory.max": 64 * GiB}, 16 * GiB),
        ("0::/seen/by/host/only\n", {"memory.max": 3 * GiB}, 3 * GiB),
        (
            "4:cpu,memory:/job\n",
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/job/memory.limit_in_bytes": 5 * GiB,
            },
            5 * GiB,
        ),
        ("3:cpuset:/job\n", {"memory/job/memory.limit_in_bytes": 5 * GiB}, 16 * GiB),
        ("0::/job\n", {"../memory.max": 1, "job/memory.max": "max"}, 16 * GiB),
        ("", {"memory.max": 5 * GiB}, 16 * GiB),
    ],
)
def test_the_tightest_control_group_limits_the_memory(
    tmp_path: Path, groups: str, limits: dict[str, object], expected: int
) -> None:
    cgroup = tmp_path / "cgroup"
    for file, limit in limits.items():
        (cgroup / file).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / file).write_text(f"{limit}\n")
    proc = a_host(tmp_path, cpuinfo=XEON.format(number=0, core=0), groups=groups)
    assert detect_cpu(proc=proc, cgroup=cgroup, cpus={0}).memory_bytes == expected


def test_this_host_has_a_cpu() -> None:
    cpu = detect_cpu()
    assert cpu.memory_bytes > 0
    assert cpu.num_cores


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "cpu-intel-xeon-platinum-8481c-4c"),
        ("AMD EPYC 7763 64-Core Processor", "cpu-amd-epyc-7763-4c"),
        ("13th Gen Intel(R) Core(TM) i9-13900K", "cpu-13th-gen-intel-core-i9-13900k-4c"),
        ("aarch64", "cpu-aarch64-4c"),
        ("", "cpu-4c"),
    ],
)
def test_the_key_of_a_cpu_is_its_model_and_cores(name: str, key: str) -> None:
    assert cpu_spec(DetectedDevice(name=name, kind="cpu", memory_bytes=1, num_cores=4)).key == key


def test_the_prior_of_a_cpu_grows_with_its_instruction_set_and_is_all_unverified() -> None:
    def prior(*flags: str) -> dict[str, float]:
        device = DetectedDevice(
            name="x", kind="cpu", memory_bytes=1, num_cores=2, flags=frozenset(flags)
        )
        spec = cpu_spec(device)
        assert spec.unverified == ("bandwidth_bytes_per_s", "peak_flops_per_s")
        return dict(spec.peak_flops_per_s)

    assert prior() == {"fp32": 2 * 16 * 2.5e9}
    assert prior("avx2", "fma") == {"fp32": 2 * 32 * 2.5e9}
    assert prior("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16") == {
        "fp32": 2 * 64 * 2.5e9,
        "bf16": 2 * 1024 * 2.5e9,
    }


def test_a_big_socket_is_limited_by_its_memory_channels() -> None:
    cpu = DetectedDevice(name="x", kind="cpu", memory_bytes=1, num_cores=96)
    assert cpu_spec(cpu).bandwidth_bytes_per_s == 200e9


# --- GPUs, with a stand-in for pynvml


class NVMLError(Exception):
    def __init__(self, value: int, text: str = "Unknown Error") -> None:
        super().__init__(text)
        self.value = value


def a_gpu(name: str, *, memory_bytes: int, cc: tuple[int, int], uuid: str, **more: Any) -> Any:
    return SimpleNamespace(name=name, memory_bytes=memory_bytes, cc=cc, uuid=uuid, **more)


def fake_nvml(
    gpus: Sequence[Any] = (), *, init: Callable[[], None] = lambda: None
) -> SimpleNamespace:
    """As much of pynvml as detection calls; a handle is the board itself."""

    def limit_mw(gpu: Any) -> int:
        if not hasattr(gpu, "limit_mw"):
            raise NVMLError(3, "Not Supported")
        return int(gpu.limit_mw)

    def mig_mode(gpu: Any) -> tuple[int, int]:
        if not hasattr(gpu, "slots"):
            raise NVMLError(3, "Not Supported")
        return 1, 1

    def mig_handle(gpu: Any, index: int) -> Any:
        if gpu.slots[index] is None:
            raise NVMLError(6, "Not Found")
        return gpu.slots[index]

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_ERROR_DRIVER_NOT_LOADED=9,
        NVML_ERROR_LIBRARY_NOT_FOUND=12,
        NVML_ERROR_NOT_SUPPORTED=3,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.95.05",
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=lambda index: gpus[index],
        nvmlDeviceGetName=lambda gpu: gpu.name,
        nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=gpu.memory_bytes),
        nvmlDeviceGetCudaComputeCapability=lambda gpu: gpu.cc,
        nvmlDeviceGetPowerManagementLimit=limit_mw,
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda gpu: len(gpu.slots),
        nvmlDeviceGetMigDeviceHandleByIndex=mig_handle,
        nvmlDeviceGetAttributes=lambda gpu: SimpleNamespace(gpuInstanceSliceCount=gpu.num_slices),
    )


T4 = a_gpu("Tesla T4", memory_bytes=15360 * MiB, cc=(7, 5), uuid="GPU-aaaa-1", limit_mw=69500)
H100 = a_gpu("NVIDIA H100 80GB HBM3", memory_bytes=81559 * MiB, cc=(9, 0), uuid="GPU-bbbb-2")


@pytest.fixture(autouse=True)
def all_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_each_gpu_is_described_as_its_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, fake_nvml([T4, H100]))
    assert detect_gpus()[0] == DetectedDevice(
        name="Tesla T4",
        kind="cuda",
        memory_bytes=15360 * MiB,
        uuid="GPU-aaaa-1",
        driver="580.95.05",
        compute_capability="7.5",
        power_limit_w=69.5,
    )
    assert detect_gpus()[1].power_limit_w is None
    assert [gpu.name for gpu in detect_gpus()] == ["Tesla T4", "NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", ["NVIDIA H100 80GB HBM3"]),
        ("1, 0", ["NVIDIA H100 80GB HBM3", "Tesla T4"]),
        ("GPU-bbbb", ["NVIDIA H100 80GB HBM3"]),
        ("0,-1,1", ["Tesla T4"]),
        ("7", []),
        ("", []),
    ],
)
def test_cuda_visible_devices_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    install(monkeypatch, fake_nvml([T4, H100]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.name for gpu in detect_gpus()] == names


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB MIG 3g.40gb", "NVIDIA A100-SXM4-80GB"])
def test_a_gpu_in_mig_mode_stands_for_its_instances(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    instance = SimpleNamespace(name=name, memory_bytes=40192 * MiB, uuid="MIG-cccc-3", num_slices=3)
    board = a_gpu(
        "NVIDIA A100-SXM4-80GB",
        memory_bytes=81920 * MiB,
        cc=(8, 0),
        uuid="GPU-dddd-4",
        slots=[None, instance],
    )
    install(monkeypatch, fake_nvml([board]))
    (device,) = detect_gpus()
    assert device.name == "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert (device.memory_bytes, device.compute_capability) == (40192 * MiB, "8.0")


@pytest.mark.parametrize("value", [9, 12])
def test_a_machine_without_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, value: int) -> None:
    def init() -> None:
        raise NVMLError(value)

    install(monkeypatch, fake_nvml(init=init))
    assert detect_gpus() == ()


def test_a_gpu_that_shares_the_hosts_memory_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shared(_: Any) -> None:
        raise NVMLError(3, "Not Supported")

    gb10 = a_gpu("NVIDIA GB10", memory_bytes=0, cc=(12, 1), uuid="GPU-0")
    nvml = fake_nvml([gb10])
    nvml.nvmlDeviceGetMemoryInfo = shared
    install(monkeypatch, nvml)
    monkeypatch.setattr(detect, "_PROC", a_host(tmp_path, cpuinfo="", total_kb=120 << 20))
    assert [device.memory_bytes for device in detect_gpus()] == [120 * GiB]

    nvml.nvmlDeviceGetMemoryInfo = lambda _: lost(0)
    with pytest.raises(MeasurementError, match="GPU is lost"):
        detect_gpus()


def lost(_: int) -> None:
    raise NVMLError(15, "GPU is lost")


def test_a_machine_without_the_nvml_binding_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    assert detect_gpus() == ()


def test_a_driver_that_does_not_answer_is_an_error_not_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise NVMLError(18, "Driver/library version mismatch")

    install(monkeypatch, fake_nvml(init=init))
    with pytest.raises(MeasurementError, match=r"version mismatch.*nvidia-smi"):
        detect_gpus()

    nvml = fake_nvml([T4])
    nvml.nvmlDeviceGetHandleByIndex = lost
    install(monkeypatch, nvml)
    with pytest.raises(MeasurementError, match="GPU is lost"):
        detect_gpus()
