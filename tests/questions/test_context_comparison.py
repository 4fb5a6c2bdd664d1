"""Contexts that are compared: the numbers by hand, intervals, sets, resuming, and bad input."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.errors import PromptError, RunError
from anchorlens.passes.forward import run_pass
from anchorlens.questions import context_comparison
from tests.references import plain
from tests.support.asked import ask
from tests.support.made_up_records import made_up_record
from tests.support.measures import difference, does_not_run
from tests.support.tiny_models import questions, tiny_gpt2, tiny_llama

QUIET: dict[str, Any] = {"progress": False, "resamples": 0}
Compared = partial(al.ContextComparison, repeats=1)
DEMONSTRATIONS = partial(al.compress, select=al.contexts.selection.everything)
TWO: dict[str, Any] = {"none": al.contexts.NoContext(), "anchors only": al.compress}
THREE = TWO | {"demonstrations": DEMONSTRATIONS}


def plain_run(weights: Any, tokens: Tensor, start: int, dropped: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and patterns [layer, head, key] of plain transformers at the last token.

    From ``start`` on no token attends to the dropped positions.
    """
    prompt = plain.Prompt(tokens[None], [], [], tokens, tokens)
    cut = torch.zeros(3, len(tokens), len(tokens)).bool()  # in each layer
    cut[:, start:, dropped] = True
    with plain._Attention(prompt, cut=cut), torch.no_grad():
        out = plain.forward(weights, prompt, output_attentions=True)
    return out.logits[0, -1].double(), torch.cat(out.attentions)[:, :, -1].double()


def all_but_first(demonstrations: al.PromptBatch) -> Tensor:
    return torch.arange(demonstrations.tokens.shape[1]) > 0


@pytest.mark.slow("many passes")
@pytest.mark.parametrize(("name_of_model", "side"), [("gpt2", "right"), ("llama", "left")])
def test_all_numbers_equal_those_of_plain_transformers(
    request: pytest.FixtureRequest, name_of_model: str, side: str
) -> None:
    model = request.getfixturevalue(name_of_model)
    weights: Any = {"gpt2": tiny_gpt2, "llama": tiny_llama}[name_of_model](len(model.tokenizer))
    weights.set_attn_implementation("eager")  # the others give out no patterns
    options: dict[str, Any] = {"batch_size": 3, "padding_side": side}
    batches: Any = [b for seed in (1, 2) for b in questions(model, 5, seed=seed, **options)]
    contexts = THREE | {"all but the first token": partial(al.compress, select=all_but_first)}
    record = ask(model, batches, Compared(contexts, draws=3, seed=5), **QUIET)
    bos = batches[0].begins_with_bos
    controls = [al.contexts.selection.random_and_format(seed) for seed in (5, 6, 7)]
    labels = batches[0].label_token_ids
    whole, of_runs, stolen, positions, gold = ([] for _ in range(5))  # of each prompt
    for batch in (batch.padded_right() for batch in batches):
        start = int(batch.query_start[0])
        demos, nothing = batch.prompt(0).before(start), torch.zeros(start, dtype=torch.bool)
        kept = [al.contexts.selection.anchors_and_format(demos), ~nothing, all_but_first(demos)]
        drawn = [select(demos) for select in controls]
        for row in range(len(batch)):
            tokens = batch.tokens[row][batch.attention_mask[row]]
            alone = torch.cat([tokens[:bos], tokens[start:]])
            runs = [(*plain_run(weights, alone, 0, torch.arange(0)), nothing[:0])]
            for mask in (*kept, *drawn):
                runs.append((*plain_run(weights, tokens, start, (~mask).nonzero()[:, 0]), mask))
            whole.append(plain_run(weights, tokens, start, torch.arange(0))[0])
            of_runs.append(torch.stack([logits for logits, _, _ in runs]))
            shares = [pattern[..., bos : len(keys)].sum(-1).mean(1) for _, pattern, keys in runs]
            stolen.append(torch.stack(shares[:4]))
            positions.append(torch.tensor([int(keys.sum()) for _, _, keys in runs[:4]]))
        gold += batch.gold.tolist()
    clean, changed = torch.stack(whole), torch.stack(of_runs, dim=1)
    # A test of its own compares it with sets in plain Python.
    loyalties = [al.metrics.loyalty(clean, logits, labels) for logits in changed]
    mean = {
        name: torch.stack([getattr(loyalty, name) for loyalty in loyalties]).double()
        for name in ("label_loyalty", "word_loyalty", "kl")
    }
    right = changed[..., labels].argmax(-1) == torch.tensor(gold)
    mean |= {"accuracy": right.double().mean(1), "stolen": torch.stack(stolen).mean(0)}
    of_whole = clean[:, labels].argmax(-1) == torch.tensor(gold)
    tolerances = {"label_loyalty": 0.0, "word_loyalty": 1e-6, "kl": 1e-4, "accuracy": 0.0}
    for name, tolerance in tolerances.items():
        both = torch.cat([getattr(record, name), getattr(record, f"random_{name}")])
        assert difference(both, mean[name]) <= tolerance, name
    assert record.whole_accuracy == of_whole.double().mean()
    assert difference(record.stolen_by_layer, mean["stolen"]) < 1e-5
    assert difference(record.stolen, mean["stolen"].mean(1)) < 1e-5
    assert torch.equal(record.gain_over_first, record.accuracy - record.accuracy[0])
    assert torch.equal(record.gain_over_demonstrations, record.accuracy - record.whole_accuracy)
    # The two sets of five prompts are pooled: one of the draws is the best of all ten.
    best = 4 + int(mean["label_loyalty"][4:].argmax())
    for name in ("label_loyalty", "word_loyalty", "accuracy"):
        assert float(getattr(record, f"top_{name}")) == pytest.approx(float(mean[name][best]))
    for kind in ("label", "word"):
        loyalty = mean[f"{kind}_loyalty"]
        assert difference(getattr(record, f"{kind}_gap"), loyalty[:4] - loyalty[4:].mean()) < 1e-6
    # Keys and values of each layer, of 4 bytes a number.
    channels = {"gpt2": 24, "llama": 2 * 8}[name_of_model]
    numbers = torch.stack(positions).double().mean(0) * 2 * 3 * channels
    assert difference(record.bytes_stored, numbers * 4) == 0
    assert (record.seconds > 0).all() and record.whole_seconds > 0
    # So that this can fail: contexts and draws differ, and the demonstrations are all loyal.
    assert len(set(record.kl.tolist())) == 4 and record.label_loyalty[2] == 1
    assert len(set(record.random_kl.tolist())) == 3 and mean["label_loyalty"][4:].std() > 0


