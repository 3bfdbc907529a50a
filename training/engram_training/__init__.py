"""Training, evaluating and importing task bundles.

from engram_training import fit

fitted = fit("photos", name="flowers", backbone="models/vit", out="flowers.safetensors")
fitted.bundle, fitted.figures["test"].values["accuracy"]
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engram_training.judging.report import Fitted
    from engram_training.options import TrainOptions
    from engram_training.run import fit

__all__ = ["Fitted", "TrainOptions", "fit"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - one of three types
    """Import on first use, so that importing the errors does not load torch."""
    if name in __all__:
        from engram_training import run

        return getattr(run, name)
    raise AttributeError(f"module 'engram_training' has no attribute '{name}'")
