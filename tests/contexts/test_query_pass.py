"""How queries run after a context: they are cut out of their prompts, and nothing else is."""

from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.contexts.protocol import bos_of, check_queries, queries_after
from anchorlens.errors import PromptError
from tests.support.measures import centred, difference
from tests.support.tiny_models import questions


@pytest.mark.parametrize("side", ["left", "right"])
def test_queries_stand_after_the_tokens(llama: Any, side: str) -> None:
    batch = questions(llama, 4, padding_side=side)[0]
    queries = queries_after(batch, torch.tensor([7, 8]))
    for row in range(4):
        inside = batch.attention_mask[row].clone()
        inside[: int(batch.query_start[row])] = False
        expected = [7, 8, *batch.tokens[row][inside].tolist()]
        assert queries.tokens[row][queries.attention_mask[row]].tolist() == expected
        assert int(queries.target_positions[row]) == len(expected) - 1
        segments = queries.segments[row][queries.attention_mask[row]].tolist()
        assert segments[2:] == batch.segments[row][inside].tolist()
    assert queries.query_start.tolist() == [2] * 4 and queries.label_positions.shape == (4, 0)
    assert len({int(count) for count in queries.attention_mask.sum(1)}) > 1


@pytest.mark.every_kind
@pytest.mark.parametrize("model", ["gpt2", "llama"], indirect=True)
def test_no_context_gives_the_logits_of_a_query_alone(model: Any) -> None:
    batches = questions(model, 5, batch_size=3, padding_side="left")
    for batch in batches:
        logits = centred(al.contexts.NoContext().logits(model, batch))
        for row in range(len(batch)):
            query = batch.tokens[row, int(batch.query_start[row]) :]
            tokens = torch.cat([bos_of(batch), query])[None]
            with torch.no_grad():
                alone = model(tokens, attention_mask=torch.ones_like(tokens))[:, -1]
            assert difference(logits[row : row + 1], centred(alone)) < 1e-5
    assert al.contexts.NoContext().size == 0
    assert len(bos_of(batches[0])) == int(batches[0].begins_with_bos)


def test_a_query_without_room_after_a_context_is_refused(gpt2: Any) -> None:
    batches = questions(gpt2, 3)
    length = int((batches[0].target_positions - batches[0].query_start).max()) + 1
    room = gpt2.cfg.n_ctx - length
    check_queries(gpt2, batches, room)
    message = f"a query has {length} tokens, but {length - 1} of the model's context of 512"
    with pytest.raises(PromptError, match=message):
        check_queries(gpt2, batches, room + 1)
