"""Where memory runs out the same prompts are run, fewer at a time, and none is lost."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from measures import hooks_on
from stored_runs import Logits, run, same
from tiny_models import questions
from torch import Tensor

import anchorlens as al
from anchorlens.errors import MemoryLimitError
from anchorlens.passes.forward import run_pass
from anchorlens.passes.memory import PartsThatFit, is_out_of_memory
from anchorlens.passes.shared_prefix import only_set

pytestmark = pytest.mark.without_jaxtyping

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"


class Limited(Logits):
    """The label words' logits on a device that holds ``dies_in`` prompts, where that is given."""

    def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
        inner = Logits(seen=self.seen).observe(model, batch)

        def rows(logits: Tensor, clean_logits: Tensor | None) -> dict[str, Tensor]:
            if self.dies_in is not None and len(batch) > self.dies_in:
                raise torch.OutOfMemoryError(CUDA)
            return inner.rows(logits, clean_logits)

        return al.Observation(rows)


def limited(size: int, behind_cache: int, seen: list[int]) -> Callable[..., Any]:
    """``run_pass`` on a device that holds so many whole prompts, or queries behind cached keys."""

    def either(model: Any, batch: al.PromptBatch, **options: Any) -> Any:
        if len(batch) > (size if options.get("prefix") is None else behind_cache):
            raise torch.OutOfMemoryError(CUDA)
        seen.append(len(batch))
        return run_pass(model, batch, **options)

    return either


def close(found: Tensor, expected: Tensor) -> bool:
    """Up to what the shape of a batch does to rounding."""
    return bool(torch.allclose(found, expected, rtol=0, atol=2e-5 * float(expected.abs().max())))


def test_what_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert is_out_of_memory(MemoryError())
    for other in (RuntimeError(), RuntimeError(5), ValueError(CUDA), KeyboardInterrupt()):
        assert not is_out_of_memory(other)


def test_every_prompt_once_and_in_order(gpt2: Any) -> None:
    for count, size in ((1, 1), (2, 1), (5, 5), (5, 2), (11, 3)):
        batch = questions(gpt2, count=count, batch_size=count)[0]
        seen: list[int] = []

        def rows(
            part: al.PromptBatch, size: int = size, seen: list[int] = seen
        ) -> dict[str, Tensor]:
            if len(part) > size:
                raise RuntimeError(CUDA)
            seen.append(len(part))
            return {"index": part.index}

        fitting = PartsThatFit(rows)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = fitting.rows(batch)
        assert any("do not fit into memory" in str(one.message) for one in said) == (count > size)
        assert torch.equal(found["index"], batch.index)
        assert sum(seen) == count and max(seen) <= size
        first = seen.copy()
        fitting.rows(batch)  # goes on with what worked, and says nothing
        assert seen == first * 2


def test_parts_of_a_batch_are_its_prompts(gpt2: Any) -> None:
    for side in ("left", "right"):
        gpt2.tokenizer.padding_side = side
        batch = questions(gpt2, count=7, batch_size=7)[0]
        wide = batch.padded_right() if side == "left" else batch.padded_left()
        for whole in (batch, wide):
            part = whole.prompts(2, 5)
            assert len(part) == 3
            for k in range(3):
                ours, theirs = part.prompt(k), whole.prompt(2 + k)
                assert torch.equal(ours.tokens, theirs.tokens)
                for name in ("label_positions", "target_positions", "query_start", "groups"):
                    assert torch.equal(getattr(ours, name), getattr(theirs, name))
            assert part.attention_mask.any(0).all()


@pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")
def test_a_run_that_runs_out_of_memory_loses_no_prompt(gpt2: Any, tmp_path: Path) -> None:
    batches = questions(gpt2, count=12, batch_size=5)
    expected = run(gpt2, Logits(), None, batches=batches)
    metric, hooks = Limited(dies_in=2), hooks_on(gpt2)
    options: dict[str, Any] = {"batches": batches}
    options["metrics"] = [metric, al.SaliencyFlows(), al.AttentionAUCROC()]
    with pytest.warns(UserWarning, match="do not fit into memory") as said:
        found = run(gpt2, metric, tmp_path, **options)
    told = [str(one.message) for one in said if "memory" in str(one.message)]
    assert [one.split("going on with ")[1] for one in told] == ["3 at a time", "2 at a time"]
    assert metric.seen == [2, 2, 1] * 2 + [2]
    assert hooks_on(gpt2) == hooks
    for name, record in found.items():
        for field, value in record.tensors().items():
            assert close(value.nan_to_num(-1), getattr(expected[name], field).nan_to_num(-1))
    again = options | {"metrics": [Limited(), *options["metrics"][1:]]}
    assert same(run(gpt2, Limited(), tmp_path, **again), found)  # from the folder


