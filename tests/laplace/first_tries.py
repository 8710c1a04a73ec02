"""What a Laplace approximation does to the NLL of test data, against the plain net's.

python tests/laplace/first_tries.py --seeds 20 21 22
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable

import torch
from sklearn.datasets import load_diabetes, load_digits, make_friedman1
from torch import Tensor, nn
from torch.nn import functional as F

from posterity import laplace, predict
from posterity.laplace.evidence import log_probs

Data = tuple[Tensor, Tensor]
FITS: dict[str, dict[str, object]] = {
    "last": {},
    "last, validation": {"validation": True},
    "last, marginal": {"prior_precision": "marginal"},
    "all": {"names": "*"},
    "all, validation": {"names": "*", "validation": True},
    "all, marginal": {"names": "*", "prior_precision": "marginal"},
}


def split(x: Tensor, y: Tensor, seed: int) -> list[Data]:
    """Three fifths for training, one for validation, one for testing."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[part], y[part]) for part in order.tensor_split([3 * len(x) // 5, 4 * len(x) // 5])]


def digits(seed: int) -> list[Data]:
    data = load_digits()
    return split(torch.tensor(data.data).float() / 16, torch.tensor(data.target), seed)


def sequences(seed: int) -> list[Data]:
    """How often a word occurs, and whether the ends agree; a tenth of the labels are random."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 8, (1500, 12), generator=g)
    y = ((x == 3).sum(1) + 2 * (x[:, 0] == x[:, -1])) % 4
    random = torch.rand(1500, generator=g) < 0.1
    return split(x, torch.where(random, torch.randint(0, 4, (1500,), generator=g), y), seed)


def scaled(x: Tensor, y: Tensor, seed: int) -> list[Data]:
    parts = split(x, y, seed)
    (mean, std), (centre, spread) = ((each.mean(0), each.std(0)) for each in parts[0])
    return [((a - mean) / std, (b - centre) / spread) for a, b in parts]


def diabetes(seed: int) -> list[Data]:
    data = load_diabetes()
    return scaled(torch.tensor(data.data).float(), torch.tensor(data.target).float()[:, None], seed)


def friedman(seed: int) -> list[Data]:
    x, y = make_friedman1(500, 10, noise=1.0, random_state=seed)
    return scaled(torch.tensor(x).float(), torch.tensor(y).float()[:, None], seed)


def sine(seed: int) -> list[Data]:
    g = torch.Generator().manual_seed(seed)
    x = 6 * torch.rand(300, 1, generator=g) - 3
    return scaled(x, torch.sin(2 * x) + 0.2 * torch.randn(300, 1, generator=g), seed)


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(8, 32), nn.Embedding(12, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.body(x)).mean(1))


# Data, model, and epochs: few, and so many that the net is too sure of itself.
TASKS: dict[str, tuple[Callable[[int], list[Data]], Callable[[], nn.Module], tuple[int, int]]] = {
    "digits, MLP 64-100-10": (digits, lambda: mlp(64, 100, 10), (20, 100)),
    "digits, CNN with BatchNorm": (digits, cnn, (10, 60)),
    "sequences, transformer": (sequences, Transformer, (15, 60)),
    "diabetes, MLP 10-50-1": (diabetes, lambda: mlp(10, 50, 1), (40, 300)),
    "Friedman, MLP 10-50-1": (friedman, lambda: mlp(10, 50, 1), (40, 300)),
    "sine, MLP 1-50-1": (sine, lambda: mlp(1, 50, 1), (100, 500)),
}


def trained(net: nn.Module, data: Data, epochs: int) -> nn.Module:
    x, y = data
    loss = (lambda out, y: 0.5 * F.mse_loss(out, y)) if y.is_floating_point() else F.cross_entropy
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(32):
            opt.zero_grad()
            loss(net(x[rows]), y[rows]).backward()
            opt.step()
    return net.eval()


def log_scores(
    net: nn.Module, train: Data, held_out: Data, test: Data, fits: Iterable[str] = FITS
) -> dict[str, Tensor]:
    """Log-probability of every test target by fit; for regression, with the noise of the fit."""
    found: dict[str, Tensor] = {}
    x, y = test
    for name in fits:
        options = FITS[name]
        chosen = options | ({"validation": held_out} if "validation" in options else {})
        likelihood = "regression" if y.is_floating_point() else "classification"
        fit = laplace.fit(net, train, likelihood=likelihood, **chosen)
        for key, p in (
            ("plain", predict(net, x=x)),
            (name, predict(net, fit.posterior(), x, samples=50)),
        ):
            found[key] = log_probs(p.samples, y, fit.noise_variance).logsumexp(0) - math.log(len(p.samples))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    options = parser.parse_args()
    print("| task, epochs | plain | " + " | ".join(FITS) + " |")
    print("|---|" + "---|" * (1 + len(FITS)))
    for task in options.tasks:
        data, model, lengths = TASKS[task]
        for epochs in lengths:
            rows = []
            for seed in options.seeds:
                torch.manual_seed(seed)
                train, held_out, test = data(seed)
                logs = log_scores(trained(model(), train, epochs), train, held_out, test)
                rows.append({key: -float(each.mean()) for key, each in logs.items()})
            means = [sum(row[key] for row in rows) / len(rows) for key in ("plain", *FITS)]
            print(f"| {task}, {epochs} | " + " | ".join(f"{each:.3f}" for each in means) + " |", flush=True)
            worst = {key: max(row[key] - row["plain"] for row in rows) for key in FITS}
            print("worst over plain:", *(f"{key} {each:+.4f}" for key, each in worst.items()), flush=True)


if __name__ == "__main__":
    main()
