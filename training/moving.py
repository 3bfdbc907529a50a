"""Training again what a bundle was trained on, with the same options, on another backbone."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from server.model import Backbone
from task_store import TaskBundle
from training.data.dataset import DataSet
from training.errors import DataError, SettingsConflict
from training.run import KEPT_OPTIONS, Options


def options_like(bundle: TaskBundle, told: Options, given: Collection[str] = ()) -> Options:
    """The options a bundle was trained with; SettingsConflict where it does not say.

    From `told` comes what no bundle says (limits of this machine, texts for people), and the fields
    that are `given`.
    """
    stored = bundle.manifest.training.get("options")
    if not isinstance(stored, dict):
        raise SettingsConflict(
            "the bundle of --like does not say with which options it was trained (it was imported, "
            "taught, or trained by an older version): train without --like"
        )
    try:
        known = TypeAdapter(Options).validate_python(
            {name: stored[name] for name in KEPT_OPTIONS if name in stored}
        )
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise SettingsConflict(
            f"the bundle of --like has options that are none: '{where}'"
        ) from error
    if "minutes" in given:
        given = {*given, "epochs"}
    same = [name for name in KEPT_OPTIONS if name not in given]
    return replace(told, **{name: getattr(known, name) for name in same})


def check_same_data(data: DataSet, bundle: TaskBundle) -> None:
    """DataError unless these are the images and labels that a bundle was trained on."""
    about = bundle.manifest.training.get("data")
    trained_on = about if isinstance(about, dict) else {}
    if trained_on.get("digest") != data.digest:
        raise DataError(
            f"'{data.name}' is not what the bundle of --like was trained on "
            f"('{trained_on.get('name')}'): images or labels differ, and so would what is compared"
        )


def check_can_move(bundle: TaskBundle, path: Path) -> None:
    if bundle.extends:
        raise SettingsConflict(
            f"'{path}' extends other tasks, which are of the old backbone, too: move those first, "
            f"then train this one with --extends and without --like"
        )


def check_backbone(bundle: TaskBundle, backbone: Backbone) -> None:
    """SettingsConflict unless a bundle was made for this backbone."""
    made_for = bundle.manifest.backbone
    if made_for.fingerprint != backbone.fingerprint:
        raise SettingsConflict(
            f"the bundle of --like is of the backbone '{made_for.name}', and '{backbone.name}' is "
            f"another: name its folder with --old-backbone, so that both can be compared"
        )
