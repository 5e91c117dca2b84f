"""The step of datatrove: targets in order, and a pipeline that is killed and started again."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tiny_generator import SOURCES, tiny_generator

pytest.importorskip("datatrove")

from datatrove.data import Document

from metaphrase.inference.datatrove import GenerateStep

NUM_FILES, LINES_PER_FILE = 4, 30
PIPELINE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from metaphrase.inference.datatrove import GenerateStep

if __name__ == "__main__":
    folder, model, output = sys.argv[1:]
    steps = [
        JsonlReader(f"{folder}/in", add_file_path=False),
        GenerateStep(model, chunk_size=4, temperature=3.0, loading={"device": "cpu"}),
        JsonlWriter(f"{folder}/{output}", compression=None),
    ]
    LocalPipelineExecutor(steps, tasks=4, workers=2, logging_dir=f"{folder}/{output}_logs").run()
"""


@pytest.mark.parametrize("num_targets", [1, 3])
def test_documents_keep_their_order_and_get_their_targets(cli_model, num_targets):
    documents = [Document(text, str(number)) for number, text in enumerate([*SOURCES, ""])]
    options = {"num_beams": 3, "num_return_sequences": num_targets}
    step = GenerateStep(cli_model, key="de", chunk_size=2, loading={"device": "cpu"}, **options)
    results = list(step(iter(documents)))
    assert results == documents and step.stats["documents"].total == 6
    rows = tiny_generator(kind="byte").generate_n_best([*SOURCES, ""], return_scores=False, **options)
    texts = [[item.text for item in row] for row in rows]
    assert [document.metadata["de"] for document in results] == (
        texts if num_targets > 1 else [row[0] for row in texts]
    )


@pytest.mark.slow
def test_a_pipeline_that_was_killed_ends_with_the_same_bytes(cli_model, tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(NUM_FILES):
        rows = [{"text": f"{SOURCES[n % 5]} {SOURCES[number]}", "id": f"{number}_{n}"} for n in range(LINES_PER_FILE)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "in" / f"{number}.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "pipeline.py").write_text(PIPELINE, encoding="utf-8")

    def start(output):
        command = [sys.executable, str(tmp_path / "pipeline.py"), str(tmp_path), cli_model, output]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)

    def contents(output):
        return {path.name: path.read_bytes() for path in (tmp_path / output).glob("*.jsonl")}

    assert start("whole").wait(300) == 0
    process, completions = start("out"), tmp_path / "out_logs" / "completions"
    while process.poll() is None and not (completions.is_dir() and any(completions.iterdir())):
        time.sleep(0.01)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    num_finished = len(list(completions.iterdir()))
    assert start("out").wait(300) == 0
    assert 1 <= num_finished <= NUM_FILES and len(contents("whole")) == NUM_FILES
    assert contents("out") == contents("whole")
