"""What all parts of the page share."""

from dataclasses import dataclass

from webui.commands import Recipe
from webui.places import Places
from webui.use import Models


@dataclass(frozen=True)
class Context:
    """The folders that the page may use, the recipes by name, and the processes that hold models."""

    places: Places
    recipes: dict[str, Recipe]
    models: Models
