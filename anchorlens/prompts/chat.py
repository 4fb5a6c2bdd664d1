"""Tasks for chat models: demonstrations are turns of a conversation, in the model's own format.

A chat template is a program. It is therefore run twice: with the turns, and with marks around the
texts in them, which shows what stands around each text; both must agree to the last character. A
third run has an answer to the query, which must follow where the template asks for it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

from ..errors import PromptError
from ..system.arguments import checked
from .chat_thinking import Switch, common_start, inserted_in, switches_of
from .control_tokens import ControlTokens, control_tokens
from .examples import Example
from .label_positions import refuse_control_tokens
from .segment_names import FORMAT, LABEL, OTHER, QUERY, TEXT
from .tasks import Piece, Task

_AS_TEXT = "sanitize_control_tokens"
# What build_prompts itself passes to apply_chat_template, and what it has no use for.
_NO_OPTIONS = {
    *("conversation", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}

# What strftime writes for a day; "-d" is a day without a leading 0.
_DATE_CODES: tuple[str, ...] = (*"aAbBdmyYFDxjeHIMSfpzZcXwuUVW", "-d", "-m", "-I", "-H", "-j")


@checked
@dataclass(frozen=True, repr=False)
class ChatTask(Task):
    r"""A task whose demonstrations are turns of user and assistant, by the tokenizer's template.

    What stands before ``{label}`` is the user's turn, the label word is the assistant's answer, and
    the query is the last turn of the user. The tokens are those of ``apply_chat_template`` with
    ``add_generation_prompt=True``; a BOS is in the prompt if the template writes one.

    Args:
        template: As in ``Task``; what follows ``{label}`` belongs to the assistant's turn.
        labels: As in ``Task``, but usually without a space before the word, because an answer
            begins with it. Many templates remove spaces around a turn.
        instructions: The system's turn. Without them a template may write one of its own.
        options: Passed to ``apply_chat_template``: variables such as ``{"enable_thinking": False}``
            or a template, ``{"chat_template": "..."}``. With ``{"sanitize_control_tokens": True}``
            control tokens in texts are read as characters, as transformers 5.24 and newer do.
        date: The day that templates write as today, ``"2024-07-26"``, so that prompts stay.

    Raises:
        PromptError: As for ``Task``, the options are those that ``build_prompts`` sets, or the date
            is none. In ``build_prompts``: the template fails (many know no system turn), changes a
            text, writes the instructions late, or the model would not answer where it asks: it was
            told to think first, or answers begin with something else, such as a channel's name.

    Examples:
        >>> plain = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
        >>> task = al.ChatTask("Review: {text}{label}", labels=["negative", "positive"],
        ...     options={"chat_template": plain})  # a chat model has a template of its own
        >>> pieces = task.write(model.tokenizer, [al.Example("fun", 1)], "dull")
        >>> "".join(piece.text for piece in pieces)
        '<user> Review: fun\n<assistant> positive\n<user> Review: dull\n<assistant>'
    """

    separator: str = field(default="", init=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    date: str = "2024-07-26"
    adds_special_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _NO_OPTIONS.isdisjoint(self.options):
            raise PromptError(
                "options of a chat task are {name: value} for the chat template, and none of "
                f"{', '.join(sorted(_NO_OPTIONS))}; got {self.options!r}"
            )
        if not isinstance(self.options.get(_AS_TEXT, False), bool):
            got = self.options[_AS_TEXT]
            raise PromptError(f"{_AS_TEXT} in the options must be True or False; got {got!r}")
        object.__setattr__(self, "options", dict(self.options))
        try:
            datetime.strptime(self.date, "%Y-%m-%d")
        except (TypeError, ValueError) as error:
            raise PromptError(
                f"the date of a chat task is a day such as '2024-07-26'; got {self.date!r}"
            ) from error

    @checked
    def control_tokens(self, tokenizer: Any) -> ControlTokens:
        """The special tokens of the tokenizer, and what else it added that the template writes.

        Raises:
            PromptError: The instructions hold one; with ``sanitize_control_tokens``, or the format.
        """
        template, is_text = self._template(tokenizer), bool(self.options.get(_AS_TEXT))
        cure = "" if is_text else f", or read it as characters (options={{{_AS_TEXT!r}: True}})"
        control = control_tokens(tokenizer, template, as_text=is_text, cure=cure)
        written = [self.instructions, *(self.pieces if is_text else ())]
        refuse_control_tokens(tokenizer, control._replace(cure=""), *written)
        return control

    @checked
    def write(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> list[Piece]:
        """The pieces of a prompt; joined they are the text that the chat template gives."""
        with self._curing(tokenizer, demonstrations, query, self.first_words[0]):
            return self._write(tokenizer, demonstrations, query)

    @checked
    def written_word(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, word: str
    ) -> str:
        """A label word as the template writes it in the answer to a query.

        Raises:
            PromptError: A stored answer does not stand where the template asks for one.
        """
        with self._curing(tokenizer, demonstrations, query, word):
            return self._written_word(tokenizer, demonstrations, query, word)

    def _write(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> list[Piece]:
        turns = self._turns(demonstrations, query)
        text = self._render(tokenizer, turns, True)
        around, end = self._around(tokenizer, turns, True), ""
        self._refuse_late_instructions(tokenizer, self._turns(demonstrations[:1], query))
        if demonstrations:
            end = common_start(around[-2], self._around(tokenizer, turns[:-1], False)[-1])
        units = _units_in(text, _talk(turns), around)
        asking = around[-1]
        blocks = dict.fromkeys(
            _block_before_answer(asking, before, turn.unit[0].text)
            for before, turn in zip(around, _talk(turns), strict=False)
            if turn.role == "assistant"
        )
        for block in blocks:
            if block.strip() and not self._is_no_thought(tokenizer, demonstrations, query, block):
                before = asking.removesuffix(block)
                raise _misplaced_answer(asking, before + self.first_words[0], self.first_words[0])
        pieces = [*self._beginning(around, end, turns[-1].before), *units[0]]
        for k, (before, unit) in enumerate(zip(around[1:-1], units[1:], strict=True), start=1):
            if k % 2:  # an answer
                # White space that the template writes before an answer, and not where it asks for
                # one, is a part of the label word, as it is for the model.
                space = before[len(asking) :] if before.startswith(asking) else ""
                word, *rest = unit
                pieces.append(Piece(before.removesuffix(space), FORMAT))
                pieces += [word._replace(text=space + word.text), *rest]
                continue
            of_query = k == len(units) - 1
            pieces.append(Piece(before[: len(end)], FORMAT))
            pieces += [Piece(before[len(end) :], QUERY if of_query else FORMAT), *unit]
        return [piece for piece in (*pieces, Piece(asking, QUERY)) if piece.text]

    def _beginning(self, around: Sequence[str], end: str, before: str) -> list[Piece]:
        """What stands before the first text, such as instructions; the turn's header is format."""
        if len(around) == 2:  # no demonstration
            before = next(each for each in (*_variants(before), "") if around[0].endswith(each))
            return [Piece(around[0].removesuffix(before), OTHER), Piece(before, QUERY)]
        header = around[-2][len(end) :]
        before = next(each for each in (*_variants(before), "") if header.endswith(each))
        first, opening = around[0].removesuffix(before), header.removesuffix(before)
        start, opening, rest = first.rpartition(opening) if opening else (first, "", "")
        if rest and not self.instructions:
            start, opening, rest = first, "", ""
        written = [(start, OTHER), (opening, FORMAT), (rest, OTHER), (before, FORMAT)]
        return [Piece(text, segment) for text, segment in written]

    def _written_word(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, word: str
    ) -> str:
        turns = self._turns(demonstrations, query)
        answer = _turn("assistant", "", Piece(word, LABEL), self.pieces[2])
        asked = self._render(tokenizer, turns, True)
        answered = self._render(tokenizer, [*turns, answer], False)
        # A template may remove white space around a turn.
        contents = [answer.text.lstrip(), answer.text.strip()]
        same = len(common_start(asked, answered))
        # The block that is asked with may begin as the answer does, so the answer may begin sooner.
        for start in range(same, max(same - len(contents[0]), 0) - 1, -1):
            body = answered[start:].lstrip()
            content = next((text for text in contents if body.startswith(text)), None)
            if content is not None:
                break
        else:
            raise _misplaced_answer(asked, answered, answer.text.strip())
        block = asked[start:]
        is_empty = block.strip() and self._is_no_thought(tokenizer, demonstrations, query, block)
        if block and not is_empty:
            raise _misplaced_answer(asked, answered, answer.text.strip())
        return answered[start : len(answered) - len(body)] + content[: len(word.lstrip())]

    @checked
    def check_asking(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> None:
        """Raise an error if the template was told that the model thinks before it answers."""
        with self._curing(tokenizer, demonstrations, query, self.first_words[0]):
            self._check_asking(tokenizer, demonstrations, query)

    def _check_asking(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> None:
        asked = self._render(tokenizer, self._turns(demonstrations, query), True)
        short = self._asked(tokenizer, demonstrations[:1], query)
        if short is not None and asked.endswith(short.asking):
            demonstrations = demonstrations[:1]  # long conversations take much longer
        now = self._asked(tokenizer, demonstrations, query)
        if now is None:
            return
        for switch in self._switches(tokenizer):
            off = replace(self, **switch.off)._asked(tokenizer, demonstrations, query)
            if off and (off.asking != now.asking if switch.is_text else off != now):
                raise _NoAnswer(
                    "with these settings the chat template tells the model to think before it "
                    "answers, so that the label would be predicted where the model does not answer"
                )
            if switch.is_text or not self.instructions:
                continue
            on = replace(self, **switch.on)._asked(tokenizer, demonstrations, query)
            written = inserted_in(on.before, now.before) if on else ""
            if written.strip() and written.strip() in self.instructions:
                raise PromptError(
                    f"the instructions hold {written.strip()!r}, with which the chat template "
                    "tells the model to think before it answers, so that the label would be "
                    "predicted where the model does not answer; take it out of the instructions"
                )

    def _is_no_thought(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, block: str
    ) -> bool:
        """Whether what a template asks with, and leaves out of answers, is an empty thought.

        It comes with "do not think", is left out of an answer that begins so, or opens and closes.
        """
        short = demonstrations[:1]
        now = self._asked(tokenizer, short, query)
        for switch in self._switches(tokenizer):
            off, on = (
                replace(self, **fields)._asked(tokenizer, short, query)
                for fields in (switch.off, switch.on)
            )
            if now is None or off is None or on is None or not now.asking.endswith(block):
                continue
            if off.asking == now.asking != on.asking:
                return True
        turns, word = self._turns(short, query), Piece(self.first_words[0].strip(), LABEL)
        answers = (_turn("assistant", text, word, "") for text in ("", block))
        plain, begun = (self._render(tokenizer, [*turns, each], False) for each in answers)
        return plain == begun or _opens_and_closes(block)

    @contextmanager
    def _curing(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, word: str
    ) -> Iterator[None]:
        """The error that the model does not answer there, with a cure."""
        try:
            yield
        except _NoAnswer as error:
            cure = self._cure(tokenizer, demonstrations, query, word)
            raise PromptError(f"{error}; {cure}") from None

    def _cure(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, word: str
    ) -> str:
        """What makes the model answer where it is asked; it is tried before it is advised."""
        for switch in self._switches(tokenizer):
            try:
                changed = replace(self, **switch.cure)
                changed._write(tokenizer, demonstrations, query)
                changed._written_word(tokenizer, demonstrations, query, word)
                changed._check_asking(tokenizer, demonstrations, query)
            except PromptError:
                continue
            return switch.words
        return (
            "give another template, in which an answer follows where it is asked for "
            "(options={'chat_template': '...'})"
        )

    def _switches(self, tokenizer: Any) -> list[Switch]:
        return switches_of(self._template(tokenizer), self.options, self.instructions)

    def _asked(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str
    ) -> "_Asked | None":
        """A prompt up to where it asks for an answer, and how it asks; None if it cannot."""
        turns = self._turns(demonstrations, query)
        try:
            text = self._render(tokenizer, turns, True)
            before = common_start(text, self._render(tokenizer, turns, False))
        except PromptError:  # the template has no turn of the system, or does not know an option
            return None
        return _Asked(before, text[len(before) :])

    def _refuse_late_instructions(self, tokenizer: Any, turns: "Sequence[_Turn]") -> None:
        """Raise an error unless the instructions stand before the first text, where they belong."""
        if turns[0].role != "system":
            return
        marks = _marks(turns)
        marked = [turns[0]._replace(after=marks[0][1]), *map(_marked, turns[1:], marks[1:])]
        text = self._render(tokenizer, marked, True)
        if not 0 <= text.rfind(marks[0][1]) < text.find(marks[1][0]):
            fault = "after the first demonstration" if marks[0][1] in text else "nowhere"
            raise PromptError(
                f"the chat template writes the instructions {fault}; write them into the template "
                "of the task (before {text}) instead of the instructions (instructions=)"
            )

    def _around(self, tokenizer: Any, turns: "Sequence[_Turn]", ask: bool) -> list[str]:
        """What stands before the text of each turn but the system's, and after the last one."""
        talk = _talk(turns)
        marks = _marks(talk)
        system = turns[: len(turns) - len(talk)]
        text = self._render(tokenizer, [*system, *map(_marked, talk, marks)], ask)
        for turn, pair in zip(talk, marks, strict=True):
            counts = [text.count(mark) for mark in pair]
            if sum(counts) == 1:
                raise _changed(turn)
            if counts != [1, 1]:
                break
        joined = [mark for pair in marks for mark in pair]
        positions = [text.find(mark) for mark in joined]
        if positions != sorted(positions) or any(text.count(mark) != 1 for mark in joined):
            raise PromptError(
                "the chat template does not write each turn once and in the order of the turns, so "
                "that positions are not certain; give another template "
                "(options={'chat_template': '...'})"
            )
        return re.split("|".join(map(re.escape, joined)), text)[::2]

    def _turns(self, demonstrations: Sequence[Example], query: str) -> "list[_Turn]":
        """The turns of a conversation that ends in a query."""
        before, between, after = self.pieces
        turns = [_turn("system", self.instructions, Piece("", OTHER), "")] * bool(self.instructions)
        for demo in demonstrations:
            assert demo.label is not None
            word = self.first_words[demo.label]
            turns.append(_turn("user", before, Piece(demo.text, TEXT, is_data=True), between))
            word_piece = Piece(word, LABEL, demo.label, is_data=True)
            turns.append(_turn("assistant", "", word_piece, after))
        return [*turns, _turn("user", before, Piece(query, QUERY, is_data=True), between)]

    def _template(self, tokenizer: Any) -> str:
        """The chat template; instead of today's date it writes the date of the task."""
        if tokenizer.chat_template is None and "chat_template" not in self.options:
            raise PromptError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use a chat model "
                "or plain prompts (al.Task), or ChatTask(..., options={'chat_template': '...'})"
            )
        template = str(tokenizer.get_chat_template(self.options.get("chat_template")))
        if "strftime_now" not in template:
            return template
        # transformers gives templates no other way to replace a function. The line break after the
        # macro is not written, and what it is for begins a line, as before.
        day = datetime.strptime(self.date, "%Y-%m-%d")
        codes = [f"| replace('%{code}', '{day.strftime('%' + code)}')" for code in _DATE_CODES]
        macro = "{%- macro strftime_now(format) %}{{ format " + " ".join(codes) + " }}"
        return macro + "{% endmacro %}\n" + template

    def _render(self, tokenizer: Any, turns: "Sequence[_Turn]", ask: bool) -> str:
        """The text of a conversation; with ``ask`` it ends where the assistant answers."""
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        options = {**self.options, "chat_template": self._template(tokenizer)}
        options.pop(_AS_TEXT, None)  # it is done with the tokens
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=ask, **options
                )
            )
        except Exception as error:  # a template is a program
            roles = " and ".join(dict.fromkeys(turn.role for turn in turns))
            raise PromptError(
                f"the chat template cannot write the turns of {roles}: {error}. If it knows no "
                "turn of the system, write the instructions into the template of the task (before "
                "{text}) instead of the instructions (instructions=)"
            ) from error


