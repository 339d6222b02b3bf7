"""Chapter 17: the head's loss and its alignment, what training moves, and what a pass foretells of the loop."""
import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from chapters.batch import generate_batch
from chapters.model import Model
from chapters.mtp import MTP, generate_mtp, load_prompts, mtp_rounds
from chapters.training import (distil_loss, head_logits, learning_rate, loop_counts, mtp_loss, own_words, pack,
                               teacher_forced, train_head)
from qwen_helpers.weights import TINY
from scripted import CLOSE, World

ROWS = 10


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("training"))


@pytest.fixture(scope="module")
def text(world):
    """ids (8, 32) that the fixture wrote, and the hidden vectors behind them."""
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8, 9]]
    return own_words(world.model, 2 * prompts, 30, torch.Generator().manual_seed(0))


def fresh(world, seed=0):
    torch.manual_seed(seed)
    return MTP(world.model.cfg).double()


def by_hand(world, ids, hidden, rows=None):
    """The loss as a double loop: one pass of the head for each row, -ln of one softmax entry."""
    costs = []
    for b in range(ids.shape[0]):
        for t in range(ids.shape[1] - 2):
            if rows is None or rows[b, t]:
                e = world.model.embed_tokens(ids[b:b + 1, 1:t + 2])
                p = world.model.lm_head(world.mtp(e, hidden[b:b + 1, :t + 1], 0))[0, -1].softmax(-1)
                costs.append(-p[ids[b, t + 2]].log())
    return sum(costs) / len(costs)


def test_the_loss_equals_a_double_loop_and_torch(world, text):
    ids, hidden = (part[:3, :ROWS + 2] for part in text)
    loss = mtp_loss(world.model, world.mtp, ids, hidden)
    assert abs(loss - by_hand(world, ids, hidden)) < CLOSE
    guess = world.model.lm_head(world.mtp(world.model.embed_tokens(ids[:, 1:-1]), hidden[:, :ROWS], 0))
    assert abs(loss - F.cross_entropy(guess.flatten(0, 1), ids[:, 2:].flatten())) < CLOSE
    assert abs(loss - F.cross_entropy(guess.flatten(0, 1), ids[:, 1:-1].flatten())) > 1e-3         # the control


def test_hidden_of_the_first_T_rows_is_enough(world, text):
    """The recipe has no hidden for the row after the last one that is asked."""
    ids, hidden = (part[:2, :ROWS + 2] for part in text)
    assert torch.equal(mtp_loss(world.model, world.mtp, ids, hidden),
                       mtp_loss(world.model, world.mtp, ids, hidden[:, :ROWS]))


@pytest.mark.parametrize("k", [2, 5, ROWS + 1])
def test_row_t_knows_token_t_plus_1_and_nothing_later(world, k):
    """A changed token k moves the guesses of rows from k-1 on, and no earlier one."""
    ids = world.ids[:, :ROWS + 2]
    changed = ids.clone()
    changed[0, k] = world.wrong(int(ids[0, k]))
    ours, theirs = (head_logits(world.model, world.mtp, x, world.model.hidden(x))[0] for x in (ids, changed))
    moved = (ours - theirs).abs().amax(-1) > CLOSE
    assert not moved[:k - 1].any() and moved[k - 1:k].all()


@pytest.mark.parametrize("k", [4, 7])
def test_a_token_from_t_plus_3_on_changes_no_row_of_the_loss_up_to_t(world, k):
    ids = world.ids[:, :ROWS + 2]
    changed = ids.clone()
    changed[0, k] = world.wrong(int(ids[0, k]))
    for t in range(ROWS):
        row = torch.arange(ROWS)[None] == t
        ours, theirs = (mtp_loss(world.model, world.mtp, x, world.model.hidden(x), row) for x in (ids, changed))
        if k >= t + 3:
            assert abs(ours - theirs) < CLOSE
        elif k == t + 2:
            assert abs(ours - theirs) > 1e-6            # its target is another


