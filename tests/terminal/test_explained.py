"""Explanations and placements as text: whole pages, at the widths that people have."""

import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from candidates import prediction
from rich.console import Console

from whichlora.predict.explain import Alternative, CacheUse, Explanation
from whichlora.predict.largest import Placement
from whichlora.predict.ledger_lines import Line
from whichlora.spec.gpu import GpuSpec
from whichlora.spec.results import Prediction
from whichlora.spec.run import RunConfig
from whichlora.terminal import (
    as_markdown,
    explanation_document,
    print_explanation,
    print_placements,
)
from whichlora.units import GiB, MiB

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = RunConfig(model="org/small-1b", method="qlora", batch_size=4)


def made_up(run: RunConfig, *, loss_gib: int = 3, trained: int = 20_000_000) -> Prediction:
    parts = {"weights": 2 * GiB, "logits_and_loss": loss_gib * GiB, "allocator": 512 * MiB}
    allocated = (2 + loss_gib) * GiB
    parts["context"] = 256 * MiB
    drafted = prediction(run, used_bytes=sum(parts.values()), usable_bytes=8 * GiB)
    memory = replace(
        drafted.memory,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=allocated + 512 * MiB,
        breakdown=parts,
        moment="loss_backward",
    )
    verdict = "fits" if loss_gib <= 3 else "fails"
    return replace(
        drafted,
        memory=memory,
        num_trainable_params=trained,
        verdict=verdict,
        notes=("a [bracket] is no markup",),
    )


def line(name: str, num_bytes: int, **changes: object) -> Line:
    fields = {
        "part": "weights",
        "shape": "[hidden_size, vocab_size]",
        "dtype": "bf16",
        "count": "1",
        "numbers": "",
        "kind": "exact",
        "source": "a library's function",
        "why": "because backward reads it",
        "members": (),
    }
    return Line(what=name, num_bytes=num_bytes, **(fields | changes))  # type: ignore[arg-type]


def explanation(run: RunConfig = RUN) -> Explanation:
    weights = line(
        "weights of the layers",
        2 * GiB,
        members=(
            line("gate_proj", 2 * GiB - 4 * MiB, numbers="16 × 2048 × 8192 × 4.127 bit"),
            line("k_proj", 2 * MiB),
            line("v_proj", 2 * MiB),
        ),
    )
    loss = line(
        "log-softmax and its gradients",
        3 * GiB,
        shape="[batch_size, seq_len, vocab_size]",
        dtype="fp32",
        count="3",
        numbers="3 × 4 × 2048 × 32768 × 4 B",
        why="backward of the cross entropy: what it reads, its gradient, the logits' gradient",
    )
    training = run.phase == "finetune"
    cache = CacheUse(
        kv_cache="vllm",
        block_tokens=16,
        kept_tokens=640,
        token_bytes=131_072,
        block_bytes=2 * MiB,
        cache_bytes=80 * MiB,
        prediction=made_up(replace(run, kv_cache="vllm")),
    )
    return Explanation(
        prediction=made_up(run),
        lines=(loss, weights),
        card=(
            line("idle segments", 512 * MiB, shape="segments", dtype="bytes", kind="upper bound"),
            line("device context", 256 * MiB, part="context", dtype="bytes", kind="estimate"),
        ),
        layer=(
            line("query", 32 * MiB, numbers="4 × 2048 × 2048 × 2 B"),
            line("log-sum-exp", MiB // 8, numbers="4 × 2048 × 4 × 4 B"),
        ),
        moments={"loss_forward": 4 * GiB, "loss_backward": 5 * GiB},
        methods=(
            Alternative(
                name="full",
                settings={"method": "full"},
                prediction=made_up(replace(run, method="full"), loss_gib=7, trained=10**9),
            ),
            Alternative(name="qlora", settings={}, prediction=made_up(run)),
        ),
        savings=(
            Alternative(
                name="half the batch",
                settings={"batch_size": 2},
                prediction=made_up(replace(run, batch_size=2), loss_gib=1),
            ),
            Alternative(
                name="eager attention",
                settings={"attn": "eager"},
                prediction=made_up(replace(run, attn="eager"), loss_gib=4),
            ),
        ),
        ranks=tuple(
            Alternative(
                name=f"r {r}", settings={"r": r}, prediction=made_up(replace(run, r=r), trained=r)
            )
            for r in (8, 16)
        )
        if training
        else (),
        caches=() if training else (cache,),
    )


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    def open_console() -> Console:
        return Console(width=width, force_terminal=True, color_system=None, highlight=False)

    for module in ("explained", "placements"):
        monkeypatch.setattr(f"whichlora.terminal.{module}.open_console", open_console)


def same_as_golden(name: str, text: str) -> None:
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [80, 120, 200])
def test_an_explanation_reads_the_same_at_every_width(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch, width)
    print_explanation(explanation())
    text = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    assert max(map(len, text.splitlines())) <= width
    same_as_golden(f"explain_{width}.txt", text)


def test_an_explanation_of_inference_shows_the_cache_by_engine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_explanation(explanation(replace(RUN, phase="inference")))
    text = capsys.readouterr().out
    assert "the same job by storage of the weights" in text
    assert "by rank" not in text
    (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == ["vllm"])
    assert row == ["vllm", "16", "128.0", "KiB", "640", "80.00", "MiB", "5.75", "GiB", "yes"]


def test_an_explanation_is_a_markdown_document() -> None:
    text = as_markdown(explanation_document(explanation()))
    same_as_golden("explain.md", text)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)


def placement(memory_gib: int, *, batch_size: int = 0, **changes: object) -> Placement:
    gpu = GpuSpec(
        key=f"card-{memory_gib}gb",
        name="card",
        kind="cuda",
        memory_bytes=memory_gib * GiB,
        bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"bf16": 1e14},
    )
    return Placement(
        gpu=replace(gpu, **changes),  # type: ignore[arg-type]
        prediction=made_up(RUN, loss_gib=3 if batch_size else 7),
        batch_size=batch_size,
    )


@pytest.mark.parametrize("width", [80, 160])
def test_cards_stand_in_order_and_the_refused_ones_below(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_terminal(monkeypatch, width)
    large = placement(96)
    refused = replace(
        large, prediction=None, refusal="quant: 'nf4' does not run on card-96gb", batch_size=0
    )
    print_placements([placement(24, batch_size=7), placement(8, unverified=("l2_bytes",)), refused])
    text = "".join(line.rstrip() + "\n" for line in capsys.readouterr().out.splitlines())
    same_as_golden(f"where_{width}.txt", text)


@pytest.mark.parametrize("width", [80, 200])
def test_a_terminal_of_any_width_gets_lines_that_fit_and_no_colour(width: int) -> None:
    main_end, program_end = pty.openpty()
    command = [sys.executable, "-m", "whichlora", "explain", "HuggingFaceTB/SmolLM2-135M"]
    done = subprocess.Popen(
        [*command, "--gpu", "rtx-4090-24gb", "--no-gradient-checkpointing"],
        stdout=program_end,
        env=os.environ | {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "xterm"},
    )
    os.close(program_end)
    text = _read(main_end)
    assert done.wait(timeout=60) == 0
    plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "")  # bold heads are no colour
    assert "\x1b" not in plain
    assert "device memory used" in plain
    assert max(len(line.rstrip()) for line in plain.splitlines()) <= width


def _read(descriptor: int) -> str:
    output = b""
    while True:
        try:
            block = os.read(descriptor, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        output += block
    os.close(descriptor)
    return output.decode()
