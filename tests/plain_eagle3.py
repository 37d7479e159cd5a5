"""EAGLE-3's training step as the paper's formula reads (arXiv:2503.01840, section 3.2, and its training code): every step
takes all L rows of one document, masks what they may not see, and makes all logits. Kept as it is, to be measured against.

Attention of step s, row t, over the true features of rows up to t and the row's own steps 1 .. s, in two forms:
`columns`, which are L x L scores with one more column per step (the training code's); `joined`, SDPA over the keys of all
steps side by side under an explicit mask.

Used by test_step.py and bench/train_step.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.eagle3 import Eagle3

Pairs = list[tuple[Tensor, Tensor]]  # keys and values [G, L, d] of each step


def plain_losses(
    drafter: Eagle3, ids_L: Tensor, taps_LPD: Tensor, teacher_LW: Tensor, embed_VD: Tensor, attention: str
) -> list[Tensor]:
    """Per depth the sum over rows of KL(teacher || draft): rows t whose token t + 1 + depth is in the document, all of it
    supervised. `teacher_LW`: the target's logits of the draft vocabulary after each token. Takes the weights alone of
    `drafter`, of the default form."""
    layer, eps, length = drafter.midlayer, drafter.facts.norm_eps, len(ids_L)
    heads, groups = layer.self_attn.heads, layer.self_attn.kv_heads
    may_see_LL = torch.ones(length, length, dtype=torch.bool).tril()
    p_LW = teacher_LW.softmax(-1)
    negative_entropy_L = (p_LW * teacher_LW.log_softmax(-1)).sum(-1)

    def norm(x_LD: Tensor, weight_D: Tensor) -> Tensor:
        return F.rms_norm(x_LD, weight_D.shape, weight_D, eps)

    def turn(x_HLd: Tensor, positions_L: Tensor) -> Tensor:
        angles_Ld = (positions_L[:, None] * drafter.rotary.inverse).repeat(1, 2)  # fp32, as the drafter has them
        left, right = x_HLd.chunk(2, -1)
        return x_HLd * angles_Ld.cos().to(x_HLd) + torch.cat([-right, left], -1) * angles_Ld.sin().to(x_HLd)

    feature_LD = taps_LPD.flatten(1) @ drafter.fc.weight.T
    keys: Pairs = []
    losses = []
    for step in range(drafter.config.steps):
        shifted_L = ids_L.roll(-1 - step)
        joined_LC = torch.cat(
            [norm(embed_VD[shifted_L], layer.input_layernorm.weight), norm(feature_LD, layer.hidden_norm.weight)], -1
        )
        positions_L = torch.arange(length) + step
        q_HLd = turn(
            (joined_LC @ layer.self_attn.q_proj.weight.T).unflatten(-1, (heads, -1)).transpose(0, 1), positions_L
        )
        k_GLd = turn(
            (joined_LC @ layer.self_attn.k_proj.weight.T).unflatten(-1, (groups, -1)).transpose(0, 1), positions_L
        )
        v_GLd = (joined_LC @ layer.self_attn.v_proj.weight.T).unflatten(-1, (groups, -1)).transpose(0, 1)
        keys.append((k_GLd.repeat_interleave(heads // groups, 0), v_GLd.repeat_interleave(heads // groups, 0)))
        attended_HLd = ATTENTION[attention](q_HLd, keys, may_see_LL)
        hidden_LD = feature_LD + attended_HLd.transpose(0, 1).flatten(1) @ layer.self_attn.o_proj.weight.T
        x_LD = norm(hidden_LD, layer.post_attention_layernorm.weight)
        gated_LI = F.silu(x_LD @ layer.mlp.gate_proj.weight.T) * (x_LD @ layer.mlp.up_proj.weight.T)
        feature_LD = hidden_LD + gated_LI @ layer.mlp.down_proj.weight.T
        log_q_LW = (norm(feature_LD, drafter.norm.weight) @ drafter.lm_head.weight.T).log_softmax(-1)
        told_L = torch.arange(length).roll(-1 - step)  # the teacher of row t at depth d is what follows token t + d
        value_L = negative_entropy_L[told_L] - (p_LW[told_L] * log_q_LW).sum(-1)
        losses.append((value_L * (torch.arange(length) + 2 + step < length)).sum())
    return losses


def columns(q_HLd: Tensor, keys: Pairs, may_see_LL: Tensor) -> Tensor:
    """[H, L, d]."""
    (k_HLd, v_HLd), *own = keys
    scale = q_HLd.shape[-1] ** -0.5
    scores_HLS = (q_HLd @ k_HLd.transpose(1, 2) * scale).masked_fill(~may_see_LL, -torch.inf)
    more = [(q_HLd * k_HLd).sum(-1, keepdim=True) * scale for k_HLd, _ in own]
    weights_HLS = torch.cat([scores_HLS, *more], -1).softmax(-1)
    out_HLd = weights_HLS[..., : len(may_see_LL)] @ v_HLd
    for i, (_, v_HLd) in enumerate(own):
        out_HLd = out_HLd + weights_HLS[..., len(may_see_LL) + i, None] * v_HLd
    return out_HLd


def joined(q_HLd: Tensor, keys: Pairs, may_see_LL: Tensor) -> Tensor:
    """[H, L, d]."""
    own_LL = torch.eye(len(may_see_LL), dtype=torch.bool)
    see_LS = torch.cat([may_see_LL, *[own_LL] * (len(keys) - 1)], -1)
    k_HSd, v_HSd = (torch.cat(parts, 1) for parts in zip(*keys, strict=True))
    return F.scaled_dot_product_attention(q_HLd[None], k_HSd[None], v_HSd[None], see_LS)[0]


ATTENTION = {"columns": columns, "joined": joined}
