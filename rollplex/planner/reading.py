"""Files that users write, read so that a broken one is one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_yaml(path: str) -> Any:
    """Content of a YAML file; ValueError for what is none."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
