"""The example notebook runs from the first cell to the last, in a kernel: its functions reach the processes."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "own_loop.ipynb"


def test_the_notebook_trains_stops_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "jupyter"))
    monkeypatch.delenv("RANK", raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs belong to whoever ran it"
    check = "import json; print(json.dumps(losses))"
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    losses = json.loads(notebook.cells[-1].outputs[0].text)
    assert list(losses) == [str(step) for step in range(1, 21)]
    assert losses["20"] < 0.9 * losses["11"] < losses["1"]
    assert (tmp_path / "checkpoints" / "step-00000020" / "manifest.json").exists()
