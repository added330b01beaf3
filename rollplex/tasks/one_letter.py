"""Scoring of answers that are one character, with steps that a random model can climb."""

from __future__ import annotations

from collections.abc import Collection

from rollplex.data.records import Rollout


def well_formed(response: Rollout, choices: Collection[str]) -> bool:
    """One token that is a choice, and the end token. (Two tokens: special tokens do not show in the text.)"""
    return len(response) == 2 and response.finish_reason == "stop" and response.text in tuple(choices)


def format_share(response: Rollout, choices: Collection[str]) -> float:
    """How much of the form is there: 1 when it is well formed, whichever the choice; 1/2 when only a part is (the text
    begins with a choice, or two tokens of which the second ends it); else 0.

    A random model ends with the token after a choice about once in 7,000 tries (10 choices, 264 tokens) and would find
    nothing to improve without these steps.
    """
    if well_formed(response, choices):
        return 1.0
    starts = response.text[:1] in tuple(choices)
    ends = len(response) == 2 and response.finish_reason == "stop"
    return 0.5 if starts or ends else 0.0


def score(response: Rollout, answer: str, choices: Collection[str], format_reward: float) -> dict[str, float]:
    """The two parts of the reward: `correct`, 1 when it is well formed and right, and `format`, at most
    `format_reward`."""
    right = well_formed(response, choices) and response.text == answer
    return {"correct": float(right), "format": format_reward * format_share(response, choices)}
