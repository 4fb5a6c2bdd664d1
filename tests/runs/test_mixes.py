"""Batches and metrics that are not alike in one run: each gives what it gives alone, or is said."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from jaxtyping import Float
from measures import assert_same
from tiny_models import byte_level_tokenizer, questions, randomize
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import anchorlens as al
from anchorlens.errors import HookError, MetricError, PromptError, RunError
from anchorlens.runs import trial

pytestmark = [
    pytest.mark.without_jaxtyping,
]
QUIET: dict[str, Any] = {"resamples": 0, "progress": False}


@dataclass(frozen=True, eq=False, kw_only=True)
class MeanRecord(al.Record):
    mean: Float[Tensor, ""]


@dataclass(frozen=True)
class Own:
    """A user's metric: whatever ``rows`` gives for the n-th batch, and what follows from it."""

    rows: Any
    name: str = "own"
    mean: Any = field(default=lambda rows: rows["v"].mean())
    hooks: tuple[Any, ...] = ()
    batches: list[int] = field(default_factory=list, repr=False)
    needs_gradient: ClassVar[bool] = False

    def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        def rows(logits: Tensor, clean_logits: Tensor | None) -> Any:
            self.batches.append(len(batch))
            return self.rows(len(self.batches), len(batch))

        return al.Observation(rows, self.hooks)

    def observe_prefix(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        return al.Observation(lambda logits, clean_logits: {})

    def result(self, rows: Any) -> MeanRecord:
        return MeanRecord(mean=self.mean(rows))


def sevens(batch: int, size: int) -> dict[str, Tensor]:
    return {"v": torch.full((size,), 7.0)}


def test_sets_that_share_beside_one_that_does_not(gpt2: Any) -> None:
    """A set of one prompt runs it whole; what others saw in shared demonstrations must stay."""
    several, single = questions(gpt2, 5, batch_size=2), questions(gpt2, 1, seed=2)
    metrics = [al.SaliencyFlows()]
    found = al.run(gpt2, several + single, metrics, **QUIET)["saliency_flows"]
    assert "run once" in found.info["shared_prefix"]
    prompts = [batch.prompt(row) for batch in several for row in range(len(batch))]
    alone = [
        al.run(gpt2, [prompt], metrics, **QUIET)["saliency_flows"]
        for prompt in [*sorted(prompts, key=lambda one: int(one.index)), *single]
    ]
    torch.testing.assert_close(
        found.per_prompt, torch.cat([one.per_prompt for one in alone]), rtol=1e-3, atol=1e-7
    )
    assert (found.per_prompt[:, 0, 0] > 0).all()


def test_hooks_in_other_heads_for_some_prompts(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = questions(gpt2, 6, batch_size=3)
    second = set(batches[1].index.tolist())

    def change(batch: al.PromptBatch) -> Any:
        head = int(set(batch.index.tolist()) <= second)
        return al.isolate_labels(gpt2, batch, range(2), heads=head)

    found = al.run(gpt2, batches, [al.Loyalty()], hooks=change, **QUIET)["loyalty"]
    assert "hooks differ between prompts" in found.info["shared_prefix"]
    monkeypatch.setattr(trial, "_shared_lengths", lambda batches: {})
    assert_same(found, al.run(gpt2, batches, [al.Loyalty()], hooks=change, **QUIET)["loyalty"])


@pytest.fixture(scope="module")
def longrope() -> Any:
    """Above 237 tokens it turns positions in another way."""
    tokenizer = byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 237,
            "factor": 8.0,
        },
    )
    return al.load_model(randomize(LlamaForCausalLM(config)), tokenizer=tokenizer)


@pytest.mark.changes_model
def test_rotary_embeddings_that_change_with_the_length(longrope: Any) -> None:
    batches = questions(longrope, 8, batch_size=1)
    lengths = [batch.tokens.shape[1] for batch in batches]
    assert min(lengths) <= 237 < max(lengths)
    with torch.no_grad():
        expected = torch.stack(
            [longrope(one.tokens)[0, -1] for one in sorted(batches, key=lambda one: int(one.index))]
        )
    found = al.target_logits(longrope, batches, progress=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(PromptError, match=r"longer than 237 .*longrope.*batch_size=1"):
        al.target_logits(longrope, questions(longrope, 8), progress=False)


def test_joined_calls_of_one_set_stay_apart(gpt2: Any) -> None:
    first, second = questions(gpt2, 4, batch_size=2), questions(gpt2, 6, batch_size=4)
    found = al.target_logits(gpt2, first + second, progress=False)
    expected = [al.target_logits(gpt2, one, progress=False) for one in (first, second)]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-6)


def fails(error: Exception, batch: int = 1) -> Any:
    def rows(number: int, size: int) -> Any:
        if number == batch:
            raise error
        return sevens(number, size)

    return rows


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Own(lambda batch, size: {"v": torch.ones(size, batch)}), "not of one shape in all"),
        (Own(lambda batch, size: {"vw"[batch - 1]: torch.ones(size)}), "missing in some batch"),
        (Own(lambda batch, size: {}), "missing in some batch"),
        (Own(lambda batch, size: None), "rows must be a dict of tensors; got a NoneType"),
        (Own(lambda batch, size: {"v": [1.0]}), "row 'v' must be a tensor .*; got a list"),
        (Own(lambda batch, size: {"v": torch.tensor(1.0)}), "got a Tensor of one number"),
        (Own(fails(PromptError("too odd"))), "too odd"),
        (Own(sevens, mean=lambda rows: rows["w"]), "KeyError: 'w'"),
    ],
)
def test_a_metric_that_fails_leaves_the_others(gpt2: Any, metric: Own, said: str) -> None:
    batches = questions(gpt2, 4, batch_size=2)
    with pytest.raises(RunError, match=f"no result for own: .*{said}") as caught:
        al.run(gpt2, batches, [metric, al.Accuracy()], **QUIET)
    expected = al.run(gpt2, batches, [al.Accuracy()], **QUIET)["accuracy"]
    assert_same(caught.value.results["accuracy"], expected)


