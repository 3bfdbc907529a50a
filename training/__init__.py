"""Making tasks: training, evaluating and importing bundles.

from training import fit

fitted = fit("photos", name="flowers", backbone="models/vit", out="flowers.safetensors")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.fitting import Fitted, Options, fit

__all__ = ["Fitted", "Options", "fit"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever is asked for
    """Loaded when asked for: whoever wants the package's errors alone need not wait for torch."""
    if name in __all__:
        from training import fitting

        return getattr(fitting, name)
    raise AttributeError(f"module 'training' has no attribute '{name}'")
