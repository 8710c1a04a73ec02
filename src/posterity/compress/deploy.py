"""A net as a file for other programs: its means, or sampled networks with their uncertainty."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.func import functional_call

from posterity.arguments import MODULE, PATH, TEXT, WHOLE, described, takes
from posterity.compress.rounding import Quantised
from posterity.compress.trace import at_means, exported
from posterity.disk import replacing, write_tensors
from posterity.inputs import tensor_of
from posterity.posterior import Factorised
from posterity.prediction import Prediction

Format: TypeAlias = Literal["safetensors", "torch.export", "onnx"]
FORMATS: tuple[Format, ...] = get_args(Format)


@takes(
    path=PATH,
    model=MODULE,
    format=TEXT,
    samples=WHOLE,
    seed=WHOLE,
)
def export(
    path: str | os.PathLike[str],
    model: nn.Module,
    posterior: Factorised | Quantised | None,
    example: Any,
    *,
    format: Format = "torch.export",
    samples: int | None = None,
    seed: int = 0,
) -> None:
    """Write a net to a file: at its means, or as an ensemble of sampled networks.

    An ensemble is one file with two outputs: the probabilities ``[B, C]``, averaged over networks, and the
    mutual information ``[B]`` in nats, by how much the networks disagree. Batches may have any size.

    Args:
        path: The file; it is written completely or not at all.
        model: Any module that ``torch.export`` supports, such as the module of
            :func:`~posterity.compress.shrink`.
        posterior: The posterior of its weights; None for the model's own weights. With a result of
            :func:`~posterity.compress.quantise`, the file holds matrices and kernels as integers of 8 bits,
            or 16 if needed, times a step, which is ``NAME.step`` in a safetensors file.
        example: The model's input, or a tuple of several; two examples are enough. Files contain zeros of
            that shape.
        format: ``"torch.export"``, for ``torch.export.load``; ``"onnx"`` (needs the extra
            ``export``); ``"safetensors"``, the parameters and buffers at the means, without the graph.
        samples: Number of networks in an ensemble; by default the file has the net at the means, with the
            model's output.
        seed: Seed of the networks' weights.

    Example:
        >>> import tempfile
        >>> from posterity import DiagonalGaussian
        >>> net, x = nn.Linear(3, 2), torch.randn(4, 3)
        >>> q = Factorised({"weight": DiagonalGaussian(net.weight.detach(), 0.1)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export(f"{folder}/net.pt2", net, q, x, samples=5)
        ...     probs, information = torch.export.load(f"{folder}/net.pt2").module()(x)
        >>> probs.shape, information.shape
        (torch.Size([4, 2]), torch.Size([4]))
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    if not isinstance(posterior, Factorised | Quantised | None):
        raise TypeError(f"export() takes a posterior or a result of quantise(), not {described(posterior)}")
    if samples is not None and isinstance(posterior, Quantised):
        raise ValueError(f"samples={samples} networks are not rounded: pass the posterior, not quantise()'s")
    if samples is not None and (samples < 1 or posterior is None or format == "safetensors"):
        raise ValueError(
            f"samples={samples} needs a posterior, at least one network, and a format with a graph: to keep "
            "the posterior itself, call posterior.save()"
        )
    args = example if isinstance(example, tuple) else (example,)
    net = at_means(model, posterior.posterior if isinstance(posterior, Quantised) else posterior)
    state = net.state_dict()
    if isinstance(posterior, Quantised):
        net = _Packed(net, posterior).eval()
        state = {**state, **net.packed()}
    elif samples is not None and posterior is not None:
        net = _Ensemble(net, posterior.sample(samples, seed=seed)).eval()
    program = exported(net, args, {})
    with replacing(Path(path)) as unfinished:
        if format == "safetensors":
            write_tensors(unfinished, state, {"format": "pt"})
        elif format == "onnx":
            _write_onnx(program, unfinished)
        else:
            with unfinished.open("wb") as file:
                torch.export.save(program, file)


def _write_onnx(program: ExportedProgram, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401 (torch.onnx needs it)
    except ImportError:
        raise ImportError("ONNX files need the extra export: pip install 'posterity[export]'") from None
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # messages about torchvision, which is not needed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # from torch, about the conversion
            torch.onnx.export(program, (), str(path), external_data=False, dynamo=True, verbose=False)
    finally:
        log.setLevel(level)


def _hollow(model: nn.Module, names: Collection[str]) -> nn.Module:
    """The model with empty tensors for weights that each call passes in, so that files do not hold them."""
    empty = {id(model.get_parameter(name)): nn.Parameter(torch.empty(0)) for name in names}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) in empty:
                setattr(module, name, empty[id(p)])
    return model


def _times(whole: Tensor, step: Tensor) -> Tensor:
    """The weights; half precision cannot hold all 16-bit integers, so the product uses single precision."""
    wide = torch.promote_types(step.dtype, torch.float32)
    product = whole.to(wide) * float(step)
    return product if wide is step.dtype else product.to(step.dtype)


@final
class _Packed(nn.Module):
    """A net whose weights are integers times steps."""

    def __init__(self, model: nn.Module, found: Quantised) -> None:
        super().__init__()
        self._steps: dict[str, Tensor] = {}
        for name, mean in found.posterior.mean().items():
            whole = found.whole(name) if mean.dim() > 1 else None  # vectors would save few bytes
            if whole is not None:
                self.register_buffer(f"whole{len(self._steps)}", whole)
                self._steps[name] = mean.detach().new_tensor(found.steps[name])
        self._model = _hollow(model, self._steps)

    def packed(self) -> dict[str, Tensor]:
        """The integers and steps, for a file without a graph."""
        steps = {f"{name}.step": step for name, step in self._steps.items()}
        return steps | dict(zip(self._steps, self.buffers(recurse=False), strict=True))

    def forward(self, *args: Any) -> Any:
        """The net's outputs."""
        pairs = zip(self._steps.items(), self.buffers(recurse=False), strict=True)
        weights = {name: _times(whole, step) for (name, step), whole in pairs}
        return functional_call(self._model, weights, args)


@final
class _Ensemble(nn.Module):
    """Several networks as one."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._model, self._names = _hollow(model, weights), list(weights)
        for number, value in enumerate(weights.values()):
            self.register_parameter(f"weights{number}", nn.Parameter(value.detach()))

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Averaged probabilities, and mutual information."""
        drawn = [self.get_parameter(f"weights{number}") for number in range(len(self._names))]
        networks = (dict(zip(self._names, each, strict=True)) for each in zip(*drawn, strict=True))
        outputs = [tensor_of(functional_call(self._model, network, args)) for network in networks]
        found = Prediction(torch.stack(outputs))
        return found.probs, found.mutual_information
