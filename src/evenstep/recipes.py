"""Recipes: options that go together, under a name. A recipe is data; docs/recipes.md says what each does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evenstep.errors import ConfigError, did_you_mean

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "mission": {
        "model": "net",
        "optimizer": "sgd",
        "lr": 0.001,
        "momentum": 0.9,
        "lr_schedule": "constant",
        "batch_size": 256,
        "epochs": 10,
    },
    "fast": {
        "model": "whitenet",
        "precision": "auto",
        "lanes": 4,
        "threads": 1,
        "batch_size": 500,
        "epochs": 8,
        "image_sizes": "17,17,25,25,25,32,32,32",
        "augment": True,
        "crop_padding": 2,
        "crop_border": "reflect",
        "flip": "alternate",
        "optimizer": "muon",
        "lr": 0.17,
        "momentum": 0.6,
        "lr_rest": 53.0,
        "weight_decay": 4e-5,
        "lr_schedule": "linear",
        "label_smoothing": 0.2,
        "tta": "flip_shift",
        "evaluate_every": 8,
    },
}


def recipe_values(name: str) -> dict[str, Any]:
    """Return the options of a recipe: ``{key: value}``.

    Args:
        name: the recipe.

    Raises:
        ConfigError: there is no such recipe.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"unknown recipe {name!r}.{did_you_mean(name, RECIPES)} Choose --recipe {' or '.join(RECIPES)}; "
            "`evenstep config show --recipe NAME` lists what it sets."
        )
    return dict(RECIPES[name])