def test_the_figure_leaves_out_what_is_known_by_definition() -> None:
    record: Any = made_up_record(al.records.ContextsRecord)
    for name, value in (("word_overlap", 1.0), ("label_kept", 1.0), ("kl", 0.0)):
        getattr(record, name)[..., 1] = value  # the second context is the demonstrations
    points = record.plot().data[::3]
    assert [[k for k, y in enumerate(marks.y) if y != y] for marks in points] == [
        [3],
        [1, 3],
        [1, 3],
    ]
    names = ("accuracy", "label_loyalty", "word_loyalty", "kl")
    alone = replace(record, **{f"random_{name}": torch.zeros(0) for name in names}).plot()
    assert len(alone.data) == 3 and len(alone.layout.xaxis.ticktext) == 3


@pytest.mark.slow("many passes")
@pytest.mark.every_kind
def test_reweighted_demonstrations_answer_as_whole_prompts_with_hooks(llama: Any) -> None:
    batches = questions(llama, 7, batch_size=4)
    generator = torch.Generator().manual_seed(0)
    beta = torch.randn(llama.cfg.n_layers, llama.cfg.n_heads, 6, generator=generator)
    context = al.contexts.reweight_demonstrations(llama, batches[0], beta)
    assert isinstance(context, al.contexts.Context)
    for batch in batches:
        right = batch.padded_right()
        expected = run_pass(llama, right, hooks=al.reweight_anchors(llama, right, beta))
        assert difference(context.logits(llama, batch), expected) < 1e-5
        assert difference(run_pass(llama, right), expected) > 1e-3
    plain = al.compress(llama, batches[0], al.contexts.selection.everything)
    assert context.size == plain.size
    neutral = al.contexts.reweight_demonstrations(llama, batches[0], torch.zeros_like(beta))
    assert torch.equal(neutral.logits(llama, batches[0]), plain.logits(llama, batches[0]))


