"""Golden files of every part's settings: a changed key, default or bound shows in review.

`make schemas` writes them anew, as does `python -m tests.settings_schemas`.
"""

from __future__ import annotations

import json
from pathlib import Path

from configuration.reading import Section
from edge.settings import EdgeSettings
from tests.deploy import values_schema
from worker.settings import WorkerSettings

HERE = Path(__file__).parent
GOLDEN: dict[type[Section], Path] = {
    WorkerSettings: HERE / "worker" / "golden" / "settings_schema.json",
    EdgeSettings: HERE / "edge" / "golden" / "settings_schema.json",
}


def schema_of(settings: type[Section]) -> str:
    """Its JSON schema, pretty and sorted."""
    return json.dumps(settings.model_json_schema(), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    for settings, file in GOLDEN.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(schema_of(settings))
    values_schema.main()


if __name__ == "__main__":
    main()
