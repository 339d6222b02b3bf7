"""Small wrong changes, each of which a test must notice: `make mutants`.

The course is copied, and in the copy one change at a time is made, tested and taken back. Whether saved outputs are
fresh is not asked: that notices any change, and no longer does after the next refresh. Exits with 1 if a change was
not caught by a test that passes without it.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = ".*", "build", "__pycache__", "*.egg-info"
NOT_ASKED = "not outputs_are_fresh"
SECONDS = 600                           # that the tests of one change may take


class Mutant(NamedTuple):
    """A change of one place: `file` is a helper (`lesson.py`), the loader of chapters or a chapter (`norm`), `tests` are files or tests."""
    file: str
    tests: str
    what: str
    old: str
    new: str


MUTANTS = [Mutant(*parts) for parts in [
    # ---- what compares, grades and tells
    ("lesson.py", "lesson", "close never raises",
     'raise AssertionError(f"{what}: largest',
     'print(f"{what}: largest'),
    ("lesson.py", "lesson", "close lets shapes differ",
     'raise AssertionError(f"{what}: shapes',
     'print(f"{what}: shapes'),
    ("lesson.py", "lesson", "bf16 and fp16 round eight times as much",
     "max(tol, 16 * torch.finfo",
     "max(tol, 128 * torch.finfo"),
    ("lesson.py", "lesson", "the mean difference instead of the largest",
     "return (ours - theirs).abs().max()",
     "return (ours - theirs).abs().mean()"),
    ("lesson.py", "lesson", "an infinite number is its own excuse in bf16 and fp16",
     "largest = theirs[theirs.isfinite()].abs()",
     "largest = theirs.abs()"),
    ("lesson.py", "lesson", "near lets shapes differ",
     "    if ours.shape != theirs.shape:\n        return False\n",
     ""),
    ("lesson.py", "lesson", "near forgets in which dtype it was computed",
     "gap, allowed, _ = apart(ours, theirs, tol, dtype)",
     "gap, allowed, _ = apart(ours, theirs, tol)"),
    ("lesson.py", "lesson", "whole numbers may be nearly right",
     "tol = tol if torch.as_tensor(right).is_floating_point() else 0",
     "tol = tol"),
    ("lesson.py", "lesson", "an answer of another shape is right",
     "if answer.shape == value.shape and torch.allclose",
     "if torch.allclose"),
    ("lesson.py", "lesson", "halves of a character are lost",
     "if whole == text:",
     "if True:"),
    ("lesson.py", "lesson", "other figures are told",
     '["figure"].startswith(parts)',
     '["figure"].endswith(parts)'),
    ("lesson.py", "lesson", "a large model repeats once",
     "max(3, count // 8)",
     "max(1, count // 8)"),
    ("machine.py", "lesson", "a thousandth of the memory is enough",
     "1 + 4 * count / 1e9",
     "(1 + 4 * count / 1e9) / 1000"),
    # ---- pictures
    ("draw.py", "draw_values", "a heat map at half its scale",
     "vmin=-limit, vmax=limit",
     "vmin=-limit / 2, vmax=limit / 2"),
    ("draw.py", "draw_values", "the ends of error bars swapped",
     "[values - low, high - values]",
     "[high - values, values - low]"),
    ("draw.py", "draw_values", "a mark one unit off",
     'ax.axvline(at, color=COLOUR["plain"], ls=":", lw=1.5)',
     'ax.axvline(at + 1, color=COLOUR["plain"], ls=":", lw=1.5)'),
    ("draw.py", "draw_values", "lines not in the colours asked for",
     "colour = (colours or {}).get(name) or COLOUR.get(name) or",
     "colour = COLOUR.get(name) or"),
    ("draw.py", "draw_values", "the first bar at the bottom",
     "ax.invert_yaxis()\n    ax.set_xlabel(xlabel)\n    ax.set_xlim(right",
     "ax.set_xlabel(xlabel)\n    ax.set_xlim(right"),
    ("draw.py", "draw_values", "texts of bars inside the intervals",
     "end = max(values[i], intervals[i][1]",
     "end = max(values[i], intervals[i][0]"),
    ("draw.py", "draw_values", "stacks that begin anywhere",
     "end = end + numbers(values)",
     "end = numbers(values)"),
    ("draw.py", "draw_values", "digits in other cells",
     "ax.text(column, row, f",
     "ax.text(row, column, f"),
    ("draw.py", "draw_values", "a heat map's limit from the positive side",
     "np.abs(m).max() for m in",
     "m.max() for m in"),
    ("draw.py", "draw_values", "colours of tokens from the end",
     'name = colours[i] if colours else "pale"',
     'name = colours[-1 - i] if colours else "pale"'),
    ("draw.py", "draw_values", "clocks that turn the other way",
     "[x, x + 0.9 * np.cos(turn)]",
     "[x, x - 0.9 * np.cos(turn)]"),
    ("draw.py", "draw_values", "one token less seen to be cut",
     'max(0, len(now["draft"]) - now["kept"])',
     'max(0, len(now["draft"]) - 1 - now["kept"])'),
    # ---- sliders
    ("widgets.py", "lesson", "sliders start at their lowest",
     "W.IntSlider(start, low, high",
     "W.IntSlider(low, low, high"),
    ("widgets.py", "lesson", "a slider changes nothing",
     "image.value = picture(**{name: slider.value for name, slider in sliders.items()})",
     "image.value = still"),
    ("widgets.py", "lesson", "markup in a chat is run",
     "{html.escape(m['content'])}",
     "{m['content']}"),
    # ---- memory
    ("cache.py", "cache", "a rollback forgets the conv window",
     "        self.conv.copy_(saved[1])\n",
     ""),
    ("cache.py", "cache", "bytes without the conv window",
     "return self.S.nbytes + self.conv.nbytes",
     "return self.S.nbytes"),
    ("cache.py", "cache", "room for K/V grows by what is needed",
     "max(2 * end, 64)",
     "end"),
    ("cache.py", "cache", "a snapshot is no copy",
     "return self.S.clone(), self.conv.clone()",
     "return self.S, self.conv"),
    ("cache.py", "cache", "the first real token is masked",
     ">= self.pads[:, None]",
     "> self.pads[:, None]"),
    # ---- weights
    ("config.py", "weights", "the first layer of each period is attention",
     "LAYER_TYPES[(i + 1) % every == 0]",
     "LAYER_TYPES[i % every == 0]"),
    ("config.py", "layers", "RoPE turns whole heads",
     "return int(self.head_dim * self.partial_rotary_factor)",
     "return self.head_dim"),
    ("weights.py", "weights", "tensors of another size are taken",
     "if tuple(tensor.shape) != shape:",
     "if len(tensor.shape) != len(shape):"),
    ("config.py", "weights", "links lead out of the model folder",
     "if not file.resolve().is_relative_to(home):",
     "if False:"),
    ("weights.py", "lesson weights", "the real model counts as small",
     "for shape in expected_shapes(cfg).values()) <= SMALL",
     "for shape in expected_shapes(cfg).values()) <= 4 * SMALL"),
    ("checks.py", "bad_input::test_wrong_ids", "one id too many is a token",
     "high >= cfg.vocab_size",
     "high > cfg.vocab_size"),
    ("checks.py", "bad_input::test_the_longest_text_is_exactly_the_models_maximum", "what was read does not count",
     "if before + ids.shape[1] > cfg",
     "if ids.shape[1] > cfg"),
    ("linear.py", "linear", "a weight changed in place goes unnoticed",
     "weight._version == version and",
     ""),
    ("linear.py", "linear", "a copy keeps the packed weight",
     'return self.__dict__ | {"packed": None}',
     "return self.__dict__"),
    # ---- notebooks as modules
    ("__init__.py", "loader", "mistakes on purpose are imported",
     'if "no-import" not in tags',
     "if True"),
    ("__init__.py", "loader", "what a demo assigns is imported",
     "len(t.id) > 1 and t.id.isupper()",
     "len(t.id) > 1"),
    ("__init__.py", "loader", "a chapter's name is a pattern",
     "glob.escape(slug)",
     "slug"),
    # ---- the model
    ("norm", "layers", "w instead of 1 + w",
     "y = rms_norm(x, self.eps) * (1 + widen(self.weight))",
     "y = rms_norm(x, self.eps) * widen(self.weight)"),
    ("norm", "layers", "the norm of a sum",
     "x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)",
     "x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)"),
    ("norm", "layers", "a sigmoid for silu in the gated norm",
     "return y * F.silu(widen(z))",
     "return y * torch.sigmoid(widen(z))"),
    ("rope", "layers", "RoPE turns backwards",
     "turned = a * cos - b * sin, b * cos + a * sin",
     "turned = a * cos + b * sin, b * cos - a * sin"),
    ("rope", "layers", "RoPE at half the frequencies",
     "** (-pair / R)",
     "** (-pair / 2 / R)"),
    ("attention", "layers", "silu for a sigmoid at attention's gate",
     "y = y * torch.sigmoid(gate)",
     "y = y * F.silu(gate)"),
    ("attention", "batch", "padding is read",
     "return (allowed & mask[:, None, None, :]) | (slot == query)",
     "return allowed | mask[:, None, None, :]"),
    ("attention", "layers", "few queries get each other's masks",
     "allowed = torch.cat([allowed] * heads, dim=-2)",
     "allowed = allowed.repeat_interleave(heads, dim=-2)"),
    ("attention", "measures", "a map of unscaled scores",
     "score = q @ k.mT / q.shape[-1] ** 0.5",
     "score = q @ k.mT"),
    ("deltanet", "layers", "the rule reads before it fades",
     "found = k_t @ S * fade",
     "found = k_t @ S"),
    ("deltanet", "batch", "the mask of the first tokens for all later ones",
     "x = x * mask[:, -T:, None]",
     "x = x * mask[:, :T, None]"),
    ("deltanet", "layers", "keys scaled instead of queries",
     "return q * self.K ** -0.5, k, per_head",
     "return q, k * self.K ** -0.5, per_head"),
    ("deltanet", "parity", "A_log taken for A",
     "g = -widen(self.A_log).exp() * rate",
     "g = -widen(self.A_log) * rate"),
    ("chunk", "layers", "S does not fade from chunk to chunk",
     "S = S * since[:, :, -1:].exp() + (k",
     "S = S + (k"),
    ("chunk", "measures", "exp overflows above the diagonal",
     "fade = fade.tril().exp().tril()\n    W, U",
     "fade = fade.exp().tril()\n    W, U"),
    ("chunk", "layers", "tokens miss their neighbour's write",
     "beta[..., None]) @ k.mT * fade).tril(-1)",
     "beta[..., None]) @ k.mT * fade).tril(-2)"),
    ("model", "cache sample", "positions begin again at each call",
     "start = state.pos if state else 0",
     "start = 0"),
    ("model", "batch", "padding counts as positions",
     "positions = positions - state.pads[:, None] ",
     "positions = positions + 0 * state.pads[:, None] "),
    ("model", "parity", "the residual taken behind the norm",
     "return x + self.mlp(self.post_attention_layernorm(x))",
     "return h + self.mlp(self.post_attention_layernorm(x))"),
    ("model", "measures", "nats for bits",
     "loss.item() / torch.tensor(2.0).log().item()",
     "loss.item()"),
    ("cache", "measures", "K/V without V",
     "return 2 * G * K * width",
     "return G * K * width"),
    ("cache", "measures", "a window of one column more",
     "(cfg.linear_conv_kernel_dim - 1)",
     "cfg.linear_conv_kernel_dim"),
    # ---- writing
    ("sample", "sample", "hot is cold",
     "logits = logits.float() / temperature",
     "logits = logits.float() * temperature"),
    ("sample", "sample", "top-p leaves out the token that reaches it",
     "before = ranked.cumsum(-1) - ranked",
     "before = ranked.cumsum(-1)"),
    ("sample", "sample", "the stop token is left out",
     "        yield token\n        if token in stop:\n            return\n",
     "        if token in stop:\n            return\n        yield token\n"),
    ("sample", "rejection::test_chance_against_published_values", "a degree of freedom too many",
     "int((wanted > 0).sum()) - 1",
     "int((wanted > 0).sum())"),
    ("sample", "measures", "entropy in nats",
     "return torch.special.entr(p).sum(-1) / torch.tensor(2.0).log()",
     "return torch.special.entr(p).sum(-1)"),
    ("sample", "measures", "each token repeats itself",
     "g in grams[:i] for",
     "g in grams[:i + 1] for"),
    ("chat", "chat", "an answer keeps the empty lines behind its thought",
     'return thought.strip(), text.lstrip("\\n")',
     "return thought.strip(), text"),
    ("chat", "chat", "earlier thoughts are told, the last one is not",
     'f"<think>\\n{thought}\\n</think>\\n\\n" if after else',
     'f"<think>\\n{thought}\\n</think>\\n\\n" if not after else'),
    ("chat", "chat", "thinking the wrong way round",
     '"" if thinking else',
     '"" if not thinking else'),
    ("chat", "chat", "half characters are shown",
     'self.decode(ids).rstrip("\\ufffd")',
     "self.decode(ids)"),
    ("batch", "batch", "padding on the right",
     "[pad] * (T - len(row)) + list(row)",
     "list(row) + [pad] * (T - len(row))"),
    ("batch", "batch", "the first row ends all",
     "done[b] = token in stop",
     "done[b] = tokens[0] in stop"),
    # ---- drafting
    ("mtp", "mtp_head", "hidden in front of the embedding",
     "torch.cat([e, h], dim=-1)",
     "torch.cat([h, e], dim=-1)"),
    ("mtp", "mtp_loop", "the text goes on behind a stop",
     "kept[:ends[0] + 1] if ends else kept",
     "kept[:ends[-1] + 1] if ends else kept"),
    ("mtp", "mtp_rollback::test_rejected_tokens_leave_no_trace_in_S", "one rejected token stays in the state",
     "if state.pos > saved[0] + ids.shape[1]:",
     "if state.pos > saved[0] + ids.shape[1] + 1:"),
    ("mtp", "mtp_head", "the head is fed the last hidden vectors",
     "drafter.read(ids.new_tensor([kept]), hidden[:, :len(kept)])",
     "drafter.read(ids.new_tensor([kept]), hidden[:, -len(kept):])"),
    ("mtp", "measures", "an interval with z for z squared",
     "rate, spread = hits / n, z * z / n",
     "rate, spread = hits / n, z / n"),
    ("mtp", "measures", "accepted drafts cost a second forward",
     "return (1 + a) / (v + d + (1 - a) * r)",
     "return (1 + a) / (v + d + a * r)"),
    ("mtp", "measures", "loops are counted",
     "if r.drafted and at < start:",
     "if r.drafted:"),
    ("depth", "depth::test_every_accepted_count", "the last window after a reject",
     "layer.S, layer.conv = layer.S_after[n], layer.conv_after[n].clone()",
     "layer.S, layer.conv = layer.S_after[n], layer.conv_after[-1].clone()"),
    ("depth", "depth::test_p_min_stops_before_the_first_unsure_token", "sure guesses are not drafted",
     "if p < self.p_min:",
     "if p > self.p_min:"),
    ("depth", "depth::test_right_edge_by_hand", "padding counted as text",
     "return columns.clamp(min=0), T - real",
     "return columns.clamp(min=0), T - ends"),
    ("depth", "depth::test_prompt_lookup_by_hand", "a copy begins a token early",
     "return text[end:end + N]",
     "return text[end - 1:end + N - 1]"),
    ("rejection", "rejection::test_three_words_by_hand", "accepted with p_target alone",
     "p_target / p_draft, 1.0)",
     "p_target, 1.0)"),
    ("rejection", "rejection::test_three_words_by_hand", "refused tokens are drawn again",
     "rest = (p_target - p_draft).clamp(min=0)",
     "rest = (p_target - p_draft).abs()"),
    ("rejection", "rejection::test_verdict_on_fixed_distributions", "the last token from the first distribution",
     "*throws(p_target[-1], 1, dice)",
     "*throws(p_target[0], 1, dice)"),
    ("rejection", "measures", "a trimmed head's words under each other's ids",
     "every.index_copy(1, self.words, logits)",
     "every.index_copy(1, self.words.flip(0), logits)"),
    ("training", "training::test_the_loss_equals_a_double_loop_and_torch", "the head learns the token that it reads",
     "ids[:, 2:][rows].flatten())",
     "ids[:, 1:-1][rows].flatten())"),
    ("training", "training::test_loop_counts_by_brute_force", "a hit skips nothing",
     "at += 2 if right[at] else 1",
     "at += 1"),
    ("training", "training::test_rows_that_do_not_count_change_nothing", "filling counts",
     "(target > begin) & (target < end)",
     "(target > begin) & (target <= end)"),
    ("training", "training::test_the_learning_rate_rises_stays_and_falls", "the first step at no rate",
     "min(1.0, (step + 1) / warmup,",
     "min(1.0, step / warmup,"),
    ("training", "training::test_distillation_is_the_loss_of_the_text_weighted_by_the_teacher",
     "the teacher speaks of the token before",
     "p_target = widen(model.lm_head(hidden[:, 1:][rows])).softmax(-1)",
     "p_target = widen(model.lm_head(hidden[:, :-1][rows])).softmax(-1)"),
]]


def copied():
    """A copy of the course in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-")) / "course"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder


