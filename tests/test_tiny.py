"""The embedded model is a checkpoint like the real one: its layout, and the same logits in transformers."""
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from chapters.embedding import EXAMPLE
from chapters.model import Model
from chapters.mtp import MTP, generate_mtp, mtp_rounds
from chapters.sample import generate
from qwen_helpers.cache import State
from qwen_helpers.weights import TINY, load_config, load_weights

TEXTS = [EXAMPLE, "Tokyo is", "春眠不觉晓，处处闻啼鸟。", EXAMPLE * 3]


@pytest.fixture(scope="module")
def tiny():
    return Model.from_pretrained(TINY)


def ids_of(text):
    return torch.tensor([Tokenizer.from_file(str(TINY / "tokenizer.json")).encode(text).ids])


def test_layout_and_size():
    """Every tensor under the real model's names, in bf16, under 25 MB; at least two periods and one draft layer."""
    cfg, file = load_config(TINY), TINY / "model.safetensors"
    names = {"model.language_model." + name for name in load_weights(TINY)} | \
        {"mtp." + name for name in load_weights(TINY, "mtp.")}
    with safe_open(file, framework="pt") as held:
        assert set(held.keys()) == names
    assert {value.dtype for part in ("model.", "mtp.") for value in load_weights(TINY, part).values()} == \
        {torch.bfloat16}
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 25e6
    assert cfg.layer_types[:8] == (("linear_attention",) * 3 + ("full_attention",)) * 2
    assert cfg.tie_word_embeddings and cfg.mtp_num_hidden_layers == 1


def test_the_same_logits_in_transformers(tiny):
    """Loaded as anybody would load it, in one forward of each text."""
    theirs, report = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"]
    for text in TEXTS:
        with torch.no_grad():
            torch.testing.assert_close(tiny(ids_of(text)), theirs(ids_of(text)).logits, atol=2e-4, rtol=0)


def test_the_tokenizer_fits_the_model(tiny):
    assert Tokenizer.from_file(str(TINY / "tokenizer.json")).get_vocab_size() <= tiny.cfg.vocab_size


def test_drafts_do_not_change_the_text(tiny):
    """fp32: speculative text equals greedy text, or leaves it at a near-tie, which is printed; drafts are accepted."""
    mtp, drafted, hits = MTP.from_pretrained(tiny.cfg, TINY), 0, 0
    for text in TEXTS:
        ids = ids_of(text)
        plain, (spec, rounds, accepted) = generate(tiny, ids, 60), generate_mtp(tiny, mtp, ids, 60)
        drafted, hits = drafted + rounds, hits + accepted
        if spec != plain:
            at = next(i for i in range(60) if spec[i] != plain[i])
            logits = tiny(torch.cat([ids, torch.tensor([plain[:at]])], dim=1))[0, -1].topk(2).values
            print(f"{text!r:.40} flips at token {at}, lead {float(logits[0] - logits[1]):.1e}")
            assert logits[0] - logits[1] < 1e-3
    assert 0.2 < hits / drafted < 1


def test_the_whole_model_in_bf16(tiny):
    """The file's own dtype: mapped weights, S in fp32, nearly the same distribution, drafts at work."""
    model, ids = Model.from_pretrained(TINY, torch.bfloat16), ids_of(EXAMPLE)
    state = State(model)
    p, q = model(ids, state).float().softmax(-1), tiny(ids).softmax(-1)
    assert float((p - q).abs().sum(-1).mean()) < 0.1
    assert state.layers[0].S.dtype == torch.float32
    rounds = list(mtp_rounds(model, MTP.from_pretrained(model.cfg, TINY, torch.bfloat16), ids, 20))
    assert sum(len(done.kept) for done in rounds) == 20 and any(done.accepted for done in rounds)
