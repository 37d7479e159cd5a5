"""Processes: one, several by DDP, by DeepSpeed ZeRO-1 to 3, or by FSDP2 (train/fsdp.py), through accelerate.

What this file adds to accelerate is refusal: several launchers start one process, or several that do not know of each
other, without an error. Gradients are summed over processes and micro-batches here, whatever the engine averages.
Tests: `pytest tests/test_distributed.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn

from ..configs.runs import RunConfig
from . import fsdp, signs

CACHED = 64  # products, by their shapes


def bound_cached_products() -> None:
    """Let a CPU keep few of the products that it compiles for the shapes it meets, unless somebody said how many.

    In bf16 oneDNN compiles a product for its shapes, PyTorch's layer above it keeps one too: about 0.5 MB each, the last
    1,024 in either. Training supervises another number of rows in every step, so that few shapes return, and both fill
    up, to 1 GB. 64 hold those that return within a step: EAGLE-3, 5 steps deep, takes 1.42 rather than 0.50 GB with 1,024,
    and 16 % more CPU time; where all steps are alike both are as fast (8 are too few: 1.7 times the time). Both sizes are
    asked for at the first product, not when torch is imported.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(CACHED))


def start(config: RunConfig) -> Accelerator:
    """The accelerator of this launch.

    Raises ValueError when the processes that take part are not those that were asked for, by the launcher
    (WORLD_SIZE), by `launch.sh` (DRAFTSMITH_PROCESSES) or by the recipe (`processes`), or when a DeepSpeed file
    contradicts the recipe.
    """
    bound_cached_products()
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    handlers: list[Any] = [DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False)]
    cpu = not torch.cuda.is_available()
    # Who is stuck is found by signs of life, long before an exchange runs out of time.
    group = InitProcessGroupKwargs(timeout=timedelta(minutes=max(60.0, 3 * config.stall_minutes)))
    # With DeepSpeed, cpu=True (or ACCELERATE_USE_CPU) would silently turn DeepSpeed off; the backend says it instead.
    if deepspeed and cpu:
        group.backend = "gloo"
    handlers.append(group)
    if deepspeed and os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true":
        raise ValueError(
            "ACCELERATE_USE_CPU=true switches DeepSpeed off: unset it (DS_ACCELERATOR=cpu is what is needed)"
        )
    if fsdp.asked():
        fsdp.refuse_unless_possible(config)
    refuse_split_rows({})
    accelerator = Accelerator(
        cpu=cpu and not deepspeed,
        kwargs_handlers=handlers,
        log_with=list(config.log.trackers) or None,
        project_dir=config.run if config.log.trackers else None,
    )
    asked = {
        "WORLD_SIZE": os.environ.get("WORLD_SIZE"),
        "launch.sh (DRAFTSMITH_PROCESSES)": os.environ.get("DRAFTSMITH_PROCESSES"),
        "processes": config.processes,
    }
    for who, count in asked.items():
        if count and int(count) != accelerator.num_processes:
            raise ValueError(
                f"{who} asks for {count} processes, {accelerator.num_processes} take part: "
                "on CPUs start several with ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes N"
            )
    if deepspeed and not is_deepspeed(accelerator):
        raise ValueError("the launcher asked for DeepSpeed, accelerate did not start it")
    if fsdp.asked():
        if not is_fsdp(accelerator):
            raise ValueError("the launcher asked for FSDP, accelerate did not start it")
        fsdp.load_models_whole()
    if config.engine not in ("auto", started := engine_of(accelerator)):
        raise ValueError(
            f"engine={config.engine}, the launcher started {started}: use accelerate launch --config_file "
            f"configs/accelerate/{config.engine}.yaml, or engine=auto"
        )
    if is_deepspeed(accelerator):
        load_models_whole()
        fill_deepspeed(accelerator.state.deepspeed_plugin.deepspeed_config, config)
    signs.start(accelerator.process_index, accelerator.num_processes, config.stall_minutes)
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    return accelerator


def is_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.DEEPSPEED


def is_fsdp(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type == DistributedType.FSDP


def refuse_split_rows(settings: dict[str, Any]) -> None:
    """A row is computed by one process. Raises ValueError where the launcher or a DeepSpeed file asks to split it."""
    asked = {
        f"parallelism_config.{name}_size": os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}_SIZE")
        for name in ("cp", "sp")
    }
    asked["sequence_parallel_size of the DeepSpeed file"] = settings.get("sequence_parallel_size")
    for name, size in asked.items():
        if size not in (None, "auto") and int(size) > 1:
            raise ValueError(
                f"{name}={size} splits rows over processes; here each is computed by one, for a drafter's steps read all of its "
                "document, in memory linear in its length: leave it at 1 and set drafter.checkpointing=true, "
                "drafter.deep_share below 1, or a lower batch.rows or batch.row_length"
            )


