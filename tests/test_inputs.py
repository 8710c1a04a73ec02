"""Inputs of every form, and models that return more than one tensor, in all that takes them."""

from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import posterity
from posterity import BGD, Prediction, inputs, laplace, predict, run

X, Z = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 10)[:, None]
Y = torch.arange(10) % 3
linearised = partial(predict, linearise=True)


@dataclass
class Output:
    """As transformers has it."""

    logits: Tensor
    loss: Tensor | None = None


class Net(nn.Module):
    """Logits of ``first``, times the other inputs; in whatever form."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)
        self.form = form

    def forward(self, first: Tensor, second: Tensor | None = None, *, scale: Tensor | None = None) -> Any:
        out = self.layer(first)
        out = out if second is None else out * second
        return self.form(out if scale is None else out * scale)


def batched(*tensors: Tensor, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size)


def dicts() -> Iterable[dict[str, Tensor]]:
    return DataLoader([{"first": x, "scale": z, "labels": y} for x, z, y in zip(X, Z, Y, strict=True)], 4)


def reversed_array() -> np.ndarray:
    array = np.ascontiguousarray(X.numpy()[::-1])
    array.setflags(write=False)
    return array[::-1]


Pair = namedtuple("Pair", "first second")

# Inputs, what they are in a model's call, and, of a loader, how to pick them.
FORMS: dict[str, tuple[Callable[[], Any], dict[str, Tensor], dict[str, Any]]] = {
    "tensor": (lambda: X, {"first": X}, {}),
    "array": (lambda: X.numpy(), {"first": X}, {}),
    "array of doubles": (lambda: X.double().numpy(), {"first": X}, {}),
    "array, read-only and reversed": (reversed_array, {"first": X}, {}),
    "tuple": (lambda: (X, Z), {"first": X, "second": Z}, {}),
    "list of arrays": (lambda: [X.numpy(), Z.numpy()], {"first": X, "second": Z}, {}),
    "named tuple": (lambda: Pair(X, Z), {"first": X, "second": Z}, {}),
    "dict": (lambda: {"first": X, "scale": Z}, {"first": X, "scale": Z}, {}),
    "dict with None": (lambda: {"first": X, "second": None, "scale": Z}, {"first": X, "scale": Z}, {}),
    "UserDict": (lambda: UserDict(first=X, scale=Z.numpy()), {"first": X, "scale": Z}, {}),
    "loader": (lambda: batched(X), {"first": X}, {}),
    "loader of tensors": (lambda: DataLoader(X, batch_size=4), {"first": X}, {}),
    "loader with targets": (lambda: batched(X, Y), {"first": X}, {}),
    "loader of two inputs and targets": (lambda: batched(X, Z, Y), {"first": X, "second": Z}, {}),
    "loader of dicts": (dicts, {"first": X, "scale": Z}, {}),
    "generator": (lambda: (X[i : i + 3] for i in range(0, 10, 3)), {"first": X}, {}),
    "index": (lambda: batched(Y, X, Y), {"first": X}, {"inputs": 1}),
    "key": (dicts, {"first": X}, {"inputs": "first"}),
    "function": (lambda: batched(X, Z), {"first": X, "second": Z}, {"inputs": tuple}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch_size", [3, 100])
def test_every_form_of_inputs_gives_the_same_prediction(form: str, batch_size: int) -> None:
    make, call, options = FORMS[form]
    net = Net()
    q = BGD(net, std_init=0.3).posterior()
    weights = q.sample(5, seed=2)
    each = [{name: value[k] for name, value in weights.items()} for k in range(5)]
    expected = torch.stack([torch.func.functional_call(net, own, (), call) for own in each]).detach()
    options = {"batch_size": batch_size, **options}
    for more in ({}, {"chunk": 2}, {"how": "loop"}):
        found = predict(net, q, make(), samples=5, seed=2, **more, **options)
        torch.testing.assert_close(found.samples, expected)
    linear = linearised(net, q, make(), samples=5, seed=2, **options)
    torch.testing.assert_close(linear.samples, expected)  # the model is linear in its weights
    mean = predict(net, q, make(), mode="mean", **options)
    torch.testing.assert_close(mean.samples[0], net(**call).detach())
    many = predict([net, Net()], x=make(), **options)
    torch.testing.assert_close(many.samples, net(**call).detach().expand(2, -1, -1))


def test_run_takes_the_arguments_of_the_model_or_a_loader() -> None:
    net = Net()
    weights = BGD(net, std_init=0.3).posterior().sample(5, seed=2)
    expected = run(net, weights, X, Z)
    for call in (
        lambda: run(net, weights, X.double().numpy(), Z.numpy()),
        lambda: run(net, weights, first=X, second=Z.numpy()),
        lambda: run(net, weights, batched(X, Z, Y)),
        lambda: run(net, weights, batched(X, Y, batch_size=10), second=Z),
        lambda: torch.cat([run(net, weights, *batch) for batch in batched(X, Z)], 1),
    ):
        torch.testing.assert_close(call(), expected)


DATA: dict[str, tuple[Callable[[], Any], dict[str, Tensor]]] = {
    "arrays": (lambda: (X.double().numpy(), Y.numpy()), {"first": X}),
    "several inputs": (lambda: ((X, Z), Y), {"first": X, "second": Z}),
    "dict and targets": (lambda: ({"first": X, "scale": Z}, Y), {"first": X, "scale": Z}),
    "dict with labels": (lambda: {"first": X, "scale": Z, "labels": Y}, {"first": X, "scale": Z}),
    "loader": (lambda: batched(X, Y), {"first": X}),
    "loader of several inputs": (lambda: batched(X, Z, Y), {"first": X, "second": Z}),
    "loader of dicts": (dicts, {"first": X, "scale": Z}),
    "list of batches": (lambda: [(X[:4], Y[:4]), (X[4:], Y[4:])], {"first": X}),
}


@pytest.mark.parametrize("data", DATA)
def test_a_fit_takes_every_form_of_data(data: str) -> None:
    make, call = DATA[data]

    class Bound(nn.Module):
        """The same model as a function of an example's number."""

        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, index: Tensor) -> Tensor:
            return self.net(**{name: value[index] for name, value in call.items()})

    found = laplace.fit(Net(), make(), batch_size=3, prior_precision=2.0)
    expected = laplace.fit(Bound(), (torch.arange(10), Y), prior_precision=2.0)
    assert found.num_data == 10
    assert found.log_evidence == pytest.approx(expected.log_evidence, rel=1e-5)
    stds = expected.posterior().std()
    for name, std in found.posterior().std().items():
        torch.testing.assert_close(std, stds[f"net.{name}"])
    best = laplace.fit(Net(), make(), prior_precision="validation", validation=make(), grid=(1.0, 2.0))
    assert {*best.prior_precision.values()} <= {1.0, 2.0}


