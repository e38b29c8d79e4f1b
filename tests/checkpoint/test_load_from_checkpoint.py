"""Modules and data modules are made from checkpoints of any form, as Lightning makes them."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from lightning_zeroplus import consolidate, load_from_checkpoint
from lightning_zeroplus.checkpoint import convert_checkpoint, write_full
from lightning_zeroplus.errors import CheckpointError, ConfigError
from tests.checkpoint.converting import differences
from tests.dist_pool import RankPool
from tests.plugin.scenes import Net, fit

VERSION = "2.6.0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, pair: RankPool) -> Path:
    """A run's checkpoint as stage 3 writes it on two ranks, and its final weights."""
    folder = tmp_path_factory.mktemp("runs")
    arguments = {"optimizer": "sgd", "lr": 0.05}
    ranks = pair.run(
        fit, {"stage": 3}, None, Net, arguments, None, folder / "u.ckpt", timeout=100.0
    )
    torch.save(ranks[0]["weights"], folder / "weights.pt")
    consolidate(folder / "u.ckpt", folder / "full.ckpt")
    convert_checkpoint(folder / "u.ckpt", folder / "deepspeed", "deepspeed")
    saved = torch.load(folder / "full.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": saved["state_dict"]}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder


@pytest.mark.parametrize("name", ["u.ckpt", "full.ckpt", "deepspeed"])
def test_weights_and_hyper_parameters_are_those_of_the_run(folder: Path, name: str) -> None:
    module = load_from_checkpoint(Net, folder / name)
    assert type(module) is Net
    assert differences(dict(module.state_dict()), torch.load(folder / "weights.pt")) == []
    assert dict(module.hparams) == {
        "optimizer": "sgd",
        "lr": 0.05,
        "seed": 1,
        "tied": True,
        "schedule": True,
    }
    assert module.kind == "sgd"
    assert module.again.weight is module.last.weight


def test_it_equals_lightnings_own_for_a_file(folder: Path) -> None:
    theirs = Net.load_from_checkpoint(folder / "full.ckpt")
    ours = load_from_checkpoint(Net, folder / "full.ckpt")
    assert differences(dict(ours.state_dict()), dict(theirs.state_dict())) == []
    assert dict(ours.hparams) == dict(theirs.hparams)


def test_a_folder_without_hyper_parameters_takes_those_that_are_given(folder: Path) -> None:
    module = load_from_checkpoint(Net, str(folder / "dcp"), lr=0.5)
    assert differences(dict(module.state_dict()), torch.load(folder / "weights.pt")) == []
    assert (module.lr, module.kind) == (0.5, "adamw")


def test_given_hyper_parameters_come_first(folder: Path) -> None:
    module = load_from_checkpoint(Net, folder / "u.ckpt", lr=0.5, seed=9)
    assert (module.lr, module.kind, module.hparams.seed) == (0.5, "sgd", 9)


def test_a_file_of_hyper_parameters_replaces_the_saved_ones(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "h.yaml").write_text(yaml.safe_dump({"lr": 0.25}))
    module = load_from_checkpoint(Net, folder / "u.ckpt", hparams_file=tmp_path / "h.yaml")
    assert (module.lr, module.kind) == (0.25, "adamw")
    (tmp_path / "h.csv").write_text("key,value\nlr,0.125\n")
    module = load_from_checkpoint(Net, folder / "u.ckpt", hparams_file=str(tmp_path / "h.csv"))
    assert module.lr == 0.125
    with pytest.raises(ConfigError, match=r"\.yaml or \.csv file, got \.json"):
        load_from_checkpoint(Net, folder / "u.ckpt", hparams_file="h.json")


def test_an_open_file_goes_lightnings_way(folder: Path) -> None:
    module = load_from_checkpoint(Net, io.BytesIO((folder / "full.ckpt").read_bytes()))
    assert differences(dict(module.state_dict()), torch.load(folder / "weights.pt")) == []


class Small(LightningModule):
    """Counts calls of hooks, and is compiled in part."""

    def __init__(self, width: int = 3, *, compiled: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: Any = nn.Linear(width, 2)
        if compiled:
            self.net = torch.compile(self.net, backend="eager")
        self.calls: list[str] = []
        self.extra: Any = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")
        self.extra = checkpoint.get("extra")
        if "renamed.weight" in checkpoint["state_dict"]:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name.replace("renamed.", "net."): value for name, value in state.items()
            }


class Late(Small):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        self.calls.append("configure_model")
        self.net = nn.Linear(3, 2)


def write(folder: Path, state: dict[str, Tensor], **rest: Any) -> Path:
    whole = {"pytorch-lightning_version": VERSION, "state_dict": state, **rest}
    write_full(whole, folder / "file.ckpt")
    convert_checkpoint(folder / "file.ckpt", folder / "folder.ckpt", "universal")
    return folder / "folder.ckpt"


WEIGHTS = {"net.weight": torch.arange(6.0).view(2, 3), "net.bias": torch.tensor([7.0, 8.0])}


def test_names_of_a_compiled_module_are_found(tmp_path: Path) -> None:
    module = load_from_checkpoint(Small, write(tmp_path, WEIGHTS), compiled=True)
    state = module.state_dict()
    assert torch.equal(state["net._orig_mod.weight"], WEIGHTS["net.weight"])
    wrapped = {name.replace("net.", "net._orig_mod."): value for name, value in WEIGHTS.items()}
    write_full({"state_dict": wrapped}, tmp_path / "wrapped.ckpt")
    plain = load_from_checkpoint(Small, tmp_path / "wrapped.ckpt")
    assert differences(dict(plain.state_dict()), WEIGHTS) == []


