"""Predictive samples and what is derived from them."""

import math

import pytest
import torch
from torch import nn

import posterity
from posterity import Prediction


def make() -> tuple[nn.Module, posterity.Factorised, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3))
    return model, posterity.BGD(model, std_init=0.5).posterior(), torch.randn(10, 4)


def test_modes_agree_with_their_definitions() -> None:
    model, q, x = make()
    model.eval()
    logits = torch.stack(
        [
            torch.func.functional_call(model, {name: w[k] for name, w in q.sample(7, seed=3).items()}, x)
            for k in range(7)
        ]
    ).detach()
    probs = logits.softmax(-1)
    got = {
        mode: posterity.predict(model, q, x, samples=7, seed=3, mode=mode)
        for mode in ("average", "mean", "single", "vote")
    }
    torch.testing.assert_close(got["average"].probs, probs.mean(0))
    torch.testing.assert_close(got["single"].probs, probs)
    torch.testing.assert_close(got["mean"].probs, model(x).softmax(-1).detach())
    votes = torch.stack([(logits.argmax(-1) == c).float().mean(0) for c in range(3)], -1)
    torch.testing.assert_close(got["vote"].probs, votes)
    assert torch.equal(got["average"].label, probs.mean(0).argmax(-1))
    assert got["mean"].samples.shape == (1, 10, 3)


