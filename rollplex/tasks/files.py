"""The task for data in files: prompts, media and answers by the usual field names, rewards from the YAML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollplex.data.media import MediaAccess
from rollplex.data.records import Sample
from rollplex.data.sources import Format, Offsets, Rows, check_paths, open_rows
from rollplex.kinds import check_whole
from rollplex.rewards.base import Reward
from rollplex.tasks.base import Split, VLMTask
from rollplex.tasks.layout import Layout


class FileTask(VLMTask):
    """Rows of JSONL, JSON, Parquet, a saved `datasets` folder, or a folder of pictures and videos (docs/tasks.md).

    A row's columns all reach the rewards by their names; the right answer always as `answer`. A row is named by its
    path and number, "data/train.jsonl[17]" (counted from 0). What is wrong with one is found when it is read;
    `on_bad_row` of the data module says what happens then.
    """

    def __init__(
        self,
        path: str | list[str],
        rewards: list[Reward] | None = None,
        validation_path: str | list[str] | None = None,
        test_path: str | list[str] | None = None,
        validation_size: int = 0,
        format: Format = "auto",
        prompt_field: str | None = None,
        image_field: str | None = None,
        video_field: str | None = None,
        answer_field: str | None = None,
        question: str | None = None,
        system_prompt: str | None = None,
        prompt_suffix: str = "",
        image_placeholder: str = "<image>",
        video_placeholder: str = "<video>",
        media_roots: list[str] | None = None,
        allowed_url_hosts: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            path: training rows: a file, a folder, a pattern (`data/train-*.parquet`) or a list of these.
            rewards: what scores a response (see rollplex.rewards). A subclass that defines `reward` needs none.
            validation_path: as path. Without validation_path, validation_size rows are held out of path.
            test_path: rows of `rollplex test` and `predict`; None: there are none.
            validation_size: drawn by `seed`; 0 with no validation_path means no validation.
            format: of all paths; "auto" goes by the ending of a file and the content of a folder.
            prompt_field: text or chat messages. None: messages, prompt, problem or question, the first that a row has.
            image_field: one picture or a list. None: images or image. A picture is a path, bytes, base64 text, or
                {"bytes": ..., "path": ...}.
            video_field: likewise; None: videos or video. A list is the videos where the name ends with s, else the
                frames of one.
            answer_field: None: answer, solution, ground_truth, label, or reward_model.ground_truth.
            question: prompt of rows that have none, such as those of a folder of pictures.
            system_prompt: for rows without a system message of their own.
            prompt_suffix: added to the last message, e.g. how to write the answer.
            image_placeholder: where a row's pictures and videos stand in its text (`Layout.messages`).
            video_placeholder: likewise for videos.
            media_roots: folders that files of rows must lie in; None is the folder of each path.
            allowed_url_hosts: hosts that pictures and videos may be fetched from; None fetches nothing.
            seed: of the draw of validation rows.
        """
        check_paths("path", path)
        for name, given in (("validation_path", validation_path), ("test_path", test_path)):
            if given is not None:
                check_paths(name, given)
        for name, listed in (("media_roots", media_roots), ("allowed_url_hosts", allowed_url_hosts)):
            if listed is not None and (not isinstance(listed, list | tuple) or not all(map(_is_name, listed))):
                raise ValueError(f"{name}={listed!r} must be a list, e.g. [{listed if _is_name(listed) else '...'}]")
        for name, number in (("validation_size", validation_size), ("seed", seed)):
            check_whole(name, number, 0)
        if validation_size and validation_path is not None:
            raise ValueError(f"validation_size={validation_size} and validation_path are both set; set one of them")
        if not rewards and type(self).reward is VLMTask.reward:
            raise ValueError("FileTask has no rewards: name at least one, e.g. class_path: rollplex.rewards.ExactMatch")
        self.layout = Layout(
            prompt_field=prompt_field, image_field=image_field, video_field=video_field, answer_field=answer_field,
            question=question, system_prompt=system_prompt, prompt_suffix=prompt_suffix,
            image_placeholder=image_placeholder, video_placeholder=video_placeholder,
        )  # fmt: skip
        self.rewards = tuple(rewards or ())
        self.paths = {"train": path, "validation": validation_path, "test": test_path}
        self.validation_size, self.format, self.seed = validation_size, format, seed
        self.media_roots, self.allowed_url_hosts = media_roots, allowed_url_hosts or []
        self._sources: dict[str, list[Rows]] = {}
        self._access: dict[str, MediaAccess] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the open files: reward processes need none."""
        return self.__dict__ | {"_sources": {}}

    def samples(self, split: Split) -> Sequence[Sample]:
        if split == "validation" and self.validation_size:
            return self._file_rows("train", slice(None, self.validation_size))
        if self.paths[split] is None:
            return []
        return self._file_rows(split, slice(self.validation_size, None) if split == "train" else slice(None))

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        return self.layout.messages(sample.columns, self._access[sample.id.rpartition("[")[0]])

    def _file_rows(self, split: str, part: slice) -> FileRows:
        if split not in self._sources:
            path = self.paths[split]
            assert path is not None
            self._sources[split] = open_rows(path, self.format)
        sources = self._sources[split]
        for source in sources:
            roots = [source.folder] if self.media_roots is None else self.media_roots
            self._access[str(source.path)] = MediaAccess.of(roots, self.allowed_url_hosts)
        total = sum(map(len, sources))
        if self.validation_size >= total and split == "train":
            raise ValueError(f"validation_size={self.validation_size} leaves nothing of path's {total} rows; lower it")
        order = np.arange(total)
        if split == "train" and self.validation_size:
            order = np.random.default_rng(self.seed).permutation(total)[part]
        return FileRows(sources, np.sort(order), self)


def _is_name(value: Any) -> bool:
    return isinstance(value, str | Path) and bool(str(value))


class FileRows(Sequence[Sample]):
    """Some rows of some sources, as samples."""

    def __init__(self, sources: Sequence[Rows], order: np.ndarray, task: FileTask) -> None:
        self._sources, self._order = sources, order
        self._offsets = Offsets([len(source) for source in sources])
        self._layout = task.layout
        self._needed = {name: type(reward).__name__ for reward in task.rewards for name in reward.columns}

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: Any) -> Any:
        source, row_number = self._offsets.find(int(self._order[number]))
        row = self._sources[source][row_number]
        answer = self._layout.answer(row)
        columns = row if answer is None else {**row, "answer": answer}
        for name, reward in self._needed.items():
            value = columns.get(name)
            if value is None:
                raise ValueError(f"has no {name}, which {reward} needs; its fields are {', '.join(map(str, row))}")
            if isinstance(value, list | tuple) and not value:
                raise ValueError(f"has an empty list as {name}, which {reward} needs")
        return Sample(self.row_ids[number], columns)

    def place(self, number: int) -> str:
        """The line of a row in its file, counted from 1; "" where there are no lines."""
        source, row_number = self._offsets.find(int(self._order[number]))
        return self._sources[source].place(row_number)

    @property
    def row_ids(self) -> Sequence[str]:
        return _Ids(self._sources, self._offsets, self._order)


class _Ids(Sequence[str]):
    """Names of rows, without reading them."""

    def __init__(self, sources: Sequence[Rows], offsets: Offsets, order: np.ndarray) -> None:
        self._sources, self._offsets, self._order = sources, offsets, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, number: Any) -> Any:
        source, row = self._offsets.find(int(self._order[number]))
        return f"{self._sources[source].path}[{row}]"
