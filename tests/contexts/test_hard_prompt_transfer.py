"""The text of a hard prompt in other models, compared with plain passes of each prompt alone."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.normalizers import Lowercase

import anchorlens as al
from anchorlens.contexts.training import query_digests
from anchorlens.errors import AnchorlensError
from anchorlens.passes.forward import after_each_pass
from tests.replication.test_across_models import Loading
from tests.support.plain_prompts import rows
from tests.support.tiny_models import LONG_LABELS, questions, tiny_gpt2

QUIET: dict[str, Any] = {"progress": False}
SMALL = pytest.mark.filterwarnings("ignore:.*intervals of", "ignore:.*failed:")


def prompts(tokenizer: Any) -> list[al.PromptBatch]:
    examples = al.load_examples("questions")
    demos = al.sample_demonstrations(examples, seed=1)
    queries = al.sample_queries(examples, 14, 1, exclude=demos)
    return al.build_prompts(tokenizer, al.TASKS["trec"], demos, queries, batch_size=7)


def right(model: Any, batches: list[al.PromptBatch], before: list[int]) -> torch.Tensor:
    """1 for each query that the plain model answers right after these tokens, one at a time."""
    words, answers = batches[0].label_token_ids, list[bool]()
    for row in rows(batches):
        bos = row.tokens[: int(batches[0].begins_with_bos)]
        tokens = torch.tensor([[*bos, *before, *row.tokens[row.query_start : row.target + 1]]])
        with torch.no_grad():
            logits = model.original_model(input_ids=tokens).logits[0, -1]
        answers.append(int(logits[words].argmax()) == row.gold)
    return torch.tensor(answers).double()


@SMALL
def test_a_text_answers_in_each_model_as_in_plain_passes(
    gpt2: Any, gemma3: Any, tmp_path: Path
) -> None:
    own = prompts(gpt2.tokenizer)
    prompt = al.contexts.hard_prompts.of_tokens(gpt2, [300, 411, 352, 17], held_out=own)
    models = {"own": gpt2, "none": tmp_path / "none", "other": gemma3}
    call: dict[str, Any] = {"draws": 3, "seed": 5, "folder": tmp_path / "runs", **QUIET}
    record = al.contexts.transfer_hard_prompt(prompt, models, prompts, **call)
    assert record.info["models"] == [*models] and record.info["text"] == prompt.text
    assert record.accuracy[0].float() == prompt.encoded_accuracy
    seen = set()
    for k, model in ((0, gpt2), (2, gemma3)):
        batches = prompts(model.tokenizer)
        ids = model.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        drawn = al.contexts.hard_prompts.random(
            model, held_out=batches, length=len(ids), draws=3, seed=5
        )
        random = torch.stack([right(model, batches, each.ids.tolist()) for each in drawn])
        text, empty = (right(model, batches, before) for before in (ids, list[int]()))
        expected = {
            "tokens": len(ids),
            "accuracy": text.mean(),
            "empty_accuracy": empty.mean(),
            "random_accuracy": random.mean(1),
            "gain_over_empty": (text - empty).mean(),
            "gain_over_random": text.mean() - random.mean(),
        }
        for name, value in expected.items():
            torch.testing.assert_close(
                getattr(record, name)[k].double(), torch.as_tensor(value).double()
            )
        seen |= {float(text.mean()), float(empty.mean()), *random.mean(1).tolist()}
        low, high = record.intervals["gain_over_empty"][:, k]
        assert low < record.gain_over_empty[k] < high
    assert len(seen) > 3, "the models do not answer alike"
    assert "there is no folder" in record.info["missing"]["none"]
    assert record.gain_over_random[1].isnan() and record.intervals["accuracy"][:, 1].isnan().all()
    path = record.save(tmp_path / "record.safetensors")
    loaded = al.contexts.HardPromptTransferRecord.load(path)
    table = loaded.table()
    assert table.index.tolist() == [*models] and table.loc["none", "accuracy"] == ""
    assert table.loc["own", "accuracy"] == format(record.estimate("accuracy", 0), ".2f")
    bars = loaded.plot().data
    assert [bar.y[2] for bar in bars] == pytest.approx(
        [float(record.accuracy[2]), float(record.empty_accuracy[2]), random.mean().item()]
    )
    low, high = record.random_accuracy[2].aminmax()
    assert [*bars[2].customdata[2]] == [float(low), float(high)]
    assert (tmp_path / "runs" / "model other").is_dir()


@SMALL
def test_what_a_model_cannot_read_is_a_row_with_its_reason(gpt2: Any, byte_level: Any) -> None:
    lower = deepcopy(byte_level)
    lower.backend_tokenizer.normalizer = Lowercase()
    held_out = questions(gpt2, 4)
    ids = byte_level("Say What", add_special_tokens=False)["input_ids"]
    prompt = al.contexts.hard_prompts.of_tokens(gpt2, ids, held_out=held_out)
    loading = Loading(lower)
    call: dict[str, Any] = {"draws": 1, "resamples": 0, **QUIET}
    record = al.contexts.transfer_hard_prompt(
        prompt, dict.fromkeys("abc", loading), prompts, **call
    )
    assert record.accuracy.isnan().all() and loading.alive == [0, 0, 0]
    assert (
        "cannot encode the text 'Say What': its tokens give 'say what'"
        in (record.info["missing"]["c"])
    )

    def reason(prompt: al.contexts.HardPrompt, batches: Any) -> str:
        record = al.contexts.transfer_hard_prompt(prompt, {"x": gpt2}, lambda _: batches, **call)
        return str(record.info["missing"]["x"])

    used = replace(prompt, info={**prompt.info, "queries_in_training": query_digests(held_out)})
    assert "4 of these queries were used to train or to choose" in reason(used, held_out)
    demos = [al.Example("a", 0), al.Example("b", 1)]
    long = al.build_prompts(gpt2.tokenizer, LONG_LABELS, demos, [al.Example("c", 0)])
    assert "these queries have ['Table', 'Window']" in reason(prompt, long)
    of_long = al.contexts.hard_prompts.of_tokens(gpt2, ids, held_out=long)
    assert "a label word has several tokens" in reason(of_long, long)
    fits = gpt2.cfg.n_ctx - 60
    many = al.contexts.hard_prompts.of_tokens(gpt2, ids[:1] * fits, held_out=held_out)
    short = al.load_model(tiny_gpt2(len(byte_level), n_positions=fits), tokenizer=byte_level)
    passes: list[int] = []
    with after_each_pass(lambda: passes.append(1)):
        record = al.contexts.transfer_hard_prompt(
            many, {"short": short}, lambda _: held_out, **call
        )
    assert not passes
    assert "use shorter queries, or a context with fewer" in record.info["missing"]["short"]


def nothing() -> Any:
    raise AssertionError("a model was loaded")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sentiment"}, r"labels \['Abbrev.*these queries have \['Negative', 'Positive'\]"),
        ({"task": "trek"}, "there is no task 'trek'"),
        ({"models": {}}, "expected models of different names"),
        ({"draws": 0}, "draws must be a whole number from 1"),
        ({"resamples": -1}, "resamples must be a whole number from 0"),
        ({"folder": __file__}, "cannot be a folder"),
        ({"prompt": ""}, "has no text"),
    ],
)
def test_mistakes_are_found_before_a_model_is_loaded(
    gpt2: Any, changes: dict[str, Any], message: str
) -> None:
    prompt = al.contexts.hard_prompts.of_tokens(gpt2, [300], held_out=questions(gpt2, 2))
    prompt = replace(prompt, text=changes.pop("prompt", prompt.text))
    call = {"models": {"a": nothing}, "task": "questions", **QUIET, **changes}
    with pytest.raises(AnchorlensError, match=message):
        al.contexts.transfer_hard_prompt(prompt, **call)
