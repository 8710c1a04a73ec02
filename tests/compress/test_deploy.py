"""Nets as files: what is read gives what was written."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from posterity import DiagonalGaussian, Factorised, predict
from posterity.compress import Format, export, prune, quantise, shrink
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
    four = 4 * 4 * sum(p.numel() for p in model.parameters())
    assert (tmp_path / "net").stat().st_size < four + 150_000  # without a fifth network
    torch.testing.assert_close(information, want.mutual_information, rtol=1e-3, atol=1e-5)
    assert float(information.min()) > 0


@pytest.mark.parametrize("format", ["torch.export", "onnx"])
def test_files_hold_neither_data_nor_paths(net, tmp_path, format) -> None:
    """torch.export keeps the example and, where that is a slice, everything that it is a slice of."""
    if format == "onnx":
        pytest.importorskip("onnxscript")
    model, posterior, _ = net
    data = torch.full((1000, 1, 28, 28), 0.123)
    export(tmp_path / "net", model, posterior, data[:2], format=format)
    found = (tmp_path / "net").read_bytes()
    assert data[0, 0, 0, :4].numpy().tobytes() not in found
    assert b"site-packages" not in found
    assert len(found) < 4 * sum(p.numel() for p in model.parameters()) + 40_000


def test_a_files_example_can_be_run(net, tmp_path) -> None:
    """Compilers of such files look at it."""
    model, posterior, x = net
    export(tmp_path / "net", model, posterior, x)
    program = torch.export.load(tmp_path / "net")
    args, kwargs = program.example_inputs
    assert program.module()(*args, **kwargs).shape == (3, 10)


@pytest.mark.parametrize("format", ["torch.export", "onnx"])
def test_a_rounded_net_is_a_file_of_whole_numbers(net, tmp_path, format) -> None:
    """A quarter of the bytes, and the outputs of the rounded means."""
    if format == "onnx":
        pytest.importorskip("onnxscript")
    model, posterior, x = net
    rounded = quantise(posterior)
    export(tmp_path / "float.pt2", model, rounded.posterior, x, format=format)
    export(tmp_path / "whole.pt2", model, rounded, x, format=format)
    want = predict(model, rounded.posterior, x, mode="mean").samples[0]
    (found,) = read(tmp_path / "whole.pt2", format, x)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    large, small = ((tmp_path / f"{name}.pt2").stat().st_size for name in ("float", "whole"))
    weights = sum(p.numel() for p in model.parameters())
    assert small < large - 3 * weights + 20_000
    assert all(each.is_floating_point() for each in model.state_dict().values())


def test_safetensors_hold_whole_numbers_and_steps(net, tmp_path) -> None:
    model, posterior, x = net
    rounded = quantise(posterior)
    export(tmp_path / "net.safetensors", model, rounded, x, format="safetensors")
    found = load_file(tmp_path / "net.safetensors")
    for name, mean in rounded.posterior.mean().items():
        assert found[name].dtype is (torch.int8 if mean.dim() > 1 else torch.float32)
        torch.testing.assert_close(found[name] * found.get(f"{name}.step", torch.ones(())), mean)


def test_whole_numbers_have_16_bits_where_8_are_too_few(tmp_path) -> None:
    model = nn.Linear(2, 3, bias=False)
    for furthest, dtype in ((127.0, torch.int8), (128.0, torch.int16), (4e4, torch.float32)):
        mean = torch.tensor([[furthest, -1.0], [0.0, 3.0], [2.0, -furthest]])
        rounded = quantise(Factorised({"weight": DiagonalGaussian(mean, 1.0)}))
        export(tmp_path / "net", model, rounded, torch.randn(2, 2), format="safetensors")
        found = load_file(tmp_path / "net")
        assert found["weight"].dtype is dtype
        assert torch.equal(found["weight"] * found.get("weight.step", torch.ones(())), mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_rounded_file_has_the_very_means(tmp_path, dtype) -> None:
    """To the bit: the step is a number of the weights' precision, and whole numbers lose nothing."""
    torch.manual_seed(0)
    model = nn.Linear(300, 20, bias=False).to(dtype)
    std = (1e-4 * (1.0 + torch.rand(20, 300))).to(dtype)
    rounded = quantise(Factorised({"weight": DiagonalGaussian(model.weight.detach(), std)}))
    assert rounded.whole("weight").dtype is torch.int16
    export(tmp_path / "net.pt2", model, rounded, torch.zeros(2, 300, dtype=dtype))
    found = torch.export.load(tmp_path / "net.pt2").module()(torch.eye(300, dtype=dtype)).t()
    assert torch.equal(found, rounded.posterior.mean()["weight"])


def test_tied_weights_are_in_a_file_under_all_names(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    q = Factorised({"0.weight": DiagonalGaussian(torch.randn(3, 3), 0.1)})
    export(tmp_path / "net.safetensors", model, q, torch.randn(2, 3), format="safetensors")
    found = load_file(tmp_path / "net.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert torch.equal(found["1.weight"], q.mean()["0.weight"])


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
    with pytest.raises(ValueError, match="samples=3 networks are not rounded: pass the posterior, not"):
        export(tmp_path / "net", model, quantise(posterior), x, samples=3)
    with pytest.raises(TypeError, match="takes a posterior or a result of quantise\\(\\), not 'q'"):
        export(tmp_path / "net", model, "q", x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model does not take this example"):
        export(tmp_path / "net", model, posterior, x[..., :5])
    assert not list(tmp_path.iterdir())
