"""The layers of chapters 03 to 08, each against something independent: a loop, or torch's own."""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from chapters.attention import Attention, attend, causal_mask
from chapters.chunk import chunk_rule, gated_delta_rule
from chapters.deltanet import DeltaNet, causal_conv, recurrent_rule
from chapters.mlp import MLP
from chapters.norm import GatedRMSNorm, RMSNorm
from chapters.rope import apply_rope, rope_tables
from checkpoints import PITFALL
from scripted import CLOSE, World


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("layers"), length=1)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a, b, atol=CLOSE):
    return a.shape == b.shape and float((a - b).detach().abs().max()) < atol


# ---- norms

class NoOne(RMSNorm):
    """Fault: w instead of 1 + w."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class TwoOnes(RMSNorm):
    """Fault: the 1 is added twice, once when loading."""

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], 2 + self.weight, self.eps)


def plain_at_zero(norm, x):
    """w = 0 is plain normalisation, and w = 1 twice that."""
    norm.weight.data = torch.zeros_like(norm.weight)
    at_zero = norm(x)
    norm.weight.data = torch.ones_like(norm.weight)
    plain = F.rms_norm(x, x.shape[-1:], eps=1e-6)
    return same(at_zero, plain) and same(norm(x), 2 * plain)


def test_every_rms_norm_of_trunk_and_head_is_one_plus_w(tmp_path):
    """RMSNorm's `1 + w` missing or applied twice (trunk or `mtp.*`): w = 0 must be plain normalisation."""
    world = World(tmp_path / "model", length=1)
    for part, count in [(world.model, 2 * 4 + 2 + 1), (world.mtp, 2 + 2 + 2 + 1)]:
        norms = [module for module in part.modules() if isinstance(module, RMSNorm)]
        assert len(norms) == count
        assert all(plain_at_zero(norm, randn(3, len(norm.weight))) for norm in norms)


@pytest.mark.parametrize("fault", [NoOne, TwoOnes])
def test_control_every_rms_norm_of_trunk_and_head_is_one_plus_w(fault):
    assert not plain_at_zero(fault(8, 1e-6).double(), randn(3, 8))


