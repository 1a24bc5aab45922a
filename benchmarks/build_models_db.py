"""Write `models_db/` from a folder of verified configs: `build_models_db.py SOURCE [TARGET]`.

SOURCE holds one `config.json` per architecture and an `INDEX.csv` that says where each came
from and what parameter count was published for it. Running it twice writes the same bytes. What
TARGET says of aliases stays (`OF_ALIASES`).
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

from whichlora.store.models import SCHEMA_VERSION, index_of


def entry(row: dict[str, str], source: Path) -> dict[str, Any]:
    """One file of the database."""
    published = row["published_params"]
    return {
        "schema_version": SCHEMA_VERSION,
        "hub_id": row["hub_id"],
        "aliases": row["aliases"].split(),
        "params": int(row["params"]),
        "published_params": int(published) if published.isdecimal() else published,
        "published_from": row["published_from"],
        "check": row["check"],
        "source": row["source"],
        "license": row["license"],
        "gated": {"yes": True, "no": False}.get(row["gated"]),  # null: not known
        "release_year": int(row["release_year"]),
        "note": row["note"],
        **({"draft_note": row["draft_note"]} if row.get("draft_note") else {}),
        "config": json.loads((source / row["file"]).read_text(encoding="utf-8")),
    }


OF_ALIASES = ("positions", "positions_from", "rewritten", "rewritten_from")


def with_positions(value: dict[str, Any], path: Path) -> dict[str, Any]:
    """`value` with what the file at `path` says of aliases: other positions, another type."""
    if not path.is_file():
        return value
    there = json.loads(path.read_text(encoding="utf-8"))
    own = {key: there[key] for key in OF_ALIASES if key in there}
    config = value.pop("config", None)
    return value | own | ({} if config is None else {"config": config})


def main() -> None:
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    source = Path(sys.argv[1])
    beside = Path(__file__).resolve().parent.parent / "models_db"
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else beside
    with (source / "INDEX.csv").open(encoding="utf-8", newline="") as file:
        entries = {
            row["hub_id"].replace("/", "--"): entry(row, source) for row in csv.DictReader(file)
        }
    target.mkdir(exist_ok=True)
    for stem, value in {**entries, "index": index_of(entries)}.items():
        path = target / f"{stem}.json"
        text = json.dumps(with_positions(value, path), indent=1, ensure_ascii=False) + "\n"
        path.write_text(text, encoding="utf-8")
    print(f"{len(entries)} models written to {target}", file=sys.stderr)


if __name__ == "__main__":
    main()
