"""Training loops of others, in several processes: ``torchrun ... clients.py NAME FOLDER``."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from distributed.runs import BATCH, RULES, batches, loss_of, model, share
from posterity import VariationalOptimizer

RULE, SETTINGS = "vogn", {"mc_samples": 1, "seed": 7}


def examples() -> TensorDataset:
    """Those of all batches, in their order."""
    xs, ys = zip(*batches(), strict=True)
    return TensorDataset(torch.cat(xs), torch.cat(ys))


def lightning(folder: Path) -> VariationalOptimizer:
    """``optimizer.step(closure)`` is what it calls, so that nothing needs a change."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_of(self.net, *batch)

        def configure_optimizers(self) -> VariationalOptimizer:
            self.opt = RULES[RULE](self.net, **SETTINGS)
            return self.opt

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shares = [tuple(share(each, rank, world, None) for each in batch) for batch in batches()]
    net = Net()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        **dict.fromkeys(quiet, False),
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_epochs=1,
        use_distributed_sampler=False,
        default_root_dir=folder,
    )
    trainer.fit(net, DataLoader(shares, batch_size=None))  # type: ignore[arg-type]
    return net.opt


def accelerate(folder: Path) -> VariationalOptimizer:
    """The model and the loader are prepared, the optimiser is not."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    net, loader = accelerator.prepare(model(), DataLoader(examples(), batch_size=BATCH))
    opt = RULES[RULE](net, **SETTINGS)
    for x, y in loader:
        opt.zero_grad()
        with opt.sampled_params():
            accelerator.backward(loss_of(net, x, y))
        opt.step()
    return opt


def transformers(folder: Path) -> VariationalOptimizer:
    """A training step inside a sampling context."""
    from transformers import Trainer, TrainingArguments

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.net, x, labels)}

    class Rows(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(examples())

        def __getitem__(self, i: int) -> dict[str, Tensor]:
            x, y = examples()[i]
            return {"x": x, "labels": y}

    class Sampled(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            with opt.sampled_params():
                return super().training_step(*args, **kwargs)

        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(examples())

    net = Net()
    opt = RULES[RULE](net.net, **SETTINGS)
    arguments = TrainingArguments(
        str(folder / "hf"),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=BATCH // int(os.environ["WORLD_SIZE"]),
        ddp_find_unused_parameters=False,  # else autograd's graph is searched for weights that layers report
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    Sampled(net, arguments, train_dataset=Rows(), optimizers=(opt, None)).train()
    return opt


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    opt = {"lightning": lightning, "accelerate": accelerate, "transformers": transformers}[name](folder)
    q = opt.posterior()
    found = {f"mean {key}": value for key, value in q.mean().items()}
    torch.save(
        found | {f"std {key}": value for key, value in q.std().items()}, folder / f"{os.environ['RANK']}.pt"
    )
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo may wait for processes that have ended


if __name__ == "__main__":
    main()