def test_hooks_run_in_order_and_see_the_whole_checkpoint(tmp_path: Path) -> None:
    renamed = {name.replace("net.", "renamed."): value for name, value in WEIGHTS.items()}
    large = torch.randn(100, 100)
    path = write(tmp_path, renamed, extra={"large": large, "note": "x"})
    module = load_from_checkpoint(Late, path)
    assert module.calls == ["configure_model", "on_load_checkpoint"]
    assert differences(dict(module.state_dict()), WEIGHTS) == []
    assert module.extra["note"] == "x"
    assert torch.equal(module.extra["large"], large)


def test_another_model_is_told_with_every_name(tmp_path: Path) -> None:
    other = {"net.weight": torch.ones(2, 5), "more": torch.ones(1)}
    with pytest.raises(CheckpointError) as caught:
        load_from_checkpoint(Small, path := write(tmp_path, other))
    assert str(caught.value).startswith(
        "Expected a checkpoint of Small, got another set of weights: net.bias is missing, "
        "net.weight is [2, 5] instead of [2, 3], more is unexpected "
    ), caught.value
    assert str(path) in str(caught.value)


def test_without_strict_names_may_differ(tmp_path: Path) -> None:
    path = write(tmp_path, {"net.bias": WEIGHTS["net.bias"], "more": torch.ones(1)})
    with pytest.warns(UserWarning, match=r"Missing .*net\.weight.*not in the module: \['more'\]"):
        module = load_from_checkpoint(Small, path, strict=False)
    assert torch.equal(module.net.bias, WEIGHTS["net.bias"])


class Loose(Small):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False


def test_the_modules_own_strictness_counts(tmp_path: Path) -> None:
    path = write(tmp_path, {"net.bias": WEIGHTS["net.bias"]})
    with pytest.warns(UserWarning, match="Missing in the checkpoint"):
        load_from_checkpoint(Loose, path)
    with pytest.raises(ConfigError, match=r"Expected strict=False, as Loose\.strict_loading"):
        load_from_checkpoint(Loose, path, strict=True)


@pytest.mark.parametrize("where", ["meta", torch.device("meta"), {"cpu": "meta"}])
def test_map_location_says_where_the_module_is(tmp_path: Path, where: Any) -> None:
    module = load_from_checkpoint(Small, write(tmp_path, WEIGHTS), map_location=where)
    assert module.net.weight.device.type == "meta"
    module = load_from_checkpoint(
        Small, tmp_path / "folder.ckpt", map_location=lambda storage, place: storage
    )
    assert differences(dict(module.state_dict()), WEIGHTS) == []


class Numbers(LightningDataModule):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = size
        self.seen: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]


def test_a_data_module_gets_its_state(tmp_path: Path) -> None:
    seen = torch.randn(90, 90)
    rest = {"Numbers": {"seen": seen}, "datamodule_hyper_parameters": {"size": 4}}
    found = load_from_checkpoint(Numbers, write(tmp_path, WEIGHTS, **rest))
    assert (type(found), found.size) == (Numbers, 4)
    assert type(found.seen) is Tensor
    assert torch.equal(found.seen, seen)


class Odd:
    """A class that no checkpoint may have unless it is trusted."""


def test_objects_of_other_classes_need_trust(tmp_path: Path) -> None:
    whole = {"state_dict": WEIGHTS, "hyper_parameters": {"width": 3}, "odd": Odd()}
    torch.save(whole, tmp_path / "file.ckpt")
    convert_checkpoint(
        tmp_path / "file.ckpt", tmp_path / "folder.ckpt", "universal", weights_only=False
    )
    for name in ("file.ckpt", "folder.ckpt"):
        with pytest.raises(Exception, match=r"test_load_from_checkpoint\.Odd"):
            load_from_checkpoint(Small, tmp_path / name)
        module = load_from_checkpoint(Small, tmp_path / name, weights_only=False)
        assert differences(dict(module.state_dict()), WEIGHTS) == []


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"_instantiator": "os.system"}, r"to make the object, got 'os\.system'"),
        ({"_instantiator": ["os.system"]}, r"to make the object, got \['os\.system'\]"),
        (
            {
                "_instantiator": "lightning.pytorch.cli.instantiate_module",
                "_class_path": "subprocess.Popen",
            },
            r"imported subclass of Small, got 'subprocess\.Popen'",
        ),
    ],
)
def test_a_checkpoint_cannot_name_what_to_call(
    tmp_path: Path, saved: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, WEIGHTS, hyper_parameters=saved)
    with pytest.raises(CheckpointError, match=message):
        load_from_checkpoint(Small, path)


def test_the_command_lines_own_way_to_make_a_module_works(tmp_path: Path) -> None:
    saved = {
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        "_class_path": f"{__name__}.Small",
        "width": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load_from_checkpoint(Small, write(tmp_path, WEIGHTS, hyper_parameters=saved))
    assert type(module) is Small
    assert differences(dict(module.state_dict()), WEIGHTS) == []


def test_nothing_at_the_path_and_damage_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        load_from_checkpoint(Net, tmp_path / "nowhere.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="an empty folder"):
        load_from_checkpoint(Net, tmp_path / "empty.ckpt")
    write_full({"epoch": 3}, tmp_path / "none.ckpt")
    with pytest.raises(CheckpointError, match="Expected a checkpoint with a state_dict"):
        load_from_checkpoint(Small, tmp_path / "none.ckpt")
