"""What is printed of one run on several accelerators."""

from __future__ import annotations

import re

import pytest

from whichlora.api import where
from whichlora.store.gpus import list_gpus
from whichlora.terminal.placements import print_placements


def test_a_name_is_said_to_be_taken_as_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    print_placements(where("Qwen/Qwen3-0.6B", ["p100", "t4"], method="lora", seq_len=64))
    assert "note: p100: taken as p100-pcie-16gb, the usual one" in capsys.readouterr().out


def test_an_engine_that_does_not_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    served = {"phase": "inference", "serving": "vllm", "context": 40_000}
    print_placements(where("Qwen/Qwen3-32B", ["h800-sxm", "h200-sxm"], **served))
    printed = " ".join(capsys.readouterr().out.split())
    assert "vllm does not start on h800-sxm-80gb: one sequence of 40000 tokens takes" in printed
    assert "vllm does not start on h200" not in printed


def test_each_row_of_several_gpus_has_its_strategy_and_host_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    cards = ["h100-sxm-80gb", "a30-24gb", "l40s-48gb", "v100-sxm2-32gb", "b200-180gb"]
    placed = where("meta-llama/Llama-3.1-70B", cards, gpus=8, method="full")
    print_placements(placed, whole=False)
    text = capsys.readouterr().out
    assert text.startswith("Llama-3.1-70B full, batch 1, 2048 tokens, on 8 GPUs\n")
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert re.search(r"1\.69 TiB +zero3, offload optimizer\+params", rows["a30-24gb"])
    assert re.search(r"- +tp ", rows["h100-sxm-80gb"])
    assert "--host-memory states what it has" in text
    assert "parallel auto" not in text
    assert text.count("\nnote: ") == 8
    assert "more notes on single cards: --all" in text
    print_placements(placed)
    assert capsys.readouterr().out.count("\nnote: ") > 8


def test_a_table_without_a_card_that_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_placements(where("meta-llama/Llama-3.1-70B", ["rtx-4090-24gb"]))
    text = capsys.readouterr().out
    assert "no card fits; the nearest come first" in text
    several = "several cards: `whichlora estimate` with --gpus 2,4,8,16 says how many hold it"
    assert several in text
    print_placements(where("meta-llama/Llama-3.1-70B", ["rtx-4090-24gb"], gpus=2, method="full"))
    assert several not in capsys.readouterr().out


def test_of_many_cards_the_nearest_are_shown_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cards = [gpu.key for gpu in list_gpus()[::3]]
    placed = where("Qwen/Qwen3-0.6B", cards, method="lora", seq_len=64)
    print_placements(placed, whole=False)
    text = capsys.readouterr().out
    assert len(re.findall(r" yes ", text)) == 24
    counted = re.search(r"more cards: (\d+) larger ones fit.*; --all shows them", text)
    assert counted
    print_placements(placed)
    assert len(re.findall(r" yes ", capsys.readouterr().out)) == 24 + int(counted[1])