class _NoAnswer(PromptError):
    """The model does not answer where the template asks; the reason, without a cure."""


class _Asked(NamedTuple):
    before: str
    asking: str


class _Turn(NamedTuple):
    """A turn: what is to be found in it (a text, a label word) with the white space around it."""

    role: str
    before: str
    unit: list[Piece]
    after: str

    @property
    def text(self) -> str:
        return self.before + "".join(piece.text for piece in self.unit) + self.after


def _turn(role: str, before: str, data: Piece, after: str) -> _Turn:
    start, stop = before.rstrip(), after.lstrip()
    segment = QUERY if data.segment == QUERY else FORMAT
    lead = Piece(before[len(start) :], segment)
    trail = Piece(after[: len(after) - len(stop)], segment)
    unit = [piece for piece in (lead, data, trail) if piece is data or piece.text]
    return _Turn(role, start, unit, stop)


def _talk(turns: Sequence[_Turn]) -> list[_Turn]:
    """The turns without the system's, whose text a template may change: it has no positions."""
    return [turn for turn in turns if turn.role != "system"]


def _marks(turns: Sequence[_Turn]) -> list[tuple[str, str]]:
    """Two marks for each turn, of a private area of Unicode, which stand in none of the texts."""
    joined, start = "".join(turn.text for turn in turns), "\ue000"
    while start in joined:
        start += "\ue000"
    return [(f"{start}{k}\ue001", f"{start}{k}\ue002") for k in range(len(turns))]


