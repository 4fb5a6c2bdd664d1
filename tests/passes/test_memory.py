"""When memory runs out, the same prompts run in smaller parts, and none is lost."""

import ctypes
import resource
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import anchorlens as al
from anchorlens.passes import memory
from anchorlens.passes.forward import run_pass
from anchorlens.passes.memory import is_out_of_memory
from anchorlens.prompts.batch import only_set
from anchorlens.runs import way
from anchorlens.runs.study import PartsThatFit
from tests.support.measures import same
from tests.support.stored_runs import Logits, run
from tests.support.tiny_models import questions

CUDA = "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"


class Limited(Logits):
    """The logits of label words on a device that holds ``dies_in`` prompts, or any number."""

    def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
        if self.dies_in is not None and len(batch) > self.dies_in:
            raise torch.OutOfMemoryError(CUDA)
        return Logits(seen=self.seen).contributions(batch, seen)


def close(values: Tensor, expected: Tensor) -> bool:
    return bool(torch.allclose(values, expected, rtol=0, atol=2e-5 * float(expected.abs().max())))


def test_errors_of_full_memory_are_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"))
    assert is_out_of_memory(MemoryError())
    for later in (
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Invalid buffer size: 80.00 GiB",
    ):
        assert is_out_of_memory(RuntimeError(later))
    for other in (RuntimeError(), RuntimeError(5), ValueError(CUDA), KeyboardInterrupt()):
        assert not is_out_of_memory(other)


@pytest.mark.slow("many passes")
@pytest.mark.filterwarnings("ignore:in . of . sets of demonstrations")
def test_a_run_that_runs_out_of_memory_loses_no_prompt(gpt2: Any, tmp_path: Path) -> None:
    batches = questions(gpt2, count=12, batch_size=5)
    expected = run(gpt2, Logits(), None, batches=batches)
    metric = Limited(dies_in=2)
    options: dict[str, Any] = {"batches": batches}
    options["metrics"] = [metric, al.SaliencyFlows(), al.AttentionAUCROC()]
    with pytest.warns(UserWarning, match="do not fit into memory") as warned:
        records = run(gpt2, metric, tmp_path, **options)
    messages = [str(warning.message) for warning in warned if "memory" in str(warning.message)]
    assert [message.split("going on with ")[1] for message in messages] == [
        "3 at a time",
        "2 at a time",
    ]
    assert metric.seen == [2, 2, 1] * 2 + [2]
    for name, record in records.items():
        for field, value in record.tensors().items():
            assert close(value.nan_to_num(-1), getattr(expected[name], field).nan_to_num(-1))
    again = options | {"metrics": [Limited(), *options["metrics"][1:]]}
    assert same(run(gpt2, Limited(), tmp_path, **again), records)  # read from the folder


@pytest.mark.slow("many passes")
def test_a_prompt_that_does_not_fit_raises_and_stored_rows_stay(gpt2: Any, tmp_path: Path) -> None:
    batches = questions(gpt2, count=6, batch_size=2)
    expected = run(gpt2, Logits(), None, batches=batches, metrics=[Logits()])
    length = int(batches[1].attention_mask[0].sum())

    class Full(Limited):
        def contributions(self, batch: al.PromptBatch, seen: al.reads.Seen) -> dict[str, Tensor]:
            inner = Limited(seen=self.seen, dies_in=self.dies_in if self.seen else 2)
            return inner.contributions(batch, seen)

    full = Full(dies_in=0)
    with (
        pytest.warns(UserWarning, match="going on with 1 at a time"),
        pytest.raises(
            al.errors.MemoryLimitError,
            match=rf"a prompt of {length} tokens does not fit into memory by itself "
            rf"\(CUDA out of memory\. Tried .* GiB\.\); use fewer or shorter demonstrations",
        ),
    ):
        run(gpt2, full, tmp_path, batches=batches, metrics=[full])
    assert [path.name for path in tmp_path.iterdir()] == ["rows-00000.safetensors"]
    metric = Full()
    assert same(run(gpt2, metric, tmp_path, batches=batches, metrics=[metric]), expected)
    assert metric.seen == [2, 2, 2]


def test_other_errors_are_not_tried_again(gpt2: Any) -> None:
    def rows(part: al.PromptBatch, names: Sequence[str]) -> dict[str, Tensor]:
        raise RuntimeError("size mismatch")

    with pytest.raises(RuntimeError, match="size mismatch"):
        PartsThatFit(rows).contributions(questions(gpt2, count=4, batch_size=4)[0])


@pytest.mark.slow("many passes")
def test_a_part_of_a_batch_shares_no_longer_prefix_than_its_set_does(
    gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set is also in a mixed batch, where queries begin with other words."""
    examples = al.load_examples("questions")
    ours, others = (al.sample_demonstrations(examples, seed=seed) for seed in (1, 2))

    def beginning_with(word: str) -> list[al.Example]:
        return [
            example for example in examples if example.text.startswith(word) and example not in ours
        ]

    what = beginning_with("What")[:4]
    # Their first words differ too: a word that both begin with would be the same prefix for both.
    differ = [beginning_with(word)[0] for word in ("Who", "How")]

    def prompts(demos: Any, queries: Any) -> list[al.PromptBatch]:
        return al.build_prompts(gpt2.tokenizer, al.TASKS["trec"], demos, queries, batch_size=4)

    pure = [*prompts(ours, what), *prompts(others, what)]
    (mixed,) = prompts([ours, ours, others, others], [*differ, *what[:2]])
    assert only_set(mixed) is None
    assert {only_set(batch) for batch in pure} == set(mixed.demonstrations_id.tolist())
    pure += prompts(al.sample_demonstrations(examples, seed=3), what)  # this set may be shared
    expected = al.target_logits(gpt2, [mixed, *pure], progress=False)
    seen: list[int] = []

    def of_two_prompts(model: Any, batch: al.PromptBatch, **options: Any) -> Any:
        if len(batch) > 2:
            raise torch.OutOfMemoryError(CUDA)
        seen.append(len(batch))
        return run_pass(model, batch, **options)

    monkeypatch.setattr("anchorlens.runs.passes.run_checked", of_two_prompts)
    monkeypatch.setattr(way, "Way", partial(way.Way, run=of_two_prompts))
    with pytest.warns(UserWarning, match="do not fit into memory"):
        logits = al.target_logits(gpt2, [mixed, *pure], progress=False)
    assert max(seen) == 2
    assert close(logits, expected)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_freed_pieces_return_to_the_system() -> None:
    memory.return_freed_memory()
    before = resident()
    # Too small to be returned at once. The last piece, at the end, would hold all the others.
    pieces = [torch.ones(2**14) for _ in range(2**11)]
    last = pieces.pop()
    del pieces
    memory.return_freed_memory()
    assert resident() - before < 2**25
    assert last.sum() == 2**14


def test_another_c_library_has_nothing_to_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", Mock(side_effect=OSError("no such library")))
    memory._trim.cache_clear()
    memory.return_freed_memory()
    memory._trim.cache_clear()
