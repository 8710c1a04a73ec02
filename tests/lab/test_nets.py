import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from posterity_lab.nets import (
    alexnet,
    build,
    conv3fc3,
    conv4,
    initialise,
    lenet5,
    mlp,
    recipe,
    resnet18,
    vgg11,
)

NAMES = "mlp-400-400, lenet5, conv3fc3, conv4, alexnet, vgg11, resnet18"


def test_mlp_flattens_and_has_relu_between_its_layers():
    net = mlp(12, [5, 4], 3)
    assert [type(layer) for layer in net] == [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert [tuple(layer.weight.shape) for layer in net if isinstance(layer, nn.Linear)] == [
        (5, 12),
        (4, 5),
        (3, 4),
    ]
    assert net(torch.zeros(2, 3, 2, 2)).shape == (2, 3)


def test_an_mlp_may_drop_inputs_less_often_than_hidden_units():
    net = build("mlp-5-4-dropout", [12], 3)
    assert [layer.p for layer in net if isinstance(layer, nn.Dropout)] == [0.2, 0.5, 0.5]
    assert [type(layer) for layer in net][-2:] == [nn.Dropout, nn.Linear]  # no logit is dropped
    with pytest.raises(ValueError, match="there is no net 'mlp-dropout'"):
        build("mlp-dropout", [12], 3)


def test_mlp_refuses_an_empty_layer():
    with pytest.raises(ValueError, match=r"at least one unit, not \[4, 0, 2\]"):
        mlp(4, [0], 2)


@pytest.mark.parametrize(("channels", "size"), [(1, 28), (3, 32)])
def test_lenet5_has_the_published_sizes_at_28_and_32_pixels(channels, size):
    net = lenet5(channels, size, 10)
    shapes = [tuple(p.shape) for name, p in net.named_parameters() if name.endswith("weight")]
    assert shapes == [(6, channels, 5, 5), (16, 6, 5, 5), (120, 400), (84, 120), (10, 84)]
    assert net(torch.zeros(2, channels, size, size)).shape == (2, 10)


@pytest.mark.parametrize("size", [12, 20, 31, 40])
def test_lenet5_runs_at_other_sizes(size):
    assert lenet5(1, size, 10)(torch.zeros(2, 1, size, size)).shape == (2, 10)


@pytest.mark.parametrize("size", [1, 8, 11])
def test_lenet5_refuses_small_images(size):
    with pytest.raises(ValueError, match=f"at least 12x12 pixels, not {size}x{size}: use an mlp"):
        lenet5(1, size, 10)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_vgg11_has_the_published_convolutions_and_one_linear_layer(batch_norm):
    net = vgg11(3, 32, 10, batch_norm)
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    widths = [3, 64, 128, 256, 256, 512, 512, 512, 512]
    assert shapes == [(b, a, 3, 3) for a, b in pairwise(widths)] + [(10, 512)]
    weights = sum(math.prod(shape) for shape in shapes)
    assert weights == 9_222_848
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in net) == batch_norm
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert vgg11(1, 64, 5)(torch.zeros(2, 1, 64, 64)).shape == (2, 5)


def test_conv3fc3_has_three_convolutions_and_a_thousand_units_twice():
    net = conv3fc3(3, 32, 10)
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    convolutions = [(32, 3, 5, 5), (64, 32, 5, 5), (128, 64, 3, 3)]
    assert shapes == [*convolutions, (1000, 128 * 3 * 3), (1000, 1000), (10, 1000)]
    with pytest.raises(ValueError, match="at least 15x15 pixels, not 14x14"):
        conv3fc3(1, 14, 10)
    assert conv3fc3(1, 15, 4)(torch.zeros(2, 1, 15, 15)).shape == (2, 4)