def run(folder, *command, seconds=None):
    """(exit status, output) of Python in the copy, which comes before the course that is installed."""
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=os.environ | own, timeout=seconds, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def pytest(folder, tests, *options, seconds=None):
    """(exit status, the tests that failed) of tests given as `lesson` or `depth::test_that`."""
    paths = [re.sub(r"^(\w+)", r"tests/test_\1.py", test) for test in tests]
    status, said = run(folder, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-k", NOT_ASKED, *options,
                       *paths, seconds=seconds)
    return status, [line.split(" - ")[0] for line in re.findall(r"(?m)^(?:FAILED|ERROR) (.+)$", said)]


def changed(folder, mutant):
    """The file of a mutant, its text before, and with the change; ValueError if the place is not there just once."""
    if mutant.file.endswith(".py"):
        file = folder / ("chapters" if mutant.file == "__init__.py" else "qwen_helpers") / mutant.file
        before = file.read_text(encoding="utf-8")
        places, after = before.count(mutant.old), before.replace(mutant.old, mutant.new)
    else:
        file, = (folder / "notebooks").glob(f"[0-9][0-9]_{mutant.file}.ipynb")
        before, places = file.read_text(encoding="utf-8"), 0
        notebook = json.loads(before)
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code":
                places += source.count(mutant.old)
                cell["source"] = source.replace(mutant.old, mutant.new)
        after = json.dumps(notebook)
    if places != 1:
        raise ValueError(f"the place is there {places} times")
    return file, before, after


