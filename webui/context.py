"""Objects that all parts of the page share."""

from dataclasses import dataclass

from common.errors import UsageError
from webui import runs
from webui.catalogue import Recipe
from webui.places import Places
from webui.runs import Run
from webui.use import Models


@dataclass(frozen=True)
class Context:
    """The folders that the page may use, the recipes, and the processes that hold models."""

    places: Places
    recipes: dict[str, Recipe]
    models: Models

    def run(self, name: str | None) -> Run:
        """The run that was chosen. Raises `UsageError`."""
        if not name:
            raise UsageError("choose a run first")
        return runs.find(self.places.runs, name)

    def release_gpu(self, words: list[str]) -> None:
        """Ends the processes that hold models if this command needs a GPU, after their answers."""
        if runs.device_of(words) != "cpu":
            self.models.close()