def test_of_equally_loyal_draws_the_first_is_the_best() -> None:
    kept = torch.tensor([[0.0, 1.0, 1.0]])
    assert context_comparison._best_draw(al.Contributions({"random_label_kept": kept})) == 1


def test_a_time_is_the_median_after_an_untimed_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], list[str]()

    class Pass:
        """A pass over four queries, each time with a given duration."""

        batch = range(4)

        def __init__(self, name: str, *durations: float) -> None:
            self.name, self.durations = name, iter(durations)

        def logits(self, model: Any) -> Tensor:
            order.append(self.name)
            now[0] += next(self.durations)
            return torch.zeros(1)

    monkeypatch.setattr(context_comparison, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    passes: Any = [Pass("a", 100, 1, 2, 9), Pass("b", 100, 40, 20, 32)]
    seconds = context_comparison._seconds_a_query(None, passes, 3)  # type: ignore[arg-type]
    assert seconds.tolist() == [2 / 4, 32 / 4]
    assert all(first != second for first, second in pairwise(order)), "the passes take turns"


@pytest.mark.slow("many passes")
def test_times_are_of_a_batch_of_middle_length(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = sorted(questions(gpt2, 7, batch_size=1), key=lambda batch: batch.tokens.shape[1])
    timed: list[list[int]] = []

    def cached_positions(model: Any, passes: Any, repeats: int) -> Tensor:
        timed.append([int(each.batch.index) for each in passes])
        assert passes[0].batch.first_query == 0  # the whole prompt
        cached = [0 if each.prefix is None else len(each.prefix) for each in passes]
        return torch.tensor(cached).double()

    monkeypatch.setattr(context_comparison, "_seconds_a_query", cached_positions)
    record = ask(gpt2, batches, Compared(THREE), **QUIET)
    context = al.compress(gpt2, batches[0])
    assert record.seconds.tolist() == [0, int(context.selected.sum()), len(context.selected)]
    assert record.whole_seconds == 0  # nothing was cached
    assert timed == [[int(batches[3].index)] * 4]
    timed.clear()
    record = ask(gpt2, batches, Compared(THREE, repeats=0), **QUIET)
    assert record.seconds.isnan().all() and not timed


@pytest.mark.slow("many passes")
def test_stored_contributions_serve_any_number_of_timed_passes(gpt2: Any, tmp_path: Path) -> None:
    """Times are measured again by each call, and without controls a seed draws nothing."""
    batches = questions(gpt2, 4, batch_size=2)
    options = QUIET | {"folder": tmp_path}
    first = ask(gpt2, batches, Compared(TWO, repeats=0), **options)
    again = ask(gpt2, batches, Compared(TWO, repeats=1, seed=3), **options)
    assert torch.equal(first.kl, again.kl) and again.seconds.isfinite().all()


@pytest.mark.slow("many passes")
def test_queries_of_the_training_are_refused(gpt2: Any, tmp_path: Any) -> None:
    batches = questions(gpt2, 12, batch_size=4)
    how = al.contexts.Training(steps=1, progress=False)
    prefix = al.train_prefix(gpt2, batches[:1], how, held_out=batches[1:2], length=2)
    used = "the context 'mine': 4 of these queries were used"
    with pytest.raises(PromptError, match=used), does_not_run(gpt2):
        ask(gpt2, batches[1:], Compared({"mine": prefix}), **QUIET)
    made: dict[str, Any] = {"mine": lambda model, batch: prefix}
    with pytest.raises(RunError, match=f"no result for contexts: {used}"):
        ask(gpt2, batches[:1], Compared(made), **QUIET)
    assert ask(gpt2, batches[2:], Compared({"mine": prefix}), **QUIET).stolen[0] > 0
    beta = al.contexts.train_reweighting(gpt2, batches[:1], how)
    loaded = al.contexts.Beta.load(beta.save(tmp_path / "beta.safetensors"))
    contexts: list[tuple[Any, type[Exception]]] = [
        (al.contexts.reweight_demonstrations(gpt2, batches[1], loaded), PromptError),
        (partial(al.contexts.reweight_demonstrations, beta=beta), RunError),  # made in the run
    ]
    for context, error in contexts:
        with pytest.raises(error, match=used):
            ask(gpt2, batches, Compared({"mine": context}), **QUIET)
        ask(gpt2, batches[1:], Compared({"mine": context}), **QUIET)
