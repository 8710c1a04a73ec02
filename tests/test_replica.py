"""A replica shares a model's weights, and nothing that runs in it reaches the model."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import posterity
from posterity.replica import evaluating, origin, replica

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", "first second")


def drawn(model: nn.Module) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, *p.shape, generator=noise) for name, p in model.named_parameters()}


class Plain(nn.Module):
    """Two layers, which the others reach by other ways than their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(3, 4), nn.Linear(4, 2)

    def layers(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        return self.fc, self.out

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers()
        return second(first(x).relu())


class Kept(Plain):
    """Reaches them by what a function has made of the two."""

    def __init__(self, keep: Callable[[nn.Module, nn.Module], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.kept, self.read = keep(self.fc, self.out), read

    def layers(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        first, second = self.read(self.kept)
        return first, second


class Itself(Plain):
    """Holds itself, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.me, self.weakly = [self], weakref.ref(self)
        self.by_proxy = {"me": weakref.proxy(self)}

    def layers(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        assert self.weakly() is self.me[0] is self
        return self.me[0].fc, self.by_proxy["me"].out


class Wrapped(Plain):
    """Its forward() was replaced by a function that encloses it, as accelerate does."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.forward
        self.forward = lambda x: inner(x)  # type: ignore[method-assign]


def weak(module: nn.Module) -> Any:
    return weakref.ref(module)


KEEPERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "list": (lambda a, b: [a, b], lambda kept: kept),
    "tuple": (lambda a, b: (a, b), lambda kept: kept),
    "named tuple": (Pair, lambda kept: (kept.first, kept.second)),
    "dict": (lambda a, b: {"a": a, "b": b}, lambda kept: kept.values()),
    "keys": (lambda a, b: {a: 1, b: 2}, list),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda kept: kept.values()),
    "default dict": (lambda a, b: defaultdict(list, a=[a], b=[b]), lambda kept: (kept["a"][0], kept["b"][0])),
    "deque": (lambda a, b: deque([a, b]), lambda kept: kept),
    "nested": (lambda a, b: [{"a": (a,)}, [[b]]], lambda kept: (kept[0]["a"][0], kept[1][0][0])),
    "object": (lambda a, b: SimpleNamespace(a=a, b=[b]), lambda kept: (kept.a, kept.b[0])),
    "methods": (lambda a, b: [a.forward, b.__call__], lambda kept: kept),
    "partial": (lambda a, b: [partial(a), partial(lambda f, x: f(x), b)], lambda kept: kept),
    "closure": (lambda a, b: [lambda x: a(x), lambda x: b(x)], lambda kept: kept),
    "weak": (lambda a, b: [weak(a), weak(b)], lambda kept: [each() for each in kept]),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(Kept, *both) for name, both in KEEPERS.items()},
    "itself": Itself,
    "wrapped forward": Wrapped,
}


@pytest.mark.parametrize("how", ["stack", "loop"])
@pytest.mark.parametrize("name", MODELS)
def test_drawn_weights_reach_layers_by_every_reference(name: str, how: str) -> None:
    torch.manual_seed(0)
    model, plain = MODELS[name](), Plain()
    weights = drawn(plain)
    before = copy.deepcopy({key: value.clone() for key, value in model.state_dict().items()})
    expected = posterity.run(plain, weights, X, how="loop")
    torch.testing.assert_close(posterity.run(model, weights, X, how=how), expected)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", MODELS)
def test_a_replica_of_a_replica_leads_to_itself(name: str) -> None:
    model = MODELS[name]()
    first = replica(model)
    second = replica(first)
    torch.testing.assert_close(second(X), model(X))
    assert origin(second) is model
    assert len({id(model.fc), id(first.fc), id(second.fc)}) == 3


def test_lstm_and_tied_weights_are_swapped_in_a_replica() -> None:
    torch.manual_seed(0)

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(7, 3), nn.LSTM(3, 3, batch_first=True)
            self.head = nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.lstm(self.embed(ids))[0][:, -1])

    model, ids = Words(), torch.arange(6).view(2, 3)
    weights = drawn(model)
    found = posterity.run(model, weights, ids, how="loop")
    for k in range(4):
        twin = copy.deepcopy(model)
        twin.load_state_dict({name: value[k] for name, value in weights.items()}, strict=False)
        torch.testing.assert_close(found[k], twin(ids))


def test_hooks_of_the_user_run_and_keep_what_they_collect() -> None:
    class Recorder:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.calls = model, 0

        def __call__(self, module: nn.Module, args: Any, out: Tensor) -> None:
            self.calls += 1

    model, seen, count = Plain(), [], 0

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal count
        count += 1
        seen.append((module is model.fc, out))  # the enclosed model is the replica, too

    recorder = Recorder(model)
    model.fc.register_forward_hook(note)
    model.fc.register_forward_hook(recorder.__call__)
    model.out.register_forward_hook(recorder)
    posterity.run(model, drawn(model), X, how="loop")
    assert count == len(seen) == 4
    assert recorder.calls == 8
    assert all(same for same, _ in seen)
    assert len(model.fc._forward_hooks) == 2


