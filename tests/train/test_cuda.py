"""What only a GPU shows: devices mixed, the same numbers in loop and stack, mixed precision."""

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import posterity

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def make(name: str, model: nn.Module, mc_samples: int = 4) -> posterity.VariationalOptimizer:
    if name == "bgd":
        # A larger lr would make two roundings of fifty steps differ.
        return posterity.BGD(model, std_init=0.05, lr=1.0, mc_samples=mc_samples, batch_size=32, seed=0)
    return posterity.IVON(model, num_data=1000, mc_samples=mc_samples, seed=0)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 5)).cuda()


X, Y = torch.randn(32, 20), torch.randint(0, 5, (32,))


def saved_copy(
    name: str, model: nn.Module, opt: posterity.VariationalOptimizer
) -> tuple[nn.Module, posterity.VariationalOptimizer]:
    """Another model and optimiser that resume from what these two have saved."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net()
    resumed = make(name, other)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    return other, resumed


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_loop_and_stack_agree(name: str) -> None:
    x, y = X.cuda(), Y.cuda()
    results = []
    for stacked in (False, True):
        model = net()
        opt = make(name, model)
        step = posterity.compile_step(model, loss_fn, opt)
        for _ in range(50):
            step(x, y) if stacked else opt.step(lambda m=model: loss_fn(m, x, y))
        results.append({**model.state_dict(), **{f"std {n}": s for n, s in opt.posterior().std().items()}})
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=2e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_graph_equals_loop_with_ragged_batches(name: str) -> None:
    x, y = X.cuda(), Y.cuda()
    sizes = [32, 32, 7, 32, 32, 7, 7, 32]
    results = []
    for captured in (False, True):
        model = net()
        opt = make(name, model)
        opt.param_groups[0].pop("batch_size", None)  # each batch has its own
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)
        step = posterity.compile_step(model, loss_fn, opt)
        losses = []
        for i in range(48):
            n = sizes[i % len(sizes)]
            batch = (x[:n], y[:n])
            loss = (
                step(*batch) if captured else opt.step(lambda m=model, b=batch: loss_fn(m, *b), batch_size=n)
            )
            losses.append(float(loss))
            schedule.step()
        if captured:
            assert len(step._graphs) == 2
        results.append(
            {
                **model.state_dict(),
                **{f"std {n}": s for n, s in opt.posterior().std().items()},
                "losses": torch.tensor(losses),
                "step": opt.state[model[0].weight]["step"],
            }
        )
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=2e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_capturing_changes_nothing_and_resuming_is_exact(name: str) -> None:
    x, y = X.cuda(), Y.cuda()
    model = net()
    opt = make(name, model)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(3):
        step(x, y)
    other, resumed = saved_copy(name, model, opt)
    for _ in range(5):
        step(x, y)
    again = posterity.compile_step(other, loss_fn, resumed)
    for _ in range(5):
        again(x, y)
    for (key, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_graph_sees_loaded_state_and_posteriors(name: str) -> None:
    x, y = X.cuda(), Y.cuda()
    results = []
    for captured in (False, True):
        model = net()
        opt = make(name, model)
        step = posterity.compile_step(model, loss_fn, opt)

        def once(step=step, opt=opt, model=model, captured=captured) -> None:
            step(x, y) if captured else opt.step(lambda: loss_fn(model, x, y))

        for _ in range(3):
            once()
        state, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
        for _ in range(2):
            once()
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        for _ in range(3):
            once()
        opt.load_posterior(posterity.prune(opt.posterior(), 0.5))
        for _ in range(3):
            once()
        results.append({**model.state_dict(), **{f"std {n}": s for n, s in opt.posterior().std().items()}})
        assert int((model[0].weight == 0).sum()) > 100
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=2e-3, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_captured_step_follows_freezing_autocast_and_foreign_gradients(name: str) -> None:
    x, y = X.cuda(), Y.cuda()
    model = net()
    opt = make(name, model)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(3):
        step(x, y)
    model[0].requires_grad_(False)
    frozen, learning = model[0].weight.clone(), model[3].weight.clone()
    for _ in range(3):
        step(x, y)
    assert torch.equal(frozen, model[0].weight)
    assert not torch.equal(learning, model[3].weight)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(3):
            rough = step(x, y)
    assert len(step._graphs) == 2  # the first, which counts updates of what is frozen now, has gone
    torch.testing.assert_close(rough, step(x, y), rtol=0.1, atol=0.1)
    loss_fn(model, x, y).backward()
    with pytest.raises(RuntimeError, match="from outside"):
        step(x, y)
    opt.zero_grad()
    step(x, y)
    assert model[3].weight.grad is not None
    assert torch.isfinite(model[3].weight.grad).all()


def test_nan_in_a_captured_step_raises_and_changes_nothing() -> None:
    x, y = X.cuda(), Y.cuda()
    model = net()
    opt = make("bgd", model)
    step = posterity.compile_step(model, loss_fn, opt)
    for _ in range(3):
        step(x, y)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    bad = x.clone()
    bad[0, 0] = torch.nan
    for learn in (lambda: step(x, y), opt.posterior):
        step(bad, y)
        torch.cuda.synchronize()
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        with pytest.raises(FloatingPointError, match="not touched"):
            learn()
    step(x, y)
    assert not torch.equal(before["0.weight"], model[0].weight)
    assert torch.isfinite(model[0].weight).all()


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_nan_in_an_eager_step_is_raised_by_the_next_call(name: str) -> None:
    x, y = X.cuda(), Y.cuda()
    bad = x.clone()
    bad[0, 0] = torch.nan
    model, twin = net(), net()
    opt, other = make(name, model, 1), make(name, twin, 1)

    def by_context(x: Tensor, model: nn.Module = model, opt: posterity.VariationalOptimizer = opt) -> None:
        opt.zero_grad()
        with opt.sampled_params():
            loss_fn(model, x, y).backward()
        opt.step()

    by_context(x)
    by_context(x, twin, other)
    before = copy.deepcopy(opt.state_dict())
    ways = [by_context, lambda x: opt.step(lambda: loss_fn(model, x, y))]
    for way in ways:
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        for learn in (lambda: by_context(x), opt.posterior, opt.state_dict):
            way(bad)
            assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
            with pytest.raises(FloatingPointError, match="not touched"):
                learn()
        after = opt.state_dict()
        assert after["param_groups"][0]["steps"] == before["param_groups"][0]["steps"]
        for i, state in before["state"].items():
            assert all(torch.equal(value, after["state"][i][key]) for key, value in state.items())
    by_context(x)
    by_context(x, twin, other)
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=key)


def test_an_eager_step_does_not_wait_for_the_device() -> None:
    x, y = X.cuda(), Y.cuda()
    model = net()
    opt = make("ivon", model, 1)

    def step() -> None:
        opt.zero_grad()
        with opt.sampled_params():
            loss_fn(model, x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.step(lambda: loss_fn(model, x, y))

    for _ in range(3):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that torch does not find all that waits
        try:
            torch.cuda.set_sync_debug_mode("error")
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("samples", [1, 2])
def test_gradients_that_lie_apart_are_summed_as_those_end_to_end(samples: int) -> None:
    x, y = X.cuda(), Y.cuda()
    results = []
    for apart in (True, False):
        model = net()
        opt = make("ivon", model, samples)
        for _ in range(5):
            for _ in range(samples):
                with opt.sampled_params():
                    loss_fn(model, x, y).backward()
                    if not apart:  # as a transposed layer's are
                        for p in model.parameters():
                            if p.dim() == 2:
                                p.grad = p.grad.t().contiguous().t()
            opt.step()
        results.append({**model.state_dict(), **{f"std {n}": s for n, s in opt.posterior().std().items()}})
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_parameters_on_several_devices(name: str) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(20, 30), nn.Linear(30, 5).cuda()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(F.relu(self.a(x)).cuda())

    model = Split()
    opt = make(name, model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    opt.step(lambda: loss_fn(model, X, Y.cuda()))
    for n, p in model.named_parameters():
        assert p.device == before[n].device
        assert not torch.equal(p, before[n])
    q = opt.posterior()
    assert torch.isfinite(posterity.kl(q, posterity.IsotropicGaussian()))
    assert q.sample(2)["b.weight"].is_cuda
    kept = sum(int(leaf.keep.sum()) for leaf in posterity.prune(q, 0.5).blocks.values())
    assert kept == (20 * 30 + 30 + 150 + 5) - round(0.5 * 785)


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_bf16_autocast_keeps_full_precision_state_and_resume_is_exact(name: str) -> None:
    x, y = X.cuda(), Y.cuda()

    def train(model: nn.Module, opt: posterity.VariationalOptimizer, steps: int) -> None:
        for _ in range(steps):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                opt.step(lambda: loss_fn(model, x, y))

    torch.use_deterministic_algorithms(True, warn_only=True)
    model = net()
    opt = make(name, model)
    train(model, opt, 3)
    states = [opt.state[p].items() for p in model.parameters()]
    assert all(v.dtype == torch.float32 for state in states for key, v in state if key != "step")
    other, resumed = saved_copy(name, model, opt)
    train(model, opt, 3)
    train(other, resumed, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_saved_posterior_predicts_on_either_device(tmp_path) -> None:
    model = net()
    q = posterity.BGD(model).posterior()
    q.save(tmp_path / "q.safetensors")
    loaded = posterity.Factorised.load(tmp_path / "q.safetensors", model)
    assert loaded.mean()["0.weight"].device.type == "cpu"
    a = posterity.predict(model, q, X.cuda(), samples=3)
    b = posterity.predict(model, loaded.cuda(), X.cuda(), samples=3)
    assert torch.equal(a.samples, b.samples)


class ConvNet(nn.Module):
    """Convolutions of several kinds, BatchNorm, pooling, a residual, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 24, 3, stride=2, padding=1, bias=False)
        self.same = nn.Conv2d(24, 24, 3, padding=2, dilation=2)
        self.point = nn.Conv2d(16, 24, 1, stride=2)
        self.grouped = nn.Conv2d(24, 24, 3, padding="same", groups=3)
        self.head = nn.Linear(24, 5)
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(self.same(self.down(x)) + self.point(x))
        x = F.max_pool2d(self.grouped(x), 2)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("precision", ["highest", "high", "bfloat16"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
def test_stacked_layers_are_as_exact_as_the_loop(
    precision: str, layout: torch.memory_format, training: bool
) -> None:
    torch.manual_seed(0)
    model = ConvNet().cuda().to(memory_format=layout).train(training)
    x = torch.randn(16, 3, 12, 12, device="cuda").to(memory_format=layout)
    y = torch.randint(0, 5, (16,), device="cuda")
    q = posterity.BGD(model, std_init=0.05).posterior()

    def results(how: str, precision: str, dtype: torch.dtype) -> dict[str, Tensor]:
        net = copy.deepcopy(model).to(dtype)
        weights = {name: value.to(dtype).requires_grad_() for name, value in q.sample(4, seed=0).items()}
        torch.set_float32_matmul_precision("highest" if precision == "highest" else "high")
        torch.backends.cudnn.allow_tf32 = precision != "highest"
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            logits = posterity.run(net, weights, x.to(dtype), how=how)
        loss = sum(F.cross_entropy(each.to(dtype), y) for each in logits)
        grads = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
        found = {name: g for name, g in zip(weights, grads, strict=True) if g is not None}
        found |= {f"buffer {name}": value for name, value in net.named_buffers()}
        return {"logits": logits.detach(), **found}

    try:
        exact = results("loop", "highest", torch.float64)
        loop = results("loop", precision, torch.float32)
        stack = results("stack", precision, torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
    assert exact.keys() == loop.keys() == stack.keys()
    assert "unused" not in stack
    # In tf32, tensor cores cut what cuDNN rounds or, for few channels, multiplies in float32.
    worse, slack = (8, 3e-3) if precision == "high" else (2, 1e-5)
    for name, value in exact.items():
        scale = value.double().norm() + 1e-12
        theirs, ours = ((each[name].double() - value).norm() / scale for each in (loop, stack))
        assert ours <= worse * theirs + slack, (name, float(theirs), float(ours))


@pytest.mark.parametrize("name", ["bgd", "ivon"])
def test_a_conv_net_captured_equals_the_loop_over_fifty_steps(name: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(32, 3, 12, 12, device="cuda"), torch.randint(0, 5, (32,), device="cuda")
    results = []
    # The loop again on inputs that are a rounding error away says how far rounding carries such a training.
    for inputs, captured in ((x, False), (x, True), (x * (1 + 1e-6), False)):
        torch.manual_seed(1)
        model = ConvNet().cuda()
        opt = make(name, model)
        step = posterity.compile_step(model, loss_fn, opt, max_norm=1.0)
        for _ in range(50):
            if captured:
                step(inputs, y)
            else:
                for _ in range(4):
                    with opt.sampled_params():
                        loss_fn(model, inputs, y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step(batch_size=32)
        assert not captured or len(step._graphs) == 1
        results.append({**model.state_dict(), **{f"std {n}": s for n, s in opt.posterior().std().items()}})
    loop, graph, nearby = results
    for key, value in loop.items():
        rounding = (nearby[key].double() - value).norm() + 1e-3 * value.double().norm()
        assert (graph[key].double() - value).norm() <= 5 * rounding, key
    assert torch.equal(results[1]["unused"], torch.ones(4, device="cuda"))


def test_many_shapes_and_models_in_one_process_stay_fast() -> None:
    """A new shape costs a capture, and never a compilation: those are for the first model alone."""
    counts = []
    for width in (8, 12, 20, 33, 48, 64, 100, 128):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 5)).cuda()
        step = posterity.compile_step(model, loss_fn, make("bgd", model))
        for batch in (32, 17, 5):
            for _ in range(3):
                step(X[:batch].cuda(), Y[:batch].cuda())
        assert len(step._graphs) == 3
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[-1] == counts[1], counts


@pytest.mark.parametrize("rows", [64, 600])
def test_a_stack_of_large_products_is_the_loop(rows: int) -> None:
    model = net()
    posterior = make("bgd", model).posterior()
    x = torch.randn(rows, 20, generator=torch.Generator().manual_seed(1)).cuda()
    for how in ("stack", "loop"):
        assert posterity.predict(model, posterior, x, how=how).samples.shape == (10, rows, 5)
    stack, loop = (posterity.predict(model, posterior, x, how=how).samples for how in ("stack", "loop"))
    torch.testing.assert_close(stack, loop, rtol=2e-3, atol=2e-3)
