"""Manifests of several sets."""

import pytest


@pytest.fixture
def manifests(tmp_path, wav, json_lines) -> dict[str, str]:
    """Sets of three utterances; "both" has the first of "old" and one of "other"."""
    rows = {
        name: [
            {"audio_filepath": wav(tmp_path / f"{name}{i}.wav", 1.0 + i), "text": f"{name} {i}"}
            for i in range(3)
        ]
        for name in ("new", "old", "val", "other")
    }
    rows["both"] = [rows["old"][0], rows["other"][1], {**rows["other"][2], "text": "new 1"}]
    return {name: str(json_lines(tmp_path / f"{name}.json", some)) for name, some in rows.items()}
