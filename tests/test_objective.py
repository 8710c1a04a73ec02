"""The scalings of the KL."""

import gc
import io
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from posterity import DiagonalGaussian, Variational, blundell, cfg, elbo, mnf, variational, warmup
from posterity.objective import watched_by

NLL, KL = torch.tensor(0.3), torch.tensor(50.0)


def test_an_epoch_counts_the_divergence_once() -> None:
    batches, batch_size = 8, 25
    for factor in (1.0, blundell(batches)):
        total = sum(
            batch_size * (elbo(NLL, KL, num_data=200, factor=factor, step=step) - NLL)
            for step in range(batches)
        )
        torch.testing.assert_close(total, KL)


def test_blundells_weights_are_the_papers() -> None:
    m = 6
    for i in range(1, m + 1):
        pi = 2 ** (m - i) / (2**m - 1)
        # pi·KL / batch_size for a mean NLL, with batch_size = num_data / M; the second epoch starts again.
        for step in (i - 1, i - 1 + m):
            got = elbo(NLL, KL, num_data=60, factor=blundell(m), step=step) - NLL
            assert float(got) == pytest.approx(pi * 50 / 10, rel=1e-5)


def test_blundells_weights_do_not_overflow() -> None:
    assert blundell(5000)(0) == pytest.approx(2500)
    assert blundell(5000)(4999) == 0.0


def test_warm_up_and_constant_factors() -> None:
    assert [warmup(10, delay=5, start=0.1, end=0.5)(s) for s in (0, 5, 10, 15, 99)] == pytest.approx(
        [0.1, 0.1, 0.3, 0.5, 0.5]
    )
    assert float(elbo(NLL, KL, num_data=100, factor=0.1)) == pytest.approx(0.35)


def test_factor_function_needs_the_step() -> None:
    for factor in (blundell(10), warmup(10)):
        with pytest.raises(ValueError, match="factor is a function of the step: pass step="):
            elbo(NLL, KL, num_data=100, factor=factor)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_data must be at least 1, not 0"):
        elbo(NLL, KL, num_data=0)
    with pytest.raises(
        ValueError, match=r"nll must be one number, the mean of the batch, not of shape \[3\]"
    ):
        elbo(NLL.expand(3), KL, num_data=1)
    for stacked in (elbo(NLL.expand(3), KL.expand(3), num_data=100), elbo(NLL.reshape(1), KL, num_data=100)):
        assert stacked.tolist() == pytest.approx([0.8] * len(stacked))
    with pytest.raises(ValueError, match="num_batches must be at least 1"):
        blundell(0)
    with pytest.raises(ValueError, match="steps must be at least 1"):
        warmup(0)
    for given in ({"start": -1.0}, {"start": math.nan}, {"end": -0.5}, {"end": math.inf}):
        with pytest.raises(ValueError, match="start and end must be 0 or more, and finite, not"):
            warmup(10, **given)


class Listener:
    """Keeps what it is told of."""

    def __init__(self) -> None:
        self.heard: list[torch.Tensor] = []

    def follow(self, nll: torch.Tensor) -> None:
        self.heard.append(nll)


def test_elbo_passes_losses_with_gradients_to_the_watch() -> None:
    listener, nll = Listener(), NLL.clone().requires_grad_()
    divergence = watched_by(2.0 * KL.clone().requires_grad_(), listener)
    elbo(nll, divergence, num_data=10)
    assert listener.heard == [nll]
    elbo(NLL, divergence, num_data=10)
    elbo(nll.expand(3), watched_by(divergence.expand(3), listener), num_data=10)
    elbo(nll, watched_by(KL, listener), num_data=10)  # of a frozen posterior
    assert len(listener.heard) == 1


def test_saved_kl_is_only_a_number() -> None:
    value, file = variational(nn.Linear(4, 2)).kl(), io.BytesIO()
    assert not value.__dict__
    torch.save(value, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), value)


def test_a_kl_keeps_no_model_alive() -> None:
    model = variational(nn.Linear(4, 2))
    value, alive = model.kl(), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    elbo(torch.tensor(0.3, requires_grad=True), value, num_data=10).backward()


def test_a_model_that_keeps_its_kl_is_freed() -> None:
    model = variational(nn.Linear(4, 2))
    model.last, alive = model.kl(), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
def test_a_compiled_loss_takes_a_kl() -> None:
    nll, value = torch.tensor(0.3, requires_grad=True), variational(nn.Linear(4, 2)).kl()
    loss = torch.compile(elbo, backend="eager", fullgraph=True)
    assert torch.equal(loss(nll, value, num_data=10), elbo(nll, value, num_data=10))


def test_elbo_warns_about_the_inner_module_of_a_variational_model() -> None:
    net, x = nn.Linear(4, 2), torch.ones(3, 4)
    model = variational(net)
    with pytest.warns(UserWarning, match="never drawn, .*: call the model that variational.. returned"):
        elbo(net(x).square().mean(), model.kl(), num_data=10)
    model = variational(net)  # the tests take warnings for errors
    elbo(sum(std.square().sum() for std in model.posterior.std().values()), model.kl(), num_data=10)
    elbo(model(x).square().mean(), model.kl(), num_data=10).backward()


def steps_of(optimizer: torch.optim.Optimizer, model: Variational, steps: int) -> None:
    for _ in range(steps):
        loss = elbo(model(torch.ones(3, 4)).square().mean(), model.kl(), num_data=10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_loop_that_trains_only_means_warns_once() -> None:
    net = nn.Linear(4, 2)
    model = variational(net)
    optimizer = torch.optim.Adam(net.parameters())
    steps_of(optimizer, model, 3)
    with pytest.warns(
        UserWarning, match="stds have gradients that no optimiser uses: build the optimiser from"
    ):
        steps_of(optimizer, model, 1)
    steps_of(optimizer, model, 5)  # the tests take warnings for errors


@pytest.mark.parametrize("family", [DiagonalGaussian, cfg, mnf])
def test_loops_that_train_all_or_freeze_stds_get_no_warning(family: Any) -> None:
    model = variational(nn.Linear(4, 2), family=family)
    steps_of(torch.optim.Adam(model.parameters()), model, 8)
    net = nn.Linear(4, 2)
    model = variational(net, family=family)
    for p in {*model.parameters()} - {*net.parameters()}:
        p.requires_grad_(False)
    steps_of(torch.optim.Adam(net.parameters()), model, 8)
    model = variational(net, family=family)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(5):  # gradients add up, and nothing moves
        elbo(model(torch.ones(3, 4)).square().mean(), model.kl(), num_data=10).backward()
    optimizer.step()