def test_rows_that_do_not_count_change_nothing(world):
    """Filling on the right, and what stands after a stop, is in neither the loss nor the score."""
    prompts, texts = [world.ids[0, :7].tolist(), [5, 6]], [world.ids[0, 7:19].tolist(), [7, 8, 9]]
    ids, rows = pack(prompts, texts)
    assert rows.sum(1).tolist() == [11, 2]
    other = ids.clone()
    other[1, 5:] = 11                                   # another filling
    first, second = ([f(world.model, world.mtp, x, world.model.hidden(x[:, :-1]), rows)
                      for f in (mtp_loss, distil_loss, teacher_forced)] for x in (ids, other))
    assert abs(first[0] - second[0]) < CLOSE and abs(first[1] - second[1]) < CLOSE
    assert torch.equal(first[2], second[2])
    assert abs(first[0] - by_hand(world, ids, world.model.hidden(ids), rows)) < CLOSE
    unmasked = [mtp_loss(world.model, world.mtp, x, world.model.hidden(x[:, :-1])) for x in (ids, other)]
    assert abs(unmasked[0] - unmasked[1]) > 1e-6        # the control


def test_hidden_behind_own_words_is_that_of_the_whole_text(world):
    prompts = [[3, 1, 4], [1, 5, 9, 2], [6, 5]]
    ids, hidden = own_words(world.model, prompts, 6, torch.Generator().manual_seed(0))
    for prompt, row, behind in zip(prompts, ids, hidden):
        whole = world.model.hidden(torch.tensor([prompt + row[1:-1].tolist()]))[0]
        assert row[0] == prompt[-1] and (whole[len(prompt) - 1:] - behind).abs().max() < CLOSE


def test_distillation_is_the_loss_of_the_text_weighted_by_the_teacher(world, text):
    ids, hidden = (part[:2, :ROWS + 2] for part in text)
    guess = head_logits(world.model, world.mtp, ids, hidden)
    p_target = world.model.lm_head(hidden[:, 1:ROWS + 1]).softmax(-1)
    slow = -(p_target * guess.log_softmax(-1)).sum(-1).mean()
    assert abs(distil_loss(world.model, world.mtp, ids, hidden[:, :ROWS + 1]) - slow) < CLOSE
    onehot = F.one_hot(ids[:, 2:], 29).double()
    assert abs(-(onehot * guess.log_softmax(-1)).sum(-1).mean() - mtp_loss(world.model, world.mtp, ids, hidden)) < CLOSE


