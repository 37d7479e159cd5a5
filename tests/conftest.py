"""Fixtures that all tests share: offline, one thread, and small targets with random weights.

`tiny(...)` takes the arguments of `draftsmith.models.pretrained.tiny_target` and keeps what it made, so that a target
is built once per run; targets are frozen, so sharing is safe (a test that alters weights calls `tiny_target` itself).
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from draftsmith.models.pretrained import byte_tokenizer, tiny_target
from draftsmith.models.target import Target

torch.set_num_threads(1)

_made: dict[str, Target] = {}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Target]:
    """Factory of tiny targets: `tiny(family="qwen3", window=5, dtype=torch.float64)`."""

    def make(**options: Any) -> Target:
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in _made:
            _made[key] = tiny_target(**options)
        return _made[key]

    return make


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The byte-level tokenizer of the tiny target: 256 ids, ChatML template, pad = eos."""
    made = byte_tokenizer(256)
    made.pad_token = made.eos_token
    return made