def engine_of(accelerator: Accelerator) -> str:
    """What shares the work: `ddp` (one process, too), `zero1` to `zero3`, or `fsdp2`."""
    if is_fsdp(accelerator):
        return "fsdp2"
    return f"zero{accelerator.state.deepspeed_plugin.zero_stage}" if is_deepspeed(accelerator) else "ddp"


def fill_deepspeed(settings: dict[str, Any], config: RunConfig) -> None:
    """The recipe is the one source of batch size, accumulation and clipping: a DeepSpeed file says the same or `auto`."""
    refuse_split_rows(settings)
    wanted = {
        "gradient_accumulation_steps": config.batch.accumulate,
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: rows are dealt out by the stream
        "gradient_clipping": config.optim.clip,
    }
    keys = {"gradient_accumulation_steps": "batch.accumulate", "gradient_clipping": "optim.clip"}
    for name, value in wanted.items():
        said = settings.get(name, "auto")
        if said != "auto" and said != value and name in keys:
            raise ValueError(
                f"the DeepSpeed file says {name}={said!r}, the recipe {keys[name]}={value!r}: write 'auto' there"
            )
        settings[name] = value
    for section in ("optimizer", "scheduler"):
        if section in settings:
            raise ValueError(f"the DeepSpeed file has a section {section!r}: the recipe's `optim` decides, remove it")
    if any(settings.get(p, {}).get("enabled") not in (None, False, "auto") for p in ("bf16", "fp16")):
        raise ValueError("the DeepSpeed file enables bf16 or fp16: the drafter keeps fp32 masters under bf16 autocast")
    for precision in ("bf16", "fp16"):
        settings[precision] = {"enabled": False}
    if config.optim.name == "muon":
        raise ValueError("optim.name=muon runs without DeepSpeed only: its update needs whole matrices, ZeRO cuts them")


class Whole(nn.Module):
    """What ZeRO-3 wraps: parameters are cut at rest, and whole on every process in `inner`'s forward and its backward, where
    gradients are reduced as they come.

    They are gathered once for each, not module by module: losses read weights outside of their modules' forward, and which
    modules take part may depend on a process's data, which must not decide about exchanges. So DeepSpeed is shown one module
    that owns all parameters, and `inner` is no child of it.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = [inner]
        for i, parameter in enumerate(inner.parameters()):
            self.register_parameter(f"parameter_{i}", parameter)

    def forward(self, *inputs: Any) -> Any:
        return self.inner[0](*inputs)


def wrap(
    accelerator: Accelerator, model: nn.Module, optimisers: list[torch.optim.Optimizer]
) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model as the engine wants it, and the optimisers whose groups carry the learning rate."""
    if is_deepspeed(accelerator):
        (optimiser,) = optimisers
        wrapped, prepared = accelerator.prepare(Whole(model) if engine_of(accelerator) == "zero3" else model, optimiser)
        load_models_whole()
        share_masters(zero_of(prepared))
        return wrapped, [prepared]
    if is_fsdp(accelerator):
        return fsdp.wrap(model, optimisers, accelerator.device), optimisers
    return accelerator.prepare_model(model, evaluation_mode=False), optimisers


