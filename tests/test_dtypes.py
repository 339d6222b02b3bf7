"""Chapters 1 and 14 to 17 in every dtype of a file: bytes read as their header says, near-ties told from mistakes, and a
head that trains in fp32."""
import copy

import pytest
import torch
from safetensors.torch import load_file

from chapters.depth import DeepDrafter, depth_rounds
from chapters.mtp import coarse, how_sure, mtp_rounds, near_tie, same_text
from chapters.training import distil_loss, mtp_loss, own_words, teacher_forced, train_head
from chapters.weights import read_tensor
from checkpoints import write_checkpoint
from qwen_helpers.cache import AttentionState
from scripted import World

HALVES = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("dtypes"))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_a_tensor_is_read_by_the_dtype_that_the_header_names(tmp_path, dtype):
    file = write_checkpoint(tmp_path, dtype=dtype) / "model.safetensors"
    for name, tensor in load_file(file).items():
        assert torch.equal(read_tensor(file, name), tensor.float())


def test_a_near_tie_is_two_last_bits_of_the_logit():
    assert near_tie(0.0009, 20.0) and not near_tie(0.0011, 20.0)
    assert near_tie(0.3, 20.0, torch.bfloat16) and not near_tie(0.32, 20.0, torch.bfloat16)
    assert near_tie(0.038, -20.0, torch.float16) and not near_tie(0.04, -20.0, torch.float16)
    assert near_tie(0.0009, 0.01, torch.float16)                        # never less than in fp32


def test_coarse_is_the_dtype_of_the_matrices(world):
    assert coarse(world.model) is coarse(world.mtp) is None
    for dtype in HALVES:
        model = copy.deepcopy(world.model).to(dtype)
        for layer in model.layers:
            if layer.layer_type == "linear_attention":                  # as the published file has them
                layer.linear_attn.A_log.data = layer.linear_attn.A_log.data.float()
        assert coarse(model) == dtype and coarse(copy.deepcopy(world.mtp).to(dtype)) == dtype


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_rows_tie_is_judged_by_its_own_logit(dtype):
    logits = torch.tensor([[20.0, 19.9, 0], [1, 0.9, 0], [5, 5, 0]]).to(dtype)
    assert how_sure(logits, dtype if dtype in HALVES else None)[2] == [dtype is torch.bfloat16, False, True]


def test_texts_may_be_parted_by_rounding_alone(world, capsys):
    text = world.text[:12]
    assert same_text(world.model, world.prompt, text, list(text)) and not capsys.readouterr().out
    with pytest.raises(AssertionError, match="too early"):
        same_text(world.model, world.prompt, text, text[:-1])
    with pytest.raises(AssertionError, match="not rounding"):
        same_text(world.model, world.prompt, text, [*text[:7], world.wrong(text[7]), *text[8:]])
    twin = copy.deepcopy(world.model)                                   # two tokens that no logit tells apart
    twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.detach().clone(), False)
    twin.lm_head.weight[world.wrong(text[7])] = twin.lm_head.weight[text[7]]
    assert not same_text(twin, world.prompt, text, [*text[:7], world.wrong(text[7]), *text[8:]])
    assert "parted at token 8 " in capsys.readouterr().out


class Silent:
    """A drafter that never drafts: the loop is plain decoding."""
    state = AttentionState()

    def read(self, tokens, hidden):
        pass

    def propose(self):
        return []


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rounds_of", [
    lambda model, mtp, ids: mtp_rounds(model, mtp, ids, 40),
    lambda model, mtp, ids: depth_rounds(model, ids, 40, drafter=DeepDrafter(model, mtp, 3))], ids=["one", "three"])
def test_half_precision_texts_part_at_near_ties_only(world, dtype, rounds_of):
    model, mtp = (copy.deepcopy(part).to(dtype) for part in (world.model, world.mtp))
    plain = [token for r in mtp_rounds(model, None, world.prompt, 40, drafter=Silent()) for token in r.kept]
    same_text(model, world.prompt, plain, [t for r in rounds_of(model, mtp, world.prompt) for t in r.kept])


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("loss", [mtp_loss, distil_loss])
def test_a_head_learns_in_fp32_beside_a_model_of_fewer_digits(world, dtype, loss):
    """Its numbers stay finite, its loss falls, and its drafts can be scored."""
    model = copy.deepcopy(world.model).to(dtype).requires_grad_(False)
    ids, hidden = own_words(model, [[3, 1, 4], [1, 5, 9, 2]] * 2, 20, torch.Generator().manual_seed(0))
    head = copy.deepcopy(world.mtp).float()
    losses = [value for _, value in train_head(model, head, ids, hidden, 40, loss)]
    assert hidden.dtype == dtype and sum(losses[-5:]) < sum(losses[:5])
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in head.parameters())
    assert teacher_forced(model, head, ids, hidden).shape == ids[:, 2:].shape