def test_conv4_halves_the_image_twice_and_uses_dropout_only_in_training():
    net = conv4(3, 32, 60)
    assert sum(p.numel() for p in net.parameters()) == 2_194_012
    assert net[:10](torch.zeros(2, 3, 32, 32)).shape == (2, 64, 8, 8)
    x = torch.rand(2, 3, 32, 32)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))
    with pytest.raises(ValueError, match="at least 4x4 pixels, not 3x3"):
        conv4(1, 3, 10)


def test_vgg11_refuses_small_images():
    with pytest.raises(ValueError, match="at least 32x32 pixels, not 28x28: use lenet5"):
        vgg11(1, 28, 10)


def test_resnet18_has_the_published_size_and_halves_the_image_three_times():
    net = resnet18(3, 10)
    assert sum(p.numel() for p in net.parameters()) == 11_173_962
    before_pooling = net[:-3](torch.zeros(2, 3, 32, 32))
    assert before_pooling.shape == (2, 512, 4, 4)
    assert bool((before_pooling >= 0).all())


def test_alexnet_has_the_published_layers():
    net = alexnet(3, 32, 10)
    shapes = [tuple(p.shape) for p in net.parameters() if p.dim() > 1]
    kernels = [(64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3)]
    assert shapes == [(out, into, size, size) for out, into, size in kernels] + [(10, 256)]
    assert sum(p.numel() for p in net.parameters()) == 2_472_266
    assert net[0](torch.zeros(2, 3, 32, 32)).shape == (2, 64, 8, 8)
    assert alexnet(1, 29, 3)(torch.zeros(2, 1, 29, 29)).shape == (2, 3)
    with pytest.raises(ValueError, match="at least 29x29 pixels, not 28x28: use lenet5"):
        alexnet(1, 28, 10)


def test_the_stem_for_large_images_leaves_eight_by_eight_features():
    net = build("resnet18-imagenet", [3, 32, 32], 10)
    assert net[:4](torch.zeros(2, 3, 32, 32)).shape == (2, 64, 8, 8)
    assert net[:-3](torch.zeros(2, 3, 32, 32)).shape == (2, 512, 1, 1)


def test_without_batch_norm_convolutions_have_biases():
    net = build("resnet18-imagenet-nobn", [3, 32, 32], 10)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in net.modules())
    assert all(layer.bias is not None for layer in net.modules() if isinstance(layer, nn.Conv2d))
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "rate", "places"), [("lenet5", 0.1, 5), ("alexnet", 0.5, 5), ("resnet18-imagenet", 0.1, 17)]
)
def test_dropout_comes_before_every_relu(name, rate, places):
    plain, dropping = (build(each, [3, 32, 32], 10) for each in (name, f"{name}-dropout"))
    assert [key for key, _ in plain.named_parameters()] == [key for key, _ in dropping.named_parameters()]
    dropping.load_state_dict(plain.state_dict())
    layers = list(dropping.modules())
    drops = [at for at, layer in enumerate(layers) if isinstance(layer, nn.Dropout)]
    relus = [at for at, layer in enumerate(layers) if isinstance(layer, nn.ReLU)]
    assert [at + 1 for at in drops][: len(relus)] == relus
    assert len(drops) == places
    assert {layers[at].p for at in drops} == {rate}
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(dropping.eval()(x), plain.eval()(x))
    dropping.train()
    assert not torch.equal(dropping(x), dropping(x))


def test_a_residual_block_adds_its_input():
    block = resnet18(3, 10)[3].eval()
    for layer in block.body:
        if isinstance(layer, nn.Conv2d):
            nn.init.zeros_(layer.weight)
    x = torch.randn(2, 64, 4, 4)
    torch.testing.assert_close(block(x), x.relu())


