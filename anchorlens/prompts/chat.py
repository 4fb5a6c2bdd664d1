"""Tasks for chat models: demonstrations are turns of a conversation, in the model's own format.

A chat template is a program, so that where a turn ends up in its text is not known beforehand.
It is therefore run twice: with marks in place of the turns, which gives the text around them, and
with the turns. Both texts must agree to the last character. A third run has an answer to the query,
which must begin where the template asks for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any, ClassVar, NamedTuple

from ..errors import PromptError
from ..system.arguments import checked
from .examples import Example
from .segment_names import FORMAT, LABEL, OTHER, QUERY, TEXT
from .tasks import Piece, Task

# What build_prompts itself passes to apply_chat_template, and what it has no use for.
_NO_OPTIONS = frozenset(
    [
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "sanitize_control_tokens",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)

# What strftime writes for a day; "-d" is a day without a leading 0.
_DATE_CODES: tuple[str, ...] = (*"aAbBdmyYFDxjeHIMSfpzZcXwuUVW", "-d", "-m", "-I", "-H", "-j")


@checked
@dataclass(frozen=True, repr=False)
class ChatTask(Task):
    r"""A task whose demonstrations are turns of user and assistant, by the tokenizer's template.

    What stands before ``{label}`` is the user's turn, the label word is the assistant's answer, and
    the query is the last turn of the user. The tokens are those of
    ``tokenizer.apply_chat_template(..., add_generation_prompt=True)``, and ``build_prompts`` finds
    the positions in them. A BOS is in the prompt if the template writes one.

    Args:
        template: As in ``Task``. The part before ``{label}`` is the user's turn; what follows
            ``{label}`` belongs to the assistant's.
        labels: As in ``Task``, but usually without a space before the word, because an answer
            begins with it. Many templates remove spaces around a turn; the label words are then
            those without spaces.
        instructions: The turn of the system, before all others. Without them there is no
            such turn, and templates may write one of their own.
        score: As in ``Task``.
        options: Passed to ``apply_chat_template``: variables of the template, such as
            ``{"enable_thinking": False}``, or another template, ``{"chat_template": "..."}``.
        date: The day, as ``"2024-07-26"``, that a template writes which writes today's date. It is
            fixed, so that the same prompts come tomorrow.

    Raises:
        PromptError: As for ``Task``, the options are those that ``build_prompts`` sets, or the date
            is none. In ``build_prompts``: the tokenizer has no chat template, the template raises
            an error (for instance because it knows no system turn), it changes the text of a turn,
            or it writes something (a block of thinking, the name of a channel) between the place
            where it asks for an answer and the answer.

    Examples:
        >>> plain = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}<assistant>"
        >>> task = al.ChatTask("Review: {text}{label}", labels=["negative", "positive"],
        ...     options={"chat_template": plain})  # a chat model has a template of its own
        >>> demos = [al.Example("dull", 0), al.Example("fun", 1)]
        >>> print("".join(piece.text for piece in task.write(model.tokenizer, demos, "so so")))
        <user> Review: dull
        <assistant> negative
        <user> Review: fun
        <assistant> positive
        <user> Review: so so
        <assistant>
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
        object.__setattr__(self, "options", dict(self.options))
        try:
            datetime.strptime(self.date, "%Y-%m-%d")
        except (TypeError, ValueError) as error:
            raise PromptError(
                f"the date of a chat task is a day such as '2024-07-26'; got {self.date!r}"
            ) from error

    @checked
    def write(self, tokenizer: Any, demonstrations: Sequence[Example], query: str) -> list[Piece]:
        """The pieces of a prompt; joined they are the text that the chat template gives."""
        turns = self._turns(demonstrations, query)
        # Marks of a private area of Unicode, which no template writes.
        marks = [f"\ue000{number}\ue001" for number in range(len(turns))]
        marked = [
            _Turn(turn.role, [Piece(mark, OTHER)]) for turn, mark in zip(turns, marks, strict=True)
        ]
        around, end = _around(self._render(tokenizer, marked, True), marks), ""
        if demonstrations:
            answered = self._render(tokenizer, marked[:-1], False)
            end = _common_start(around[-2], _around(answered, marks[:-1])[-1])
        written = _turns_in(self._render(tokenizer, turns, True), turns, around)
        return [piece for piece in _pieces(written, around, end) if piece.text]

    @checked
    def written_word(
        self, tokenizer: Any, demonstrations: Sequence[Example], query: str, word: str
    ) -> str:
        """A label word as the template writes it in the answer to a query.

        Raises:
            PromptError: The template writes more than white space between the place where it asks
                for an answer and the answer.
        """
        turns = self._turns(demonstrations, query)
        answer = _Turn("assistant", [Piece(word + self.pieces[2], LABEL)])
        asked = self._render(tokenizer, turns, True)
        answered = self._render(tokenizer, [*turns, answer], False)
        after = answered.removeprefix(asked)
        body = after.lstrip()
        # A template may remove white space around a turn.
        contents = [answer.text.lstrip(), answer.text.strip()]
        content = next((text for text in contents if body.startswith(text)), None)
        if after == answered or content is None:
            raise _misplaced_answer(asked, answered, answer.text.strip())
        return after[: len(after) - len(body)] + content[: len(word.lstrip())]

    def _turns(self, demonstrations: Sequence[Example], query: str) -> "list[_Turn]":
        """The turns of a conversation that ends in a query."""
        before, between, after = self.pieces
        turns = [_Turn("system", [Piece(self.instructions, OTHER)])] if self.instructions else []
        for demo in demonstrations:
            assert demo.label is not None
            user = [Piece(before, FORMAT), Piece(demo.text, TEXT), Piece(between, FORMAT)]
            word = Piece(self.first_words[demo.label], LABEL, demo.label)
            turns.append(_Turn("user", user))
            turns.append(_Turn("assistant", [word, Piece(after, FORMAT)]))
        return [*turns, _Turn("user", [Piece(self.query(query), QUERY)])]

    def _template(self, tokenizer: Any) -> str:
        """The chat template; instead of today's date it writes the date of the task."""
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
        if tokenizer.chat_template is None and "chat_template" not in self.options:
            raise PromptError(
                f"the tokenizer {tokenizer.name_or_path!r} has no chat template; use a chat model "
                "or plain prompts (al.Task), or "
                "ChatTask(..., options={'chat_template': '...'})"
            )
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=ask,
                    **{**self.options, "chat_template": self._template(tokenizer)},
                )
            )
        except Exception as error:  # a template is a program
            roles = " and ".join(dict.fromkeys(turn.role for turn in turns))
            raise PromptError(
                f"the chat template cannot write the turns of {roles}: {error}. If it knows no "
                "turn of the system, write the instructions into the template of the task (before "
                "{text}) instead of the instructions (instructions=)"
            ) from error


