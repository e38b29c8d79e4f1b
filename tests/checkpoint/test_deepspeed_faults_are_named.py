"""What is wrong with a DeepSpeed checkpoint is said by name, and nothing in it is ever run."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zeroplus.checkpoint.deepspeed import detect_deepspeed, read_deepspeed
from lightning_zeroplus.errors import CheckpointError
from tests.checkpoint.fixtures.deepspeed import edit, unpack

TAG = "global_step3"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "mp_rank_00_model_states.pt"

Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


@pytest.fixture
def small(shelf: Path, tmp_path: Path) -> Maker:
    """Copies a small checkpoint; returns the folder with its files."""

    def copy(variant: str) -> Path:
        name, _, form = variant.partition("/")
        return shutil.copytree(shelf / "small" / name, tmp_path / name) / (form or TAG)

    return copy


def fails(folder: Path, message: str) -> None:
    """Both ways of giving the folder end in an error of the usual form that has ``message``."""
    with pytest.raises(CheckpointError, match=message) as caught:
        read_deepspeed(folder)
    assert re.fullmatch(r"Expected .+, got .+ \(.+\)\. .+\.", str(caught.value)), str(caught.value)


def optimizer(data: dict) -> dict:
    return data["optimizer_state_dict"]


def base(data: dict) -> dict:
    return optimizer(data).get("base_optimizer_state") or optimizer(data)["optimizer_state_dict"]


# ------------------------------------------------------------------------------------- files
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("variant", ["rr2_adam_w3", "s3_nadam_w3"])
def test_a_missing_file_of_a_rank(small: Maker, variant: str, rank: int) -> None:
    folder = small(variant)
    (folder / OPTIM.format(rank)).unlink()
    fails(folder, rf"Expected 3 files \*_optim_states.pt.*got 2, none of rank {rank} \(.*Copy the")


def test_a_missing_file_of_model_states(small: Maker) -> None:
    folder = small("s3_nadam_w3")
    (folder / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    fails(folder, r"Expected 3 files \*_model_states.pt.*got 2, none of rank 2")
    folder = small("rr2_adam_w3")
    (folder / MODEL).unlink()
    fails(folder, r"Expected 1 files \*_model_states.pt.*got 0, none of rank 0")


def test_all_files_of_the_optimizer_missing(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    assert detect_deepspeed(folder) == "zero"
    fails(folder, r"Expected files \*_optim_states.pt of ZeRO, got none")


def test_files_of_a_larger_run_that_were_left(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    shutil.copy(folder / OPTIM.format(2), folder / OPTIM.format(3))
    fails(folder, r"got 4, also zero_pp_rank_3_mp_rank_00_optim_states.pt \(.*Remove|remove files")


def test_files_of_two_runs(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    shutil.copy(folder / OPTIM.format(0), folder / ("bf16_" + OPTIM.format(1)))
    fails(folder, r"one file of rank 1, got bf16_zero_pp_rank_1.* and zero_pp_rank_1")
    (folder / OPTIM.format(1)).unlink()
    fails(folder, r"files of one run, got bf16_zero_pp_rank_1.* and zero_pp_rank_2")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("variant", ["rr2_adam_w3", "s3_nadam_w3"])
def test_a_wrong_partition_count(small: Maker, variant: str, count: int) -> None:
    def change(data: dict) -> None:
        old = optimizer(data)["partition_count"]
        optimizer(data)["partition_count"] = [count, count] if isinstance(old, list) else count

    folder = small(variant)
    edit(folder / OPTIM.format(0), change)
    fails(folder, rf"Expected {count} files \*_optim_states.pt")


def test_ranks_that_disagree_on_the_run(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    edit(folder / OPTIM.format(1), lambda data: optimizer(data).update(partition_count=[5, 5]))
    fails(folder, r"stage 2 on 3 ranks, as in .*rank_0.*got stage 2 on 5 ranks \(.*rank_1_")


@pytest.mark.parametrize("kept", [0, 3, 100, 0.5, 0.98])
@pytest.mark.parametrize(
    "name",
    [
        OPTIM.format(1),
        MODEL,
        "universal/zero/scale/exp_avg.pt",
        "universal/zero/optimizer_state.pt",
    ],
)
def test_a_file_that_ends_early(small: Maker, name: str, kept: float) -> None:
    form = "s3_bf16_w3/universal" if name.startswith("universal") else "rr2_adam_w3"
    folder = small(form)
    path = folder / name.removeprefix("universal/")
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    fails(folder, rf"Expected a complete file .*unreadable bytes: .*\(.*{re.escape(path.name)}\)")


def test_damaged_bytes_in_a_pickle_raise_nothing_else(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    path = folder / OPTIM.format(1)
    content = path.read_bytes()
    start = content.index(b"optimizer_state_dict")
    for place in range(start - 40, start + 400, 7):
        path.with_name("draft").write_bytes(
            content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]
        )
        path.with_name("draft").replace(path)
        with contextlib.suppress(CheckpointError):  # anything else fails the test
            read_deepspeed(folder)


def test_a_file_of_a_universal_folder_that_is_missing(small: Maker) -> None:
    folder = small("s3_bf16_w3/universal")
    (folder / "zero/scale/fp32.pt").unlink()
    fails(folder, r"Expected the file fp32.pt, got none \(.*scale\)")
    shutil.rmtree(folder / "zero/mid.bias")
    fails(folder, r"a folder for each of 6 parameters, got none for mid.bias")
    (folder / "zero/optimizer_state.pt").unlink()
    fails(folder, r"Expected a file, got none \(.*optimizer_state.pt\)")
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert detect_deepspeed(folder) == "universal"


def test_a_universal_file_that_goes_after_it_was_looked_at(small: Maker) -> None:
    folder = small("s3_bf16_w3/universal")
    saved = read_deepspeed(folder)["state_dict"]["mid.bias"]
    torch.save(torch.zeros(4), folder / "zero/mid.bias/fp32.pt")
    with pytest.raises(CheckpointError, match=r"Expected 5 elements, as before, got 4"):
        saved.read()
    (folder / "zero/mid.bias/fp32.pt").unlink()
    with pytest.raises(CheckpointError, match=r"Expected a file, got none"):
        saved.clone()


# ------------------------------------------------------------------------- what is not supported
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mp_rank_01_model_states.pt", "TP or PP above 1"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "TP or PP above 1"),
        ("mp_rank_00_001_model_states.pt", "TP or PP above 1"),
        ("layer_0_expert_0_mp_rank_00_model_states.pt", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "experts"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("some_optim_states.pt", "a file of another kind"),
    ],
)
def test_files_of_other_parallelism(small: Maker, name: str, message: str) -> None:
    folder = small("rr2_adam_w3")
    shutil.copy(folder / MODEL, folder / name)
    fails(folder, rf"{message}.*\(.*{re.escape(name)}\)")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mp_world_size": 2}, "mp_world_size 2"),
        ({"checkpoint_parallel_dimensions": {"pp_degree": 4, "tp_degree": 1}}, "pp_degree 4"),
        ({"num_experts": [8]}, r"num_experts \(MoE\)"),
        ({"param_shapes": None}, "param_shapes, which ZeRO writes"),
        ({"param_shapes": [{"a": (-1,)}]}, "map names to shapes"),
        ({"param_shapes": [{"a": (2**31, 2**31)}]}, "memory"),
        ({"param_shapes": "x"}, "to be list, got str"),
        ({"shared_params": {1: 2}}, "shared_params to map names"),
        ({"module": None}, "'module' to be dict, got NoneType"),
    ],
)
def test_model_states_that_do_not_fit(small: Maker, change: dict, message: str) -> None:
    folder = small("rr2_adam_w3")
    edit(folder / MODEL, lambda data: data.update(change))
    fails(folder, rf"{message}.*{re.escape(MODEL)}")


def test_states_on_nvme(small: Maker) -> None:
    folder = small("s3_nadam_w3")
    (folder / "offloaded_tensors").mkdir()
    fails(folder, "offloaded to NVMe")


def test_groups_of_experts(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    edit(folder / OPTIM.format(0), lambda data: optimizer(data).update(partition_count=[3, 1]))
    fails(folder, r"one partition count for all groups, got \[3, 1\], as groups of experts")
    folder = small("s2_rms_w3")
    edit(folder / OPTIM.format(0), lambda data: base(data)["param_groups"][1].update(moe=True))
    fails(folder, r"groups without experts, got group 1 of experts")


def test_an_elastic_checkpoint(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    for rank in range(3):
        edit(
            folder / OPTIM.format(rank),
            lambda data: optimizer(data).update(base_optimizer_state=[{}, {}]),
        )
    fails(folder, r"got list, as elastic_checkpoint writes it.*Save again without")


def test_groups_that_are_not_known_are_not_guessed(small: Maker) -> None:
    folder = small("s3_nadam_w3")
    edit(
        folder / OPTIM.format(0),
        lambda data: [group.update(params=[]) for group in base(data)["param_groups"]],
    )
    fails(folder, r"not known which parameters are in which group")


def test_a_universal_folder_that_the_converter_mixed_up(small: Maker) -> None:
    folder = small("rr2_adam_w3/universal")
    fails(folder, r"others for .*norm.*round_robin_gradients was set.*Read the checkpoint that")


# ---------------------------------------------------------------------------------- sizes
def cut(data: dict) -> None:
    key = (
        "fp32_flat_groups"
        if "fp32_flat_groups" in optimizer(data)
        else "single_partition_of_fp32_groups"
    )
    optimizer(data)[key][0] = optimizer(data)[key][0][:-9]


@pytest.mark.parametrize(
    ("variant", "message"),
    [("rr2_adam_w3", "elements in group 0"), ("s3_nadam_w3", "flat groups of .* as on rank 0")],
)
def test_masters_that_are_too_short(small: Maker, variant: str, message: str) -> None:
    folder = small(variant)
    edit(folder / OPTIM.format(1), cut)
    fails(folder, message)


@pytest.mark.parametrize("variant", ["rr2_adam_w3", "s3_nadam_w3"])
def test_parameters_of_other_shapes(small: Maker, variant: str) -> None:
    folder = small(variant)
    for path in folder.glob("*_model_states.pt"):
        edit(path, lambda data: data["param_shapes"][0].update({"emb.weight": torch.Size([12, 5])}))
    fails(folder, "elements in")


def test_another_number_of_groups(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    edit(folder / MODEL, lambda data: data["param_shapes"].pop())
    fails(folder, r"2 groups of param_shapes, as in zero_pp_rank_0.*got 1")


def test_states_of_other_sizes(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    edit(
        folder / OPTIM.format(0),
        lambda data: base(data)["state"][0].update(exp_avg=torch.zeros(3)),
    )
    fails(folder, r"exp_avg of part 0 to have \d+ elements or one, got 3.*each element by itself")


def test_a_state_that_one_rank_lacks(small: Maker) -> None:
    folder = small("s3_nadam_w3")
    edit(folder / OPTIM.format(2), lambda data: base(data)["state"][0].pop("exp_avg"))
    fails(folder, r"\['exp_avg'\] on one of the two alone \(.*rank_2")


def test_steps_that_ranks_disagree_on(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    edit(
        folder / OPTIM.format(1),
        lambda data: base(data)["state"][0].update(step=torch.tensor(4.0)),
    )
    fails(folder, r"step of part 0 as on the other ranks, got tensor\(4\.\)")


def test_frozen_parameters_without_elements(small: Maker) -> None:
    folder = small("s3_nadam_w3")
    path = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(path, lambda data: data["frozen_param_fragments"].pop("frozen.bias"))
    fails(folder, r"Expected 3 elements of the frozen frozen.bias, got none")
    folder = small("s3_bf16_w3")
    for path in folder.glob("*_model_states.pt"):
        edit(path, lambda data: data.update(frozen_param_shapes=None))
    fails(folder, r"elements of every parameter, got none of frozen.weight, frozen.bias")


def test_a_universal_file_of_another_size(small: Maker) -> None:
    folder = small("s3_bf16_w3/universal")
    torch.save(torch.zeros(54), folder / "zero/emb.weight/exp_avg.pt")
    fails(folder, r"Expected 55 elements of shape \[11, 5\], got 54 \(.*emb.weight/exp_avg.pt\)")
    torch.save(
        {"param": torch.zeros(55), "is_expert_param": True}, folder / "zero/emb.weight/exp_avg.pt"
    )
    fails(folder, r"one of experts")
    torch.save({"cat_dim": 0}, folder / "zero/emb.weight/exp_avg.pt")
    fails(folder, r"the entry 'param', got a file without it")


# ------------------------------------------------------------------------------- nothing is run
class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


class Foreign:
    pass


@pytest.mark.parametrize("name", [OPTIM.format(1), MODEL, "zero/scale/step.pt"])
def test_code_in_a_pickle_is_not_run(small: Maker, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    folder = small("s3_bf16_w3/universal" if "zero/" in name else "rr2_adam_w3")
    if "zero/" in name:
        torch.save(Evil(mark), folder / name)
    else:
        edit(folder / name, lambda data: data.update(zero=Evil(mark)))
    fails(folder, rf"got the class posix.mkdir \(.*{re.escape(name)}\)")
    assert not mark.exists()


def test_a_class_that_is_not_deepspeeds_is_named(small: Maker) -> None:
    folder = small("rr2_adam_w3")
    edit(folder / MODEL, lambda data: data.update(client=Foreign()))
    fails(folder, rf"the class {re.escape(__name__)}.Foreign .*add_safe_globals")
    with torch.serialization.safe_globals([Foreign]):
        assert isinstance(read_deepspeed(folder)["client"], Foreign)


def test_reading_leaves_no_class_allowed(small: Maker) -> None:
    before = set(torch.serialization.get_safe_globals())
    read_deepspeed(small("rr2_adam_w3"))
    assert set(torch.serialization.get_safe_globals()) == before


def test_a_plain_pickle_is_not_opened(small: Maker, tmp_path: Path) -> None:
    folder = small("rr2_adam_w3")
    (folder / MODEL).write_bytes(pickle.dumps(Evil(tmp_path / "mark")))
    fails(folder, r"Expected a complete file of a checkpoint, got \d+ unreadable bytes")
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("text", ["../outside", "/etc", "a/b", "..", ".", "", "a\\b", "a\0b", "\n"])
@pytest.mark.parametrize("pointer", ["latest", "latest_universal"])
def test_a_tag_that_leads_elsewhere(small: Maker, text: str, pointer: str) -> None:
    folder = small("rr2_adam_w3").parent
    shutil.copytree(folder, folder.with_name("outside"))
    (folder / "latest").unlink()
    (folder / "latest_universal").unlink()
    (folder / pointer).write_text(text)
    fails(folder, rf"the text to be the name of a folder, got .*{pointer}\)")
    assert detect_deepspeed(folder) is None


@pytest.mark.parametrize("tag", ["../rr2_adam_w3/global_step3", "", "..", "/etc"])
def test_a_tag_that_is_given_stays_inside_too(small: Maker, tag: str) -> None:
    folder = small("rr2_adam_w3").parent
    with pytest.raises(CheckpointError, match="the tag to be the name of a folder"):
        read_deepspeed(folder, tag)


@pytest.mark.parametrize("name", ["../../secret", "/etc", "..", "a/b", ""])
def test_a_parameter_whose_folder_would_be_elsewhere(small: Maker, name: str) -> None:
    def rename(data: dict) -> None:
        data["param_shapes"][0] = {name: torch.Size([11, 5])}

    folder = small("s3_bf16_w3/universal")
    for path in folder.glob("*_model_states.pt"):
        edit(path, rename)
    fails(folder, r"a parameter to be the name of a folder")


def test_text_that_is_not_utf8(small: Maker) -> None:
    folder = small("rr2_adam_w3").parent
    (folder / "latest").write_bytes(b"\xff\xfe" * 5000)
    (folder / "latest_universal").unlink()
    fails(folder, "the text to be the name of a folder")
    assert detect_deepspeed(folder) is None


# --------------------------------------------------------------------- objects of DeepSpeed's own
def test_the_dynamic_loss_scale_is_read_without_its_class(
    small: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "deepspeed.runtime.fp16.loss_scaler"
    scaler = type("DynamicLossScaler", (), {"__module__": place})
    for n in range(1, 5):
        monkeypatch.setitem(sys.modules, ".".join(place.split(".")[:n]), types.ModuleType(place))
    sys.modules[place].DynamicLossScaler = scaler  # type: ignore[attr-defined]
    value = scaler()
    vars(value).update(cur_scale=256.0, scale_window=1000, dynamic=True, dtype=torch.float16)
    folder = small("rr2_adam_w3")
    edit(folder / OPTIM.format(0), lambda data: optimizer(data).update(loss_scaler=value))
    assert read_deepspeed(folder)["deepspeed"]["loss_scale"] == {
        "cur_scale": 256.0,
        "scale_window": 1000,
        "dynamic": True,
        "dtype": "float16",
    }
