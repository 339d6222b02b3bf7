"""Our model against transformers' Qwen3_5ForCausalLM, on random checkpoints."""
import pytest
import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

from chapters.model import Model
from chapters.mtp import MTP, forward_hidden
from checkpoints import PITFALL, write_checkpoint
from qwen_helpers.cache import State
from qwen_helpers.weights import load_weights

WIDE = PITFALL | dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=8,
                      layer_types=PITFALL["layer_types"] * 2, linear_key_head_dim=16, linear_value_head_dim=24,
                      head_dim=32, rope_parameters=PITFALL["rope_parameters"] | dict(mrope_section=[2, 1, 1]))
UNTIED = WIDE | dict(tie_word_embeddings=False,
                     layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"] * 2)


@pytest.fixture(scope="module", params=[("model.language_model.", WIDE), ("model.", UNTIED)], ids=["tied", "untied"])
def pair(request, tmp_path_factory):
    """Ours and transformers' model, with the same random fp32 weights."""
    prefix, text = request.param
    path = write_checkpoint(tmp_path_factory.mktemp("parity"), text, nested=prefix != "model.", prefix=prefix,
                            dtype=torch.float32, vision=2, shards=2)
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text, num_mtp_layers=1, mtp_layer_types=["full_attention"])).eval()
    weights = load_weights(path)
    head = weights.pop("lm_head.weight", weights["embed_tokens.weight"])
    theirs.load_state_dict({"model." + name: value for name, value in weights.items()} | {"lm_head.weight": head})
    return Model.from_pretrained(path), theirs, path


def ids_of(T, cfg, seed=1):
    return torch.randint(cfg.vocab_size, (1, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("T", [1, 5, 63, 64, 65, 130])
def test_logits_of_one_forward(pair, T):
    ours, theirs, _ = pair
    ids = ids_of(T, ours.cfg)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("cuts", [(70, 1, 1), (20, 5, 1, 3), (1, 1, 64, 2)])
def test_prefill_then_more_tokens(pair, cuts):
    ours, theirs, _ = pair
    state, cache = State(ours), DynamicCache(config=theirs.config)
    for ids in ids_of(sum(cuts), ours.cfg).split(cuts, dim=1):
        with torch.no_grad():
            torch.testing.assert_close(ours(ids, state), theirs(ids, cache=cache).logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("T", [1, 5, 63, 64, 65, 130])
def test_draft_head_logits(pair, T):
    ours, theirs, path = pair
    mtp = MTP.from_pretrained(ours.cfg, path)
    head = MtpModel(theirs, 1).eval()
    names = {"pre_fc_norm_embedding": "layers.0.enorm", "pre_fc_norm_hidden": "layers.0.hnorm",
             "fc": "layers.0.eh_proj", "layers.0": "layers.0.mtp_block", "norm": "layers.0.post_norm"}
    state = {new + name.removeprefix(old): value for name, value in mtp.state_dict().items()
             for old, new in names.items() if name.startswith(old + ".")}
    missing, unexpected = head.load_state_dict(state, strict=False)
    assert not unexpected and not [name for name in missing if name.startswith("layers.")]
    ids = ids_of(T + 1, ours.cfg)
    hidden = forward_hidden(ours, ids[:, :-1], State(ours))[1]
    emb = ours.embed_tokens(ids[:, 1:])
    position_ids = torch.arange(T)[None]
    with torch.no_grad():
        expected = head.forward_layer(0, hidden, position_ids, None, inputs_embeds=emb)
        torch.testing.assert_close(ours.lm_head(mtp(emb, hidden, 0)), theirs.lm_head(expected), atol=2e-4, rtol=0)

