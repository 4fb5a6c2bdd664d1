"""Interrupts at every moment at which Ctrl-C can raise its error, one after another."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import FrameType, ModuleType
from typing import Any

_NEXT = 12  # a second interrupt comes at one of the moments after the first


class Interrupting:
    """Raises KeyboardInterrupt at chosen moments in the functions of some modules.

    Python looks for signals when a function of Python starts and when a function written in C
    returns; a profiler is called at the same moments, and the error is raised at the same
    instruction. The loops of these modules call functions, so that their turns add nothing.
    ``moments`` says how many pass before each interrupt.
    """

    def __init__(self, modules: Sequence[ModuleType], moments: Sequence[int]) -> None:
        self.files = {module.__file__ for module in modules}
        self.left = list(moments)
        self.passed = 0
        self.error: KeyboardInterrupt | None = None

    def call(self, function: Callable[[], None]) -> int:
        """The number of interrupts that were raised in a call."""
        before, total = (sys.getprofile(), sys.gettrace()), len(self.left)
        sys.settrace(self._again)
        sys.setprofile(self._at_each_moment)
        try:
            function()
        except KeyboardInterrupt as error:
            self.error = error
        finally:
            sys.setprofile(before[0])
            sys.settrace(before[1])
        return total - len(self.left)

    def _at_each_moment(self, frame: FrameType, event: str, argument: Any) -> None:
        starts = event == "call" and not frame.f_code.co_flags & inspect.CO_GENERATOR
        if not self.left or frame.f_code.co_filename not in self.files:
            return
        if starts or event == "c_return":
            if self.passed == self.left[0]:
                self.left.pop(0)
                self.passed = 0
                raise KeyboardInterrupt
            self.passed += 1

    def _again(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Python removes a profiler that raised an error."""
        if event == "exception" and sys.getprofile() is None:
            sys.setprofile(self._at_each_moment)
        return self._again


def at_every_moment(
    modules: Sequence[ModuleType], interrupts: int, function: Callable[[], None]
) -> Iterator[list[int]]:
    """Call a function with one or two interrupts at every moment; yield after each call.

    The error is alive then, as in an ``except`` block, so that no frame of the call is released.
    """
    for first in count():
        for second in range(_NEXT if interrupts == 2 else 1):
            moments = [first, second][:interrupts]
            interrupting = Interrupting(modules, moments)
            raised = interrupting.call(function)
            if not raised:
                return
            if raised < interrupts:
                break  # the call ended before the second
            yield moments