RETURNS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "tensor": (lambda out: out, None),
    "output object": (lambda out: Output(out, out.sum()), None),
    "dict with logits": (lambda out: {"loss": out.sum(), "logits": out}, None),
    "attribute": (lambda out: Output(2 * out, out), "loss"),
    "key": (lambda out: {"logits": 2 * out, "scores": out}, "scores"),
    "index": (lambda out: (2 * out, out), 1),
    "function": (lambda out: [{"a": out}], lambda found: found[0]["a"]),
    "function of a tensor": (lambda out: torch.cat([out, 2 * out], 1), lambda found: found[:, :3]),
}


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("how", ["stack", "loop"])
def test_the_output_that_is_meant_is_found(returns: str, how: str) -> None:
    form, output = RETURNS[returns]
    plain, net = Net(), Net(form)
    q = BGD(plain, std_init=0.3).posterior()
    expected = predict(plain, q, X, samples=3, seed=1).samples
    for found in (
        predict(net, q, X, samples=3, seed=1, how=how, output=output).samples,
        run(net, q.sample(3, seed=1), X, how=how, output=output),
        linearised(net, q, X, samples=3, seed=1, output=output).samples,
    ):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(predict(net, x=X, output=output).samples[0], plain(X).detach())
    a, b = (
        laplace.fit(each, (X, Y), output=pick, prior_precision=1.0)
        for each, pick in ((plain, None), (net, output))
    )
    assert a.log_evidence == pytest.approx(b.log_evidence, rel=1e-6)
    laplace.fit(
        net, (X, Y), output=output, prior_precision="validation", validation=(X, Y), grid=(1.0,), samples=2
    )


def test_an_output_that_is_no_tensor_is_refused() -> None:
    q = BGD(Net()).posterior()
    for form, output, kind in (
        (lambda out: (out, out), None, "tuple"),
        (lambda out: {"scores": out}, None, "dict"),
        (lambda out: Output(out), "loss", "NoneType"),
    ):
        with pytest.raises(TypeError, match=f"must return one tensor, not {kind}: pick one by output="):
            predict(Net(form), q, X, output=output)


