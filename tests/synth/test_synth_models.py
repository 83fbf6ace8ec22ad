"""Models: another file is refused, and so is a second ONNX Runtime."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hibari.tts import ASSETS

from synth.errors import ModelRefused, RuntimeConflict
from synth.hibari_engine import HibariEngine
from synth.models import SHIPPED, load_manifest, require_one_runtime
from synth.phones import Phones, open_session


@pytest.mark.parametrize("name", ["hibari.onnx", "vocab.json", "oov.onnx", "lexicon_us_gold.json.gz"])
def test_one_changed_bit_in_any_file_is_refused(tmp_path: Path, name: str):
    manifest = load_manifest(SHIPPED / "hibari.manifest.json")
    for file in manifest.files:
        shutil.copy(Path(ASSETS) / file, tmp_path)
    manifest.verify(tmp_path)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelRefused, match=name) as caught:
        HibariEngine(tmp_path)
    assert caught.value.code == "model_refused"
    (tmp_path / name).unlink()
    with pytest.raises(ModelRefused, match="cannot be read"):
        HibariEngine(tmp_path)


def test_the_phone_net_is_pinned_too(tmp_path: Path):
    for name in ("phones.onnx", "phones.json"):
        shutil.copy(SHIPPED / name, tmp_path)
    Phones(tmp_path)
    (tmp_path / "phones.json").write_text(json.dumps(list(range(45))))
    with pytest.raises(ModelRefused):
        Phones(tmp_path)


def test_a_graph_with_other_outputs_is_refused():
    hibari = load_manifest(SHIPPED / "hibari.manifest.json")
    with pytest.raises(ModelRefused, match="inputs"):
        open_session((SHIPPED / "phones.onnx").read_bytes(), hibari)


@pytest.mark.parametrize("content", ["{}", "[]", "not json", '{"name": 1}'])
def test_a_broken_manifest_is_refused(tmp_path: Path, content: str):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ModelRefused):
        load_manifest(tmp_path / "x.json")


def distribution(folder: Path, name: str, file: str) -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text(f"{file},,\n")


def test_two_runtimes_are_refused_with_the_fix(tmp_path: Path):
    distribution(tmp_path, "onnxruntime", "onnxruntime/__init__.py")
    distribution(tmp_path, "onnxruntime-extensions", "onnxruntime_extensions/__init__.py")
    require_one_runtime([str(tmp_path)])
    distribution(tmp_path, "onnxruntime-gpu", "onnxruntime/__init__.py")
    with pytest.raises(RuntimeConflict, match="pip uninstall -y onnxruntime onnxruntime-gpu") as caught:
        require_one_runtime([str(tmp_path)])
    assert caught.value.code == "onnxruntime_conflict"
    require_one_runtime()  # what is installed here
