"""`whichlora mcp`: the questions of the command line as tools of a Model Context Protocol server.

Importing this module raises `ConfigError` where the SDK is not installed. Answers are the Markdown
documents that `--markdown` prints; nothing is written or measured.
"""

from __future__ import annotations

from whichlora.extras import require

require("mcp", "mcp", extra="mcp")  # before the imports below need it

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Annotated, Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.types import ToolAnnotations
from pydantic import Field as Described
from pydantic import ValidationError

from whichlora import __version__, api, terminal
from whichlora.errors import WhichLoraError
from whichlora.page.form import DATA, Field, fields
from whichlora.store.gpus import list_gpus
from whichlora.store.models import list_models
from whichlora.terminal.sheet import Document, Sheet
from whichlora.units import format_bytes, format_count
from whichlora.workflow.recommend import Question
from whichlora.workflow.recommend import recommend as answered

_INSTRUCTIONS = (
    "Predicts peak GPU memory, time and cost of fine-tuning and serving language models, without "
    "running them. Ask it instead of estimating yourself: `recommend` for the largest model on a "
    "GPU, `estimate` for one run, `where` for the GPUs that a run fits on, `explain` for its bytes."
)
_READS_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
_TYPES: dict[str, Any] = {"text": str, "count": int, "switch": bool}
_ASKED_APART = ("model", "gpu", "from", *DATA)  # arguments of their own

Tool = Callable[..., str]


