"""Addressed noise: any slice alone, any number of threads, domains and seeds of one's own."""

import copy
import io
import itertools
import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import posterity
from posterity import noise
from posterity.flat import CHUNK, Layout
from posterity.noise import Domain, Noise, address, fresh, new_seed, normal

ADDRESS = {"seed": 3, "step": 9, "block": "x"}
# Less than a chunk, whole chunks, one number more, rows longer than a chunk, rows across chunks.
SHAPES = [
    (),
    (1,),
    (5, 7, 9),
    (2 * CHUNK,),
    (CHUNK + 1,),
    (2, CHUNK + 100, 2),
    (300, 1000),
    (4, 70, 9, 30),
    (0, 4),
]


def cut(whole: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """That slice of every sample."""
    return whole[(slice(None), *(slice(o, o + n) for o, n in zip(offset, shape, strict=True)))]


def test_every_slice_of_a_small_block_equals_that_slice_of_the_whole() -> None:
    shape = (3, 4, 2)
    whole = normal(range(2), shape, **ADDRESS)
    axes = [[(o, n) for o in range(full + 1) for n in range(full - o + 1)] for full in shape]
    for places in itertools.product(*axes):
        offset, size = zip(*places, strict=True)
        part = normal(range(2), size, **ADDRESS, whole=shape, offset=offset)
        assert torch.equal(part, cut(whole, offset, size)), places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_slice_equals_that_slice_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = normal(range(1, 3), shape, **ADDRESS, dtype=dtype)
    rng = np.random.default_rng(0)
    for _ in range(20):
        offset = tuple(int(rng.integers(full + 1)) for full in shape)
        size = tuple(int(rng.integers(full - o + 1)) for full, o in zip(shape, offset, strict=True))
        part = normal(range(1, 3), size, **ADDRESS, dtype=dtype, whole=shape, offset=offset)
        assert torch.equal(part, cut(whole, offset, size)), (offset, size)


@pytest.mark.parametrize("first", [0, CHUNK - 1, CHUNK, CHUNK + 1, CHUNK + 4])
def test_a_slice_may_end_in_a_short_last_chunk(first: int) -> None:
    # normal_() of five numbers is not the start of normal_() of more.
    whole = normal(range(1), (CHUNK + 5,), **ADDRESS)
    for size in (1, CHUNK + 5 - first):
        part = normal(range(1), (size,), **ADDRESS, whole=(CHUNK + 5,), offset=(first,))
        assert torch.equal(part, whole[:, first : first + size])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_shards_together_are_the_whole(axis: int, count: int) -> None:
    shapes = [(40, 50, 60), (7, 8, 9)]  # seven do not divide all of them
    layout = Layout(["a", "b"], shapes)
    noise = Noise(range(3), layout, seed=1, step=2, weight=0.5)
    mean, std = torch.rand(2, layout.size)
    theta = layout.stacked(noise.perturb(mean, std), 3)
    grads = [torch.randn(3, *shape) for shape in shapes]
    sums, poison = torch.zeros(2, layout.size), torch.zeros(())
    noise.moments(dict(enumerate(grads)), sums, poison)
    found: list[list[list[torch.Tensor]]] = [[[], []] for _ in range(3)]
    for rank in range(count):
        places = [slice(rank * -(-s[axis] // count), (rank + 1) * -(-s[axis] // count)) for s in shapes]
        index = [(slice(None),) * axis + (place,) for place in places]

        def local(tensors: list[torch.Tensor], leading: int = 0, index: list = index) -> list[torch.Tensor]:
            return [t[(slice(None),) * leading + i] for t, i in zip(tensors, index, strict=True)]

        offsets = [
            [min(p.start, full) if a == axis else 0 for a, full in enumerate(s)]
            for p, s in zip(places, shapes, strict=True)
        ]
        shard = Layout(["a", "b"], [t.shape for t in local(layout.views(mean))], shapes, offsets)
        own = Noise(range(3), shard, seed=1, step=2, weight=0.5)
        means, stds = torch.zeros(2, shard.size)
        for flat, values in ((means, mean), (stds, std)):
            for view, value in zip(shard.views(flat), local(layout.views(values)), strict=True):
                view.copy_(value)
        its, its_sums = shard.stacked(own.perturb(means, stds), 3), torch.zeros(2, shard.size)
        own.moments(dict(enumerate(local(grads, 1))), its_sums, poison)
        for block in range(2):
            found[0][block].append(its[block])
            for i in range(2):
                found[1 + i][block].append(shard.views(its_sums[i])[block])
    for block in range(2):
        assert torch.equal(torch.cat(found[0][block], axis + 1), theta[block])
        for i in range(2):
            torch.testing.assert_close(torch.cat(found[1 + i][block], axis), layout.views(sums[i])[block])


def test_a_slice_draws_only_the_chunks_that_it_touches() -> None:
    def chunks(shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]) -> list[int]:
        return sorted(piece.chunk for _, piece in Layout(["a"], [shape], [whole], [offset]).pieces)

    rows = CHUNK // 64  # in a chunk
    whole = (10 * rows, 64)
    assert chunks(whole, whole, (0, 0)) == list(range(10))
    assert chunks((rows, 64), whole, (3 * rows, 0)) == [3]
    assert chunks((rows, 64), whole, (3 * rows + 1, 0)) == [3, 4]
    assert chunks((2, CHUNK), (2, 4 * CHUNK), (0, CHUNK)) == [1, 5]
    assert chunks((0, 64), whole, (rows, 0)) == []


@pytest.mark.parametrize(
    ("shape", "whole", "offset"),
    [((3,), (4,), (2,)), ((3,), (4,), (-1,)), ((3,), (4, 1), (0, 0)), ((2, 2), (4, 2), (1,))],
)
def test_a_slice_outside_of_its_block_is_refused(
    shape: tuple[int, ...], whole: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"a slice of shape .* is not in a block of shape"):
        normal(range(1), shape, **ADDRESS, whole=whole, offset=offset)


def test_every_part_of_an_address_changes_all_that_is_drawn() -> None:
    both = normal(range(2), (2 * CHUNK,), **ADDRESS)
    one = both[0, :CHUNK]
    others = {"sample": both[1, :CHUNK], "chunk": both[0, CHUNK:]}
    for change in ({"seed": 4}, {"step": 10}, {"block": "y"}, {"domain": Domain.SAMPLE}):
        others[str(change)] = normal(range(1), (CHUNK,), **{**ADDRESS, **change})[0]
    for what, other in others.items():
        # The mean of products of independent standard normals has a standard error of 1/√n.
        assert abs(float((one * other).mean())) < 5 * CHUNK**-0.5, what


def test_a_part_of_a_stack_equals_the_part_alone() -> None:
    for shape in ((), (3,), (5, 7), (40, 50)):
        whole = normal(range(6), shape, **ADDRESS)
        assert torch.equal(whole[2:5], normal(range(2, 5), shape, **ADDRESS))
        assert torch.equal(whole, normal(range(6), shape, **ADDRESS))


@pytest.mark.parametrize("inference", [False, True])
def test_threads_draw_what_one_would(inference: bool) -> None:
    # More than is worth threads, in more chunks than there are threads.
    layout = Layout(["a", "b", "c"], [(300, 1500), (1000,), (200, 100)])
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            with torch.inference_mode(inference):
                found.append(Noise(range(4), layout, seed=1, step=2).blocks)
    finally:
        torch.set_num_threads(threads)
    for one, several in zip(*found, strict=True):
        assert torch.equal(one, several)


def test_addresses_take_numpys_numbers() -> None:
    assert address(*np.arange(3), "w") == address(0, 1, 2, "w")
    assert torch.equal(
        normal(range(1), (3,), seed=np.int64(1), step=np.int64(2), block="w"),
        normal(range(1), (3,), seed=1, step=2, block="w"),
    )
    for seed in (0.5, 1.0):
        with pytest.raises(TypeError, match="interpreted as an integer"):
            address(seed, 0, 0, "w")  # type: ignore[arg-type]


# Domains.


def test_domains_have_different_noise() -> None:
    draws = [normal(range(1), (5,), **ADDRESS, domain=domain) for domain in Domain]
    for one, other in itertools.combinations(draws, 2):
        assert not torch.isclose(one, other).any()
    keys = {address(0, 0, 0, "x", domain=domain) for domain in Domain}
    assert len(keys) == len(Domain)
    # Neither does a domain's number add to the seed's.
    assert address(1, 0, 0, "x", domain=Domain.TRAIN) != address(0, 0, 0, "x", domain=Domain.SAMPLE)


def test_prediction_does_not_repeat_the_networks_of_training() -> None:
    model = nn.Linear(4, 3)
    opt = posterity.BGD(model, std_init=0.1, mc_samples=2, seed=0)
    q = opt.posterior()
    trained = []
    for _ in range(2):
        with opt.sampled_params():
            trained.append(model.weight.detach().clone())
            model(torch.ones(2, 4)).sum().backward()
    for drawn in q.sample(2, seed=0)["weight"]:
        assert not any(torch.isclose(drawn, each).any() for each in trained)
    by_gradient = posterity.variational(nn.Linear(4, 3), seed=0)
    (first,) = by_gradient._draw(1)["weight"]
    assert not torch.isclose(first, by_gradient.posterior.sample(1, seed=0)["weight"][0]).any()


def test_seedless_draws_do_not_repeat_the_noise_of_training() -> None:
    torch.manual_seed(0)
    q = posterity.BGD(nn.Linear(4, 3), std_init=1.0).posterior()
    _, number = fresh()
    drawn = q.sample(1)["weight"][0] - q.mean()["weight"]
    training = normal(range(1), (3, 4), seed=0, step=number + 1, block="weight")[0]
    assert not torch.isclose(drawn, training, atol=1e-6).any()


def test_seedless_draws_differ_from_call_to_call() -> None:
    q = posterity.BGD(nn.Linear(4, 3), std_init=1.0).posterior()
    first, second = (q.sample(1)["weight"] for _ in range(2))
    assert not torch.isclose(first, second).any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the parent has threads
def test_forked_processes_have_seedless_draws_of_their_own() -> None:
    found = [fresh()]

    def child(depth: int) -> list[tuple[int, int]]:
        """What a forked process, and one forked by it, get."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                draws = [fresh(), fresh(), *(child(depth - 1) if depth else [])]
                os.write(write, repr(draws).encode())
            finally:
                os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with os.fdopen(read) as pipe:
            return list(eval(pipe.read()))

    found += child(1)
    found += child(1)
    found += [fresh(), fresh()]
    assert len(found) == 3 + 2 * 4
    assert len(set(found)) == len(found)


# Seeds.


def trained(make, steps: int = 2):  # type: ignore[no-untyped-def]
    """A model, trained for some steps by an optimiser or a ``Variational`` without a seed."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    learner = make(model)
    learn(model, learner, steps)
    return model, learner


def learn(model: nn.Module, learner, steps: int) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.linspace(-1, 1, 24).view(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    for _ in range(steps):
        if isinstance(learner, posterity.Variational):
            loss = F.cross_entropy(learner(x), y)
            for p, grad in zip(
                learner.parameters(), torch.autograd.grad(loss, list(learner.parameters())), strict=True
            ):
                p.data -= 0.1 * grad
        else:
            learner.step(lambda: F.cross_entropy(model(x), y), batch_size=6)


MAKERS = {
    "BGD": lambda model: posterity.BGD(model, std_init=0.1, mc_samples=2),
    "IVON": lambda model: posterity.IVON(model, num_data=6, mc_samples=2),
    "VOGN": lambda model: posterity.VOGN(model, num_data=6, mc_samples=2),
    "NoisyKFAC": lambda model: posterity.NoisyKFAC(model, num_data=6, mc_samples=2),
    "Variational": lambda model: posterity.variational(model, std_init=0.1),
}
learners = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def seed_of(learner) -> int:  # type: ignore[no-untyped-def]
    if isinstance(learner, posterity.Variational):
        return learner.seed
    (seed,) = {group["seed"] for group in learner.param_groups}  # one for all groups
    return int(seed)


@learners
def test_two_built_without_a_seed_do_not_share_noise(make) -> None:  # type: ignore[no-untyped-def]
    model = nn.Linear(4, 3)
    assert seed_of(make(model)) != seed_of(make(copy.deepcopy(model)))


@learners
def test_manual_seed_governs_those_built_without_a_seed(make) -> None:  # type: ignore[no-untyped-def]
    (first, _), (again, _) = (trained(make) for _ in range(2))
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


@learners
def test_building_draws_one_number_and_training_none(make) -> None:  # type: ignore[no-untyped-def]
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    torch.manual_seed(7)
    new_seed()
    expected = torch.get_rng_state()
    torch.manual_seed(7)
    learner = make(model)
    assert torch.equal(torch.get_rng_state(), expected)
    learn(model, learner, 2)
    assert torch.equal(torch.get_rng_state(), expected)


@learners
def test_a_run_without_a_seed_resumes_bit_for_bit(make) -> None:  # type: ignore[no-untyped-def]
    model, learner = trained(make)
    file = io.BytesIO()
    torch.save((model.state_dict(), learner.state_dict()), file)
    learn(model, learner, 2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = copy.deepcopy(model)
    resumed = make(other)
    assert seed_of(resumed) != seed_of(learner)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert seed_of(resumed) == seed_of(learner)
    learn(other, resumed, 2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_groups_share_one_seed() -> None:
    model = nn.Linear(4, 3)
    opt = posterity.BGD([{"params": [pair]} for pair in model.named_parameters()])
    opt.add_param_group({"params": [("other", nn.Parameter(torch.zeros(2)))]})
    assert len(opt.param_groups) == 3
    assert isinstance(seed_of(opt), int)


def test_new_seeds_follow_manual_seed() -> None:
    torch.manual_seed(1)
    first = [new_seed() for _ in range(3)]
    assert len(set(first)) == 3
    torch.manual_seed(1)
    with torch.device("meta"):  # where others build their models
        assert [new_seed() for _ in range(3)] == first


def test_graph_keeps_address_tables_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinned:
        def to(self, device: torch.device, non_blocking: bool) -> object:
            return object()

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch, "tensor", lambda *_, **how: Pinned() if how["pin_memory"] else None)
    held: list[torch.Tensor] = []
    with noise.read_by_replays(held):
        first = noise.addresses((1, 2), torch.device("cuda"))
    second = noise.addresses((1, 2), torch.device("cuda"))
    assert first is not second  # one graph's replays do not write what another reads
    assert [type(each) for each in held] == [Pinned]
    assert noise._read_by_others.pop() is not held[0]
