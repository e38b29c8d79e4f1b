"""All ways of touching parameters: `CASES` by name. Importing this file registers them."""

from tests.local.access import autograd, compiled, kinds, modules, reads, recipes, training
from tests.local.access.scene import CASES, Case, Scene, ShardedScene, run_case

__all__ = [
    "CASES",
    "Case",
    "Scene",
    "ShardedScene",
    "autograd",
    "compiled",
    "kinds",
    "modules",
    "reads",
    "recipes",
    "run_case",
    "training",
]