class _Turn(NamedTuple):
    role: str
    pieces: list[Piece]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def _pieces(turns: Sequence[_Turn], around: Sequence[str], end: str) -> list[Piece]:
    """The pieces of turns and of the text around them; ``end`` is what ends an answer."""
    asking, header = around[-1], around[-2][len(end) :] if len(turns) > 2 else ""
    roles = [turn.role for turn in turns]
    first_answer = roles.index("assistant") if "assistant" in roles else len(turns)
    result: list[Piece] = []
    for k, (before, turn) in enumerate(zip(around, turns, strict=False)):
        if turn.role == "assistant":
            # White space that the template writes before an answer, and not where it asks for
            # one, is a part of the label word, as it is for the model.
            space = before[len(asking) :] if before.startswith(asking) else ""
            # Some templates leave out of earlier answers what they write before the last one.
            if space.strip() or not (before.startswith(asking) or asking.startswith(before)):
                raise _misplaced_answer(asking, before + turn.text, turn.text)
            first, *rest = turn.pieces
            word = first._replace(text=space + first.text)
            result += [Piece(before.removesuffix(space), FORMAT), word, *rest]
            continue
        if k < first_answer:
            of_turn = header if before.endswith(header) else ""
            result += [Piece(before.removesuffix(of_turn), OTHER), Piece(of_turn, FORMAT)]
        else:
            is_query = k == len(turns) - 1
            result.append(Piece(before[: len(end)], FORMAT))
            result.append(Piece(before[len(end) :], QUERY if is_query else FORMAT))
        result += turn.pieces
    return [*result, Piece(asking, QUERY)]


def _turns_in(text: str, turns: Sequence[_Turn], around: Sequence[str]) -> list[_Turn]:
    """The turns as they stand in the text: a template may remove white space around them."""
    found, position = [], len(around[0])
    is_same = text.startswith(around[0])
    for turn, after in zip(turns, around[1:], strict=True):
        whole = turn.text
        variants = [whole, whole.strip(), whole.rstrip(), whole.lstrip()]
        fits = [each for each in variants if is_same and text.startswith(each + after, position)]
        if not fits:
            raise PromptError(
                f"the chat template changes the text of the {turn.role}'s turn {whole!r}, or what "
                "stands around it, by more than white space at its ends, so that positions in it "
                "are not certain; change the text, or give another template "
                "(options={'chat_template': '...'})"
            )
        start = whole.index(fits[0])
        found.append(_Turn(turn.role, _cut(turn.pieces, start, start + len(fits[0]))))
        position += len(fits[0]) + len(after)
    if position != len(text):
        raise PromptError(
            f"the chat template writes {text[position:]!r} after the turns of these "
            "demonstrations, which it does not after others; give another template "
            "(options={'chat_template': '...'})"
        )
    return found


def _misplaced_answer(asked: str, answered: str, answer: str) -> PromptError:
    """The error for an answer that does not stand where the template asks for it."""
    same = _common_start(asked, answered)
    asks, answers = asked[len(same) :], answered[len(same) :].partition(answer)[0]
    return PromptError(
        f"after {same[-30:]!r} the chat template writes {answers!r} before the answer {answer!r}, "
        f"but {asks!r} where it asks for one, so that the label would be predicted where the model "
        "does not answer; switch this off if the template has an option for it (such as "
        "options={'enable_thinking': False}), or give another template, in which an answer follows "
        "where it is asked for (options={'chat_template': '...'})"
    )


def _common_start(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _around(text: str, marks: Sequence[str]) -> list[str]:
    """What stands before each mark, and after the last one."""
    positions = [text.find(mark) for mark in marks]
    if positions != sorted(positions) or any(text.count(mark) != 1 for mark in marks):
        raise PromptError(
            "the chat template does not write each turn once and in the order of the turns, so "
            "that positions are not certain; give another template "
            "(options={'chat_template': '...'})"
        )
    around = []
    for mark in marks:
        before, _, text = text.partition(mark)
        around.append(before)
    return [*around, text]


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The characters from ``start`` to ``stop`` of joined pieces."""
    cut, position = [], 0
    for piece in pieces:
        inside = slice(max(0, start - position), max(0, stop - position))
        cut.append(piece._replace(text=piece.text[inside]))
        position += len(piece.text)
    return cut
