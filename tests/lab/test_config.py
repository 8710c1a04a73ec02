import dataclasses
import math

import pytest
from torch import nn

from posterity import BGD, IVON, VOGN
from posterity_lab import methods
from posterity_lab.config import DEFAULTS, METHODS, Config


def refused(**keys: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (callers compare the message)
        Config(**keys)
    return str(error.value)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gets_its_own_defaults_and_no_others(method):
    config = Config(method=method)
    assert config.settings == DEFAULTS[method]
    for key in {"samples", "lr", "momentum", "beta2", "std_init", "prior_std", "kl_factor"} - set(
        config.settings
    ):
        assert getattr(config, key) is None


@pytest.mark.parametrize(("method", "rule"), [("bgd", BGD), ("ivon", IVON), ("vogn", VOGN)])
def test_a_run_without_settings_has_those_of_the_optimiser(method, rule):
    model = nn.Linear(4, 3)
    ours = rule(model, **({} if rule is BGD else {"num_data": 20})).param_groups[0]
    ours |= {"samples": ours["mc_samples"]}
    ours |= dict(zip(("momentum", "beta2"), ours.get("betas", ()), strict=False))
    config = Config(method=method)
    open_ones = {key for key, value in config.settings.items() if value is None}
    assert open_ones == {"bgd": {"std_init"}, "ivon": {"std_init", "hess_init"}}.get(
        method, {"std_init", "damping"}
    )
    for key, value in config.settings.items():
        assert key in open_ones or ours[key] == value, key
    # The learner of the command, with what its config leaves open.
    theirs = methods.build(config, model, num_data=20).optimizer.param_groups[0]
    for key in ours.keys() - {"params", "seed", "samples", "momentum", "beta2"}:
        assert theirs[key] == ours[key], key


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('method = "ivon"\nlr = 1\nseed = 4\n')
    config = Config.from_sources(file, {"seed": 5, "epochs": None})
    assert (config.method, config.lr, config.seed, config.epochs) == ("ivon", 1.0, 5, 5)
    assert isinstance(config.lr, float)


def test_a_base_fills_what_is_not_given():
    base = Config(method="bgd", std_init=0.1, epochs=9)
    assert Config.from_sources(None, {}, base) == base
    assert Config.from_sources(None, {"epochs": 3}, base).std_init == 0.1
    # The base's hyper-parameters would mean nothing, or something else, to another method.
    assert Config.from_sources(None, {"method": "adam"}, base) == Config(method="adam", epochs=9)


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"^there is no key 'std_int', did you mean 'std_init'\?$"):
        Config.from_sources(None, {"std_int": 0.1})
    file = tmp_path / "run.toml"
    file.write_text("batchsize = 3")
    with pytest.raises(
        ValueError, match=r"^there is no key 'batchsize', did you mean 'batch_size'\? \(.*toml\)$"
    ):
        Config.from_sources(file, {})


@pytest.mark.parametrize("method", ["bdg", "BGD"])
def test_an_unknown_method_is_refused_with_the_nearest(method):
    assert refused(method=method) == f"there is no method {method!r}, did you mean 'bgd'?"


def test_a_method_without_a_near_name_is_refused_with_all_of_them():
    assert (
        refused(method="laplace")
        == "there is no method 'laplace': choose from bgd, ivon, vogn, bbb, sgd, adam"
    )


def test_a_hyper_parameter_of_another_method_is_refused():
    assert refused(method="adam", std_init=0.1) == "std_init has no meaning for adam: leave it out"
    assert refused(method="bgd", prior_std=0.1) == "prior_std has no meaning for bgd: leave it out"


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("epochs", 0, "a whole number of at least 1"),
        ("epochs", 2.5, "a whole number of at least 1"),
        ("epochs", True, "a whole number of at least 1"),
        ("epochs", "3", "a whole number of at least 1"),
        ("batch_size", -1, "a whole number of at least 1"),
        ("validation", -1, "a whole number of at least 0"),
        ("seed", -1, "a whole number from 0 to 9223372036854775807"),
        ("seed", 2**63, "a whole number from 0 to 9223372036854775807"),
        ("samples", 0, "a whole number of at least 1"),
        ("lr", 0.0, "a finite number greater than 0"),
        ("lr", math.nan, "a finite number greater than 0"),
        ("lr", math.inf, "a finite number greater than 0"),
        ("lr", [1], "a finite number greater than 0"),
        ("beta2", 1.0, "a number in [0, 1)"),
    ],
)
def test_a_wrong_type_or_value_is_refused(key, value, wanted):
    assert refused(method="ivon", **{key: value}) == f"{key} must be {wanted}, not {value!r}"


def test_a_name_must_be_text():
    assert refused(net=400) == "net must be a text, not 400"


def test_a_bad_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no config file .*none\.toml"):
        Config.from_sources(tmp_path / "none.toml", {})
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(ValueError, match=r"bad\.toml is not valid TOML"):
        Config.from_sources(tmp_path / "bad.toml", {})
    with pytest.raises(OSError, match=r"cannot be read \(Is a directory\): choose another --config$"):
        Config.from_sources(tmp_path, {})


def test_a_config_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 2.0
