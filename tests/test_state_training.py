"""Every method that can train from captured states does so from every format: near what live states give, and through the
command; what a format cannot give is refused by name (B30, PROMISES 11).

Run: pytest tests/test_state_training.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.configs.parse import UsageError
from draftsmith.data.batch import Batch, Likeliest, TargetOut
from draftsmith.data.encode import Sample
from draftsmith.data.packing import make_batch
from draftsmith.models import METHODS
from draftsmith.models.pretrained import tiny_target
from draftsmith.models.target import Target, live_states
from draftsmith.train import distill_draft

SHARED = "target.name=tiny target.dtype=float32 precision=fp32 data.max_length=512 batch.row_length=512 budget.steps=1"
SMALL_LM = ("drafter.lm.layers=2",)
TINY = {
    "draft_model": SMALL_LM,
    "pard": (*SMALL_LM, "drafter.objective=kl"),
    "dspark": ("drafter.rank=8",),
}
CAPTURED = [name for name, method in METHODS.items() if not {"module", "kv"} & method.loss_needs]
FORMATS = {  # settings, and how far the loss may be from that of live states
    "float32": (("states.last_stored=float32",), 1e-5),
    "int8": (("states.last_stored=int8",), 0.02),
    "int4": (("states.last_stored=int8",), 0.2),
}


def config_of(method: str, run: Path, *settings: str) -> Any:
    argv = [f"method={method}", *SHARED.split(), *TINY.get(method, ()), "data.limit=24", f"run={run}", *settings]
    return distill_draft.read_config(argv, "test")


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Random ids; all but the first few are supervised."""
    dice = torch.Generator().manual_seed(0)
    lengths = (17, 23, 30, 21, 34, 26)
    return [Sample(i, torch.randint(3, 250, (n,), generator=dice), torch.arange(n) > 4) for i, n in enumerate(lengths)]


ONE = SimpleNamespace(is_main_process=False, process_index=0, num_processes=1)


def losses(drafter: Any, batch: Any, out: TargetOut) -> tuple[dict[str, Tensor], list[Tensor]]:
    drafter.zero_grad()
    terms = drafter(batch, out, 0.5)
    torch.stack(list(terms.losses.values())).sum().backward()
    return {k: x.detach() for k, x in terms.losses.items()}, [
        p.grad for p in drafter.parameters() if p.grad is not None
    ]


@pytest.mark.parametrize("method", CAPTURED)
def test_every_method_trains_from_every_format(
    method: str, target: Target, samples: list[Sample], tmp_path: Path
) -> None:
    """One loss and its gradients from live states, and from captured ones of each format. A teacher that names all ids
    is one of all logits, to the rounding of fp16."""
    torch.manual_seed(0)
    drafter, _ = distill_draft.build_drafter(config_of(method, tmp_path), target, samples)
    batch = make_batch([samples[:3], samples[3:]], None, 0, 0)
    want, by_want = losses(drafter, batch, live_states(target, drafter, batch))
    teachers = (
        {"last_hidden": (), "top_k": ("states.top_k=256",)} if "last_hidden" not in drafter.loss_needs else {"auto": ()}
    )
    for teacher, more in teachers.items():
        for stored, (settings, bound) in FORMATS.items():
            settings = (f"states.stored={stored}", f"states.teacher={teacher}", *settings, *more)
            config = config_of(method, tmp_path, *settings)
            usable, states_of, _ = distill_draft.states(
                config,
                target,
                drafter,
                samples,
                tmp_path,
                f"{teacher}-{stored}",
                ONE,  # type: ignore[arg-type]
            )
            out = states_of(batch)
            assert len(usable) == len(samples) and (out.likeliest is not None) == (teacher == "top_k")
            assert (out.last_hidden_BTD is None) == (teacher == "top_k")
            got, by_got = losses(drafter, batch, out)
            for name in want:
                torch.testing.assert_close(got[name], want[name], rtol=bound + (teacher == "top_k") * 2e-3, atol=1e-4)
            assert len(by_got) == len(by_want) and all(bool(g.isfinite().all()) for g in by_got)


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
def test_few_likely_ids_are_near_all_of_them(
    method: str, target: Target, samples: list[Sample], tmp_path: Path
) -> None:
    """With a reduced draft vocabulary: the gradient points where the whole teacher's does."""
    torch.manual_seed(0)
    drafter, _ = distill_draft.build_drafter(config_of(method, tmp_path, "draft_vocab=100"), target, samples)
    batch = make_batch([samples[:3], samples[3:]], None, 0, 0)
    _, by_want = losses(drafter, batch, live_states(target, drafter, batch))
    alike = []
    for k in (4, 32, 256):
        config = config_of(
            method, tmp_path, "states.teacher=top_k", f"states.top_k={k}", "states.stored=float32", "draft_vocab=100"
        )
        _, states_of, _ = distill_draft.states(config, target, drafter, samples, tmp_path, str(k), ONE)  # type: ignore[arg-type]
        _, by_got = losses(drafter, batch, states_of(batch))
        a, b = (torch.cat([g.flatten() for g in by]) for by in (by_want, by_got))
        alike.append(float(torch.cosine_similarity(a, b, dim=0)))
    assert alike == sorted(alike) and alike[1] > 0.9 and alike[2] > 0.9995


