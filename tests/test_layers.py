"""Layers of drafters that draft through packed weights: same numbers, no stale copy, nothing of it in training."""

import copy
import io

import pytest
import torch

from draftsmith.models.layers import MLP, Attention, Linear

DTYPES = [torch.float32, torch.bfloat16]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-6 if a.dtype == torch.float32 else 2e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_drafting_goes_by_what_training_computes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    attention, mlp = Attention(48, 32, 4, 2, 8).to(dtype), MLP(32, 48, "silu").to(dtype)
    x, y = torch.randn(2, 3, 48, dtype=dtype), torch.randn(2, 3, 32, dtype=dtype)
    angle = torch.rand(2, 3, 4).repeat(1, 1, 2)
    angles = angle.cos(), angle.sin()
    want = [x.detach() for x in (attention.queries(x, angles), *attention.keys_values(x, angles), mlp(y))]
    for module in (attention, mlp):
        module.requires_grad_(False)
    with torch.no_grad():
        for a, b in zip((*attention.project(x, angles), mlp(y)), want, strict=True):
            close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_weights_that_change_are_read_anew(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    linear, x = Linear(32, 48, bias).to(dtype).requires_grad_(False), torch.randn(5, 32, dtype=dtype)

    def want() -> torch.Tensor:
        return torch.nn.functional.linear(x, linear.weight, linear.bias)

    with torch.no_grad():
        close(linear(x), want())
        linear.weight.mul_(-2)
        close(linear(x), want())
        if bias:
            linear.bias.add_(3)
            close(linear(x), want())
        before = linear(x)
        other = copy.deepcopy(linear)
        other.weight.zero_()
        file = io.BytesIO()
        torch.save(linear, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert torch.equal(linear(x), before) and torch.equal(again(x), before)
        assert torch.equal(other(x), torch.zeros_like(before) if linear.bias is None else linear.bias.expand(5, -1))
    assert set(linear.state_dict()) == ({"weight", "bias"} if bias else {"weight"})


def test_training_is_a_plain_linear_layer() -> None:
    linear, x = Linear(8, 4), torch.randn(3, 8)
    linear(x).sum().backward()
    assert linear.weight.grad is not None and linear.alone.product() is None
    with torch.no_grad():
        linear(x)
    assert linear.alone.marks == []  # weights that learn are not packed between two steps
