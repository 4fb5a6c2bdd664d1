"""The text of a hard prompt in other models, compared with plain passes of each prompt alone."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers.normalizers import Lowercase

import anchorlens as al
from anchorlens.contexts import hard_prompts
from anchorlens.contexts.training import query_digests
from anchorlens.errors import AnchorlensError
from tests.support.asked import ask
from tests.support.measures import does_not_run
from tests.support.plain_prompts import rows
from tests.support.printed_code import printed
from tests.support.tiny_models import LONG_LABELS, questions, tiny_gpt2


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


@pytest.mark.slow("trained contexts")
@pytest.mark.filterwarnings("ignore:.*intervals of")
def test_a_text_answers_in_each_model_as_in_plain_passes(gpt2: Any, gemma3: Any) -> None:
    in_model = printed("own_context.md", "in_model")
    prompt = hard_prompts.of_tokens(gpt2, [300, 411, 352, 17], held_out=questions(gpt2, 14))
    seen = set()
    for model in (gpt2, gemma3):
        batches = questions(model, 14, batch_size=7)
        record = in_model(prompt, model, batches, draws=3)
        ids = model.tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        read = hard_prompts.of_text(model, prompt.text, held_out=batches)
        assert read.ids.tolist() == ids and read.text == prompt.text and read.encodes_back
        drawn = hard_prompts.random(model, held_out=batches, length=len(ids), draws=3)
        random = torch.stack([right(model, batches, each.ids.tolist()) for each in drawn])
        text, empty = (right(model, batches, before) for before in (ids, list[int]()))
        for name, value in {
            "accuracy": torch.stack([empty.mean(), text.mean()]),
            "random_accuracy": random.mean(1),
            "gain_over_first": torch.stack([torch.tensor(0.0), (text - empty).mean()]),
            "gain_over_random": torch.stack([empty.mean(), text.mean()]) - random.mean(),
        }.items():
            torch.testing.assert_close(getattr(record, name).double(), value.double())
        assert read.training.best_accuracy == record.accuracy[1].float()
        seen |= {float(text.mean()), float(empty.mean()), *random.mean(1).tolist()}
        for name in ("gain_over_first", "gain_over_random"):
            low, high = record.intervals[name][:, 1]
            assert low < getattr(record, name)[1] < high
    assert len(seen) > 3, "the models do not answer alike"


@pytest.mark.slow("trained contexts")
def test_what_a_model_cannot_read_is_an_error_before_any_pass(gpt2: Any, byte_level: Any) -> None:
    held_out = questions(gpt2, 4)
    ids = byte_level("Say What", add_special_tokens=False)["input_ids"]
    prompt = hard_prompts.of_tokens(gpt2, ids, held_out=held_out)
    used = replace(prompt, info={**prompt.info, "queries_in_training": query_digests(held_out)})
    demos = [al.Example("a", 0), al.Example("b", 1)]
    long = al.build_prompts(gpt2.tokenizer, LONG_LABELS, demos, [al.Example("c", 0)])
    of_long = hard_prompts.of_tokens(gpt2, ids, held_out=long)
    lower = deepcopy(byte_level)
    lower.backend_tokenizer.normalizer = Lowercase()
    fits = gpt2.cfg.n_ctx - 60
    many = hard_prompts.of_tokens(gpt2, ids[:1] * fits, held_out=held_out)
    short = al.load_model(tiny_gpt2(len(byte_level), n_positions=fits), tokenizer=byte_level)
    for model, text, batches, tokenizer, message in (
        (gpt2, prompt, held_out, lower, "cannot encode the text 'Say What': its tokens give 'say"),
        (gpt2, "", held_out, None, "cannot encode the text '': .* a text that is empty"),
        (gpt2, used, held_out, None, "4 of these queries trained or chose the hard prompt"),
        (gpt2, prompt, long, None, r"labels \['Abbrev.*these queries have \['Table', 'Window'\]"),
        (gpt2, of_long, long, None, "a label word has several tokens"),
        (short, many, held_out, None, "use shorter queries, or a context with fewer"),
    ):
        with pytest.raises(AnchorlensError, match=message), does_not_run(model):
            hard_prompts.of_text(model, text, held_out=batches, tokenizer=tokenizer)


def test_the_queries_of_a_search_are_refused_after_its_text_too(gpt2: Any) -> None:
    """Also if the text was read with other queries."""
    held_out, others = questions(gpt2, 4, batch_size=2)
    prompt = hard_prompts.of_tokens(gpt2, [300], held_out=[held_out])
    used = replace(prompt, info={**prompt.info, "queries_in_training": query_digests([held_out])})
    text = hard_prompts.of_text(gpt2, used, held_out=[others])
    for asked in (
        al.ContextComparison({"text": text}, repeats=0),
        al.ContextComparison({"nothing": al.contexts.NoContext()}, random=[text], repeats=0),
    ):
        with pytest.raises(AnchorlensError, match="2 of these queries were used"):
            al.run(gpt2, [held_out], [asked], progress=False, resamples=0)


@pytest.mark.slow("trained contexts")
def test_a_random_control_is_a_context_and_joins_those_that_are_drawn(gpt2: Any) -> None:
    batches = questions(gpt2, 4, batch_size=2)
    none, contexts = al.contexts.NoContext(), {"words": al.compress}
    options: list[Any] = [{"draws": 2}, {"random": [none]}, {"draws": 2, "random": [none]}]
    asked = (al.ContextComparison(contexts, repeats=0, **more) for more in options)
    quiet: dict[str, Any] = {"progress": False, "resamples": 0}
    drawn, given, both = (ask(gpt2, batches, each, **quiet).random_kl for each in asked)
    assert torch.equal(both, torch.cat([given, drawn])) and len(both.unique()) == 3
