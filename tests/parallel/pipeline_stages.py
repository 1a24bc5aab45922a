"""One rank of a tiny pipeline under torch's Schedule1F1B: prints what it keeps of micro-batches."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 16


def main(micro_batches: int) -> None:
    rank, stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(block, rank, stages, torch.device("cpu"))
    forward, waiting = stage.forward_one_chunk, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        waiting.append(len(stage.fwd_cache))
        return output

    stage.forward_one_chunk = counted
    schedule = Schedule1F1B(stage, micro_batches, loss_fn=nn.MSELoss())
    batch = torch.randn(2 * micro_batches, WIDTH)
    if rank == 0:
        schedule.step(batch, return_outputs=False)
    elif rank == stages - 1:
        schedule.step(target=batch, losses=[], return_outputs=False)
    else:
        schedule.step(return_outputs=False)
    buffers = {
        info.buffer.untyped_storage()._cdata
        for received in (stage.args_recv_info, stage.grad_recv_info)
        for infos in received.values()
        for info in infos
        if isinstance(getattr(info, "buffer", None), torch.Tensor)
    }
    sys.stdout.write(f"kept {rank} {max(waiting)} {len(buffers)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
