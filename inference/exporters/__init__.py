"""Export forms, one file per method, and their table.

To add one: a file with an `EXPORTER` (see `layout.py`), and its line here. Export, load, check, push and convert
iterate over the table, and so do tests/test_export.py and tests/test_check.py. Merged denoisers have a table of their
own, `SCHEMAS` (schema.py, tests/test_merge.py).
"""

from .dflash import EXPORTER as DFLASH
from .draft_model import EXPORTER as DRAFT_MODEL
from .dspark import EXPORTER as DSPARK
from .dual_view import EXPORTER as DUAL_VIEW
from .eagle import EXPORTER as EAGLE
from .eagle3 import EXPORTER as EAGLE3
from .falcon import EXPORTER as FALCON
from .fast_dllm_v2 import SCHEMA as FAST_DLLM_V2
from .hydra import EXPORTER as HYDRA
from .layout import Exporter
from .medusa import EXPORTER as MEDUSA
from .pard import EXPORTER as PARD
from .peagle import EXPORTER as PEAGLE
from .plain import SCHEMA as PLAIN
from .prompt_tokens import EXPORTER as PROMPT_TOKENS
from .schema import Schema
from .sdar import SCHEMA as SDAR

EXPORTERS: dict[str, Exporter] = {
    "medusa": MEDUSA,
    "hydra": HYDRA,
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "draft_model": DRAFT_MODEL,
    "pard": PARD,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "peagle": PEAGLE,
    "falcon": FALCON,
    "dual_view": DUAL_VIEW,
    "prompt_tokens": PROMPT_TOKENS,
}

SCHEMAS: dict[str, Schema] = {
    "plain": PLAIN,
    "sdar": SDAR,
    "fast_dllm_v2": FAST_DLLM_V2,
}