class _Server(MCPServer):
    """Every fault of a request is one line, an unknown argument among them."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        accepted = {tool.name: tool.input_schema["properties"] for tool in await self.list_tools()}
        for argument in arguments if name in accepted else ():
            if argument not in accepted[name]:
                names = ", ".join(accepted[name])
                raise ToolError(f"{argument}: is not an argument; accepted are {names}")
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError:  # our bug: the traceback is on stderr
            raise
        except ToolError as error:
            raise ToolError(_fault(error)) from error


def _fault(error: ToolError) -> str:
    """What was wrong, without the name of the tool, which the caller knows."""
    cause = error.__cause__
    if not isinstance(cause, ValidationError):
        return str(cause or error)
    faults = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in cause.errors())
    return " ".join("; ".join(faults).split())


def serve() -> None:
    """Answer on stdin and stdout until the client leaves."""
    server().run("stdio")


def server() -> MCPServer:
    """The server with its tools."""
    made = _Server("whichlora", version=__version__, instructions=_INSTRUCTIONS, log_level="ERROR")
    for tool in (estimate, explain, where, recommend, models, gpus):
        made.add_tool(_one_line(tool), annotations=_READS_ONLY, structured_output=False)
    return made


def _one_line(tool: Tool) -> Tool:
    """`tool` whose errors the caller reads, and with typed settings in place of `**settings`."""

    @wraps(tool)
    def told(**arguments: Any) -> str:
        stated = {name: value for name, value in arguments.items() if value is not None}
        try:
            return tool(**stated)
        except WhichLoraError as error:
            raise ToolError(str(error)) from None

    signature = inspect.signature(tool, eval_str=True)
    parameters = list(signature.parameters.values())
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        settings = (field for field in fields() if field.name not in _ASKED_APART)
        parameters = [*parameters[:-1], *map(_parameter, settings)]
    told.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return told


def _parameter(field: Field) -> inspect.Parameter:
    """An optional, typed argument for a field of the page."""
    choices = tuple(word for word, _ in field.choices if word)
    kind = Literal[choices] if field.kind == "choice" else _TYPES[field.kind]
    default = f"; default {field.default}" if field.default else ""
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[kind | None, Described(description=f"{field.label}{default}")],
        default=None,
    )


Model = Annotated[str, Described(description="Hub id, local folder, or a name: llama 3.1 8b.")]
Gpu = Annotated[str, Described(description="Such as 4090, h100; 24GB: memory alone; auto: here.")]
File = Annotated[
    str,
    Described(
        description="File of a training: of Axolotl, LLaMA-Factory or TRL, a script, a notebook."
    ),
]


def estimate(
    *,
    model: Model = "",
    gpu: Gpu = "auto",
    from_file: File = "",
    data: Annotated[str | None, Described(description="File or hub dataset to train on.")] = None,
    samples: Annotated[int | None, Described(description="Rows, where there is no data.")] = None,
    epochs: Annotated[float | None, Described(description="Passes over data or samples.")] = None,
    **settings: Any,
) -> str:
    """Peak memory with its interval, time, cost, and whether one run fits a GPU.

    With data or samples also time and cost of the whole training.
    """
    whole: dict[str, Any] = {"data": data, "samples": samples, "epochs": epochs}
    answers = api.estimate(model or (), gpu, from_file=_files(from_file), **whole, **settings)
    return terminal.as_markdown(terminal.predictions_document(answers, answers.refused))


def explain(*, model: Model = "", gpu: Gpu = "auto", from_file: File = "", **settings: Any) -> str:
    """Every tensor at the peak of one run, and what each other choice would save."""
    explanation = api.explain(model, gpu, from_file=_files(from_file), **settings)
    return terminal.as_markdown(terminal.explanation_document(explanation))


def where(
    *,
    model: Model = "",
    gpus_to_compare: Annotated[
        list[str] | None, Described(description="Types of GPU; default: the whole catalog.")
    ] = None,
    from_file: File = "",
    **settings: Any,
) -> str:
    """The GPUs that one run fits on, the smallest first, with time and price; and the cheapest."""
    placed = api.where(model, gpus_to_compare or "all", from_file=_files(from_file), **settings)
    return terminal.as_markdown(terminal.placements_document(placed))


def recommend(
    *,
    gpu: Annotated[str | None, Described(description="Such as 4090, 24GB; default: here.")] = None,
    gpus: Annotated[int, Described(description="How many share the training.")] = 1,
    models: Annotated[list[str] | None, Described(description="To choose from.")] = None,
    seq_len: Annotated[int, Described(description="Longest sequence in tokens.")] = 2048,
    data: Annotated[str | None, Described(description="File or hub dataset to train on.")] = None,
    samples: Annotated[int | None, Described(description="Rows, where there is no data.")] = None,
    epochs: float = 1.0,
    within: Annotated[str | None, Described(description="Most time, such as 8h.")] = None,
    budget: Annotated[str | None, Described(description="20usd, 10h (of GPUs) or 5kWh.")] = None,
    trainer: Annotated[str | None, Described(description="Such as dpo; default: sft.")] = None,
    serving: Annotated[str | None, Described(description="vllm, sglang or llama-cpp.")] = None,
    tpot: Annotated[str | None, Described(description="With serving: such as 50ms.")] = None,
    country: Annotated[str | None, Described(description="Whose electricity, for CO2.")] = None,
) -> str:
    """The largest models that train on a GPU, with variant, batch, time, cost and serving."""
    question = Question(
        gpu=gpu,
        gpus=gpus,
        models=tuple(models or ()),
        seq_len=seq_len,
        data=data,
        samples=samples,
        epochs=epochs,
        within=within,
        budget=budget,
        trainer=trainer,
        serving=serving,
        tpot=tpot,
        country=country,
    )
    with terminal.Progress(quiet=True) as progress:
        recommendation = answered(question, progress=progress)
    return terminal.as_markdown(terminal.recommended_document(recommendation))


def models(
    *, pattern: Annotated[str, Described(description="Part of a name, such as qwen3.")] = ""
) -> str:
    """Models of the database; any other Hugging Face id of a known architecture works, too."""
    rows = [
        (record.hub_id, record.model_type, format_count(record.params))
        for record in list_models()
        if pattern.lower() in record.hub_id.lower()
    ]
    columns = ("model", "type", "parameters")
    return _table(f"{len(rows)} models", columns, rows, right=("parameters",))


def gpus() -> str:
    """Accelerators of the catalog."""
    rows = [
        (gpu.key, gpu.name, format_bytes(gpu.memory_bytes), gpu.compute_capability or "-")
        for gpu in list_gpus()
    ]
    columns = ("key", "name", "memory", "compute capability")
    return _table(f"{len(rows)} accelerators", columns, rows, right=("memory",))


def _table(
    title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, right: tuple[str, ...]
) -> str:
    sheet = Sheet(title="", columns=columns, right=right, rows=rows)
    return terminal.as_markdown(Document(title=title, sheets=[sheet]))


def _files(path: str) -> tuple[str, ...]:
    return (path,) if path else ()
