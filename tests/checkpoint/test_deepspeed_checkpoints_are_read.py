"""What DeepSpeed wrote is read bit for bit, in both of its forms, without DeepSpeed."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lightning_zeroplus.checkpoint.deepspeed import detect_deepspeed, read_deepspeed
from lightning_zeroplus.checkpoint.deepspeed.pieces import Piece, join_pieces
from lightning_zeroplus.checkpoint.saved_tensor import SavedTensor, read_whole
from lightning_zeroplus.errors import CheckpointError
from lightning_zeroplus.layout.box import Box
from lightning_zeroplus.layout.span import Span
from tests.checkpoint.fixtures.deepspeed import LARGE, SMALL, edit, unpack


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("deepspeed"))


def test_deepspeed_is_not_imported() -> None:
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize("variant", LARGE)
@pytest.mark.parametrize("form", ["ckpt", "universal"])
def test_weights_are_the_ones_of_deepspeeds_own_tool(shelf: Path, variant: str, form: str) -> None:
    weights = read_deepspeed(shelf / variant / form)["state_dict"]
    expected = torch.load(shelf / variant / "zero_to_fp32.pt")
    assert set(weights) == set(expected)
    for name, value in expected.items():
        assert isinstance(weights[name], SavedTensor)
        assert (weights[name].shape, weights[name].dtype) == (value.shape, torch.float32)
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("variant", LARGE)
def test_both_forms_have_the_same_states_and_settings(shelf: Path, variant: str) -> None:
    zero = read_deepspeed(shelf / variant / "ckpt")
    universal = read_deepspeed(shelf / variant / "universal")
    assert list(zero["state_dict"]) == list(universal["state_dict"])
    assert zero["deepspeed"] == universal["deepspeed"]
    (one,), (other,) = zero["optimizer_states"], universal["optimizer_states"]
    assert one["param_groups"] == other["param_groups"]
    assert set(one["state"]) == set(other["state"]) == set(zero["state_dict"])
    for name, state in one["state"].items():
        assert set(state) == set(other["state"][name]) == {"step", "exp_avg", "exp_avg_sq"}
        for key, value in state.items():
            assert value.dtype == other["state"][name][key].dtype == torch.float32
            assert torch.equal(value, other["state"][name][key]), (name, key)
        assert state["exp_avg_sq"].shape == zero["state_dict"][name].shape
        assert bool((torch.as_tensor(state["exp_avg_sq"]) >= 0).all())


@pytest.mark.parametrize("variant", LARGE)
@pytest.mark.parametrize("form", ["ckpt", "universal"])
def test_each_group_has_its_own_settings_and_each_parameter_its_own_step(
    shelf: Path, variant: str, form: str
) -> None:
    checkpoint = read_deepspeed(shelf / variant / form)
    optimizer = checkpoint["optimizer_states"][0]
    first, second = optimizer["param_groups"]
    assert (first["weight_decay"], second["weight_decay"]) == (0.1, 0.0)
    assert (first["lr"], first["betas"], first["eps"]) == (5e-3, (0.9, 0.95), 1e-8)
    assert all(checkpoint["state_dict"][name].dim() == 2 for name in first["params"])
    assert all(checkpoint["state_dict"][name].dim() == 1 for name in second["params"])
    assert len(first["params"]) + len(second["params"]) == len(checkpoint["state_dict"])
    steps = [state["step"] for state in optimizer["state"].values()]
    assert all(type(step) is torch.Tensor and step.shape == () for step in steps)
    assert [float(step) for step in steps] == [5.0] * len(steps)
    assert len({step.data_ptr() for step in steps}) == len(steps)


def test_what_is_known_of_the_run_comes_along(shelf: Path) -> None:
    about = read_deepspeed(shelf / "s2_bf16")["deepspeed"]
    assert (about["zero_stage"], about["dp_world_size"], about["ds_version"]) == (2, 2, "0.19.8")
    assert (about["global_steps"], about["global_samples"]) == (5, 40)
    assert about["loss_scale"] == {"cur_scale": 1.0, "dynamic": False}
    assert about["ds_config"]["bf16"] == {"enabled": True}


@pytest.mark.parametrize("variant", SMALL)
def test_any_order_optimizer_and_number_of_ranks(shelf: Path, variant: str) -> None:
    folder = shelf / "small" / variant
    checkpoint = read_deepspeed(folder)
    weights, state = checkpoint["state_dict"], checkpoint["optimizer_states"][0]["state"]
    if (folder / "zero_to_fp32.pt").exists():
        for name, value in torch.load(folder / "zero_to_fp32.pt").items():
            assert torch.equal(torch.as_tensor(weights[name]).float(), value), name
    truth = torch.load(folder / "truth.pt") or {}
    assert bool(truth) == ("bf16" not in variant and "align" not in variant)
    for name, values in truth.items():
        assert set(state[name]) == set(values) - {"fp32"}
        for key, value in values.items():
            mine = weights[name] if key == "fp32" else state[name][key]
            # RMSprop divides by a difference of nearly equal numbers.
            tolerance = 1e-4 if "rms" in variant else 2e-6
            torch.testing.assert_close(torch.as_tensor(mine), value, rtol=0, atol=tolerance)
    groups = checkpoint["optimizer_states"][0]["param_groups"]
    assert [group["lr"] for group in groups] == [0.01, 0.005]
    assert set(groups[0]["params"]) == {"emb.weight", "mid.weight"}
    assert set(groups[1]["params"]) == {"scale", "norm.weight", "norm.bias", "mid.bias"}


@pytest.mark.parametrize("variant", SMALL)
def test_tied_and_frozen_parameters_and_buffers(shelf: Path, variant: str) -> None:
    checkpoint = read_deepspeed(shelf / "small" / variant)
    weights = checkpoint["state_dict"]
    assert list(weights) == [
        *("scale", "count", "table", "emb.weight", "frozen.weight", "frozen.bias"),
        *("norm.weight", "norm.bias", "mid.weight", "mid.bias", "head.weight"),
    ]
    assert weights["head.weight"] is weights["emb.weight"]
    assert (weights["count"].dtype, int(weights["count"])) == (torch.int64, 3)
    low = "bf16" in variant or "align" in variant
    dtype = torch.bfloat16 if low else torch.float32
    assert (weights["frozen.weight"].dtype, weights["frozen.weight"].shape) == (dtype, (7, 5))
    assert float(torch.as_tensor(weights["frozen.weight"]).abs().sum()) > 0
    trained = [
        name for g in checkpoint["optimizer_states"][0]["param_groups"] for name in g["params"]
    ]
    assert not {"count", "table", "head.weight", "frozen.weight"} & set(trained)


def test_what_the_caller_of_deepspeed_saved_is_at_the_top(shelf: Path) -> None:
    checkpoint = read_deepspeed(shelf / "small" / "s3_nadam_w3")
    assert checkpoint["epoch"] == 1
    assert torch.equal(checkpoint["callbacks"]["x"], torch.tensor(2.0))
    assert len(checkpoint["lr_schedulers"]) == 1
    assert checkpoint["lr_schedulers"][0]["last_epoch"] == 3
    assert not {"module", "param_shapes", "pytorch-lightning_version"} & checkpoint.keys()


def test_deepspeeds_scheduler_stands_in_where_the_caller_saved_none(
    shelf: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(shelf / "small" / "rr1_sgd_w3", tmp_path / "x")
    edit(folder / "global_step3/mp_rank_00_model_states.pt", lambda data: data.pop("lr_schedulers"))
    assert read_deepspeed(folder)["lr_schedulers"][0]["last_epoch"] == 3


def test_the_callers_data_never_takes_the_place_of_weights(shelf: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shelf / "small" / "rr1_sgd_w3", tmp_path / "x")
    path = folder / "global_step3/mp_rank_00_model_states.pt"
    edit(path, lambda data: data.update(state_dict={}, optimizer_states=[], deepspeed=0))
    checkpoint = read_deepspeed(folder)
    assert checkpoint["state_dict"]
    assert checkpoint["deepspeed"]["zero_stage"] == 1


def test_names_lose_the_wrapper_of_lightning_before_2_1(shelf: Path, tmp_path: Path) -> None:
    def wrap(data: dict) -> None:
        for shapes in (data["module"], *data["param_shapes"], data["frozen_param_shapes"] or {}):
            for name in list(shapes):
                shapes[f"_forward_module.{name}"] = shapes.pop(name)
        data["shared_params"] = {"_forward_module.head.weight": "_forward_module.emb.weight"}

    expected = read_deepspeed(shelf / "small" / "rr1_sgd_w3")
    folder = shutil.copytree(shelf / "small" / "rr1_sgd_w3", tmp_path / "x")
    edit(folder / "global_step3/mp_rank_00_model_states.pt", wrap)
    found = read_deepspeed(folder)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    one, other = found["optimizer_states"][0], expected["optimizer_states"][0]
    assert one["param_groups"] == other["param_groups"]
    assert list(one["state"]) == list(other["state"])


def test_a_step_that_a_fused_optimizer_kept_in_its_group(shelf: Path, tmp_path: Path) -> None:
    def move(data: dict) -> None:
        base = data["optimizer_state_dict"]["base_optimizer_state"]
        for state in base["state"].values():
            del state["step"]
        for group in base["param_groups"]:
            group["step"] = 7

    folder = shutil.copytree(shelf / "small" / "rr2_adam_w3", tmp_path / "x")
    for path in (folder / "global_step3").glob("*_optim_states.pt"):
        edit(path, move)
    optimizer = read_deepspeed(folder)["optimizer_states"][0]
    assert [float(state["step"]) for state in optimizer["state"].values()] == [7.0] * 6
    assert "step" not in optimizer["param_groups"][0]


def test_an_integer_step_becomes_a_tensor(shelf: Path, tmp_path: Path) -> None:
    def change(data: dict) -> None:
        for state in data["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = 3

    folder = shutil.copytree(shelf / "small" / "rr2_adam_w3", tmp_path / "x")
    for path in (folder / "global_step3").glob("*_optim_states.pt"):
        edit(path, change)
    for state in read_deepspeed(folder)["optimizer_states"][0]["state"].values():
        assert (state["step"].dtype, state["step"].shape, float(state["step"])) == (
            torch.float32,
            (),
            3.0,
        )


# ------------------------------------------------------------------------------------------------
def test_forms_are_detected(shelf: Path, tmp_path: Path) -> None:
    assert detect_deepspeed(shelf / "s1_fp32") == "universal"  # by latest_universal
    assert detect_deepspeed(str(shelf / "s1_fp32/universal")) == "universal"
    assert detect_deepspeed(shelf / "s1_fp32/ckpt") == "zero"
    assert detect_deepspeed(shelf / "s3_fp32/ckpt/global_step5") == "zero"
    assert detect_deepspeed(shelf / "small/rr2_adam_w3") == "zero"  # latest goes first


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"latest": "nothing"},
        {"latest": "../.."},
        {"latest": "a\0b"},
        {"latest_universal": "/"},
        {"x.ckpt": "x"},
        {".metadata": "x", "zero": None},
        {"latest": None},
    ],
)
def test_other_folders_are_not_taken_for_deepspeeds(tmp_path: Path, files: dict) -> None:
    for name, text in files.items():
        (tmp_path / name).mkdir() if text is None else (tmp_path / name).write_text(text)
    assert detect_deepspeed(tmp_path) is None
    assert detect_deepspeed(tmp_path / "missing") is None
    with pytest.raises(CheckpointError, match="Expected"):
        read_deepspeed(tmp_path)


def test_files_are_not_taken_for_deepspeeds(tmp_path: Path) -> None:
    file = tmp_path / "x.ckpt"
    file.write_bytes(b"x")
    assert detect_deepspeed(file) is None
    assert detect_deepspeed("a\0b") is None
    with pytest.raises(CheckpointError, match="got a file"):
        read_deepspeed(file)
    with pytest.raises(FileNotFoundError, match="not found"):
        read_deepspeed(tmp_path / "missing")


def test_a_tag_names_one_of_several(shelf: Path) -> None:
    folder = shelf / "small" / "s3_bf16_w3"
    zero, universal = read_deepspeed(folder), read_deepspeed(folder, tag="universal")
    assert read_deepspeed(folder, "global_step3").keys() == zero.keys()
    for name, value in zero["state_dict"].items():
        assert torch.equal(universal["state_dict"][name], value)
    with pytest.raises(CheckpointError, match=r"Expected the checkpoint 'other', got no folder"):
        read_deepspeed(folder, tag="other")


def test_latest_universal_counts_where_the_folder_of_latest_is_gone(
    shelf: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(shelf / "small" / "s3_bf16_w3", tmp_path / "x")
    shutil.rmtree(folder / "global_step3")
    assert detect_deepspeed(folder) == "universal"
    assert read_deepspeed(folder)["deepspeed"]["zero_stage"] == 3


# ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "folder",
    [
        *("s1_fp32/ckpt", "s3_fp32/ckpt", "small/s3_nadam_w3", "small/align2_w2"),
        *("s1_fp32/universal", "small/s3_bf16_w3/universal"),
    ],
)
def test_a_part_is_what_the_whole_has_there(shelf: Path, folder: str) -> None:
    checkpoint = read_deepspeed(shelf / folder)
    dice = random.Random(3)
    for name, saved in checkpoint["state_dict"].items():
        whole = saved.read()
        for _ in range(4):
            offsets = tuple(dice.randrange(n) for n in saved.shape)
            sizes = tuple(dice.randint(1, n - a) for a, n in zip(offsets, saved.shape, strict=True))
            box = Box(offsets, sizes)
            assert torch.equal(saved.read_box(box), whole[box.slices()]), name
            start = dice.randint(0, saved.numel())
            span = Span(start, dice.randint(start, saved.numel()))
            flat = whole.reshape(-1)[span.start : span.stop]
            assert torch.equal(saved.read_span(span, whole.stride()), flat)


def test_pieces_of_any_length_join() -> None:
    dice = random.Random(0)
    for shape in [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 3)]:
        whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for _ in range(20):
            cuts = sorted(dice.randint(0, whole.numel()) for _ in range(dice.randint(0, 4)))
            ends = [*cuts, whole.numel()]
            pieces = []
            for start, stop in zip([0, *cuts], ends, strict=True):
                before, after = dice.randint(0, 3), dice.randint(0, 3)
                flat = torch.full((before + stop - start + after,), -1.0)
                flat[before : before + stop - start] = whole.reshape(-1)[start:stop]
                pieces.append(Piece(flat, before, stop - start))
            saved = join_pieces(shape, torch.float32, pieces)
            assert torch.equal(saved.read(), whole)
            offsets = tuple(dice.randint(0, n) for n in shape)
            sizes = tuple(dice.randint(0, n - a) for a, n in zip(offsets, shape, strict=True))
            box = Box(offsets, sizes)
            assert torch.equal(saved.read_box(box), whole[box.slices()])


def test_a_write_to_what_was_read_stays_out_of_the_files(shelf: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(shelf / "small" / "s2_rms_w3", tmp_path / "x")
    before = {path: path.read_bytes() for path in folder.rglob("*.pt")}
    checkpoint = read_whole(read_deepspeed(folder))
    for value in checkpoint["state_dict"].values():
        value.zero_()
    for state in checkpoint["optimizer_states"][0]["state"].values():
        for value in state.values():
            value.zero_()
    assert {path: path.read_bytes() for path in folder.rglob("*.pt")} == before


def test_the_callers_data_does_not_hold_on_to_the_files(shelf: Path) -> None:
    checkpoint = read_deepspeed(shelf / "small" / "rr1_sgd_w3")
    assert checkpoint["callbacks"]["x"].untyped_storage().nbytes() == 4
