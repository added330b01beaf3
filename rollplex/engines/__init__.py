"""What generates responses. `VLLMEngine` is imported from its own file, so vLLM is needed only where it is used."""

from rollplex.engines.base import EngineContext, RolloutEngine, WindowState
from rollplex.engines.torch_engine import TorchEngine

__all__ = ["EngineContext", "RolloutEngine", "TorchEngine", "WindowState"]