@pytest.mark.parametrize("name", ["vgg11-bn", "resnet18"])
def test_initialise_reaches_every_layer_of_nested_nets(name):
    nets = [initialise(build(name, [3, 32, 32], 10), seed=2) for _ in range(2)]
    for (key, p), q in zip(nets[0].named_parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(p, q), key


@pytest.mark.parametrize(
    ("layer", "weight_std", "bias_std"),
    [
        (nn.Linear(600, 400), math.sqrt(2 / 1000), math.sqrt(2 / 401)),
        (nn.Conv2d(64, 128, 3), math.sqrt(2 / (9 * 192)), math.sqrt(2 / (1 + 9 * 128))),
    ],
)
def test_initial_weights_have_the_variance_of_the_paper(layer, weight_std, bias_std):
    initialise(layer, seed=3)
    for p, std in ((layer.weight, weight_std), (layer.bias, bias_std)):
        n = p.numel()
        assert abs(p.mean()) < 5 * std / math.sqrt(n)
        assert abs(p.std() - std) < 5 * std / math.sqrt(2 * n)


def test_initialise_resets_batchnorm_and_takes_layers_without_bias():
    net = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2))
    nn.init.constant_(net[1].weight, 7.0)
    nn.init.constant_(net[1].bias, 7.0)
    initialise(net, seed=0)
    assert net[1].weight.tolist() == [1, 1]
    assert net[1].bias.tolist() == [0, 0]


def test_initialise_depends_on_its_seed_alone():
    before = torch.get_rng_state()
    net = initialise(torch.nn.utils.skip_init(nn.Linear, 3, 2), seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    again, other = initialise(nn.Linear(3, 2), seed=1), initialise(nn.Linear(3, 2), seed=2)
    torch.set_rng_state(before)
    assert torch.equal(net.weight, again.weight)
    assert torch.equal(net.bias, again.bias)
    assert not torch.equal(net.weight, other.weight)


def test_initialise_refuses_a_layer_it_does_not_know():
    with pytest.raises(ValueError, match="no initialisation for '0', a LayerNorm"):
        initialise(nn.Sequential(nn.LayerNorm(3)), seed=0)


def test_build_sizes_nets_by_shape_and_classes():
    assert build("mlp-7-6", [1, 8, 8], 10)(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    assert build("lenet5", (3, 32, 32), 100)(torch.zeros(3, 3, 32, 32)).shape == (3, 100)
    assert build("resnet18", (1, 28, 20), 3)(torch.zeros(3, 1, 28, 20)).shape == (3, 3)
    assert build("vgg11", (1, 32, 32), 3)[0].weight.shape == (64, 1, 3, 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mpl-400-400", "there is no net 'mpl-400-400', did you mean 'mlp-400-400'?"),
        ("mlp", "there is no net 'mlp', did you mean 'mlp-400-400'?"),
        ("mlp-0", "there is no net 'mlp-0', did you mean 'mlp-400-400'?"),
        ("mlp-4O0", "there is no net 'mlp-4O0', did you mean 'mlp-400-400'?"),
        ("lenet", "there is no net 'lenet', did you mean 'lenet5'?"),
        ("transformer", f"there is no net 'transformer': name one like {NAMES}"),
        ("resnet", "there is no net 'resnet', did you mean 'resnet18'?"),
        ("vgg11-bm", "there is no net 'vgg11-bm', did you mean 'vgg11'?"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        recipe(name)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["lenet5", "conv3fc3", "conv4", "alexnet", "vgg11", "vgg11-bn"])
def test_a_net_for_square_images_refuses_others(name):
    with pytest.raises(ValueError, match=r"square images \[C, H, W\], not \[1, 28, 32\]"):
        build(name, [1, 28, 32], 10)


def test_resnet18_refuses_what_is_no_image():
    with pytest.raises(ValueError, match=r"ResNet-18 needs images \[C, H, W\], not \[784\]: use an mlp"):
        build("resnet18", [784], 10)


@pytest.mark.parametrize("size", ["9" * 13, "9" * 30, "9" * 13 + "-" + "9" * 13])
def test_a_net_that_no_memory_holds_is_refused(size):
    with pytest.raises(
        ValueError, match=f"^the net mlp-{size} does not fit in memory: choose a smaller one$"
    ):
        build(f"mlp-{size}", [1, 8, 8], 10)
