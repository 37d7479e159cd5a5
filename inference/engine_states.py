"""States that a serving engine captured, read in place of passes of our own.

vLLM's hidden-state extraction (method `extract_hidden_states`, connector `ExampleHiddenStatesConnector`;
docs.vllm.ai, "Hidden State Extraction") writes one safetensors file per text, and the speculators library keeps them as
`hidden_states/hs_N.safetensors` (speculators 0.9, `data_generation/offline.py`, `train/data.py`):

    hidden_states [n, layers, width]    in the order of the layer ids that the engine was given
    token_ids int64 [n]

An id k is the residual stream that enters layer k, which is our h[k]; the number of layers is the stream before the
final norm. The files do not name their ids, so they are given here, and some samples are run through the target to see
that each stream is nearest to the h[k] it is said to be. Files are found by their token ids, whatever their names.

    draftsmith capture --target TARGET --engine hidden_states --engine_layers '[2, 15, 27, 30]' --out states

Tested by `pytest tests/test_engine_states.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..data.encode import Sample
from ..models.target import States, Target

READABLE = (torch.bfloat16, torch.float16, torch.float32)
LOOKED_AT = 3  # samples that are run through the target, too
FAR = 0.1  # relative distance of a stream from ours beyond which it is of other weights: bf16 kernels differ by about 0.01


class EngineStates:
    """Files of an engine for these samples.

    Raises:
        ValueError: no such files, torch files, a sample without one, other shapes or dtypes, layers that are not there or
            are not what they are said to be.
    """

    def __init__(self, folder: Path | str, layers: Sequence[int], target: Target, samples: Sequence[Sample]) -> None:
        self.folder, self.layers = Path(folder).expanduser(), tuple(layers)
        last = target.facts.layers
        if len(set(self.layers)) != len(self.layers) or any(not 0 <= k <= last for k in self.layers):
            raise ValueError(
                f"engine_layers = {list(layers)}: give distinct ids between 0 and {last}, in the engine's order"
            )
        if last not in self.layers:
            raise ValueError(
                f"engine_layers = {list(layers)}: the teacher needs {last}, the stream before the final norm; let the engine "
                f"extract it, too (speculators: --include-last-layer, its default)"
            )
        self.width, self.dtype = target.facts.width, target.dtype
        self.files = self._find(samples)
        self._compare(target, samples)

    def run(self, target: Target, group: Sequence[Sample], taps: Sequence[int]) -> States:
        """What a pass of the target over these samples, one per right-padded row, gives."""
        missing = sorted(set(taps) - set(self.layers))
        if missing:
            raise ValueError(f"taps {missing} are not among the engine's layers {list(self.layers)}")
        longest = max(map(len, group))
        streams_BTPD = torch.zeros(len(group), longest, len(self.layers), self.width, dtype=self.dtype)
        for row, sample in enumerate(group):
            streams_BTPD[row, : len(sample)] = self._read(self.files[sample.sample_id])
        streams_BTPD = streams_BTPD.to(target.device)
        columns = [self.layers.index(k) for k in taps]
        last_BTD = streams_BTPD[:, :, self.layers.index(target.facts.layers)]
        return States(target.norm(last_BTD), streams_BTPD[:, :, columns] if columns else None)

    def _find(self, samples: Sequence[Sample]) -> dict[int, Path]:
        paths = sorted(self.folder.rglob("*.safetensors"))
        if not paths:
            torch_files = next(iter(sorted(self.folder.rglob("*.pt"))), None)
            if torch_files is not None:
                raise ValueError(
                    f"{self.folder.name}/{torch_files.name}: states in torch files are not read, since such files can hold "
                    "code, and nothing converts them: extract again (vLLM writes safetensors), or leave engine out"
                )
            raise ValueError(f"engine = {str(self.folder)!r}: no folder with safetensors files of states")
        by_ids = {_key(self._tensor(path, "token_ids")): path for path in paths}
        found = {s.sample_id: by_ids.get(_key(s.ids)) for s in samples}
        absent = [i for i, path in found.items() if path is None]
        if absent:
            raise ValueError(
                f"{self.folder.name} has no states of {len(absent)} of {len(samples)} samples (sample {absent[0]} first) under "
                f"these token ids, in {len(paths)} files: the engine must be given our ids (same template, data.max_length)"
            )
        return {i: path for i, path in found.items() if path is not None}

    def _compare(self, target: Target, samples: Sequence[Sample]) -> None:
        """Run some samples: each stream must be near the h[k] that it is said to be, and nearer than to any other."""
        for sample in samples[:: max(len(samples) // LOOKED_AT, 1)][:LOOKED_AT]:
            ids_1T = sample.ids[None].to(target.device)
            positions_1T = torch.arange(len(sample), device=target.device)[None]
            with torch.no_grad():
                ours = target.forward(ids_1T, positions_1T, taps=range(target.facts.layers + 1)).taps_BTPD
            assert ours is not None
            ours_TLD, theirs_TPD = ours[0].float().cpu(), self._read(self.files[sample.sample_id]).float()
            for column, k in enumerate(self.layers):
                off_L = (theirs_TPD[:, column, None] - ours_TLD).flatten(2).norm(dim=(0, 2))
                off_L = off_L / ours_TLD.norm(dim=(0, 2)).clamp(min=1e-6)
                nearest = int(off_L.argmin())
                if nearest != k:
                    raise ValueError(
                        f"{self.folder.name}: layer {k}, number {column + 1} of the file, looks like h[{nearest}] of sample "
                        f"{sample.sample_id} (off by {off_L[nearest]:.2g}, from h[{k}] by {off_L[k]:.2g}): check engine_layers"
                    )
                if off_L[k] > FAR:
                    raise ValueError(
                        f"{self.folder.name}: h[{k}] of sample {sample.sample_id} is off by {off_L[k]:.2g} from this target's: "
                        "the engine ran other weights"
                    )

    def _read(self, path: Path) -> Tensor:
        streams = self._tensor(path, "hidden_states")
        n = len(self._tensor(path, "token_ids"))
        wanted = (n, len(self.layers), self.width)
        if tuple(streams.shape) != wanted:
            raise ValueError(
                f"{path.name}: hidden_states {list(streams.shape)}, expected {list(wanted)} (tokens, layers, width)"
            )
        if streams.dtype not in READABLE:
            raise ValueError(
                f"{path.name}: hidden_states are {_name(streams.dtype)}; {', '.join(map(_name, READABLE))} can be read"
            )
        if streams.dtype != self.dtype:
            raise ValueError(
                f"{path.name}: hidden_states are {_name(streams.dtype)}, the target is loaded in {_name(self.dtype)}: give the "
                f"engine's, --dtype {_name(streams.dtype)}"
            )
        return streams

    def _tensor(self, path: Path, name: str) -> Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path.name}: {name} cannot be read ({error}): no complete file of states") from None


def _key(ids: Tensor) -> bytes:
    return sha256(ids.to(torch.int64).numpy().tobytes()).digest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
