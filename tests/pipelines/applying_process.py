"""A process that applies waiting files of changes one after another, at random moments.

`python applying_process.py PIPELINE DIMENSION FOLDER SEED PAUSE` moves the files of `FOLDER/waiting` to
`FOLDER/changes` one at a time, and applies each after a pause of at most `PAUSE` seconds.
"""

import random
import sys
import time
from pathlib import Path

from headrace.pipelines.changes import apply_files
from headrace.pipelines.config.model import load_pipeline


def main(pipeline, dimension, folder, seed, pause):
    config, rng, place = load_pipeline(pipeline), random.Random(int(seed)), Path(folder)
    (place / "ready").touch()
    for file in sorted((place / "waiting").iterdir()):
        time.sleep(rng.uniform(0, float(pause)))
        file.rename(place / "changes" / file.name)
        apply_files(config, dimension, place / "changes")


if __name__ == "__main__":
    main(*sys.argv[1:])
