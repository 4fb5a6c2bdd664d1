"""The experiment and the metric of the documentation, as users write them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float

import anchorlens as al
from anchorlens.errors import HookError, MetricError, StoreError
from anchorlens.models.kv_cache import shared_tokens
from anchorlens.models.model_state import frozen_in_eval_mode
from anchorlens.passes.forward import run_pass, run_prefix
from anchorlens.passes.provide import Observation
from anchorlens.prompts.batch import after_shared
from anchorlens.runs.study import Study
from anchorlens.runs.way import shared_lengths
from tests.support.asked import ask
from tests.support.measures import difference, does_not_run, is_shared
from tests.support.printed_code import printed
from tests.support.tiny_models import questions

QUIET: dict[str, Any] = {"progress": False, "resamples": 20}


def divergence(model: Any, prompt: al.PromptBatch, depth: int) -> torch.Tensor:
    clean, changed = (
        model.run_with_hooks(prompt.tokens, fwd_hooks=hooks)[0, -1]
        .detach()
        .double()
        .log_softmax(-1)
        for hooks in ([], al.isolate_labels(model, prompt, range(depth)))
    )
    return torch.nn.functional.kl_div(changed, clean, log_target=True, reduction="sum")


@pytest.mark.slow("many passes")
def test_the_experiment_equals_single_prompts(gpt2: Any) -> None:
    batches = questions(gpt2, 6, batch_size=2)
    asked = printed("own_question.md", "DivergenceByDepth")
    record = ask(gpt2, batches, asked((1, 2)), **QUIET)
    prompts = questions(gpt2, 6, batch_size=1)
    expected = [[divergence(gpt2, prompt, depth) for prompt in prompts] for depth in (1, 2)]
    assert difference(record.kl, torch.tensor(expected).mean(1)) < 1e-5
    assert is_shared(record)
    low, high = record.intervals["kl"]
    assert (low <= record.kl).all() and (record.kl <= high).all() and (low < high).all()


def whole_logits(model: Any, batch: al.PromptBatch, hooks: Any) -> torch.Tensor:
    logits = model.run_with_hooks(
        batch.tokens, attention_mask=batch.attention_mask, fwd_hooks=hooks
    )
    return logits[torch.arange(len(batch)), batch.target_positions].detach()


@dataclass(frozen=True, eq=False, kw_only=True)
class ChangedRecord(al.Record):
    logits: Float[torch.Tensor, "change prompt vocab"]


@dataclass(frozen=True)
class Changed(al.Question):
    """The logits with hooks of functions that are known before the first pass."""

    changes: Sequence[Any]
    name: ClassVar[str] = "changed"
    record: ClassVar = ChangedRecord

    def further(self, model: Any, batches: Any) -> al.Further:
        return al.Further(self.changes)

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, torch.Tensor]:
        of_changes = [passes.logits(batch, change) for change in self.changes]
        return {"logits": torch.stack(of_changes, dim=1).cpu()}

    def result(self, rows: Any) -> ChangedRecord:
        return ChangedRecord(logits=rows["logits"].movedim(1, 0))


def test_user_hooks_in_passes_run_whole_prompts(gpt2: Any) -> None:
    """Such hooks count positions from the first token, which is wrong after a cached prefix."""
    batches = questions(gpt2, 6, batch_size=3)

    def hooks(batch: al.PromptBatch) -> list[Any]:
        def clear_second(resid: torch.Tensor, hook: Any) -> torch.Tensor:
            cleared = resid.clone()
            cleared[:, 1] = 0.0
            return cleared

        return [("blocks.1.hook_resid_pre", clear_second)]

    def differing(batch: al.PromptBatch) -> list[Any]:
        """Cuts other edges of the demonstrations in every prompt of a batch."""
        moved = batch.label_positions - batch.index[:, None] % 3
        return al.isolate_labels(gpt2, replace(batch, label_positions=moved), range(2))

    with Study(gpt2, batches, {}, **QUIET).entered() as study:
        passes = study.passes()
        assert "run once for all" in passes.status
        for change in (hooks, differing):
            for batch in batches:
                expected = whole_logits(gpt2, batch, change(batch))
                assert difference(passes.logits(batch, change), expected) < 1e-5
    # A question may tell of them or not: in a run its passes are the same.
    logits = ask(gpt2, batches, Changed([hooks, differing]), **QUIET).logits
    for number, change in enumerate((hooks, differing)):
        for batch in batches:
            expected = whole_logits(gpt2, batch, change(batch))
            assert difference(logits[number, batch.index], expected) < 1e-5


def test_the_metric_equals_the_entropy_of_the_pattern(gpt2: Any) -> None:
    batches = questions(gpt2, 6, batch_size=3)
    metric = printed("metrics.md", "TargetEntropy")()
    assert not Observation(gpt2, metric, batches[0]).why_whole
    record = al.run(gpt2, batches, [metric], **QUIET)["target_entropy"]
    assert is_shared(record)
    rows = []
    for prompt in questions(gpt2, 6, batch_size=1):
        _, cache = gpt2.run_with_cache(prompt.tokens)
        patterns = [cache["pattern", layer][0, :, -1] for layer in range(gpt2.cfg.n_layers)]
        rows.append(torch.special.entr(torch.stack(patterns)).sum(-1))
    assert difference(record.entropy, torch.stack(rows).mean(0)) < 1e-5


def test_mistakes_in_an_experiment_are_errors(gpt2: Any) -> None:
    """Contributions are compared as those of metrics are, in test_mixes.py."""
    batches = questions(gpt2, 4, batch_size=2)
    widths = iter((2, 3))
    of_batches: list[tuple[Any, str]] = [
        (lambda batch: {"x": torch.zeros(3)}, "contribution 'x' .* one entry a prompt, 2; got"),
        (
            lambda batch: {"x": torch.zeros(len(batch), next(widths))},
            "contributions x must be in every batch, in one shape",
        ),
    ]
    for of_batch, message in of_batches:
        study = Study(gpt2, batches, {}, **QUIET)
        with study.entered(), pytest.raises(MetricError, match=message):
            study.collect(of_batch)


@pytest.mark.every_kind
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("point", ["blocks.1.attn.hook_q", "blocks.0.hook_resid_pre"])
def test_gradients_after_shared_tokens_equal_those_of_whole_prompts(gpt2: Any, point: str) -> None:
    """A bridge calls hook_q with a copy: after a cached prefix its gradient was 0."""
    (batch,) = batches = questions(gpt2, 4)
    after, _ = after_shared(batch, shared_lengths(batches, None))
    assert after.first_query > 0

    def sums(of: al.PromptBatch, prefix: Any = None) -> torch.Tensor:
        """Of the gradient at the target, in the order of the queries."""
        found = list[torch.Tensor]()
        hook = (point, lambda gradient, hook: found.append(gradient.detach()))
        with frozen_in_eval_mode(gpt2):
            run_pass(
                gpt2, of, prefix=prefix, backward_hooks=[hook], loss=al.losses.label_cross_entropy
            )
        at_target = found[0][torch.arange(len(of)), of.target_rows]
        return at_target.flatten(1).abs().sum(1)[of.index.argsort()]

    whole = sums(batch)
    assert whole.min() > 0
    assert difference(sums(after, run_prefix(gpt2, shared_tokens(after))), whole) < 1e-5


@pytest.mark.parametrize("name", ["prompts", "weights", "torch"])
def test_settings_cannot_have_names_of_the_fingerprint(gpt2: Any, tmp_path: Any, name: str) -> None:
    """They would replace entries of the fingerprint, such as the digest of the prompts."""
    study = Study(gpt2, questions(gpt2, 4), {name: "trec"}, folder=tmp_path, **QUIET)
    with study.entered(), pytest.raises(StoreError, match=f"settings cannot be named {name}"):
        study.passes()
    assert not list(tmp_path.iterdir())


def test_an_experiment_of_the_user_whose_code_changed_is_refused(gpt2: Any, tmp_path: Any) -> None:
    """Its options are the same, and so are the rows of the first batch."""
    batches = questions(gpt2, count=2, batch_size=1)

    def collected(factor: float) -> torch.Tensor:
        def of_batch(batch: al.PromptBatch) -> dict[str, torch.Tensor]:
            scale = factor if int(batch.index.min()) >= 1 else 1.0
            return {"x": scale * run_pass(gpt2, batch).amax(1).cpu()}

        with Study(gpt2, batches, {"experiment": "x"}, folder=tmp_path, **QUIET).entered() as study:
            return study.collect(of_batch)["x"]

    first = collected(1.0)
    assert torch.equal(collected(1.0), first)
    with pytest.raises(StoreError, match="was computed by another function"):
        collected(2.0)


def test_a_folder_holds_one_collection(gpt2: Any, tmp_path: Any) -> None:
    with Study(
        gpt2, questions(gpt2, 4, batch_size=2), {}, folder=tmp_path, **QUIET
    ).entered() as study:
        study.collect(lambda batch: {"x": torch.zeros(len(batch))})
        with pytest.raises(StoreError, match="has collected already"):
            study.collect(lambda batch: {"x": torch.zeros(len(batch))})


def test_prompts_with_different_numbers_of_label_words_share_nothing(gpt2: Any) -> None:
    tokens = torch.arange(5, 17)[None].repeat(2, 1)
    batches = [
        al.PromptBatch.from_positions(
            tokens,
            label_positions=[positions] * 2,
            label_classes=[classes] * 2,
            label_token_ids=[1, 2],
        )
        for positions, classes in (([2, 4, 6], [0, 1, 0]), ([4, 6], [1, 0]))
    ]
    with Study(gpt2, batches, {}, **QUIET).entered() as study:
        passes = study.passes()
        for batch in batches:
            assert difference(passes.logits(batch), whole_logits(gpt2, batch, [])) < 1e-5


def test_user_hooks_for_prompts_padded_on_the_left_are_refused(gpt2: Any) -> None:
    asked = Changed([lambda batch: [("blocks.0.hook_resid_pre", lambda resid, hook: resid)]])
    with pytest.raises(HookError, match="padded on the left"), does_not_run(gpt2):
        al.run(gpt2, questions(gpt2, 5, padding_side="left"), [al.Accuracy(), asked], **QUIET)


@dataclass(frozen=True, eq=False, kw_only=True)
class OfRunRecord(al.Record):
    value: Float[torch.Tensor, ""] = al.kinds.mean("value")


class OfRun(al.Question):
    """The loss of the run, without a gradient."""

    name, record = "of run", OfRunRecord

    def of_batch(self, passes: Any, batch: al.PromptBatch) -> dict[str, torch.Tensor]:
        return {"value": passes.losses(batch, passes.loss)}


def test_a_question_of_ones_own_may_take_the_loss_of_the_run(gpt2: Any) -> None:
    batches, loss = questions(gpt2, 4), al.losses.span_cross_entropy("query")
    results = al.run(gpt2, batches, [OfRun(), al.Loss(loss)], loss=loss, **QUIET)
    assert difference(results["of run"].value, results["loss"].loss) < 1e-6
