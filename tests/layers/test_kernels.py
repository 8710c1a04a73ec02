"""Layers that take kernels for their squares, with kernels of plain torch in place of Triton's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posterity.curvature import Squares
from posterity.layers import conv, linear, norm


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which kernels were called."""
    names: list[str] = []

    def conv2d_squares(x: Tensor, grad: Tensor, *sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
        names.append("conv")
        assert x.dim() == 4  # as they lie, without an axis of samples
        taps, stride, padding, dilation = sizes
        terms = [
            torch.nn.grad.conv2d_weight(
                one[None],
                (grad.shape[1], x.shape[1], *taps),
                own[None],
                stride=stride,
                padding=padding,
                dilation=dilation,
            )
            for one, own in zip(x, grad, strict=True)
        ]
        return torch.stack(terms).sum(0), torch.stack(terms).square().sum(0)

    def batch_norm_squares(x: Tensor, grad: Tensor, mean: Tensor, rstd: Tensor, axis: int) -> Tensor:
        names.append("batch norm")
        assert axis == 1
        normal = (x - mean[:, None, None]) * rstd[:, None, None]
        return torch.stack([normal * grad, grad]).sum((3, 4)).square()

    kernels = SimpleNamespace(
        multiplies=lambda x: True, conv2d_squares=conv2d_squares, batch_norm_squares=batch_norm_squares
    )
    for room in (conv, linear, norm):
        monkeypatch.setattr(room, "kernels", kernels)
    monkeypatch.setattr(norm, "_fuses", lambda x: x.dtype == torch.float32)
    return names


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 5, 2, bias=False),
        nn.BatchNorm2d(5),
        nn.Flatten(),
        nn.Linear(20, 3),
    )


def collected(model: nn.Module, sizes: list[int], **watched: Tensor) -> Squares:
    torch.manual_seed(1)
    with Squares(watched or model) as squares:
        for size in sizes:
            F.mse_loss(model(torch.randn(size, 3, 6, 6)), torch.randn(size, 3)).backward()
            assert not squares._late  # nothing is left of a pass
    return squares


def without_kernels(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, sizes: list[int], **watched: Tensor
) -> Squares:
    with monkeypatch.context() as patch:
        for room in (conv, linear, norm):
            patch.setattr(room, "kernels", None)
        return collected(model, sizes, **watched)


def assert_same(found: Squares, expected: Squares) -> None:
    assert found.sums.keys() == expected.sums.keys()
    assert found.examples == expected.examples
    for name, total in expected.sums.items():
        torch.testing.assert_close(found.sums[name], total, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("sizes", [[5], [5, 5], [5, 3, 5]])
def test_one_samples_tensors_go_to_kernels_as_they_are(
    sizes: list[int], taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = net(), net()
    found, expected = collected(model, sizes), without_kernels(monkeypatch, other, sizes)
    assert taken == ["batch norm", "conv", "batch norm", "conv"] * len(sizes)
    assert_same(found, expected)
    for mine, plain in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, plain.grad, rtol=1e-4, atol=1e-7)


def test_norms_of_which_only_one_parameter_is_watched(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    watched = {"1.weight": model[1].weight, "4.bias": model[4].bias}
    found = collected(model, [5], **watched)
    assert taken == ["batch norm"]  # a shift alone needs none
    assert_same(found, without_kernels(monkeypatch, model, [5], **watched))


def test_sums_of_ones_own_are_added_to(taken: list[str]) -> None:
    model, x = net(), torch.randn(5, 3, 6, 6)
    own = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    squares = Squares(model)
    squares.sums.update(own)
    with squares:
        model(x).square().mean().backward()
    assert all(squares.sums[name] is own[name] for name in own)
    expected = Squares(model)
    with expected:
        model(x).square().mean().backward()
    for name, total in expected.sums.items():
        torch.testing.assert_close(own[name] - 1, total, rtol=1e-3, atol=1e-6)


def test_a_pass_before_an_error_is_in_all_sums(taken: list[str]) -> None:
    model, x = net(), torch.randn(5, 3, 6, 6)
    squares = Squares(model)
    with pytest.raises(ZeroDivisionError), squares:
        model(x).square().mean().backward()
        raise ZeroDivisionError
    once = {name: total.clone() for name, total in squares.sums.items()}
    assert once.keys() == dict(model.named_parameters()).keys()
    with squares:
        model(x).square().mean().backward()
    for name, total in squares.sums.items():
        torch.testing.assert_close(total, 2 * once[name])
    squares.clear()
    assert not squares.sums


def test_a_norm_that_is_used_twice_is_exact(taken: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3))
    model = nn.Sequential(*model[:3], model[1], *model[3:])
    found = collected(model, [5])
    assert taken == ["conv"]
    assert_same(found, without_kernels(monkeypatch, model, [5]))


def test_means_inside_the_context_have_all_layers(taken: list[str]) -> None:
    model = net()
    with Squares(model) as squares:
        model(torch.randn(5, 3, 6, 6)).square().mean().backward()
        assert squares.mean(5).keys() == dict(model.named_parameters()).keys()


def test_passes_through_one_kept_graph_are_summed_as_they_come(taken: list[str]) -> None:
    model, x = net(), torch.randn(5, 3, 6, 6)
    with Squares(model) as squares:
        loss = model(x).square().mean()
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert not squares._late
        thrice = {name: total.clone() for name, total in squares.sums.items()}
        loss.backward()
    for name, total in squares.sums.items():
        torch.testing.assert_close(total, thrice[name] * (4 / 3), rtol=1e-4, atol=1e-9)


def test_sizes_may_be_any_sequence() -> None:
    class Sizes(list[int]):
        """As readers of configs have them."""

    x, weight = torch.randn(4, 2, 6, 6), nn.Parameter(torch.randn(3, 2, 3, 3))
    found = []
    for stride in (2, [2, 2], Sizes([2, 2])):
        with Squares({"weight": weight}) as squares:
            F.conv2d(x, weight, stride=stride).square().mean().backward()
        found.append(squares.sums["weight"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
