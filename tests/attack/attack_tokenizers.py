"""Tokenizers of many kinds, each made in memory."""

from collections.abc import Callable
from functools import cache
from typing import Any

from tiny_models import TEXTS, byte_level_tokenizer, sentencepiece_like_tokenizer
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

BYTES = pre_tokenizers.ByteLevel.alphabet()
# Words in the languages of the attack; without them every such word would be unknown.
OTHER_LANGUAGES = [
    "naïve café Ünïcode ﬁne ½ Å",
    "привет мир",
    "שלום עולם",
    "مرحبا",
    "日本語 テスト",
    "한국어",
]


def _trained(core: Tokenizer, trainer: Any) -> Tokenizer:
    core.train_from_iterator([*TEXTS, *OTHER_LANGUAGES * 5], trainer)
    return core


def _bpe(size: int, special: list[str], alphabet: list[str] | None = None) -> Any:
    return trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=alphabet or [],
        show_progress=False,
    )


def _with_bos(core: Tokenizer, bos: str) -> None:
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
    )


def _byte_level(
    *,
    prefix_space: bool = False,
    bos: bool = False,
    trim: bool = True,
    normalizer: Any = None,
    split: str | None = None,
    size: int = 700,
) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    if normalizer is not None:
        core.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=split is None)
    if split is None:
        core.pre_tokenizer = level
    else:
        splitter = pre_tokenizers.Split(Regex(split), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([splitter, level])
    core.decoder = decoders.ByteLevel()
    core = _trained(core, _bpe(size, ["<s>"], BYTES))
    if bos:
        _with_bos(core, "<s>")
    else:
        core.post_processor = processors.ByteLevel(trim_offsets=trim)
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="<s>")


def _metaspace(scheme: str, kind: str, normalizer: Any = None) -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "<unk>"]
    if kind == "unigram":
        core = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(
            vocab_size=900, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        core = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = _bpe(900, special)
    if normalizer is not None:
        core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    core = _trained(core, trainer)
    _with_bos(core, "<s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    )


def _llama_legacy() -> PreTrainedTokenizerFast:
    """Puts a space before the text, and writes spaces as symbols."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<pad>", "<s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    core.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    core = _trained(core, _bpe(900, special))
    core.pre_tokenizer = pre_tokenizers.Sequence([])
    _with_bos(core, "<s>")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", pad_token="<pad>", unk_token="<unk>"
    )


def _wordpiece(lowercase: bool, sep: bool = False) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=900, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    core = _trained(core, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]" if sep else "[CLS] $A",
        special_tokens=[(name, core.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="[CLS]", pad_token="[PAD]", unk_token="[UNK]"
    )


def _word_level() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    core = _trained(core, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token="<unk>")


def _end_of_word() -> PreTrainedTokenizerFast:
    """Like CLIP's tokenizer: lower case, with a mark at the end of each word."""
    core = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    core.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>"],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    core = _trained(core, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", unk_token="<unk>", pad_token="<unk>"
    )


def _added(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Add marks of a chat, some of which take in the spaces around them."""
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
