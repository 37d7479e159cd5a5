"""The frozen target, shared parts, and one file per drafting method.

Letters of shape suffixes, for the whole repository (`hidden_BTD` has shape [batch, time, width]):

| B | batch rows            | N | tree nodes (anchor excluded) | V | target vocabulary | P | taps (residual streams)   |
| T | time, tokens of a row | M | N + 1, anchor first          | W | draft vocabulary  | S | slots (cache, or queries) |
| K | depth of a draft      | R | supervised rows, gathered    | D | width             | H | heads                     |

`METHODS` is the table of methods. Each value is a drafter class with a frozen `Config` dataclass (see
`models/drafter.py` for the contract); to add one, write its file and add its line here. `TRAINING_FREE` is the table of
drafters that have no weights and propose whole trees; one more of them also gets a line in `FreeSettings`.
"""

from dataclasses import dataclass, field
from typing import Any

from .dflash import DFlash
from .draft_model import DraftModel
from .dspark import DSpark
from .dual_view import DualView
from .eagle import Eagle
from .eagle3 import Eagle3
from .falcon import Falcon
from .hydra import Hydra
from .jacobi import Jacobi, JacobiConfig
from .lookahead import Lookahead, LookaheadConfig
from .medusa import Medusa
from .ngram import Ngram, NgramConfig
from .pard import Pard
from .peagle import PEagle
from .prompt_tokens import PromptTokens
from .recycling import Recycling, RecyclingConfig
from .suffix import Suffix, SuffixConfig

METHODS: dict[str, Any] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "eagle": Eagle,
    "eagle3": Eagle3,
    "draft_model": DraftModel,
    "pard": Pard,
    "dflash": DFlash,
    "dspark": DSpark,
    "peagle": PEagle,
    "falcon": Falcon,
    "dual_view": DualView,
    "prompt_tokens": PromptTokens,
}

TRAINING_FREE: dict[str, Any] = {
    "ngram": Ngram,
    "suffix": Suffix,
    "recycling": Recycling,
    "lookahead": Lookahead,
    "jacobi": Jacobi,
}


@dataclass(frozen=True)
class FreeSettings:
    """The settings of each training-free drafter, by its name."""

    ngram: NgramConfig = field(default_factory=NgramConfig)
    """Of `--model ngram`: look the newest tokens up in the text, copy what followed."""
    suffix: SuffixConfig = field(default_factory=SuffixConfig)
    """Of `--model suffix`: continue as the text was most often continued."""
    recycling: RecyclingConfig = field(default_factory=RecyclingConfig)
    """Of `--model recycling`: a tree of the target's earlier top tokens."""
    lookahead: LookaheadConfig = field(default_factory=LookaheadConfig)
    """Of `--model lookahead`: n-grams of a Jacobi window that runs beside the candidates."""
    jacobi: JacobiConfig = field(default_factory=JacobiConfig)
    """Of `--model jacobi`: a block of guesses, corrected all at once until they stay; decodes consistency models."""
