from __future__ import annotations

import torch
from torch import nn

from lightning_zeroplus.checkpoint import align_names, find_mismatches
from lightning_zeroplus.layout.names import plain_name


def test_only_whole_parts_of_a_name_are_wrappers() -> None:
    assert plain_name("a._orig_mod.b._checkpoint_wrapped_module.c") == "a.b.c"
    assert plain_name("my_orig_mod.module.c") == "my_orig_mod.module.c"


def test_a_state_finds_a_compiled_module_and_back() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.Sequential(torch.compile(nn.Linear(2, 2), backend="eager"))
    wrapped.load_state_dict(align_names(plain.state_dict(), wrapped.state_dict()))
    assert torch.equal(wrapped[0]._orig_mod.weight, plain[0].weight)
    plain.load_state_dict(align_names(wrapped.state_dict(), plain.state_dict()))


def test_all_mismatches_are_listed() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(3), "c": 1}
    given = {"b": torch.zeros(4), "c": torch.zeros(1), "d": 0}
    assert find_mismatches(expected, given) == [
        "a is missing",
        "b is [4] instead of [3]",
        "d is unexpected",
    ]
    assert find_mismatches(expected, {"b": expected["b"], "c": 1}, optional={"a"}) == []
