"""From token ids to text, for rewards, logs and stop strings. Never back: responses are not re-tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """A tokenizer's decode with what the engine needs: no special tokens, broken UTF-8 allowed, repeats remembered."""

    MEMORY = 4096
    """Responses remembered; short answers repeat a lot."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._known: dict[tuple[int, ...], str] = {}

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no valid UTF-8 come out as U+FFFD."""
        key = tuple(ids)
        text = self._known.get(key)
        if text is None:
            text = self._tokenizer.decode(list(key), skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if len(self._known) >= self.MEMORY:
                self._known.clear()
            self._known[key] = text
        return text

    def completes(self, ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Does a response whose earlier tokens completed none of `stops` complete one with its last token?

        Each token adds at least one byte, so a string of b bytes lies within the last b tokens; a few more give
        the decoder its context. Special tokens add nothing and are left out first.
        """
        longest = max(len(s.encode()) for s in stops) + 4
        tail: list[int] = []
        for token in reversed(ids):
            if token not in self._special:
                tail.append(token)
                if len(tail) == longest:
                    break
        text = self._tokenizer.decode(tail[::-1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return any(s in text for s in stops)