def test_uncertainties_of_known_cases() -> None:
    sure, unsure = [20.0, 0.0], [0.0, 0.0]
    # Two networks: agree and sure; agree that it is a coin toss; sure of opposite labels.
    samples = torch.tensor([[sure, unsure, [20.0, 0.0]], [sure, unsure, [0.0, 20.0]]])
    p = Prediction(samples)
    torch.testing.assert_close(p.entropy, torch.tensor([0.0, math.log(2), math.log(2)]), atol=1e-6, rtol=0)
    torch.testing.assert_close(p.expected_entropy, torch.tensor([0.0, math.log(2), 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(p.mutual_information, torch.tensor([0.0, 0.0, math.log(2)]), atol=1e-6, rtol=0)


def test_a_probability_of_zero_has_no_nan_entropy() -> None:
    p = Prediction(torch.tensor([[[1e4, 0.0]]]))
    assert p.entropy.item() == 0.0


def test_regression_has_mean_and_epistemic_variance() -> None:
    p = Prediction(torch.tensor([[[1.0], [2.0]], [[3.0], [2.0]]]))
    assert p.mean.flatten().tolist() == [2.0, 2.0]
    assert p.variance.flatten().tolist() == [2.0, 0.0]  # of two networks, S − 1 = 1
    assert Prediction(torch.ones(1, 3, 1)).variance.flatten().tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_statistics_of_outputs_are_at_least_single_precision(dtype: torch.dtype) -> None:
    samples = torch.randn(7, 50, 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = Prediction(samples.double())
    p = Prediction(samples)
    uncertainties = ("entropy", "expected_entropy", "mutual_information", "variance")
    for name in ("sample_probs", "probs", "vote", "mean", *uncertainties):
        got = getattr(p, name)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(got.double(), getattr(exact, name), rtol=1e-5, atol=1e-6)


def test_uncertainties_under_autocast_are_full_precision() -> None:
    model, q, x = make()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p = posterity.predict(model, q, x, samples=5, how="loop")
        inside = p.mutual_information
    assert p.samples.dtype == torch.bfloat16
    assert inside.dtype == torch.float32
    exact = Prediction(p.samples.double()).mutual_information
    torch.testing.assert_close(inside.double(), exact, rtol=1e-4, atol=1e-6)


def test_batch_and_chunk_size_do_not_matter_and_the_model_is_unchanged() -> None:
    model, q, x = make()
    model.train()
    model[2].eval()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    whole = posterity.predict(model, q, x, samples=5)
    for options in ({"batch_size": 3}, {"chunk": 2}, {"how": "loop"}, {"progress": True, "batch_size": 4}):
        torch.testing.assert_close(
            posterity.predict(model, q, x, samples=5, **options).samples, whole.samples
        )
    assert model.training
    assert model[3].training
    assert not model[2].training
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())


def test_networks_that_agree_have_no_mutual_information() -> None:
    one = torch.randn(1, 500, 10, generator=torch.Generator().manual_seed(0))
    assert (Prediction(one.expand(7, 500, 10)).mutual_information >= 0).all()


def test_predictions_may_be_trained_on() -> None:
    model, q, x = make()
    temperature = torch.ones((), requires_grad=True)
    (posterity.predict(model, q, x).samples * temperature).sum().backward()
    assert temperature.grad is not None


def test_a_variational_model_predicts_as_the_module_in_it() -> None:
    net = nn.Linear(4, 3)
    model = posterity.variational(net)
    x = torch.randn(5, 4)
    a, b = (posterity.predict(m, model.posterior, x).samples for m in (net, model))
    assert torch.equal(a, b)


def test_one_logit_is_no_class_probability() -> None:
    with pytest.raises(ValueError, match=r"outputs \[4, 1\] have 1 .* need two or more logits"):
        _ = Prediction(torch.zeros(3, 4, 1)).entropy
    with pytest.raises(ValueError, match=r"outputs \[4, 1\] have 1 .* need two or more logits"):
        _ = Prediction(torch.zeros(3, 4, 1)).vote


def test_the_mode_comes_back_after_an_error() -> None:
    model, q, _ = make()
    with pytest.raises(RuntimeError):
        posterity.predict(model, q, torch.randn(3, 5))
    assert model.training


def test_bad_calls_are_refused() -> None:
    model, q, x = make()
    with pytest.raises(ValueError, match="mode must be one of average, mean, single, vote, not 'median'"):
        posterity.predict(model, q, x, mode="median")
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        posterity.predict(model, q, x, samples=0)
    with pytest.raises(ValueError, match="there are no examples"):
        posterity.predict(model, q, x[:0])
    with pytest.raises(TypeError, match=r"there are no inputs: call .* predict\(models, x=x\)"):
        posterity.predict([model, model], x)
    with pytest.raises(TypeError, match="a Tensor cannot give networks: pass a posterior or MCDropout"):
        posterity.predict(model, x, x)
    with pytest.raises(TypeError, match="a type cannot give networks: pass a posterior or MCDropout"):
        posterity.predict(model, posterity.MCDropout, x)
    with pytest.raises(
        TypeError, match="linearise=True needs a posterior over weights, which a MCDropout is"
    ):
        posterity.predict(model, posterity.MCDropout(), x, linearise=True)
    with pytest.raises(TypeError, match="needs a posterior over weights, which an ensemble is not"):
        posterity.predict(model, x=x, linearise=True)
    with pytest.raises(ValueError, match="one model and its posterior, or a list of models alone, not 2"):
        posterity.predict([model, model], q, x)
    with pytest.raises(ValueError, match="the loader gave no batch"):
        posterity.predict(model, q, iter([]))
    with pytest.raises(ValueError, match=r"'0.weight' has shape \(6, 4\) in the posterior and \(6, 5\)"):
        posterity.predict(nn.Sequential(nn.Linear(5, 6)), q, x)


def test_model_error_shows_the_shape_of_its_inputs() -> None:
    model, q, x = make()
    for given in ({"posterior": q}, {}):
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            posterity.predict(model, x=x[:, 1:], **given)
        (note,) = caught.value.__notes__
        assert note.startswith(
            "Sequential ran on inputs of shape [10, 3]: pass predict() what the model takes"
        )


def test_a_posterior_of_other_names_says_which_module_to_pass() -> None:
    model, q, x = make()
    advice = r": pass the module itself, .* build the optimizer from it or its named_parameters\(\), where"
    bare = posterity.BGD(model.parameters()).posterior()
    with pytest.raises(
        ValueError, match="'param.0', but the model has no such parameter .its first is '0.weight'." + advice
    ):
        posterity.predict(model, bare, x)
    for other, first in ((nn.Sequential(model), "0.0.weight"), (model[0], "weight")):
        with pytest.raises(
            ValueError, match=f"'0.weight', but the model has no such parameter .its first is '{first}'"
        ):
            posterity.predict(other, q, x)
    with pytest.raises(ValueError, match=r"'0\.weight', but the model has no such parameter: pass"):
        posterity.predict(nn.ReLU(), q, x)


def test_networks_that_are_no_numbers_have_no_vote() -> None:
    logits = torch.randn(3, 2, 4)
    logits[1, 0] = math.nan
    p = Prediction(logits, "vote")
    assert p.probs[0].isnan().all()
    assert p.probs[1].sum() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="probs"):
        posterity.metrics.accuracy(p.probs, torch.tensor([0, 0]))


def test_what_a_model_remembers_of_a_prediction_is_gone() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scales = nn.Linear(4, 3), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.scales is None:
                self.scales = torch.linspace(0.5, 1, 3)
            return self.layer(x) * self.scales

    model, x = Remembers(), torch.randn(5, 4)
    opt = posterity.IVON(model, num_data=5)
    posterity.predict(model, opt.posterior(), x)
    assert model.scales is None
    opt.step(lambda: model(x).square().mean())


@pytest.mark.parametrize("how", ["stack", "loop"])
def test_no_more_networks_are_drawn_at_once_than_asked_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, q, x = make()
    whole = posterity.predict(model, q, x, samples=5, seed=1)
    drawn: list[range] = []
    sample = posterity.Factorised._sample
    monkeypatch.setattr(
        posterity.Factorised,
        "_sample",
        lambda self, rows, *where: drawn.append(rows) or sample(self, rows, *where),
    )
    found = posterity.predict(model, q, x, samples=5, seed=1, chunk=2, how=how, batch_size=3)
    assert drawn == [range(2), range(2, 4), range(4, 5)]
    torch.testing.assert_close(found.samples, whole.samples)


def test_classes_may_lie_on_another_axis() -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(2, 3, 1), torch.randn(4, 2, 5, 6)
    q = posterity.BGD(model, std_init=0.5).posterior()
    plain = posterity.predict(model, q, x, samples=7)
    for name in ("probs", "label", "entropy", "vote", "mutual_information"):
        with pytest.raises(
            ValueError, match=r"outputs \[4, 3, 5, 6\] may have classes on several axes: give"
        ):
            getattr(plain, name)
    flat = Prediction(plain.samples.movedim(2, -1).reshape(7, -1, 3))
    for class_dim in (1, -3):
        for mode in ("average", "vote", "single"):
            p = posterity.predict(model, q, x, samples=7, class_dim=class_dim, mode=mode)
            expected = Prediction(flat.samples, mode)
            assert p.probs.shape[-4:] == (4, 3, 5, 6)
            torch.testing.assert_close(p.probs.movedim(-3, -1).flatten(-4, -2), expected.probs)
            assert torch.equal(p.label.flatten(-3), expected.label)
        for name in ("entropy", "expected_entropy", "mutual_information"):
            assert getattr(p, name).shape == (4, 5, 6)
            torch.testing.assert_close(getattr(p, name).flatten(), getattr(flat, name))
    for wrong in (0, 4, -4):
        with pytest.raises(ValueError, match=f"class_dim={wrong} is not an axis of classes"):
            _ = Prediction(plain.samples, class_dim=wrong).probs
    last = Prediction(plain.samples, class_dim=-1)  # said, so meant
    torch.testing.assert_close(last.probs, plain.samples.softmax(-1).mean(0))


def test_one_logit_is_two_classes_if_told_so() -> None:
    logits = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    one = torch.sigmoid(logits)
    for samples in (logits, logits[..., None]):
        p = Prediction(samples, binary=True)
        torch.testing.assert_close(p.probs, torch.stack([1 - one.mean(0), one.mean(0)], -1))
        torch.testing.assert_close(
            Prediction(samples, "vote", binary=True).probs[:, 1], (one > 0.5).float().mean(0)
        )
        assert torch.equal(p.label, (one.mean(0) > 0.5).long())
        assert 0.0 <= posterity.metrics.ece(p.probs, p.label) <= 1.0
    masks = Prediction(logits.reshape(7, 1, 1, 5), class_dim=1, binary=True)
    torch.testing.assert_close(masks.probs[0, 1], one.mean(0))
    with pytest.raises(ValueError, match=r"outputs \[5, 3\] have 3 .* or one with binary=True"):
        _ = Prediction(torch.zeros(7, 5, 3), binary=True).probs
    with pytest.raises(ValueError, match=r"outputs \[5\] may have classes on several axes"):
        _ = Prediction(logits).probs
    model, x = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.randn(6, 4)
    q = posterity.BGD(model).posterior()
    assert posterity.predict(model, q, x, binary=True).probs.shape == (6, 2)
    assert posterity.predict(model, q, x, binary=True, linearise=True).probs.shape == (6, 2)


def ensemble() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Linear(4, 3),
        nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double().float(),
    ]


def test_a_list_of_models_is_a_deep_ensemble() -> None:
    nets, x = ensemble(), torch.randn(10, 4)
    p = posterity.predict(nets, x=x, batch_size=3, chunk=2)
    assert nets[1].training
    expected = torch.stack([net.eval()(x).detach() for net in nets])
    torch.testing.assert_close(p.samples, expected)
    torch.testing.assert_close(p.probs, expected.softmax(-1).mean(0))
    assert (p.mutual_information > 0).all()
    votes = posterity.predict(nets, x=x, mode="vote")
    torch.testing.assert_close(votes.probs, Prediction(expected).vote)
    with pytest.raises(ValueError, match="an ensemble has no mean weights: choose another mode"):
        posterity.predict(nets, x=x, mode="mean")
    alone = posterity.predict(nets[0], x=x)
    torch.testing.assert_close(alone.samples, expected[:1])
    torch.testing.assert_close(posterity.predict(nets[0], x=x, mode="mean").samples, expected[:1])
    wrapped = posterity.predict([posterity.variational(nets[0]), nets[1]], x=x)
    torch.testing.assert_close(wrapped.samples, expected[:2])


def test_other_sources_of_networks_need_two_methods() -> None:
    class Shrunk:
        """The model's weights times 1, 1/2, 1/3, …"""

        def check(self, model: nn.Module) -> None:
            assert isinstance(model, nn.Linear)

        def networks(self, model: nn.Module, samples: range | None, seed: int) -> object:
            factors = torch.tensor([1.0] if samples is None else [1.0 / (k + 1) for k in samples])
            weights = {name: factors.view(-1, *[1] * p.dim()) * p for name, p in model.named_parameters()}
            return lambda run, step: run(model, weights)

    model, x = nn.Linear(4, 3), torch.randn(10, 4)
    expected = torch.stack([model(x).detach() / (k + 1) for k in range(5)])
    torch.testing.assert_close(posterity.predict(model, Shrunk(), x, samples=5, chunk=2).samples, expected)


def test_prediction_leaves_buffers_and_random_numbers_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            torch.rand(1)
            return self.layer(x)

    model, x = Counting(), torch.randn(10, 4)
    q = posterity.BGD(model).posterior()
    before = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4, shuffle=True)
    with pytest.warns(UserWarning, match="the loader shuffles, and results come in the order of its batches"):
        posterity.predict(model, q, loader, how="loop")
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_wrapped_models_are_predicted_with_as_the_ones_inside() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    wrapper = nn.DataParallel(net)
    posterior = posterity.BGD(wrapper, seed=0).posterior()
    x = torch.randn(4, 3)
    found = [posterity.predict(each, posterior, x).samples for each in (wrapper, net)]
    assert torch.equal(*found)
