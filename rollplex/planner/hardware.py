"""GPUs that the planner knows; a YAML file may add or replace some."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rollplex.planner.reading import read_yaml


@dataclass(frozen=True)
class Gpu:
    """Peak figures of the vendor's data sheet."""

    name: str
    memory_gb: float
    """10**9 bytes."""
    tflops: float
    """bfloat16, dense, 10**12 per second."""
    bandwidth_tb: float
    """Memory bandwidth, 10**12 bytes per second."""
    link_gb: float
    """To other GPUs of the node, both directions together, 10**9 bytes per second."""
    sms: int

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            if f.name != "name" and not good:
                raise ValueError(f"GPU {self.name!r}: {f.name}={value!r} must be a number above 0")

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_gb * 1e9


PCIE_4 = 64.0
GPUS: dict[str, Gpu] = {
    g.name: g
    for g in (
        Gpu("A100", 80, 312, 2.039, 600, 108),
        Gpu("H100", 80, 989, 3.35, 900, 132),
        Gpu("H800", 80, 989, 3.35, 400, 132),
        Gpu("H200", 141, 989, 4.8, 900, 132),
        Gpu("B200", 180, 2250, 8.0, 1800, 148),
        Gpu("L40S", 48, 362, 0.864, PCIE_4, 142),
        Gpu("RTX4090", 24, 165, 1.008, PCIE_4, 128),
    )
}


def gpus_of(path: str | None) -> dict[str, Gpu]:
    """The table, with the GPUs of a YAML file: name -> {memory_gb, tflops, bandwidth_tb, link_gb, sms}."""
    if path is None:
        return dict(GPUS)
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of GPU names to their figures")
    known = [f.name for f in fields(Gpu) if f.name != "name"]
    out = dict(GPUS)
    for name, figures in content.items():
        if not isinstance(figures, dict) or set(figures) != set(known):
            raise ValueError(f"{path}: GPU {name!r} needs exactly {', '.join(known)}; it has {figures!r}")
        out[str(name)] = Gpu(str(name), **figures)
    return out


def gpu_of(name: str, path: str | None = None) -> Gpu:
    table = gpus_of(path)
    plain = {key.lower().replace(" ", "").replace("-", ""): gpu for key, gpu in table.items()}
    found = plain.get(name.lower().replace(" ", "").replace("-", ""))
    if found is None:
        raise ValueError(f"gpu={name!r} is not in the table: {', '.join(table)}; add it by a YAML file (--gpus-file)")
    return found