@pytest.mark.parametrize("dtype, atol", [(torch.float64, CLOSE), (torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_rms_norm_against_torch(dtype, atol):
    norm, x = RMSNorm(24, 1e-6).to(dtype), (100 * randn(2, 5, 24)).to(dtype)
    norm.weight.data = randn(24, seed=1).to(dtype)
    expected = F.rms_norm(x.double(), (24,), 1 + norm.weight.double(), 1e-6)
    assert norm(x).dtype == dtype and same(norm(x).double(), expected, atol)


class OnePlusGated(GatedRMSNorm):
    """Fault: w treated as in every other norm."""

    def forward(self, x, z):
        return (1 + self.weight) * F.rms_norm(x, x.shape[-1:], eps=self.eps) * F.silu(z)


def plain_at_one(norm, x, z):
    norm.weight.data = torch.ones(6, dtype=x.dtype)
    return same(norm(x, z), F.rms_norm(x, (6,), eps=1e-6) * z / (1 + (-z).exp()))


def test_the_gated_norm_uses_w(world):
    """The gated norm in DeltaNet uses w: w = 1 there must be plain norm × silu(z)."""
    assert plain_at_one(GatedRMSNorm(6, 1e-6), randn(2, 3, 4, 6), randn(2, 3, 4, 6, seed=1))
    assert not plain_at_one(OnePlusGated(6, 1e-6), randn(2, 3, 4, 6), randn(2, 3, 4, 6, seed=1))   # the control
    norms = [layer.linear_attn.norm for layer in world.model.layers[:3]]
    assert all(type(norm) is GatedRMSNorm for norm in norms)


def test_the_query_is_scaled(world):
    """The query is scaled by dk^-0.5, the key is not."""
    mixer = world.model.layers[0].linear_attn
    q, k, _ = mixer.heads(randn(1, 5, 24), mixer.new_state(1))
    assert same(q.norm(dim=-1), torch.full((1, 4, 5), 4 ** -0.5, dtype=q.dtype), 1e-4)
    assert same(k.norm(dim=-1), torch.ones(1, 4, 5, dtype=q.dtype), 1e-4)


# ---- attention

class SplitDownTheMiddle(Attention):
    """Fault: the first half of q_proj is all queries, the second all gates."""

    def heads(self, x):
        B, T, _ = x.shape
        q, gate = (part.view(B, T, -1, self.head_dim).transpose(1, 2) for part in self.q_proj(x).chunk(2, dim=-1))
        return self.q_norm(q), gate, *super().heads(x)[2:]


def shut_heads(attention, cfg, head):
    """Which heads give zero once the gate rows of one head in q_proj are set to shut it."""
    x, H, K = randn(1, 1, 24).expand(1, 5, -1), cfg.num_attention_heads, cfg.head_dim
    attention.o_proj = nn.Identity()
    attention.q_proj.weight.data.view(H, 2, K, -1)[head, 1] = -1000 * x[0, 0] / x[0, 0].square().sum()
    y = attention(x, *rope_tables(cfg, torch.arange(5))).view(5, H, K)
    return [h for h in range(H) if float(y[:, h].detach().abs().max()) < 1e-12]


@pytest.mark.parametrize("head", range(4))
def test_each_heads_gate_follows_its_query(world, head):
    """Query and gate interleaved per head in `q_proj`: shut head 1's gate, and only head 1's output is zero."""
    cfg = world.model.cfg
    assert shut_heads(Attention(cfg).double(), cfg, head) == [head]
    if head < 3:                                            # the control; the last head's gate is last either way
        assert shut_heads(SplitDownTheMiddle(cfg).double(), cfg, head) != [head]


def attention_by_loop(layer, x, cfg):
    """Gated grouped-query attention, one head, one query and one key at a time."""
    T, H, G, K, R = x.shape[0], cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.rotary_dim
    weights = {name: part.detach() for name, part in layer.named_parameters()}

    def normed(vector, w, t):
        vector = vector / (vector.square().mean() + cfg.rms_norm_eps).sqrt() * (1 + w)
        turned = vector.clone()
        for i in range(R // 2):
            angle = t * cfg.rope_theta ** (-2 * i / R)
            turned[i] = vector[i] * math.cos(angle) - vector[i + R // 2] * math.sin(angle)
            turned[i + R // 2] = vector[i + R // 2] * math.cos(angle) + vector[i] * math.sin(angle)
        return turned

    y = torch.zeros(T, H * K, dtype=x.dtype)
    for h in range(H):
        g, rows = h // (H // G), slice(2 * h * K, 2 * h * K + K)
        own = slice(g * K, (g + 1) * K)
        for t in range(T):
            q = normed(weights["q_proj.weight"][rows] @ x[t], weights["q_norm.weight"], t)
            gate = weights["q_proj.weight"][rows.stop:rows.stop + K] @ x[t]
            keys = [normed(weights["k_proj.weight"][own] @ x[s], weights["k_norm.weight"], s) for s in range(t + 1)]
            share = torch.stack([q @ key / K ** 0.5 for key in keys]).softmax(0)
            read = sum(a * (weights["v_proj.weight"][own] @ x[s]) for s, a in enumerate(share))
            y[t, h * K:(h + 1) * K] = read / (1 + (-gate).exp())
    return y @ weights["o_proj.weight"].T


def test_attention_against_a_loop(world):
    cfg, layer, x = world.model.cfg, world.model.layers[3].self_attn, randn(6, 24)
    y = layer(x[None], *rope_tables(cfg, torch.arange(6)))[0]
    assert same(y, attention_by_loop(layer, x, cfg), 1e-6)              # the tables are fp32


# ---- RoPE

def interleaved(x, cos, sin):
    """Fault: pairs (2i, 2i + 1)."""
    R = 2 * cos.shape[-1]
    a, b = x[..., 0:R:2], x[..., 1:R:2]
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, x[..., R:]], dim=-1)


def pairs_turned(rotate):
    """For each basis vector of a head of 16, 8 of them rotary, where it goes when it is turned."""
    angle = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    moved = rotate(torch.eye(16, dtype=torch.float64)[None, :, None], angle.cos(), angle.sin())[0, :, 0]
    return [row.nonzero().flatten().tolist() for row in moved]


@pytest.mark.parametrize("T", [1, 2, 3, 15, 16, 17])
@pytest.mark.parametrize("past", [0, 1, 9])
@pytest.mark.parametrize("pads", [None, [0, 4]])
def test_few_queries_and_many_read_alike(T, past, pads):
    """Few tokens lay the queries of a group into one table; head by head, torch's operator must give the same."""
    q, (k, v) = torch.randn(2, 6, T, 8), torch.randn(2, 2, 3, past + T, 8)
    mask = None if pads is None else torch.arange(past + T) >= torch.tensor(pads)[:, None]
    allowed = causal_mask(T, past + T, q.device, mask)
    heads = [F.scaled_dot_product_attention(q[:, h:h + 1], k[:, h // 2:h // 2 + 1], v[:, h // 2:h // 2 + 1], allowed)
             for h in range(6)]
    torch.testing.assert_close(attend(q, k, v, mask), torch.cat(heads, dim=1))


def test_rope_turns_pairs_half_a_head_apart():
    """RoPE pairs (i, i + half), not (2i, 2i+1). Rotate one basis vector."""
    expected = [[i % 4, i % 4 + 4] for i in range(8)] + [[i] for i in range(8, 16)]
    assert pairs_turned(apply_rope) == expected
    assert pairs_turned(interleaved) != expected                                            # the control


def test_rope_against_complex_multiplication(world):
    """Turning a pair is multiplying a complex number by e^(i·angle)."""
    cfg, x = world.model.cfg, randn(2, 4, 30, 8)
    half = cfg.rotary_dim // 2
    angle = torch.arange(30)[:, None] * cfg.rope_theta ** (-torch.arange(half) / half).double()
    z = torch.complex(x[..., :half], x[..., half:2 * half]) * torch.polar(torch.ones_like(angle), angle)
    y = apply_rope(x, *rope_tables(cfg, torch.arange(30)))
    assert same(y, torch.cat([z.real, z.imag, x[..., 2 * half:]], dim=-1), 1e-5)


def test_most_of_each_head_is_not_turned(world):
    """Partial rotary: the last 75 % of each head is unchanged."""
    x = randn(1, 4, 9, 8)
    y = apply_rope(x, *rope_tables(world.model.cfg, torch.arange(9)))
    changed = (y != x).flatten(0, -2).any(0).tolist()
    assert changed == [True, True] + [False] * 6


def test_mrope_of_text_is_plain_rope():
    """Text-only mrope equals plain RoPE: transformers' three position rows are equal, whatever the sections."""
    text = PITFALL | dict(head_dim=32, rope_parameters=PITFALL["rope_parameters"] | dict(mrope_section=[2, 1, 1]))
    theirs = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**text))
    positions = torch.arange(500)
    cos, sin = theirs(torch.zeros(1), positions.expand(3, 1, -1))
    ours = rope_tables(SimpleNamespace(rotary_dim=8, rope_theta=1e7), positions)
    assert all(same(torch.cat([mine, mine], dim=-1), table[0], 1e-5) for mine, table in zip(ours, (cos, sin)))


# ---- DeltaNet

def rule_inputs(T, B=2, H=3, K=4, V=6, decay=0.02):
    """q, k, v, g, beta and a first S, decaying so gently that S is still felt after many tokens."""
    q, k, v = randn(B, H, T, K), F.normalize(randn(B, H, T, K, seed=1), dim=-1), randn(B, H, T, V, seed=2)
    g, beta = -decay * randn(B, H, T, seed=3).exp(), torch.sigmoid(randn(B, H, T, seed=4))
    return q, k, v, g, beta, randn(B, H, K, V, seed=5)


def delta_by_loop(q, k, v, g, beta, S):
    """The gated delta rule on numbers: every head, token and cell of S by itself."""
    S, out = S.clone(), torch.zeros_like(v)
    for b, h in torch.cartesian_prod(torch.arange(v.shape[0]), torch.arange(v.shape[1])).tolist():
        for t in range(v.shape[2]):
            memory = S[b, h] * math.exp(g[b, h, t])
            for j in range(v.shape[3]):
                held = sum(float(memory[i, j] * k[b, h, t, i]) for i in range(k.shape[3]))
                wanted = float(beta[b, h, t] * (v[b, h, t, j] - held))
                for i in range(k.shape[3]):
                    memory[i, j] += float(k[b, h, t, i]) * wanted
                out[b, h, t, j] = sum(float(memory[i, j] * q[b, h, t, i]) for i in range(k.shape[3]))
            S[b, h] = memory
    return out, S


def test_recurrent_rule_against_a_loop():
    inputs = rule_inputs(5)
    assert all(same(ours, theirs) for ours, theirs in zip(recurrent_rule(*inputs), delta_by_loop(*inputs)))


@pytest.mark.parametrize("T", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("C", [1, 7, 16, 64])
def test_chunks_equal_the_recurrence(T, C):
    """Chunked against recurrent, with a non-zero initial state: outputs and final S agree."""
    inputs = rule_inputs(T)
    expected = recurrent_rule(*inputs)
    assert all(same(ours, theirs) for ours, theirs in zip(chunk_rule(*inputs, C=C), expected))
    assert all(same(ours, theirs) for ours, theirs in zip(gated_delta_rule(*inputs), expected))


def test_control_the_initial_state_matters():
    *inputs, S = rule_inputs(130)
    forgetful = chunk_rule(*inputs, torch.zeros_like(S))
    assert not any(same(ours, theirs) for ours, theirs in zip(forgetful, recurrent_rule(*inputs, S)))


def test_strong_decay_stays_finite():
    """exp(a - b) must not be split into exp(a) / exp(b), which overflows: fp32, g about -30 a token."""
    inputs = [x.float() for x in rule_inputs(130, decay=20)]
    for ours, theirs in zip(chunk_rule(*inputs), recurrent_rule(*inputs)):
        assert bool(ours.isfinite().all()) and same(ours, theirs, 1e-4)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 20))
def test_causal_conv_against_torch(T, kernel, cut):
    """One call on all inputs equals F.conv1d with zeros before; a cut anywhere changes nothing."""
    x, weight, window = randn(2, 6, T), randn(6, kernel, seed=1), torch.zeros(2, 6, kernel - 1).double()
    expected = F.conv1d(F.pad(x, (kernel - 1, 0)), weight[:, None], groups=6)
    y, left = causal_conv(x, window, weight)
    assert same(y, expected)
    assert torch.equal(left, F.pad(x, (kernel - 1, 0))[..., T:])
    cut = min(cut, T)
    first, between = causal_conv(x[..., :cut], window, weight)
    second, last = causal_conv(x[..., cut:], between, weight)
    assert same(torch.cat([first, second], dim=-1), expected) and torch.equal(last, left)


def test_deltanet_value_heads_share_key_heads_in_order(world):
    """4 value heads, 2 key heads: value heads 0 and 1 read key head 0, heads 2 and 3 key head 1."""
    mixer = world.model.layers[1].linear_attn
    q, k, _ = mixer.heads(randn(1, 5, 24), mixer.new_state(1))
    assert torch.equal(k[:, 0], k[:, 1]) and torch.equal(k[:, 2], k[:, 3]) and not torch.equal(k[:, 1], k[:, 2])
    assert torch.equal(q[:, 0], q[:, 1]) and torch.equal(q[:, 2], q[:, 3]) and not torch.equal(q[:, 1], q[:, 2])


def test_deltanet_as_recurrence_and_in_chunks(world):
    cfg, x = world.model.cfg, randn(2, 70, 24)
    slow, fast = DeltaNet(cfg).double(), DeltaNet(cfg, gated_delta_rule).double()
    fast.load_state_dict(slow.state_dict())
    states = slow.new_state(2), fast.new_state(2)
    assert same(slow(x, states[0]), fast(x, states[1]))
    assert same(states[0].S, states[1].S) and same(states[0].conv, states[1].conv)


def test_mlp_against_its_formula():
    mlp, x = MLP(8, 12).double(), randn(2, 3, 8)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    assert same(mlp(x), (gate / (1 + (-gate).exp()) * up) @ mlp.down_proj.weight.T)


@pytest.mark.parametrize("T", [0, 1, 2, 3, 40])
def test_the_conv_reads_its_window(T):
    x, window, weight = (torch.randn(*size, dtype=torch.float64) for size in ((2, 6, T), (2, 6, 3), (6, 4)))
    y, after = causal_conv(x, window, weight)
    both = torch.cat([window, x], dim=-1)
    torch.testing.assert_close(y, sum(both[..., i:i + T] * weight[:, i, None] for i in range(4)))
    assert torch.equal(after, both[..., T:])
