from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.plugin.scenes import close

pytestmark = [pytest.mark.dist, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch
from tests.plugin.scenes import Net, data, make_trainer, seed_everything, weights_of

def main():
    strategy, path = sys.argv[1:]
    seed_everything(5, verbose=False)
    module = Net()
    trainer = make_trainer(strategy, 2)
    trainer.fit(module, data(), data(seed=1))
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
    trainer.test(module, data(seed=1), verbose=False)
    if trainer.global_rank == 0:
        torch.save({"weights": weights_of(module), "metrics": metrics}, path)

if __name__ == "__main__":
    main()
"""


def launch(folder: Path, strategy: str, *command: str) -> dict[str, dict[str, torch.Tensor]]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    result = folder / f"{strategy}.pt"
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*(command or (sys.executable,)), str(script), strategy, str(result)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, dict[str, torch.Tensor]] = torch.load(result)
    return loaded


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    return launch(tmp_path_factory.mktemp("ddp"), "ddp")


@pytest.mark.parametrize(
    "strategy",
    [
        "zeroplus_stage_3_spawn",
        "zeroplus_stage_1_fork",
        "zeroplus_stage_2",
        pytest.param("zeroplus_stage_3", marks=pytest.mark.full),
    ],
)
def test_it_trains_like_ddp(
    tmp_path: Path, ddp: dict[str, dict[str, torch.Tensor]], strategy: str
) -> None:
    got = launch(tmp_path, strategy)
    close(got["weights"], ddp["weights"])
    assert got["metrics"] == pytest.approx(ddp["metrics"], rel=1e-5)


def test_torchrun_starts_it(tmp_path: Path, ddp: dict[str, dict[str, torch.Tensor]]) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    got = launch(tmp_path, "zeroplus_stage_3", *torchrun)
    close(got["weights"], ddp["weights"])