def _marked(turn: _Turn, marks: tuple[str, str]) -> _Turn:
    first, last = (Piece(mark, OTHER) for mark in marks)
    return turn._replace(unit=[first, *turn.unit, last])


def _units_in(text: str, turns: Sequence[_Turn], around: Sequence[str]) -> list[list[Piece]]:
    """What is to be found in the turns, as it stands in the text of the whole prompt."""
    found, position = [], len(around[0])
    is_same = text.startswith(around[0])
    for turn, after in zip(turns, around[1:], strict=True):
        whole = "".join(piece.text for piece in turn.unit)
        fits = [
            each for each in _variants(whole) if is_same and text.startswith(each + after, position)
        ]
        if not fits:
            raise _changed(turn)
        start = whole.index(fits[0])
        found.append(_cut(turn.unit, start, start + len(fits[0])))
        position += len(fits[0]) + len(after)
    if position != len(text):
        raise PromptError(
            f"the chat template writes {text[position:]!r} after the turns of these demonstrations"
            ", not after others; give another template (options={'chat_template': '...'})"
        )
    return found


def _variants(text: str) -> list[str]:
    """A text as templates write it: some remove white space around a turn."""
    return [text, text.strip(), text.rstrip(), text.lstrip()]


def _changed(turn: _Turn) -> PromptError:
    return PromptError(
        f"the chat template changes the text of the {turn.role}'s turn {turn.text!r}, or what "
        "stands around it, by more than white space at its ends, so that positions in it are not "
        "certain; change the text, or give another template (options={'chat_template': '...'})"
    )


