"""Nets as files: what is read gives what was written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from posterity import DiagonalGaussian, Factorised, predict
from posterity.compress import Format, export, prune, shrink
from posterity_lab import nets


@pytest.fixture
def net() -> tuple[nn.Module, Factorised, Tensor]:
    torch.manual_seed(0)
    model = nets.build("lenet5", (1, 28, 28), 10).eval()
    posterior = Factorised(
        {name: DiagonalGaussian(p.detach() + 0.01, 0.05) for name, p in model.named_parameters()}
    )
    return model, posterior, torch.randn(3, 1, 28, 28)


def read(path: Path, format: Format, x: Tensor) -> list[Tensor]:
    """What another program gets from a file."""
    if format == "torch.export":
        found = torch.export.load(path).module()(x)
        return [found] if isinstance(found, Tensor) else list(found)
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(each) for each in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


@pytest.mark.parametrize("format", ["torch.export", "onnx"])
@pytest.mark.parametrize("smaller", [False, True])
def test_a_mean_net_gives_the_same_outputs_from_a_file(net, tmp_path, format, smaller) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    model, posterior, x = net
    if smaller:
        small = shrink(model, prune(posterior, 0.5, groups="outputs", spare="11.*"), x)
        model, posterior = small.module, small.posterior
    export(tmp_path / "net", model, posterior, x, format=format)
    assert [each.name for each in tmp_path.iterdir()] == ["net"]
    more = torch.randn(7, 1, 28, 28)
    want = predict(model, posterior, more, mode="mean").samples[0]
    (found,) = read(tmp_path / "net", format, more)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("format", ["torch.export", "onnx"])
def test_an_ensemble_gives_probabilities_and_mutual_information(net, tmp_path, format) -> None:
    if format == "onnx":
        pytest.importorskip("onnxscript")
    model, posterior, x = net
    export(tmp_path / "net", model, posterior, x[:1], format=format, samples=4, seed=3)
    probs, information = read(tmp_path / "net", format, x)
    want = predict(model, posterior, x, samples=4, seed=3)
    torch.testing.assert_close(probs, want.probs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(information, want.mutual_information, rtol=1e-3, atol=1e-5)
    assert float(information.min()) > 0


def test_safetensors_hold_the_means(net, tmp_path) -> None:
    model, posterior, x = net
    export(tmp_path / "net.safetensors", model, posterior, x, format="safetensors")
    found = load_file(tmp_path / "net.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], mean) for name, mean in posterior.mean().items())


def test_bad_calls_are_refused_and_write_nothing(net, tmp_path) -> None:
    model, posterior, x = net
    with pytest.raises(
        ValueError, match=r"format must be one of safetensors, torch\.export, onnx, not 'pickle'"
    ):
        export(tmp_path / "net", model, posterior, x, format="pickle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples=3 needs a posterior"):
        export(tmp_path / "net", model, None, x, samples=3)
    with pytest.raises(ValueError, match="the model does not take this example"):
        export(tmp_path / "net", model, posterior, x[..., :5])
    assert not list(tmp_path.iterdir())
