"""Questions about pictures from a JSONL file: the task of the 7B configs, and a start for your own.

One row a line, with paths relative to the file's folder:

    {"image": "images/1.png", "problem": "How long is AB?", "answer": "12"}

`image` may also be a list of paths, or be absent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollplex import Rollout, Sample, VLMTask

INSTRUCTION = "Think step by step, then give the final answer alone between <answer> and </answer>."


class PictureQuestions(VLMTask):
    def __init__(self, train: str, validation: str | None = None, format_reward: float = 0.1) -> None:
        self.files = {"train": train, "validation": validation, "test": validation}
        self.format_reward = format_reward

    def samples(self, split: str) -> Sequence[Sample]:
        file = self.files[split]
        if file is None:
            return []
        rows = []
        for number, line in enumerate(Path(file).read_text().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                columns = {"problem": str(row["problem"]), "answer": str(row["answer"])}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: no object with problem and answer ({error!r})") from error
            images = row.get("image") or []
            images = images if isinstance(images, list) else [images]
            columns["images"] = [str(Path(file).parent / image) for image in images]
            rows.append(Sample(f"{split}-{number}", columns))
        return rows

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        parts = [{"type": "image", "image": path} for path in sample["images"]]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": f"{sample['problem']}\n{INSTRUCTION}"}]}]

    def reward(self, sample: Sample, response: Rollout) -> dict[str, float]:
        answer = final_answer(response.text)
        well_formed = answer is not None and response.finish_reason == "stop"
        return {
            "correct": float(answer is not None and same(answer, sample["answer"])),
            "format": self.format_reward * float(well_formed),
        }

    def correct(self, sample: Sample, response: Rollout) -> bool:
        answer = final_answer(response.text)
        return answer is not None and same(answer, sample["answer"])


def final_answer(text: str) -> str | None:
    """What stands between the only pair of answer marks."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[0].strip() if len(found) == 1 else None


def same(answer: str, expected: str) -> bool:
    """As numbers where both are, else as text, without regard to case and spaces."""
    try:
        return abs(float(answer.replace(",", "")) - float(expected.replace(",", ""))) < 1e-6
    except ValueError:
        return "".join(answer.lower().split()) == "".join(expected.lower().split())
