"""Rewards that compare a response with the row's answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import regex

from rollplex.data.records import Rollout, Sample
from rollplex.data.sources import need
from rollplex.rewards.base import Reward
from rollplex.rewards.extract import SECONDS, check_pattern, extract_answer, last_boxed

LARGEST_FLOAT32 = 3.4e38

_LETTER = regex.compile(
    r"(?i:answer|option|choice)(?:\s+is)?[:\s*]*\(?([A-Z])\b(?!')"  # The answer is (B)
    r"|^\W*([A-Z])(?=[.):,]|\W*$)"  # B. the red one
    r"|\(([A-Za-z])\)",  # ... (B) ...
    regex.MULTILINE,
)
_UPRIGHT = regex.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}")


class _AnswerReward(Reward):
    """Shared by what judges against the column `answer`."""

    columns = ("answer",)
    judges = True

    def __init__(self, extract: str | None = None, weight: float = 1.0, name: str | None = None) -> None:
        super().__init__(weight, name)
        if extract not in (None, "boxed", "tag"):
            check_pattern(extract, f"{type(self).__name__}: extract")
        self.extract = extract


class ExactMatch(_AnswerReward):
    """1 if the response is the answer, letter by letter, else 0."""

    def __init__(
        self,
        extract: str | None = None,
        ignore_case: bool = False,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        """
        Args:
            extract: which part of the response counts (see `extract_answer`): null, boxed, tag, or a pattern.
            ignore_case: compare without case.

        White space around both is no part of them, and inside them any is one space. An answer that is a list is right
        with any of its entries. A whole number that a file holds as 3.0 (tables do, where a row has none) is right as 3
        too.
        """
        super().__init__(extract, weight, name)
        self.ignore_case = ignore_case

    def score(self, sample: Sample, response: Rollout) -> float:
        given = extract_answer(response.text, self.extract)
        wanted = {self._plain(form) for answer in as_list(sample["answer"]) for form in _forms(answer)}
        return float(given is not None and self._plain(given) in wanted)

    def _plain(self, text: Any) -> str:
        plain = " ".join(str(text).split())
        return plain.casefold() if self.ignore_case else plain


class Numeric(_AnswerReward):
    """1 if the response is a number close to the answer, else 0. For formulas see `MathVerify`.

    Thousands commas, a currency sign and a percent sign around a number are passed over; a minus may be the typographic
    one.
    """

    def __init__(
        self,
        extract: str | None = None,
        relative_tolerance: float = 0.0,
        absolute_tolerance: float = 1e-9,
        weight: float = 1.0,
        name: str | None = None,
    ) -> None:
        """
        Args:
            extract: as of `ExactMatch`.
            relative_tolerance: of the answer; 0.05 is the "relaxed accuracy" of chart questions.
            absolute_tolerance: added to it.
        """
        super().__init__(extract, weight, name)
        if not (0 <= relative_tolerance < 1 and 0 <= absolute_tolerance < math.inf):
            raise ValueError(
                f"Numeric: relative_tolerance={relative_tolerance} must be in [0, 1), "
                f"absolute_tolerance={absolute_tolerance} 0 or more"
            )
        self.relative_tolerance, self.absolute_tolerance = relative_tolerance, absolute_tolerance

    def score(self, sample: Sample, response: Rollout) -> float:
        wanted = [_number(answer) for answer in as_list(sample["answer"])]
        if None in wanted:
            raise ValueError(f"the answer {str(sample['answer'])[:80]!r} is no number")
        given = _number(extract_answer(response.text, self.extract) or "")
        return float(given is not None and any(self._close(given, value) for value in wanted if value is not None))

    def _close(self, given: float, wanted: float) -> bool:
        return abs(given - wanted) <= self.relative_tolerance * abs(wanted) + self.absolute_tolerance


class MathVerify(_AnswerReward):
    """1 if the response equals the answer mathematically, else 0: LaTeX or plain, by the math-verify package.

    A \\boxed{...} in the response goes before anything else in it. Symbolic mathematics can take for ever and does not
    always hear signals, so use it with `reward_workers`.
    """

    may_hang = True

    def __init__(self, extract: str | None = None, weight: float = 1.0, name: str | None = None) -> None:
        """
        Args:
            extract: as of `ExactMatch`; null leaves the search to math-verify.
        """
        super().__init__(extract, weight, name)
        need("math_verify", "math", "MathVerify")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        need("math_verify", "math", "MathVerify")  # in a reward process, before any reward's time runs

    def score(self, sample: Sample, response: Rollout) -> float:
        wanted = [self._gold(str(answer)) for answer in as_list(sample["answer"])]
        if not all(wanted):
            raise ValueError(f"math-verify cannot read the answer {str(sample['answer'])[:80]!r}")
        text = extract_answer(response.text, self.extract)
        if text is None:
            return 0.0
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

        # No time limit of its own: it would take the alarm away from ours.
        how = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
        given = parse(text if self.extract is None else _boxed(text), how, parsing_timeout=None)
        return float(any(verify(gold, given, timeout_seconds=None) for gold in wanted))

    def _gold(self, answer: str) -> Any:
        from math_verify import parse

        return parse(answer if "$" in answer or "\\boxed" in answer else _boxed(answer), parsing_timeout=None)


class MultipleChoice(_AnswerReward):
    """1 if the response chooses the right letter, else 0.

    The answer is a letter, or the text or number (from 0) of one of the row's `options`. In the response (the content
    of its last \\boxed{...}, if it has one) the letter is what follows "answer", "option" or "choice" last; else one at
    the beginning of a line, like "B." or "(B)"; else the last in parentheses; else the whole text may be an option's.
    Where that finds none, it is looked for without the \\text{...} that it may be in.
    """

    def __init__(
        self, extract: str | None = None, options: str = "options", weight: float = 1.0, name: str | None = None
    ) -> None:
        """
        Args:
            extract: as of `ExactMatch`; null looks as described above.
            options: column with the list of choices, if there is one.
        """
        super().__init__(extract, weight, name)
        self.options = options

    def score(self, sample: Sample, response: Rollout) -> float:
        options = self._options(sample.columns.get(self.options))
        text = extract_answer(response.text, self.extract)
        if text is None:
            return 0.0
        boxed = last_boxed(text)
        text = text if boxed is None else boxed
        given = self._letter(text, options) or self._letter(_UPRIGHT.sub(r"\1", text), options)
        return float(given is not None and given == self._right(sample["answer"], options))

    def _options(self, given: Any) -> list[str]:
        if given is not None and not isinstance(given, list | tuple):
            raise ValueError(
                f"{self.options} is {type(given).__name__}, {str(given)[:80]!r}; it must be a list of choices"
            )
        return [str(option).strip() for option in given or ()]

    def _letter(self, text: str, options: Sequence[str]) -> str | None:
        plain = text.strip().strip("().:* ")
        if len(plain) == 1 and plain.isalpha():
            return plain.upper()
        matches = list(_LETTER.finditer(text, timeout=SECONDS))
        for group in (1, 2, 3):
            letters = [match[group].upper() for match in matches if match[group]]
            if letters:
                return letters[0] if group == 2 else letters[-1]
        return _of_option(plain, options)

    def _right(self, answer: Any, options: Sequence[str]) -> str:
        plain = str(answer).strip().strip("().: ")
        letter = _of_option(str(answer).strip(), options)
        if letter is None and len(plain) == 1 and plain.isalpha():
            letter = plain.upper()
        number = None if letter or isinstance(answer, bool) else _number(answer)  # files often have it as text
        if number is not None and number.is_integer() and 0 <= number < (len(options) or 26):
            letter = chr(ord("A") + int(number))
        if letter is None:
            raise ValueError(
                f"the answer {str(answer)[:80]!r} is neither a letter nor the text or number (from 0) of one of "
                f"{len(options)} options"
            )
        return letter


def as_list(answer: Any) -> list[Any]:
    """An answer, or a list of right ones, as a list. ValueError for an empty one, with which nothing could be right."""
    if isinstance(answer, list | tuple) and not answer:
        raise ValueError("the answer is an empty list; nothing could be right")
    return [_as_written(one) for one in (answer if isinstance(answer, list | tuple) else [answer])]


def _as_written(answer: Any) -> Any:
    """The number that was stored as a float32, which a file gives as 0.10000000149011612: 0.1."""
    if not isinstance(answer, float) or not abs(answer) < LARGEST_FLOAT32 or float(np.float32(answer)) != answer:
        return answer
    return float(str(np.float32(answer)))


def _forms(answer: Any) -> Iterator[Any]:
    yield answer
    if isinstance(answer, float) and answer.is_integer():
        yield int(answer)


def _boxed(text: str) -> str:
    return "\\boxed{" + text + "}"


def _of_option(text: str, options: Sequence[str]) -> str | None:
    lowered = [option.casefold() for option in options]
    return chr(ord("A") + lowered.index(text.casefold())) if text.casefold() in lowered else None


def _number(text: Any) -> float | None:
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text) if math.isfinite(text) else None
    plain = str(text).strip().strip("$€£% ").replace(",", "").replace("\N{MINUS SIGN}", "-")
    if len(plain) > 64 or "_" in plain:  # Python reads 1_000; nobody writes it as an answer
        return None
    try:
        number = float(plain)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