@pytest.mark.parametrize("loss", [mtp_loss, distil_loss])
def test_only_the_head_learns(world, text, loss):
    before, head = copy.deepcopy(world.model.state_dict()), fresh(world)
    start = copy.deepcopy(head.state_dict())
    list(train_head(world.model, head, *text, steps=2, loss=loss))
    assert all(p.grad is None for p in world.model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in world.model.state_dict().items())
    assert all(not torch.equal(value, start[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("loss", [mtp_loss, distil_loss])
def test_training_lowers_the_loss_and_raises_agreement(world, text, loss):
    head = fresh(world)
    agreed = [teacher_forced(world.model, head, *text).double().mean()]
    losses = [value for _, value in train_head(world.model, head, *text, steps=60, loss=loss, rate=1e-2, batch=8)]
    agreed.append(teacher_forced(world.model, head, *text).double().mean())
    assert losses[-1] < losses[0] - 0.1
    assert agreed[1] > agreed[0] + 0.1


def test_seeds_reproduce(world, text):
    def run(seed):
        head = fresh(world)
        return list(train_head(world.model, head, *text, steps=6, seed=seed)), head.fc.weight.detach()
    (losses, weight), (again, same), (others, _) = run(0), run(0), run(1)
    assert losses == again and torch.equal(weight, same)
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6] and losses != others


def test_the_learning_rate_rises_stays_and_falls():
    factors = [learning_rate(step, 1000, 100) for step in range(1000)]
    assert factors[0] == 0.01 and factors[99:400] == [1.0] * 301
    assert all(a > b for a, b in zip(factors[400:980], factors[401:981]))
    assert factors[-1] == 0.02


def walk(right):
    """Rounds and hits by the rule in words: a hit skips the next place."""
    asked = []
    for place in range(len(right)):
        if not asked or asked[-1] != place - 1 or not right[place - 1]:
            asked.append(place)
    return len(asked), sum(right[place] for place in asked)


@pytest.mark.parametrize("bits", range(64))
def test_loop_counts_by_brute_force(bits):
    right = [bool(bits >> i & 1) for i in range(6)]
    assert loop_counts(right) == walk(right)


def trained_head(world):
    """A head that is right here and wrong there: trained a little on the text that it will be asked about."""
    head, (ids, _) = fresh(world), pack([world.ids[0, :7].tolist()], [world.text])
    list(train_head(world.model, head, ids, world.model.hidden(ids[:, :-1]), steps=12, rate=1e-2, batch=1))
    return head.eval().requires_grad_(False)


def test_one_pass_foretells_each_draft_and_the_loop(world):
    """Every tick equals the first draft of a loop that starts there; the walk equals the loop, for every length."""
    head = trained_head(world)
    P, ids = world.prompt.shape[1], world.ids
    packed, rows = pack([ids[0, :P].tolist()], [world.text])
    right = teacher_forced(world.model, head, packed, world.model.hidden(packed[:, :-1]), rows).tolist()
    assert 0.1 < sum(right) / len(right) < 0.95                 # both kinds occur
    for place in range(30):                                     # drafted: token P + place + 1
        rounds = mtp_rounds(world.model, head, ids[:, :P + place], 3)
        first = next(r for r in rounds if r.drafted)
        assert (first.accepted == 1) == right[place]
    for length in range(2, 40):
        _, rounds, hits = generate_mtp(world.model, head, world.prompt, length + 1)
        assert (rounds, hits) == loop_counts(right[:length - 1])


def test_one_pass_foretells_the_loop_up_to_a_stop(world):
    head, P = trained_head(world), world.prompt.shape[1]
    stop = {world.text[17]}
    text = world.text[:world.text.index(world.text[17]) + 1]
    packed, rows = pack([world.ids[0, :P].tolist()], [text])
    right = teacher_forced(world.model, head, packed, world.model.hidden(packed[:, :-1]), rows).tolist()
    emitted, rounds, hits = generate_mtp(world.model, head, world.prompt, len(text) + 1, stop)
    assert emitted == text and (rounds, hits) == loop_counts(right)


def test_agreeing_with_the_model_is_not_agreeing_with_the_text(world):
    """On greedy text the two are one; on other text they part."""
    def both(ids):
        hidden = world.model.hidden(ids[:, :-1])
        said = head_logits(world.model, world.mtp, ids, hidden).argmax(-1) == ids[:, 2:]
        return teacher_forced(world.model, world.mtp, ids, hidden), said
    P = world.prompt.shape[1]
    model_says, text_says = both(world.ids)
    assert torch.equal(model_says[:, P - 1:], text_says[:, P - 1:])
    other = torch.randint(0, 29, (1, 400), generator=torch.Generator().manual_seed(0))
    model_says, text_says = both(other)
    assert not torch.equal(model_says, text_says)


def test_the_shipped_head_beats_a_fresh_one():
    model = Model.from_pretrained(TINY)
    mtp, prompts = MTP.from_pretrained(model.cfg, TINY), load_prompts(TINY)
    tk = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    rows = [tk.encode(entry["prompt"]).ids for entry in prompts if not entry["chat"]][::6]
    ids, asked = pack(rows, generate_batch(model, rows, 24))
    hidden = model.hidden(ids[:, :-1])
    torch.manual_seed(0)
    shipped, fresh_one = (teacher_forced(model, head, ids, hidden, asked).float().mean()
                          for head in (mtp, MTP(model.cfg)))
    assert shipped > fresh_one + 0.3


def test_the_recipe_trains_with_this_loss():
    sys.path.insert(0, str(TINY.parent / "recipe"))
    import train
    assert train.mtp_loss is mtp_loss and train.learning_rate is learning_rate
    torch.manual_seed(0)
    trainee = train.Trainee(train.load_config(train.CONFIG.parent))
    ids = torch.randint(0, 8192, (2, 34), generator=torch.Generator().manual_seed(0))
    main_loss, head_loss = trainee(ids)
    now, after, later = (ids[:, i:i + 32] for i in range(3))
    hidden = trainee.model.hidden(now)
    guess = trainee.mtp(trainee.model.embed_tokens(after), hidden, 0)
    for loss, x, target in ((main_loss, hidden, after), (head_loss, guess, later)):
        assert torch.equal(loss, F.cross_entropy(trainee.model.lm_head(x).flatten(0, 1), target.flatten()))
    (main_loss + train.MTP_WEIGHT * head_loss).backward()
    assert trainee.model.embed_tokens.weight.grad.abs().sum() > 0 and trainee.mtp.fc.weight.grad.abs().sum() > 0
