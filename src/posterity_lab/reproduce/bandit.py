"""Mushrooms to eat or to pass: Thompson sampling by Bayes by Backprop, and ε-greedy agents.

Blundell et al. 2015, section 5.3. Eating an edible mushroom is worth 5; a poisonous one −35 or 5, with equal
chances; passing 0. A net with two layers of 100 units predicts the reward of an action. The last interactions
are in a buffer, from which the net learns in 64 steps of 64 draws after every mushroom. Regret is the
difference to an oracle, which eats the edible ones and passes the others. Everything stays on the device.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from posterity_lab import baselines, nets
from posterity_lab.data import Split
from posterity_lab.methods import Method
from posterity_lab.reproduce.curve import normal
from posterity_lab.reproduce.learners import backprop
from posterity_lab.reproduce.study import Cell, Outcome, Show, Study, Unit, Values, grid
from posterity_lab.reproduce.training import loaded, splits
from posterity_lab.run_files import CHECKPOINT, foreign, load, resume, save

_REWARD, _LOSS = 5.0, -35.0
_EPSILON = {"thompson": 0.0, "greedy": 0.0, "greedy-1": 0.01, "greedy-5": 0.05}
_ANEW = "delete it, and the unit begins anew"


def play(unit: Unit, device: str, cache: Path, show: Show) -> Outcome:
    """Meet mushrooms one by one, and sum the regret.

    Args:
        unit: The unit to run. An epoch of its config is ``interactions`` mushrooms.
        device: Device of the computation.
        cache: Folder for the checkpoint, written after every epoch.
        show: Called after every epoch.

    Example:
        >>> import tempfile
        >>> cell = cells(quick=True)[0]
        >>> unit = Unit("bandit", cell.setting, cell.method, 0, {**cell.config, "interactions": 20}, "")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = play(unit, "cpu", Path(folder), lambda done, total, what: None).metrics
        >>> len(found["curve"]), found["regret"] == found["curve"][-1]
        (2, True)
    """
    config = unit.config
    agent = Agent(unit, _mushrooms(unit, device))
    curve = _resumed(unit, cache, agent, device)
    for epoch in range(len(curve), config["epochs"]):
        for _ in range(config["interactions"]):
            agent.meet()
        curve.append(round(float(agent.regret), 1))
        cache.mkdir(parents=True, exist_ok=True)
        save(cache / CHECKPOINT, {"unit": _identity(unit), "curve": curve, **agent.state_dict()})
        show(epoch + 1, config["epochs"], f"regret {curve[-1]:.0f}, epoch")
    steps = config["epochs"] * config["interactions"]
    found = {"regret": curve[-1], "regret_per_mushroom": curve[-1] / steps, "curve": curve}
    return Outcome({**found, "reward_share": 1.0 - curve[-1] / float(agent.best)}, steps)


@final
class Agent:
    """An agent that meets mushrooms, acts, and learns.

    Args:
        unit: The unit, whose config says how to act and learn.
        mushrooms: Features, and 1 for poisonous mushrooms.

    Example:
        >>> config = {**cells(quick=True)[0].config, "updates": 1}
        >>> mushrooms = Split(torch.eye(4), torch.arange(4) % 2)
        >>> agent = Agent(Unit("bandit", "digits", "thompson", 0, config, ""), mushrooms)
        >>> agent.meet()
        >>> bool(agent.regret >= -5.0), agent.met
        (True, 1)
    """

    def __init__(self, unit: Unit, mushrooms: Split) -> None:
        config, self.met = unit.config, 0
        self._config, self._mushrooms = config, mushrooms
        self._epsilon = _EPSILON[unit.method]
        self._networks = config["decision_samples"] if unit.method == "thompson" else 1
        width, device = mushrooms.x.shape[1] + 2, mushrooms.x.device  # an action is one of two
        self.method = _learner(unit, width, device)
        self._chance = torch.Generator(device).manual_seed(unit.seed)
        self._seen = torch.zeros(config["buffer"], width, device=device)
        self._rewards = torch.zeros(config["buffer"], 1, device=device)
        self.regret, self.best = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))

    def meet(self) -> None:
        """One mushroom: look, act, remember, learn."""
        index = self._whole(len(self._mushrooms), 1)
        x, poisonous = self._mushrooms.x[index], self._mushrooms.y[index] == 1
        choices = torch.cat([x.expand(2, -1), torch.eye(2, device=x.device)], 1)
        eat = self._worth(choices).argmax(0, keepdim=True) == 0
        if self._epsilon:
            random = self._uniform(1) < self._epsilon
            eat = torch.where(random, self._uniform(1) < 0.5, eat)
        eaten = torch.where(poisonous & (self._uniform(1) < 0.5), _LOSS, _REWARD)
        reward = torch.where(eat, eaten, 0.0)
        oracle = torch.where(poisonous, 0.0, _REWARD)
        self.regret += (oracle - reward).sum()
        self.best += oracle.sum()
        place = self.met % len(self._seen)
        self._seen[place] = torch.where(eat, choices[0], choices[1])
        self._rewards[place] = reward / self._config["scale"]
        self.met += 1
        self._learn(min(self.met, len(self._seen)))

    def state_dict(self) -> dict[str, Any]:
        """All state that changes."""
        own = {"seen": self._seen, "rewards": self._rewards, "regret": self.regret, "best": self.best}
        chance = self._chance.get_state()
        return {"method": self.method.state_dict(), "met": self.met, "chance": chance, **own}

    def load_state_dict(self, state: Values) -> None:
        """Continue from a saved state, except that of the method."""
        self.met = state["met"]
        self._chance.set_state(state["chance"].cpu())
        kept = {"seen": self._seen, "rewards": self._rewards, "regret": self.regret, "best": self.best}
        for name, tensor in kept.items():
            tensor.copy_(state[name])

    @torch.no_grad()
    def _worth(self, choices: Tensor) -> Tensor:
        """The predicted reward of each choice, averaged over a few new draws, or from a single net."""
        drawn = [self.method.model(choices)[:, 0] for _ in range(self._networks)]
        return torch.stack(drawn).mean(0)

    def _learn(self, filled: int) -> None:
        updates, size = self._config["updates"], self._config["batch_size"]
        chosen = self._whole(filled, updates * size).view(updates, size)
        for x, reward in zip(self._seen[chosen], self._rewards[chosen], strict=True):
            self.method.step(x, reward)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, generator=self._chance, device=self._seen.device)

    def _whole(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=self._chance, device=self._seen.device)


def _learner(unit: Unit, width: int, device: torch.device) -> Method:
    config = unit.config
    model = nets.initialise(nets.build(config["net"], [width], 1), unit.seed).to(device)
    nll = partial(normal, noise=config["noise"])
    if unit.method == "thompson":
        # The KL counts once for the whole buffer.
        return backprop("bbb", config, model, num_data=config["buffer"], seed=unit.seed, nll=nll)
    return baselines.adam(model, lr=config["lr"], nll=nll)


def _mushrooms(unit: Unit, device: str) -> Split:
    """The mushrooms to meet: in a trial, some that no run meets. Among digits, 5 to 9 are poisonous."""
    dataset = loaded(unit, unit.config["data"], device)
    kept, held_out = splits(dataset, {**unit.config, "tested_on": "held-out"})
    met = kept if unit.trial is None else held_out
    return Split(met.x.flatten(1), (met.y >= dataset.classes // 2).long())


def _identity(unit: Unit) -> dict[str, Any]:
    return {"method": unit.method, "seed": unit.seed, "config": dict(unit.config)}


def _resumed(unit: Unit, cache: Path, agent: Agent, device: str) -> list[float]:
    path = cache / CHECKPOINT
    if not path.exists():
        return []
    state = load(path, device, _ANEW)
    if state.get("unit") != _identity(unit) or not {"curve", "method", "seen"} <= state.keys():
        raise foreign(path, _ANEW)
    resume(agent.method, state, cache)
    agent.load_state_dict(state)
    curve: list[float] = state["curve"]
    return curve


def cells(quick: bool) -> list[Cell]:
    """50,000 of 6,124 mushrooms, one at a time, and 2,000 others in trials of 8,000.

    Rewards are divided by ten before the net sees them, so a noise of 0.1 is 1 in units of a reward. The best
    share of the oracle's reward is chosen.

    Example:
        >>> [cell.method for cell in cells(quick=False)]
        ['thompson', 'greedy', 'greedy-1', 'greedy-5']
        >>> {len(cell.grid) for cell in cells(quick=False)}
        {4}
    """
    base: dict[str, Any] = {
        "data": "mushrooms",
        "net": "mlp-100-100",
        "held_out": 2000,
        "epochs": 50,
        "interactions": 1000,
        "buffer": 4096,
        "updates": 64,
        "batch_size": 64,
        "scale": 10.0,
        "decision_samples": 2,
    }
    trial, noises = {"epochs": 8}, [0.1, 0.3]
    if quick:
        base |= {"data": "digits", "held_out": 287, "epochs": 2, "interactions": 100, "updates": 2}
        # With less noise the first poison makes the loss so large that a short run seems to diverge.
        trial, noises = {"epochs": 1}, [1.0, 3.0]
    base["noise"] = noises[0]
    own = {"lr": 1e-3, "std_init": 0.02, "prior_std": 1.0, "kl_factor": 1.0}
    thompson = Cell(
        "mushrooms",
        "thompson",
        {**base, **own},
        grid(noise=noises, lr=[3e-4, 1e-3]),
        trial,
        "reward_share",
    )
    rates = grid(lr=[1e-4, 3e-4, 1e-3, 3e-3])
    others = [name for name in _EPSILON if name != "thompson"]
    return [
        thompson,
        *(Cell("mushrooms", name, {**base, "lr": 1e-3}, rates, trial, "reward_share") for name in others),
    ]


_METRICS = ("regret", "regret_per_mushroom", "reward_share", "curve")
BANDIT = Study("bbb-bandit", cells, play, _METRICS)
