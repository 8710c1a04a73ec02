"""torch.distributed.checkpoint asks an optimiser for its state before there is any."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from distributed.runs import RULES, batches, loss_of, model
from posterity import VariationalOptimizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*single process")


def trained(net: nn.Module, opt: VariationalOptimizer, start: int, stop: int) -> None:
    for x, y in list(batches())[start:stop]:
        opt.zero_grad()
        with opt.sampled_params():
            loss_of(net, x, y).backward()
        opt.step()


@pytest.mark.parametrize("rule", RULES)
def test_asking_a_fresh_optimiser_changes_nothing(rule: str) -> None:
    plain, net = model(), model()
    first, opt = (RULES[rule](each, mc_samples=1, seed=7) for each in (plain, net))
    lr = [group["lr"] for group in opt.param_groups]
    state = get_optimizer_state_dict(net, opt)
    assert state["state"].keys() == dict(net.named_parameters()).keys()
    assert [group["lr"] for group in opt.param_groups] == lr
    assert all(p.grad is None for p in net.parameters())
    assert not any(group["steps"] for group in opt.param_groups)
    stds = first.posterior().std()
    assert all(torch.equal(std, stds[name]) for name, std in opt.posterior().std().items())
    trained(plain, first, 0, 4)
    trained(net, opt, 0, 4)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize("rule", ["bgd", "ivon", "ivon-seldom", "vogn", "kfac", "noisy-kfac"])
def test_run_resumes_from_its_files(tmp_path: Path, rule: str) -> None:
    settings = {"mc_samples": 1, "seed": 7} | ({"deterministic": "0.bias"} if rule == "ivon" else {})
    net, again = model(), model()
    opt, other = RULES[rule](net, **settings), RULES[rule](again, **{**settings, "seed": 1})
    trained(net, opt, 0, 2)
    weights, state = get_state_dict(net, opt)
    checkpoint.save({"model": weights, "opt": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(again, other)
    checkpoint.load({"model": weights, "opt": state}, checkpoint_id=tmp_path)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
    trained(net, opt, 2, 4)
    trained(again, other, 2, 4)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))


def test_a_loop_left_untouched_is_refused_as_before() -> None:
    net = model()
    opt = RULES["ivon"](net, mc_samples=1)
    x, y = next(batches())
    loss_of(net, x, y).backward()
    with pytest.raises(RuntimeError, match="sampled_params"):
        opt.step()
    opt.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="sampled_params"):
        opt.step()  # gradients that are zero, but a learning rate that is not
