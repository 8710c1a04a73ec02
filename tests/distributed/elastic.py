"""A training script that saves its work and goes on from it, as torchrun starts it again after a fault.

``torchrun ... elastic.py FOLDER RULE [DIES_AT [node]]``: in its first life the last process kills itself
before step DIES_AT; with ``node`` every process that is told so, and its torchrun. The first process writes
what was learned to FOLDER/learned.pt, and how each of its lives began to FOLDER/lives.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from distributed.runs import RULES, batches, loss_of, model, share

SAVED_EVERY = 2


def main() -> None:
    folder, rule, *fate = Path(sys.argv[1]), *sys.argv[2:]
    dies_at, node = int(fate[0]) if fate else None, "node" in fate
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    net = DistributedDataParallel(model())
    opt = RULES[rule](net, mc_samples=1, seed=7)
    done = max((int(each.name) for each in folder.glob("[0-9]*") if (each / ".metadata").exists()), default=0)
    if rank == 0:
        with (folder / "lives").open("a") as lives:
            lives.write(f"{world} from {done}\n")
    if done:
        weights, state = get_state_dict(net, opt)
        checkpoint.load({"model": weights, "opt": state}, checkpoint_id=folder / f"{done}")
        set_state_dict(net, opt, model_state_dict=weights, optim_state_dict=state)
    for number, (x, y) in enumerate(batches()):
        if number < done:
            continue
        first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if number == dies_at and first_life and (node or rank == world - 1):
            if node:
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        opt.zero_grad()
        with opt.sampled_params():
            loss_of(net, share(x, rank, world, None), share(y, rank, world, None)).backward()
        opt.step()
        if (number + 1) % SAVED_EVERY == 0:
            weights, state = get_state_dict(net, opt)
            checkpoint.save({"model": weights, "opt": state}, checkpoint_id=folder / f"{number + 1}")
    if rank == 0:
        q = opt.posterior()
        learned = {"mean": q.mean(), "std": q.std()}
        torch.save(learned, folder / "learned.pt")
    distributed.destroy_process_group()
    os._exit(0)  # threads of gloo may wait for processes that have ended


if __name__ == "__main__":
    main()