def test_weight_hooks_and_parametrisations_run_in_the_replica() -> None:
    torch.manual_seed(0)
    normed, pruned = Plain(), Plain()
    nn.utils.parametrizations.weight_norm(normed.fc)
    prune.random_unstructured(pruned.fc, "weight", 0.5)
    for model in (normed, pruned, nn.utils.spectral_norm(nn.Linear(3, 4)).eval()):
        weights = drawn(model)
        stacked, looped = (posterity.run(model, weights, X, how=how) for how in ("stack", "loop"))
        torch.testing.assert_close(stacked, looped)
        assert not torch.equal(looped[0], looped[1])
        twin = copy.deepcopy(model) if model is normed else None
        if twin is not None:
            twin.load_state_dict({name: value[2] for name, value in weights.items()})
            torch.testing.assert_close(looped[2], twin(X))
    assert parametrize.is_parametrized(normed.fc)


def test_what_forward_sets_or_changes_stays_in_the_replica() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.calls, self.log = nn.Linear(3, 2), 0, []
            self.table, self.cache = torch.zeros(()), {"x": []}
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.log.append(x)
            self.cache["x"].append(x)
            self.table += 1
            self.count += 1
            self.last = self.fc(x)
            return self.last + self.table

    model = Remembers().eval()
    posterity.predict(model, posterity.BGD(model).posterior(), X, how="loop")
    assert (model.calls, model.log, model.cache, float(model.table)) == (0, [], {"x": []}, 0.0)
    assert float(model.count) == 0.0
    assert not hasattr(model, "last")
    posterity.run(model, {name: p[None] for name, p in model.named_parameters()}, X)
    assert float(model.count) == 1.0  # run() gives back buffers, as documented
    assert model.calls == 0


def test_custom_train_method_may_change_weights() -> None:
    class Merging(nn.Module):
        """Merges an adapter into its weight for evaluation."""

        def __init__(self) -> None:
            super().__init__()
            self.fc, self.adapter, self.merged = (
                nn.Linear(3, 3, bias=False),
                nn.Parameter(torch.eye(3)),
                False,
            )

        def train(self, mode: bool = True) -> Merging:
            super().train(mode)
            if self.merged == mode:
                self.fc.weight.data += self.adapter.data * (-1 if mode else 1)
                self.merged = not mode
            return self

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if self.merged else self.fc(x) + x @ self.adapter.T

    model = Merging()
    before = model.fc.weight.detach().clone()
    expected = model(X).detach()
    torch.testing.assert_close(posterity.predict(model, x=X).samples[0], expected)
    assert torch.equal(model.fc.weight, before)
    assert (model.merged, model.training) == (False, True)


def test_modes_of_modules_that_are_not_registered_stay() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.teacher = nn.Linear(3, 3), [nn.BatchNorm1d(3)]

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + self.teacher[0](x)

    model = Teacher()
    twin = evaluating(model)
    assert (twin.training, twin.fc.training, twin.teacher[0].training) == (False, False, True)
    twin(X)
    assert int(model.teacher[0].num_batches_tracked) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripts_are_run_in_a_replica() -> None:
    torch.manual_seed(0)
    script = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())))
    model = nn.Sequential(script, nn.Linear(4, 2))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    weights = drawn(model)
    twin = evaluating(model)
    assert next(twin[0].parameters()).data_ptr() == next(script.parameters()).data_ptr()
    found = posterity.predict(model, posterity.BGD(model, std_init=0.5).posterior(), X, how="loop").samples
    assert len(found.unique(dim=0)) == 10
    looped = posterity.run(model, weights, X, how="loop")
    assert looped.shape == (4, 5, 2)
    model.load_state_dict(state)
    torch.testing.assert_close(posterity.predict([script], x=X).samples[0], copy.deepcopy(script).eval()(X))
    assert all(module.training for module in model.modules())
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_compiled_part_is_run_as_it_was_written() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(torch.compile(nn.Linear(3, 4), backend="eager"), nn.ReLU(), nn.Linear(4, 2))
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    weights = drawn(model)
    assert "0._orig_mod.weight" in weights
    others = {name.replace("_orig_mod.", ""): value for name, value in weights.items()}
    for how in ("stack", "loop"):
        torch.testing.assert_close(
            posterity.run(model, weights, X, how=how), posterity.run(plain, others, X, how=how)
        )
    inside = nn.Linear(3, 2)
    inside.compile(backend="eager")
    torch.testing.assert_close(
        posterity.run(inside, drawn(inside), X)[0],
        X @ drawn(inside)["weight"][0].T + drawn(inside)["bias"][0],
    )
