"""Keep a finished run: copy its results, table and plots to data/results/<date>-<name>, and its table into the README.

    python scripts/publish.py runs/evaluate/demo/<hash> demo [--readme]
    python scripts/publish.py runs/replay/smollm2/<hash> smollm2-replay

Numbers in the README are what a run wrote, never typed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- demo output: written by scripts/publish.py -->", "<!-- end of demo output -->"
KEPT = ("results.json", "table.md", "table.csv", "table.txt", "tuned.json", "profile.json", "provenance.json",
        "settings.yaml", "bench_main.json", "bench_pacer.json", "bench_ablation.json", "check_replay.json",
        "bench_hispec.json", "bench_batch.json", "bench_exits.json", "sweep.json", "checked.json",
        "ablation.json")  # fmt: skip


def portable(text: str, run: Path) -> str:
    """Without this machine's paths: of the real data, of the checkout."""
    data = OmegaConf.load(run / "settings.yaml").paths.data_dir
    for checkout in (ROOT, run.resolve().parents[3]):  # runs/<verb>/<name>/<hash> of any checkout
        text = text.replace(f"{checkout}/", "")
    return text.replace(data, "$PACER_DATA") if data else text


def main(run: Path, name: str, readme: bool) -> None:
    made = json.loads((run / "provenance.json").read_text())
    folder = ROOT / "data" / "results" / f"{made['date'][:10]}-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    for file in KEPT:
        if (run / file).is_file():
            (folder / file).write_text(portable((run / file).read_text(), run))
    for plot in [*(run / "plots").glob("*.png"), *run.glob("*.png")]:
        shutil.copyfile(plot, folder / plot.name)
    print(f"kept in {folder.relative_to(ROOT)}")
    if readme:
        text = (ROOT / "README.md").read_text()
        before, rest = text.split(BEGIN)
        after = rest.split(END)[1]
        place = folder.relative_to(ROOT)
        title = f"What it printed on {made['date'][:10]}, commit {str(made['commit'])[:8]}"
        shown = (
            f"\n<details>\n<summary>{title}</summary>\n\n"
            f"{(run / 'table.md').read_text().strip()}\n\n</details>\n\n"
            f"![Speed of each method over plain decoding, with intervals]({place}/speed.png)\n\n"
        )
        (ROOT / "README.md").write_text(before + BEGIN + shown + END + after)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: {sys.argv[0]} RUN_FOLDER NAME [--readme]")
    main(Path(sys.argv[1]), sys.argv[2], "--readme" in sys.argv[3:])