def test_a_metric_that_is_mended_goes_on_in_its_folder(gpt2: Any, tmp_path: Any) -> None:
    batches = questions(gpt2, 4, batch_size=1)
    for broken in (1, 3):
        folder = tmp_path / str(broken)
        with pytest.raises(RunError, match="second thoughts"):
            failing = Own(fails(MetricError("second thoughts"), broken))
            al.run(gpt2, batches, [Named(failing), al.Accuracy()], folder=folder, **QUIET)
        mended = al.run(gpt2, batches, [Named(Own(sevens)), al.Accuracy()], folder=folder, **QUIET)
        assert float(mended["own"].mean) == 7


@dataclass(frozen=True)
class Named:
    """The same whatever it does, as the source of a class is not part of what it says."""

    inner: Own = field(repr=False)
    name: ClassVar[str] = "own"
    needs_gradient: ClassVar[bool] = False

    def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        return self.inner.observe(model, batch)

    def result(self, rows: Any) -> MeanRecord:
        return self.inner.result(rows)


def test_a_metric_may_have_the_number_of_a_place(gpt2: Any) -> None:
    batches = questions(gpt2, 4, batch_size=2)
    records = al.isolation_sweep(
        gpt2, batches, {"a": al.Site(0)}, metrics=[Own(sevens, name="0")], draws=1, **QUIET
    )
    assert float(records["0"].mean) == 7
    with pytest.raises(MetricError, match='a name without "/"'):
        al.run(gpt2, batches, [Own(sevens, name="a/b")], **QUIET)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_looks_may_not_change(gpt2: Any, checkpoint: bool) -> None:
    """Else one metric would change the numbers of all others."""
    halves = ("blocks.0.attn.hook_pattern", lambda pattern, hook: pattern / 2)
    metrics: list[al.Metric] = [al.SaliencyFlows(), Own(sevens, hooks=(halves,))]
    with pytest.raises(HookError, match="a hook of metric 'own' must return None"):
        al.run(gpt2, questions(gpt2, 2), metrics, gradient_checkpointing=checkpoint, **QUIET)


def nothing(batch: al.PromptBatch) -> Any:
    return None


def nowhere(batch: al.PromptBatch) -> Any:
    return [("blocks.9.attn.hook_pattern", lambda pattern, hook: None)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"metrics": iter([al.Accuracy()])}, "expected a list of metrics; got a list_iterator"),
        ({"metrics": al.Accuracy()}, "expected a list of metrics; got a Accuracy"),
        ({"batches": iter([])}, "expected a list of batches; got a list_iterator"),
        ({"batches": [[]]}, r"got one of list; lists of several calls are joined by \+"),
        ({"hooks": []}, "hooks is a function of the batch to hooks"),
        ({"hooks": nothing}, r"hooks must return a list of \(hook point, function\); got None"),
        ({"hooks": nowhere}, "no hook point 'blocks.9.attn.hook_pattern'"),
        ({"resamples": 1.5}, "resamples must be 0"),
    ],
)
def test_what_is_no_list_is_refused(gpt2: Any, change: dict[str, Any], said: str) -> None:
    call: dict[str, Any] = {"batches": questions(gpt2, 2), "metrics": [al.Accuracy()]}
    call |= {"progress": False} | change
    with pytest.raises(al.AnchorlensError, match=said):
        al.run(gpt2, **call)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda logits, batch: logits.detach()[:, 0], "one without a graph"),
        (lambda logits, batch: logits[:, 0] * float("nan"), "loss is not finite"),
    ],
)
def test_losses_that_say_nothing(gpt2: Any, loss: Any, said: str) -> None:
    with pytest.raises(MetricError, match=said):
        al.run(gpt2, questions(gpt2, 1), [al.SaliencyFlows()], loss=loss, **QUIET)


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (lambda: al.Site(0), "sites are {name: al.Site"),
        (lambda: {"a": range(2)}, "sites are {name: al.Site"),
        (lambda: {"a": al.Site(1.0)}, "layers must be whole numbers; got 1.0"),  # type: ignore[arg-type]
    ],
)
def test_sites_of_another_kind(gpt2: Any, places: Any, said: str) -> None:
    with pytest.raises(HookError, match=said):
        al.isolation_sweep(gpt2, questions(gpt2, 2), places(), draws=1, **QUIET)


def test_layers_of_any_kind(gpt2: Any, tmp_path: Any) -> None:
    """Of torch or once through: the same result, which can be saved."""
    batches = questions(gpt2, 2)
    expected = al.isolation_loyalty(gpt2, batches, [0, 1], draws=1, **QUIET)
    for layers in (torch.tensor([1, 0]), (k for k in (0, 1))):
        found = al.isolation_loyalty(gpt2, batches, layers, draws=1, **QUIET)
        assert_same(found, expected)
        assert found.info == expected.info
        found.save(tmp_path / "record.safetensors")


def test_hooks_without_a_hash_and_inference_mode_share(gpt2: Any) -> None:
    @dataclass
    class Change:
        layers: list[int]

        def __call__(self, batch: al.PromptBatch) -> Any:
            return al.isolate_labels(gpt2, batch, self.layers)

    with torch.inference_mode():
        found = al.run(gpt2, questions(gpt2, 3), [al.SaliencyFlows()], hooks=Change([0]), **QUIET)
    assert "run once" in found["saliency_flows"].info["shared_prefix"]