def test_a_prompt_that_does_not_fit_is_told_and_what_was_done_is_kept(
    gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = questions(gpt2, count=6, batch_size=2)
    expected = run(gpt2, Logits(), None, batches=batches, metrics=[Logits()])
    metric, length = Limited(), int(batches[1].attention_mask[0].sum())

    class Full(Limited):
        def observe(self, model: Any, batch: al.PromptBatch) -> al.Observation:
            left = Limited(seen=self.seen, dies_in=2 if len(self.seen) < 1 else 0)
            return left.observe(model, batch)

    full = Full()
    with (
        pytest.warns(UserWarning, match="going on with 1 at a time"),
        pytest.raises(
            MemoryLimitError,
            match=rf"a prompt of {length} tokens does not fit into the memory of cpu by itself "
            rf"\(CUDA out of memory\. Tried .* GiB\.\); use fewer or shorter demonstrations",
        ),
    ):
        run(gpt2, full, tmp_path, batches=batches, metrics=[full])
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "rows-00000.safetensors"}
    monkeypatch.setattr(Full, "observe", Limited.observe)
    metric = Full()
    assert same(run(gpt2, metric, tmp_path, batches=batches, metrics=[metric]), expected)
    assert metric.seen == [2, 2, 2]


def test_other_errors_are_not_tried_again(gpt2: Any) -> None:
    def rows(part: al.PromptBatch) -> dict[str, Tensor]:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        PartsThatFit(rows).rows(questions(gpt2, count=4, batch_size=4)[0])


def limit_passes(patch: pytest.MonkeyPatch, run_pass: Any) -> None:
    for name in ("passes.shared_prefix", "runs.trial"):
        patch.setattr(f"anchorlens.{name}.run_pass", run_pass)


def test_shared_demonstrations_are_tried_with_what_fits(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of memory in the trial says nothing about whether a cache gives the same."""
    batches = questions(gpt2, count=8, batch_size=4)
    expected = al.isolation_loyalty(gpt2, batches, [0], draws=1, progress=False)
    assert "run once for all" in expected.info["shared_prefix"]
    for sizes in ((1, 9), (9, 1)):
        seen: list[int] = []
        with monkeypatch.context() as patched:
            limit_passes(patched, limited(*sizes, seen))
            with pytest.warns(UserWarning, match="do not fit into memory"):
                found = al.isolation_loyalty(gpt2, batches, [0], draws=1, progress=False)
        assert found.info == expected.info
        assert max(seen) <= max(sizes)
        assert close(found.random_kl, expected.random_kl) and close(found.kl, expected.kl)
        assert torch.equal(found.label_kept, expected.label_kept)


def test_a_part_shares_no_more_than_its_set_does(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set that stands in a mixed batch too, of queries that begin otherwise."""
    examples = al.load_examples("questions")
    ours, others = (al.sample_demonstrations(examples, seed=seed) for seed in (1, 2))
    what = [one for one in examples if one.text.startswith("What") and one not in ours][:4]
    who = [one for one in examples if one.text.startswith("Who") and one not in ours][:2]

    def prompts(demos: Any, queries: Any) -> list[al.PromptBatch]:
        return al.build_prompts(gpt2.tokenizer, al.TASKS["trec"], demos, queries, batch_size=4)

    pure = [*prompts(ours, what), *prompts(others, what)]
    (mixed,) = prompts([ours, ours, others, others], [*who, *what[:2]])
    assert only_set(mixed) is None
    assert {only_set(batch) for batch in pure} == set(mixed.demonstrations_id.tolist())
    pure += prompts(al.sample_demonstrations(examples, seed=3), what)  # one that may be shared
    expected = al.target_logits(gpt2, [mixed, *pure], progress=False)
    seen: list[int] = []
    limit_passes(monkeypatch, limited(2, 2, seen))
    with pytest.warns(UserWarning, match="do not fit into memory"):
        found = al.target_logits(gpt2, [mixed, *pure], progress=False)
    assert max(seen) == 2
    assert close(found, expected)
