"""Making tasks: training, evaluating and importing bundles.

from training import fit

fitted = fit("photos", name="flowers", backbone="models/vit", out="flowers.safetensors")

run         the story of one training run: options in, bundle and report out, Ctrl-C
data        reading: folders, tables, images, splits, augmentation, contexts
fitting     training: variants, loop, planning, checkpoints
judging     metrics, evaluation of bundles and servers, report
importing   checkpoints of the public reproduction as bundles
commands    engram train, evaluate, import
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.judging.report import Fitted
    from training.run import Options, fit

__all__ = ["Fitted", "Options", "fit"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - one of three types
    """Imported on first use: who needs the package's errors alone need not wait for torch."""
    if name in __all__:
        from training import run

        return getattr(run, name)
    raise AttributeError(f"module 'training' has no attribute '{name}'")