def _block_before_answer(asking: str, before: str, word: str) -> str:
    """What a template asks with, and leaves out before an answer of the demonstrations."""
    space = before[len(asking) :] if before.startswith(asking) else ""
    if space.strip() or not (before.startswith(asking) or asking.startswith(before)):
        raise _misplaced_answer(asking, before + word, word)
    return asking[len(before) :]


def _opens_and_closes(block: str) -> bool:
    """Whether a text is a mark and its counterpart, with a name at most between them."""
    found = re.fullmatch(r"(\W+(\w[\w:.-]*)\W+?)\w*\s*(\W+\2\W+)", block.strip())
    return found is not None and found[1] != found[3]


def _misplaced_answer(asked: str, answered: str, answer: str) -> _NoAnswer:
    same = common_start(asked, answered)
    asks, answers = asked[len(same) :], answered[len(same) :].partition(answer)[0]
    return _NoAnswer(
        f"after {same[-30:]!r} the chat template writes {answers!r} before the answer {answer!r}, "
        f"but {asks!r} where it asks for one, so that the label would be predicted where the model "
        "does not answer"
    )


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The characters from ``start`` to ``stop`` of joined pieces."""
    cut, position = [], 0
    for piece in pieces:
        inside = slice(max(0, start - position), max(0, stop - position))
        cut.append(piece._replace(text=piece.text[inside]))
        position += len(piece.text)
    return cut
