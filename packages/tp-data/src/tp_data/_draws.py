"""Whether what loads samples draws random numbers: the states of generators before it and after it.

States are compared as words in memory. The functions that return them make other objects of these, which
takes longer than reading a batch of short lines.
"""

import ctypes
import random
import sys
from typing import Any, NamedTuple

import numpy as np
import torch

_WORDS = 624  # of a Mersenne twister, which has a place in them, too


class _States(NamedTuple):
    """The states of generators.

    Attributes:
        python: The words of Python's, or its own state where they are not where they were found once.
        spare: A second normal number that Python's would return next.
        numpy: The words of numpy's; none if it is no Mersenne twister.
        torch: The state of torch's.
    """

    python: Any
    spare: float | None
    numpy: bytes
    torch: bytes


class DrawWatch:
    """Notices whether the generators of Python, numpy and torch draw."""

    def __init__(self) -> None:
        self._noted: _States | None = None
        self._without_spare = b""  # numpy's words that were seen last to have no second normal number
        self._reads_words: bool | None = None  # of Python's generator; found out at the first look
        self._numpy: Any = None  # numpy's generator that was seen last, and where its words are
        self._address = 0

    def __reduce__(self) -> tuple[type["DrawWatch"], tuple[()]]:
        return DrawWatch, ()  # another process has other generators

    def begin(self, *, as_left: bool) -> bool:
        """Note the states; return whether a draw would be noticed.

        It would not with another kind of generator as numpy's, or one that has a second normal number at
        hand: that is returned without a change of the words.

        Args:
            as_left: Whether nothing has drawn since :meth:`drew` has looked, as between a worker's tasks.
        """
        if as_left and self._noted is not None:
            return True
        self._noted = None
        states = self._read()
        if not states.numpy:
            return False
        if states.numpy != self._without_spare:
            if np.random.get_state(legacy=False)["has_gauss"]:
                return False
            self._without_spare = states.numpy
        self._noted = states
        return True

    def drew(self) -> bool:
        """Return whether something was drawn since the states were noted."""
        return self._read() != self._noted

    def restore(self) -> None:
        """Put back the states that were noted."""
        if self._noted is None:
            return
        python, spare, words, state = self._noted
        if isinstance(python, bytes):
            place, *key = np.frombuffer(python, np.uint32).tolist()
            python = random.Random.VERSION, (*key, place), spare
        random.setstate(python)
        *key, place = np.frombuffer(words, np.uint32)
        np.random.set_state(("MT19937", np.array(key), int(place), 0, 0.0))
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def _read(self) -> _States:
        if self._reads_words is None:
            self._reads_words = _words_of_python() == random.getstate()[1]
        python: Any = _words_in_memory() if self._reads_words else random.getstate()
        state = torch.default_generator.get_state().numpy().tobytes()
        spare = random._inst.gauss_next  # type: ignore[attr-defined]  # private: of the module's functions
        return _States(python, spare, self._words_of_numpy(), state)

    def _words_of_numpy(self) -> bytes:
        """Return the words of numpy's generator, and the place in them; get_state() takes 40 us for it."""
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined] # public; numpy's stubs lack it
        if generator is not self._numpy:
            self._numpy, self._address = generator, 0
            if isinstance(generator, np.random.MT19937):
                self._address = generator.ctypes.state_address
        if not self._address:
            return b""
        return ctypes.string_at(self._address, 4 * (_WORDS + 1))


def _words_in_memory() -> bytes:
    """Return the place of Python's generator, and its words; getstate() takes 15 us to make numbers of them.

    They lie behind the head of the object in CPython, in no documented place: who reads them compares first.
    """
    return ctypes.string_at(id(random._inst) + object.__basicsize__, 4 * (_WORDS + 1))


def _words_of_python() -> tuple[int, ...] | None:
    """Return what lies where the words are expected, as getstate() has them."""
    has_space = type(random._inst).__basicsize__ >= object.__basicsize__ + 4 * (_WORDS + 1)
    if sys.implementation.name != "cpython" or not has_space:
        return None
    place, *key = np.frombuffer(_words_in_memory(), np.uint32).tolist()
    return (*key, place)
