"""Tokenizers of many kinds, each made in memory."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import TEXTS, byte_level_tokenizer, sentencepiece_like_tokenizer

BYTES = pre_tokenizers.ByteLevel.alphabet()
# Words in the languages of the attack; without them every such word would be unknown.
OTHER_LANGUAGES = ["naïve café Ünïcode ﬁne ½ Å", "привет мир", "שלום עולם", "مرحبا"]
OTHER_LANGUAGES += ["日本語 テスト", "한국어"]


_UNK = {"unk_token": "<unk>", "pad_token": "<unk>"}
_PAD = {"bos_token": "<s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def _made(
    model: Any,
    trainer: Any,
    tokens: dict[str, str],
    finish: Callable[[Tokenizer], None] = lambda core: None,
    **parts: Any,
) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    for name, part in parts.items():
        if part is not None:
            setattr(core, name, part)
    trainer.show_progress = False
    core.train_from_iterator([*TEXTS, *OTHER_LANGUAGES * 5], trainer)
    finish(core)
    return PreTrainedTokenizerFast(tokenizer_object=core, **tokens)


def _framed(core: Tokenizer, form: str = "<s> $A", *names: str) -> None:
    known = [(name, core.token_to_id(name)) for name in names or ("<s>",)]
    core.post_processor = processors.TemplateProcessing(single=form, special_tokens=known)


def _byte_level(
    *,
    prefix_space: bool = False,
    bos: bool = False,
    trim: bool = True,
    normalizer: Any = None,
    split: str | None = None,
    size: int = 700,
) -> PreTrainedTokenizerFast:
    def finish(core: Tokenizer) -> None:
        if bos:
            _framed(core)
        else:
            core.post_processor = processors.ByteLevel(trim_offsets=trim)

    level: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=split is None)
    if split is not None:
        splitter = pre_tokenizers.Split(Regex(split), "isolated")
        level = pre_tokenizers.Sequence([splitter, level])
    return _made(
        models.BPE(),
        trainers.BpeTrainer(vocab_size=size, special_tokens=["<s>"], initial_alphabet=BYTES),
        {"bos_token": "<s>", "eos_token": "<s>"},
        finish,
        normalizer=normalizer,
        pre_tokenizer=level,
        decoder=decoders.ByteLevel(),
    )


def _metaspace(scheme: str, kind: str, normalizer: Any = None) -> PreTrainedTokenizerFast:
    options: dict[str, Any] = {"vocab_size": 900, "special_tokens": ["<pad>", "<s>", "<unk>"]}
    is_unigram = kind == "unigram"
    return _made(
        models.Unigram() if is_unigram else models.BPE(unk_token="<unk>", fuse_unk=True),
        trainers.UnigramTrainer(**options, unk_token="<unk>")
        if is_unigram
        else trainers.BpeTrainer(**options),
        _PAD,
        _framed,
        normalizer=normalizer,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme),
        decoder=decoders.Metaspace(prepend_scheme=scheme),
    )


def _llama_legacy() -> PreTrainedTokenizerFast:
    """Puts a space before the text, and writes spaces as symbols."""
    fallback = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    special = ["<pad>", "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]

    def finish(core: Tokenizer) -> None:
        core.pre_tokenizer = pre_tokenizers.Sequence([])
        _framed(core)

    return _made(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        trainers.BpeTrainer(vocab_size=900, special_tokens=special),
        _PAD,
        finish,
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), *fallback]),
        pre_tokenizer=pre_tokenizers.Split("▁", "merged_with_next"),
    )


def _wordpiece(lowercase: bool, sep: bool = False) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    form = "[CLS] $A [SEP]" if sep else "[CLS] $A"
    return _made(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=900, special_tokens=special),
        {"bos_token": "[CLS]", "pad_token": "[PAD]", "unk_token": "[UNK]"},
        lambda core: _framed(core, form, "[CLS]", "[SEP]"),
        normalizer=normalizers.BertNormalizer(lowercase=lowercase),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        decoder=decoders.WordPiece(),
    )


def _word_level() -> PreTrainedTokenizerFast:
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"])
    words = pre_tokenizers.Whitespace()
    return _made(models.WordLevel(unk_token="<unk>"), trainer, _UNK, pre_tokenizer=words)


def _end_of_word() -> PreTrainedTokenizerFast:
    """Like CLIP's tokenizer: lower case, with a mark at the end of each word."""
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    return _made(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        trainers.BpeTrainer(
            vocab_size=900, special_tokens=["<unk>", "<s>"], end_of_word_suffix="</w>"
        ),
        _UNK | {"bos_token": "<s>"},
        normalizer=normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()]),
        pre_tokenizer=pre_tokenizers.Whitespace(),
        decoder=decoders.BPEDecoder(suffix="</w>"),
    )


def _added(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens(
        [
            AddedToken("<|user|>", special=True),
            AddedToken("<mask>", lstrip=True, special=True),
            AddedToken("<end>", rstrip=True),
            AddedToken("Positive", single_word=True),
        ]
    )
    return tokenizer


GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ALBERT = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.NFKC(), normalizers.Lowercase()]
ACCENTS = [normalizers.NFD(), normalizers.StripAccents()]

KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level_tokenizer,
    "byte-level, BOS": lambda: _byte_level(bos=True),
    "byte-level, prefix space": lambda: _byte_level(prefix_space=True),
    "byte-level, prefix space, BOS": lambda: _byte_level(prefix_space=True, bos=True),
    "byte-level, whole offsets": lambda: _byte_level(trim=False),
    "byte-level, NFC": lambda: _byte_level(normalizer=normalizers.NFC(), bos=True),
    "byte-level, NFKC": lambda: _byte_level(normalizer=normalizers.NFKC()),
    "byte-level, GPT-4's words": lambda: _byte_level(split=GPT4),
    "byte-level, no words": lambda: _byte_level(split="$^", size=600),
    "byte-level, added tokens": lambda: _added(_byte_level()),
    "byte-level, strip": lambda: _byte_level(normalizer=normalizers.Strip()),
    "sentencepiece-like": sentencepiece_like_tokenizer,
    "sentencepiece-like, added tokens": lambda: _added(sentencepiece_like_tokenizer()),
    "Llama, legacy": _llama_legacy,
    "metaspace BPE, first": lambda: _metaspace("first", "bpe"),
    "metaspace BPE, never": lambda: _metaspace("never", "bpe"),
    "Unigram, always": lambda: _metaspace("always", "unigram"),
    "Unigram, ALBERT": lambda: _metaspace("always", "unigram", normalizers.Sequence(ALBERT)),
    "Unigram, accents": lambda: _metaspace("never", "unigram", normalizers.Sequence(ACCENTS)),
    "WordPiece, lower case": lambda: _wordpiece(True),
    "WordPiece, cased": lambda: _wordpiece(False),
    "WordPiece, SEP": lambda: _wordpiece(True, sep=True),
    "words": _word_level,
    "ends of words": _end_of_word,
}


@cache
def made(kind: str) -> PreTrainedTokenizerFast:
    return KINDS[kind]()
