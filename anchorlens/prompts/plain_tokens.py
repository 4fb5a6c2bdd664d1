"""The tokens of a tokenizer that are plain text: they survive being decoded and encoded."""

import re
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool
from torch import Tensor

from ..errors import PromptError

_BYTE_OR_UNUSED = re.compile(r"<0x[0-9A-Fa-f]{2}>|[<\[].*(unused|reserved).*[>\]]")

# For each tokenizer, because 262,144 tokens take seconds. A tokenizer can get more tokens later.
_known: WeakKeyDictionary[Any, tuple[int, Bool[Tensor, " vocab"]]] = WeakKeyDictionary()


def plain_tokens(tokenizer: Any, count: int) -> Bool[Tensor, " vocab"]:
    """Which of the model's ``count`` tokens may stand in a text.

    Left out are added tokens, tokens for single bytes, unused ones, those whose text, encoded
    alone, gives other tokens, and those that the tokenizer does not know.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise PromptError(
            f"hard prompts need a fast Hugging Face tokenizer; got a {type(tokenizer).__name__}; "
            "pass tokenizer=AutoTokenizer.from_pretrained(...)"
        )
    if tokenizer not in _known or _known[tokenizer][0] != len(tokenizer):
        _known[tokenizer] = len(tokenizer), _plain_tokens(tokenizer)
    known = _known[tokenizer][1]
    plain = torch.zeros(count, dtype=torch.bool, device="cpu")
    plain[: len(known)] = known[:count]
    return plain


def _plain_tokens(tokenizer: Any) -> Bool[Tensor, " vocab"]:
    names = tokenizer.get_vocab()
    left_out = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    left_out |= {token for name, token in names.items() if _BYTE_OR_UNUSED.fullmatch(name)}
    ids = sorted(set(names.values()) - left_out)
    # The methods of the library below transformers take a third of the time. This call removes
    # the padding and truncation that an earlier call has set there.
    tokenizer("")
    core = tokenizer.backend_tokenizer
    texts = core.decode_batch([[token] for token in ids], skip_special_tokens=False)
    encoded = core.encode_batch_fast(texts, add_special_tokens=False)
    plain = torch.zeros(max(names.values()) + 1, dtype=torch.bool, device="cpu")
    plain[[token for token, code in zip(ids, encoded, strict=True) if code.ids == [token]]] = True
    return plain