def verdict(folder, mutant, failing):
    """What became of a mutant, in words; it is caught if the first word is."""
    try:
        file, before, after = changed(folder, mutant)
        file.write_text(after, encoding="utf-8")
    except (ValueError, OSError) as error:
        return f"stale: {error}"
    try:
        status, failed = pytest(folder, mutant.tests.split(), "-x", *(f"--deselect={test}" for test in failing),
                                seconds=SECONDS)
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        file.write_text(before, encoding="utf-8")
    if status == 1 and failed:
        return "caught by " + failed[0].split("::", 1)[1]
    return "SURVIVED" if status == 0 else f"no verdict: pytest gave {status}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD", help="only those whose file or description has this in it")
    words = parser.parse_args().words
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.file}: {m.what}" for word in words)]
    if not chosen:
        sys.exit(f"no mutant has one of {' '.join(words)} in it")
    folder = copied()
    try:
        _, found = run(folder, "-c", "import qwen_helpers as q, chapters.norm as c; print(q.__file__, c.__file__)")
        if found.count(str(folder)) != 2:
            sys.exit(f"these are not of the copy: {found}")
        _, failing = pytest(folder, sorted({test for m in chosen for test in m.tests.split()}))
        for test in failing:
            print(f"left out, it fails without any change: {test}")
        caught = 0
        for mutant in chosen:
            said = verdict(folder, mutant, failing)
            caught += said.startswith("caught")
            print(f"{mutant.file:12} {mutant.what:54} {said}", flush=True)
    finally:
        shutil.rmtree(folder.parent)
    print(f"{caught} of {len(chosen)} caught")
    sys.exit(bool(failing) or caught < len(chosen))


if __name__ == "__main__":
    main()
