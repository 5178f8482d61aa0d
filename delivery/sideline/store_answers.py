"""Find out in a pass over many magazines that their store is away for all of them."""

from typing import Final

MAX_UNAVAILABLE: Final = 8
"""Magazines in a row that the store did not answer for, after which it counts as away."""


class StoreAnswers:
    """Hold for how many magazines in a row the store did not answer.

    Each further one would take a time-out. The store may also be away for a part of all magazines,
    which then have most of the places. So a magazine counts only if none was answered for since it
    was begun.
    """

    def __init__(self) -> None:
        self.answered = 0
        self.unanswered = 0
        self.is_away = False
        """True from then on: a late answer does not let the pass go on behind those left out."""

    def begin(self) -> "StoreAttempt":
        """Return a record of what is answered for one magazine, or for the two of a queue."""
        return StoreAttempt(self)


class StoreAttempt:
    """Record whether the store answers for one magazine, which may have many shards."""

    __slots__ = ("_answered_before", "_answers", "_is_counted")

    def __init__(self, answers: StoreAnswers) -> None:
        self._answers = answers
        self._answered_before = answers.answered
        self._is_counted = False

    def record_answer(self) -> None:
        """Record that the store answered, though it may have refused."""
        self._answers.answered += 1
        self._answers.unanswered = 0

    def record_unavailable(self) -> None:
        """Record that the store did not answer."""
        answers = self._answers
        if self._is_counted or answers.answered != self._answered_before:
            return
        self._is_counted = True
        answers.unanswered += 1
        answers.is_away = answers.is_away or answers.unanswered >= MAX_UNAVAILABLE
