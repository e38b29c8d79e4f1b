"""Train the demo's GPT from a YAML file: `python examples/train_cli.py fit -c examples/gpt.yaml`.

Any setting of the strategy can be overridden: `--trainer.strategy.init_args.stage=2`.
"""

from lightning.pytorch.cli import LightningCLI

import lightning_zeroplus  # noqa: F401  # registers the strategy names
from lightning_zeroplus.cli.demo_model import GPT, StdlibText

if __name__ == "__main__":
    LightningCLI(GPT, StdlibText, save_config_callback=None)
