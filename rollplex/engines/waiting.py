"""Groups of requests whose prompt has no K/V yet, and which of them one prefill takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rollplex.data.records import Request
from rollplex.models.vision import VisionState


class WaitingGroups:
    """First come, first served; requests of a group are together."""

    def __init__(self) -> None:
        self._groups: list[list[Request]] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __iter__(self) -> Iterator[list[Request]]:
        return iter(self._groups)

    @property
    def first(self) -> list[Request]:
        return self._groups[0]

    def extend(self, groups: Iterable[list[Request]]) -> None:
        self._groups.extend(groups)

    def take(self, free: int, most_tokens: int) -> list[list[Request]]:
        """The first group and those that are prefilled with it.

        Of a prefix pass all of its groups, in order: rows beyond the `free` slots wait for theirs. Else those of the
        first prompt's length, as far as their rows fit `free` and their tokens `most_tokens`.
        """
        given, tokens = self.first[0].prefix, len(self.first[0].prompt)
        chosen: list[list[Request]] = []
        left: list[list[Request]] = []
        for group in self._groups:
            fits = len(group) <= free and (len(chosen) + 1) * tokens <= most_tokens
            alike = group[0].prefix is given and len(group[0].prompt) == tokens
            if alike and (given is not None or fits or not chosen):
                chosen.append(group)
                free -= len(group)
            else:
                left.append(group)
        self._groups = left
        if given is not None:
            groups = tuple(group[0].group for group in chosen)
            assert groups == given.groups, f"groups {groups} were submitted of the pass {given.groups}"
        return chosen


def features_of(groups: list[list[Request]]) -> VisionState | None:
    """What came with the requests of vision features, for the prompts of these groups (of one pass)."""
    given = groups[0][0].prefix
    return None if given is None else given.features([g[0].group for g in groups])