def until_last(accelerator: Accelerator, model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Micro-batches before the last one keep their gradients to themselves, where that costs no memory."""
    return nullcontext() if last or is_fsdp(accelerator) else accelerator.no_sync(model)


def load_models_whole() -> None:
    """Under ZeRO-3 accelerate makes transformers cut whatever it loads from then on, frozen targets too, which nothing would
    put together."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def zero_of(optimiser: Any) -> Any:
    """DeepSpeed's ZeRO optimiser below accelerate's wrapper."""
    return optimiser if hasattr(optimiser, "averaged_gradients") else optimiser.optimizer


def flats_of(zero: Any) -> list[tuple[Tensor, Tensor]]:
    """(what the optimiser updates, what of the module's parameters it is), this process's part of each group, flat."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
        return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
    ranks = [torch.distributed.get_rank(group) for group in zero.real_dp_process_group]
    cut = [parts[rank] for parts, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
    return list(zip(zero.single_partition_of_fp32_groups, cut, strict=True))


def share_masters(zero: Any) -> None:
    """Parameters are fp32: let ZeRO update them in place, where it would keep a second fp32 copy of its part. One that is
    offloaded to another device stays."""
    pairs = [(flat, own) for flat, own in flats_of(zero) if flat.device == own.device and flat.dtype == own.dtype]
    if not any(flat.data_ptr() != own.data_ptr() for flat, own in pairs):
        return
    for flat, own in pairs:
        flat.data = own.data
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        zero._link_all_hp_params()  # parameters' views of the old copies


def cut(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that ZeRO-3 has cut."""
    return [p for p in parameters if hasattr(p, "ds_id")]


@contextmanager
def whole(parameters: Iterable[nn.Parameter], write: bool = False) -> Iterator[None]:
    """While open, these are whole in every process, under any engine; every process opens it. With `write`, what the main
    process changes in them stays."""
    parameters = list(parameters)
    if found := cut(parameters):
        from deepspeed.runtime.zero import GatheredParameters

        signs.entering()
        with GatheredParameters(found, modifier_rank=0 if write else None):
            yield
    else:
        with fsdp.whole(parameters, write):
            yield


def put_together(module: nn.Module) -> None:
    """The end of training: parameters are whole from here on, in every process; every process calls it."""
    if found := cut(module.parameters()):
        found[0].all_gather(param_list=found)  # type: ignore[attr-defined]
    fsdp.put_together(module)


def total(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Sum of each value over all processes, in float64."""
    if accelerator.num_processes == 1:
        return [float(v) for v in values]
    signs.entering()
    summed = torch.tensor(list(values), dtype=torch.float64, device=accelerator.device)
    torch.distributed.all_reduce(summed)
    return summed.tolist()


def largest(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """The largest of each value over all processes."""
    if accelerator.num_processes == 1:
        return [float(v) for v in values]
    signs.entering()
    most = torch.tensor(list(values), dtype=torch.float64, device=accelerator.device)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
    return most.tolist()


def total_pairs(accelerator: Accelerator, pairs: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Sum (sum, count) pairs over all processes; a name that some process lacks counts as (0, 0) there."""
    if accelerator.num_processes == 1:
        return pairs
    signs.entering()
    everyone: list[Any] = [None] * accelerator.num_processes
    torch.distributed.all_gather_object(everyone, pairs)
    names = sorted({name for one in everyone for name in one})
    zero = (0.0, 0.0)
    return {
        n: (sum(one.get(n, zero)[0] for one in everyone), sum(one.get(n, zero)[1] for one in everyone)) for n in names
    }


def shared(accelerator: Accelerator, value: Any) -> Any:
    """The main process's value, in every process."""
    everyone = [value]
    signs.entering()
    if accelerator.num_processes > 1:
        torch.distributed.broadcast_object_list(everyone, src=0)
    return everyone[0]


def union(accelerator: Accelerator, ids: list[int]) -> list[int]:
    """The distinct ids of all processes, sorted."""
    everyone: list[Any] = [ids]
    signs.entering()
    if accelerator.num_processes > 1:
        everyone = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(everyone, ids)
    return sorted({i for one in everyone for i in one})


def backward(accelerator: Accelerator, model: Any, loss: Tensor, last: bool) -> None:
    """Add this micro-batch's gradients. `loss` is this process's part of the loss of the whole optimiser step; DDP and
    DeepSpeed divide by the number of processes, which is undone here."""
    loss = loss * accelerator.num_processes
    if is_deepspeed(accelerator):
        model.set_gradient_accumulation_boundary(is_boundary=last)
        model.backward(loss, scale_wrt_gas=False)
    else:
        loss.backward()


def step(accelerator: Accelerator, model: Any, optimisers: list[torch.optim.Optimizer], clip: float) -> float:
    """Clip, update, forget the gradients. Returns the gradient norm before clipping; when it is not finite, nothing is
    updated (DeepSpeed's own check apart)."""
    if is_deepspeed(accelerator):
        model.step()
        return float(model.get_global_grad_norm() or 0.0)
    norm = float(fsdp.full(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
    if norm == norm and norm != float("inf"):
        for optimiser in optimisers:
            optimiser.step()
    discard(accelerator, model, optimisers)
    return norm


def discard(accelerator: Accelerator, model: Any, optimisers: list[torch.optim.Optimizer]) -> None:
    """Forget the gradients of a window that is skipped or interrupted."""
    if is_deepspeed(accelerator):
        zero = model.optimizer
        zero.zero_grad(set_to_none=True)
        for held in (zero.averaged_gradients, getattr(zero, "all_grad_tensors", {})):
            for group in held:
                held[group] = None
        return
    for optimiser in optimisers:
        optimiser.zero_grad(set_to_none=True)


def run_folder(config: RunConfig) -> Path:
    return Path(config.run).expanduser()
