"""The frozen target, shared parts, and one file per drafting method.

Letters of shape suffixes, for the whole repository (`hidden_BTD` has shape [batch, time, width]):

| B | batch rows            | N | tree nodes (anchor excluded) | V | target vocabulary | P | taps (residual streams)   |
| T | time, tokens of a row | M | N + 1, anchor first          | W | draft vocabulary  | S | slots (cache, or queries) |
| K | depth of a draft      | R | supervised rows, gathered    | D | width             | H | heads                     |

`METHODS` is the table of methods. Each value is a drafter class with a frozen `Config` dataclass (see
`models/drafter.py` for the contract); to add one, write its file and add its line here.
"""

from typing import Any

from .dual_view import DualView
from .eagle import Eagle
from .eagle3 import Eagle3
from .falcon import Falcon
from .hydra import Hydra
from .medusa import Medusa
from .peagle import PEagle
from .prompt_tokens import PromptTokens

METHODS: dict[str, Any] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "peagle": PEagle,
    "falcon": Falcon,
    "dual_view": DualView,
    "prompt_tokens": PromptTokens,
}