def test_a_run_from_start_to_export_and_on(tmp_path: Path) -> None:
    """By the command: captured once in the small formats, read again by the next launch."""
    argv = ["--config", str(Path(__file__).parents[1] / "configs/quick.yaml"), "data.limit=20", "draft_vocab=100"]
    argv += ["states.stored=int4", "states.teacher=top_k", "states.top_k=8", f"run={tmp_path / 'run'}"]
    argv += ["evaluate.probe_prompts=0", "evaluate.conversations=2", "log.progress=false"]
    assert distill_draft.main([*argv, "budget.steps=2"]) == 0
    index = json.loads((tmp_path / "run/states/train/index.json").read_text())
    kept = {name: index["fields"][name] for name in ("stored", "last_hidden", "last_stored", "top_k")}
    assert kept == {"stored": "int4", "last_hidden": False, "last_stored": "none", "top_k": 8}
    shard = next((tmp_path / "run/states/train").glob("shard-*"))
    assert load_file(shard)["taps"].dtype == torch.uint8
    before = shard.stat().st_mtime_ns
    assert distill_draft.main([*argv, "budget.steps=3"]) == 0
    assert shard.stat().st_mtime_ns == before
    with pytest.raises(ValueError, match="states of another top_k: 8 there, 9 here"):
        distill_draft.main(
            [
                *argv,
                "budget.steps=3",
                "states.top_k=9",
                f"run={tmp_path / 'other'}",
                f"states.folder={tmp_path / 'run/states'}",
            ]
        )


@pytest.mark.parametrize(
    ("method", "settings", "words"),
    [
        ("medusa", ("states.teacher=top_k",), "method medusa reads the target's last hidden states"),
        ("eagle", ("states.teacher=top_k",), "set states.teacher=last_hidden, and states.last_stored=int8"),
        ("eagle3", ("states.teacher=top_k", "drafter.objective=topk_ce"), "topk_ce needs all of the target's logits"),
        ("eagle3", ("states.top_k=0",), "states.top_k must be at least 1"),
        ("eagle3", ("states.verify=-1",), "states.verify at least 0"),
        ("eagle3", ("states.stored=int3",), "int3"),
    ],
)
def test_what_cannot_be_is_refused_before_the_target_is_loaded(
    method: str, settings: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, UsageError)) as error:
        config_of(method, tmp_path, *settings)
    assert words in str(error.value)


def test_auto_is_what_a_method_allows(tmp_path: Path) -> None:
    states = config_of("eagle3", tmp_path, "states.teacher=top_k", "states.top_k=9").states
    assert states.keeps(METHODS["eagle3"].loss_needs, "kl") == (False, 9)
    assert states.keeps(METHODS["eagle3"].loss_needs, "kl + topk_ce") == (True, 0)
    assert states.keeps(METHODS["hydra"].loss_needs, "kl") == (True, 0)
    assert states.keeps(frozenset({"ids", "taps"}), "") == (False, 0)


@pytest.mark.parametrize("teacher", ["last_hidden", "top_k"])
def test_b30_no_probabilities_of_all_tokens_and_rows(teacher: str) -> None:
    """B = 1, S = 512, V = 32,000, W = 1,000: no tensor of a step is as large as S x V floats, and the optimiser has the
    drafter's parameters alone. (Loss and acceptance against the dense formula: tests/test_losses.py.)"""
    length, vocab = 512, 32_000
    target = tiny_target(width=16, layers=4, vocab=vocab, tokens=256)
    facts, draft_ids_W = replace(target.facts, tokens=vocab), torch.arange(0, vocab, 32)
    torch.manual_seed(0)
    drafter: Any = METHODS["eagle3"](METHODS["eagle3"].Config(steps=2), facts, draft_ids_W)
    drafter.init_from_target(target)
    ids_BT = torch.randint(3, 250, (1, length))
    data = Batch(
        ids_BT, torch.ones(1, length, dtype=torch.bool), torch.arange(length)[None], torch.zeros(1, length).long()
    )
    out = live_states(target, drafter, data)
    assert out.last_hidden_BTD is not None
    logits_TV = target.head(out.last_hidden_BTD[0])
    log_p_TV = logits_TV.log_softmax(-1)
    out.log_z_BT, out.top_BT = logits_TV.logsumexp(-1)[None], logits_TV.argmax(-1)[None]
    if teacher == "top_k":
        best = log_p_TV.topk(64, dim=-1)
        tail_T = 1 - best.values.exp().sum(-1)
        out.likeliest, out.last_hidden_BTD = Likeliest(best.indices[None].int(), best.values[None], tail_T[None]), None
    sizes: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            sizes.extend(
                x.numel() * x.element_size()
                for x in (made if isinstance(made, tuple | list) else [made])
                if isinstance(x, Tensor) and x._base is None
            )
            return made

    trained = [p for p in drafter.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained)
    with Watch():
        sum(drafter(data, out, 0.0).losses.values(), torch.zeros(())).backward()
        optimiser.step()
    assert max(sizes) < length * vocab * 4 / 4
    frozen = {id(p) for p in target.parameters()}
    assert not frozen & {id(p) for group in optimiser.param_groups for p in group["params"]}
