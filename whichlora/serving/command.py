"""The command that starts an engine as it was judged."""

from __future__ import annotations

import shlex

from whichlora.serving.base import Served
from whichlora.serving.product_dtypes import dtype_of

# As vLLM reads it, too, where it sleeps: 0.28.0 v1/worker/gpu_worker.py:299.
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
HEAD_NODE = "HEAD_NODE"  # stands for the address of the first machine


NODES = "nnodes"  # the option of both engines; its flag stands among those of the first machine


def shell_command(
    served: Served, start: str, *, context: str, flags: tuple[str, ...] = (), **renamed: str
) -> str:
    """`start`, then the model, the context, the dtype and every option that the run states.

    Flags that the release does not know are left out.

    Args:
        start: all before the model.
        context: the flag of the most tokens of a sequence.
        flags: further ones.
        renamed: words in place of an option, where its flag is not its name; {} is its value; empty
            where it has none.
    """
    words = [EXPANDABLE] if served.run.expandable_segments else []
    words += [start, shlex.quote(served.weights or served.model.name)]
    words += [context, str(served.context), "--dtype", dtype_of(served)]
    for name, value in served.run.serving_options:
        flag = "--" + name.replace("_", "-")
        if renamed.get(name) == "" or name == NODES:
            continue
        if served.engine.lacks_flag(name, served.libraries):
            continue
        if value is True:
            words.append(renamed.get(name, flag))
        elif name in renamed:
            words.append(renamed[name].format(value))
        elif value is not False:
            words += [flag, shlex.quote(f"{value:g}" if isinstance(value, float) else str(value))]
    return " ".join((*words, *flags))


def nodes_note(served: Served, others: str, rank: str) -> str:
    """What the command of the first of several machines is on the others.

    Args:
        others: what is added to it there.
        rank: the flag of a machine's number.
    """
    numbers = "1" if served.nodes == 2 else f"1 to {served.nodes - 1}"
    return (
        f"the command is that of the first of {served.nodes} machines, and {HEAD_NODE} stands for "
        f"its address; the others run the same with {rank} {numbers}{others and f' and {others}'}"
    )
