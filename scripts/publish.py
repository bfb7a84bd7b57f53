"""Keep a finished run: copy its results, table and plots to data/results/<date>-<name>, and its table into the README.

    python scripts/publish.py runs/evaluate/demo/<hash> demo [--readme]
    python scripts/publish.py runs/evaluate/all-smollm2/<hash> smollm2-all [--readme]
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
# What the README shows of a run, between two such lines.
BEGIN, END = "<!-- {}: written by scripts/publish.py -->", "<!-- end of {} -->"
KEPT = ("results.json", "table.md", "table.csv", "table.txt", "tuned.json", "profile.json", "provenance.json",
        "settings.yaml", "bench_main.json", "bench_pacer.json", "bench_ablation.json", "check_replay.json",
        "bench_hispec.json", "bench_batch.json", "bench_exits.json", "sweep.json", "checked.json",
        "ablation.json", "ablation.md", "bench_layerskip.json", "layerskip.md", "bench_all.json",
        "ranks.md", "packed.json", "packed.md")  # fmt: skip


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
        show(run, folder, f"{made['date'][:10]}, commit {str(made['commit'])[:8]}")


def show(run: Path, folder: Path, made: str) -> None:
    """Put a run's table into the README: its ranks where it has any, else all of it."""
    if (run / "ranks.md").is_file():
        what, shown = "ranks", f"Measured on {made}:\n\n{(run / 'ranks.md').read_text().strip()}\n\n"
    else:
        what = "demo output"
        shown = (
            f"<details>\n<summary>What it printed on {made}</summary>\n\n"
            f"{(run / 'table.md').read_text().strip()}\n\n</details>\n\n"
            f"![Speed of each method over plain decoding, with intervals]({folder.relative_to(ROOT)}/speed.png)\n\n"
        )
    begin, end = BEGIN.format(what), END.format(what)
    before, rest = (ROOT / "README.md").read_text().split(begin)
    (ROOT / "README.md").write_text(f"{before}{begin}\n{shown}{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(f"usage: {sys.argv[0]} RUN_FOLDER NAME [--readme]")
    main(Path(sys.argv[1]), sys.argv[2], "--readme" in sys.argv[3:])
