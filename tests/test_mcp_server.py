"""The server for assistants, asked by the client of the SDK over stdio."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from whichlora.cli import main

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")
MODEL, GPU = "HuggingFaceTB/SmolLM2-135M", "l4-24gb"
FILE = Path(__file__).parent.parent / "benchmarks" / "question_files" / "axolotl.yaml"

REFUSED = [
    ("estimate", {"model": MODEL, "gpu": "l44"}, "unknown GPU 'l44'"),
    (
        "estimate",
        {"model": MODEL, "gpu": GPU, "method": "lara"},
        "method: Input should be 'full', ",
    ),
    (
        "estimate",
        {"model": MODEL, "gpu": GPU, "batch_size": "two"},
        "batch_size: Input should be a",
    ),
    ("estimate", {"model": MODEL, "batchsize": 1}, "batchsize: is not an argument; accepted are"),
    ("where", {"model": MODEL, "batch_size": 0}, "batch_size: must be 1 or more"),
    ("recommend", {"gpu": GPU, "budget": "5eur", "samples": 9}, "budget: '5eur' is not in USD"),
    ("guess", {}, "Unknown tool: guess"),
]
ANSWERED = [
    ("estimate", {"from_file": str(FILE), "gpu": "l4"}, "4096 tokens on l4-24gb: "),
    ("explain", {"model": MODEL, "gpu": GPU}, "## allocated at loss_"),
    ("where", {"model": MODEL, "gpus_to_compare": ["l4", "t4"]}, "| t4-16gb | 14.75 GiB |"),
    ("models", {"pattern": "SmolLM2"}, f"| {MODEL} | llama | 135M |"),
    ("gpus", {}, "| l4-24gb | NVIDIA L4 |"),
]


@pytest.mark.slow
def test_the_client_of_the_sdk_is_answered_in_markdown_and_refused_in_a_line() -> None:
    asyncio.run(conversation())


async def conversation() -> None:
    program = mcp.StdioServerParameters(command=sys.executable, args=["-m", "whichlora", "mcp"])
    async with mcp.Client(mcp.stdio_client(program)) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"estimate", "explain", "where", "recommend", "models", "gpus"}
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        properties = tools["estimate"].input_schema["properties"]
        assert "qlora" in properties["method"]["anyOf"][0]["enum"]
        assert properties["batch_size"]["anyOf"][0] == {"type": "integer"}

        settings = {"method": "qlora", "batch_size": 2}
        asked = {"model": MODEL, "gpu": GPU, **settings}
        command = ["estimate", MODEL, "--gpu", GPU, "--method", "qlora", "--batch-size", "2"]
        printed = CliRunner().invoke(main, [*command, "--markdown"]).stdout
        assert text(await client.call_tool("estimate", asked)) == printed
        for name, arguments, part in ANSWERED:
            answer = await client.call_tool(name, arguments)
            assert not answer.is_error, text(answer)
            assert part in text(answer)
        for name, arguments, part in REFUSED:
            refusal = await client.call_tool(name, arguments)
            assert refusal.is_error
            assert text(refusal).startswith(part)
            assert "\n" not in text(refusal)


def text(result: Any) -> str:
    (block,) = result.content
    return str(block.text)