class Examples(Dataset[Tensor]):
    def __getitem__(self, index: int) -> Tensor:
        return X[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(X)


def test_inputs_that_cannot_be_used_are_refused() -> None:
    net = Net()
    q = BGD(net).posterior()
    lengths = r"all inputs need the same number of examples on axis 0, not the shapes \[\(10, 4\), "
    for call in (predict, linearised):
        for wrong, error, message in (
            ((X, Z[:9]), ValueError, lengths + r"\(9, 1\)\]"),
            ({"first": X, "scale": torch.tensor(2.0)}, ValueError, lengths + r"\(\)\]"),
            (torch.tensor(2.0), ValueError, "the same number of examples on axis 0"),
            ({"first": X[:0]}, ValueError, "there are no examples"),
            ([[1.0, 2.0], [3.0, 4.0]], TypeError, "must hold tensors or arrays, which a list does not"),
            ("text", TypeError, "must hold tensors or arrays, which a str does not"),
            (3, TypeError, "must hold tensors or arrays, which a int does not"),
            (Examples(), TypeError, "a Dataset gives single examples: pass DataLoader"),
            (Stream(), TypeError, "a Dataset gives single examples: pass DataLoader"),
        ):
            with pytest.raises(error, match=message):
                call(net, q, wrong)
        with pytest.raises(TypeError, match="inputs= picks from the batches of a loader, and x is a Tensor"):
            call(net, q, X, inputs=0)
        for batch, message in (((X, Z[:9], Y), lengths), ((X[:0], Y[:0]), "there are no examples")):
            with pytest.raises(ValueError, match=message):
                call(net, q, iter([(X, Z, Y), batch]))
    with pytest.raises(ValueError, match="10 inputs and 9 targets"):
        laplace.fit(net, ({"first": X}, Y[:9]))
    assert net.training


def test_outputs_that_lose_the_batch_are_refused() -> None:
    net, pooled = Net(), Net(lambda out: out.mean(0))
    q = BGD(net).posterior()
    for call in (predict, linearised):
        with pytest.raises(
            ValueError, match=r"outputs \[3\] for a batch of 4 inputs: .* pass a single input x as x\[None\]"
        ):
            call(net, q, X[0])
        with pytest.raises(ValueError, match=r"outputs \[3\] for a batch of 10 inputs"):
            call(pooled, q, X)


def test_outputs_may_have_several_rows_per_input() -> None:
    net = Net(lambda out: out.repeat_interleave(2, 0))
    q = BGD(net).posterior()
    for call in (predict, linearised):
        assert call(net, q, X, samples=3).samples.shape == (3, 20, 3)


def test_a_loader_at_its_end_is_refused() -> None:
    net = Net()
    q = BGD(net).posterior()
    for call in (
        lambda: predict(net, q, iter([])),
        lambda: linearised(net, q, iter([])),
        lambda: run(net, q.sample(2), iter([])),
    ):
        with pytest.raises(ValueError, match="the loader gave no batch: pass one that is not at its end"):
            call()


def test_a_pick_that_is_not_there_is_refused() -> None:
    net = Net(lambda out: {"scores": out})
    q = BGD(net).posterior()
    with pytest.raises(ValueError, match="there is no 'logit' to pick from a dict with 'scores'"):
        predict(net, q, X, output="logit")
    with pytest.raises(ValueError, match="there is no 2 to pick from a tuple"):
        predict(net, q, iter([(X, Y)]), inputs=2)


def test_a_fallback_needs_one_tensor() -> None:
    class Unreported(Net):
        def forward(self, first: Tensor, second: Tensor | None = None, *, scale: Tensor | None = None) -> Any:
            return (first + second) @ self.layer.weight.t()

    with pytest.raises(TypeError, match="fallback='vmap' supports a single input tensor"):
        laplace.fit(Unreported(), ((X, X), Y), fallback="vmap")


def test_tensors_keep_their_type_and_arrays_of_floats_take_the_models() -> None:
    net = Net().bfloat16()
    tree = {"x": X.double(), "y": [Y.numpy(), X.double().numpy()], "z": "text"}
    found = inputs.moved(tree, net)
    assert found["x"].dtype == torch.float64
    assert [each.dtype for each in found["y"]] == [torch.int64, torch.bfloat16]
    assert found["z"] == "text"
    assert inputs.moved(X.double().numpy(), nn.ReLU()).dtype == torch.float64


def test_tensors_of_inference_mode_can_be_learned_from() -> None:
    with torch.inference_mode():
        x, y = X.clone(), Y.clone()
    model = posterity.variational(Net())
    model.outputs(x, samples=2).sum().backward()
    assert model.posterior.block("layer.weight").loc.grad is not None
    expected = laplace.fit(Net(), (X, Y), prior_precision=1.0).log_evidence
    assert laplace.fit(Net(), (x, y), prior_precision=1.0).log_evidence == expected
    net = Net()
    train_step = posterity.compile_step(
        net, lambda m, batch: nn.functional.cross_entropy(m(batch["x"]), batch["y"]), BGD(net)
    )
    assert torch.isfinite(train_step({"x": x, "y": y}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_inputs_go_to_the_device_of_the_model() -> None:
    net = Net().cuda()
    q = BGD(net).posterior()
    for make, _, options in FORMS.values():
        assert predict(net, q, make(), **options).samples.is_cuda
        assert linearised(net, q, make(), **options).samples.is_cuda
    assert run(net, q.sample(2), X.numpy()).is_cuda
    for make, _ in DATA.values():
        assert laplace.fit(net, make()).posterior().std()["layer.weight"].is_cuda


def test_dropout_takes_every_form_too() -> None:
    class Dropping(Net):
        def __init__(self) -> None:
            super().__init__(lambda out: Output(self.drop(out)))
            self.drop = nn.Dropout(0.5)

    net = Dropping()
    p = predict(net, posterity.MCDropout(), {"first": X, "scale": Z.numpy()}, samples=4)
    assert isinstance(p, Prediction)
    assert p.samples.shape == (4, 10, 3)
    assert len(p.samples.unique(dim=0)) == 4
    batches = predict(net, posterity.MCDropout(), batched(X, Z, Y), samples=4, chunk=3).samples
    again = predict(net, posterity.MCDropout(), (X, Z), samples=4, batch_size=4).samples
    assert torch.equal(batches, again)
